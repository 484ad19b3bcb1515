"""Token payloads: flat turn rows in immutable Arrow blocks.

A block is written once by one worker, named `<incarnation>-<writer>-<n>`, and made durable before the record that names
it: inline in the journal below `INLINE_BYTES`, else as a file of its own. Row r of a block is one turn of one attempt:
the new tokens since the previous turn, of which those with mask 1 were generated. A rollout yields one training sample
or, where its context was replaced on the way, several: each row says which one it extends.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# (pyarrow's stubs are partial)
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.arrow_columns import OPTIONS, fixed, flags, offsets_of, ragged, texts
from storage.errors import ArtifactCorrupt, ReferenceInvalid
from storage.filesystem import Bytes
from storage.schema import SCHEMA, PayloadStored
from storage.upgrades import Revision, changed, changes

INLINE_BYTES = 32 * 1024
WHOLE_BYTES = 256 * 1024
"""Up to here a block is one batch and is read whole: that costs no more than a request for a part of it."""
BATCH_BYTES = 64 * 1024
"""A larger one is cut at the next rollout after that many."""
_FIELDS = pa.schema(
    [
        pa.field("group", pa.int64()),
        pa.field("sibling", pa.int32()),
        pa.field("attempt", pa.int32()),
        pa.field("turn", pa.int32()),
        pa.field("sample", pa.int32()),
        pa.field("start", pa.int32()),
        pa.field("tokens", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("mask", pa.list_(pa.int8())),
        pa.field("span_incarnations", pa.list_(pa.int32())),
        pa.field("span_versions", pa.list_(pa.int64())),
        pa.field("span_ends", pa.list_(pa.int32())),
        pa.field("done", pa.bool_()),
        pa.field("reward", pa.float64()),
        pa.field("record", pa.string()),
    ]
)
_FIELD_HASH = hashlib.sha256(str(_FIELDS).encode()).hexdigest()[:16]
NAME = "tidegate-payload"
FORMAT = f"{NAME} {SCHEMA} {_FIELD_HASH}".encode()
_SCHEMA = _FIELDS.with_metadata({b"format": FORMAT})
_LISTS = ("tokens", "logprobs", "mask", "span_incarnations", "span_versions", "span_ends")


class VersionSpan(NamedTuple):
    """Tokens up to `end` (exclusive, counted in generated tokens of the turn) came from this policy version."""

    incarnation: int
    number: int
    end: int


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn. Arrays have one value per new token: ids int32, behaviour logprobs float32 (0 where mask is 0), mask
    int8 (1 = generated).

    `turn` counts over the rollout. `sample` counts the rollout's output samples from 0; the rows of one are contiguous,
    and the first brings a prompt of its own. `start` is the position of the first new token in that sample; `reward`
    counts only when `done`; `record` is the environment's own JSON.

    A turn whose answer was acted on has two rows: its tokens, durable before the first action, and after them, without
    tokens, the environment's account of it (`account_row`), unless there is nothing to say.
    """

    group: int
    sibling: int
    attempt: int
    turn: int
    sample: int
    start: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.int8]
    spans: tuple[VersionSpan, ...]
    done: bool
    reward: float
    record: str

    @property
    def num_generated(self) -> int:
        return int(self.mask.sum())

    @property
    def oldest(self) -> int:
        """Number of the oldest version that generated a token of this turn."""
        return min(span.number for span in self.spans)

    @property
    def is_account(self) -> bool:
        """Without tokens: see `account_row`."""
        return not len(self.tokens)


def account_row(call: TurnRow, attempt: int, *, done: bool, reward: float, record: str) -> TurnRow:
    """What the environment says of a turn whose tokens, `call`, lie elsewhere: a row without tokens, perhaps of a later
    attempt."""
    return TurnRow(
        call.group, call.sibling, attempt, call.turn, call.sample, call.start + len(call.tokens),
        np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int8), (), done, reward, record,
    )  # fmt: skip


Batch = tuple[int, int, int, int]
"""See `PayloadStored`: rows, offset, bytes, CRC-32."""


class Encoded(NamedTuple):
    """A block ready to be stored."""

    name: str
    data: bytes
    digest: str
    batches: tuple[Batch, ...] = ()

    def stored(self) -> PayloadStored:
        return PayloadStored(self.name, self.digest, len(self.data), len(self.data) < INLINE_BYTES, self.batches)


