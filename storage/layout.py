"""How a trainer's state is cut into safetensors files: decided by names, dtypes and shapes alone.

Tensors lie in name order. Those above the size of a shard are cut into flat pieces, `<name>#<k>` in the files. Equal
tensors thus give equal layouts, and a tensor that does not change leaves its shard as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from storage.buffers import ITEM_BYTES, safetensors_header

SHARD_BYTES = 32 * 1024 * 1024
PAGE_BYTES = 4096


class TensorKind(NamedTuple):
    """A tensor without its bytes; `dtype` is a safetensors name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, start + size) of `tensor`, stored as tensor `key` of a shard at `offset` of the state's memory."""

    tensor: str
    key: str
    start: int
    size: int
    offset: int


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """A safetensors file of `size` bytes at `offset` of the state's memory: the header, then the parts in order."""

    offset: int
    size: int
    header: bytes
    parts: tuple[Part, ...]


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Every tensor and where it lies. `size` is what the shards take in memory, each from the beginning of a page."""

    tensors: dict[str, TensorKind]
    shards: tuple[Shard, ...]
    size: int

    @property
    def num_bytes(self) -> int:
        """Length of all files."""
        return sum(shard.size for shard in self.shards)

    def cut(self) -> dict[str, list[str]]:
        """The keys of each tensor that is cut, in order."""
        keys: dict[str, list[str]] = {}
        for shard in self.shards:
            for part in shard.parts:
                if part.key != part.tensor:
                    keys.setdefault(part.tensor, []).append(part.key)
        return keys


class _Piece(NamedTuple):
    tensor: str
    key: str
    start: int
    kind: TensorKind


def plan_layout(tensors: Mapping[str, TensorKind], shard_bytes: int = SHARD_BYTES) -> Layout:
    """Shards of up to `shard_bytes` of tensor data, filled in name order."""
    shards: list[Shard] = []
    place = 0
    for pieces in _filled(tensors, shard_bytes):
        shards.append(_shard(place, pieces))
        place += -(-shards[-1].size // PAGE_BYTES) * PAGE_BYTES
    return Layout(dict(tensors), tuple(shards), place)


def _filled(tensors: Mapping[str, TensorKind], shard_bytes: int) -> Iterator[list[_Piece]]:
    pieces: list[_Piece] = []
    size = 0
    for piece in _pieces(tensors, shard_bytes):
        if pieces and size + piece.kind.num_bytes > shard_bytes:
            yield pieces
            pieces, size = [], 0
        pieces.append(piece)
        size += piece.kind.num_bytes
    if pieces:
        yield pieces


def _pieces(tensors: Mapping[str, TensorKind], shard_bytes: int) -> Iterator[_Piece]:
    for name in sorted(tensors):
        kind = tensors[name]
        if kind.num_bytes <= shard_bytes:
            yield _Piece(name, name, 0, kind)
            continue
        for k, start in enumerate(range(0, kind.num_bytes, shard_bytes)):
            key = f"{name}#{k}"
            assert key not in tensors, "no tensor may have the name of another one's piece"
            yield _Piece(name, key, start, TensorKind("U8", (min(shard_bytes, kind.num_bytes - start),)))


def _shard(place: int, pieces: list[_Piece]) -> Shard:
    header = safetensors_header((p.key, p.kind.dtype, p.kind.shape, p.kind.num_bytes) for p in pieces)
    parts: list[Part] = []
    size = len(header)
    for piece in pieces:
        parts.append(Part(piece.tensor, piece.key, piece.start, piece.kind.num_bytes, place + size))
        size += piece.kind.num_bytes
    return Shard(place, size, header, tuple(parts))
