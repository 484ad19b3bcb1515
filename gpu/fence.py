"""A fenced incarnation notices it and says so, also when it is idle and writes nothing, or when its manager is gone.

The journal is the only witness: its newest segment names the incarnation that owns the run now.
"""

from __future__ import annotations

import asyncio
import logging

from gpu.rollout.manager import RolloutManager
from storage.errors import RunFenced, TidegateError
from storage.filesystem import Store
from storage.journal import read_segment
from storage.runs import RunPaths

log = logging.getLogger(__name__)


async def until_fenced(manager: RolloutManager, store: Store, run: str, every_s: float) -> None:
    """Return when a newer incarnation owns the run, and make that the manager's fatal error unless it has one.

    A manager that writes finds out by itself; an idle one reads the slot it would write next, every `every_s` seconds.
    """
    while not isinstance(manager.callers.fatal, RunFenced):
        await asyncio.sleep(every_s)
        slot = manager.control.books.journal.slot
        try:
            fence = await asyncio.to_thread(_newer, store, run, manager.incarnation, slot)
        except (TidegateError, OSError) as error:
            log.warning("op=fence run=%s decision=ask_again reason=%s", run, error)
            continue
        if fence is not None:
            manager.fail(fence)
            return


def fence_of(store: Store, run: str, incarnation: int) -> RunFenced | None:
    """Why `incarnation` does not own the run any more; None when it still does. Reads the end of the journal, from the
    newest slot that the store lists. Raises what reading raises."""
    slots = [int(key[-18:-6]) for key in store.list(RunPaths(run).journal) if key.endswith(".arrow")]
    return _newer(store, run, incarnation, max(slots, default=0))


def _newer(store: Store, run: str, incarnation: int, slot: int) -> RunFenced | None:
    while (segment := read_segment(store, run, slot)) is not None:
        if segment.header.incarnation > incarnation:
            return RunFenced(
                f"slot {slot} was written by incarnation {segment.header.incarnation}",
                expected=f"incarnation {incarnation} to be the newest",
                action="stop; the newer incarnation owns the run",
            )
        slot += 1
    return None
