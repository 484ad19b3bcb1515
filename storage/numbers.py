"""How two tensors of one dtype and shape differ in their numbers, from their bytes and without torch.

An element is changed when its bits are. For float types, BF16 too, the differences are computed in float64 and count
the changed elements that are finite on both sides; the others are counted in `not_finite`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.buffers import ITEM_BYTES

_CHUNK = 1 << 20
_FLOATS = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}


@dataclass(frozen=True, slots=True)
class Numbers:
    """`max_rel` is the largest |right - left| / max(|left|, |right|), so at most 2; `l2` is the norm of right - left.
    The last four are None for types that are not floats, a difference also where it is beyond float64."""

    elements: int
    changed: int
    max_abs: float | None
    max_rel: float | None
    l2: float | None
    not_finite: int | None

    @property
    def share(self) -> float:
        """Share of changed elements."""
        return self.changed / self.elements if self.elements else 0.0


class Tally:
    """Adds up the differences of a tensor piece by piece; what is not added counts as equal."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._bits = np.dtype(f"u{ITEM_BYTES[dtype]}")
        self._changed = self._not_finite = 0
        self._max_abs = self._max_rel = self._squares = 0.0

    def add(self, left: npt.NDArray[np.uint8], right: npt.NDArray[np.uint8]) -> None:
        """The same whole elements of both sides, as bytes."""
        one, other = left.view(self._bits), right.view(self._bits)
        for start in range(0, len(one), _CHUNK):
            a, b = one[start : start + _CHUNK], other[start : start + _CHUNK]
            changed = a != b
            self._changed += int(np.count_nonzero(changed))
            if self._is_float:
                self._measure(self._values(a[changed]), self._values(b[changed]))

    def numbers(self, elements: int) -> Numbers:
        """The sum so far, of a tensor of so many elements."""
        if not self._is_float:
            return Numbers(elements, self._changed, None, None, None, None)
        largest, relative, norm = (
            value if math.isfinite(value) else None
            for value in (self._max_abs, self._max_rel, math.sqrt(self._squares))
        )
        return Numbers(elements, self._changed, largest, relative, norm, self._not_finite)

    @property
    def _is_float(self) -> bool:
        return self._dtype in _FLOATS or self._dtype == "BF16"

    def _values(self, bits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        if self._dtype == "BF16":  # the upper half of a float32
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return bits.view(_FLOATS[self._dtype]).astype(np.float64)

    def _measure(self, left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> None:
        finite = np.isfinite(left) & np.isfinite(right)
        self._not_finite += len(finite) - int(np.count_nonzero(finite))
        left, right = left[finite], right[finite]
        with np.errstate(over="ignore"):
            distance = np.abs(right - left)
            self._squares += float(np.square(distance).sum())
        size = np.maximum(np.abs(left), np.abs(right))
        relative = np.divide(distance, size, out=np.zeros_like(distance), where=size > 0)
        self._max_abs = max(self._max_abs, float(distance.max(initial=0.0)))
        self._max_rel = max(self._max_rel, float(relative.max(initial=0.0)))
