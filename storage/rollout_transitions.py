"""Transitions of groups and their rollouts, from the source to settlement. See `storage.transitions`."""

from __future__ import annotations

import math
from typing import Any

from storage import obligation_transitions as obligations
from storage import schema
from storage.errors import AttemptReused, ContinuationInvalid, IllegalTransition, ResourceInvalid, TwoOwners
from storage.ledger import (
    COMPLETED,
    GENERATING,
    LEASED,
    LIVE,
    RESERVED,
    SEALED,
    UNKNOWN_VERSION,
    WAITING,
    Block,
    Boundary,
    Group,
    Ledger,
    Quarantined,
    Rollout,
    next_samples,
)
from storage.schema import Record

LOSSES = frozenset({"worker_lost", "engine_lost", "not_continuable"})
"""Ends of attempts that say nothing about the prompt; they have a budget of their own."""
SIBLING_ENDED = "sibling_ended"
"""An attempt that was closed because its group is redone whole: it costs no budget."""


def illegal(record: Record, seq: int, found: str, expected: str, code: str = "") -> IllegalTransition:
    return IllegalTransition(
        f"record {seq} ({schema.KIND_OF[type(record)]}): {found}",
        expected=expected,
        action="the journal was altered or written by two owners; `tidegate fork RUN NEW --last-good`",
        code=code,
    )


def live(ledger: Ledger, seq: int, record: Any, ordinal: int, sibling: int, attempt: int) -> tuple[Group, Rollout]:
    """The rollout whose current attempt is live and is exactly this one."""
    group = ledger.groups.get(ordinal) or ledger.group(ordinal, record, seq)
    rollout = _sibling(ledger, group, sibling, record, seq)
    if rollout.state is not LIVE or rollout.attempt != attempt:
        raise illegal(
            record,
            seq,
            f"rollout {ordinal}/{sibling} is {rollout.state.value} at attempt {rollout.attempt}",
            f"live at attempt {attempt}",
        )
    return group, rollout


def _sibling(ledger: Ledger, group: Group, sibling: int, record: Record, seq: int) -> Rollout:
    if not 0 <= sibling < ledger.num_siblings:
        raise illegal(record, seq, f"sibling {sibling} of group {group.ordinal}", f"0..{ledger.num_siblings - 1}")
    return group.rollouts[sibling]


def end_attempt(ledger: Ledger, group: Group, rollout: Rollout) -> None:
    rollout.state = WAITING
    group.num_live -= 1
    ledger.live -= 1
    if not group.num_live:
        ledger.set_state(group, RESERVED)


def group_reserved(ledger: Ledger, seq: int, record: schema.GroupReserved) -> None:
    if record.first != ledger.frontier or record.count < 1:
        raise illegal(record, seq, f"{record.count} ordinals from {record.first}", f"ordinals from {ledger.frontier}")
    siblings = range(ledger.num_siblings)
    for ordinal in range(record.first, record.first + record.count):
        ledger.groups[ordinal] = Group(ordinal, tuple([Rollout() for _ in siblings]))
    ledger.totals[RESERVED] += record.count
    ledger.frontier += record.count


def groups_dispatched(ledger: Ledger, seq: int, record: schema.GroupsDispatched) -> None:
    if record.count < 1 or record.siblings != ledger.num_siblings:
        found = f"{record.count} groups of {record.siblings} siblings"
        raise illegal(record, seq, found, f"at least one group of {ledger.num_siblings}")
    groups = [ledger.group(ordinal, record, seq) for ordinal in range(record.first, record.first + record.count)]
    for group in groups:
        if group.state is not RESERVED or group.dispatched or group.rollouts[0].attempt != -1:
            found = f"group {group.ordinal} is {group.state.value} or was dispatched before"
            raise illegal(record, seq, found, "fresh groups")
    incarnation, version = ledger.incarnation, record.version
    for group in groups:
        for rollout in group.rollouts:
            rollout.attempt, rollout.incarnation, rollout.state = 0, incarnation, LIVE
            rollout.minted_version = version
        group.state, group.dispatched, group.num_live, group.oldest = GENERATING, True, ledger.num_siblings, version
        group.recipe = ledger.recipe
    minted = record.count * ledger.num_siblings
    ledger.totals[RESERVED] -= record.count
    ledger.totals[GENERATING] += record.count
    ledger.dispatched += record.count
    ledger.live += minted
    if version != UNKNOWN_VERSION:
        ledger.oldest_counts[version] += record.count
    ledger.counts["rollouts_minted"] += minted


