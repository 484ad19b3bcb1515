"""Snapshots of the ledger: what a restore begins with, so that it reads what happened since and not the whole journal.

A snapshot is an Arrow IPC file of narrow rows (kind, key, msgpack body): one head, then the unsettled groups in their
order, the steps that a redo may need, the blocks they refer to, and quarantined groups. It is named by slot and digest,
written before the record that names it, and proven by that digest before it is parsed. The same ledger always gives the
same rows, whether it was folded from the first slot or from an older snapshot: that is what `verify` compares.
"""

# pyright: reportUnknownMemberType=false
# (pyarrow's stubs are partial)

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from storage import schema
from storage.errors import ArtifactCorrupt, LedgerInvalid
from storage.filesystem import Store, create_same, read_named
from storage.intervals import IntervalSet
from storage.ledger import (
    COMPLETED,
    UNKNOWN_VERSION,
    Block,
    Boundary,
    Export,
    Group,
    Inherited,
    Lease,
    Ledger,
    Obligation,
    Policy,
    Quarantined,
    Recipe,
    Requested,
    Rollout,
    Step,
    TrainedGroup,
)
from storage.runs import RunPaths
from storage.upgrades import Change, changed, changes

FORMAT = "tidegate-ledger"
KEPT = 3
"""Recorded snapshots that stay: one to begin with, and two for when it is damaged. A snapshot costs what is unsettled,
so without a bound their sum would outgrow everything else."""
T = TypeVar("T")


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ledger's fields that are not tables. `completed` is in order; the rest of what is counted follows from the
    tables."""

    num_siblings: int
    incarnation: int
    recipe: Recipe
    frontier: int
    completed: list[int]
    consumed: list[tuple[int, int]]
    discarded: list[tuple[int, int]]
    lease: Lease | None
    next_lease: int
    step: int
    state_digest: str
    weights_digest: str
    checkpoints: list[schema.CheckpointPublished]
    kept: list[schema.CheckpointPublished]
    retired: list[schema.CheckpointPublished]
    retired_blocks: list[str]
    policy: Policy | None
    initial_weights: str
    obligations: list[Obligation]
    due: list[tuple[str, int]]
    evaluated: list[tuple[str, int]]
    settings: dict[str, str]
    snapshot: schema.LedgerSnapshot | None
    history: list[str]
    replaced: list[str]
    inherited: Inherited | None
    finished: str
    counts: dict[str, int]
    next_seq: int


class SnapshotRow(NamedTuple):
    """`key` is an ordinal or a step, 0 otherwise; `name` that of a block."""

    kind: str
    key: int
    name: str
    body: bytes


class SnapshotHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    schema: int
    fields: str
    run: str
    slot: int


_TYPES: dict[str, type] = {
    "head": Head, "group": Group, "rollout": Rollout, "boundary": Boundary, "requested": Requested, "export": Export,
    "obligation": Obligation,
    "receipt": schema.Receipt, "recipe": Recipe, "lease": Lease,
    "trained": TrainedGroup, "step": Step, "block": Block, "quarantined": Quarantined, "policy": Policy,
    "inherited": Inherited,
}  # fmt: skip
FIELD_HASH = schema.field_hash({**_TYPES, **schema.KINDS})
_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        pa.field("key", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
    ]
)
_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decoders = {kind: msgspec.msgpack.Decoder(_TYPES[kind]) for kind in ("head", "group", "step", "block", "quarantined")}


def ledger_rows(ledger: Ledger) -> list[SnapshotRow]:
    """A ledger between two segments, as rows."""
    head = Head(
        ledger.num_siblings, ledger.incarnation, ledger.recipe, ledger.frontier, list(ledger.completed),
        ledger.consumed.intervals(), ledger.discarded.intervals(), ledger.lease, ledger.next_lease, ledger.step,
        ledger.state_digest, ledger.weights_digest, ledger.checkpoints, ledger.kept, ledger.retired,
        list(ledger.retired_blocks), ledger.policy, ledger.initial_weights,
        list(ledger.obligations.values()), list(ledger.due), sorted(ledger.evaluated),
        ledger.settings, ledger.snapshot, ledger.history, ledger.replaced, ledger.inherited, ledger.finished,
        +ledger.counts, ledger.next_seq,
    )  # fmt: skip
    return [
        SnapshotRow("head", 0, "", _encode(head)),
        *[SnapshotRow("group", ordinal, "", _encode(group)) for ordinal, group in ledger.groups.items()],
        *[SnapshotRow("step", number, "", _encode(step)) for number, step in ledger.steps.items()],
        *[SnapshotRow("block", 0, name, _encode(block)) for name, block in ledger.blocks.items()],
        *[SnapshotRow("quarantined", ordinal, "", _encode(one)) for ordinal, one in ledger.quarantined.items()],
    ]


def encode_snapshot(run: str, slot: int, rows: list[SnapshotRow]) -> bytes:
    header = SnapshotHeader(FORMAT, schema.SCHEMA, FIELD_HASH, run, slot)
    kinds, keys, names, bodies = zip(*rows, strict=True)
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(kinds, pa.string()),
            pa.array(keys, pa.int64()),
            pa.array(names, pa.string()),
            pa.array(bodies, pa.binary()),
        ],
        schema=_SCHEMA.with_metadata({"tidegate": msgspec.json.encode(header)}),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def write_snapshot(
    store: Store, run: str, ledger: Ledger, slot: int, chain: str, archive: str = "", low: int = 0
) -> schema.LedgerSnapshot:
    """Write the ledger as it is before `slot`, which chains to `chain`; returns the record that makes it count, with
    this `archive` and `low`. May be repeated."""
    data = encode_snapshot(run, slot, ledger_rows(ledger))
    digest = hashlib.sha256(data).hexdigest()
    create_same(store, RunPaths(run).snapshot(slot, digest), data)
    return schema.LedgerSnapshot(slot, ledger.next_seq, chain, digest, len(data), archive, low)


def read_rows(store: Store, run: str, record: schema.LedgerSnapshot) -> list[SnapshotRow]:
    """The rows of a snapshot, proven. Raises `ArtifactCorrupt`, `SchemaUnsupported`."""
    key = RunPaths(run).snapshot(record.slot, record.digest)

    data = read_named(store, key, record.digest, "the snapshot")
    file = pa.ipc.open_file(pa.py_buffer(data))
    steps = _check_header(file.schema, key, run, record.slot)
    columns: list[list[Any]] = [file.get_batch(0).column(name).to_pylist() for name in _SCHEMA.names]
    return [_upgraded(steps, SnapshotRow(*row)) for row in zip(*columns, strict=True)]


def _upgraded(steps: list[Change], row: SnapshotRow) -> SnapshotRow:
    if not steps:
        return row
    kind, content = changed(steps, row.kind, msgspec.msgpack.decode(row.body))
    return row._replace(kind=kind, body=_encode(msgspec.convert(content, _TYPES[kind])))


def _check_header(stated: pa.Schema, key: str, run: str, slot: int) -> list[Change]:
    """What has to be done to the rows of a snapshot of an older schema."""
    header = msgspec.json.decode((stated.metadata or {}).get(b"tidegate", b"{}"))
    steps = changes(key, (header.get("schema"), header.get("fields")), (schema.SCHEMA, FIELD_HASH))
    if (header.get("run"), header.get("slot")) != (run, slot):
        found_in = f"slot {header.get('slot')} of run {header.get('run')!r}"
        raise _corrupt(f"{key} says it is {found_in}", f"slot {slot} of run {run!r}", "mixed_cut")
    return steps


def read_snapshot(store: Store, run: str, record: schema.LedgerSnapshot, num_siblings: int) -> Ledger:
    """The ledger of a snapshot. Raises `ArtifactCorrupt`, `SchemaUnsupported`, `LedgerInvalid`."""
    ledger = rebuild(read_rows(store, run, record))
    if (ledger.next_seq, ledger.num_siblings) != (record.position, num_siblings):
        raise LedgerInvalid(
            f"a snapshot at record {ledger.next_seq} with {ledger.num_siblings} siblings",
            expected=f"record {record.position}, {num_siblings} siblings",
            action="restore the snapshot from a copy",
        )
    return ledger


def rebuild(rows: list[SnapshotRow]) -> Ledger:
    """The ledger that `ledger_rows` was given. Raises `LedgerInvalid` for rows that fit together in no ledger."""
    head, tables = _tables(rows)
    ledger = Ledger(head.num_siblings)
    for name in ("incarnation", "recipe", "frontier", "lease", "next_lease", "step", "state_digest", "weights_digest",
                 "checkpoints", "kept", "retired", "policy", "initial_weights", "settings", "snapshot", "history",
                 "replaced", "inherited", "finished", "next_seq"):  # fmt: skip
        setattr(ledger, name, getattr(head, name))
    ledger.groups, ledger.steps, ledger.quarantined = tables["group"], tables["step"], tables["quarantined"]
    ledger.blocks, ledger.completed = tables["block"], dict.fromkeys(head.completed)
    ledger.consumed, ledger.discarded = IntervalSet.of(head.consumed), IntervalSet.of(head.discarded)
    ledger.retired_blocks = dict.fromkeys(head.retired_blocks)
    ledger.obligations = {(o.group, o.sibling, o.attempt, o.receipt.host): o for o in head.obligations}
    ledger.due, ledger.evaluated = dict.fromkeys(head.due), set(head.evaluated)
    ledger.counts = Counter(head.counts)
    _count(ledger)
    return ledger


def _tables(rows: list[SnapshotRow]) -> tuple[Head, dict[str, dict[Any, Any]]]:
    tables: dict[str, dict[Any, Any]] = {kind: {} for kind in _decoders}
    try:
        for row in rows:
            tables[row.kind][row.name or row.key] = _decoders[row.kind].decode(row.body)
        return tables["head"][0], tables
    except (msgspec.DecodeError, KeyError) as error:
        raise LedgerInvalid(
            f"a snapshot row that is none: {error}", expected="rows of a ledger", action="restore it from a copy"
        ) from error


def _count(ledger: Ledger) -> None:
    """What the ledger counts, from its tables; one name for a block that many rows name."""
    names = {name: name for name in ledger.blocks}
    for group in ledger.groups.values():
        ledger.totals[group.state] += 1
        ledger.live += group.num_live
        ledger.dispatched += group.dispatched
        if group.oldest != UNKNOWN_VERSION:
            ledger.oldest_counts[group.oldest] += 1
        for rollout in group.rollouts:
            if rollout.rows:
                rollout.rows = tuple([(names.get(name, name), row) for name, row in rollout.rows])
    if ledger.completed.keys() != {group.ordinal for group in ledger.groups.values() if group.state is COMPLETED}:
        raise LedgerInvalid(
            "a snapshot whose order of completed groups names others than are completed",
            expected="the same groups",
            action="restore the snapshot from a copy",
        )


def _corrupt(found: str, expected: str, code: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        found, expected=expected, action="restore the object from a copy, or `tidegate fork RUN NEW --last-good`",
        code=code,
    )  # fmt: skip
