"""History: retired slots are read back as they were, archives stay few, and whatever fails on the way loses nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from storage import history, schema
from storage.archives import Archive, amended, whole
from storage.archivist import Archivist
from storage.clock import VirtualClock
from storage.errors import ArtifactCorrupt, LedgerInvalid, StorageUnusable, StoreUnavailable
from storage.filesystem import Bytes
from storage.history import FANOUT, LARGE, archived_rows, history_of, read_all, read_archive, to_merge
from storage.journal import claim, fold, read_segment
from storage.low import read_low
from storage.memory import MemoryStore
from storage.reader import PayloadReader
from storage.runs import RunPaths
from storage.segment import Segment
from storage.snapshot import ledger_rows
from storage.transitions import apply
from storage.verify import verify
from tests.simulation.shapes import SHAPES
from tests.simulation.world import RUN, play
from tests.storage.test_snapshots import Journal, alter, flipped, key_of

PATHS = RunPaths(RUN)


def segments_of(journal: Journal) -> list[Segment]:
    return list(read_all(journal.store, RUN))


class Remembering(Journal):
    """Keeps what it wrote."""

    def __init__(self, store: MemoryStore, every: int = 0) -> None:
        super().__init__(store, every)
        self.wrote = [read_segment(store, RUN, 0)]

    def put(self, *records: schema.Record) -> None:
        super().put(*records)
        self.wrote.append(read_segment(self.store, RUN, len(self.wrote)))


def test_what_is_read_back_are_the_very_segments_however_much_was_retired_and_merged() -> None:
    journal = Remembering(MemoryStore(), every=3)
    for _ in range(70):
        journal.go_on(5)
        assert segments_of(journal) == journal.wrote
    low = read_low(journal.store, RUN)
    assert low > 300
    assert read_segment(journal.store, RUN, 0) is not None, "the claim stays"
    assert all(read_segment(journal.store, RUN, slot) is None for slot in range(1, low))
    assert any(Archive.of(name).end - Archive.of(name).first > 20 for name in history_of(journal.store, RUN)), "merged"
    found = verify(journal.store, RUN)
    assert (found.problems, found.segments, found.segments_retired) == ([], len(journal.wrote), low)


def test_nothing_but_what_the_journal_names_is_left() -> None:
    journal = Journal(MemoryStore(), every=3)
    journal.go_on(600)
    ledger, _ = fold(journal.store, RUN, 1)
    there = set(journal.store.list(PATHS.history))
    named = {PATHS.archive(name) for name in [*ledger.history, *ledger.replaced]}
    assert there - named == set() or len(there - named) == 1, "that of a snapshot which is not recorded yet"
    assert set(map(PATHS.archive, ledger.history)) <= there


@pytest.mark.parametrize("seed", range(20))
def test_archives_stay_few_whatever_their_sizes(seed: int) -> None:
    dice, sizes = random.Random(seed), list[int]()
    written = total = 0
    for _ in range(3000):
        size = int(2 ** dice.uniform(8, 24))
        total += size
        while count := to_merge([size, *reversed(sizes)]):
            assert count >= FANOUT
            size += sum(sizes[1 - count :])
            del sizes[1 - count :]
        sizes.append(size)
        written += size
        large = sum(one > LARGE for one in sizes)
        assert large <= total / LARGE
        assert len(sizes) <= FANOUT * (large + 1), (
            "fewer than that many small ones before, between and after large ones"
        )
    assert written <= 6 * total


def test_a_group_whose_payload_lies_in_a_retired_slot_is_read_from_its_archive() -> None:
    found = 0
    for seed in range(12):
        world, _ = play(seed, SHAPES["large"])
        low = read_low(world.store, RUN)
        reader = PayloadReader(world.store, RUN)
        ledger, _ = fold(world.store, RUN, world.limits.num_siblings)
        for name, block in ledger.blocks.items():
            reader.block_rows(name, block)
            found += block.inline and block.slot < low
    assert found > 10


# ---------------------------------------------------------------------- others at work meanwhile


class Behind:
    """A store whose `low` is as it was at the first `times` looks: slots are retired right after each of them."""

    def __init__(self, store: MemoryStore, low: int, times: int) -> None:
        self._store, self._low, self.times = store, low, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        data, token = self._store.read_versioned(key)
        if key.endswith("/low") and self.times:
            self.times -= 1
            return str(self._low).encode(), token
        return data, token


@pytest.mark.parametrize("times", [1, 2, 3])
def test_who_looks_for_a_retired_slot_while_others_are_retired_finds_it_all_the_same(times: int) -> None:
    journal = retired()
    slots = [slot for slot in range(1, read_low(journal.store, RUN)) if archived_rows(journal.store, RUN, slot)]
    assert len(slots) > 10
    for slot in slots[:: len(slots) // 5]:
        for low in (0, 1, slot):
            behind: Any = Behind(journal.store, low, times)
            assert archived_rows(behind, RUN, slot) == archived_rows(journal.store, RUN, slot), (slot, low)


def test_who_reads_from_the_first_segment_on_while_slots_are_retired_and_archives_merged_sees_all_of_them() -> None:
    journal = Remembering(MemoryStore(), every=2)
    journal.go_on(100)
    seen: list[Segment] = []
    for segment in read_all(journal.store, RUN):
        seen.append(segment)
        if len(seen) < 60:
            journal.go_on(3)
    assert seen == journal.wrote[: len(seen)]
    assert len(seen) >= 250


class Killed(BaseException):
    """No code goes on after that."""


class Dying(MemoryStore):
    """Its user dies at the n-th operation from now on, before or after that took effect."""

    left: int | None = None
    after = False

    def _count(self, act: Callable[[], object]) -> None:
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            if self.left == -1 and self.after:
                act()
            raise Killed

    def create(self, key: str, data: Bytes) -> None:
        self._count(lambda: super(Dying, self).create(key, data))
        super().create(key, data)

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._count(lambda: None)
        return super().read(key, start, end)

    def swap(self, key: str, data: Bytes, token: str | None) -> str:
        self._count(lambda: super(Dying, self).swap(key, data, token))
        return super().swap(key, data, token)

    def delete(self, keys: Iterable[str]) -> list[str]:
        keys = list(keys)
        if keys:
            self._count(lambda: super(Dying, self).delete(keys[: len(keys) // 2]))
        return super().delete(keys)


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("fresh", [False, True], ids=["warm", "fresh"])
def test_an_archivist_that_dies_at_any_operation_leaves_a_journal_that_the_next_one_goes_on_with(
    after: bool, fresh: bool
) -> None:
    """It merges archives, deletes what others replaced, and retires slots."""
    deaths = 0
    for operation in range(1000):
        journal = Remembering(Dying(), every=0)
        store = journal.store
        assert isinstance(store, Dying)
        for _ in range(FANOUT - 1):
            journal.go_on(1)
            journal.archive()
            journal.go_on(1)
        store.left, store.after = operation, after
        journal.archivist = Archivist(store, RUN, 1) if fresh else journal.archivist
        try:
            record = journal.archivist.snapshot(journal.writer.slot)
            assert Archive.of(record.archive).first == 0, "merged"
            break
        except Killed:
            deaths += 1
        store.left = None
        assert segments_of(journal) == journal.wrote
        assert ledger_rows(fold(store, RUN, 1)[0]) == ledger_rows(journal.ledger)
        journal.archivist = Archivist(store, RUN, 1)
        for _ in range(3):
            journal.archive()
            journal.go_on(1)
            journal.go_on(1)
        assert segments_of(journal) == journal.wrote
        low = read_low(store, RUN)
        assert low >= 2 * FANOUT - 3
        assert all(read_segment(store, RUN, slot) is None for slot in range(1, low)), "nothing retired is left behind"
        report = verify(store, RUN)
        assert report.sound, report.problems
    assert deaths > 20


def test_what_could_not_be_deleted_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    journal, whole_delete = Journal(MemoryStore()), MemoryStore.delete
    stuck = True

    def delete(self: MemoryStore, keys: Iterable[str]) -> list[str]:
        return list(keys) if stuck else whole_delete(self, keys)

    monkeypatch.setattr(MemoryStore, "delete", delete)
    for _ in range(12):
        journal.go_on(3)
        journal.archive()
        journal.go_on(1)
    low = read_low(journal.store, RUN)
    assert low > 20
    assert read_segment(journal.store, RUN, 5) is not None
    assert verify(journal.store, RUN).sound
    stuck = False
    journal.go_on(3)
    journal.archive()
    journal.go_on(1)
    assert all(read_segment(journal.store, RUN, slot) is None for slot in range(1, low))
    assert len(journal.store.list(PATHS.ledger)) <= 5
    assert verify(journal.store, RUN).sound


@pytest.mark.parametrize(
    "error", [StorageUnusable("s3:DeleteObject", expected="it", action="allow it"),
              StoreUnavailable("503", expected="an answer", action="wait")], ids=["forbidden", "unavailable"],
)  # fmt: skip
def test_a_store_that_deletes_nothing_for_a_while_gets_snapshots_all_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Remembering(MemoryStore(), every=3)
    journal.go_on(30)

    def delete(self: MemoryStore, keys: Iterable[str]) -> list[str]:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "delete", delete)
        journal.go_on(30)
    newest = journal.ledger.snapshot
    assert newest is not None
    assert journal.writer.slot - newest.slot <= 4
    journal.go_on(30)
    low = read_low(journal.store, RUN)
    assert low > 50
    assert all(read_segment(journal.store, RUN, slot) is None for slot in range(1, low))
    assert len(journal.store.list(PATHS.ledger)) <= 5
    assert segments_of(journal) == journal.wrote
    assert verify(journal.store, RUN).sound


# ---------------------------------------------------------------------- damage


def retired() -> Journal:
    journal = Journal(MemoryStore(), every=3)
    journal.go_on(40)
    return journal


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:100], lambda data: None], ids=["bit", "cut", "gone"])
def test_every_damaged_archive_is_named_by_verify_and_stops_no_restore(damage: Callable[[bytes], bytes | None]) -> None:
    for at in range(len(history_of(retired().store, RUN))):
        journal = retired()
        key = PATHS.archive(history_of(journal.store, RUN)[at])
        alter(journal.store, key, damage)
        assert key in "\n".join(verify(journal.store, RUN).problems)
        claim(journal.store, RUN, 1, owner="o", writer="next", reason="resume", clock=VirtualClock())


@pytest.mark.parametrize("damage", [flipped, lambda data: None], ids=["bit", "gone"])
@pytest.mark.parametrize("fresh", [False, True], ids=["warm", "fresh"])
def test_no_slot_goes_whose_archive_cannot_be_read_back(damage: Callable[[bytes], bytes | None], fresh: bool) -> None:
    """It is written again from the segments, which are still there."""
    for at in (-1, -2):
        journal = Remembering(MemoryStore())
        for _ in range(5):
            journal.go_on(4)
            journal.archive()
        journal.go_on(1)
        damaged = history_of(journal.store, RUN)[at]
        assert Archive.of(damaged).first >= read_low(journal.store, RUN), "its segments are still there"
        alter(journal.store, PATHS.archive(damaged), damage)
        if fresh:
            journal.archivist = Archivist(journal.store, RUN, 1)
        for _ in range(6):
            journal.archive()
            journal.go_on(4)
        assert damaged not in history_of(journal.store, RUN)
        assert read_low(journal.store, RUN) > Archive.of(damaged).end
        assert segments_of(journal) == journal.wrote
        assert verify(journal.store, RUN).problems == []


@pytest.mark.parametrize("damage", [flipped, lambda data: None], ids=["bit", "gone"])
def test_a_damaged_archive_among_those_to_merge_holds_up_no_snapshot(
    damage: Callable[[bytes], bytes | None], caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(MemoryStore(), every=3)
    journal.go_on(3 * (FANOUT - 3))
    damaged = history_of(journal.store, RUN)[2]
    alter(journal.store, PATHS.archive(damaged), damage)
    journal.go_on(3 * 4 * FANOUT)
    newest = journal.ledger.snapshot
    assert newest is not None
    assert journal.writer.slot - newest.slot <= 4, "snapshots go on"
    assert read_low(journal.store, RUN) > 3 * 3 * FANOUT, "and slots are retired"
    assert "decision=go_on_without_it" in caplog.text
    assert damaged in history_of(journal.store, RUN), "nobody takes its place without what it holds"
    assert len(history_of(journal.store, RUN)) <= 3 * FANOUT, "later ones are merged"
    assert PATHS.archive(damaged) in "\n".join(verify(journal.store, RUN).problems)
    claim(journal.store, RUN, 1, owner="o", writer="next", reason="resume", clock=VirtualClock())


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:100], lambda data: None], ids=["bit", "cut", "gone"])
def test_a_segment_that_is_still_in_the_journal_is_proven_there_although_an_archive_has_it(
    damage: Callable[[bytes], bytes | None],
) -> None:
    """A merged archive may begin below the lowest slot and end far above it."""
    journal = Journal(MemoryStore(), every=8)
    while len(both := slots_in_both(journal)) < 6:
        journal.go_on(1)
    for slot in both:
        assert verify(journal.store, RUN).problems == []
        key = PATHS.segment(slot)
        before = journal.store.read(key)
        alter(journal.store, key, damage)
        assert verify(journal.store, RUN).problems, slot
        journal.store.delete([key])
        journal.store.create(key, before)


def slots_in_both(journal: Journal) -> list[int]:
    """Of an archive with retired slots, those that are not."""
    low = read_low(journal.store, RUN)
    found = [Archive.of(name) for name in history_of(journal.store, RUN)]
    return [slot for one in found if one.first < low for slot in range(low, one.end)]


def test_a_claim_that_is_gone_from_its_retired_slot_is_named_by_verify() -> None:
    journal = retired()
    assert read_low(journal.store, RUN) > 0
    alter(journal.store, PATHS.segment(0), lambda data: None)
    assert "which a writer that slept must find there" in "\n".join(verify(journal.store, RUN).problems)


def test_an_archive_of_other_segments_than_the_journal_has_is_named_by_verify() -> None:
    journal, other = Journal(MemoryStore()), Journal(MemoryStore())
    journal.go_on(5)
    other.put(schema.GroupReserved(0, 3))
    other.go_on(4)
    record = other.archivist.snapshot(6)
    mine = journal.archivist.snapshot(6)
    key = PATHS.archive(record.archive)
    journal.store.create(key, other.store.read(key))
    journal.put(schema.LedgerSnapshot(6, mine.position, mine.chain, mine.digest, mine.size, record.archive, 0))
    assert "as in the journal" in "\n".join(verify(journal.store, RUN).problems)


def test_the_archives_are_found_although_the_newest_snapshots_and_segments_are_damaged() -> None:
    journal = retired()
    expected = history_of(journal.store, RUN)
    from storage.journal import recorded_snapshots

    newest, second, *_ = recorded_snapshots(journal.store, RUN)
    for record in (newest, second):
        alter(journal.store, key_of(record), flipped)
        assert history_of(journal.store, RUN) == expected
    alter(journal.store, PATHS.segment(journal.writer.slot - 1), flipped)
    assert len(history_of(journal.store, RUN)) >= len(expected) - 1


def test_rows_that_are_no_whole_segments_are_refused() -> None:
    journal = retired()
    name = history_of(journal.store, RUN)[0]
    archive, table = Archive.of(name), history.read_table(journal.store, RUN, name)
    for cut in (table.slice(1), table.slice(0, table.num_rows - 1), table.slice(0, 0)):
        data = history.encode_archive(cut)
        other = Archive(archive.first, archive.end, history.hashlib.sha256(data).hexdigest()).name
        journal.store.create(PATHS.archive(other), data)
        with pytest.raises(ArtifactCorrupt):
            list(read_archive(journal.store, RUN, other))


DIGEST = "a" * 64


def archive(first: int, end: int) -> str:
    return Archive(first, end, DIGEST).name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"archive": archive(5, 8)}, "a hole"),
        ({"archive": archive(3, 7)}, "ends too early"),
        ({"archive": archive(3, 9)}, "ends too late"),
        ({"archive": archive(1, 8)}, "takes half an archive away"),
        ({"archive": "x"}, "no name"),
        ({"archive": "", "low": 1}, "retired and in no archive"),
        ({"low": 4}, "above the snapshot before"),
        ({"low": 1}, "below what was retired"),
        ({"slot": 3}, "not newer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_snapshot_that_would_forget_a_slot_is_refused(change: dict[str, object], why: str) -> None:
    journal = Journal(MemoryStore())
    first = schema.LedgerSnapshot(2, 0, DIGEST, DIGEST, 1, archive(0, 2), 0)
    second = schema.LedgerSnapshot(3, 0, DIGEST, DIGEST, 1, archive(2, 3), 2)
    for record in (first, second):
        apply(journal.ledger, journal.ledger.next_seq, record)
    before = ledger_rows(journal.ledger)
    good = {"slot": 8, "position": 0, "chain": DIGEST, "digest": DIGEST, "size": 1, "archive": archive(3, 8), "low": 3}
    with pytest.raises((LedgerInvalid, ArtifactCorrupt)):
        apply(journal.ledger, journal.ledger.next_seq, schema.LedgerSnapshot(**{**good, **change}))  # type: ignore[arg-type]
    assert ledger_rows(journal.ledger) == before
    apply(journal.ledger, journal.ledger.next_seq, schema.LedgerSnapshot(**good))  # type: ignore[arg-type]
    assert journal.ledger.history == [archive(0, 2), archive(2, 3), archive(3, 8)]
    assert whole(amended(journal.ledger.history, archive(2, 8)), 8)