def attempts_minted(ledger: Ledger, seq: int, record: schema.AttemptsMinted) -> None:
    group = ledger.group(record.group, record, seq)
    if group.state not in (RESERVED, GENERATING) or not record.siblings:
        raise illegal(record, seq, f"group {record.group} is {group.state.value}", "reserved or generating")
    if len(set(record.siblings)) != len(record.siblings):
        raise illegal(record, seq, f"siblings {record.siblings}", "distinct siblings")
    if not len(record.siblings) == len(record.attempts) == len(record.boundaries):
        raise illegal(record, seq, "columns of different lengths", "one attempt and one boundary per sibling")
    for sibling, attempt, boundary in zip(record.siblings, record.attempts, record.boundaries, strict=True):
        _check_mint(_sibling(ledger, group, sibling, record, seq), record, seq, sibling, attempt, boundary)
    for sibling, attempt, boundary in zip(record.siblings, record.attempts, record.boundaries, strict=True):
        rollout = group.rollouts[sibling]
        ledger.counts["rollouts_regenerated"] += rollout.closed_by_claim and boundary < 0
        ledger.counts["rollouts_continued"] += boundary >= 0
        rollout.closed_by_claim = False
        rollout.attempt, rollout.incarnation, rollout.state = attempt, ledger.incarnation, LIVE
        rollout.minted_version = record.version
    group.num_live += len(record.siblings)
    ledger.live += len(record.siblings)
    if not group.dispatched:
        ledger.dispatched += 1
        group.dispatched, group.recipe = True, ledger.recipe
    ledger.set_state(group, GENERATING)
    ledger.set_oldest(group)
    ledger.counts["rollouts_minted"] += len(record.siblings)


def _check_mint(
    rollout: Rollout, record: schema.AttemptsMinted, seq: int, sibling: int, attempt: int, boundary: int
) -> None:
    if rollout.state is not WAITING:
        raise illegal(record, seq, f"rollout {record.group}/{sibling} is {rollout.state.value}", "waiting")
    if attempt != rollout.attempt + 1:
        raise AttemptReused(
            f"record {seq}: attempt {attempt} of rollout {record.group}/{sibling}",
            expected=f"attempt {rollout.attempt + 1}",
            action="attempt numbers are contiguous; the journal was altered",
        )
    last = rollout.boundary.index if rollout.boundary else -1
    if boundary != last:
        raise ContinuationInvalid(
            f"record {seq}: rollout {record.group}/{sibling} continues from boundary {boundary}",
            expected=f"its last boundary {last}",
            action="the journal was altered; `tidegate fork RUN NEW --last-good`",
            code="lost" if boundary < 0 else "",
        )


def attempt_abandoned(ledger: Ledger, seq: int, record: schema.AttemptAbandoned) -> None:
    group, rollout = live(ledger, seq, record, record.group, record.sibling, record.attempt)
    if record.reason in LOSSES:
        rollout.losses += 1
    elif record.reason != SIBLING_ENDED:
        rollout.failures += 1
    end_attempt(ledger, group, rollout)
    ledger.set_oldest(group)
    ledger.counts[f"abandoned_{record.reason}"] += 1


def payload_stored(ledger: Ledger, seq: int, record: schema.PayloadStored) -> None:
    if record.block in ledger.blocks or record.block in ledger.retired_blocks:
        raise TwoOwners(
            f"record {seq}: block {record.block!r} stored twice",
            expected="a new block name",
            action="two writers share a name; the journal was altered",
            code="token_row",
        )
    ledger.blocks[record.block] = Block(record.digest, record.size, record.inline, batches=record.batches)
    if record.inline:
        ledger.add_unplaced(seq, record.block)


