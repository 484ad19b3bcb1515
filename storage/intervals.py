"""A set of integers kept as intervals: settled ordinals need memory for their gaps, not for their count."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise


class IntervalSet:
    """Half-open intervals in ascending order, never adjacent."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._count = 0

    @classmethod
    def of(cls, intervals: Sequence[tuple[int, int]]) -> IntervalSet:
        """From what `intervals` returned. Raises `ValueError` for anything else."""
        made = cls()
        made._starts, made._ends = [start for start, _ in intervals], [end for _, end in intervals]
        bounds = [bound for interval in intervals for bound in interval]
        if any(a >= b for a, b in pairwise(bounds)):
            raise ValueError("intervals that are empty, adjacent or out of order")
        made._count = sum(made._ends) - sum(made._starts)
        return made

    def __repr__(self) -> str:
        return f"IntervalSet({self.intervals()})"

    def __len__(self) -> int:
        return self._count

    def __contains__(self, value: int) -> bool:
        index = bisect_right(self._starts, value) - 1
        return index >= 0 and value < self._ends[index]

    def __iter__(self) -> Iterator[int]:
        for start, end in self.intervals():
            yield from range(start, end)

    def intervals(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    def add(self, value: int) -> bool:
        """Add one value; False if it was there."""
        index = bisect_right(self._starts, value) - 1
        if index >= 0 and value < self._ends[index]:
            return False
        joins_left = index >= 0 and self._ends[index] == value
        joins_right = index + 1 < len(self._starts) and self._starts[index + 1] == value + 1
        if joins_left and joins_right:
            self._ends[index] = self._ends[index + 1]
            del self._starts[index + 1], self._ends[index + 1]
        elif joins_left:
            self._ends[index] = value + 1
        elif joins_right:
            self._starts[index + 1] = value
        else:
            self._starts.insert(index + 1, value)
            self._ends.insert(index + 1, value + 1)
        self._count += 1
        return True

    def remove(self, value: int) -> bool:
        """Remove one value; False if it was not there."""
        index = bisect_right(self._starts, value) - 1
        if index < 0 or value >= self._ends[index]:
            return False
        start, end = self._starts[index], self._ends[index]
        pieces = [(a, b) for a, b in ((start, value), (value + 1, end)) if a < b]
        self._starts[index : index + 1] = [a for a, _ in pieces]
        self._ends[index : index + 1] = [b for _, b in pieces]
        self._count -= 1
        return True
