"""Transitions inside a rollout: its turns, what it asks of resources, and what it gives up. See `storage.transitions`.

                      model_answered                    request_intent, request_result ...
    (between turns) ────────────────► pending ─────────────────────────────────────────────► pending
          │                              │ turn_committed, once every request has its result
          └── turn_committed ──► (between turns) ◄──┘

Boundaries count over a rollout, also across its attempts, and never go back.
"""

from __future__ import annotations

from msgspec.structs import replace

from storage import schema
from storage.errors import ContinuationInvalid, LineageInvalid, ResourceInvalid
from storage.ledger import WAITING, Boundary, Export, Group, Ledger, Requested, Rollout, next_samples
from storage.rollout_transitions import check_answered, illegal, live, older

ALTERED = "the journal was altered; `tidegate fork RUN NEW --last-good`"
Turn = schema.TurnCommitted | schema.ModelAnswered


def model_answered(ledger: Ledger, seq: int, record: schema.ModelAnswered) -> None:
    group, rollout = live(ledger, seq, record, record.group, record.sibling, record.attempt)
    before = rollout.boundary
    position = _check_next(rollout, record, seq)
    _use(ledger, group, rollout, record, seq)
    rollout.boundary = Boundary(
        record.boundary, record.turn, record.sample, before.state if before else b"", record.attempt,
        before.root if before else record.attempt, position + record.tokens, True,
        (), before.revisions if before else {}, before.exports if before else {},
    )  # fmt: skip


def turn_committed(ledger: Ledger, seq: int, record: schema.TurnCommitted) -> None:
    group, rollout = live(ledger, seq, record, record.group, record.sibling, record.attempt)
    before = rollout.boundary
    if before is not None and before.pending:
        position = _check_answered_turn(rollout, before, record, seq)
    else:
        position = _check_next(rollout, record, seq) + record.tokens
    _check_revisions(before, record, seq)
    if record.row >= 0:
        _use(ledger, group, rollout, record, seq)
    else:
        rollout.boundaries = record.boundary + 1
    rollout.boundary = Boundary(
        record.boundary, record.turn, record.sample, record.state, record.attempt,
        before.root if before else record.attempt, position, False, (), record.revisions,
        before.exports if before else {},
    )  # fmt: skip


def _use(ledger: Ledger, group: Group, rollout: Rollout, record: Turn, seq: int) -> None:
    ledger.use_row((record.block, record.row), record, seq)
    rollout.rows += ((record.block, record.row),)
    rollout.boundaries = record.boundary + 1
    rollout.oldest = older(rollout.oldest, record.oldest)
    ledger.set_oldest(group)


def _check_next(rollout: Rollout, record: Turn, seq: int) -> int:
    """A turn after the last one, and where its tokens begin. Raises `ContinuationInvalid`, `LineageInvalid`."""
    last = rollout.boundary
    turn = last.turn + 1 if last else 0
    samples = next_samples(last.sample if last else -1)
    if last is not None and last.pending:
        raise _out_of_place(
            record, seq, f"turn_committed of turn {last.turn}, whose answer is being acted on", "boundary"
        )
    if record.turn != turn or record.boundary != rollout.boundaries or record.sample not in samples or record.row < 0:
        expected = f"boundary {rollout.boundaries}, turn {turn}, sample {' or '.join(map(str, samples))}, in a row"
        raise _out_of_place(record, seq, expected)
    position = last.position if last and record.sample == last.sample else 0
    if record.start != position or record.tokens < 1:
        raise LineageInvalid(
            f"{_where(record, seq)}: {record.tokens} tokens from position {record.start}",
            expected=f"tokens from position {position}, where the call before ends",
            action=ALTERED,
            code="chain",
        )
    return position


def _check_answered_turn(rollout: Rollout, last: Boundary, record: schema.TurnCommitted, seq: int) -> int:
    if (record.turn, record.boundary, record.sample) != (last.turn, rollout.boundaries, last.sample) or record.tokens:
        expected = f"boundary {rollout.boundaries}, turn {last.turn}, sample {last.sample}, no more tokens"
        raise _out_of_place(record, seq, expected)
    check_answered(last, record, seq, f"rollout {record.group}/{record.sibling}")
    return last.position


def _check_revisions(last: Boundary | None, record: schema.TurnCommitted, seq: int) -> None:
    """What a turn says of the resources is what its requests have said."""
    if record.revisions is None or (last is not None and last.revisions is None):
        return
    names = {*(last.revisions or ()), *(request.resource for request in last.requests)} if last else set[str]()
    known = {name: last.revision(name) for name in names} if last else {}
    changed = {name: revision for name, revision in known.items() if revision}
    if record.revisions != changed:
        raise ResourceInvalid(
            f"{_where(record, seq)} has resources at {record.revisions}",
            expected=f"{changed}, which its requests add up to",
            action=ALTERED,
            code="revision",
        )


