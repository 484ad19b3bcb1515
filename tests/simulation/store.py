"""The store of a simulated world: what a network and other processes can do to a store, by the world's dice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

from storage.errors import CommitUnknown, ObjectExists, StoreUnavailable
from storage.filesystem import Bytes
from storage.memory import MemoryStore

JOURNAL = "/journal/"


def slot_of(key: str) -> int:
    return int(key[-18:-6])


class Delayed(NamedTuple):
    """A create that timed out and has not arrived yet."""

    key: str
    data: bytes


class SimStore(MemoryStore):
    """Creates in the journal are refused, applied with a lost reply, or time out and arrive later (`land`).

    `interleave` lets others run between two operations of whoever uses the store. `writes` counts what was changed.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__("sim")
        self._rng = rng
        self.faults = True
        self.delayed: list[Delayed] = []
        self.writes = 0
        self._plan: list[tuple[int, Callable[[], None]]] = []
        self._operations = 0

    # ------------------------------------------------------------------ operations

    def create(self, key: str, data: Bytes) -> None:
        self._pass()
        dice = self._rng.random() if self.faults and JOURNAL in key else 1.0
        if dice < 0.05:
            raise StoreUnavailable("503", expected="an answer", action="retry")
        if dice < 0.10:
            self.delayed.append(Delayed(key, bytes(data)))
            raise CommitUnknown("a time-out", expected="a reply", action="read back")
        self.apply(key, data)
        if dice < 0.16:
            raise CommitUnknown("a lost reply", expected="a reply", action="read back")

    def apply(self, key: str, data: Bytes) -> None:
        """A create that arrives. Raises `ObjectExists`."""
        super().create(key, data)
        self.writes += not self._is_retired(key)

    def _is_retired(self, key: str) -> bool:
        """A slot that was deleted: who creates it once more, with the bytes it had, changes nothing for anybody."""
        if JOURNAL not in key or not key.endswith(".arrow"):
            return False
        return slot_of(key) < int(self._objects.get(key[:-18] + "low", b"0"))

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._pass()
        return super().read(key, start, end)

    def size(self, key: str) -> int | None:
        self._pass()
        return super().size(key)

    def land(self, index: int) -> bool:
        """A delayed create arrives; False when the store refuses it."""
        late = self.delayed.pop(index)
        try:
            self.apply(late.key, late.data)
        except ObjectExists:
            return False
        return True

    def delete(self, keys: Iterable[str]) -> list[str]:
        chosen = {key: self.faults and self._rng.random() < 0.1 for key in keys}
        super().delete([key for key, refused in chosen.items() if not refused])
        return [key for key, refused in chosen.items() if refused]

    # ------------------------------------------------------------------ what the world does with it

    def keys(self, part: str) -> list[str]:
        """Keys that contain `part`, in order."""
        return sorted(key for key in self._objects if part in key)

    def slots(self) -> list[int]:
        """Slots of the journal that hold something, in order."""
        return sorted(slot_of(key) for key in self._objects if JOURNAL in key and key.endswith(".arrow"))

    def alter(self, key: str, data: bytes | None) -> bytes:
        """Change an object behind everybody's back, None removes it; returns what it held."""
        found = self._objects.pop(key, b"")
        if data is not None:
            self._objects[key] = data
        return found

    @contextlib.contextmanager
    def interleave(self, plan: Iterable[tuple[int, Callable[[], None]]]) -> Generator[None]:
        """Run each act before the n-th operation (counted from 0) of the block; within an act nothing else runs,
        unless it plans so."""
        outer = self._plan, self._operations
        self._plan, self._operations = sorted(plan, key=lambda item: item[0]), 0
        try:
            yield
        finally:
            self._plan, self._operations = outer

    def _pass(self) -> None:
        while self._plan and self._plan[0][0] <= self._operations:
            _, act = self._plan.pop(0)
            with self.interleave(()):
                act()
        self._operations += 1
