"""Any sequence of calls keeps the rules of ownership; every transition was met on the way; and broken code is found.

`TIDEGATE_MACHINE_EXAMPLES=5000 pytest tests/rollout/test_state_machine.py` plays more examples than the usual number.
Batch k is the same on every machine that runs the same tests before it (hypothesis draws from the constants of whatever
is imported): a failing one can be played alone with `pytest -k 'sequence and 17'`, or not alone.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from gpu.rollout import leasing
from gpu.rollout.admission import Admission
from gpu.rollout.control import RolloutControl
from gpu.rollout.messages import Outcome
from gpu.rollout.scheduler import Scheduler
from gpu.rollout.staleness import Selection
from storage import turn_transitions
from storage.errors import LedgerInvalid
from storage.schema import KIND_OF, Forked
from storage.transitions import TRANSITIONS
from tests.rollout.machine.rules import CALLS, Machine
from tests.rollout.machine.world import TALLY

EXAMPLES = int(os.environ.get("TIDEGATE_MACHINE_EXAMPLES", "150"))
BATCH = 10
"""Examples of one seed. Later ones would mostly be variations of these, which hypothesis makes from its eleventh on."""

REASONS = {
    *(f"attempt_abandoned {outcome.value}" for outcome in Outcome if outcome is not Outcome.SEALED),
    "attempt_abandoned sibling_ended",
    *(f"group_discarded {reason}" for reason in ("zero_variance", "end_of_source", "run_finished")),
    *(f"group_requeued {reason}" for reason in ("stale", "deadline", "overflow", "prompt_group", "recipe_changed")),
    "continuation_discarded boom", "continuation_discarded restart_only:", "given up at a claim", "given up at a mint",
    "continued", "lease_final", "holds expired", "evaluation mixed",
}  # fmt: skip
ACTIONS = {
    "continued from an answer", "continued with an open request", "result for an older attempt", "change", "no change",
    "turn with an account", "turn without an account", "sealed out of an answer",
    "malformed: seal with an open request",
}  # fmt: skip
REFUSALS = {
    "end with an acknowledgement owed", "repeated acknowledgement",
    "checkpoint with an open lease", "commit after rollback", "commit of another step", "end with an open lease",
    "hold that ended", "late report", "late verdict", "repeated checkpoint", "repeated commit", "repeated end",
    "repeated evaluation", "repeated revert",
    "repeated publication", "repeated release", "repeated rollback", "rollback after commit", "unknown commit",
    "unknown rollback", "version that nobody published", "wrong epoch",
    "action that is left out", "boundary that is left out", "boundary that was", "change without an intent",
    "discard of a live rollout", "discard of a result", "discard of a rollout without turns",
    "export of another revision", "intent of an older answer", "intent of another revision", "intent that was",
    "intent while another is open", "intent without an answer", "turn of an older boundary",
    "result before its turn", "result of another input", "result of another resource", "result without an answer",
    "tokens for an answer that has them", "tokens that begin elsewhere",
    "turn of other revisions", "turn that is not the answer's", "turn with an open request", "two changes at once",
}  # fmt: skip


@functools.cache
def batch(number: int, phases: tuple[Phase, ...] = tuple(Phase)) -> Counter[str]:
    """The examples of one seed; what happened in them."""
    TALLY.clear()
    run_state_machine_as_test(
        seed(number)(Machine),
        settings=settings(
            max_examples=BATCH,
            stateful_step_count=90,
            database=None,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    return TALLY.copy()


@pytest.mark.parametrize("number", range(EXAMPLES // BATCH))
def test_every_sequence_of_calls_settles_each_group_once_and_can_be_brought_to_an_end(number: int) -> None:
    assert batch(number)["examples"] > BATCH // 2


def test_the_sequences_met_every_transition_reason_and_refusal() -> None:
    """A rule that can no longer reach a state would prove nothing about it."""
    tally: Counter[str] = Counter()
    for number in range(EXAMPLES // BATCH):
        tally += batch(number)
    kinds = {KIND_OF[record] for record in TRANSITIONS if record is not Forked}  # a run begins with it or never has it
    wanted = (
        kinds | REASONS | ACTIONS | {f"unchanged: {what}" for what in REFUSALS} | {f"call {call}" for call in CALLS}
    )
    assert sorted(what for what in wanted if not tally[what]) == []


# ---------------------------------------------------------------------- broken code must be found


def noticed() -> bool:
    """Whether one of some batches fails: the oracle says so, or the ledger refuses or allows the wrong record."""
    for number in range(20):
        try:
            batch.__wrapped__(number, (Phase.generate,))
        except (AssertionError, LedgerInvalid, pytest.fail.Exception):
            return True
    return False


def test_the_machine_notices_a_hold_that_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "why_closed", lambda self: "")
    assert noticed()


def test_the_machine_notices_a_hold_that_never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "late", lambda self: [])
    assert noticed()


def test_the_machine_notices_a_batch_that_is_drawn_without_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leasing.select

    def boundless(ready: Any, unready: Any, staleness: int | None, size: int, version: int) -> Selection:
        return whole(ready, unready, None, size, version)

    monkeypatch.setattr(leasing, "select", boundless)
    assert noticed()


def test_the_machine_notices_a_lost_worker_whose_attempts_nobody_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutControl, "lose_worker", lambda self, worker: 0)
    assert noticed()


def test_the_machine_notices_an_eviction_cap_that_nothing_enforces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leasing.Leasing, "evict", lambda self: None)
    assert noticed()


def test_the_machine_notices_turns_that_are_kept_although_nobody_can_go_on_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Scheduler, "give_up", lambda self, group, siblings: 0)
    assert noticed()


def test_the_machine_notices_a_turn_that_ends_with_an_open_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_transitions, "check_answered", lambda *where: None)
    assert noticed()


def test_the_machine_notices_a_change_that_nobody_intended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_transitions, "_check_revision", lambda *where: None)
    assert noticed()
