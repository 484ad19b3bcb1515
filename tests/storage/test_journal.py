"""Segments, the hash chain, claims, fencing, lost replies."""

from __future__ import annotations

import random
import threading

import msgspec
import pyarrow as pa
import pytest

from storage import schema
from storage.clock import VirtualClock
from storage.errors import (
    ArtifactCorrupt,
    CommitUnknown,
    RunFenced,
    SchemaUnsupported,
    StoreUnavailable,
    TidegateError,
    TwoOwners,
)
from storage.filesystem import Bytes
from storage.journal import Claimed, JournalWriter, claim, fold, read_journal, store_frozen
from storage.memory import MemoryStore
from storage.runs import RunPaths
from storage.segment import GENESIS, Row, decode_segment, encode_segment, make_header
from tests.storage.editing import rewrite

CLOCK = VirtualClock()


def start(store: MemoryStore, writer: str = "w1") -> tuple[JournalWriter, Claimed]:
    claimed = claim(store, "r", 2, owner="test", writer=writer, reason="start", clock=CLOCK)
    return JournalWriter("r", claimed.incarnation, writer, claimed.tail, CLOCK), claimed


def put(store: MemoryStore, writer: JournalWriter, incarnation: int, *records: schema.Record) -> None:
    for record in records:
        writer.append(record)
    frozen = writer.freeze()
    store_frozen(store, "r", incarnation, frozen)
    writer.confirm(frozen)


def segment_bytes() -> bytes:
    rows = [Row(0, 1.5, schema.RunClaimed(1, "o", "r")), Row(1, 2.5, schema.PayloadStored("b", "d", 3, True), b"xyz")]
    header = make_header(run="r", incarnation=1, writer="w", slot=0, first=0, last=1, previous=GENESIS)
    return encode_segment(header, rows)[0]


def test_a_segment_is_a_plain_arrow_file_that_reads_back() -> None:
    data = segment_bytes()
    table = pa.ipc.open_file(data).read_all()
    assert table.column("kind").to_pylist() == ["run_claimed", "payload_stored"]
    segment = decode_segment(data, "x")
    assert segment.rows[1] == Row(1, 2.5, schema.PayloadStored("b", "d", 3, True), b"xyz")
    assert segment.header.run == "r"


@pytest.mark.parametrize("digits", ["0" * 64, "ab" * 32, "ab" * 20, ""])
def test_records_may_hold_any_bytes_even_those_that_mark_a_digest(digits: str) -> None:
    """An environment's state or an error's text is whatever a user's code makes it."""
    text = f"tidegate-segment-sha256:{digits}"
    rows = [
        Row(0, 1.5, schema.RunClaimed(1, "o", text)),
        Row(1, 2.5, schema.PayloadStored("b", "d", 3, True), text.encode() * 3),
    ]
    header = make_header(run="r", incarnation=1, writer="w", slot=0, first=0, last=1, previous=GENESIS)
    data, digest = encode_segment(header, rows)
    segment = decode_segment(data, "x")
    assert (segment.rows, segment.digest) == (rows, digest)


def test_every_flipped_bit_and_every_truncation_is_detected_before_parsing() -> None:
    data = segment_bytes()
    dice = random.Random(0)
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << dice.randrange(8)
        with pytest.raises(ArtifactCorrupt):
            decode_segment(bytes(altered), "x")
    for length in range(0, len(data), 7):
        with pytest.raises(ArtifactCorrupt):
            decode_segment(data[:length], "x")


