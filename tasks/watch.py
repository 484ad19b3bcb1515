"""A driver notices within a bound that the manager or the trainer is dead or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from storage.errors import ActorLost
from tasks.session import Session

T = TypeVar("T")


async def watched(one: Session, work: Coroutine[Any, Any, T]) -> T:
    """Do `work` while manager and trainer answer. A process that died fails the next call to it at once; one that hangs
    is given up after `alive_s`. Raises `ActorLost`."""
    main = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_watch(one))
    try:
        await asyncio.wait([main, watch], return_when=asyncio.FIRST_COMPLETED)
        if not main.done():
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)
            watch.result()
        return await main
    finally:
        for task in (main, watch):
            task.cancel()
        await asyncio.gather(main, watch, return_exceptions=True)


async def _watch(one: Session) -> None:
    bound = one.spec.steps.alive_s
    while True:
        await asyncio.sleep(bound / 3)
        for name, ask in (("manager", "condition"), ("trainer", "status")):
            process = getattr(one, name)
            try:
                async with asyncio.timeout(bound):
                    await getattr(process, ask)()
            except ActorLost:
                if not one.moving and process is getattr(one, name):  # else this driver replaced it
                    raise
            except TimeoutError as error:
                raise ActorLost(
                    f"the {name} did not answer for {bound:.0f} s",
                    expected="an answer",
                    action="retry the flow run; a process that hangs is replaced",
                ) from error
