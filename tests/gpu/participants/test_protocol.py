"""Checkpoint control as a state machine: every operation in every phase, sequences, and time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.environments.participants.errors import CheckpointConflict, StaleCheckpoint, WrongPhase
from gpu.environments.participants.protocol import (
    LONGEST_LEASE_S,
    REMEMBERED,
    Begun,
    Control,
    Ended,
    Operation,
    Outcome,
    Phase,
    Recorded,
)
from storage.clock import VirtualClock
from storage.errors import DeadlineExceeded, TidegateError

WORK = (Operation.PREPARE, Operation.COMMIT, Operation.RESTORE)
LEASE_S = 10.0


class Bench:
    """A control whose work is ended by hand; keeps what ended, and what is under way."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1000.0)
        self.ended: list[Ended] = []
        self.control = Control(self.clock, self.ended.append)
        self.work: Begun | None = None

    @property
    def phase(self) -> Phase:
        return self.control.status().phase

    def ask(self, operation: Operation, checkpoint: str = "a", digest: str = "d") -> Begun | Recorded | Ended:
        if operation not in WORK:
            return self.control.end(operation, checkpoint)
        found = self.control.begin(operation, checkpoint, self.clock.wall() + LEASE_S, digest)
        if isinstance(found, Begun):
            self.work = found
        return found

    def done(self, answer: bytes = b"answer") -> None:
        assert self.work is not None
        self.control.done(self.work, answer)

    def to(self, phase: Phase) -> Bench:
        for step in {
            Phase.IDLE: (),
            Phase.PREPARING: (Operation.PREPARE,),
            Phase.PREPARED: (Operation.PREPARE, "done"),
            Phase.COMMITTING: (Operation.PREPARE, "done", Operation.COMMIT),
            Phase.COMMITTED: (Operation.PREPARE, "done", Operation.COMMIT, "done"),
            Phase.RESTORING: (Operation.RESTORE,),
            Phase.RESTORED: (Operation.RESTORE, "done"),
        }[phase]:
            self.done() if isinstance(step, str) else self.ask(step)
        assert self.phase is phase
        return self


JOINS, SAME = "joins the work", "the recorded answer"
TABLE = {
    # phase             prepare   commit        restore     resume            abort
    Phase.IDLE:        (Begun,    WrongPhase,   Begun,      Outcome.FENCED,   Outcome.FENCED),
    Phase.PREPARING:   (JOINS,    WrongPhase,   WrongPhase, Outcome.RESUMED,  Outcome.ABORTED),
    Phase.PREPARED:    (SAME,     Begun,        WrongPhase, Outcome.RESUMED,  Outcome.ABORTED),
    Phase.COMMITTING:  (SAME,     JOINS,        WrongPhase, Outcome.RESUMED,  Outcome.ABORTED),
    Phase.COMMITTED:   (SAME,     SAME,         WrongPhase, Outcome.RESUMED,  Outcome.ABORTED),
    Phase.RESTORING:   (WrongPhase, WrongPhase, JOINS,      WrongPhase,       Outcome.ABORTED),
    Phase.RESTORED:    (WrongPhase, WrongPhase, SAME,       Outcome.RESUMED,  Outcome.ABORTED),
}  # fmt: skip
CELLS = [
    (phase, operation, row[i])
    for phase, row in TABLE.items()
    for i, operation in enumerate((*WORK, Operation.RESUME, Operation.ABORT))
]


@pytest.mark.parametrize(("phase", "operation", "expected"), CELLS)
def test_every_operation_in_every_phase(phase: Phase, operation: Operation, expected: object) -> None:
    bench = Bench().to(phase)
    if expected is WrongPhase:
        with pytest.raises(WrongPhase):
            bench.ask(operation)
        assert bench.phase is phase, "a refusal moves nothing"
        return
    found = bench.ask(operation)
    if isinstance(expected, Outcome):
        assert isinstance(found, Ended)
        assert (found.outcome, bench.phase) == (expected, Phase.IDLE)
        assert bench.ask(operation) == found, "and again the same"
    elif expected is Begun:
        assert isinstance(found, Begun)
    else:
        assert found == Recorded(None if expected == JOINS else b"answer")
        assert bench.phase is phase


