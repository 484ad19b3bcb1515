"""Tensors as `storage` sees them: named buffers of bytes, their digest, and the safetensors layout.

`storage` does not know torch. The layout is the public safetensors format (8-byte little-endian header length, JSON
header, data), written without an extra copy; the `safetensors` library reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
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


def tensor_digests(buffers: Mapping[str, NamedBuffer]) -> dict[str, str]:
    """sha256 of the bytes of each buffer. Uses two threads for large ones."""

    def one(name: str) -> str:
        return hashlib.sha256(buffers[name].data.data).hexdigest()

    names = sorted(buffers)
    if sum(buffer.num_bytes for buffer in buffers.values()) < THREADS_BYTES:
        return {name: one(name) for name in names}
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def buffers_digest(
    buffers: Mapping[str, NamedBuffer], extra: str = "", digests: Mapping[str, str] | None = None
) -> str:
    """sha256 over the sorted (name, dtype, shape, sha256(data)) of all buffers and `extra`; `digests` are those of the
    data where they are known."""
    digests = tensor_digests(buffers) if digests is None else digests
    lines = [f"{name}:{buffers[name].dtype}:{buffers[name].shape}:{digests[name]}" for name in sorted(buffers)]
    return hashlib.sha256("\n".join([*lines, extra]).encode()).hexdigest()


def safetensors_header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """What precedes the data of a safetensors file, for (name, dtype, shape, size in bytes) in the data's order."""
    header: dict[str, object] = {}
    offset = 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def to_safetensors(tensors: Mapping[str, NamedBuffer]) -> bytearray:
    """One safetensors file with the tensors in the given order."""
    header = safetensors_header((name, b.dtype, b.shape, b.num_bytes) for name, b in tensors.items())
    file = bytearray(len(header) + sum(buffer.num_bytes for buffer in tensors.values()))
    file[: len(header)] = header
    place = np.frombuffer(file, np.uint8)
    position = len(header)
    for buffer in tensors.values():
        place[position : position + buffer.num_bytes] = buffer.data
        position += buffer.num_bytes
    return file


def read_safetensors_header(read: Callable[[int, int], bytes], where: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor of a file of which `read(start, end)` gives bytes; nothing is proven. Raises
    `ArtifactCorrupt`."""
    try:
        length = int.from_bytes(read(0, 8), "little")
        header: dict[str, dict[str, object]] = msgspec.json.decode(read(8, 8 + length))
        return {
            name: (str(entry["dtype"]), msgspec.convert(entry["shape"], tuple[int, ...]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise _no_safetensors(where, error) from error


def from_safetensors(data: bytes, where: str) -> dict[str, NamedBuffer]:
    """The tensors of a file whose digest was checked already, as views. Raises `ArtifactCorrupt`."""
    try:
        length = int.from_bytes(data[:8], "little")
        header: dict[str, dict[str, object]] = msgspec.json.decode(data[8 : 8 + length])
        body = np.frombuffer(data, np.uint8)[8 + length :]
        return {name: _view(entry, body) for name, entry in header.items() if name != "__metadata__"}
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        raise _no_safetensors(where, error) from error


def _no_safetensors(where: str, error: Exception) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"{where} is not a safetensors file: {error}",
        expected="a safetensors file",
        action="restore the object from a copy",
        code="format",
    )


def _view(entry: dict[str, object], body: npt.NDArray[np.uint8]) -> NamedBuffer:
    dtype = str(entry["dtype"])
    shape = msgspec.convert(entry["shape"], tuple[int, ...])
    start, end = msgspec.convert(entry["data_offsets"], tuple[int, int])
    if not 0 <= start <= end <= len(body) or int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype] != end - start:
        raise ValueError(f"{dtype} {shape} at {start}:{end} of {len(body)} bytes")
    return NamedBuffer(dtype, shape, body[start:end])
