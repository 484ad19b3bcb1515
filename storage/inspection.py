"""Looking into a run from storage alone: its summary, its steps, and the whole history of one group."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from storage import schema
from storage.filesystem import Store
from storage.history import read_all
from storage.journal import fold, fold_segment
from storage.ledger import SEALED, Ledger
from storage.runs import open_run
from storage.schema import KIND_OF, Record
from storage.segment import Row


def summary(store: Store, run: str) -> dict[str, Any]:
    """Where a run stands. Raises `UnknownRun` and what reading raises."""
    info = open_run(store, run)
    ledger, segments = Ledger(info.num_siblings), 0
    started = ended = info.created
    for segment in read_all(store, run):
        fold_segment(ledger, segment)
        segments += 1
        started = segment.rows[0].time if segments == 1 else started
        ended = segment.rows[-1].time
    inherited = ledger.inherited
    return {
        "run": run, "forked_from": inherited and f"{inherited.run}@{inherited.step} in {inherited.storage}",
        "finished": ledger.finished, "step": ledger.step, "incarnations": ledger.incarnation,
        "handed_out": ledger.frontier, "consumed": len(ledger.consumed), "discarded": len(ledger.discarded),
        "quarantined": {ordinal: found.reason for ordinal, found in ledger.quarantined.items()},
        "unsettled": ledger.state_counts(), "continuations": _continuations(ledger),
        "open_lease": ledger.lease.lease if ledger.lease else None,
        "checkpoints": [record.step for record in ledger.checkpoints],
        "kept": [record.step for record in ledger.kept], "retired": [record.step for record in ledger.retired],
        "segments": segments,
        "evaluations": {"done": len(ledger.evaluated), "due": [f"{suite} at {step}" for suite, step in ledger.due]},
        "seconds": ended - started, "siblings": info.num_siblings, "staleness": info.staleness,
        "counts": dict(sorted(ledger.counts.items())),
    }  # fmt: skip


def _continuations(ledger: Ledger) -> dict[str, int]:
    """Unfinished rollouts with durable turns; those of them whose model has answered and whose actions are not over;
    and requests of which nobody knows yet what became of them."""
    rollouts = [
        rollout for group in ledger.groups.values() for rollout in group.rollouts if rollout.state is not SEALED
    ]
    found = [rollout.boundary for rollout in rollouts if rollout.boundary is not None]
    opened = sum(request.reply is None for boundary in found for request in boundary.requests)
    return {"rollouts": len(found), "acting": sum(boundary.pending for boundary in found), "open_requests": opened}


def evaluations(store: Store, run: str) -> list[dict[str, Any]]:
    """One entry per evaluation result, in the order of recording, without those of steps that were reverted."""
    open_run(store, run)
    found: list[dict[str, Any]] = []
    for row in _rows(store, run):
        if isinstance(row.record, schema.EvaluationDone):
            found.append({"time": row.time, **msgspec.to_builtins(row.record)})
        elif isinstance(row.record, schema.StepsReverted):
            found = [entry for entry in found if entry["step"] <= row.record.to_step]
    return found


def steps(store: Store, run: str) -> list[dict[str, Any]]:
    """One entry per committed step: its groups, time and metrics. Steps that were reverted are not among them."""
    open_run(store, run)
    found: list[dict[str, Any]] = []
    groups: dict[int, tuple[int, ...]] = {}
    for row in _rows(store, run):
        if isinstance(row.record, schema.LeaseIssued):
            groups[row.record.lease] = row.record.groups
        elif isinstance(row.record, schema.StepCommitted):
            batch = groups.pop(row.record.lease, ())
            found.append({**row.record.metrics, "step": row.record.step, "time": row.time, "groups": batch,
                          "state_digest": row.record.state_digest})  # fmt: skip
        elif isinstance(row.record, schema.StepsReverted):
            found = [entry for entry in found if entry["step"] <= row.record.to_step]
    return found


def reverts(store: Store, run: str) -> list[tuple[int, int]]:
    """(incarnation, step) of every return to an earlier step."""
    found: list[tuple[int, int]] = []
    incarnation = 0
    for row in _rows(store, run):
        if isinstance(row.record, schema.RunClaimed):
            incarnation = row.record.incarnation
        elif isinstance(row.record, schema.StepsReverted):
            found.append((incarnation, row.record.to_step))
    return found


def quarantined(store: Store, run: str) -> list[dict[str, Any]]:
    """Groups that spent their attempt budget, in order of the source: why, and the attempts of each sibling."""
    ledger = Ledger(open_run(store, run).num_siblings)
    for segment in read_all(store, run):
        fold_segment(ledger, segment)
    return [
        {"group": ordinal, "reason": found.reason, "attempts": [attempt + 1 for attempt in found.attempts]}
        for ordinal, found in sorted(ledger.quarantined.items())
    ]


def owed(store: Store, run: str) -> list[dict[str, Any]]:
    """Processes of hosts that wait for acknowledgements, and for how many."""
    counted: Counter[tuple[str, str]] = Counter()
    for one in fold(store, run, open_run(store, run).num_siblings)[0].obligations.values():
        counted[one.receipt.host, one.receipt.boot] += 1
    return [{"host": host, "boot": boot, "owed": count} for (host, boot), count in sorted(counted.items())]


def group_history(store: Store, run: str, ordinal: int) -> list[dict[str, Any]]:
    """Every record that names a group, in order. States and replies are shown as text where they are text."""
    open_run(store, run)
    return [
        {"seq": row.seq, "time": row.time, "kind": KIND_OF[type(row.record)], **_shown(row.record)}
        for row in _rows(store, run)
        if _names(row.record, ordinal)
    ]


def _rows(store: Store, run: str) -> Iterator[Row]:
    for segment in read_all(store, run):
        yield from segment.rows


def _shown(record: Record) -> dict[str, Any]:
    found = msgspec.to_builtins(record, builtin_types=(bytes,))
    return {name: _text(value) if isinstance(value, bytes) else value for name, value in found.items()}


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(data).decode()}"


def _names(record: Record, ordinal: int) -> bool:
    if isinstance(record, schema.Forked):
        return ordinal < record.frontier
    if isinstance(record, schema.GroupReserved | schema.GroupsDispatched):
        return record.first <= ordinal < record.first + record.count
    return getattr(record, "group", None) == ordinal or ordinal in getattr(record, "groups", ())
