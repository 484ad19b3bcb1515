"""Arrow columns from numpy buffers, without pyarrow's converters: they cost more than the bytes they convert.

What does not fit its type raises `OverflowError` or `ValueError`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportArgumentType=false
# (pyarrow's stubs are partial, and do not know that arrays are buffers)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Column: TypeAlias = "pa.Array[Any]"
OPTIONS = pa.ipc.IpcWriteOptions()
"""Made once: pyarrow reads the environment for each."""
_LISTS = {np.dtype(kind): pa.list_(pa.from_numpy_dtype(kind)) for kind in (np.int8, np.int32, np.int64, np.float32)}
_PLAIN = {np.dtype(kind): pa.from_numpy_dtype(kind) for kind in (np.int8, np.int32, np.int64, np.float32, np.float64)}


def fixed(values: Sequence[Any] | npt.NDArray[Any], kind: type[np.generic]) -> Column:
    """A column of numbers."""
    array = np.ascontiguousarray(values, kind)
    return pa.Array.from_buffers(_PLAIN[array.dtype], len(array), [None, pa.py_buffer(array)])


def flags(values: Sequence[bool]) -> Column:
    bits = np.packbits(np.array(values, np.bool_), bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])


def offsets_of(lengths: Iterable[int]) -> npt.NDArray[np.int32]:
    """Where each of the parts begins, and where the last ends."""
    total, offsets = 0, [0]
    for length in lengths:
        total += length
        offsets.append(total)
    return np.array(offsets, np.int32)


def ragged(offsets: npt.NDArray[np.int32], flat: npt.NDArray[Any]) -> Column:
    """A column of lists of numbers, of `flat`'s type."""
    values = pa.Array.from_buffers(_PLAIN[flat.dtype], len(flat), [None, pa.py_buffer(flat)])
    return pa.Array.from_buffers(_LISTS[flat.dtype], len(offsets) - 1, [None, pa.py_buffer(offsets)], children=[values])


def texts(values: Sequence[bytes]) -> Column:
    """A column of strings, given as UTF-8."""
    offsets = offsets_of(map(len, values))
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    )


def blobs(values: Sequence[bytes | None]) -> Column:
    """A column of bytes, or of nothing."""
    there = np.packbits([value is not None for value in values], bitorder="little")
    parts = [value or b"" for value in values]
    offsets = offsets_of(map(len, parts))
    buffers = [pa.py_buffer(there), pa.py_buffer(offsets), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.binary(), len(values), buffers)
