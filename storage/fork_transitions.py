"""The transition of a fork: a run that begins where another one was. See `storage.transitions`."""

from __future__ import annotations

from storage import schema
from storage.intervals import IntervalSet
from storage.ledger import Group, Inherited, Ledger, Quarantined, Recipe, Rollout
from storage.rollout_transitions import illegal

FORK_INCARNATION = 1
FORK_POSITION = 1
"""A fork is claimed and described by the first two records of its journal."""


def forked(ledger: Ledger, seq: int, record: schema.Forked) -> None:
    if (seq, ledger.incarnation) != (FORK_POSITION, FORK_INCARNATION):
        raise illegal(record, seq, "a run that has begun", "the first record after the first claim")
    copied = record.checkpoint
    if record.step < 1 or (copied.step, copied.position) != (record.step, seq):
        found = f"a fork of step {record.step} with a checkpoint of step {copied.step} at record {copied.position}"
        raise illegal(record, seq, found, f"a checkpoint of its step, at least 1, at record {seq}")
    consumed, discarded = _intervals(record, seq)
    unsettled, quarantined = _unsettled(record, seq), _quarantined(ledger, record, seq)
    ledger.consumed, ledger.discarded, ledger.quarantined = consumed, discarded, quarantined
    for ordinal in unsettled:
        ledger.add_group(Group(ordinal, tuple([Rollout() for _ in range(ledger.num_siblings)])))
    ledger.frontier, ledger.step = record.frontier, record.step
    ledger.state_digest, ledger.weights_digest = record.state_digest, record.weights_digest
    ledger.initial_weights = record.weights_digest
    ledger.recipe = Recipe(record.recovery, record.fingerprint)
    ledger.checkpoints.append(copied)
    ledger.inherited = Inherited(
        record.run, record.storage, record.step, record.position, record.state_digest, len(consumed), len(discarded),
        len(quarantined), len(unsettled),
    )  # fmt: skip


def _intervals(record: schema.Forked, seq: int) -> tuple[IntervalSet, IntervalSet]:
    try:
        return IntervalSet.of(record.consumed), IntervalSet.of(record.discarded)
    except ValueError as error:
        raise illegal(record, seq, str(error), "intervals in order") from error


def _unsettled(record: schema.Forked, seq: int) -> list[int]:
    """Ordinals that were handed out and are in no other place, ascending."""
    quarantined = [(ordinal, ordinal + 1) for ordinal in record.quarantined]
    settled = sorted([*record.consumed, *record.discarded, *quarantined])
    found: list[int] = []
    at = 0
    for start, end in [*settled, (record.frontier, record.frontier)]:
        if start < at:
            raise illegal(record, seq, f"ordinal {start} settled twice, or beyond the frontier {record.frontier}",
                          "each ordinal below the frontier in at most one place")  # fmt: skip
        found += range(at, start)
        at = end
    return found


def _quarantined(ledger: Ledger, record: schema.Forked, seq: int) -> dict[int, Quarantined]:
    columns = (record.reasons, record.attempts, record.boundaries)
    used = [*record.attempts, *record.boundaries]
    if any(len(column) != len(record.quarantined) for column in columns) or any(
        len(one) != ledger.num_siblings for one in used
    ):
        found = f"{len(record.quarantined)} quarantined groups with columns of {[len(column) for column in columns]}"
        raise illegal(record, seq, found, f"for each a reason, and attempts and boundaries of {ledger.num_siblings}")
    rows = zip(record.quarantined, *columns, strict=True)
    return {ordinal: Quarantined(reason, attempts, boundaries) for ordinal, reason, attempts, boundaries in rows}
