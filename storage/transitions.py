"""The state machine of a run: which record may follow which, in one place.

The same transitions run live and at restore. One that is not allowed raises a typed error that names the record, its
sequence number, what was found and what was expected, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storage import evaluation_transitions as evaluations
from storage import fork_transitions as forks
from storage import obligation_transitions as obligations
from storage import retention_transitions as retention
from storage import rollout_transitions as rollouts
from storage import schema
from storage import turn_transitions as turns
from storage.archives import amended, end_of, whole
from storage.errors import LedgerInvalid, TwoOwners
from storage.ledger import (
    COMPLETED,
    GENERATING,
    LEASED,
    LIVE,
    Lease,
    Ledger,
    Policy,
    Recipe,
    Step,
    make_lease,
)
from storage.revert_transitions import steps_reverted
from storage.rollout_transitions import end_attempt, illegal
from storage.runs import changed_to
from storage.schema import Record

RECOVERIES = ("sibling", "prompt_group")


def apply(ledger: Ledger, seq: int, record: Record) -> None:
    """One transition. Raises `LedgerInvalid` and its kin, having changed nothing."""
    if seq != ledger.next_seq:
        raise LedgerInvalid(
            f"record {seq}",
            expected=f"record {ledger.next_seq}",
            action="the journal has a hole; restore it from a copy",
            code="cursor",
        )
    if ledger.finished and not isinstance(record, schema.RunClaimed):
        raise illegal(record, seq, f"run finished ({ledger.finished})", "only claims after the end")
    if ledger.incarnation == 0 and not isinstance(record, schema.RunClaimed):
        raise illegal(record, seq, "an unclaimed run", "a claim as the first record")
    TRANSITIONS[type(record)](ledger, seq, record)
    ledger.next_seq = seq + 1
    ledger.counts[schema.KIND_OF[type(record)]] += 1


def _run_claimed(ledger: Ledger, seq: int, record: schema.RunClaimed) -> None:
    if record.incarnation != ledger.incarnation + 1:
        raise illegal(
            record, seq, f"claim of incarnation {record.incarnation}", f"incarnation {ledger.incarnation + 1}"
        )
    for group in ledger.groups.values():
        if group.state is GENERATING:
            for rollout in group.rollouts:
                if rollout.state is LIVE:
                    rollout.closed_by_claim = True
                    ledger.counts["attempts_closed_by_claim"] += 1
                    end_attempt(ledger, group, rollout)
            ledger.set_oldest(group)
    if ledger.incarnation:
        ledger.counts["rollouts_reused"] += sum(group.num_sealed for group in ledger.groups.values())
        ledger.counts["groups_reused"] += len(ledger.completed) + (len(ledger.lease.groups) if ledger.lease else 0)
    ledger.incarnation = record.incarnation


def _recipe_declared(ledger: Ledger, seq: int, record: schema.RecipeDeclared) -> None:
    if record.recovery not in RECOVERIES:
        raise illegal(record, seq, f"recovery {record.recovery!r}", f"one of {', '.join(RECOVERIES)}")
    ledger.recipe = Recipe(record.recovery, record.fingerprint)


def _policy_published(ledger: Ledger, seq: int, record: schema.PolicyPublished) -> None:
    parent = ledger.policy.digest if ledger.policy else ""
    if record.incarnation != ledger.incarnation or record.number != ledger.step or record.parent != parent:
        raise illegal(
            record,
            seq,
            f"version ({record.incarnation}, {record.number}) after {record.parent[:12]!r}",
            f"version ({ledger.incarnation}, {ledger.step}) after {parent[:12]!r}",
        )
    weights = ledger.weights_digest if ledger.step else ledger.initial_weights or record.digest
    if record.digest != weights:
        raise illegal(record, seq, f"weights {record.digest[:12]}", f"weights {weights[:12]} of step {ledger.step}")
    if not ledger.step:
        ledger.initial_weights = record.digest
    ledger.policy = Policy(record.incarnation, record.number, record.digest)


def _lease_issued(ledger: Ledger, seq: int, record: schema.LeaseIssued) -> None:
    if ledger.lease is not None:
        raise TwoOwners(
            f"record {seq}: lease {record.lease} while lease {ledger.lease.lease} is open",
            expected="no open lease",
            action="one lease at a time; the journal was altered",
            code="lease",
        )
    if record.step != ledger.step + 1 or record.lease != ledger.next_lease or record.version != ledger.step:
        raise illegal(
            record,
            seq,
            f"lease {record.lease} of step {record.step} at version {record.version}",
            f"lease {ledger.next_lease} of step {ledger.step + 1} at version {ledger.step}",
        )
    if len(set(record.groups)) != len(record.groups) or not record.groups:
        raise illegal(record, seq, f"groups {record.groups}", "distinct groups")
    for ordinal in record.groups:
        group = ledger.group(ordinal, record, seq)
        if group.state is not COMPLETED:
            raise illegal(record, seq, f"group {ordinal} is {group.state.value}", "completed")
    for ordinal in record.groups:
        ledger.set_state(ledger.groups[ordinal], LEASED)
    groups = [ledger.groups[ordinal] for ordinal in record.groups]
    ledger.lease = make_lease(record.lease, record.step, record.version, groups, final=record.final)
    ledger.next_lease += 1


def _open_lease(ledger: Ledger, seq: int, record: Record, lease: int) -> Lease:
    if ledger.lease is None or ledger.lease.lease != lease:
        found = f"lease {ledger.lease.lease} is open" if ledger.lease else "no lease is open"
        raise illegal(record, seq, found, f"lease {lease} to be open")
    return ledger.lease


def _lease_rolled_back(ledger: Ledger, seq: int, record: schema.LeaseRolledBack) -> None:
    lease = _open_lease(ledger, seq, record, record.lease)
    later = ledger.completed
    ledger.completed = {}  # they completed before whatever is there, and stay first
    for group in lease.groups:
        ledger.set_state(ledger.groups[group.ordinal], COMPLETED)
    ledger.completed |= later
    ledger.lease = None


def _step_committed(ledger: Ledger, seq: int, record: schema.StepCommitted) -> None:
    lease = _open_lease(ledger, seq, record, record.lease)
    if record.step != lease.step:
        raise illegal(record, seq, f"step {record.step} under the lease of step {lease.step}", "the lease's step")
    for trained in lease.groups:
        ledger.take_out(ledger.groups[trained.ordinal])
        ledger.consumed.add(trained.ordinal)
    ledger.keep_rows(lease)
    ledger.lease, ledger.step = None, record.step
    ledger.state_digest, ledger.weights_digest = record.state_digest, record.weights_digest
    ledger.steps[record.step] = Step(lease, record.state_digest, record.weights_digest, seq)


def _step_redone(ledger: Ledger, seq: int, record: schema.StepRedone) -> None:
    step = ledger.steps.get(record.step)
    if step is None:
        raise illegal(
            record, seq, f"step {record.step} was redone", "a committed step after the oldest retained checkpoint"
        )
    if record.matches != (record.state_digest == step.state_digest):
        raise illegal(record, seq, f"matches={record.matches}", f"the comparison with {step.state_digest[:12]}")
    ledger.steps[record.step] = Step(step.lease, record.state_digest, record.weights_digest, step.seq)
    if record.step == ledger.step:
        ledger.state_digest, ledger.weights_digest = record.state_digest, record.weights_digest
    ledger.counts["steps_diverged"] += not record.matches


def _checkpoint_published(ledger: Ledger, seq: int, record: schema.CheckpointPublished) -> None:
    newest = ledger.checkpoints[-1].step if ledger.checkpoints else 0
    step = ledger.steps.get(record.step)
    if step is None or record.step <= newest or record.position != step.seq:
        raise illegal(
            record,
            seq,
            f"checkpoint of step {record.step} at position {record.position}",
            f"a committed step after {newest}, at the position of its commit",
        )
    ledger.checkpoints.append(record)


def _ledger_snapshot(ledger: Ledger, seq: int, record: schema.LedgerSnapshot) -> None:
    newest, low = (ledger.snapshot.slot, ledger.snapshot.low) if ledger.snapshot else (0, 0)
    if record.slot <= newest or record.position > seq:
        found = f"a snapshot of slot {record.slot} at record {record.position}"
        raise illegal(record, seq, found, f"a slot after {newest}, which is in the past")
    if not low <= record.low <= newest:
        raise illegal(record, seq, f"slots below {record.low} retired", f"from {low} to {newest}, the snapshot before")
    history = amended(ledger.history, record.archive) if record.archive else []
    if not whole(history, record.slot if record.archive else 0) or record.low > end_of(history):
        raise illegal(record, seq, f"history in {history} and slots below {record.low} retired", "every slot archived")
    kept = set(history)
    ledger.replaced = [name for name in ledger.history if name not in kept]
    ledger.history, ledger.snapshot = history, record


def _config_changed(ledger: Ledger, seq: int, record: schema.ConfigChanged) -> None:
    ledger.settings |= {name: changed_to(text) for name, text in record.changes.items()}


def _run_finished(ledger: Ledger, seq: int, record: schema.RunFinished) -> None:
    if ledger.groups or ledger.lease:
        raise illegal(record, seq, f"{len(ledger.groups)} unsettled groups", "every group settled")
    if ledger.obligations:
        raise illegal(record, seq, f"{len(ledger.obligations)} acknowledgements are owed", "every one settled")
    if ledger.due:
        raise illegal(record, seq, f"{len(ledger.due)} evaluations are due", "a result of every evaluation")
    ledger.finished = record.reason


TRANSITIONS: dict[type[Record], Callable[[Ledger, int, Any], None]] = {
    schema.RunClaimed: _run_claimed,
    schema.Forked: forks.forked,
    schema.PolicyPublished: _policy_published,
    schema.RecipeDeclared: _recipe_declared,
    schema.GroupReserved: rollouts.group_reserved,
    schema.AttemptsMinted: rollouts.attempts_minted,
    schema.GroupsDispatched: rollouts.groups_dispatched,
    schema.AttemptAbandoned: rollouts.attempt_abandoned,
    schema.PayloadStored: rollouts.payload_stored,
    schema.TurnCommitted: turns.turn_committed,
    schema.ModelAnswered: turns.model_answered,
    schema.RequestIntent: turns.request_intent,
    schema.RequestResult: turns.request_result,
    schema.ResourceExported: turns.resource_exported,
    schema.ContinuationDiscarded: turns.continuation_discarded,
    schema.Sealed: rollouts.sealed,
    schema.AckDone: obligations.ack_done,
    schema.ObligationExpired: obligations.obligation_expired,
    schema.GroupCompleted: rollouts.group_completed,
    schema.GroupDiscarded: rollouts.group_discarded,
    schema.GroupRequeued: rollouts.group_requeued,
    schema.GroupQuarantined: rollouts.group_quarantined,
    schema.QuarantineReleased: rollouts.quarantine_released,
    schema.LeaseIssued: _lease_issued,
    schema.LeaseRolledBack: _lease_rolled_back,
    schema.StepCommitted: _step_committed,
    schema.StepRedone: _step_redone,
    schema.StepsReverted: steps_reverted,
    schema.CheckpointPublished: _checkpoint_published,
    schema.Retired: retention.retired,
    schema.Deleted: retention.deleted,
    schema.EvaluationDue: evaluations.evaluation_due,
    schema.EvaluationDone: evaluations.evaluation_done,
    schema.LedgerSnapshot: _ledger_snapshot,
    schema.ConfigChanged: _config_changed,
    schema.RunFinished: _run_finished,
}