@pytest.mark.parametrize("what", ["schema", "fields", "kind", "field"])
def test_unknown_schema_fields_kinds_and_columns_are_refused_by_name(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import storage.segment as module

    header = make_header(run="r", incarnation=1, writer="w", slot=0, first=0, last=0, previous=GENESIS)
    row = Row(0, 1.0, schema.RunClaimed(1, "o", "r"))
    if what == "schema":
        monkeypatch.setattr(module, "SCHEMA", 2)
        header = make_header(run="r", incarnation=1, writer="w", slot=0, first=0, last=0, previous=GENESIS)
    elif what == "fields":
        monkeypatch.setattr(module, "FIELD_HASH", "other")
        header = make_header(run="r", incarnation=1, writer="w", slot=0, first=0, last=0, previous=GENESIS)
    elif what == "kind":
        monkeypatch.setitem(module.KIND_OF, schema.RunClaimed, "run_teleported")
    else:
        plain = msgspec.json.encode

        def moody(record: object) -> bytes:
            text = plain(record)
            return text[:-1] + b',"mood":3}' if isinstance(record, schema.RunClaimed) else text

        monkeypatch.setattr(module, "_encode", moody)
    data, _ = encode_segment(header, [row])
    monkeypatch.undo()
    with pytest.raises(SchemaUnsupported) as caught:
        decode_segment(data, "x")
    assert caught.value.exit_code == 2


def test_a_journal_reads_back_in_order_and_folds() -> None:
    store = MemoryStore()
    writer, claimed = start(store)
    put(store, writer, 1, schema.GroupReserved(0, 3))
    put(store, writer, 1, schema.GroupReserved(3, 1))
    ledger, tail = fold(store, "r", 2)
    assert (ledger.frontier, ledger.incarnation, tail.slot, tail.seq) == (4, 1, 3, 3)
    assert claimed.incarnation == 1


@pytest.mark.parametrize("missing", [(1,), (2,), (1, 2), (0,), (0, 1, 2)])
def test_a_removed_segment_with_later_ones_behind_it_is_never_taken_for_the_end(missing: tuple[int, ...]) -> None:
    store = MemoryStore()
    writer, _ = start(store)
    for first in range(3):
        put(store, writer, 1, schema.GroupReserved(first, 1))
    for slot in missing:
        store.delete([RunPaths("r").segment(slot)])
    before = dict(store._objects)
    with pytest.raises(ArtifactCorrupt, match="later segments"):
        list(read_journal(store, "r"))
    with pytest.raises(ArtifactCorrupt, match="later segments"):
        claim(store, "r", 2, owner="x", writer="late", reason="z", clock=CLOCK)
    assert store._objects == before, "nothing was written into the hole"


def test_a_segment_that_appears_between_probe_and_listing_is_read_and_is_no_hole() -> None:
    class Growing(MemoryStore):
        grow = False

        def list(self, prefix: str, after: str = "") -> list[str]:
            if self.grow:
                self.grow = False
                for first in (1, 2):
                    put(self, writer, 1, schema.GroupReserved(first, 1))
            return super().list(prefix, after)

    store = Growing()
    writer, _ = start(store)
    put(store, writer, 1, schema.GroupReserved(0, 1))
    store.grow = True
    assert fold(store, "r", 2)[0].frontier == 3


@pytest.mark.parametrize("change", ["swap", "drop", "copy", "other_run"])
def test_moved_missing_and_mixed_segments_break_the_chain(change: str) -> None:
    store = MemoryStore()
    writer, _ = start(store)
    for first in range(3):
        put(store, writer, 1, schema.GroupReserved(first, 1))
    keys = [RunPaths("r").segment(slot) for slot in range(4)]
    objects = store._objects
    if change == "swap":
        objects[keys[1]], objects[keys[2]] = objects[keys[2]], objects[keys[1]]
    elif change == "drop":
        objects[keys[1]] = objects.pop(keys[2])
    elif change == "copy":
        objects[keys[2]] = objects[keys[1]]
    else:
        other = MemoryStore()
        claim(other, "r2", 2, owner="x", writer="y", reason="z", clock=CLOCK)
        objects[keys[0]] = other._objects[RunPaths("r2").segment(0)]
    with pytest.raises(ArtifactCorrupt):
        list(read_journal(store, "r"))


def test_a_new_claim_fences_the_old_writer_and_only_then() -> None:
    store = MemoryStore()
    old, _ = start(store, "w1")
    put(store, old, 1, schema.GroupReserved(0, 1))
    new, claimed = start(store, "w2")
    assert claimed.incarnation == 2
    old.append(schema.GroupReserved(1, 1))
    frozen = old.freeze()
    for _ in range(2):
        with pytest.raises(RunFenced, match="incarnation 2"):
            store_frozen(store, "r", 1, frozen)
    put(store, new, 2, schema.GroupReserved(1, 1))
    assert fold(store, "r", 2)[0].frontier == 2


def test_a_lost_reply_is_read_back_as_success() -> None:
    class Losing(MemoryStore):
        lose = False

        def create(self, key: str, data: Bytes) -> None:
            super().create(key, data)
            if self.lose:
                raise CommitUnknown("no reply", expected="a reply", action="read back")

    store = Losing()
    writer, _ = start(store)
    store.lose = True
    writer.append(schema.GroupReserved(0, 1))
    frozen = writer.freeze()
    with pytest.raises(CommitUnknown):
        store_frozen(store, "r", 1, frozen)
    store_frozen(store, "r", 1, frozen)
    writer.confirm(frozen)
    assert writer.durable_seq == 1


def test_a_refused_write_is_stored_by_the_next_try_with_the_same_bytes() -> None:
    class Refusing(MemoryStore):
        refuse = 0

        def create(self, key: str, data: Bytes) -> None:
            if self.refuse:
                self.refuse -= 1
                raise StoreUnavailable("503", expected="room", action="retry")
            super().create(key, data)

    store = Refusing()
    writer, _ = start(store)
    writer.append(schema.GroupReserved(0, 1))
    frozen = writer.freeze()
    writer.append(schema.GroupReserved(1, 1))
    store.refuse = 2
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store_frozen(store, "r", 1, frozen)
    store_frozen(store, "r", 1, frozen)
    writer.confirm(frozen)
    assert (writer.durable_seq, writer.last_seq) == (1, 2)


def test_two_writers_of_one_incarnation_are_both_told() -> None:
    store = MemoryStore()
    writer, claimed = start(store)
    twin = JournalWriter("r", 1, "twin", claimed.tail, CLOCK)
    put(store, writer, 1, schema.GroupReserved(0, 1))
    twin.append(schema.GroupReserved(0, 1))
    with pytest.raises(TwoOwners, match="two writers"):
        store_frozen(store, "r", 1, twin.freeze())


def test_simultaneous_claimants_all_win_different_incarnations_and_leave_no_hole() -> None:
    for round_ in range(20):
        store = MemoryStore()
        won: list[int] = []
        barrier = threading.Barrier(4)

        def run(
            name: str, store: MemoryStore = store, won: list[int] = won, barrier: threading.Barrier = barrier
        ) -> None:
            barrier.wait()
            won.append(claim(store, "r", 2, owner=name, writer=name, reason="race", clock=CLOCK).incarnation)

        threads = [threading.Thread(target=run, args=(f"c{round_}-{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [1, 2, 3, 4]
        assert [segment.header.incarnation for segment in read_journal(store, "r")] == [1, 2, 3, 4]


def test_group_commit_cuts_at_once_for_a_waiter_and_else_at_the_interval_or_size() -> None:
    clock = VirtualClock()
    store = MemoryStore()
    claimed = claim(store, "r", 2, owner="t", writer="w", reason="s", clock=clock)
    writer = JournalWriter("r", 1, "w", claimed.tail, clock)
    assert not writer.due(0.25, 1000)
    seq = writer.append(schema.GroupReserved(0, 1))
    assert not writer.due(0.25, 1000)
    clock.advance(0.3)
    assert writer.due(0.25, 1000)
    frozen = writer.freeze()
    writer.append(schema.GroupReserved(1, 1))
    assert not writer.due(0.0, 1), "one create in flight"
    writer.confirm(frozen)
    assert not writer.due(0.25, 1000)
    writer.want(seq + 1)
    assert writer.due(0.25, 1000)
    writer.confirm(writer.freeze())
    writer.append(schema.PayloadStored("b", "d", 5000, True), b"x" * 5000)
    assert writer.due(0.25, 1000)


def test_records_of_an_older_incarnation_after_a_claim_are_two_owners() -> None:
    store = MemoryStore()
    writer, _ = start(store)
    put(store, writer, 1, schema.GroupReserved(0, 1))

    def forge(rows: list[Row], incarnations: list[int]) -> None:
        incarnations[-1] = 7

    rewrite(store, "r", forge)
    with pytest.raises(TwoOwners, match="incarnation 7"):
        fold(store, "r", 2)


def test_a_check_that_refuses_the_ledger_prevents_the_claim() -> None:
    store = MemoryStore()
    start(store)

    def refuse(ledger: object) -> None:
        raise TidegateError("no", expected="yes", action="stop")

    with pytest.raises(TidegateError):
        claim(store, "r", 2, owner="t", writer="w2", reason="s", clock=CLOCK, check=refuse)
    assert len(list(read_journal(store, "r"))) == 1