def encode_block(name: str, rows: Sequence[TurnRow]) -> Encoded:
    """Arrow IPC file bytes of `rows`, uncompressed. Those of a rollout should stand together: a large block is cut
    between rollouts."""
    whole = _batch(rows)
    sizes = _cut(rows) if whole.nbytes > WHOLE_BYTES else [len(rows)]
    parts = [whole.slice(end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    sink, ends = pa.BufferOutputStream(), list[int]()
    with pa.ipc.new_file(sink, _SCHEMA, options=OPTIONS) as writer:
        for part in parts:
            writer.write_batch(part)
            ends.append(sink.tell())
    data = sink.getvalue().to_pybytes()
    digest = hashlib.sha256(data).hexdigest()
    return Encoded(name, data, digest, _places(data, parts, ends) if len(parts) > 1 else ())


def _places(data: bytes, parts: Sequence[pa.RecordBatch], ends: Sequence[int]) -> tuple[Batch, ...]:
    """Where the writer put each batch. The schema stands before the first."""
    starts = [ends[0] - pa.ipc.get_record_batch_size(parts[0]), *ends[:-1]]
    return tuple(
        (part.num_rows, start, end - start, batch_checksum(memoryview(data)[start:end], FORMAT))
        for part, start, end in zip(parts, starts, ends, strict=True)
    )


def batch_checksum(part: Bytes, stated: bytes) -> int:
    """CRC-32 of one batch's bytes, after that of the format that says how they are read."""
    return zlib.crc32(part, zlib.crc32(stated))


def _cut(rows: Sequence[TurnRow]) -> list[int]:
    """The number of rows of each batch."""
    sizes, num_bytes, before = [0], 0, None
    for row in rows:
        if num_bytes >= BATCH_BYTES and (row.group, row.sibling) != before:
            sizes.append(0)
            num_bytes = 0
        sizes[-1] += 1
        num_bytes += 9 * len(row.tokens) + len(row.record)
        before = (row.group, row.sibling)
    return sizes


def _batch(rows: Sequence[TurnRow]) -> pa.RecordBatch:
    lengths = [len(row.tokens) for row in rows]
    assert lengths == [len(row.logprobs) for row in rows] == [len(row.mask) for row in rows], "one value per token"
    offsets = offsets_of(lengths)
    spans = [span for row in rows for span in row.spans]
    span_offsets = offsets_of([len(row.spans) for row in rows])
    return pa.RecordBatch.from_arrays(
        [
            fixed([row.group for row in rows], np.int64),
            fixed([row.sibling for row in rows], np.int32),
            fixed([row.attempt for row in rows], np.int32),
            fixed([row.turn for row in rows], np.int32),
            fixed([row.sample for row in rows], np.int32),
            fixed([row.start for row in rows], np.int32),
            ragged(offsets, _joined([row.tokens for row in rows], np.int32)),
            ragged(offsets, _joined([row.logprobs for row in rows], np.float32)),
            ragged(offsets, _joined([row.mask for row in rows], np.int8)),
            ragged(span_offsets, np.array([span[0] for span in spans], np.int32)),
            ragged(span_offsets, np.array([span[1] for span in spans], np.int64)),
            ragged(span_offsets, np.array([span[2] for span in spans], np.int32)),
            flags([row.done for row in rows]),
            fixed([row.reward for row in rows], np.float64),
            texts([row.record.encode() for row in rows]),
        ],
        schema=_SCHEMA,
    )


def _joined(values: list[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(values, dtype=kind, casting="same_kind") if values else np.zeros(0, kind)


def decode_block(data: bytes, digest: str, where: str) -> list[TurnRow]:
    """Check the digest, then parse. Raises `ArtifactCorrupt`, `SchemaUnsupported`."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != digest:
        raise ArtifactCorrupt(
            f"payload {where} has sha256 {actual[:16]}…",
            expected=f"sha256 {digest[:16]}…",
            action="restore the object from a copy; the groups that use it cannot be trained",
            code="digest",
        )
    file = pa.ipc.open_file(pa.py_buffer(data))
    steps = changes(f"payload {where}", _revision(_format_of(file)), _revision(FORMAT))
    batches = [file.get_batch(number) for number in range(file.num_record_batches)]
    if steps:
        turns = [changed(steps, "turn", turn)[1] for batch in batches for turn in batch.to_pylist()]
        batches = [pa.RecordBatch.from_pylist(turns, schema=_SCHEMA)]
    return [row for batch in batches for row in _turn_rows(batch)]


def _format_of(file: Any) -> bytes:
    return (file.schema.metadata or {}).get(b"format", b"")


def _revision(stated: bytes) -> Revision:
    """(number, field hash) of a block's format."""
    name, _, rest = stated.decode(errors="replace").partition(" ")
    number, _, fields = rest.partition(" ")
    return (int(number), fields) if name == NAME and number.isdigit() else (None, stated)


def decode_batch(part: Bytes, batch: Batch, where: str) -> list[TurnRow]:
    """The rows of one batch of a block, from its bytes. Raises `ArtifactCorrupt`, also for one of another revision:
    such a block is read whole."""
    return _turn_rows(_proven_batch(part, batch, where, FORMAT, _SCHEMA))


def _proven_batch(part: Bytes, batch: Batch, where: str, stated: bytes, columns: pa.Schema) -> pa.RecordBatch:
    num_rows, offset, size, checksum = batch
    actual = batch_checksum(part, stated)
    found = f"checksum {actual} of {len(part)} bytes"
    if actual == checksum:
        try:
            rows = pa.ipc.read_record_batch(pa.py_buffer(part), columns)
            if rows.num_rows == num_rows:
                return rows
            found = f"{rows.num_rows} rows"
        except (pa.ArrowInvalid, OSError) as error:
            found = f"no batch: {error}"
    raise ArtifactCorrupt(
        f"payload {where} has from byte {offset} to {offset + size} {found}",
        expected=f"{num_rows} rows with checksum {checksum}, as the journal says",
        action="restore the object from a copy; the groups that use it cannot be trained",
        code="digest",
    )


def check_batches(data: bytes, batches: Sequence[Batch], where: str) -> None:
    """A record names the parts that its block, whose digest was proven, has. Raises `ReferenceInvalid`."""
    if not batches:
        return
    file = pa.ipc.open_file(pa.py_buffer(data))
    stated, num_batches = _format_of(file), file.num_record_batches
    try:
        for batch in batches:
            part = memoryview(data)[batch[1] : batch[1] + batch[2]]
            _proven_batch(part, batch, where, stated, file.schema)
    except ArtifactCorrupt as error:
        raise _other_parts(error.found, error.expected) from error
    if num_batches != len(batches):
        raise _other_parts(f"block {where} of {num_batches} batches", f"{len(batches)} batches, as the journal says")


def _other_parts(found: str, expected: str) -> ReferenceInvalid:
    return ReferenceInvalid(
        found,
        expected=expected,
        action="the journal was altered; fork from the last good position",
        code="row_digest",
    )


def _turn_rows(batch: pa.RecordBatch) -> list[TurnRow]:
    plain = {name: batch.column(name).to_pylist() for name in _SCHEMA.names if name not in _LISTS}
    lists = {name: _split(batch.column(name)) for name in _LISTS}
    return [_turn_row(plain, lists, index) for index in range(batch.num_rows)]


def _split(column: Any) -> list[npt.NDArray[Any]]:
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    return [values[start:end] for start, end in pairwise(offsets)]


def _turn_row(plain: dict[str, list[Any]], lists: dict[str, list[npt.NDArray[Any]]], index: int) -> TurnRow:
    spans = zip(
        *(lists[name][index].tolist() for name in ("span_incarnations", "span_versions", "span_ends")), strict=True
    )
    return TurnRow(
        group=plain["group"][index],
        sibling=plain["sibling"][index],
        attempt=plain["attempt"][index],
        turn=plain["turn"][index],
        sample=plain["sample"][index],
        start=plain["start"][index],
        tokens=lists["tokens"][index],
        logprobs=lists["logprobs"][index],
        mask=lists["mask"][index],
        spans=tuple(VersionSpan(*span) for span in spans),
        done=plain["done"][index],
        reward=plain["reward"][index],
        record=plain["record"][index],
    )
