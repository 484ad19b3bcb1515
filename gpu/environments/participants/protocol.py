"""Checkpoint control of one host: which operation is allowed in which phase, and what it answers.

Pure and synchronous; a host wraps it and does the work. Each operation is idempotent per checkpoint id: repeated, it
gets the recorded answer. Whoever has an active checkpoint holds a lease on the host until its deadline; when the
controller stays silent past it, the host opens by itself and nothing of that checkpoint can be published any more.

    idle ─prepare─► preparing ─► prepared ─commit─► committing ─► committed ─┐
     ▲ ▲                └───────────────┴──────────────┴─── resume, abort, ───┘
     │ └──────────────────────────────────────────────────── end of the lease
     ├─restore─► restoring ─► restored ─resume─► idle
     └────────── abort, end of the lease ──┘

A deadline is Unix seconds on the wire; it is measured once, on arrival, and then counts on the monotonic clock, so that
a step of the wall clock moves no lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from gpu.environments.participants.errors import CheckpointConflict, StaleCheckpoint, WrongPhase
from storage.clock import Clock
from storage.errors import DeadlineExceeded

LONGEST_LEASE_S = 3600.0
"""A deadline further away is refused: it is a mistake, or the clocks of two machines differ."""
REMEMBERED = 256
"""Finished checkpoint ids that a host knows."""


class Phase(Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    COMMITTED = "committed"
    RESTORING = "restoring"
    RESTORED = "restored"


class Operation(Enum):
    PREPARE = "prepare"
    COMMIT = "commit"
    RESTORE = "restore"
    RESUME = "resume"
    ABORT = "abort"
    STATUS = "status"


class Outcome(Enum):
    """How a checkpoint ended on a host. `FENCED`: it never began here, and now never will."""

    RESUMED = "resumed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FENCED = "fenced"


class _Step(NamedTuple):
    during: Phase
    after: Phase


_STEPS = {
    (Operation.PREPARE, Phase.IDLE): _Step(Phase.PREPARING, Phase.PREPARED),
    (Operation.COMMIT, Phase.PREPARED): _Step(Phase.COMMITTING, Phase.COMMITTED),
    (Operation.RESTORE, Phase.IDLE): _Step(Phase.RESTORING, Phase.RESTORED),
}
_LOADING = (Phase.RESTORING, Phase.RESTORED)


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """Work that the host does now, then reports with `done` or `failed`."""

    operation: Operation
    checkpoint: str
    before: Phase


@dataclass(frozen=True, slots=True)
class Recorded:
    """The answer that the same operation had before; None while its work goes on."""

    answer: bytes | None


class Ended(NamedTuple):
    """`stays`: what was restored under this checkpoint is there; None where nothing was."""

    checkpoint: str
    outcome: Outcome
    stays: bool | None


class Status(NamedTuple):
    phase: Phase
    checkpoint: str | None
    lease_s: float | None


@dataclass(slots=True)
class _Asked:
    digest: str
    answer: bytes | None = None


@dataclass(slots=True)
class _Active:
    checkpoint: str
    until: float
    asked: dict[Operation, _Asked] = field(default_factory=lambda: {})
    work: Begun | None = None


class Control:
    """Raises `CheckpointConflict`, `StaleCheckpoint`, `WrongPhase`, and `DeadlineExceeded` for a deadline that is past
    or too far. `ended` hears of each checkpoint that ends here, before anything else happens."""

    def __init__(self, clock: Clock, ended: Callable[[Ended], None] = lambda ended: None) -> None:
        self._clock, self._ended = clock, ended
        self._active: _Active | None = None
        self._finished: OrderedDict[str, Ended] = OrderedDict()
        self._phase = Phase.IDLE

    def admits(self) -> bool:
        """Sessions may be used."""
        return self.status().phase is Phase.IDLE

    def status(self) -> Status:
        self._expire()
        active = self._active
        if active is None:
            return Status(self._phase, None, None)
        return Status(self._phase, active.checkpoint, max(0.0, active.until - self._clock.monotonic()))

    def begin(self, operation: Operation, checkpoint: str, deadline: float, digest: str) -> Begun | Recorded:
        """Prepare, commit or restore. `digest` is of what is asked besides the deadline. A repetition extends the
        lease to its own deadline."""
        self._expire()
        self._refuse_finished(operation, checkpoint)
        active = self._active
        if active is not None and active.checkpoint != checkpoint:
            raise CheckpointConflict(
                f"{operation.value} of checkpoint {checkpoint} while {active.checkpoint} is {self._phase.value}",
                expected="one checkpoint at a time",
                action=f"resume or abort {active.checkpoint}, or wait for the end of its lease",
            )
        until = self._until(operation, checkpoint, deadline)
        asked = active.asked.get(operation) if active is not None else None
        if active is not None and asked is not None:
            if asked.digest != digest:
                raise CheckpointConflict(
                    f"{operation.value} of checkpoint {checkpoint} with other content than before",
                    expected="the same content under the same id",
                    action="use a new checkpoint id",
                    code="content",
                )
            active.until = max(active.until, until)
            return Recorded(asked.answer)
        step = _STEPS.get((operation, self._phase))
        if step is None:
            raise self._wrong(operation, checkpoint)
        active = self._active = active or _Active(checkpoint, until)
        active.until = max(active.until, until)
        active.asked[operation] = _Asked(digest)
        active.work = Begun(operation, checkpoint, self._phase)
        self._phase = step.during
        return active.work

    def check(self, begun: Begun) -> None:
        """Raises `StaleCheckpoint` when the work was overtaken by the end of its checkpoint."""
        self._expire()
        if self._active is None or self._active.work is not begun:
            raise StaleCheckpoint(
                f"{begun.operation.value} of checkpoint {begun.checkpoint}, which has ended meanwhile",
                expected="a checkpoint that is still active",
                action="nothing: no part of it takes effect",
            )

    def done(self, begun: Begun, answer: bytes) -> None:
        """The work is done and its answer stands. Raises as `check`: then nothing of it may take effect."""
        self.check(begun)
        assert self._active is not None, "checked"
        self._active.asked[begun.operation].answer = answer
        self._active.work = None
        self._phase = _STEPS[begun.operation, begun.before].after

    def failed(self, begun: Begun) -> None:
        """The work raised: the phase is the one before it, and the operation may be asked for again."""
        active = self._active
        if active is None or active.work is not begun:
            return
        del active.asked[begun.operation]
        active.work = None
        self._phase = begun.before
        if self._phase is Phase.IDLE:
            self._active = None

    def end(self, operation: Operation, checkpoint: str) -> Ended:
        """Resume or abort. An id that was never seen is fenced: its lost request takes no effect when it comes. Both
        open the host; after a restore, resume keeps what was loaded, abort drops it."""
        self._expire()
        known = self._finished.get(checkpoint)
        if known is not None:
            if known.stays is not None and known.stays is not (operation is Operation.RESUME):
                raise _stale(operation, known)
            return known
        if self._active is None or self._active.checkpoint != checkpoint:
            return self._finish(Ended(checkpoint, Outcome.FENCED, None))
        if operation is Operation.RESUME and self._phase is Phase.RESTORING:
            raise self._wrong(operation, checkpoint)
        resumed = operation is Operation.RESUME
        return self._close(Outcome.RESUMED if resumed else Outcome.ABORTED, stays=resumed)

    # ------------------------------------------------------------------ inner

    def _expire(self) -> None:
        """What was restored under a checkpoint whose lease is over goes: nobody has taken it over."""
        if self._active is not None and self._clock.monotonic() >= self._active.until:
            self._close(Outcome.EXPIRED, stays=False)

    def _close(self, outcome: Outcome, *, stays: bool) -> Ended:
        assert self._active is not None, "a checkpoint is active"
        ended = Ended(self._active.checkpoint, outcome, stays if self._phase in _LOADING else None)
        self._active, self._phase = None, Phase.IDLE
        self._ended(ended)
        return self._finish(ended)

    def _finish(self, ended: Ended) -> Ended:
        self._finished[ended.checkpoint] = ended
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
        return ended

    def _refuse_finished(self, operation: Operation, checkpoint: str) -> None:
        known = self._finished.get(checkpoint)
        if known is not None:
            raise _stale(operation, known)

    def _until(self, operation: Operation, checkpoint: str, deadline: float) -> float:
        left = deadline - self._clock.wall()
        if not 0 < left <= LONGEST_LEASE_S:
            raise DeadlineExceeded(
                f"{operation.value} of checkpoint {checkpoint} with a deadline {left:.1f} s from now",
                expected=f"one that is ahead, by {LONGEST_LEASE_S:.0f} s at most",
                action="take a later deadline, or correct the clocks of the machines",
                code="deadline_past" if left <= 0 else "deadline_far",
            )
        return self._clock.monotonic() + left

    def _wrong(self, operation: Operation, checkpoint: str) -> WrongPhase:
        allowed = sorted({phase.value for one, phase in _STEPS if one is operation})
        return WrongPhase(
            f"{operation.value} of checkpoint {checkpoint} while the host is {self._phase.value}",
            expected=" or ".join(allowed) or "no restore under way",
            action="ask for the status, then resume or abort what is active",
        )


def _stale(operation: Operation, known: Ended) -> StaleCheckpoint:
    return StaleCheckpoint(
        f"{operation.value} of checkpoint {known.checkpoint}, which is {known.outcome.value}",
        expected="an id that was not used before",
        action="use a new checkpoint id",
    )
