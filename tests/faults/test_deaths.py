"""One process of a run dies at a chosen moment, the others live on: the manager at every segment of its journal, the
trainer at every call, the publishing process at every object, the archivist at every operation."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gpu.building import build_trainer
from gpu.local import LocalCluster
from gpu.training.host import TrainerHost
from storage import publisher_process, schema
from storage.archivist import Archivist
from storage.clock import SystemClock, VirtualClock
from storage.errors import ActorLost, UploadLost
from storage.filesystem import Bytes, Store
from storage.history import read_all
from storage.journal import JournalWriter, claim, fold, fold_segment, store_frozen
from storage.ledger import Ledger
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.publisher_process import PublisherProcess
from storage.runs import RunPaths, create_run, make_run
from storage.snapshot import ledger_rows
from storage.verify import verify
from tests.faults.house import House, small
from tests.storage.publishing import RUN, capture, check, state

EVERY = bool(int(os.environ.get("TIDEGATE_BOUNDARIES", "0")))
"""Set: every segment and call is tried, instead of some."""


def some(items: Iterable[Any], count: int) -> list[Any]:
    """All of them, or `count` spread over them."""
    listed = list(items)
    return listed if EVERY else listed[:: max(1, len(listed) // count)]


# ---------------------------------------------------------------------- the manager, at every segment


class Deadly(LocalStore):
    """The manager dies right before or right after segment `at` of the run is created."""

    house: House
    at, phase, segments = -1, "", 0

    def create(self, key: str, data: Bytes) -> None:
        number, here = self.segments, key.startswith(RunPaths("faults").journal)
        self.segments += here
        if not here or number != self.at:
            return super().create(key, data)
        if self.phase == "after":
            super().create(key, data)
        raise self._kill()

    def _kill(self) -> ActorLost:
        """From the thread that writes: it sees that the manager is dead before it goes on. A claimant is no process
        yet; it ends with this."""
        done = threading.Event()

        def kill() -> None:
            for name in self.house.cluster.kinds("manager"):
                self.house.cluster.kill(name)
            done.set()

        self.loop.call_soon_threadsafe(kill)
        assert done.wait(10)
        return ActorLost("the manager is dead", expected="a living process", action="retry")


@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize("at", some(range(24), 4))
async def test_the_manager_dies_at_any_segment_while_the_others_live(at: int, phase: str, tmp_path: Path) -> None:
    store = Deadly(tmp_path)
    store.at, store.phase, store.loop = at, phase, asyncio.get_running_loop()
    house = House(tmp_path, small(storage={"flush_interval": 0.002}), store=store)
    store.house = house
    await house.run()
    report = house.check()
    assert store.segments > at, "the death must have come"
    assert house.attempts == 2
    assert report.incarnations == (2 if (at, phase) != (0, "before") else 1)


# ---------------------------------------------------------------------- the trainer, at every call


class Mortal(TrainerHost):
    """Dies at the call of number `at` of `method`, before it does anything or when it has done all of it."""

    kill: Callable[[], object]
    method, at, phase = "", 0, ""
    calls: Counter[str]
    died: list[str]

    async def _watched(self, method: str, call: Callable[[], Awaitable[Any]]) -> Any:
        number = self.calls[method]
        self.calls[method] += 1
        here = (method, number) == (self.method, self.at)
        if here and self.phase == "before":
            await self._die(method)
        found = await call()
        if here:
            await self._die(method)
        return found

    async def _die(self, method: str) -> None:
        self.died.append(method)
        self.kill()
        await asyncio.sleep(10)  # the caller is told by then, and this call is cancelled
        raise AssertionError("it lives on")


CALLS = ["claim", "restore", "redo", "train", "publish", "weights", "capture", "upload"]
TWICE = CALLS[2:]
"""Called several times in one life."""


def _mortal(method: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: Mortal, *args: Any) -> Any:
        return await self._watched(method, lambda: getattr(TrainerHost, method)(self, *args))

    return call


for _name in CALLS:
    setattr(Mortal, _name, _mortal(_name))


@pytest.mark.parametrize("phase", ["before", "after"])
@pytest.mark.parametrize(("method", "at"), [(m, at) for m in CALLS for at in (0, 1)[: 1 + bool(EVERY and m in TWICE)]])
async def test_the_trainer_dies_at_any_of_its_calls_while_the_others_live(
    method: str, at: int, phase: str, tmp_path: Path
) -> None:
    """What belongs to a restart is called in a second life, after one of five steps."""
    house = House(tmp_path)
    here = (method, at, phase)
    deaths = [here] if method not in ("claim", "restore", "redo") else [("train", 5, "after"), here]
    died: list[str] = []

    def trainer(spec: Any, store: Store) -> TrainerHost:
        one = Mortal(store, spec.run, lambda: build_trainer(spec))
        one.calls, one.died = Counter(), died
        one.kill = lambda: house.kill("trainer", random.Random(0))
        one.method, one.at, one.phase = deaths[len(died)] if len(died) < len(deaths) else ("", 0, "")
        return one

    house.cluster = LocalCluster(house.spec, house.store, SystemClock(), engine=house.engine, trainer=trainer)
    await house.run()
    report = house.check()
    assert died == [name for name, _, _ in deaths]
    assert report.steps_diverged == 0
    assert len(deaths) == 1 or report.steps_redone > 0


# ---------------------------------------------------------------------- the publishing process, at every object


DYING = """
import os, signal, sys, threading
from storage import local, publisher_child
at, phase = int(os.environ["TIDEGATE_DIES_AT"]), os.environ["TIDEGATE_DIES"]
create, lock, seen = local.LocalStore.create, threading.Lock(), []
def dying(self, key, data):
    with lock:
        number = len(seen)
        seen.append(key)
    if number == at and phase == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if number == at and phase == "half":
        local.os.link = lambda one, other: os.kill(os.getpid(), signal.SIGKILL)
    create(self, key, data)
    if number == at:
        os.kill(os.getpid(), signal.SIGKILL)
