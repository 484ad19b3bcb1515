"""The same chain with the manager and a no-op worker as Ray actors, the driver in this process: batched calls."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, cast

import ray

from benchmarks.rollout_parts import NoopDriver, NoopWorker, make_limits, make_manager
from flows.settings import RAY
from gpu.actors import Hosted, Remote
from gpu.collector import collect_by_the_clock
from gpu.rollout.limits import Submission
from gpu.rollout.messages import Caller
from storage.local import LocalStore


class ManagerActor(Hosted):
    """The product's actor shell around the real manager, without a fleet."""

    async def make(self, *args: Any) -> int:
        folder, siblings, batch, submission = args
        self._collecting = asyncio.create_task(collect_by_the_clock())
        limits = make_limits(siblings, batch, submission)
        self.target = await asyncio.to_thread(make_manager, LocalStore(folder), limits)
        self.target.start()
        return self.target.incarnation


class WorkerActor(Hosted):
    """A process that makes a worker's calls and generates nothing."""

    async def make(self, *args: Any) -> None:
        manager, incarnation, tokens, at_once = args
        worker = NoopWorker("w", cast("Any", Remote("manager", manager)), incarnation, tokens)
        self._running = asyncio.ensure_future(worker.run(at_once))


async def _measure(folder: Path, siblings: int, batch: int, tokens: int, groups: int) -> dict[str, float]:
    def actor(kind: type[Hosted]) -> Any:
        return ray.remote(kind).options(num_cpus=0, max_concurrency=100).remote()

    manager, worker = actor(ManagerActor), actor(WorkerActor)
    incarnation = await manager.open.remote(folder, siblings, batch, Submission.SAMPLE)
    remote: Any = Remote("manager", manager)
    caller: Caller = (await remote.attach("bench", False, f"here:{os.getpid()}")).caller
    driver = NoopDriver(remote, caller)
    await driver.update()
    await worker.open.remote(manager, incarnation, tokens, batch * siblings)
    await driver.train(max(batch, groups // 10))
    started = time.perf_counter()
    trained = await driver.train(groups)
    seconds = time.perf_counter() - started
    for one in (worker, manager):
        ray.kill(one)
    return {"actor_groups_per_s": trained / seconds, "actor_groups": trained}


def measure_actors(folder: Path, siblings: int, batch: int, tokens: int, groups: int) -> dict[str, float]:
    """Groups trained per second through real actors on a Ray of this machine."""
    for variable in RAY:
        os.environ[variable.name] = variable.value
    os.environ.pop("RAY_ADDRESS", None)
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20,
             _node_ip_address="127.0.0.1")  # fmt: skip
    try:
        return asyncio.run(_measure(folder, siblings, batch, tokens, groups))
    finally:
        ray.shutdown()
