"""History: the segments of a journal in few objects, so that their slots can be deleted and nothing is forgotten.

An archive is an Arrow IPC file, zstd, of the rows of many segments: the columns of a segment, its `slot`, and on the
first row of each its header and digest. Nothing is left out: what is read back are the very segments, chain and all. An
archive is named by the slots it holds and by its own sha256, and counts once a `ledger_snapshot` names it. Small
neighbours are merged, so their number grows with the bytes and not with the age of a run.
"""

# pyright: reportUnknownMemberType=false
# (pyarrow's stubs are partial)

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from storage.archives import Archive, amended
from storage.errors import ArtifactCorrupt, SlotsRetired
from storage.filesystem import Store, create_same, read_named
from storage.journal import Tail, after, check_follows, find_end, read_journal, read_segment, recorded_snapshots
from storage.low import read_low
from storage.runs import RunPaths, open_run
from storage.schema import KIND_OF, LedgerSnapshot
from storage.segment import Header, Row, Segment, apart, decode_header, together, whole_segment
from storage.snapshot import read_snapshot
from storage.upgrades import Change

SMALL = 64 * 1024
FANOUT = 8
LARGE = 4 * 1024 * 1024
"""Bytes. As many archives of one size class as `FANOUT` become one; those above `LARGE` stay as they are."""
_SCHEMA = pa.schema(
    [
        pa.field("slot", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("time", pa.float64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("body", pa.string(), nullable=False),
        pa.field("blob", pa.binary()),
        pa.field("header", pa.string()),
        pa.field("digest", pa.string()),
    ]
)
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
_encode = msgspec.json.Encoder().encode

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------- one archive


def table_of(segments: Sequence[Segment]) -> pa.Table:
    """The rows of segments that follow each other."""
    columns: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
    for segment in segments:
        for row in segment.rows:
            first = row.seq == segment.header.first
            columns["slot"].append(segment.header.slot)
            columns["seq"].append(row.seq)
            columns["time"].append(row.time)
            columns["kind"].append(KIND_OF[type(row.record)])
            body, blob = apart(row)
            columns["body"].append(body.decode())
            columns["blob"].append(blob)
            columns["header"].append(_encode(segment.header).decode() if first else None)
            columns["digest"].append(segment.digest if first else None)
    return pa.Table.from_pydict(columns, schema=_SCHEMA)


def encode_archive(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA, options=_OPTIONS) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue().to_pybytes()


def read_table(store: Store, run: str, name: str) -> pa.Table:
    """The rows of an archive, its digest proven. Raises `ArtifactCorrupt`."""
    data = read_named(store, RunPaths(run).archive(name), Archive.of(name).digest, "the archive")
    return pa.ipc.open_file(pa.py_buffer(data)).read_all()


def read_archive(store: Store, run: str, name: str, start: int = 0) -> Iterator[Segment]:
    """The segments of an archive from slot `start` on, in order. Raises `ArtifactCorrupt`, `SchemaUnsupported`."""
    table, archive, where = read_table(store, run, name), Archive.of(name), RunPaths(run).archive(name)
    slot = archive.first
    for (header, steps), digest, rows in _pieces(table, where):
        if (header.run, header.slot) != (run, slot):
            found = f"slot {header.slot} of run {header.run!r}"
            raise _corrupt(f"{where} goes on with {found}", f"slot {slot} of run {run!r}", "mixed_cut")
        slot += 1
        if header.slot >= start:
            yield whole_segment(header, [_row(row, where, steps) for row in rows], digest, where)
    if slot != archive.end:
        raise _corrupt(f"{where} ends before slot {slot}", f"slots up to {archive.end}", "mixed_cut")


Piece = tuple[tuple[Header, list[Change]], str, list[tuple[Any, ...]]]


def _pieces(table: pa.Table, where: str) -> Iterator[Piece]:
    """Header and what its records need, digest, and raw rows of each segment."""
    columns: list[list[Any]] = [table.column(name).to_pylist() for name in _SCHEMA.names[1:]]
    found: Piece | None = None
    for *row, header, digest in zip(*columns, strict=True):
        if header is not None:
            if found is not None:
                yield found
            found = decode_header(header, where), digest, []
        if found is None:
            raise _corrupt(f"{where} begins within a segment", "whole segments", "mixed_cut")
        found[2].append(tuple(row))
    if found is not None:
        yield found


def _row(row: tuple[Any, ...], where: str, steps: list[Change]) -> Row:
    seq, time, kind, body, blob = row
    return together(seq, time, kind, body, blob, where, steps)


def _corrupt(found: str, expected: str, code: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        found, expected=expected, action="restore the object from a copy, or `tidegate fork RUN NEW --last-good`",
        code=code,
    )  # fmt: skip


# ---------------------------------------------------------------------- merging


def _level(size: float) -> float:
    return max(0, math.ceil(math.log(max(1, size) / SMALL, FANOUT))) if size < math.inf else size


def to_merge(sizes: Iterable[float]) -> int:
    """How many of the newest archives become one; 0 when none. `sizes` in bytes, the newest first."""
    counts = [0] * (int(_level(LARGE)) + 1)
    reach = 0.0
    for size in sizes:
        reach = max(reach, _level(size))
        if reach >= len(counts):
            break
        for level in range(int(reach), len(counts)):
            counts[level] += 1
    return next((count for count in counts if count >= FANOUT), 0)


class Historian:
    """Writes the archives of one run. It remembers how large they are."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._run = store, run
        self._sizes: dict[str, float] = {}
        self._proven: set[str] = set()

    def extend(self, history: Sequence[str], segments: Sequence[Segment]) -> str:
        """Archive the segments that follow those in `history`, together with small archives before them where it is
        time; returns the archive's name. A damaged one is left as it is. Deletes nothing; may be repeated."""
        older, table = list(history), table_of(segments)
        first = segments[0].header.slot
        data = encode_archive(table)
        while count := to_merge([len(data), *map(self._size, reversed(older[-FANOUT * FANOUT :]))]):
            tables = [self._table(one) for one in older[1 - count :]]
            if (whole := [one for one in tables if one is not None]) != tables:
                continue  # that one is no candidate any more
            first = Archive.of(older[1 - count]).first
            older, table = older[: 1 - count], pa.concat_tables([*whole, table])
            data = encode_archive(table)
        name = Archive(first, segments[-1].header.slot + 1, hashlib.sha256(data).hexdigest()).name
        create_same(self._store, RunPaths(self._run).archive(name), data)
        self._sizes = {one: size for one, size in self._sizes.items() if one in older} | {name: len(data)}
        self._proven &= set(older)
        return name

    def _size(self, name: str) -> float:
        """In bytes; infinite for one that cannot be read."""
        if name not in self._sizes:
            size = self._store.size(RunPaths(self._run).archive(name))
            self._sizes[name] = math.inf if size is None else size
        return self._sizes[name]

    def first_damaged(self, history: Sequence[str], low: int, end: int) -> str | None:
        """The first archive of slots in [low, end) that cannot be read back, each looked at once."""
        needed = [name for name in history if low < Archive.of(name).end and Archive.of(name).first < end]
        return next((name for name in needed if name not in self._proven and self._table(name) is None), None)

    def _table(self, name: str) -> pa.Table | None:
        try:
            table = read_table(self._store, self._run, name)
        except ArtifactCorrupt as error:
            log.error("op=archive name=%s decision=go_on_without_it reason=%s", name, error)
            self._sizes[name] = math.inf
            return None
        self._proven.add(name)
        return table


# ---------------------------------------------------------------------- the whole journal


def history_of(store: Store, run: str) -> list[str]:
    """Names of the archives of a run, in order, up to the newest recorded snapshot. Raises `ArtifactCorrupt`."""
    num_siblings = open_run(store, run).num_siblings
    later: list[LedgerSnapshot] = []
    problem: ArtifactCorrupt | None = None
    for record in _recorded(store, run):
        later.append(record)
        try:
            names = read_snapshot(store, run, record, num_siblings).history
        except ArtifactCorrupt as error:
            problem = error
            continue
        for one in reversed(later):
            names = amended(names, one.archive) if one.archive else names
        return names
    if problem is not None:
        raise problem
    return []


def _recorded(store: Store, run: str) -> Iterator[LedgerSnapshot]:
    """As `recorded_snapshots`, from the newest segment that can be read on: each points to the newest snapshot."""
    low = read_low(store, run)
    end = find_end(store, run, low)
    for slot in range(end - 1, low - 1, -1):
        try:
            read_segment(store, run, slot)
        except ArtifactCorrupt:
            continue
        return recorded_snapshots(store, run, slot + 1)
    return iter(())


def read_all(store: Store, run: str, tail: Tail | None = None) -> Iterator[Segment]:
    """Every segment of a journal from `tail` (the first) on, proving chain and sequence: retired ones from the history.

    Raises `ArtifactCorrupt`, `SchemaUnsupported`. What is retired or merged meanwhile is looked up again.
    """
    tail, tried = tail or Tail(), -1
    while True:
        try:
            for segment in _from(store, run, tail):
                yield segment
                tail = after(segment)
            return
        except (SlotsRetired, ArtifactCorrupt) as error:
            moved = isinstance(error, SlotsRetired) or error.code == "missing"
            if not moved or tried == tail.slot:
                raise  # looked up again, and still not there
            tried = tail.slot


def _from(store: Store, run: str, tail: Tail) -> Iterator[Segment]:
    """What is still in the journal is read there, although an archive may have it too."""
    low = read_low(store, run)
    for name in history_of(store, run) if tail.slot < low else ():
        archive = Archive.of(name)
        if archive.end <= tail.slot:
            continue
        for segment in read_archive(store, run, name, tail.slot):
            if tail.slot >= low:
                break
            check_follows(segment, tail, RunPaths(run).archive(name))
            yield segment
            tail = after(segment)
        if tail.slot >= low:
            break
    yield from read_journal(store, run, tail)


def archived_rows(store: Store, run: str, slot: int) -> dict[int, list[Row]]:
    """By slot, the rows with bytes in the archive that holds `slot`, which is retired; empty when none does. What is
    retired or merged meanwhile is looked up again. Raises `ArtifactCorrupt`, `SchemaUnsupported`."""
    tried: tuple[int, list[str]] | None = None
    while True:
        low, names = read_low(store, run), history_of(store, run)
        try:
            found = _rows_of_archive(store, run, slot, names)
        except ArtifactCorrupt as error:
            if error.code != "missing" or tried == (low, names):
                raise
            found = {}
        if found or tried == (low, names):
            return found
        tried = low, names


def _rows_of_archive(store: Store, run: str, slot: int, names: Sequence[str]) -> dict[int, list[Row]]:
    for name in names:
        archive = Archive.of(name)
        if archive.first <= slot < archive.end:
            return {
                segment.header.slot: [row for row in segment.rows if row.blob is not None]
                for segment in read_archive(store, run, name)
            }
    return {}
