"""Pure functions of bytes, remembered while a world runs: the same bytes are parsed once, not at every claim.

Key and value are the whole input and the whole output, and an input that raises is never remembered: no check is lost.
Segments are remembered within one world, except the first few of a run, which small worlds produce again and again, as
they do token blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from storage import auditor, journal, reader
from storage import payload as payloads
from storage.payload import Encoded, TurnRow
from storage.schema import KIND_OF
from storage.segment import Header, Row, Segment

_exactly = msgspec.json.Encoder().encode
MOST = 8192
COMMON_SLOTS = 2

_encoded: dict[tuple[Any, ...], Encoded] = {}
_decoded: dict[tuple[Any, ...], list[TurnRow]] = {}
_common: dict[tuple[Any, ...], Segment] = {}
_written: dict[tuple[Any, ...], tuple[bytes, str]] = {}


def encode_block(name: str, rows: Sequence[TurnRow]) -> Encoded:
    """`storage.payload.encode_block`; the bytes do not depend on the name."""
    key = tuple(
        (row.group, row.sibling, row.attempt, row.turn, row.sample, row.start, row.spans, row.done, row.reward,
         row.record, row.tokens.tobytes(), row.logprobs.tobytes(), row.mask.tobytes())
        for row in rows
    )  # fmt: skip
    found = _encoded.get(key)
    if found is None:
        found = _keep(_encoded, key, payloads.encode_block(name, rows))
    return found._replace(name=name)


def _keep(kept: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> Any:
    if len(kept) >= MOST:
        kept.clear()
    kept[key] = value
    return value


def _blocks(decode: Callable[[bytes, str, str], list[TurnRow]]) -> Callable[[bytes, str, str], list[TurnRow]]:
    def decode_block(data: bytes, digest: str, where: str) -> list[TurnRow]:
        key = (decode, digest, data)
        found = _decoded.get(key)
        return _keep(_decoded, key, decode(data, digest, where)) if found is None else found

    return decode_block


def _decoding(decode: Callable[[bytes, str], Segment]) -> Callable[[bytes, str], Segment]:
    kept: dict[bytes, Segment] = {}

    def decode_segment(data: bytes, where: str) -> Segment:
        found = kept.get(data) or _common.get((decode, data))
        if found is None:
            found = decode(data, where)
            if found.header.slot < COMMON_SLOTS:
                _keep(_common, (decode, data), found)
            else:
                kept[data] = found
        return found

    return decode_segment


def _encoding(encode: Callable[[Header, Sequence[Row]], tuple[bytes, str]]) -> Callable[..., tuple[bytes, str]]:
    def encode_segment(header: Header, rows: Sequence[Row]) -> tuple[bytes, str]:
        if header.slot >= COMMON_SLOTS:
            return encode(header, rows)
        key = (encode, _exactly((header, [(KIND_OF[type(row.record)], row) for row in rows])))
        found = _written.get(key)
        return _keep(_written, key, encode(header, rows)) if found is None else found

    return encode_segment


def forget() -> None:
    """What was remembered of code that is broken on purpose must not reach whole code."""
    for kept in (_encoded, _decoded, _common, _written):
        kept.clear()


@contextlib.contextmanager
def remembering() -> Generator[None]:
    """Within the block `storage` treats equal bytes once. Blocks nest; the outermost one decides."""
    if getattr(journal.decode_segment, "__module__", "") == __name__:
        yield
        return
    reading, writing = journal.decode_segment, journal.encode_segment
    block, block_of_audit = reader.decode_block, auditor.decode_block
    journal.decode_segment, journal.encode_segment = _decoding(reading), _encoding(writing)
    reader.decode_block, auditor.decode_block = _blocks(block), _blocks(block_of_audit)
    try:
        yield
    finally:
        journal.decode_segment, journal.encode_segment = reading, writing
        reader.decode_block, auditor.decode_block = block, block_of_audit
