"""Reading some rows of a large block: the batches they lie in, near ones with one request, each by its own checksum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from storage.filesystem import Store
from storage.payload import Batch, TurnRow, decode_batch

MAX_GAP = 256 * 1024
"""Bytes between two batches that cost less to read than a second request."""


class Range(NamedTuple):
    """Bytes [start, end) of a file, which hold these batches, by number."""

    start: int
    end: int
    batches: tuple[int, ...]


def first_rows(batches: Sequence[Batch]) -> list[int]:
    """The row that each batch begins with, and how many rows there are."""
    return list(accumulate((batch[0] for batch in batches), initial=0))


def ranges_of(batches: Sequence[Batch], wanted: Iterable[int]) -> list[Range]:
    """What to read for the batches `wanted`, in the order of the file."""
    merged: list[Range] = []
    for number in sorted(wanted):
        _, offset, size, _ = batches[number]
        if merged and offset - merged[-1].end < MAX_GAP:
            last = merged.pop()
            merged.append(Range(last.start, offset + size, (*last.batches, number)))
        else:
            merged.append(Range(offset, offset + size, (number,)))
    return merged


def read_batches(
    store: Store, key: str, batches: Sequence[Batch], wanted: Iterable[int], firsts: Sequence[int]
) -> dict[int, TurnRow]:
    """The rows, by number, of the batches `wanted`. Raises `ArtifactCorrupt` for bytes that the checksum of their batch
    doesn't fit, and `ObjectMissing`."""
    rows: dict[int, TurnRow] = {}
    for start, end, numbers in ranges_of(batches, wanted):
        data = memoryview(store.read(key, start, end))
        for number in numbers:
            _, offset, size, _ = batches[number]
            part = data[offset - start : offset - start + size]
            rows.update(enumerate(decode_batch(part, batches[number], key), firsts[number]))
    return rows
