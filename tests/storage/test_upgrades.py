"""A run in a made-up earlier revision of the schema is refused without its upgrade; with it, it is read, resumed,
verified and written on, and what was there stays byte for byte as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from storage import checkpoint, payload, publisher, runs, schema, segment, snapshot, upgrades
from storage.buffers import buffers_digest
from storage.capture import CaptureBuffers, capture_of
from storage.clock import VirtualClock
from storage.errors import SchemaUnsupported
from storage.filesystem import Store
from storage.journal import JournalWriter, claim, fold, read_journal, recorded_snapshots, store_frozen
from storage.ledger import Ledger
from storage.memory import MemoryStore
from storage.payload import TurnRow, VersionSpan, encode_block
from storage.publisher import ThreadPublisher
from storage.reader import PayloadReader
from storage.restore import load_base, plan_restore
from storage.runs import RunPaths, make_run, open_run
from storage.schema import FIELD_HASH, SCHEMA, Record
from storage.snapshot import ledger_rows, read_rows, write_snapshot
from storage.transitions import apply
from storage.upgrades import UPGRADES, Revision, Upgrade, changed, changes
from storage.verify import verify
from tests.storage.published_runs import floats

RUN = "r"
PAYLOAD = payload.FORMAT.split()[-1].decode()
CURRENT: dict[str, Revision] = {
    "journal": (SCHEMA, FIELD_HASH),
    "snapshot": (SCHEMA, snapshot.FIELD_HASH),
    "payload": (SCHEMA, PAYLOAD),
    "manifest": (SCHEMA, checkpoint.FORMAT),
}
OLD: dict[str, Revision] = {name: (SCHEMA, f"old-{name}") for name in CURRENT}
RENAMED = {
    "group_reserved": ("number", "count"),
    "run": ("siblings", "num_siblings"),
    "head": ("next_ordinal", "frontier"),
    "manifest": ("state", "meta"),
    "turn": ("score", "reward"),
}
"""By kind: the name of a field in the earlier revision, and now."""


def renamed(content: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in content.items()}


def change(kind: str, content: Any) -> tuple[str, Any]:
    if kind == "group_taken":
        kind = "group_reserved"
    if kind == "head":  # which counts the records of each kind
        content = content | {"counts": renamed(content["counts"], "group_taken", "group_reserved")}
    return kind, renamed(content, *RENAMED[kind]) if kind in RENAMED else content


def back(kind: str, value: Any) -> dict[str, Any]:
    old, new = RENAMED[kind]
    return renamed(msgspec.to_builtins(value), new, old)


@pytest.fixture
def old_store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """The run as the earlier program wrote it, which had other names for some fields and for one kind."""
    plain, packed = segment._encode, snapshot._encode
    with monkeypatch.context() as old:
        old.setattr(segment, "FIELD_HASH", "old-journal")
        old.setattr(runs, "FIELD_HASH", "old-journal")
        old.setattr(snapshot, "FIELD_HASH", "old-snapshot")
        for module in (checkpoint, publisher):
            old.setattr(module, "FORMAT", "old-manifest")
        old.setattr(payload, "FORMAT", f"{payload.NAME} {SCHEMA} old-payload".encode())
        fields = [field.with_name("score") if field.name == "reward" else field for field in payload._SCHEMA]
        old.setattr(payload, "_SCHEMA", pa.schema(fields, {b"format": payload.FORMAT}))
        old.setattr(payload, "WHOLE_BYTES", 1)
        old.setattr(payload, "BATCH_BYTES", 300)
        old.setitem(schema.KIND_OF, schema.GroupReserved, "group_taken")
        old.setattr(
            segment, "_encode",
            lambda one: plain(back("group_reserved", one) if isinstance(one, schema.GroupReserved) else one),
        )  # fmt: skip
        old.setattr(
            snapshot, "_encode", lambda one: packed(back("head", one) if isinstance(one, snapshot.Head) else one)
        )
        store = MemoryStore()
        write(store, old)
    return store


def write(store: Store, old: pytest.MonkeyPatch) -> None:
    info = make_run(
        run=RUN, created=1.5, num_siblings=2, staleness=1, fingerprints={"a": "b"}, settings={"x": {"y": 1}}
    )
    told = back("run", info)
    digest = runs.hashlib.sha256(msgspec.json.encode(told)).hexdigest()
    store.create(RunPaths(RUN).info, msgspec.json.encode({**told, runs.DIGEST: digest}))
    clock = VirtualClock()
    claimed = claim(store, RUN, 2, owner="o", writer="w", reason="start", clock=clock)
    journal = JournalWriter(RUN, claimed.incarnation, "w", claimed.tail, clock)
    write_on(store, claimed.ledger, journal, claimed.incarnation, old)


def flush(store: Store, ledger: Ledger, journal: JournalWriter, incarnation: int) -> None:
    frozen = journal.freeze()
    store_frozen(store, RUN, incarnation, frozen)
    journal.confirm(frozen)
    ledger.placed(frozen.slot, frozen.last)


def putting(ledger: Ledger, journal: JournalWriter) -> Callable[..., None]:
    def put(record: Record, blob: bytes | None = None) -> None:
        apply(ledger, ledger.next_seq, record)
        journal.append(record, blob)

    return put


def turn(group: int, sibling: int) -> TurnRow:
    tokens = np.arange(40, dtype=np.int32) + group
    mask = np.array([0] + [1] * 39, np.int8)
    return TurnRow(group, sibling, 0, 0, 0, 0, tokens, np.linspace(-1, 0, 40, dtype=np.float32), mask,
                   (VersionSpan(1, 0, 39),), True, 0.25 + sibling, '{"a":1}')  # fmt: skip


def seal(name: str, group: int) -> schema.Sealed:
    return schema.Sealed(name, (group,) * 2, (0, 1), (0, 0), (0, 1), (1, 1), (39, 39), (0, 0), (0.25, 1.25))


def write_on(store: Store, ledger: Ledger, journal: JournalWriter, incarnation: int, old: pytest.MonkeyPatch) -> None:
    put = putting(ledger, journal)
    state = {"w": floats(1.0, 2.0)}
    weights = buffers_digest(state)
    put(schema.PolicyPublished(1, 0, "w0", ""))
    put(schema.GroupReserved(0, 3))
    put(schema.GroupsDispatched(0, 3, 2, 0))
    inline = encode_block("in", [turn(0, 0), turn(0, 1)])
    put(schema.PayloadStored("in", inline.digest, len(inline.data), True), inline.data)
    put(seal("in", 0))
    put(schema.GroupCompleted((0,)))
    put(schema.LeaseIssued(1, 1, (0,), 0, False))
    capture = capture_of(1, buffers_digest(state, "{}"), weights, "{}", state, buffers=CaptureBuffers(4096))
    put(schema.StepCommitted(1, 1, capture.state_digest, weights, {"loss": 0.5}))
    position = journal.last_seq
    put(schema.PolicyPublished(1, 1, weights, "w0"))
    flush(store, ledger, journal, incarnation)
    plain = msgspec.json.encode
    with old.context() as manifest:
        manifest.setattr(
            publisher.msgspec.json, "encode",
            lambda one, **more: plain(back("manifest", one) if isinstance(one, checkpoint.Manifest) else one, **more),
        )  # fmt: skip
        written = ThreadPublisher(store).publish(RUN, incarnation, capture, None)
    put(schema.CheckpointPublished(1, position, written.name, written.digest, written.size, written.written))
    flush(store, ledger, journal, incarnation)
    put(write_snapshot(store, RUN, ledger, journal.slot, journal.tail.digest))
    cut = encode_block("cut", [turn(1, 0), turn(1, 1)])
    store.create(RunPaths(RUN).block("cut"), cut.data)
    assert len(cut.batches) == 2
    put(schema.PayloadStored("cut", cut.digest, len(cut.data), False, cut.batches))
    put(seal("cut", 1))
    flush(store, ledger, journal, incarnation)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, revision in OLD.items():
        monkeypatch.setitem(UPGRADES, revision, Upgrade(CURRENT[name], change))


def test_no_upgrade_is_part_of_the_product() -> None:
    assert UPGRADES == {}


def test_without_its_upgrade_every_kind_of_object_is_refused_and_nothing_changes(old_store: MemoryStore) -> None:
    before = dict(old_store._objects)
    record = next(iter(read_with_upgrade(old_store)))
    manifest = old_store.list(RunPaths(RUN).checkpoints)[0]
    digest = checkpoint.hashlib.sha256(before[manifest]).hexdigest()
    block = before[RunPaths(RUN).block("cut")]
    readings: dict[str, Callable[[], object]] = {
        "journal": lambda: open_run(old_store, RUN),
        "segment": lambda: list(read_journal(old_store, RUN)),
        "resume": lambda: claim(old_store, RUN, 2, owner="o", writer="w2", reason="r", clock=VirtualClock()),
        "verify": lambda: verify(old_store, RUN),
        "snapshot": lambda: read_rows(old_store, RUN, record),
        "manifest": lambda: checkpoint.read_manifest(old_store, RUN, manifest.rpartition("/")[2], digest),
        "payload": lambda: payload.decode_block(block, checkpoint.hashlib.sha256(block).hexdigest(), "cut"),
    }
    for name, read in readings.items():
        with pytest.raises(SchemaUnsupported) as caught:
            read()
        kind = name if name in OLD else "journal"
        assert str(OLD[kind][1]) in caught.value.found, name
        assert f"schema {SCHEMA}, fields {CURRENT[kind][1]}" in caught.value.expected, name
        assert caught.value.exit_code == 2
    assert old_store._objects == before


def read_with_upgrade(store: Store) -> list[schema.LedgerSnapshot]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(UPGRADES, OLD["journal"], Upgrade(CURRENT["journal"], change))
        return list(recorded_snapshots(store, RUN))


@pytest.mark.usefixtures("registered")
def test_a_run_of_an_earlier_revision_is_read_resumed_written_on_and_verified(old_store: MemoryStore) -> None:
    before = dict(old_store._objects)
    assert (open_run(old_store, RUN).num_siblings, open_run(old_store, RUN).fields) == (2, FIELD_HASH)
    first = next(read_journal(old_store, RUN))
    ledger, _ = fold(old_store, RUN, 2)
    assert (ledger.frontier, ledger.step, first.header.fields) == (3, 1, FIELD_HASH)
    report = verify(old_store, RUN)
    assert (report.problems, report.snapshots, report.consumed) == ([], 1, 1)
    base = load_base(old_store, plan_restore(ledger, RUN))
    assert (base.step, base.rejected, list(base.buffers)) == (1, [], ["w"])
    reader = PayloadReader(old_store, RUN)
    for name, group in (("in", 0), ("cut", 1)):
        rows = reader.rows([(name, 0), (name, 1)], ledger.blocks)
        assert [(row.group, row.reward, list(row.tokens)) for row in rows] == [
            (group, one.reward, list(one.tokens)) for one in (turn(group, 0), turn(group, 1))
        ]

    clock = VirtualClock()
    claimed = claim(old_store, RUN, 2, owner="o", writer="w2", reason="resume", clock=clock)
    journal = JournalWriter(RUN, claimed.incarnation, "w2", claimed.tail, clock)
    put = putting(claimed.ledger, journal)
    put(schema.GroupReserved(3, 2))
    flush(old_store, claimed.ledger, journal, claimed.incarnation)
    put(write_snapshot(old_store, RUN, claimed.ledger, journal.slot, journal.tail.digest))
    put(schema.GroupDiscarded((2, 3, 4), "test"))
    flush(old_store, claimed.ledger, journal, claimed.incarnation)

    again, _ = fold(old_store, RUN, 2)
    assert ledger_rows(again) == ledger_rows(claimed.ledger)
    report = verify(old_store, RUN)
    assert (report.problems, report.snapshots, report.discarded, report.incarnations) == ([], 2, 3, 2)
    assert {key: old_store._objects[key] for key in before} == before
    new = old_store._objects[RunPaths(RUN).segment(claimed.tail.slot)]
    assert FIELD_HASH.encode() in new
    assert b"old-journal" not in new


@pytest.mark.usefixtures("registered")
def test_a_damaged_run_description_of_an_earlier_revision_is_still_noticed(old_store: MemoryStore) -> None:
    key = RunPaths(RUN).info
    old_store._objects[key] = old_store._objects[key].replace(b'"siblings":2', b'"siblings":3')
    with pytest.raises(runs.ArtifactCorrupt) as caught:
        open_run(old_store, RUN)
    assert caught.value.code == "digest"


def test_upgrades_of_several_revisions_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def adding(letter: str) -> upgrades.Change:
        return lambda kind, content: (kind + letter, [*content, letter])

    monkeypatch.setitem(UPGRADES, (1, "a"), Upgrade((2, "b"), adding("b")))
    monkeypatch.setitem(UPGRADES, (2, "b"), Upgrade((3, "c"), adding("c")))
    monkeypatch.setitem(UPGRADES, (1, "x"), Upgrade((1, "y"), adding("y")))
    assert changed(changes("it", (1, "a"), (3, "c")), "k", []) == ("kbc", ["b", "c"])
    assert changed(changes("it", (2, "b"), (3, "c")), "k", []) == ("kc", ["c"])
    assert changes("it", (3, "c"), (3, "c")) == []
    for unknown in ((1, "x"), (4, "d"), (None, b"?"), (1, "c")):
        with pytest.raises(SchemaUnsupported) as caught:
            changes("it", unknown, (3, "c"))
        expected = "schema 3, fields c or schema 1, fields a or schema 2, fields b"
        assert caught.value.expected == expected
