"""Attempts whose time is over, as processes with real signals: they end as documented, storage holds what they say, and
the run goes on from there.

With a Prefect server. `tidegate` has a Ray cluster of its own, which dies with it, as a preempted machine does.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort

from flows.config import RunConfig
from flows.seaweed import S3Server
from flows.stack import Stack, running_stack, tool
from storage import schema
from storage.filesystem import Store
from storage.inspection import summary
from storage.journal import read_journal
from storage.opening import open_store
from storage.verify import verify
from tests.faults.house import small
from tests.faults.proxy import Fault, Proxy, proxied
from tests.flows.test_fencing import until

HOME = Path(__file__).parents[2]
PATIENCE_S = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HOME))
        root = tmp_path_factory.mktemp("ending")
        with running_stack(root, HOME, lambda line: None, cpus=4, object_store=128 << 20) as one:
            yield one


@dataclass
class Run:
    """One run, driven by `tidegate`, and looked at through its storage. `store` is past any proxy."""

    stack: Stack
    folder: Path
    config: RunConfig
    store: Store

    @property
    def name(self) -> str:
        assert self.config.run
        return self.config.run

    def start(self, *changes: str) -> subprocess.Popen[str]:
        """`tidegate train`, or `resume` once the run exists."""
        path = self.folder / "run.json"
        path.write_text(self.config.model_dump_json())
        first = not self.store.list(f"runs/{self.name}")
        command = ["train", "--config", str(path)] if first else [
            "resume", self.name, "--storage", self.config.storage.url,
        ]  # fmt: skip
        env = {name: value for name, value in {**os.environ, **self.stack.env}.items() if name != "RAY_ADDRESS"}
        settings = [part for change in changes for part in ("--set", change)]
        return subprocess.Popen(
            [tool("tidegate"), *command, *settings],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def committed(self) -> int:
        found: list[Any] = [record.step for record in self.records(schema.StepCommitted)]
        return max(found, default=0)

    def records(self, kind: type[Any]) -> list[Any]:
        if not self.store.list(f"runs/{self.name}"):
            return []
        rows = [row for segment in read_journal(self.store, self.name) for row in segment.rows]
        return [row.record for row in rows if isinstance(row.record, kind)]

    def wait_for(self, step: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.committed() < step:
            assert process.poll() is None, process.communicate()[0][-3000:]
            assert time.monotonic() < deadline, "the step did not come"
            time.sleep(0.1)

    def newest(self) -> int:
        return max(summary(self.store, self.name)["checkpoints"], default=0)


def made(stack: Stack, folder: Path, url: str, store: Store, **checkpoint: object) -> Run:
    config = small(
        storage={"url": url}, generation={"engines": 1, "workers": 1, "cpus": 0.25},
        training={"steps": 100000, "cpus": 0.25},
        checkpoint={"every": 100, "max_unsaved": 1000, "reserve": 3.0, **checkpoint},
        environment={
            "name": "tests.flows.unhurried:Unhurried", "options": {"letters": 3, "pause": 0.2}, "epochs": None,
        },
    ).model_copy(update={"run": folder.name.replace("_", "-")})  # fmt: skip
    return Run(stack, folder, config, store)


@pytest.fixture
def run(stack: Stack, tmp_path: Path) -> Run:
    url = str(tmp_path / "store")
    return made(stack, tmp_path, url, open_store(url))


def ends_as_told(run: Run, process: subprocess.Popen[str], seconds: float) -> str:
    """The process ends in time with the documented code, and its message is what storage says. Returns the message."""
    said, _ = process.communicate(timeout=seconds)
    assert process.returncode == 75, said[-3000:]
    found = next(line for line in said.splitlines() if line.startswith("  found:"))
    if "the run was not opened yet" in found:
        return found
    committed, newest = run.committed(), run.newest()
    if f"the state after step {committed} is published" in found:
        assert newest == committed
    else:
        assert f"the state after step {committed} was NOT published" in found
        assert newest < committed
        assert f"a resume redoes step{'s' * (newest + 1 < committed)} {newest + 1}" in found
    return found


def began(process: subprocess.Popen[str]) -> bool:
    """Whether the attempt had begun when the signal came: before, the process just ends."""
    return process.wait(60.0) not in (-signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.parametrize("seed", [1])
def test_a_run_that_gets_sigterm_at_any_moment_is_published_and_goes_on(run: Run, seed: int) -> None:
    dice = random.Random(seed)
    for moment in range(4):
        claims = len(run.records(schema.RunClaimed))
        redone, before = len(run.records(schema.StepRedone)), run.committed()
        process = run.start()
        if moment != 2:
            run.wait_for(before + dice.randint(1, 5), process)
            time.sleep(dice.uniform(0.0, 1.0))
        else:  # while it starts
            time.sleep(dice.uniform(6.0, 14.0))
        process.send_signal(signal.SIGTERM)
        if moment == 2 and not began(process):
            assert len(run.records(schema.RunClaimed)) == claims, "it had not begun"
            continue
        found = ends_as_told(run, process, 33.0)
        assert "SIGTERM" in found
        if moment != 2:
            assert "is published" in found
        assert len(run.records(schema.StepRedone)) == redone, "every attempt found a checkpoint of the last step"
    last = run.committed() + 3
    process = run.start(f"training.steps={last}")
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said[-3000:]
    report = verify(run.store, run.name)
    assert report.sound, report.problems
    assert (report.steps, report.lost, report.trained_twice, report.unsettled) == (last, 0, 0, 0)


async def test_an_attempt_ends_before_its_limit(run: Run) -> None:
    process = run.start("checkpoint.deadline=60")
    found = await asyncio.to_thread(ends_as_told, run, process, PATIENCE_S)
    assert "the attempt's limit of 60 s" in found
    assert "is published" in found
    assert run.committed() > 0
    async with PrefectClient(run.stack.api) as client:
        newest = (await client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1))[0]
    assert (newest.state_type, newest.state_name) == (StateType.CRASHED, "DeadlineReached")
    assert newest.start_time is not None
    assert newest.end_time is not None
    assert (newest.end_time - newest.start_time).total_seconds() < 60.0


def test_a_notice_file_ends_the_attempt_within_the_seconds_it_holds(run: Run, tmp_path: Path) -> None:
    notice = tmp_path / "preempted"
    process = run.start(f"checkpoint.notice={json.dumps(str(notice))}")
    run.wait_for(2, process)
    notice.write_text("24")
    found = ends_as_told(run, process, 24.0)
    assert "the notice in" in found
    assert "is published" in found


# ---------------------------------------------------------------------- a store that does not answer


@pytest.fixture
def hung(stack: Stack, seaweed: S3Server, tmp_path: Path) -> Iterator[tuple[Run, Proxy]]:
    """A run behind a proxy that never answers a shard."""
    with proxied(seaweed.endpoint) as proxy:
        place = f"ending/{tmp_path.name}"
        proxy.add(Fault.TIMEOUT, "PUT", "/objects/", times=1 << 30, hold_s=300.0)
        url = seaweed.url(place, endpoint=proxy.endpoint)
        yield made(stack, tmp_path, url, open_store(seaweed.url(place)), grace=24.0), proxy


def test_a_publication_that_does_not_fit_is_said_to_be_missing_before_the_deadline(hung: tuple[Run, Proxy]) -> None:
    run, proxy = hung
    process = run.start()
    run.wait_for(3, process)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    found = ends_as_told(run, process, 30.0)
    assert time.monotonic() - sent < 24.0
    assert "NOT published: its publication had not ended" in found
    assert proxy.hits[Fault.TIMEOUT] > 0
    committed = run.committed()
    proxy.clear()
    process = run.start(f"training.steps={committed + 2}")
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said[-3000:]
    report = verify(run.store, run.name)
    assert report.sound, report.problems
    assert (report.steps, report.steps_redone, report.steps_diverged) == (committed + 2, committed, 0)


def test_a_second_sigterm_ends_it_at_once(hung: tuple[Run, Proxy]) -> None:
    run, _ = hung
    process = run.start("checkpoint.grace=120")
    run.wait_for(3, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(2.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    said, _ = process.communicate(timeout=30.0)
    assert process.returncode == 128 + signal.SIGTERM, said[-3000:]
    assert time.monotonic() - sent < 15.0
    assert run.newest() == 0


# ---------------------------------------------------------------------- a person cancels


async def test_a_cancelled_flow_run_is_published_and_says_so(stack: Stack, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    run = made(stack, tmp_path, str(tmp_path), store)
    async with PrefectClient(stack.api) as client:
        deployment = await client.read_deployment_by_name("train/train")
        parameters = {"config": run.config.model_dump(mode="json")}
        created = await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        await until(lambda: run.committed() >= 2, PATIENCE_S)
        cancelling: State[Any] = State(type=StateType.CANCELLING)
        await client.set_flow_run_state(created.id, cancelling)

        async def final() -> FlowRun | None:
            found = await client.read_flow_run(created.id)
            return found if found.state and found.state.is_final() else None

        ended = await until(final, PATIENCE_S)
        assert ended.state_type is StateType.CANCELLED
    assert run.newest() == run.committed()
