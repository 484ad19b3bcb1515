"""Large blocks are cut into batches, and a reader of some rows reads theirs and no others."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.seaweed import S3Server
from gpu.generation.worker import number_rows
from storage import payload
from storage.errors import ArtifactCorrupt, ReferenceInvalid
from storage.filesystem import Bytes, Store
from storage.ledger import Block
from storage.memory import MemoryStore
from storage.opening import open_store
from storage.payload import BATCH_BYTES, Encoded, TurnRow, VersionSpan, decode_block, encode_block
from storage.ranges import MAX_GAP
from storage.reader import PayloadReader
from storage.runs import RunPaths
from storage.verify import verify
from tests.simulation import memo
from tests.simulation.shapes import PLAIN
from tests.simulation.world import RUN, World
from tests.storage.editing import problems

NAME = "000001-w-00000001"
KEY = RunPaths("r").block(NAME)


class Ranges(MemoryStore):
    """Remembers what was read, and flips the lowest bit of byte `flip` in the next `flips` answers that hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.read_ranges: list[tuple[int, int]] = []
        self.flip, self.flips = -1, 0

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = bytearray(super().read(key, start, end))
        self.read_ranges.append((start, start + len(data)))
        if self.flips and start <= self.flip < start + len(data):
            data[self.flip - start] ^= 1
            self.flips -= 1
        return bytes(data)

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.read_ranges)


def turn(group: int, sibling: int, number: int, tokens: int, record: str = "") -> TurnRow:
    ids = np.arange(tokens, dtype=np.int32) + 1000 * group + sibling
    return TurnRow(
        group, sibling, 0, number, 0, 0, ids, np.linspace(-2, 0, tokens, dtype=np.float32),
        np.ones(tokens, np.int8), (VersionSpan(1, group, tokens),), True, 0.25 * sibling, record,
    )  # fmt: skip


def groups_of(number: int, siblings: int = 8, tokens: int = 512) -> list[TurnRow]:
    return [turn(group, sibling, 0, tokens) for group in range(number) for sibling in range(siblings)]


def stored(store: Store, rows: list[TurnRow]) -> tuple[Encoded, dict[str, Block]]:
    block = encode_block(NAME, rows)
    store.create(KEY, block.data)
    return block, {NAME: Block(block.digest, len(block.data), inline=False, batches=block.batches)}


