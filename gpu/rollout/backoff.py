"""Who waits before the next attempt, and until when."""

from __future__ import annotations

import heapq


class Backoff:
    """Groups that may not be dispatched before a moment (monotonic seconds). At most `places` wait; with one more, the
    group that would be free first does not wait any longer."""

    def __init__(self, base_s: float, max_s: float, places: int) -> None:
        self._base, self._max, self._places = base_s, max_s, places
        self._until: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, group: int) -> bool:
        return group in self._until

    def put(self, group: int, failures: int, now: float) -> None:
        """Exponential in the number of failures so far (the first waits `base_s`)."""
        until = now + min(self._max, self._base * 2.0 ** max(0, failures - 1))
        self._until[group] = until
        heapq.heappush(self._heap, (until, group))
        while len(self._until) > self._places:
            self.drop(min(self._until, key=lambda g: self._until[g]))

    def drop(self, group: int) -> None:
        self._until.pop(group, None)

    def release_due(self, now: float) -> list[int]:
        """Groups whose time has come, which leave."""
        due: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            until, group = heapq.heappop(self._heap)
            if self._until.get(group) == until:
                del self._until[group]
                due.append(group)
        return due

    def next_due(self) -> float | None:
        return min(self._until.values(), default=None)
