"""Tensors as `storage` sees them: named buffers of bytes, their digest, and the safetensors layout.

`storage` does not know torch. The layout is the public safetensors format (8-byte little-endian header length, JSON
header, data), written without an extra copy; the `safetensors` library reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from storage.errors import ArtifactCorrupt

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


THREADS_BYTES = 4 << 20
"""Below this, starting threads costs more than they save."""


@dataclass(frozen=True, slots=True)
class NamedBuffer:
    """A tensor's bytes. `dtype` is a safetensors name, `data` a flat, contiguous uint8 array."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return len(self.data)


def buffers_digest(buffers: Mapping[str, NamedBuffer], extra: str = "") -> str:
    """sha256 over the sorted (name, dtype, shape, sha256(data)) of all buffers and `extra`. Uses two threads for
    large ones."""

    def one(name: str) -> str:
        buffer = buffers[name]
        return f"{name}:{buffer.dtype}:{buffer.shape}:{hashlib.sha256(buffer.data.data).hexdigest()}"

    names = sorted(buffers)
    if sum(buffer.num_bytes for buffer in buffers.values()) < THREADS_BYTES:
        lines = [one(name) for name in names]
    else:
        with ThreadPoolExecutor(2) as pool:
            lines = list(pool.map(one, names))
    return hashlib.sha256("\n".join([*lines, extra]).encode()).hexdigest()


def to_safetensors(tensors: Mapping[str, NamedBuffer]) -> bytearray:
    """One safetensors file with the tensors in the given order."""
    header: dict[str, object] = {}
    offset = 0
    for name, buffer in tensors.items():
        header[name] = {
            "dtype": buffer.dtype,
            "shape": list(buffer.shape),
            "data_offsets": [offset, offset + buffer.num_bytes],
        }
        offset += buffer.num_bytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    file = bytearray(8 + len(text) + offset)
    file[:8] = len(text).to_bytes(8, "little")
    file[8 : 8 + len(text)] = text
    place = np.frombuffer(file, np.uint8)
    position = 8 + len(text)
    for buffer in tensors.values():
        place[position : position + buffer.num_bytes] = buffer.data
        position += buffer.num_bytes
    return file


def from_safetensors(data: bytes, where: str) -> dict[str, NamedBuffer]:
    """The tensors of a file whose digest was checked already, as views. Raises `ArtifactCorrupt`."""
    try:
        length = int.from_bytes(data[:8], "little")
        header: dict[str, dict[str, object]] = msgspec.json.decode(data[8 : 8 + length])
        body = np.frombuffer(data, np.uint8)[8 + length :]
        return {name: _view(entry, body) for name, entry in header.items() if name != "__metadata__"}
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        raise ArtifactCorrupt(
            f"{where} is not a safetensors file: {error}",
            expected="a safetensors file",
            action="restore the object from a copy",
            code="format",
        ) from error


def _view(entry: dict[str, object], body: npt.NDArray[np.uint8]) -> NamedBuffer:
    dtype = str(entry["dtype"])
    shape = msgspec.convert(entry["shape"], tuple[int, ...])
    start, end = msgspec.convert(entry["data_offsets"], tuple[int, int])
    if not 0 <= start <= end <= len(body) or int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype] != end - start:
        raise ValueError(f"{dtype} {shape} at {start}:{end} of {len(body)} bytes")
    return NamedBuffer(dtype, shape, body[start:end])
