"""When an attempt of a flow run must end, and what may still begin before that.

The end is a wall-clock limit, a SIGTERM with its grace, or the appearing of a notice file, whichever comes first. It is
only ever brought forward. Before it lies the moment from which a publication would no longer fit, measured from the
last ones: the attempt stops then, and no step begins that would be committed later. SIGTERM says stop at once, because
whoever sent it wants the process to end. The rest of the time belongs to the publication, and a little to leaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import Awaitable, Generator
from pathlib import Path
from typing import TypeVar

from gpu.rollout.signal import Signal, seen, wait_event
from gpu.spec import DeadlineSpec
from storage.clock import Clock, SystemClock
from storage.errors import TidegateError

T = TypeVar("T")
log = logging.getLogger(__name__)
LOOK_S = 0.5
"""Between two looks at the clock and at the notice file."""
LEAVE_S = 10.0
"""At the very end, to tell Prefect how the attempt ended and to leave, at most a third of what there is. A process
that also ends a Ray cluster and a Prefect server of its own needs 4 to 6 s for that when nothing else runs."""
KEPT = 5
SPREAD = 1.5
"""A publication takes at most so many times the longest of the last ones, for planning."""
UNLIMITED = DeadlineSpec(None, 0.0, 30.0, None)


class Ending(TidegateError):
    """The attempt stops here, before its time is over. Caught by the driver, which publishes and then ends."""

    default_code = "ending"

    def __init__(self, reason: str, at: str) -> None:
        super().__init__(f"{reason}: stopped {at}", expected="the end of the attempt", action="resume the run")
        self.reason, self.at = reason, at


class Deadline:
    """One attempt's. Times are of the clock's monotonic seconds."""

    def __init__(self, spec: DeadlineSpec = UNLIMITED, clock: Clock | None = None) -> None:
        self._spec, self._clock = spec, clock or SystemClock()
        self._began = self._clock.monotonic()
        self._trainings: deque[float] = deque(maxlen=KEPT)
        self._publications: deque[float] = deque(maxlen=KEPT)
        self._changed = Signal()
        self._at_once = False
        self._read = False
        self.reason = ""
        self.publishing = False
        """Nothing is left to do but to publish."""
        self.ends: float | None = None
        self.leave: float | None = None
        """When to stop waiting for anything."""
        self.stopping = asyncio.Event()
        if spec.limit_s is not None:
            self._bring_forward(f"the attempt's limit of {spec.limit_s:g} s", spec.limit_s)

    # ------------------------------------------------------------------ what is known

    def now(self) -> float:
        return self._clock.monotonic()

    def notice(self, reason: str, grace_s: float, *, at_once: bool = False) -> None:
        """The attempt ends in `grace_s` seconds at the latest; `at_once`: nothing new begins."""
        self._bring_forward(reason, grace_s)
        self._at_once = self._at_once or at_once
        self._look()
        self._changed.notify()

    def _bring_forward(self, reason: str, seconds: float) -> None:
        ends = self.now() + seconds
        if self.ends is None or ends < self.ends:
            self.ends, self.leave, self.reason = ends, ends - min(LEAVE_S, seconds / 3), reason

    def trained(self, seconds: float) -> None:
        """A step took so long from its lease to its commit."""
        self._trainings.append(seconds)

    def published(self, seconds: float) -> None:
        """A checkpoint took so long from its hold to its record."""
        self._publications.append(seconds)

    # ------------------------------------------------------------------ what fits

    @property
    def reserve(self) -> float:
        """Seconds that a publication may take."""
        return max(self._spec.reserve_s, SPREAD * max(self._publications, default=0.0))

    def latest(self) -> float | None:
        """The moment from which a publication does not fit any more; None: there is no end."""
        return None if self.leave is None else self.leave - self.reserve

    def fits(self) -> bool:
        """Whether a step that begins to train now is committed before `latest`."""
        latest = self.latest()
        if latest is None:
            return True
        return not self._at_once and self.now() + max(self._trainings, default=0.0) < latest

    def left(self) -> float | None:
        """Seconds until `leave`."""
        return None if self.leave is None else max(0.0, self.leave - self.now())

    def check(self, at: str) -> None:
        """Raises `Ending` when it is time to stop."""
        self._look()
        if self.stopping.is_set():
            raise Ending(self.reason, at)

    def check_step(self, at: str) -> None:
        """Raises `Ending` when a step that begins to train now would be committed too late."""
        self.check(at)
        if not self.fits():
            self.stopping.set()
            raise Ending(self.reason, at)

    def _look(self) -> None:
        latest = self.latest()
        if latest is not None and (self._at_once or self.now() >= latest):
            self.stopping.set()

    # ------------------------------------------------------------------ waiting

    async def unless(self, work: Awaitable[T], at: str) -> T:
        """Do `work`, which may be given up half-way, until it is time to stop. Raises `Ending`."""
        doing = asyncio.ensure_future(work)
        doing.add_done_callback(seen)
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait([doing, stop], return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return await doing
        finally:
            stop.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait([doing])
        raise Ending(self.reason, at)

    async def watch(self) -> None:
        """Sets `stopping` when it is time to stop; returns when it is time to leave."""
        while True:
            event = self._changed.current()
            if self._spec.notice is not None and not self._read:
                self._heed(self._spec.notice, await asyncio.to_thread(_read, Path(self._spec.notice)))
            self._look()
            left = self.left()
            if left == 0.0:
                return
            latest = self.latest()
            until = [LOOK_S, *[moment - self.now() for moment in (latest, self.leave) if moment is not None]]
            await wait_event(event, min([wait for wait in until if wait > 0.0], default=LOOK_S))

    def _heed(self, path: str, text: str | None) -> None:
        if text is None:
            return
        self._read = True
        grace = self._spec.grace_s
        with contextlib.suppress(
            ValueError
        ):  # a notice that says something else than a number is a notice all the same
            grace = float(text)
        self.notice(f"the notice in {path}", grace if grace > 0 else self._spec.grace_s)

    @contextlib.contextmanager
    def hearing(self) -> Generator[None]:
        """The first SIGTERM of this process is a notice; a second one does what SIGTERM did before, which ends the
        process at once. Signals reach only a program's main thread: elsewhere nothing is changed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, loop = signal.getsignal(signal.SIGTERM), asyncio.get_running_loop()

        def heard(number: int, frame: object) -> None:
            signal.signal(signal.SIGTERM, before)
            loop.call_soon_threadsafe(lambda: self.notice("SIGTERM", self._spec.grace_s, at_once=True))

        signal.signal(signal.SIGTERM, heard)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is heard:
                signal.signal(signal.SIGTERM, before)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("op=notice path=%s decision=look_again reason=%s", path, error)
        return None
