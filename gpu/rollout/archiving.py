"""When a ledger snapshot is due, and that what was written is recorded.

The work is an archivist's, in a process of its own: the manager only says up to which slot, and records the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gpu.rollout.signal import wait_event
from storage.schema import LedgerSnapshot

if TYPE_CHECKING:
    from gpu.rollout.manager import RolloutManager

Archive = Callable[[int], Awaitable[LedgerSnapshot]]
"""Writes the ledger as it is before a slot; see `storage.archivist`."""
MAX_BACKOFF_S = 300.0

log = logging.getLogger(__name__)


class Archiving:
    """One manager's. `problem` says why the newest snapshot is older than it should be."""

    def __init__(self, manager: RolloutManager, every: int) -> None:
        self._manager, self._every = manager, every
        self._failures = 0
        self._recorded = -1
        self.problem = ""

    @property
    def lag(self) -> int:
        """Durable segments since the newest snapshot: what a restore would read."""
        snapshot = self._manager.control.ledger.snapshot
        return self._manager.control.books.journal.slot - (snapshot.slot if snapshot else 0)

    async def run(self, archive: Archive) -> None:
        """A snapshot after every `every` segments, until the run ends. A failure is shown and tried again: without a
        new snapshot a restore only takes longer."""
        manager = self._manager
        while not manager.control.ledger.finished and manager.callers.fatal is None:
            event = manager.changed.current()
            # An archivist must know the snapshot before: the archive that came with it may have replaced others.
            if self.lag < self._every or manager.control.books.journal.durable_seq < self._recorded:
                await wait_event(event, None)
                continue
            slot = manager.control.books.journal.slot
            try:
                written = await archive(slot)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with snapshots, the run goes on
                await self._failed(slot, error)
                continue
            self._failures, self.problem = 0, ""
            if not manager.control.ledger.finished:
                self._recorded = manager.control.books.record(written)
                manager.appended()

    async def _failed(self, slot: int, error: Exception) -> None:
        self._failures += 1
        self.problem = f"slot {slot}, try {self._failures}: {error}"
        log.error("op=archive slot=%d try=%d decision=again reason=%r", slot, self._failures, error)
        await asyncio.sleep(min(MAX_BACKOFF_S, 2.0**self._failures))
