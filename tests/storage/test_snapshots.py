"""Ledger snapshots: a restore that begins with one ends where a whole fold ends, and reads a bounded number of
objects."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from storage import schema, snapshot
from storage import verify as verifying
from storage.archivist import Archivist
from storage.clock import VirtualClock
from storage.errors import ArtifactCorrupt, LedgerInvalid, SchemaUnsupported, SlotsRetired
from storage.filesystem import Bytes
from storage.history import read_all
from storage.journal import (
    JournalWriter,
    Tail,
    after,
    claim,
    find_end,
    fold,
    fold_segment,
    read_journal,
    recorded_snapshots,
    restore_point,
    store_frozen,
)
from storage.ledger import Ledger
from storage.low import retire_slots
from storage.memory import MemoryStore
from storage.runs import RunPaths, create_run, make_run
from storage.segment import Row, Segment
from storage.snapshot import ledger_rows, rebuild
from storage.transitions import apply
from storage.verify import verify
from tests.simulation.shapes import SHAPES
from tests.simulation.world import RUN, World, play
from tests.storage.editing import rewrite


class Counting(MemoryStore):
    """Counts what is asked for, and lists nothing, as a listing that is late does."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.asked["read"] += 1
        return super().read(key, start, end)

    def size(self, key: str) -> int | None:
        self.asked["size"] += 1
        return super().size(key)

    def list(self, prefix: str, after: str = "") -> list[str]:
        self.asked["list"] += 1
        return []


class Journal:
    """A run that is written by hand: one segment per call of `put`, a ledger snapshot every `every` segments."""

    def __init__(self, store: MemoryStore, every: int = 0) -> None:
        self.store, self.every = store, every
        create_run(store, make_run(run=RUN, created=0.0, num_siblings=1, staleness=None, fingerprints={}, settings={}))
        clock = VirtualClock()
        claimed = claim(store, RUN, 1, owner="o", writer="w", reason="start", clock=clock)
        self.ledger, self.writer = claimed.ledger, JournalWriter(RUN, 1, "w", claimed.tail, clock)
        self.archivist = Archivist(store, RUN, 1)

    def put(self, *records: schema.Record) -> None:
        for record in records:
            apply(self.ledger, self.ledger.next_seq, record)
            self.writer.append(record)
        frozen = self.writer.freeze()
        store_frozen(self.store, RUN, 1, frozen)
        self.writer.confirm(frozen)
        self.ledger.placed(frozen.slot, frozen.last)
        newest = self.ledger.snapshot.slot if self.ledger.snapshot else 0
        if self.every and self.writer.slot - newest >= self.every:
            self.archive()

    def archive(self) -> schema.LedgerSnapshot:
        """Recorded with whatever is put next."""
        record = self.archivist.snapshot(self.writer.slot)
        apply(self.ledger, self.ledger.next_seq, record)
        self.writer.append(record)
        return record

    def go_on(self, segments: int) -> None:
        """A group that is handed out and discarded per segment; every tenth stays."""
        for _ in range(segments):
            ordinal = self.ledger.frontier
            settle = [schema.GroupDiscarded((ordinal,), "test")] if ordinal % 10 else []
            self.put(schema.GroupReserved(ordinal, 1), *settle)


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    """Runs with everything in them, with and without snapshots of their own."""
    return [play(seed, SHAPES["large"])[0] for seed in range(4)]


def test_a_ledger_of_any_moment_is_the_same_after_it_was_written_down_and_read(worlds: list[World]) -> None:
    """And what is folded on top of it is the same as ever after, to the last row."""
    moments = 0
    for world in worlds:
        ledger = Ledger(world.limits.num_siblings)
        restored: list[Ledger] = []
        for segment in read_all(world.store, RUN):
            fold_segment(ledger, segment)
            for other in restored:
                fold_segment(other, segment)
            restored = [*restored[-3:], rebuild(ledger_rows(ledger))]
            for other in restored:
                assert ledger_rows(other) == ledger_rows(ledger)
                for derived in ("totals", "live", "dispatched", "oldest_counts", "completed", "blocks"):
                    assert getattr(other, derived) == getattr(ledger, derived), derived
            moments += 1
    assert moments > 100


