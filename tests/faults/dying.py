"""A whole run in one process, which kills itself (SIGKILL) at a chosen write: before it, in its middle, or after it.

What the store has said, and which steps the driver was told are committed, is written to a file: whoever looks at the
dead run knows what was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import gpu.local
from gpu.generation import worker
from gpu.generation.engine import Cached
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from gpu.rollout.manager import RolloutManager
from gpu.spec import RunSpec
from gpu.training import checkpoints
from storage import local, payload
from storage.archivist import Archivist
from storage.capture import CaptureBuffers
from storage.filesystem import Bytes, Store
from storage.opening import open_store
from tests.faults.house import RUN, House, small

PHASES = ("before", "half", "after")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.faults.warm"])  # its imports take longer than a run
FINISHED = 0
SHARD_BYTES, INLINE_BYTES = 1 << 16, 1200


@dataclass(frozen=True, slots=True)
class Death:
    """At write number `at`, counted from 0, of those of one kind: the folder of a run that they go to, or run.json."""

    kind: str
    at: int
    phase: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.at}-{self.phase}"


def kind_of(key: str) -> str:
    return key.split("/")[2]


class Dying:
    """A store that ends its process. `said` gets a line for each create that returned, and each delete that began."""

    def __init__(self, inner: Store, death: Death | None, said: int) -> None:
        self._inner, self._death, self._said = inner, death, said
        self._lock = threading.Lock()
        self._writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, key: str, data: Bytes) -> None:
        with self._writing(key):
            self._inner.create(key, data)
        self._say("create", key, hashlib.sha256(data).hexdigest())

    def swap(self, key: str, data: Bytes, token: str | None) -> str:
        with self._writing(key):
            return self._inner.swap(key, data, token)

    def delete(self, keys: Iterable[str]) -> list[str]:
        listed = list(keys)
        for key in listed:
            self._say("delete", key, "")  # before: who dies in it may have deleted
        with self._writing(*listed):
            return self._inner.delete(listed)

    @contextlib.contextmanager
    def _writing(self, *keys: str) -> Iterator[None]:
        phase = self._reached(keys)
        if phase == "half":
            self._die_before_the_link(keys)
        if phase == "before":
            self._die(keys)
        yield
        if phase in ("half", "after"):
            self._die(keys)

    def _reached(self, keys: tuple[str, ...]) -> str:
        if self._death is None or not keys or kind_of(keys[0]) != self._death.kind:
            return ""
        with self._lock:
            number, self._writes = self._writes, self._writes + 1
        return self._death.phase if number == self._death.at else ""

    def _die_before_the_link(self, keys: tuple[str, ...]) -> None:
        """A local file is whole, under a temporary name; on S3 a write has no middle that could be seen."""
        if isinstance(self._inner, local.LocalStore):
            me = threading.get_ident()
            link = os.link

            def die(one: Path, other: Path, **how: Any) -> None:
                if threading.get_ident() == me:
                    self._die(keys)
                link(one, other, **how)

            local.os.link = die  # type: ignore[assignment]

    def _die(self, keys: tuple[str, ...]) -> None:
        self._say("died", ",".join(keys), "")
        os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, what: str, key: str, digest: str) -> None:
        os.write(self._said, f"{what} {key} {digest}\n".encode())


GUESSING = {"name": "guess", "options": {"letters": 4, "turns": 2}, "epochs": 3}
SUITE = {"name": "words", "environment": "reverse", "options": {"letters": 1}, "tasks": 2}


def house_of(folder: Path, store: Any) -> House:
    """A run of 12 groups of two turns in 6 steps, with payload files, checkpoints, ledger snapshots and evaluations."""
    config = small(
        environment=GUESSING,
        rollout={"siblings": 2, "batch": 2, "staleness": 1},
        generation={"workers": 1, "engines": 1, "max_length": 32},
        checkpoint={"every": 2, "max_unsaved": 50},
        evaluation={"every": 3, "suites": [SUITE]},
        storage={"flush_interval": 0.002, "snapshot_every": 6},
    )
    return House(folder, config, store=store, engine=_engine)


def _engine(spec: RunSpec) -> EngineServer:
    """Of other tokens for each rollout, so that there is something to learn and checkpoints differ."""
    return EngineServer(FakeEngine(slots=spec.engine.slots, tokens=99, vocabulary=6, by_rollout=True), Cached.KEEP)


def live(url: str, death: Death | None, said: Path, environment: dict[str, str]) -> None:
    """The body of the process."""
    os.environ.update(environment)
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stderr = open(said.with_suffix(".err"), "a")  # noqa: SIM115 - it ends with the process
    store = Dying(open_store(url), death, handle)
    furnish(pytest.MonkeyPatch(), store)
    house = house_of(said.parent, store)
    house.steps_seen = Said(handle)
    asyncio.run(house.run(retries=1, timeout=120.0))


class Said(list[int]):
    """Committed steps as the driver hears of them."""

    def __init__(self, handle: int) -> None:
        super().__init__()
        self._handle = handle

    def append(self, step: int) -> None:
        os.write(self._handle, f"step {step} .\n".encode())


def furnish(patch: pytest.MonkeyPatch, store: Any) -> None:
    """Small runs of this process write objects of every kind: payload files, several objects of a checkpoint, and
    ledger snapshots, of which a thread is the archivist."""
    patch.setattr(worker, "INLINE_BYTES", INLINE_BYTES)
    patch.setattr(payload, "INLINE_BYTES", INLINE_BYTES)
    patch.setattr(checkpoints, "CaptureBuffers", lambda: CaptureBuffers(SHARD_BYTES))
    claim = gpu.local.claim_manager

    def claim_and_archive(place: Store, spec: Any, clock: Any, owner: str, reason: str) -> RolloutManager:
        manager = claim(place, spec, clock, owner, reason)
        archivist = Archivist(store, spec.run, spec.limits.num_siblings)

        async def archive(slot: int) -> Any:
            return await asyncio.to_thread(archivist.snapshot, slot)

        manager.archive = archive
        return manager

    patch.setattr(gpu.local, "claim_manager", claim_and_archive)


def play(url: str, death: Death | None, said: Path, environment: dict[str, str], seconds: float = 150.0) -> int:
    """One life of the run, as a process; its exit code."""
    process = FORKS.Process(target=live, args=(url, death, said, environment))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join(10)
        raise AssertionError(f"a process did not end in {seconds:.0f} s")
    return process.exitcode


@dataclass(frozen=True)
class Heard:
    """What was acknowledged: digests of objects that nobody deleted since, those whose deletion began (they may be
    there), committed steps; and where it died."""

    objects: dict[str, str]
    deleting: set[str]
    step: int
    died: list[str]


def heard(said: Path) -> Heard:
    objects: dict[str, str] = {}
    deleting: set[str] = set()
    step, died = 0, []
    for line in said.read_text().splitlines():
        what, key, digest = line.split(" ")
        if what == "create":
            objects[key] = digest
        elif what == "delete":
            objects.pop(key, None)
            deleting.add(key)
        elif what == "step":
            step = max(step, int(key))
        else:
            died += key.split(",")
    return Heard({key: digest for key, digest in objects.items() if "/probe-" not in key}, deleting, step, died)


__all__ = ["FINISHED", "PHASES", "RUN", "Death", "Heard", "heard", "play"]