@pytest.mark.parametrize("phase", list(Phase))
def test_another_id_is_a_conflict_while_one_is_active_and_its_release_fences_it(phase: Phase) -> None:
    for operation in WORK:
        bench = Bench().to(phase)
        if phase is not Phase.IDLE:
            with pytest.raises(CheckpointConflict):
                bench.ask(operation, "b")
    for operation in (Operation.RESUME, Operation.ABORT):
        bench = Bench().to(phase)
        fenced = bench.ask(operation, "b")
        assert isinstance(fenced, Ended)
        assert fenced.outcome is Outcome.FENCED
        assert bench.phase is phase, "the active checkpoint is not touched"
        for late in (Operation.PREPARE, Operation.RESTORE):
            with pytest.raises(StaleCheckpoint):
                bench.ask(late, "b")


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.IDLE])
def test_a_finished_id_is_stale_for_ever_and_the_next_one_is_not(phase: Phase) -> None:
    bench = Bench().to(phase)
    bench.ask(Operation.ABORT)
    for operation in WORK:
        with pytest.raises(StaleCheckpoint):
            bench.ask(operation)
    assert isinstance(bench.ask(Operation.PREPARE, "b"), Begun)


def test_the_same_id_with_other_content_is_a_conflict() -> None:
    bench = Bench().to(Phase.RESTORED)
    with pytest.raises(CheckpointConflict) as refused:
        bench.ask(Operation.RESTORE, digest="other")
    assert refused.value.code == "content"


@pytest.mark.parametrize("operation", WORK)
def test_failed_work_returns_to_where_it_was_and_may_be_tried_again(operation: Operation) -> None:
    before = Phase.PREPARED if operation is Operation.COMMIT else Phase.IDLE
    bench = Bench().to(before)
    bench.ask(operation)
    assert bench.work is not None
    bench.control.failed(bench.work)
    assert bench.phase is before
    assert bench.control.admits() is (before is Phase.IDLE)
    assert isinstance(bench.ask(operation), Begun)


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.COMMITTING, Phase.RESTORING])
@pytest.mark.parametrize("how", ["abort", "lease"])
def test_work_that_is_overtaken_takes_no_effect(phase: Phase, how: str) -> None:
    bench = Bench().to(phase)
    work = bench.work
    assert work is not None
    bench.ask(Operation.ABORT) if how == "abort" else bench.clock.advance(LEASE_S)
    bench.ask(Operation.PREPARE, "b")
    for act in (bench.control.check, lambda begun: bench.control.done(begun, b"late")):
        with pytest.raises(StaleCheckpoint):
            act(work)
    bench.control.failed(work)
    assert bench.phase is Phase.PREPARING, "the next checkpoint goes on"


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.IDLE])
def test_a_host_whose_controller_is_silent_opens_at_the_end_of_the_lease(phase: Phase) -> None:
    bench = Bench().to(phase)
    bench.clock.advance(LEASE_S - 0.001)
    assert not bench.control.admits()
    bench.clock.advance(0.001)
    assert bench.control.admits()
    loads = phase in (Phase.RESTORING, Phase.RESTORED)
    assert bench.ended == [Ended("a", Outcome.EXPIRED, False if loads else None)]
    with pytest.raises(StaleCheckpoint):
        bench.ask(Operation.COMMIT)
    if loads:
        with pytest.raises(StaleCheckpoint):
            bench.ask(Operation.RESUME)  # what was loaded is gone
    else:
        assert bench.ask(Operation.RESUME) == bench.ended[0]
    assert bench.ask(Operation.ABORT) == bench.ended[0]


def test_resume_keeps_what_was_restored_and_abort_after_it_refuses_as_resume_after_abort_does() -> None:
    for first, then in ((Operation.RESUME, Operation.ABORT), (Operation.ABORT, Operation.RESUME)):
        bench = Bench().to(Phase.RESTORED)
        bench.ask(first)
        assert bench.ended[0].stays is (first is Operation.RESUME)
        with pytest.raises(StaleCheckpoint):
            bench.ask(then)


