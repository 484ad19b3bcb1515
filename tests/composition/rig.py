"""A run on Ray with every real part, driven phase by phase by the test, so that a process can be killed exactly between
two phases; and what storage, engines, trainer and the operating system say about it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from flows.train import TASKS, evaluate_last, plain, save_last, training_step, update
from gpu.actors import Remote, find_actor
from gpu.cluster import RayCluster, processes_of
from gpu.spec import RunSpec
from storage import schema
from storage.history import read_all
from storage.journal import fold_segment
from storage.ledger import Ledger
from storage.local import LocalStore
from storage.schema import Record
from storage.segment import Row
from storage.verify import Report, verify
from tasks.run import Resumed, finish_run, open_session, restore_trainer
from tasks.session import begin, session
from tests.composition import gated
from tests.faults.house import RUN, small
from tests.processes import alive, stat_of

CUDA = torch.cuda.is_available()
GPU = [pytest.mark.gpu] if CUDA else []
NAMESPACE = "test-composition"
PHASES = plain(TASKS)
R = TypeVar("R", bound=Record)


def spec_of(folder: Path, tasks: int, free: int, name: str = gated.NAME, **changes: dict[str, object]) -> RunSpec:
    """A small run of real parts: one engine, one worker; on a GPU the engine and the trainer share it. Tasks from
    `free` on wait for the gate, if the environment `name` has one."""
    device: dict[str, object] = {"device": "cuda", "gpus": 0.3} if CUDA else {"device": "cpu"}
    values = {name: dict(change) for name, change in changes.items()}
    options: dict[str, object] = {"folder": str(folder), "tasks": tasks, "free": free}
    if name != gated.NAME:
        options = {"folder": str(folder / "words"), "tasks": tasks}
    values["environment"] = {"name": name, "options": options, "shuffle": False, "epochs": 1}
    values["rollout"] = {"siblings": 2, "batch": 2, "executing": 16, **values.get("rollout", {})}
    values["generation"] = {
        "engines": 1,
        "workers": 1,
        "cpus": 0.25,
        "max_length": 32,
        "concurrency": 16,
        **device,
        **values.get("generation", {}),
    }
    values["training"] = {"cpus": 0.25, **device, **values.get("training", {})}
    values["storage"] = {"url": str(folder / "store"), "flush_interval": 0.05}
    values["cluster"] = {"namespace": NAMESPACE, "restart_pause": 0.1, "lease_deadline": 60.0}
    return small(**values).spec(RUN)


class Rig:
    """One run. `pids` are all processes that it was ever seen to have."""

    def __init__(
        self, folder: Path, *, tasks: int = 8, free: int = 8, name: str = gated.NAME, **changes: dict[str, object]
    ) -> None:
        self.folder = folder
        self.spec = spec_of(folder, tasks, free, name, **changes)
        self.store = LocalStore(folder / "store")
        self.cluster = RayCluster(self.spec)
        self.pids: set[int] = set()

    # ------------------------------------------------------------------ driving

    async def drive(self) -> Resumed:
        """An attempt up to its first step: find or start the run, restore, bring the version to the engines."""
        begin()
        await open_session(self.spec, self.cluster, "flow-run")
        resumed = await restore_trainer.fn()
        if not resumed.ahead:
            await update(PHASES, resumed.step, save=False)
        await self.note()
        return resumed

    async def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            assert await training_step(PHASES, step)

    async def finish(self, first: int) -> Report:
        """Train from step `first` to the end of the source, close the run, and prove it from storage."""
        step = first
        while await training_step(PHASES, step):
            step += 1
        await save_last(PHASES, step - 1)
        await evaluate_last(PHASES, step - 1)
        await finish_run.fn("source exhausted")
        report = await self.verify()
        length = len(self.spec.source.environment_of())
        assert (report.handed_out, report.consumed, report.unsettled) == (length, length, 0)
        assert (report.lost, report.trained_twice, report.quarantined, report.discarded) == (0, 0, 0, 0)
        return report

    # ------------------------------------------------------------------ processes

    def name(self, kind: str) -> str:
        """The process of a kind that lives now, or the newest that has not been replaced yet. Raises `LookupError`."""
        found = [name for name in processes_of(self.spec) if name.split("-")[0] == kind]
        if not found:
            raise LookupError(f"no {kind} of the run")
        return found[0]

    def process(self, kind: str) -> Remote:
        return self.named(self.name(kind))

    def named(self, name: str) -> Remote:
        return Remote(name, find_actor(self.spec.namespace, self.spec.run, name))

    async def note(self) -> None:
        """Remember the pids of the processes that live now."""
        for name in processes_of(self.spec):
            self.pids.add(await self._pid(name))

    async def _pid(self, name: str) -> int:
        return await find_actor(self.spec.namespace, self.spec.run, name).pid.remote()

    async def kill(self, kind: str) -> None:
        """SIGKILL; returns when the process is gone."""
        pid = await self._pid(self.name(kind))
        self.pids.add(pid)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(pid), "the killed process is gone")

    async def close(self) -> None:
        """End the run's processes and see that none is left: no actor, no pid, no process by name."""
        await self.note()
        await self.cluster.close()
        await until(lambda: not processes_of(self.spec), "no actor is left")
        assert len(self.pids) >= 4, "manager, trainer, engine and worker were seen"
        await until(lambda: not any(map(alive, self.pids)), "no pid of the run is left")
        await until(lambda: not actor_processes(), "no actor's process is left below this one")

    # ------------------------------------------------------------------ what storage says

    def rows(self) -> list[Row]:
        return [row for segment in read_all(self.store, RUN) for row in segment.rows]

    def records(self, kind: type[R]) -> list[R]:
        return [row.record for row in self.rows() if isinstance(row.record, kind)]

    def ledger(self) -> Ledger:
        ledger = Ledger(self.spec.limits.num_siblings)
        for segment in read_all(self.store, RUN):
            fold_segment(ledger, segment)
        return ledger

    def versions(self) -> list[tuple[int, int]]:
        return [(record.incarnation, record.number) for record in self.records(schema.PolicyPublished)]

    def sealed(self) -> set[tuple[int, int, int]]:
        """Sealed attempts as (group, sibling, attempt)."""
        return {
            identity
            for record in self.records(schema.Sealed)
            for identity in zip(record.groups, record.siblings, record.attempts, strict=True)
        }

    async def verify(self) -> Report:
        report = await asyncio.to_thread(verify, self.store, RUN)
        assert report.sound, report.problems
        return report

    # ------------------------------------------------------------------ what the parts say

    async def weights(self) -> dict[str, str]:
        """The digest of the weights in the engine, in the trainer, and of the journal's newest version and commit."""
        ledger = self.ledger()
        assert ledger.policy is not None
        found = {
            "engine": await self.process("engine").checksum(),
            "trainer": (await session().trainer.status()).weights_digest,
            "version": ledger.policy.digest,
        }
        return found | ({"commit": ledger.weights_digest} if ledger.step else {})

    async def status(self) -> dict[str, Any]:
        return await session().manager.status()

    async def until_status(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        async def found() -> bool:
            return condition(await self.status())

        await until(found, what)
        return await self.status()


def durable(status: dict[str, Any]) -> bool:
    return status["journal"]["durable_seq"] == status["journal"]["last_seq"]


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition; one that does not come fails the test."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found is True or (found is not False and await found):
            return
        assert time.monotonic() < deadline, f"it did not come to this: {what}"
        await asyncio.sleep(0.02)


def actor_processes() -> list[int]:
    """Processes below this one that Ray has named after one of our actors."""
    found: list[int] = []
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = stat_of(int(entry.name))[:2]
            title = (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.name)] = int(parent)
        if state != "Z" and title.startswith(b"ray::") and b"Actor" in title:
            found.append(int(entry.name))
    return [pid for pid in found if _below(pid, os.getpid(), parents)]


def _below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid and pid != ancestor:
        pid = parents.get(pid, 0)
    return pid == ancestor
