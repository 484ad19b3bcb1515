"""Forks for tests: the description of a new run, stores in which a process dies, and what a store holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage.clock import VirtualClock
from storage.errors import UserError
from storage.filesystem import Bytes, Store
from storage.fork import Fork, fork_run
from storage.memory import MemoryStore
from storage.runs import RunInfo, make_run, open_run
from tests.simulation.world import RUN

NEW = "b"


def description(store: Store, run: str = NEW, source: str = RUN, **changes: Any) -> RunInfo:
    """A run that means what the source means."""
    info = open_run(store, source)
    values: dict[str, Any] = {
        "run": run, "created": 7.0, "num_siblings": info.num_siblings, "staleness": info.staleness,
        "fingerprints": dict(info.fingerprints), "settings": dict(info.settings),
    }  # fmt: skip
    return make_run(**{**values, **changes})


def fork(store: Store, step: int | None = None, to: Store | None = None, source: str = RUN, **options: Any) -> Fork:
    made = options.pop("made", None) or description(store, source=source)
    return fork_run(store, source, to or store, made, step=step, clock=VirtualClock(), **options)


def objects(store: MemoryStore, run: str) -> dict[str, bytes]:
    """Everything below a run's folder."""
    return {key: store.read(key) for key in sorted(store.list(f"runs/{run}"))}


def refused(kind: type[UserError], says: str, store: MemoryStore, act: Callable[[], object]) -> None:
    """A mistake of the user, that wrote nothing."""
    before = objects(store, "")
    with pytest.raises(kind) as error:
        act()
    assert says in str(error.value)
    assert error.value.exit_code == 2
    assert objects(store, "") == before


class Dying(MemoryStore):
    """The process dies (`SystemExit`) at create number `last`, before or after it was applied."""

    def __init__(self, held: MemoryStore, last: int, applied: bool) -> None:
        super().__init__("sim")
        self._objects = held._objects  # pyright: ignore[reportPrivateUsage]
        self._last, self._applied = last, applied
        self.creates = 0
        self.died_at = ""

    def create(self, key: str, data: Bytes) -> None:
        self.creates += 1
        if self.creates > self._last:
            if self._applied and self.creates == self._last + 1:
                super().create(key, data)
            self.died_at = self.died_at or key.rpartition("/")[2]
            raise SystemExit(f"killed at {key}")
        super().create(key, data)

    def delete(self, keys: Any) -> list[str]:
        if self.creates > self._last:
            raise SystemExit("killed")
        return super().delete(keys)
