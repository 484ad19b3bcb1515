"""Operations under a hold, which end before the hold's expiry reopens admission.

A driver that stops renewing may still have an activation or a drain open in the manager. Were admission reopened beside
it, its effect would come in the middle of new work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from storage.errors import HoldRefused

T = TypeVar("T")


class Operations:
    """The open operations of each hold."""

    def __init__(self) -> None:
        self._open: dict[int, set[asyncio.Task[Any]]] = {}
        self._aborted: set[asyncio.Task[Any]] = set()

    async def under(self, hold: int, work: Coroutine[Any, Any, T]) -> T:
        """Do `work`; a cancelled caller ends it too. Raises `HoldRefused` when the hold ends first."""
        task = asyncio.ensure_future(work)
        self._open.setdefault(hold, set()).add(task)
        try:
            await asyncio.wait([task])
            if task in self._aborted and task.cancelled():
                raise HoldRefused(
                    f"hold {hold} expired in the middle of an operation, which was aborted",
                    expected="a hold that its owner renews",
                    action="acquire a hold again and repeat the operation",
                    code="expired",
                )
            return task.result()
        finally:
            task.cancel()
            self._aborted.discard(task)
            self._open[hold].discard(task)
            if not self._open[hold]:
                del self._open[hold]

    async def abort(self, hold: int) -> int:
        """End every operation of a hold, and wait until they have ended; returns how many there were."""
        tasks = [task for task in self._open.get(hold, ()) if not task.done()]
        for task in tasks:
            self._aborted.add(task)
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return len(tasks)
