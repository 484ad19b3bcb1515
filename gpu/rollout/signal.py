"""Waking waiters without losing a wake-up."""

from __future__ import annotations

import asyncio
from typing import Any


class Signal:
    """`current()` before looking at a condition, then wait on what it returned: a notify in between is not lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def current(self) -> asyncio.Event:
        return self._event

    def notify(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()


async def wait_event(event: asyncio.Event, timeout: float | None) -> bool:
    """Whether the event came within `timeout` seconds (None: wait for ever)."""
    if timeout is not None and timeout <= 0:
        return event.is_set()
    # Not `wait_for`: on Python 3.11 it swallows a cancellation that comes at the moment the event is set.
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
        return True
    except TimeoutError:
        return False


def seen(done: asyncio.Future[Any]) -> None:
    """A callback for futures that nobody may come to await: their exception is known, not unhandled."""
    if not done.cancelled():
        done.exception()
