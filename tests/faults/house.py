"""A run in one process with real parts (control, journal, fleet, engine server, workers, trainer) and a driver that is
retried like a flow run, for killing any of them at a seeded moment."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flows.config import RunConfig
from flows.train import TASKS, evaluate_last, plain, save_last, training_step, update
from gpu.generation.engine import Cached
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from gpu.local import LocalCluster
from gpu.rollout.manager import RolloutManager
from gpu.spec import RunSpec
from storage.clock import SystemClock
from storage.errors import ActorLost, RunFenced
from storage.filesystem import Store
from storage.local import LocalStore
from storage.verify import Report, verify
from tasks.run import Cluster, Resumed, finish_run, open_session, restore_trainer
from tasks.session import begin, session

PHASES = plain(TASKS)
RUN = "faults"


def small(**changes: dict[str, object]) -> RunConfig:
    """A finite run of 24 groups in 12 steps on the tiny model."""
    values: dict[str, dict[str, object]] = {
        "environment": {"name": "reverse", "options": {"letters": 2}, "epochs": 1},
        "rollout": {
            "siblings": 2, "batch": 2, "staleness": 1, "executing": 8, "completed": 10, "retained": 10, "backoff": 2,
            "backoff_base": 0.01, "backoff_max": 0.05, "attempts": 50, "losses": 50,
        },
        "generation": {"slots": 8, "workers": 2, "engines": 2, "max_length": 16, "concurrency": 8},
        "training": {"steps": 1000},
        "checkpoint": {"every": 3, "max_unsaved": 50},
        "cluster": {"restart_pause": 0.01, "lease_deadline": 60.0},
        "storage": {"flush_interval": 0.02, "snapshot_every": 5},
    }  # fmt: skip
    for name, change in changes.items():
        values[name] = {**values.get(name, {}), **change}
    return RunConfig.model_validate({"run": RUN, "seed": 3, **values})


def fake_engine(spec: RunSpec) -> EngineServer:
    return EngineServer(FakeEngine(slots=spec.engine.slots, tokens=3, vocabulary=40), Cached.KEEP)


@dataclass
class House:
    """`pace` slows each phase down a little, so that kills find the parts busy."""

    folder: Path
    config: RunConfig = field(default_factory=small)
    engine: Callable[[RunSpec], EngineServer] = fake_engine
    store: Store | None = None
    name: str = RUN
    attempts: int = 0
    resumed: list[Resumed] = field(default_factory=list)
    steps_seen: list[int] = field(default_factory=list)
    before_commit: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.store = self.store or LocalStore(self.folder)
        self.spec = self.config.spec(self.name)
        self.cluster = LocalCluster(self.spec, self.store, SystemClock(), engine=self.engine)
        self.driver: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ a flow run and its retries

    async def run(
        self, chaos: Callable[[House], object] | None = None, retries: int = 40, timeout: float = 60.0
    ) -> None:
        """Drive to the end, retrying each failed attempt as the Retry button does."""
        async with asyncio.timeout(timeout):
            trouble = asyncio.ensure_future(chaos(self)) if chaos else None  # type: ignore[arg-type]
            try:
                for _ in range(retries):
                    self.attempts += 1
                    self.driver = asyncio.create_task(self._attempt())
                    await asyncio.wait([self.driver])
                    if self.driver.cancelled():
                        continue
                    error = self.driver.exception()
                    if error is None:
                        return
                    if not isinstance(error, ActorLost | RunFenced):
                        raise error
                raise AssertionError(f"not finished after {retries} attempts")
            finally:
                if trouble is not None:
                    trouble.cancel()
                    await asyncio.gather(trouble, return_exceptions=True)
                await self.cluster.close()

    async def _attempt(self) -> None:
        await attempt(self.spec, self.cluster, self.resumed.append, self.steps_seen.append)

    # ------------------------------------------------------------------ death

    def kill(self, kind: str, dice: random.Random) -> bool:
        """SIGKILL one living process of a kind; False when there is none."""
        if kind == "driver":
            return bool(self.driver and not self.driver.done() and self.driver.cancel())
        names = self.cluster.kinds(kind)
        if not names:
            return False
        self.cluster.kill(dice.choice(names))
        return True

    def manager(self) -> RolloutManager:
        return self.cluster.processes["manager"].target

    def verify(self) -> Report:
        return verify(self.store, self.name)

    def check(self) -> Report:
        """The promise: the trained multiset is the source's order, each once, proven from storage."""
        report = self.verify()
        assert report.sound, report.problems
        assert report.finished == "source exhausted"
        assert (report.handed_out, report.consumed) == (
            self.length,
            self.length - report.quarantined - report.discarded,
        )
        assert (report.unsettled, report.lost, report.trained_twice) == (0, 0, 0)
        return report

    @property
    def length(self) -> int:
        found = self.spec.source.stream(self.spec.source.environment_of()).length
        assert found is not None
        return found


async def attempt(
    spec: RunSpec, cluster: Cluster, resume: Callable[[Resumed], None], stepped: Callable[[int], None]
) -> None:
    """What one flow run attempt does, without Prefect."""
    begin()
    opened = await open_session(spec, cluster, "flow-run")
    if not opened.finished:
        await drive(spec, resume, stepped)


async def drive(spec: RunSpec, resume: Callable[[Resumed], None], stepped: Callable[[int], None]) -> None:
    """Restore, then step until the source is exhausted, as the session's driver."""
    resumed = await restore_trainer.fn()
    resume(resumed)
    step = resumed.step
    if not resumed.ahead:
        await update(PHASES, step, save=False)
    while step < spec.steps.num_steps:
        step += 1
        if not await training_step(PHASES, step):
            step -= 1
            break
        stepped(step)
    await save_last(PHASES, step)
    await evaluate_last(PHASES, step)
    await finish_run.fn("source exhausted")


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a moment; a test that waits in vain fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("the moment did not come")
        await asyncio.sleep(0.001)


__all__ = ["House", "attempt", "fake_engine", "session", "small", "until"]
