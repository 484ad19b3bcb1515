"""What live attempts have done since the last report: turns, answers that are acted on, requests, exports.

Entries are applied one by one in their order; one that breaks a rule ends its attempt as malformed, and the rest of
that attempt changes nothing. Older ones and repeats are counted and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu.rollout.books import Books
from gpu.rollout.messages import (
    Answered,
    Ended,
    Exported,
    Identity,
    Intent,
    Outcome,
    Progress,
    Report,
    Result,
    Turn,
)
from storage import schema
from storage.errors import ContinuationInvalid, LedgerInvalid, LineageInvalid, ResourceInvalid
from storage.ledger import UNKNOWN_VERSION, Rollout, next_samples

REFUSALS = (ContinuationInvalid, LineageInvalid, ResourceInvalid, LedgerInvalid)


@dataclass(slots=True)
class Applied:
    """`accepted` entries counted. Attempts in `failed` broke a rule; `spoken` are the ids of their rollouts. `rows` of
    the report's block are somebody's. `over`: attempts that are not live, or not any more."""

    accepted: int = 0
    failed: list[Ended] = field(default_factory=lambda: [])
    spoken: set[int] = field(default_factory=lambda: set())
    rows: set[int] = field(default_factory=lambda: set())
    over: dict[Identity, None] = field(default_factory=lambda: {})


def apply_progress(
    books: Books,
    report: Report,
    current: Callable[[Identity], Rollout | None],
    use_block: Callable[[Report], None],
    ignored: Counter[str],
) -> Applied:
    """`current` finds the rollout of a live attempt; `use_block` is called before the first entry that names a row of
    the report's block, and may raise."""
    policy = books.ledger.policy
    newest = policy.number if policy is not None else UNKNOWN_VERSION
    done = Applied()
    for entry in report.turns:
        rollout = current(entry.identity)
        if rollout is None:
            done.over[entry.identity] = None
            ignored["turn"] += 1
        elif id(rollout) in done.spoken or _repeats(entry, rollout):
            ignored["turn"] += 1
        elif detail := _problem(entry, rollout, done.rows, newest) or _record(books, report, entry, use_block):
            done.spoken.add(id(rollout))
            done.failed.append(Ended(entry.identity, Outcome.MALFORMED, detail=detail))
            done.over[entry.identity] = None
        else:
            done.accepted += 1
            if isinstance(entry, Turn | Answered) and entry.row >= 0:
                done.rows.add(entry.row)
    return done


def _repeats(entry: Progress, rollout: Rollout) -> bool:
    """Whether the journal has this already, or not yet what comes before it."""
    last = rollout.boundary
    if isinstance(entry, Turn | Answered):
        return entry.boundary != rollout.boundaries
    if isinstance(entry, Exported):
        known = last.exports.get(entry.resource) if last is not None else None
        return known is not None and known.revision >= entry.revision
    if last is None or entry.boundary != last.index:
        return True
    done = [request for request in last.requests if isinstance(entry, Intent) or request.reply is not None]
    return entry.cursor < len(done)


def _problem(entry: Progress, rollout: Rollout, rows: set[int], newest: int) -> str:
    """Which rule an entry that names tokens breaks, or ""."""
    if not isinstance(entry, Turn | Answered):
        return ""
    last = rollout.boundary
    if entry.row in rows:
        return f"row {entry.row} is another's"
    if not first_version(rollout) <= entry.oldest <= newest:
        return version_problem(entry.oldest, rollout, newest)
    if last is not None and last.pending:
        return ""
    number, sample = (last.turn, last.sample) if last else (-1, -1)
    if entry.row < 0 or entry.turn != number + 1:
        return f"turn {entry.turn} in row {entry.row} after turn {number}"
    return "" if entry.sample in next_samples(sample) else f"sample {entry.sample} after sample {sample}"


def first_version(rollout: Rollout) -> int:
    """The oldest version that the tokens of a reported turn may have: the one at the dispatch, unless they are durable
    already and perhaps of an older attempt."""
    last = rollout.boundary
    return rollout.oldest if last is not None and last.pending else rollout.minted_version


def version_problem(oldest: int, rollout: Rollout, newest: int) -> str:
    """Which rule such tokens break."""
    return f"tokens of version {oldest}, expected {first_version(rollout)}, the first one, to {newest}, the newest"


def _record(books: Books, report: Report, entry: Progress, use_block: Callable[[Report], None]) -> str:
    """Record it, or say which rule it breaks."""
    if isinstance(entry, Turn | Answered) and entry.row >= 0:
        use_block(report)
    try:
        books.record(_record_of(entry, report.block))
    except REFUSALS as error:
        return str(error)
    return ""


def _record_of(entry: Progress, block: str) -> schema.Record:
    one = entry.identity
    where = (one.group, one.sibling, one.attempt)
    if isinstance(entry, Turn):
        name = block if entry.row >= 0 else ""
        return schema.TurnCommitted(
            *where, entry.boundary, entry.turn, entry.sample, name, entry.row, entry.start, entry.tokens,
            entry.oldest, entry.state, entry.revisions,
        )  # fmt: skip
    if isinstance(entry, Answered):
        return schema.ModelAnswered(
            *where, entry.boundary, entry.turn, entry.sample, block, entry.row, entry.start, entry.tokens, entry.oldest
        )
    if isinstance(entry, Intent):
        return schema.RequestIntent(*where, entry.boundary, entry.cursor, entry.resource, entry.revision, entry.digest)
    if isinstance(entry, Result):
        return schema.RequestResult(
            *where, entry.boundary, entry.cursor, entry.resource, entry.revision, entry.digest, entry.reply
        )
    return schema.ResourceExported(*where, entry.resource, entry.revision, entry.state)
