"""The transition that takes committed steps back. See `schema.StepsReverted`."""

from __future__ import annotations

import dataclasses

from storage import schema
from storage.ledger import Group, Ledger, Rollout, TrainedGroup
from storage.rollout_transitions import illegal, start_whole


def steps_reverted(ledger: Ledger, seq: int, record: schema.StepsReverted) -> None:
    _check(ledger, seq, record)
    for group in ledger.groups.values():
        if any(rollout.rows for rollout in group.rollouts):
            start_whole(ledger, group)
    for number in range(record.to_step + 1, record.from_step + 1):
        lease = ledger.steps.pop(number).lease
        ledger.forget_rows(lease)
        for trained in lease.groups:
            ledger.consumed.remove(trained.ordinal)
            ledger.add_group(_again(trained))
            ledger.counts["groups_reverted"] += 1
    ledger.groups = dict(sorted(ledger.groups.items()))
    ledger.retired += [found for found in ledger.checkpoints if found.step > record.to_step]
    ledger.checkpoints = [found for found in ledger.checkpoints if found.step <= record.to_step]
    ledger.due = {key: None for key in ledger.due if key[1] <= record.to_step}
    ledger.evaluated = {key for key in ledger.evaluated if key[1] <= record.to_step}
    ledger.step = record.to_step
    ledger.state_digest, ledger.weights_digest = record.state_digest, record.weights_digest
    base = ledger.steps.get(record.to_step)
    if base is not None:
        ledger.steps[record.to_step] = dataclasses.replace(
            base, state_digest=record.state_digest, weights_digest=record.weights_digest
        )


def _check(ledger: Ledger, seq: int, record: schema.StepsReverted) -> None:
    if record.from_step != ledger.step or not 0 <= record.to_step < record.from_step:
        raise illegal(
            record, seq, f"steps {record.to_step + 1} to {record.from_step}", f"steps up to {ledger.step}, the last one"
        )
    bases = [*([0] if ledger.from_genesis else []), *[found.step for found in ledger.checkpoints]]
    if record.to_step not in bases:
        raise illegal(record, seq, f"a return to step {record.to_step}", f"one of {bases}, which can be restored")
    if bool(record.to_step) != bool(record.state_digest) or bool(record.to_step) != bool(record.weights_digest):
        raise illegal(record, seq, f"digests {record.state_digest[:12]!r}, {record.weights_digest[:12]!r}",
                      'those of a checkpoint, or "" for the initial weights')  # fmt: skip
    if ledger.lease is not None:
        raise illegal(record, seq, f"lease {ledger.lease.lease} is open", "no open lease")
    if ledger.live or (ledger.policy is not None and ledger.policy.incarnation == ledger.incarnation):
        raise illegal(record, seq, f"incarnation {ledger.incarnation} at work, {ledger.live} live attempts",
                      "an incarnation that has not published a version yet")  # fmt: skip


def _again(trained: TrainedGroup) -> Group:
    """The group starts whole; what its rollouts have used up is not used again."""
    counted = zip(trained.attempts, trained.boundaries, strict=True)
    return Group(trained.ordinal, tuple([Rollout(attempt=a, boundaries=b) for a, b in counted]))