def request_intent(ledger: Ledger, seq: int, record: schema.RequestIntent) -> None:
    _, rollout = live(ledger, seq, record, record.group, record.sibling, record.attempt)
    last = _acted_on(rollout, record, seq)
    check_answered(last, record, seq, f"rollout {record.group}/{record.sibling}")
    _check_cursor(record, seq, len(last.requests))
    _check_revision(last, record, seq, (last.revision(record.resource),))
    asked = Requested(record.resource, record.digest, record.revision, record.revision, None)
    rollout.boundary = replace(last, requests=(*last.requests, asked))


def request_result(ledger: Ledger, seq: int, record: schema.RequestResult) -> None:
    _, rollout = live(ledger, seq, record, record.group, record.sibling, record.attempt)
    last = _acted_on(rollout, record, seq)
    asked = last.requests[-1] if last.requests and last.requests[-1].reply is None else None
    before = last.revision(record.resource)
    if asked is None:
        _check_cursor(record, seq, len(last.requests))
        _check_revision(last, record, seq, (before,))
    else:
        _check_cursor(record, seq, len(last.requests) - 1)
        if (asked.resource, asked.digest) != (record.resource, record.digest):
            raise ResourceInvalid(
                f"{_where(record, seq)} is of {record.resource!r} with input {record.digest[:12]}",
                expected=f"{asked.resource!r} with input {asked.digest[:12]}, as intended",
                action=ALTERED,
                code="receipt",
            )
        _check_revision(last, record, seq, (before, before + 1))
    done = Requested(record.resource, record.digest, before, record.revision, record.reply)
    rollout.boundary = replace(last, requests=(*last.requests[: record.cursor], done))


def resource_exported(ledger: Ledger, seq: int, record: schema.ResourceExported) -> None:
    _, rollout = live(ledger, seq, record, record.group, record.sibling, record.attempt)
    last = rollout.boundary
    if last is None:
        raise _out_of_place(record, seq, "a rollout with a boundary")
    _check_revision(last, record, seq, (last.revision(record.resource),))
    rollout.boundary = replace(last, exports=last.exports | {record.resource: Export(record.revision, record.state)})


def continuation_discarded(ledger: Ledger, seq: int, record: schema.ContinuationDiscarded) -> None:
    pairs = list(zip(record.groups, record.siblings, strict=False))
    if not pairs or len(set(pairs)) != len(record.groups) or len(record.groups) != len(record.siblings):
        raise illegal(record, seq, f"groups {record.groups}, siblings {record.siblings}", "distinct rollouts")
    found = [(ledger.group(ordinal, record, seq), sibling) for ordinal, sibling in pairs]
    for group, sibling in found:
        if not 0 <= sibling < ledger.num_siblings:
            raise illegal(record, seq, f"sibling {sibling} of group {group.ordinal}", f"0..{ledger.num_siblings - 1}")
        rollout = group.rollouts[sibling]
        if rollout.state is not WAITING or rollout.boundary is None:
            turns = "no turns" if rollout.boundary is None else f"boundary {rollout.boundary.index}"
            what = f"rollout {group.ordinal}/{sibling} is {rollout.state.value} with {turns}"
            raise illegal(record, seq, what, "a waiting rollout with durable turns")
    for group, sibling in found:
        ledger.drop_work(group.rollouts[sibling])
        ledger.set_oldest(group)
    ledger.counts["rollouts_discarded"] += len(found)


# ---------------------------------------------------------------------- what they have in common

Act = schema.RequestIntent | schema.RequestResult | schema.ResourceExported


def _acted_on(rollout: Rollout, record: schema.RequestIntent | schema.RequestResult, seq: int) -> Boundary:
    """The answer that the record's request belongs to. Raises `ContinuationInvalid`."""
    last = rollout.boundary
    if last is None or not last.pending or last.index != record.boundary:
        at = "no boundary" if last is None else f"boundary {last.index}, {'pending' if last.pending else 'complete'}"
        raise _out_of_place(record, seq, f"the model_answered boundary {record.boundary} to be the last one, not {at}")
    return last


def _check_cursor(record: schema.RequestIntent | schema.RequestResult, seq: int, cursor: int) -> None:
    if record.cursor != cursor:
        raise _out_of_place(record, seq, f"action {cursor} next, not {record.cursor}", "cursor")


def _check_revision(last: Boundary, record: Act, seq: int, allowed: tuple[int, ...]) -> None:
    if last.revisions is not None and record.revision not in allowed:
        raise ResourceInvalid(
            f"{_where(record, seq)} has {record.resource!r} at revision {record.revision}",
            expected=f"revision {' or '.join(map(str, allowed))}",
            action=ALTERED,
            code="revision",
        )


def _out_of_place(record: Turn | Act, seq: int, expected: str, code: str = "") -> ContinuationInvalid:
    return ContinuationInvalid(_where(record, seq), expected=expected, action=ALTERED, code=code)


def _where(record: Turn | Act, seq: int) -> str:
    at = f"{schema.KIND_OF[type(record)]} of rollout {record.group}/{record.sibling}"
    if isinstance(record, schema.ResourceExported):
        return f"record {seq}: {at}"
    if isinstance(record, schema.RequestIntent | schema.RequestResult):
        return f"record {seq}: {at}, boundary {record.boundary}, action {record.cursor}"
    return f"record {seq}: {at}, boundary {record.boundary}, turn {record.turn}, sample {record.sample}"
