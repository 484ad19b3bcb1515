"""Parts of the benchmark of turns: conversations that grow, a real worker that only reports, and a run with a tool that
takes its time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flows.config import RunConfig
from flows.train import TASKS, Phases, plain, update
from gpu.environments.agent import AgentState, Turned
from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.resources import Reply, ResourceHost, request_digest, success
from gpu.environments.reverse import ReverseLetters
from gpu.environments.sessions import Session, SessionHost
from gpu.environments.tools import Exported
from gpu.generation.engine import Cached
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from gpu.generation.worker import RolloutWorker
from gpu.local import LocalCluster
from gpu.models.tokenizer import CharTokenizer, Message
from gpu.rollout.manager import RolloutManager
from gpu.rollout.messages import Dispatch, Intent
from gpu.spec import RunSpec
from storage.clock import SystemClock
from storage.filesystem import Store
from storage.ledger import Export
from storage.local import LocalStore
from storage.payload import TurnRow, VersionSpan
from tasks.run import open_session, restore_trainer
from tasks.session import begin

SIBLINGS = 8
NO_ENGINES: Any = None
EXPORT = b"x" * 64


class Talk:
    """One rollout's conversation. `speak` gives its next turn and the state after it."""

    ANSWER = 64

    def __init__(self, dispatch: Dispatch, tokens: int) -> None:
        self.dispatch, self._tokens = dispatch, tokens
        self.rows: list[TurnRow] = []
        self._dice = np.random.default_rng([dispatch.identity.group, dispatch.identity.sibling])
        self.boundary = 0

    def speak(self) -> Talk:
        one, given = self.dispatch.identity, self.ANSWER
        made = self._tokens - given
        tokens = self._dice.integers(0, 50_000, self._tokens, dtype=np.int32)
        logprobs = np.concatenate([np.zeros(given, np.float32), -self._dice.random(made, np.float32)])
        mask = np.repeat(np.array([0, 1], np.int8), [given, made])
        number = len(self.rows)
        spans = (VersionSpan(1, 0, made),)
        self.rows.append(
            TurnRow(
                one.group, one.sibling, one.attempt, number, 0, number * self._tokens, tokens, logprobs, mask, spans,
                False, 0.0, "",
            )
        )  # fmt: skip
        return self

    @property
    def state(self) -> bytes:
        """As the agent writes it: the environment's answer, and 64 bytes of its own."""
        answer = self.rows[-1].tokens[: self.ANSWER].tolist()
        return msgspec.msgpack.encode(AgentState.of(answer, EXPORT, new_context=False))


class Reporting:
    """The product's worker, whose attempts are run by the benchmark."""

    def __init__(self, manager: RolloutManager, store: Store) -> None:
        self._manager = manager
        self._worker = RolloutWorker(
            "w", manager.incarnation, manager, lambda name: NO_ENGINES, ReverseLetters(), CharTokenizer(), store,
            "bench", seed=0, temperature=1.0, position=lambda ordinal: 0, concurrency=1, suites=lambda one: NO_ENGINES,
        )  # fmt: skip
        self.task = asyncio.create_task(self._worker._report_loop())

    async def take(self, count: int) -> list[Dispatch]:
        return (await self._manager.take(self._manager.incarnation, "w", count, 5.0)).dispatches

    def report(self, talks: Sequence[Talk], *, acting: bool) -> None:
        worker = self._worker
        for talk in talks:
            row = talk.rows[-1]
            if not acting:
                worker.turn(talk.dispatch, talk.boundary, Turned(row, row), talk.state, {}, [])
                talk.boundary += 1
                continue
            revision, digest = len(talk.rows), request_digest("add", b"{}")
            worker.answered(talk.dispatch, talk.boundary, row)
            worker._push(None, Intent(talk.dispatch.identity, talk.boundary, 0, "notes", revision - 1, digest))
            worker.result(talk.dispatch, talk.boundary, 0, "notes", digest, Reply(success(1), revision))
            exported = [Exported("notes", Export(revision, EXPORT))]
            worker.turn(talk.dispatch, talk.boundary + 1, Turned(row, None), talk.state, {"notes": revision}, exported)
            talk.boundary += 2

    async def durable(self, turns: int) -> None:
        """Until so many turns are."""
        control = self._manager.control
        while control.ledger.counts["turn_committed"] < turns:
            assert not control.ledger.counts["attempt_abandoned"], "every turn counts"
            await asyncio.sleep(0.001)
        await self._manager.settled(self._manager.incarnation, control.books.journal.last_seq)