def same(a: TurnRow, b: TurnRow) -> bool:
    return repr(a) == repr(b) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) and getattr(a, name).dtype == getattr(b, name).dtype
        for name in ("tokens", "logprobs", "mask")
    )


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks are cut as large ones are, at a few hundred bytes."""
    memo.forget()
    monkeypatch.setattr(payload, "WHOLE_BYTES", 1)
    monkeypatch.setattr(payload, "BATCH_BYTES", 300)
    yield
    memo.forget()


SHAPE = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.text(max_size=4)), min_size=1, max_size=30)


@pytest.mark.usefixtures("small")
@given(SHAPE, st.data())
def test_ranged_reads_give_what_whole_reads_give(shape: list[tuple[int, int, str]], data: st.DataObject) -> None:
    store = MemoryStore()
    rows = [turn(at // 3, sibling, at, tokens, text) for at, (sibling, tokens, text) in enumerate(shape)]
    block, blocks = stored(store, rows)
    whole = decode_block(block.data, block.digest, NAME)
    assert all(same(a, b) for a, b in zip(whole, rows, strict=True))
    assert sum(batch[0] for batch in block.batches) == (len(rows) if block.batches else 0)
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    reader = PayloadReader(store, "r")
    for part in (wanted[:3], wanted[3:], wanted):
        found = reader.rows([(NAME, index) for index in part], blocks)
        assert all(same(rows[index], row) for index, row in zip(part, found, strict=True))
    with pytest.raises(ReferenceInvalid, match="row_missing"):
        PayloadReader(store, "r").rows([(NAME, 0), (NAME, len(rows))], blocks)


def test_a_block_below_the_bound_is_one_batch_and_read_whole() -> None:
    store = Ranges()
    block, blocks = stored(store, groups_of(4))
    assert block.batches == ()
    PayloadReader(store, "r").rows([(NAME, 3)], blocks)
    assert store.read_ranges == [(0, len(block.data))]


def test_rows_of_a_rollout_stay_in_one_batch() -> None:
    rows = [turn(group, sibling, number, 700) for group in range(9) for sibling in range(4) for number in range(3)]
    block = encode_block(NAME, rows)
    starts = np.cumsum([batch[0] for batch in block.batches])[:-1]
    assert len(starts) > 2
    assert all(rows[start].turn == 0 for start in starts)


def test_a_worker_stores_the_turns_of_a_rollout_together_and_in_order() -> None:
    given = [turn(2, 0, 0, 1), None, turn(1, 1, 0, 1), turn(2, 0, 1, 1), turn(1, 0, 0, 1), turn(1, 1, 1, 1)]
    rows, index_of = number_rows(given)
    assert [(row.group, row.sibling, row.turn) for row in rows] == [
        (1, 0, 0),
        (1, 1, 0),
        (1, 1, 1),
        (2, 0, 0),
        (2, 0, 1),
    ]
    assert all(rows[index_of[at]] is row for at, row in enumerate(given) if row is not None)
    assert 1 not in index_of


def test_reading_a_group_reads_its_ranges_and_near_ones_together() -> None:
    store = Ranges()
    block, blocks = stored(store, groups_of(120))
    assert len(block.data) > 4_000_000
    reader = PayloadReader(store, "r")

    def of(group: int) -> list[tuple[str, int]]:
        return [(NAME, 8 * group + sibling) for sibling in range(8)]

    one_group = 2 * BATCH_BYTES + 32 * 1024
    assert [row.group for row in reader.rows(of(60), blocks)] == [60] * 8
    assert len(store.read_ranges) == 1
    assert store.num_bytes <= 2 * one_group  # it may lie across a cut
    reader.rows(of(60), blocks)
    assert len(store.read_ranges) == 1, "what is decoded is not read again"
    store.read_ranges.clear()
    reader.load(of(0) + of(2) + of(110), blocks)
    assert len(store.read_ranges) == 2
    assert store.num_bytes <= 5 * one_group < len(block.data) / 4
    far = store.read_ranges[1][0] - store.read_ranges[0][1]
    assert far > MAX_GAP
    before = len(store.read_ranges)
    for group in (0, 2, 110):
        assert [row.group for row in reader.rows(of(group), blocks)] == [group] * 8
    assert len(store.read_ranges) == before


def test_a_hot_copy_is_used_instead_of_ranges() -> None:
    store = Ranges()
    block, blocks = stored(store, groups_of(20))
    assert PayloadReader(store, "r", {NAME: block.data}.get).rows([(NAME, 9)], blocks)[0].group == 1
    assert store.read_ranges == []


@pytest.mark.usefixtures("small")
def test_a_flipped_bit_in_a_range_that_is_needed_is_detected_and_another_is_left_to_verify() -> None:
    store = MemoryStore()
    block, blocks = stored(store, groups_of(6, siblings=2, tokens=30))
    _, start, size, _ = block.batches[2]
    first = sum(batch[0] for batch in block.batches[:2])
    dice = random.Random(0)
    for position in range(len(block.data)):
        altered = bytearray(block.data)
        altered[position] ^= 1 << dice.randrange(8)
        store._objects[KEY] = bytes(altered)
        if start <= position < start + size:
            with pytest.raises(ArtifactCorrupt) as caught:
                PayloadReader(store, "r").rows([(NAME, first)], blocks)
            assert caught.value.code == "digest"
        else:
            assert PayloadReader(store, "r").rows([(NAME, first)], blocks)[0].group == 2
            if position % 50 == 0:
                with pytest.raises(ArtifactCorrupt):
                    PayloadReader(store, "r").block_rows(NAME, blocks[NAME])


def test_a_bit_that_flipped_on_the_wire_is_read_again() -> None:
    store = Ranges()
    block, blocks = stored(store, groups_of(20))
    store.flip, store.flips = block.batches[1][1] + 1000, 1
    row = PayloadReader(store, "r").rows([(NAME, block.batches[0][0])], blocks)[0]
    assert same(row, groups_of(20)[block.batches[0][0]])
    assert store.flips == 0
    assert store.num_bytes == 2 * block.batches[1][2]


@pytest.mark.parametrize("change", ["rows", "offset", "size", "checksum", "batches"])
def test_a_record_whose_parts_are_not_those_of_its_block_is_refused(change: str) -> None:
    store = MemoryStore()
    block, blocks = stored(store, groups_of(20))
    rows, offset, size, checksum = block.batches[0]
    odd = payload.batch_checksum(
        block.data[offset + 8 : offset + size], payload.FORMAT
    )  # bytes that no batch begins with
    other = {
        "rows": (rows + 1, offset, size, checksum), "offset": (rows, offset + 8, size - 8, odd),
        "size": (rows, offset, size - 8, checksum), "checksum": (rows, offset, size, checksum ^ 1),
        "batches": (),
    }[change]  # fmt: skip
    blocks[NAME].batches = ((other,) if other else ()) + block.batches[1:]  # type: ignore[assignment]
    with pytest.raises(ReferenceInvalid) as caught:
        PayloadReader(store, "r").block_rows(NAME, blocks[NAME])
    assert caught.value.code == "row_digest"
    if change != "batches":
        with pytest.raises(ReferenceInvalid) as caught:
            PayloadReader(store, "r").rows([(NAME, 0)], blocks)
        assert caught.value.code == "row_digest"


def flipped(data: Bytes, position: int) -> bytes:
    altered = bytearray(data)
    altered[position] ^= 4
    return bytes(altered)


@pytest.mark.usefixtures("small")
def test_a_run_of_cut_blocks_is_verified_whole() -> None:
    world = World(3, length=12, shape=replace(PLAIN, files=1.0))
    world.run(chaos=0)
    assert verify(world.store, RUN).sound
    keys = [key for key in world.store.list(RunPaths(RUN).payload) if key.endswith(".arrow")]
    data = world.store._objects
    key = max(keys, key=lambda key: len(data[key]))
    data[key] = flipped(data[key], len(data[key]) // 2)
    assert "sha256" in problems(world.store)


def test_ranges_are_read_on_s3(seaweed: S3Server) -> None:
    store = open_store(seaweed.url(f"t/{uuid.uuid4().hex[:8]}"))
    block, blocks = stored(store, groups_of(20))
    whole = decode_block(block.data, block.digest, NAME)
    for wanted in ([0], [159], [3, 150, 80, 80]):
        found = PayloadReader(store, "r").rows([(NAME, index) for index in wanted], blocks)
        assert all(same(whole[index], row) for index, row in zip(wanted, found, strict=True))
