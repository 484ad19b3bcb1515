"""Whoever does not drive a run any more finds that out, changes nothing, and ends so that everybody can see it.

With a Prefect server, workers, a Ray cluster, real processes and real signals.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import AwaitingRetry, Cancelling, Completed, Crashed, Paused, Pending, Running

from flows.config import RunConfig
from flows.fenced import Attempt
from flows.stack import POOL, Stack, running_stack, tool
from gpu.spec import RunSpec
from storage import schema
from storage.history import read_all
from storage.local import LocalStore
from storage.verify import verify
from tests.faults.house import small

HOME = Path(__file__).parents[2]
STEPS = 16
PATIENCE_S = 180.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers: the one that tracks a stopped process does not start its flow run again, the other one does."""
    root = tmp_path_factory.mktemp("fencing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HOME))  # the environment of these runs is one of the tests
        yield from _running(root)


def _running(root: Path) -> Iterator[Stack]:
    with running_stack(root, HOME, lambda line: None, cpus=4, object_store=128 << 20) as one:
        one.start("other", [tool("prefect"), "worker", "start", "--pool", POOL, "--name", "other", "--limit", "4"])
        one.start("observer", [sys.executable, "-m", "tests.flows.observer"])
        yield one


def seen(stack: Stack) -> list[dict[str, Any]]:
    """What the observer saw last: every named process of the cluster."""
    stack.check()
    with open(stack.root / "logs" / "observer.log", "rb") as log:
        log.seek(-min(65536, log.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = [line for line in log.read().split(b"\n")[:-1] if line.startswith(b"[{") or line == b"[]"]
    return json.loads(lines[-1]) if lines else []


@dataclass
class Scene:
    """One run and the flow runs that want it, seen from outside."""

    stack: Stack
    client: PrefectClient
    config: RunConfig

    @property
    def spec(self) -> RunSpec:
        assert self.config.run
        return self.config.spec(self.config.run)

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.config.storage.url)

    def with_(self, **changes: dict[str, object]) -> Scene:
        """The same run with other settings."""
        values = self.config.model_dump(mode="json")
        for section, change in changes.items():
            values[section].update(change)
        return Scene(self.stack, self.client, RunConfig.model_validate(values))

    async def start(self) -> UUID:
        """A flow run of the deployment, as the form starts it, where Prefect retries whatever fails."""
        deployment = await self.client.read_deployment_by_name("train/train")
        created = await self.client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"config": self.config.model_dump(mode="json")},
            job_variables={"env": {"PREFECT_FLOWS_DEFAULT_RETRIES": "2", "PREFECT_TASKS_DEFAULT_RETRIES": "2"}},
        )
        return created.id

    async def retry(self, flow_run: UUID) -> None:
        """What the Retry button sends."""
        state: State[Any] = State(type=StateType.SCHEDULED, name="AwaitingRetry", message="Retry from the UI")
        await self.client.set_flow_run_state(flow_run, state, force=True)

    async def ended(self, flow_run: UUID) -> FlowRun:
        async def final() -> FlowRun | None:
            found = await self.client.read_flow_run(flow_run)
            return found if found.state and found.state.is_final() else None

        return await until(final, PATIENCE_S)

    async def logs(self, flow_run: UUID) -> list[str]:
        chosen, found = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run])), []
        while page := await self.client.read_logs(chosen, limit=200, offset=len(found)):
            found += page
        return [log.message for log in found]

    async def said(self, flow_run: UUID, *parts: str) -> str:
        """The line of a flow run's log that has all parts, when it is there."""

        async def found() -> str | None:
            return next((line for line in await self.logs(flow_run) if all(part in line for part in parts)), None)

        return await until(found, PATIENCE_S)

    async def check_fenced(self, ended: FlowRun, *, runs: int) -> None:
        """It failed in a way that a person sees and nothing retries."""
        assert (ended.state_type, ended.state_name, ended.run_count) == (StateType.FAILED, "RunFenced", runs)
        await self.said(ended.id, "RunFenced", "decision=end")

    def processes(self) -> list[dict[str, Any]]:
        place = (self.config.cluster.namespace, self.config.run)
        return [one for one in seen(self.stack) if (one["namespace"], one["run"]) == place]

    async def driven(self, owner: UUID | None, token: int, beyond: int = 1) -> int:
        """Wait until that driver (None: any) is in the middle of a later step; its process id."""

        def now() -> int | None:
            found = next((one for one in self.processes() if "driver" in one), None)
            if not found or found["driver_token"] != token or str(owner or found["driver"]) != found["driver"]:
                return None
            inside = found["open_lease"] is not None and found["step"] >= beyond
            return int(found["driver_place"].rpartition(":")[2]) if inside else None

        return await until(now, PATIENCE_S)

    def trained(self) -> list[int]:
        """The steps that were committed, in the journal's order; the run is proven sound."""
        report = verify(self.store, self.spec.run)
        assert report.sound, report.problems
        assert (report.lost, report.trained_twice, report.unsettled) == (0, 0, 0)
        rows = [row for segment in read_all(self.store, self.spec.run) for row in segment.rows]
        return [row.record.step for row in rows if isinstance(row.record, schema.StepCommitted)]

    def tidegate(self, *arguments: str) -> subprocess.Popen[str]:
        assert self.config.run
        command = [tool("tidegate"), "resume", self.config.run, "--storage", self.config.storage.url, *arguments]
        return subprocess.Popen(command, env=self.stack.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def until(found: Callable[[], Any], seconds: float) -> Any:
    """What `found` gives as soon as it gives something."""
    deadline = time.monotonic() + seconds
    while True:
        value = found()
        value = await value if inspect.isawaitable(value) else value
        if value:
            return value
        assert time.monotonic() < deadline, "the moment did not come"
        await asyncio.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
async def scene(stack: Stack, tmp_path: Path) -> AsyncIterator[Scene]:
    name = tmp_path.name.replace("_", "-")
    config = small(
        storage={"url": str(tmp_path)}, cluster={"namespace": name, "alive_deadline": 15.0},
        generation={"engines": 1, "workers": 1, "cpus": 0.25}, training={"steps": STEPS, "cpus": 0.25},
        environment={
            "name": "tests.flows.unhurried:Unhurried", "options": {"letters": 3, "pause": 0.8}, "epochs": None,
        },
    ).model_copy(update={"run": name})  # fmt: skip
    async with PrefectClient(stack.api) as client:
        yield Scene(stack, client, config)


async def test_a_driver_that_slept_through_its_own_retry_leaves_without_a_trace(scene: Scene) -> None:
    flow_run = await scene.start()
    old = await scene.driven(flow_run, 1)
    os.kill(old, signal.SIGSTOP)
    await scene.retry(flow_run)
    new = await scene.driven(flow_run, 2, beyond=3)
    assert new != old
    os.kill(old, signal.SIGCONT)
    await scene.said(flow_run, "RunFenced", "decision=leave_to_newer_attempt")
    await until(lambda: gone(old), PATIENCE_S)
    ended = await scene.ended(flow_run)

    assert (ended.state_name, ended.run_count) == ("Completed", 2)
    states = [state.name for state in await scene.client.read_flow_run_states(flow_run)]
    after = [name for name in states[states.index("AwaitingRetry") :] if name not in ("Pending", "Submitting")]
    assert after == ["AwaitingRetry", "Running", "Completed"], "the newer attempt's own, undisturbed"
    said = await scene.logs(flow_run)
    assert not any("release_holds" in line for line in said), "no hook of the older process may end the newer's holds"
    assert sum("decision=leave_to_newer_attempt" in line for line in said) == 1
    assert scene.trained() == list(range(1, STEPS + 1))
    await until(lambda: not scene.processes(), PATIENCE_S)


async def test_a_run_changes_hands_only_on_purpose_and_whoever_lost_it_stays_out(scene: Scene) -> None:
    """Another flow run is refused; with --take-over it drives, and the displaced one ends for good, whatever retries
    are set. Then a flow run from another cluster claims the next incarnation: the older one ends with its processes."""
    endless = scene.with_(training={"steps": 100000}, flow={"steps_per_task": 100})
    first = await endless.start()
    await endless.driven(first, 1)

    refused = endless.tidegate()
    said = await asyncio.to_thread(refused.communicate)
    assert refused.returncode == 2, said
    assert "RunBusy" in said[1]
    assert "--take-over" in said[1]
    assert (await endless.client.read_flow_run(first)).state_name == "Running"

    second = endless.tidegate("--take-over")
    ended = await endless.ended(first)
    await endless.check_fenced(ended, runs=1)
    await endless.driven(None, 2)

    # The first one's Retry is pressed, and meanwhile somebody starts the run on another cluster.
    elsewhere = endless.with_(cluster={"namespace": f"{scene.spec.run}-2"}, training={"steps": 12})
    await endless.retry(first)
    third = await elsewhere.start()
    said = await asyncio.to_thread(second.communicate)
    assert second.returncode == 1, said
    assert "RunFenced" in said[1]
    assert "incarnation 2" in said[1]
    await until(lambda: not endless.processes(), PATIENCE_S)
    await endless.check_fenced(await endless.ended(first), runs=2)
    assert (await elsewhere.ended(third)).state_name == "Completed"

    steps = scene.trained()
    assert steps == list(range(1, len(steps) + 1))
    await until(lambda: not elsewhere.processes(), PATIENCE_S)


@pytest.mark.parametrize(
    ("state", "mine"),
    [
        (Running(), False), (Pending(), False), (AwaitingRetry(), False), (Completed(), False), (Crashed(), False),
        (Cancelling(), True), (Paused(), True),
    ],
)  # fmt: skip
def test_a_state_that_an_attempt_did_not_enter_is_somebody_elses_unless_it_came_over_it(
    state: State[Any], mine: bool
) -> None:
    entered = Running()
    attempt = Attempt(uuid4(), 1, entered.id)
    assert attempt.has(FlowRun(id=attempt.flow_run, flow_id=uuid4(), state=entered))
    assert attempt.has(FlowRun(id=attempt.flow_run, flow_id=uuid4(), state=state)) is mine