def rewritten(talks: Sequence[Talk]) -> tuple[int, float]:
    """Bytes and seconds of all conversations as JSON: what a checkpoint that rewrites them would write."""
    started = time.perf_counter()
    size = 0
    for talk in talks:
        turns = [{name: getattr(row, name).tolist() for name in ("tokens", "logprobs", "mask")} for row in talk.rows]
        size += len(json.dumps({"rollout": str(talk.dispatch.identity), "turns": turns}))
    return size, time.perf_counter() - started


# ---------------------------------------------------------------------- a slow tool


class Sleeper(Session):
    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        return asyncio.sleep(arguments["seconds"], "awake")


class SlowTool(Environment):
    """Single-token turns; in every eighth rollout the first answer makes a tool call of `seconds`."""

    max_new_tokens, max_turns = 1, 4
    began: float = 0.0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._hosts = {"sleeper": SessionHost(lambda task, seed: Sleeper(), mode=CheckpointMode.RESTART_ONLY)}

    def __len__(self) -> int:
        return 512

    def task(self, index: int) -> bytes:
        return json.dumps({"slow": index % 8 == 0}).encode()

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return self._hosts

    def episode(self) -> Episode:
        return _Slow(self._seconds)


class _Slow(Episode):
    checkpoint_mode = CheckpointMode.STATELESS

    def __init__(self, seconds: float) -> None:
        self._seconds, self._slow = seconds, False

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        self._slow = json.loads(task)["slow"]
        self._turns = 0
        return [Message("user", "?")]

    async def step(self, action: Action) -> StepResult:
        if self._slow:
            SlowTool.began = SlowTool.began or time.perf_counter()
            await self.tools.call("sleeper", "sleep", {"seconds": self._seconds})
        self._turns += 1
        return StepResult(self._turns == 3, 1.0, [Message("user", ".")])


async def measure_waits(folder: Path, steps: int, tool_s: float) -> tuple[list[float], float]:
    """Seconds from each hold to its release, with a checkpoint captured under it, and how long the first tool call had
    been going on at the end."""
    config = RunConfig.model_validate({
        "run": "waits",
        "environment": {"name": "benchmarks.turns_parts:SlowTool", "options": {"seconds": tool_s}, "shuffle": False},
        "rollout": {"siblings": 2, "batch": 2, "staleness": None, "executing": 256, "completed": 128, "retained": 128},
        "generation": {"slots": 256, "max_length": 32, "workers": 2, "concurrency": 256},
        "training": {"steps": steps}, "checkpoint": {"every": 1, "max_unsaved": steps + 1},
    })  # fmt: skip
    spec = config.spec("waits")
    cluster = LocalCluster(spec, LocalStore(folder), SystemClock(), engine=_engine)
    waits: list[float] = []
    begin()
    try:
        await open_session(spec, cluster, "bench")
        await restore_trainer.fn()
        phases = _timed(plain(TASKS), waits)
        await update(phases, 0, save=False)
        waits.clear()
        for step in range(1, steps + 1):
            assert await phases.lease_batch(step)
            await phases.train_batch(step)
            await update(phases, step, save=True)
        going_on = time.perf_counter() - SlowTool.began
        assert SlowTool.began
        assert going_on < tool_s, "the tool call goes on"
        return waits, tool_s
    finally:
        await cluster.close()


def _engine(spec: RunSpec) -> EngineServer:
    return EngineServer(FakeEngine(slots=spec.engine.slots, tokens=3, vocabulary=40), Cached.KEEP)


def _timed(phases: Phases, waits: list[float]) -> Phases:
    """Notes how long each hold was up."""
    hold, release, began = phases.hold_admission, phases.release_admission, [0.0]

    async def held(step: int) -> Any:
        began[0] = time.perf_counter()
        return await hold(step)

    async def released(step: int) -> Any:
        done = await release(step)
        if began[0]:
            waits.append(time.perf_counter() - began[0])
            began[0] = 0.0
        return done

    return replace(phases, hold_admission=held, release_admission=released)