def test_a_fold_from_a_snapshot_ends_where_a_whole_fold_ends(worlds: list[World]) -> None:
    used = 0
    for world in worlds:
        whole, tail = Ledger(world.limits.num_siblings), Tail()
        for segment in read_all(world.store, RUN):
            fold_segment(whole, segment)
            tail = after(segment)
        found, end = fold(world.store, RUN, world.limits.num_siblings)
        assert (ledger_rows(found), end) == (ledger_rows(whole), tail)
        used += restore_point(world.store, RUN, world.limits.num_siblings)[1].slot > 0
    assert used, "no world took a snapshot"


@pytest.mark.parametrize("low", [0, 1, 7])
def test_the_end_of_a_journal_is_found_whatever_its_length(low: int) -> None:
    store, paths = Counting(), RunPaths(RUN)
    for length in range(low, 70):
        store.asked.clear()
        assert find_end(store, RUN, low) == length
        assert store.asked["size"] <= 2 * max(1, length - low).bit_length() + 1
        store.create(paths.segment(length), b"x") if length >= low else None


@pytest.mark.parametrize(
    ("segments", "most"),
    [(3_000, 120), pytest.param(86_400, 200, marks=pytest.mark.slow, id="a day of one segment per second")],
)
def test_a_restore_reads_a_bounded_number_of_objects_and_no_listing(segments: int, most: int) -> None:
    store = Counting()
    journal = Journal(store, every=64)
    journal.go_on(segments)
    store.asked.clear()
    found, tail = fold(store, RUN, 1)
    assert ledger_rows(found) == ledger_rows(journal.ledger)
    assert tail.slot == segments + 1
    assert store.asked["read"] + store.asked["size"] <= most, store.asked
    store.asked.clear()
    claim(store, RUN, 1, owner="o", writer="next", reason="resume", clock=VirtualClock())
    assert store.asked["read"] + store.asked["size"] <= most, store.asked


# ---------------------------------------------------------------------- damage


def written(snapshots: int = 3) -> Journal:
    journal = Journal(MemoryStore())
    for _ in range(snapshots):
        journal.go_on(5)
        journal.archive()
    journal.go_on(3)
    return journal


def key_of(record: schema.LedgerSnapshot) -> str:
    return RunPaths(RUN).snapshot(record.slot, record.digest)


def alter(store: MemoryStore, key: str, change: Callable[[bytes], Bytes | None]) -> None:
    data = store.read(key)
    store.delete([key])
    altered = change(data)
    if altered is not None:
        store.create(key, altered)


def flipped(data: bytes) -> bytes:
    place = random.Random(0).randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:100], lambda data: None], ids=["bit", "cut", "gone"])