def test_each_accepted_operation_extends_the_lease_and_none_shortens_it() -> None:
    bench = Bench().to(Phase.PREPARED)
    bench.clock.advance(6.0)
    bench.ask(Operation.PREPARE)
    assert bench.control.status().lease_s == LEASE_S
    bench.control.begin(Operation.PREPARE, "a", bench.clock.wall() + 1.0, "d")
    assert bench.control.status().lease_s == LEASE_S


@pytest.mark.parametrize("left", [0.0, -1.0, LONGEST_LEASE_S + 1, float("inf"), float("nan")])
def test_a_deadline_that_is_past_or_too_far_is_refused(left: float) -> None:
    bench = Bench()
    with pytest.raises(DeadlineExceeded):
        bench.control.begin(Operation.PREPARE, "a", bench.clock.wall() + left, "d")
    assert bench.phase is Phase.IDLE


class TwoClocks:
    """A wall clock that steps, beside a monotonic one that does not."""

    def __init__(self) -> None:
        self.now, self.step = 50.0, 1e9

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.step


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_step_of_the_wall_clock_moves_no_lease(jump: float) -> None:
    clock = TwoClocks()
    control = Control(clock)
    control.begin(Operation.PREPARE, "a", clock.wall() + LEASE_S, "d")
    clock.step += jump
    clock.now += LEASE_S - 0.1
    assert not control.admits()
    clock.now += 0.2
    assert control.admits()


def test_the_last_256_finished_ids_are_known() -> None:
    bench = Bench()
    for index in range(REMEMBERED + 1):
        bench.ask(Operation.RESUME, f"c{index}")
    with pytest.raises(StaleCheckpoint):
        bench.ask(Operation.PREPARE, "c1")
    assert isinstance(bench.ask(Operation.PREPARE, "c0"), Begun), "older ones are forgotten"


# ---------------------------------------------------------------------- sequences

Move = tuple[str, str]
MOVES: list[Move] = [
    *itertools.product(("prepare", "commit", "restore", "resume", "abort"), "ab"),
    ("done", ""),
    ("failed", ""),
    ("lease", ""),
]


def play(moves: Iterable[Move]) -> None:
    """What must hold after any sequence."""
    bench, recorded, over = Bench(), {}, set[str]()
    for name, checkpoint in moves:
        before = bench.control.status()
        try:
            _move(bench, name, checkpoint, recorded)
        except TidegateError:
            assert bench.control.status() == before, "a refusal moves nothing"
        over |= {ended.checkpoint for ended in bench.ended}
        status = bench.control.status()
        assert bench.control.admits() is (status.checkpoint is None) is (status.phase is Phase.IDLE)
        assert status.checkpoint not in over, "a finished checkpoint is not active again"
        assert len(bench.ended) == len({ended.checkpoint for ended in bench.ended}), "each ends once"
    bench.clock.advance(LEASE_S)
    assert bench.control.admits(), "no sequence leaves a host shut"


def _move(bench: Bench, name: str, checkpoint: str, recorded: dict[tuple[str, str], bytes]) -> None:
    if name == "lease":
        bench.clock.advance(LEASE_S)
        recorded.clear()
    elif name == "done" and bench.work is not None:
        answer = str(len(recorded)).encode()
        bench.control.done(bench.work, answer)
        recorded[bench.work.operation.value, bench.work.checkpoint] = answer
        bench.work = None
    elif name == "failed" and bench.work is not None:
        bench.control.failed(bench.work)
        bench.work = None
    elif name not in ("done", "failed"):
        found = bench.ask(Operation(name), checkpoint)
        if isinstance(found, Recorded) and found.answer is not None:
            assert recorded[name, checkpoint] == found.answer


def test_every_sequence_of_four_moves_keeps_the_rules() -> None:
    for moves in itertools.product(MOVES, repeat=4):
        play(moves)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(MOVES), max_size=40))
def test_any_sequence_keeps_the_rules(moves: list[Move]) -> None:
    play(moves)
