"""Time is passed in. Nothing in `storage` or `gpu.rollout` reads the wall clock by itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """`monotonic` (seconds, arbitrary origin) decides; `wall` (Unix seconds) is only written down for people."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told to; the deterministic fake for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