@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_a_damaged_snapshot_is_passed_over_with_the_reason_and_verify_names_it(
    damage: Callable[[bytes], Bytes | None], damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    journal = written()
    records = list(recorded_snapshots(journal.store, RUN))
    assert [record.slot for record in records] == [16, 11, 6]
    for record in records[:damaged]:
        alter(journal.store, key_of(record), damage)
    found, tail = restore_point(journal.store, RUN, 1)
    assert tail.slot == [16, 11, 6, 0][damaged]
    assert caplog.text.count("decision=take_an_older_one") == damaged
    assert ledger_rows(fold(journal.store, RUN, 1)[0]) == ledger_rows(journal.ledger)
    assert found.next_seq == tail.seq
    report = verify(journal.store, RUN)
    assert key_of(records[damaged - 1]) in "\n".join(report.problems)


def test_without_any_place_to_begin_the_journal_is_refused() -> None:
    journal = written()
    low = 12
    retire_slots(journal.store, RUN, range(1, low), low)
    assert ledger_rows(fold(journal.store, RUN, 1)[0]) == ledger_rows(journal.ledger), "from the newest snapshot"
    alter(journal.store, key_of(next(recorded_snapshots(journal.store, RUN))), flipped)
    with pytest.raises(SlotsRetired):
        fold(journal.store, RUN, 1)


def test_every_flipped_bit_of_a_snapshot_is_detected() -> None:
    journal = written(1)
    (record,) = recorded_snapshots(journal.store, RUN)
    data, dice = journal.store.read(key_of(record)), random.Random(1)
    for _ in range(300):
        place, bit = dice.randrange(len(data)), 1 << dice.randrange(8)
        alter(journal.store, key_of(record), lambda _, p=place, b=bit: data[:p] + bytes([data[p] ^ b]) + data[p + 1 :])
        with pytest.raises(ArtifactCorrupt, match="sha256"):
            snapshot.read_snapshot(journal.store, RUN, record, 1)


def test_a_snapshot_that_says_something_else_than_the_records_is_found_by_verify() -> None:
    """Written again with a fitting name and digest, by whatever wrong program."""
    journal = Journal(MemoryStore())
    journal.go_on(5)
    other = rebuild(ledger_rows(journal.ledger))
    other.counts["groups_lost"] += 1
    record = snapshot.write_snapshot(journal.store, RUN, other, journal.writer.slot, journal.writer.tail.digest)
    journal.put(record)
    assert "differs from the records before it" in "\n".join(verify(journal.store, RUN).problems)


def test_a_pointer_that_no_record_bears_out_is_refused() -> None:
    journal = written(1)

    def drop(rows: list[Row], incarnations: list[int]) -> None:
        kept = [at for at, row in enumerate(rows) if not isinstance(row.record, schema.LedgerSnapshot)]
        rows[:], incarnations[:] = [rows[at] for at in kept], [incarnations[at] for at in kept]

    record = next(recorded_snapshots(journal.store, RUN))
    rewrite(journal.store, RUN, drop, snapshot=record)
    first = next(read_journal(journal.store, RUN))
    with pytest.raises(ArtifactCorrupt, match="points to the ledger snapshot"):
        fold_segment(Ledger(1), first)


def test_a_snapshot_of_other_fields_is_refused_and_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(MemoryStore())
    journal.go_on(5)
    monkeypatch.setattr(snapshot, "FIELD_HASH", "another")
    journal.archive()
    journal.go_on(1)
    monkeypatch.undo()
    with pytest.raises(SchemaUnsupported, match="another"):
        fold(journal.store, RUN, 1)


def test_rows_that_are_no_ledger_are_refused() -> None:
    rows = ledger_rows(written().ledger)
    for broken in ([], rows[1:], [*rows, rows[-1]._replace(kind="other")], [rows[0]._replace(body=b"\xc1"), *rows[1:]]):
        with pytest.raises(LedgerInvalid):
            rebuild(broken)


# ---------------------------------------------------------------------- archivists


def test_only_the_newest_snapshots_are_kept_however_old_the_run() -> None:
    journal = written(9)
    journal.archive()
    journal.go_on(1)
    recorded = list(recorded_snapshots(journal.store, RUN))
    there = set(journal.store.list(RunPaths(RUN).ledger))
    assert len(recorded) == snapshot.KEPT + 1
    assert there == {key_of(record) for record in recorded}, "one more until the next is written"
    report = verify(journal.store, RUN)
    assert (report.problems, report.snapshots) == ([], snapshot.KEPT + 1)
    assert ledger_rows(fold(journal.store, RUN, 1)[0]) == ledger_rows(journal.ledger)


def test_a_snapshot_that_newer_ones_replace_while_verify_reads_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = written(3)
    whole = verifying.read_all

    def read(store: MemoryStore, run: str) -> Iterator[Segment]:
        """The run goes on as soon as the audit has begun."""
        for _ in range(4):
            journal.archive()
            journal.go_on(1)
        yield from whole(store, run)

    monkeypatch.setattr(verifying, "read_all", read)
    report = verify(journal.store, RUN)
    assert report.sound, report.problems
    assert len(journal.store.list(RunPaths(RUN).ledger)) == snapshot.KEPT + 1


def test_an_archivist_that_slept_while_slots_were_retired_goes_on_from_the_newest_snapshot() -> None:
    journal = written()
    old = Archivist(journal.store, RUN, 1)
    old.snapshot(3)
    retire_slots(journal.store, RUN, range(1, 16), 16)
    expected = Archivist(journal.store, RUN, 1).snapshot(journal.writer.slot)
    assert old.snapshot(journal.writer.slot) == expected
    assert old.snapshot(18) == Archivist(journal.store, RUN, 1).snapshot(18), "also back"


def test_two_archivists_write_the_same_object() -> None:
    journal = written()
    one, two = (Archivist(journal.store, RUN, 1) for _ in range(2))
    assert one.snapshot(10) == two.snapshot(10)
    assert one.snapshot(19) == two.snapshot(19)


def test_an_archivist_refuses_a_slot_that_does_not_exist() -> None:
    journal = written()
    with pytest.raises(ArtifactCorrupt, match="ends at slot 19"):
        Archivist(journal.store, RUN, 1).snapshot(25)
