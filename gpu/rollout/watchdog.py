"""What time does in a manager: holds expire, backoff ends, verdicts are tried again, circles of waits get a name."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from gpu.rollout.messages import Hold, Wait
from storage.clock import Clock

if TYPE_CHECKING:
    from gpu.rollout.manager import RolloutManager

TICK_S = 0.1
STANDS_S = 2.0

log = logging.getLogger(__name__)


class Watchdog:
    """Looks after one manager. `run` ends only with the error that ends the incarnation."""

    def __init__(self, manager: RolloutManager, clock: Clock) -> None:
        self._manager, self._clock = manager, clock
        self._named = ""
        self._seen: tuple[str, int] = ("", 0)
        self._since = 0.0

    async def run(self) -> None:
        control = self._manager.control
        while True:
            await asyncio.sleep(TICK_S)
            for hold in control.admission.late():
                await self._expire(hold)
            control.tick()
            control.check_conservation()
            self.look()
            due = control.scheduler.backoff.next_due()
            if due is not None and due <= self._clock.monotonic():
                self._manager.changed.notify()

    async def _expire(self, hold: Hold) -> None:
        """What runs under the hold ends first; then admission reopens, and engines it paused go on."""
        aborted = await self._manager.operations.abort(hold.hold)
        self._manager.control.admission.release(hold.hold)
        log.warning("op=expire hold=%d owner=%s purpose=%s aborted=%d", hold.hold, hold.owner, hold.purpose, aborted)
        self._manager.pausing.end([hold.hold], self._manager.engines)
        self._manager.changed.notify()

    def look(self) -> str:
        """Note what submission and workers wait for; returns a circle of waits, "" when there is none."""
        control, waits = self._manager.control, self._manager.waits
        waits.note("submission", control.scheduler.why_idle())
        busy = control.scheduler.active or len(control.results.judging) or control.results.unpublished
        waits.note("workers", None if busy else Wait("attempts to run", "submission", "work", "submission"))
        circle = self._standing(waits.circle())
        if circle and circle != self._named:
            log.error("op=watchdog decision=wait_for_a_person circle=%s", circle)
        self._named = circle
        return circle

    def _standing(self, circle: str) -> str:
        """The circle, once it has stood for a while in which nothing was recorded: each hand-over from one component
        to the next looks like one for a moment."""
        seen = circle, self._manager.control.books.journal.last_seq
        if seen != self._seen:
            self._seen, self._since = seen, self._clock.monotonic()
        return circle if self._clock.monotonic() - self._since >= STANDS_S else ""
