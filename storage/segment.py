"""One journal segment: an Arrow IPC file of narrow rows that carries its own digest.

The digest is part of the schema metadata, so the file stays a plain Arrow file that any reader opens. It is computed
with its own 64 digits set to zero and checked on the raw bytes before anything is parsed: Arrow's parser accepts
flipped bits. The header also holds the digest of the previous segment, which makes the journal a hash chain.
"""

# pyright: reportUnknownMemberType=false
# (pyarrow's stubs are partial)

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from storage.arrow_columns import OPTIONS, blobs, fixed, texts
from storage.errors import ArtifactCorrupt, SchemaUnsupported
from storage.schema import BYTES, FIELD_HASH, KIND_OF, KINDS, SCHEMA, LedgerSnapshot, Record
from storage.upgrades import Change, changed, changes

FORMAT = "tidegate-journal"
GENESIS = "0" * 64
_TAG = b"tidegate-segment-sha256:"
_UNSET = _TAG + b"0" * 64
_HEX = re.compile(rb"[0-9a-f]{64}")
_SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("time", pa.float64(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("body", pa.string(), nullable=False),
        pa.field("blob", pa.binary()),
    ]
)
_encode = msgspec.json.Encoder().encode
_decoders = {kind: msgspec.json.Decoder(record) for kind, record in KINDS.items()}


class Row(NamedTuple):
    """A record at its place in the journal. `time` is Unix seconds, `blob` the bytes of an inline payload."""

    seq: int
    time: float
    record: Record
    blob: bytes | None = None


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a segment says about itself. `first`..`last` are sequence numbers, `previous` the chain, `snapshot` the
    newest ledger snapshot that it or a segment before it records."""

    format: str
    schema: int
    fields: str
    run: str
    incarnation: int
    writer: str
    slot: int
    first: int
    last: int
    previous: str
    snapshot: LedgerSnapshot | None


class Segment(NamedTuple):
    header: Header
    rows: list[Row]
    digest: str


def make_header(
    *,
    run: str,
    incarnation: int,
    writer: str,
    slot: int,
    first: int,
    last: int,
    previous: str,
    snapshot: LedgerSnapshot | None = None,
) -> Header:
    return Header(FORMAT, SCHEMA, FIELD_HASH, run, incarnation, writer, slot, first, last, previous, snapshot)


def encode_segment(header: Header, rows: Sequence[Row]) -> tuple[bytes, str]:
    """The segment's bytes and its digest (hex sha256)."""
    parts = [apart(row) for row in rows]
    metadata: dict[bytes | str, bytes | str] = {"tidegate": _encode(header), "digest": _UNSET}
    batch = pa.RecordBatch.from_arrays(
        [
            fixed([row.seq for row in rows], np.int64),
            fixed([row.time for row in rows], np.float64),
            texts([KIND_OF[type(row.record)].encode() for row in rows]),
            texts([body for body, _ in parts]),
            blobs([blob for _, blob in parts]),
        ],
        schema=_SCHEMA.with_metadata(metadata),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema, options=OPTIONS) as writer:
        writer.write_batch(batch)
    data = bytearray(sink.getvalue())
    digest = hashlib.sha256(data).hexdigest()
    _write_digests(data, digest.encode())
    return bytes(data), digest


def _digests(data: bytes | bytearray) -> list[slice]:
    """Where the digest stands: in the schema, with which the file begins, and in the footer's copy of it, with which it
    ends. Records between them may hold any bytes, this text too."""
    starts = [at + len(_TAG) for at in (data.find(_TAG), data.rfind(_TAG)) if at >= 0]
    return [slice(start, start + len(GENESIS)) for start in starts]


def _write_digests(data: bytearray, digest: bytes) -> None:
    for place in _digests(data):
        data[place] = digest