def older(known: int, version: int) -> int:
    return version if known == UNKNOWN_VERSION else min(known, version)


def sealed(ledger: Ledger, seq: int, record: schema.Sealed) -> None:
    pairs = _check_seals(ledger, seq, record)
    block = record.block
    ledger.blocks[block].users += len(pairs)
    ledger.live -= len(pairs)
    touched: dict[int, Group] = {}
    moved: dict[int, Group] = {}
    columns = zip(pairs, record.rows, record.samples, record.tokens, record.oldest, record.rewards, strict=True)
    for (group, rollout), row, samples, tokens, oldest, reward in columns:
        if rollout.rows:
            rollout.rows = (*rollout.rows, (block, row))
            rollout.oldest = min(rollout.oldest, oldest)
            moved[group.ordinal] = group
        else:
            rollout.rows, rollout.oldest = ((block, row),), oldest
            if oldest != rollout.minted_version:
                moved[group.ordinal] = group
        rollout.state, rollout.reward, rollout.samples, rollout.tokens = SEALED, reward, samples, tokens
        group.num_live -= 1
        group.num_sealed += 1
        if not group.num_live:
            touched[group.ordinal] = group
    for group in touched.values():
        if group.num_sealed < ledger.num_siblings:
            ledger.set_state(group, RESERVED)
    for group in moved.values():
        ledger.set_oldest(group)
    if record.receipts:
        obligations.owe(ledger, record)
    ledger.counts["rollouts_sealed"] += len(pairs)
    ledger.counts["samples_sealed"] += sum(record.samples)
    ledger.counts["tokens_sealed"] += sum(record.tokens)


def _check_seals(ledger: Ledger, seq: int, record: schema.Sealed) -> list[tuple[Group, Rollout]]:
    """The rollouts that a record may seal, each once."""
    columns = (record.siblings, record.attempts, record.rows, record.samples, record.tokens, record.oldest,
               record.rewards)  # fmt: skip
    if not record.groups or any(len(column) != len(record.groups) for column in columns):
        raise illegal(
            record, seq, f"columns of {[len(c) for c in columns]} values", "equal, non-empty columns", code="seal"
        )
    groups, last = ledger.groups, ledger.num_siblings - 1
    pairs: list[tuple[Group, Rollout]] = []
    for ordinal, sibling, attempt, samples in zip(
        record.groups, record.siblings, record.attempts, record.samples, strict=True
    ):
        group = groups.get(ordinal)
        if group is None or not 0 <= sibling <= last:
            pairs.append(live(ledger, seq, record, ordinal, sibling, attempt))  # raises
            continue
        rollout = group.rollouts[sibling]
        if rollout.state is not LIVE or rollout.attempt != attempt:
            live(ledger, seq, record, ordinal, sibling, attempt)  # raises
        if rollout.boundary is not None or samples != 1:
            _check_samples(rollout, record, seq, f"rollout {ordinal}/{sibling}", samples)
        pairs.append((group, rollout))
    if not all(map(math.isfinite, record.rewards)):
        raise illegal(record, seq, f"rewards {record.rewards}", "finite rewards", code="reward")
    if min(record.tokens) < 0:
        raise illegal(record, seq, f"tokens {record.tokens}", "tokens >= 0", code="seal")
    if len({id(rollout) for _, rollout in pairs}) != len(pairs):
        raise illegal(record, seq, "two seals of one rollout", "each rollout once", code="seal")
    if len(set(record.rows)) != len(pairs):
        raise illegal(record, seq, f"rows {record.rows}", "each row of the block once", code="seal")
    ledger.check_block(record.block, record, seq)
    if record.receipts:
        obligations.check_receipts(ledger, seq, record)
    return pairs


