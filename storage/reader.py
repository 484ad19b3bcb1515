"""Reading token rows back: from a hot copy, from the journal segment they travel in, or from their payload file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from storage.errors import ArtifactCorrupt, ObjectMissing, ReferenceInvalid
from storage.filesystem import Store
from storage.history import archived_rows
from storage.journal import read_segment
from storage.ledger import Block
from storage.low import read_low
from storage.payload import TurnRow, check_batches, decode_block
from storage.ranges import first_rows, read_batches
from storage.runs import RunPaths
from storage.samples import misfit
from storage.schema import PayloadStored
from storage.segment import Row

MAX_DECODED = 1024
T = TypeVar("T")


class PayloadReader:
    """Reads rows of blocks from a hot copy if there is one, else from the store.

    `hot` gives the bytes of a block or None. The last `MAX_DECODED` blocks stay decoded, whole or the batches of a
    large one that were asked for.
    """

    def __init__(self, store: Store, run: str, hot: Callable[[str], bytes | None] = lambda name: None) -> None:
        self._store, self._run, self._hot = store, run, hot
        self._decoded: dict[str, list[TurnRow]] = {}
        self._parts: dict[str, dict[int, TurnRow]] = {}
        self._slots: dict[int, dict[str, bytes]] = {}

    def rows(self, references: Sequence[tuple[str, int]], blocks: Mapping[str, Block]) -> list[TurnRow]:
        """The turn rows of `references` (block, row). Raises `ReferenceInvalid`, `ArtifactCorrupt`."""
        self.load(references, blocks)
        return [self._row(name, index, blocks) for name, index in references]

    def load(self, references: Iterable[tuple[str, int]], blocks: Mapping[str, Block]) -> None:
        """Read the parts of large blocks that `rows` will want for all of these: near ones with one request. Raises
        `ReferenceInvalid`, `ArtifactCorrupt`."""
        wanted: dict[str, set[int]] = {}
        for name, index in references:
            block = blocks.get(name)
            if block is None or not block.batches or name in self._decoded or index in self._parts.get(name, ()):
                continue
            wanted.setdefault(name, set()).add(index)
        for name, indices in wanted.items():
            if self._hot(name) is None:
                self._load_parts(name, blocks[name], indices)

    def _load_parts(self, name: str, block: Block, indices: set[int]) -> None:
        firsts = first_rows(block.batches)
        batches = {bisect_right(firsts, index) - 1 for index in indices if 0 <= index < firsts[-1]}
        for _ in range(2):  # a bit may have flipped on the wire
            try:
                rows = read_batches(self._store, RunPaths(self._run).block(name), block.batches, batches, firsts)
            except ObjectMissing as error:
                raise _no_file(name) from error
            except ArtifactCorrupt:
                continue
            _keep(self._parts, name, self._parts.pop(name, {}) | rows)
            return
        self.block_rows(name, block)  # which says what is wrong with it

    def _row(self, name: str, index: int, blocks: Mapping[str, Block]) -> TurnRow:
        block = blocks.get(name)
        if block is None:
            raise misfit(f"block {name}", "no record stored it", "a payload_stored record", "orphan")
        if index in (part := self._parts.get(name, {})):
            return part[index]
        rows = self.block_rows(name, block)
        if not 0 <= index < len(rows):
            raise misfit(f"block {name}", f"row {index} of {len(rows)}", "an existing row", "row_missing")
        return rows[index]

    def block_rows(self, name: str, block: Block) -> list[TurnRow]:
        """All rows of a block. Raises `ReferenceInvalid`, `ArtifactCorrupt`."""
        rows = self._decoded.get(name)
        if rows is None:
            try:
                rows = self._decode(name, block, self.block_bytes(name, block))
            except ArtifactCorrupt:  # a bit may have flipped on the wire: once more, from the store
                rows = self._decode(name, block, self._stored_bytes(name, block))
            self.remember(name, rows)
        return rows

    def _decode(self, name: str, block: Block, data: bytes) -> list[TurnRow]:
        rows = decode_block(data, block.digest, name)
        check_batches(data, block.batches, name)
        return rows

    def remember(self, name: str, rows: list[TurnRow]) -> None:
        """Keep a decoded block; the oldest one goes when there are too many."""
        _keep(self._decoded, name, rows)

    def block_bytes(self, name: str, block: Block) -> bytes:
        """The bytes of a stored block, not yet checked against its digest. Raises `ReferenceInvalid`."""
        data = self._hot(name)
        return self._stored_bytes(name, block) if data is None else data

    def _stored_bytes(self, name: str, block: Block) -> bytes:
        if not block.inline:
            try:
                return self._store.read(RunPaths(self._run).block(name))
            except ObjectMissing as error:
                raise _no_file(name) from error
        if block.slot not in self._slots:
            self._slots = self._blocks_of(block.slot)
        found = self._slots.get(block.slot, {})
        if name not in found:
            raise misfit(f"block {name}", f"not in slot {block.slot}", "an inline payload there", "missing")
        return found[name]

    def _blocks_of(self, slot: int) -> dict[int, dict[str, bytes]]:
        """The inline blocks of a slot, with those of its neighbours when it is retired: they lie in one archive."""
        segment = read_segment(self._store, self._run, slot) if slot >= 0 else None
        if segment is not None:
            return {slot: inline_blocks(segment.rows)}
        retired = 0 <= slot < read_low(self._store, self._run)
        archived = archived_rows(self._store, self._run, slot) if retired else {}
        return {place: inline_blocks(rows) for place, rows in archived.items()}


def _keep(kept: dict[str, T], name: str, value: T) -> None:
    kept[name] = value
    if len(kept) > MAX_DECODED:
        del kept[next(iter(kept))]


def _no_file(name: str) -> ReferenceInvalid:
    return misfit(f"block {name}", "no such object", "a payload file", "missing")


def inline_blocks(rows: Iterable[Row]) -> dict[str, bytes]:
    """All payload blocks that travel inline in these rows, by name."""
    return {
        row.record.block: row.blob for row in rows if isinstance(row.record, PayloadStored) and row.blob is not None
    }