def check_digest(data: bytes, where: str) -> str:
    """The digest a segment carries, proven on its raw bytes. Raises `ArtifactCorrupt`."""
    stated = {bytes(data[place]) for place in _digests(data)}
    if len(stated) != 1 or not _HEX.fullmatch(min(stated)):
        raise _corrupt(where, f"{len(stated)} stated digests", "one digest in the schema metadata", "digest")
    blank = bytearray(data)
    _write_digests(blank, b"0" * 64)
    actual, expected = hashlib.sha256(blank).hexdigest(), stated.pop().decode()
    if actual != expected:
        raise _corrupt(where, f"sha256 {actual[:16]}…", f"sha256 {expected[:16]}…", "digest")
    return expected


def decode_segment(data: bytes, where: str) -> Segment:
    """Check the digest, then parse. Raises `ArtifactCorrupt` and `SchemaUnsupported`; `where` names the object."""
    digest = check_digest(data, where)
    file = pa.ipc.open_file(pa.py_buffer(data))
    header, steps = decode_header((file.schema.metadata or {}).get(b"tidegate", b""), where)
    batch = file.get_batch(0)
    columns: list[list[Any]] = [batch.column(name).to_pylist() for name in _SCHEMA.names]
    rows = [
        together(seq, time, kind, body, blob, where, steps)
        for seq, time, kind, body, blob in zip(*columns, strict=True)
    ]
    return whole_segment(header, rows, digest, where)


def whole_segment(header: Header, rows: list[Row], digest: str, where: str) -> Segment:
    """Raises `ArtifactCorrupt` when the rows are not those of the header."""
    if (
        not rows
        or (rows[0].seq, rows[-1].seq) != (header.first, header.last)
        or len(rows) != header.last - header.first + 1
    ):
        raise _corrupt(where, f"{len(rows)} rows", f"rows {header.first}..{header.last}", "mixed_cut")
    return Segment(header, rows, digest)


def decode_header(text: bytes | str, where: str) -> tuple[Header, list[Change]]:
    """A segment's header from its JSON, and what has to be done to the records of a segment of an older schema. Raises
    `ArtifactCorrupt`, `SchemaUnsupported`."""
    try:
        header = msgspec.json.decode(text)
        kind, found = header["format"], (header["schema"], header["fields"])
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise _corrupt(where, "no readable header", "a Tidegate segment header", "header") from error
    if kind != FORMAT:
        raise _corrupt(where, f"format {kind!r}", f"format {FORMAT}", "header")
    steps = changes(where, found, (SCHEMA, FIELD_HASH))
    if steps:
        header = changed(steps, "header", header)[1] | {"schema": SCHEMA, "fields": FIELD_HASH}
    return msgspec.convert(header, Header), steps


def apart(row: Row) -> tuple[bytes, bytes | None]:
    """The JSON body of a row's record, and the bytes beside it."""
    field = BYTES.get(type(row.record))
    if field is None:
        return _encode(row.record), row.blob
    return _encode(replace(row.record, **{field: b""})), getattr(row.record, field)


def together(seq: int, time: float, kind: str, body: str, blob: bytes | None, where: str, steps: list[Change]) -> Row:
    """The row of such parts. Raises `SchemaUnsupported`."""
    record = decode_record(kind, body, where, steps)
    field = BYTES.get(type(record))
    if field is None:
        return Row(seq, time, record, blob)
    return Row(seq, time, replace(record, **{field: blob or b""}))


def decode_record(kind: str, body: str, where: str, steps: list[Change]) -> Record:
    """Raises `SchemaUnsupported`."""
    if steps:
        kind, content = changed(steps, kind, msgspec.json.decode(body))
        body = _encode(content).decode()
    decoder = _decoders.get(kind)
    try:
        if decoder is not None:
            return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise SchemaUnsupported(
            f"{where}: record {kind} {body[:80]}: {error}",
            expected="the fields of this schema",
            action="read this run with the Tidegate version that wrote it; nothing was changed",
        ) from error
    raise SchemaUnsupported(
        f"{where}: record of unknown kind {kind!r}",
        expected=f"one of {', '.join(KINDS)}",
        action="read this run with the Tidegate version that wrote it; nothing was changed",
    )


def _corrupt(where: str, found: str, expected: str, code: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"{where}: {found}",
        expected=expected,
        action="restore the object from a copy, or `tidegate fork RUN NEW --last-good`",
        code=code,
    )