def _check_samples(rollout: Rollout, record: schema.Sealed, seq: int, where: str, samples: int) -> None:
    """The last turn belongs to the last sample, which is open or begins with it."""
    boundary = rollout.boundary
    if boundary is not None and boundary.pending:
        last = range(boundary.sample, boundary.sample + 1)
        check_answered(boundary, record, seq, where)
    else:
        last = next_samples(boundary.sample if boundary else -1)
    if samples - 1 not in last:
        expected = " or ".join(str(sample + 1) for sample in last)
        raise illegal(record, seq, f"{where} with {samples} samples", f"{expected} samples", code="seal")


def check_answered(boundary: Boundary, record: Record, seq: int, where: str) -> None:
    """A turn ends only when it is known what became of every request of it. Raises `ResourceInvalid`."""
    if boundary.requests and boundary.requests[-1].reply is None:
        raise ResourceInvalid(
            f"record {seq} ({schema.KIND_OF[type(record)]}): {where} ends with an open request to"
            f" {boundary.requests[-1].resource!r}",
            expected="its result first",
            action="the journal was altered; `tidegate fork RUN NEW --last-good`",
            code="open",
        )


def group_completed(ledger: Ledger, seq: int, record: schema.GroupCompleted) -> None:
    _check_distinct(record, seq)
    for ordinal in record.groups:
        group = ledger.group(ordinal, record, seq)
        if group.num_sealed != ledger.num_siblings or group.state is not GENERATING:
            raise illegal(
                record,
                seq,
                f"group {ordinal} is {group.state.value} with {group.num_sealed} sealed siblings",
                f"generating with {ledger.num_siblings}",
                code="slots",
            )
    for ordinal in record.groups:
        group = ledger.groups[ordinal]
        ledger.set_state(group, COMPLETED)
        group.completed_seq = seq


def _check_distinct(record: schema.GroupCompleted | schema.GroupDiscarded, seq: int) -> None:
    if len(set(record.groups)) != len(record.groups):
        raise illegal(record, seq, f"groups {record.groups}", "distinct groups")


def group_discarded(ledger: Ledger, seq: int, record: schema.GroupDiscarded) -> None:
    _check_distinct(record, seq)
    for ordinal in record.groups:
        if ledger.group(ordinal, record, seq).state is LEASED:
            raise illegal(record, seq, f"group {ordinal} is leased", "a group that no lease holds")
    for ordinal in record.groups:
        ledger.settle(ledger.groups[ordinal])
        ledger.discarded.add(ordinal)
    ledger.counts[f"discarded_{record.reason}"] += len(record.groups)


def start_whole(ledger: Ledger, group: Group) -> None:
    """Forget all work of a group without live attempts."""
    for rollout in group.rollouts:
        ledger.drop_work(rollout)
    group.num_sealed, group.recipe = 0, ledger.recipe
    ledger.set_state(group, RESERVED)
    ledger.set_oldest(group)


def group_requeued(ledger: Ledger, seq: int, record: schema.GroupRequeued) -> None:
    group = ledger.group(record.group, record, seq)
    if group.state not in (COMPLETED, RESERVED) or group.num_live or not group.dispatched:
        raise illegal(record, seq, f"group {record.group} is {group.state.value}", "dispatched, completed or waiting")
    start_whole(ledger, group)
    ledger.counts[f"requeued_{record.reason}"] += 1


def group_quarantined(ledger: Ledger, seq: int, record: schema.GroupQuarantined) -> None:
    group = ledger.group(record.group, record, seq)
    if group.num_live or group.state is not RESERVED:
        raise illegal(record, seq, f"group {record.group} is {group.state.value}", "waiting, with no live attempt")
    used = tuple(rollout.attempt for rollout in group.rollouts), tuple(rollout.boundaries for rollout in group.rollouts)
    ledger.settle(group)
    ledger.quarantined[record.group] = Quarantined(record.reason, *used)


def quarantine_released(ledger: Ledger, seq: int, record: schema.QuarantineReleased) -> None:
    found = ledger.quarantined.pop(record.group, None)
    if found is None:
        raise illegal(record, seq, f"group {record.group} is not quarantined", "a quarantined group")
    rollouts = [Rollout(attempt=a, boundaries=b) for a, b in zip(found.attempts, found.boundaries, strict=True)]
    ledger.add_group(Group(record.group, tuple(rollouts)))
