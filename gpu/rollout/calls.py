"""Who may call the manager, and how its waits end: incarnations, driver tokens, and the fatal error."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import msgspec

from gpu.rollout.messages import Caller, Found
from gpu.rollout.signal import Signal, wait_event
from storage.clock import Clock
from storage.errors import RunBusy, RunFenced, TidegateError


class Attached(msgspec.Struct, frozen=True):
    """A driver's place: its caller identity, the owner it replaced, why the run is over ("" while it is not), and what
    the incarnation found when it began."""

    caller: Caller
    replaced: str
    finished: str
    found: Found = Found()


class Callers:
    """The newest driver token of an incarnation, and who may get the next one.

    An owner is a flow run; its attempts follow each other freely. Another owner is let in when it takes over on
    purpose, or when the driver made no call for `silence_s`. Whoever was displaced in this way never comes back, so
    that two owners cannot take the run from each other by turns; and an attempt never displaces a later one of the
    same owner (a process that slept through its own retry).
    """

    def __init__(self, incarnation: int, clock: Clock, silence_s: float, changed: Signal) -> None:
        self._incarnation, self._clock, self._silence_s, self._changed = incarnation, clock, silence_s, changed
        self.token = 0
        self.owner = ""
        self.place = ""
        self.attempt = 0
        self._displaced: dict[str, str] = {}
        self._seen = 0.0
        self._open = 0
        self.fatal: TidegateError | None = None

    def alive(self) -> None:
        """Raises the fatal error once there is one."""
        if self.fatal is not None:
            raise self.fatal

    def fail(self, error: BaseException) -> TidegateError:
        """Remember the first cause; every waiter and every later call gets it."""
        if self.fatal is None:
            self.fatal = (
                error
                if isinstance(error, TidegateError)
                else TidegateError(
                    f"the manager failed: {error!r}",
                    expected="no internal error",
                    action="retry the flow run; it resumes",
                    code="manager",
                )
            )
        self._changed.notify()
        return self.fatal

    def check(self, caller: Caller) -> None:
        """Raises `RunFenced` for an older incarnation or driver."""
        self.alive()
        if caller.incarnation != self._incarnation or (caller.token and caller.token != self.token):
            raise RunFenced(
                f"a call of incarnation {caller.incarnation}, driver {caller.token}",
                expected=f"incarnation {self._incarnation}, driver {self.token}",
                action="stop; somebody newer drives this run",
            )
        if caller.token:
            self._seen = self._clock.monotonic()

    @contextlib.contextmanager
    def call(self, caller: Caller) -> Generator[None]:
        """A driver's call, open until it ends: a newer driver waits for that."""
        self.check(caller)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._changed.notify()

    async def attach(self, owner: str, take_over: bool, place: str, attempt: int) -> Caller:
        """Refuse older tokens from now on, wait until their open calls ended. `attempt` counts those of an owner.

        Raises `RunFenced` for a displaced owner, with or without `take_over`, and for an attempt older than the newest
        of its owner; `RunBusy` for a live driver of another owner."""
        self.alive()
        self._refuse_displaced(owner, attempt)
        if self.owner not in ("", owner):
            self._refuse_busy(take_over)
            self._displaced[self.owner] = owner
        self.owner, self.place, self.attempt = owner, place, attempt
        self.token += 1
        mine = self.token
        self._seen = self._clock.monotonic()
        self._changed.notify()
        while self._open:
            event = self._changed.current()
            await wait_event(event, 1.0)
        self.alive()
        return Caller(self._incarnation, mine)

    def _refuse_displaced(self, owner: str, attempt: int) -> None:
        if owner in self._displaced:
            raise RunFenced(
                f"{owner}, from which {self._displaced[owner]} took this run",
                expected="a flow run that nobody displaced",
                action="start a new flow run of this name; it may take over",
                code="displaced",
            )
        if owner == self.owner and attempt < self.attempt:
            raise RunFenced(
                f"attempt {attempt} of {owner}",
                expected=f"attempt {self.attempt} or later",
                action="stop; a newer attempt of the same flow run drives this run",
            )

    def _refuse_busy(self, take_over: bool) -> None:
        silent = self._clock.monotonic() - self._seen
        if silent < self._silence_s and not take_over:
            raise RunBusy(
                f"this run is driven by {self.owner}, which called {silent:.0f} s ago",
                expected="no other live driver",
                action="wait for it, cancel it, or take over on purpose: `--take-over`, or the parameter take_over",
            )
