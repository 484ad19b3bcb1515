"""Group-level work: from the last sibling's end to the verdict on the group.

A group in it is nobody else's: it keeps its places (R and P), is never lost, and leaves with a verdict. Work that
raises is tried again with backoff, for ever and visibly: a broken filter must not cost a finished group. Pure: whoever
wraps it runs the work.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Failed:
    since: float
    due: float
    tries: int
    problem: str


class Judging:
    """At most `places` groups are at work at once; the others wait in the order in which they finished. Seconds are
    monotonic."""

    def __init__(self, base_s: float, max_s: float, places: int) -> None:
        self._base, self._max, self._places = base_s, max_s, places
        self._waiting: deque[int] = deque()
        self._at_work: dict[int, float] = {}
        self._failed: dict[int, _Failed] = {}

    def __len__(self) -> int:
        """Groups between their last sibling's end and their verdict."""
        return len(self._waiting) + len({*self._at_work, *self._failed})

    def is_at_work(self, ordinal: int) -> bool:
        return ordinal in self._at_work

    @property
    def num_failed(self) -> int:
        """Groups whose work raised the last time."""
        return len(self._failed)

    def add(self, ordinal: int) -> None:
        self._waiting.append(ordinal)

    def start(self, now: float) -> list[int]:
        """Groups whose work begins now: retries that are due, then the waiting ones, as far as there are places."""
        begun: list[int] = []
        due = sorted((one.due, o) for o, one in self._failed.items() if one.due <= now and o not in self._at_work)
        for _, ordinal in due[: self._places - len(self._at_work)]:
            begun.append(ordinal)
            self._at_work[ordinal] = now
        while self._waiting and len(self._at_work) < self._places:
            ordinal = self._waiting.popleft()
            begun.append(ordinal)
            self._at_work[ordinal] = now
        return begun

    def ended(self, ordinal: int) -> bool:
        """The verdict is there. False when nobody waits for it any more: the group was settled otherwise."""
        if self._at_work.pop(ordinal, None) is None:
            return False
        self._failed.pop(ordinal, None)
        return True

    def failed(self, ordinal: int, problem: str, now: float) -> None:
        """The work raised: again later."""
        self._at_work.pop(ordinal, None)
        last = self._failed.get(ordinal)
        tries = last.tries + 1 if last else 1
        due = now + min(self._max, self._base * 2.0 ** (tries - 1))
        self._failed[ordinal] = _Failed(last.since if last else now, due, tries, problem)

    def retry_now(self, now: float) -> None:
        for one in self._failed.values():
            one.due = min(one.due, now)

    def drop(self, ordinal: int) -> None:
        """The group was settled otherwise."""
        self._failed.pop(ordinal, None)
        self._at_work.pop(ordinal, None)
        if ordinal in self._waiting:
            self._waiting.remove(ordinal)

    def why(self) -> str:
        """What keeps groups here, for people; "" when nothing does."""
        if self._failed:
            ordinal, worst = min(self._failed.items(), key=lambda item: item[1].since)
            return f"group {ordinal}'s verdict failed {worst.tries} times: {worst.problem}"
        return f"{len(self)} groups in group-level work" if len(self) else ""

    def status(self, now: float) -> dict[str, object]:
        failed = {o: {"age_s": now - f.since, "tries": f.tries, "problem": f.problem} for o, f in self._failed.items()}
        return {"waiting": len(self._waiting), "at_work": len(self._at_work), "failed": failed}
