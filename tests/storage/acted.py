"""Violations inside rollouts: of turns, of answers that are acted on, of what resources were asked. See `violations`.

The runs that they edit act on the model's answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from storage import schema
from storage.journal import fold
from storage.memory import MemoryStore
from storage.payload import TurnRow
from storage.reader import PayloadReader
from storage.samples import assemble_slot
from storage.schema import Record
from tests.simulation.world import RUN
from tests.storage.violations import Edit, Violation, changing, claims, nothing, of, records, restores, turns, twice

CHANGE = schema.RequestResult
"""Of a request that was intended: its revision is not 0 in these runs' first change."""


def of_changes(change: Callable[[Any], Any]) -> Edit:
    """The first result of a request that changed something."""
    return records(lambda record: change(record) if isinstance(record, CHANGE) and record.revision else record, times=1)


def started_over(record: schema.TurnCommitted) -> list[Record]:
    """After its first turn the attempt dies, and the next one knows nothing of it."""
    return [
        record,
        schema.AttemptAbandoned(record.group, record.sibling, record.attempt, "worker_lost", ""),
        schema.AttemptsMinted(record.group, (record.sibling,), (record.attempt + 1,), (-1,), 0),
    ]


def given_up(record: schema.TurnCommitted) -> list[Record]:
    """While an attempt is at work on them."""
    return [record, schema.ContinuationDiscarded((record.group,), (record.sibling,), "because")]


def shifted(record: Any) -> Record:
    return msgspec.structs.replace(record, start=record.start + 1)


def accounts(change: Callable[[TurnRow], TurnRow]) -> Edit:
    """Rows in which an environment speaks of a turn."""
    return turns(lambda row: change(row) if row.is_account else row)


def told_twice(store: MemoryStore) -> None:
    """A slot whose environment speaks twice of one turn."""
    ledger, reader = fold(store, RUN, 2)[0], PayloadReader(store, RUN)
    groups = [group for step in ledger.steps.values() for group in step.lease.groups]
    slots = [
        (group.ordinal, sibling, reader.rows(rows, ledger.blocks))
        for group in groups
        for sibling, rows in enumerate(group.rows)
    ]
    ordinal, sibling, rows = next(slot for slot in slots if any(row.is_account for row in slot[2]))
    assemble_slot([twin for row in rows for twin in [row] * (1 + row.is_account)], ordinal, sibling)


def result_as_intent(record: Any) -> list[Record]:
    """Another request is begun before this one's result."""
    where = (record.group, record.sibling, record.attempt, record.boundary)
    return [schema.RequestIntent(*where, record.cursor + 1, record.resource, record.revision, "other"), record]


V = Violation
VIOLATIONS = [
    V("ContinuationInvalid", "lost", "turns_nobody_gave_up", of(schema.TurnCommitted, started_over), claims),
    V("ContinuationInvalid", "boundary", "answer_repeated", of(schema.ModelAnswered, twice), claims),
    V("ContinuationInvalid", "continuation", "answer_left_out", of(schema.ModelAnswered, lambda record: None), claims),
    V("ContinuationInvalid", "cursor", "intent", of(schema.RequestIntent, lambda record: msgspec.structs.replace(
        record, cursor=record.cursor + 1)), claims),
    V("ContinuationInvalid", "cursor", "result_repeated", of(CHANGE, twice), claims),
    V("LineageInvalid", "chain", "turn", of(schema.TurnCommitted, lambda record: shifted(record) if record.tokens
                                            else record), claims),
    V("LineageInvalid", "chain", "answer", of(schema.ModelAnswered, shifted), claims),
    V("ResourceInvalid", "revision", "intent", changing(schema.RequestIntent, revision=7), claims),
    V("ResourceInvalid", "revision", "result", of_changes(lambda record: msgspec.structs.replace(record, revision=9)),
      claims),
    V("ResourceInvalid", "revision", "turn", changing(schema.TurnCommitted, revisions={"box": 7}), claims),
    V("ResourceInvalid", "revision", "export", changing(schema.ResourceExported, revision=7), claims),
    V("ResourceInvalid", "receipt", "input", of_changes(lambda record: msgspec.structs.replace(record, digest="other")),
      claims),
    V("ResourceInvalid", "open", "result_left_out", of_changes(lambda record: None), claims),
    V("ResourceInvalid", "open", "two_at_once", of_changes(result_as_intent), claims),
    V("IllegalTransition", "illegal_transition", "live_turns_given_up", of(schema.TurnCommitted, given_up), claims),
    V("ReferenceInvalid", "prefix", "account_elsewhere", accounts(lambda row: replace(row, start=row.start + 1)),
      restores),
    V("ReferenceInvalid", "prefix", "account_of_another_sample", accounts(lambda row: replace(row, sample=7)),
      restores),
    V("ReferenceInvalid", "conflict", "account_of_another_rollout", accounts(
        lambda row: replace(row, sibling=1 - row.sibling)), restores),
    V("ReferenceInvalid", "empty", "account_repeated", nothing, told_twice),
]  # fmt: skip