local.LocalStore.create = dying
publisher_child.main()
"""


@pytest.mark.parametrize("phase", ["before", "half", "after"])
@pytest.mark.parametrize("at", [0, 2, 4] if EVERY else [4])
def test_the_publishing_process_dies_at_any_object_and_the_next_one_ends_the_checkpoint(
    at: int, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four shards and then the manifest."""
    captured, made = capture(1, state(sizes=(4000, 4000, 4000, 4000))), state(sizes=(4000, 4000, 4000, 4000))
    start = subprocess.Popen

    def dying(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        at_ = command.index("-m")
        return start([*command[:at_], "-c", DYING, *command[at_ + 2 :]], **more)

    process = PublisherProcess(str(tmp_path))
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TIDEGATE_DIES_AT", str(at))
            patch.setenv("TIDEGATE_DIES", phase)
            patch.setattr(publisher_process.subprocess, "Popen", dying)
            with pytest.raises(UploadLost):
                process.publish(RUN, 1, captured, None)
        store = LocalStore(tmp_path)
        manifest = RunPaths(RUN).manifest("000000001-000001.json")
        assert (store.size(manifest) is not None) == ((at, phase) == (4, "after"))
        for key in store.list(RunPaths(RUN).objects):
            assert key.rpartition("/")[2] == hashlib.sha256(store.read(key)).hexdigest(), "whole, or not there"
        written = process.publish(RUN, 1, captured, None)
        check(store, written, made)
    finally:
        process.close()


# ---------------------------------------------------------------------- the archivist, at every operation


class Killed(BaseException):
    """No `except Exception` may take it for an error: the process is gone."""


class Crashing(MemoryStore):
    """Its user dies right before, or right after, the operation of number `at`."""

    at, phase, operations = -1, "", 0

    def _pass(self, act: Callable[[], Any]) -> Any:
        number, self.operations = self.operations, self.operations + 1
        if number == self.at and self.phase == "before":
            raise Killed
        try:
            return act()
        finally:
            if number == self.at:
                raise Killed

    def create(self, key: str, data: Bytes) -> None:
        self._pass(lambda: super(Crashing, self).create(key, data))

    def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._pass(lambda: super(Crashing, self).read(key, start, end))

    def delete(self, keys: Iterable[str]) -> list[str]:
        """One request for each key, so that it dies between two."""
        for key in list(keys):
            self._pass(lambda key=key: super(Crashing, self).delete([key]))
        return []


def a_journal(store: Crashing) -> JournalWriter:
    create_run(store, make_run(run=RUN, created=0.0, num_siblings=1, staleness=None, fingerprints={}, settings={}))
    claimed = claim(store, RUN, 1, owner="t", writer="w", reason="test", clock=VirtualClock())
    return JournalWriter(RUN, claimed.incarnation, "w", claimed.tail, VirtualClock())


def append(store: Crashing, journal: JournalWriter, record: schema.Record) -> None:
    journal.append(record)
    frozen = journal.freeze()
    store_frozen(store, RUN, 1, frozen)
    journal.confirm(frozen)


def test_an_archivist_that_dies_at_any_operation_harms_nothing_and_the_next_one_goes_on() -> None:
    """It has eight snapshots to write, and older ones to delete."""
    operations = _archived(-1, "")
    assert operations > 30
    for at in some(range(operations), 25):
        for phase in ("before", "after"):
            _archived(at, phase)


def _archived(at: int, phase: str) -> int:
    """How many operations archivists needed."""
    store, operations, died = Crashing(), 0, 0
    journal = a_journal(store)
    archivist = Archivist(store, RUN, 1)
    for number in range(8):
        append(store, journal, schema.ConfigChanged({"n": f"{number} -> {number + 1}"}))
        store.at, store.phase, store.operations = at - operations, phase, 0
        while True:
            try:
                record = archivist.snapshot(journal.slot)
                break
            except Killed:
                died += 1
                archivist = Archivist(store, RUN, 1)
        operations, store.at = operations + store.operations, -1
        append(store, journal, record)
    report = verify(store, RUN)
    assert report.sound, (at, phase, report.problems)
    assert died == (at >= 0), (at, phase)
    ledger, tail = fold(store, RUN, 1)
    whole = Ledger(1)
    for segment in read_all(store, RUN):
        fold_segment(whole, segment)
    assert ledger_rows(ledger) == ledger_rows(whole)
    assert tail.slot == journal.slot
    return operations
