"""An episode's tools on a host behind HTTP: killed anywhere around a change, its effect is there once."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from gpu.environments.agent import Agent
from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.participants.client import HttpHost
from gpu.environments.participants.errors import OutcomeUnknown
from gpu.environments.participants.protocol import Operation
from gpu.environments.participants.transport import Transport
from gpu.environments.resources import Claim, Reply, ResourceHost, Standing, opened
from gpu.environments.tools import NotContinuable, Sessions, Tools
from gpu.models.tokenizer import Message
from storage.errors import ResourceInvalid
from storage.ledger import Boundary, Export, Requested
from tests.gpu.agents import TOKENIZER, Sink, dispatch, scripted
from tests.gpu.participants.hosts import (
    ONE,
    SESSION,
    HostProcess,
    Proxy,
    Running,
    effects,
    host,
    owed,
    proxied,
    request,
)


class Journal:
    """The records of one step, as the next attempt finds them."""

    def __init__(self) -> None:
        self.requests: dict[int, Requested] = {}

    def answered(self) -> int:
        return 0

    async def intent(self, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        self.requests[cursor] = Requested(resource, digest, revision, revision, None)

    def result(self, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        before = self.requests[cursor].before if cursor in self.requests else reply.revision
        self.requests[cursor] = Requested(resource, digest, before, reply.revision, reply.content)

    def boundary(self, exports: dict[str, Export] | None = None, revisions: dict[str, int] | None = None) -> Boundary:
        requests = tuple(self.requests[cursor] for cursor in sorted(self.requests))
        return Boundary(0, 0, 0, b"", 0, 0, 0, True, requests, revisions or {}, exports or {})


def tools(resource: HttpHost, attempt: int, journal: Journal) -> Tools:
    return Tools({"notes": resource}, Sessions("run", 0, 0, 0), Claim(1 + attempt, attempt), b"{}", 7, journal)


async def step(tools: Tools) -> list[int]:
    return [await tools.call("notes", "add", {"by": 1}) for _ in range(3)]


async def attempt(transport: Transport, number: int, journal: Journal, at: Boundary | None) -> list[int]:
    resource = HttpHost(transport)
    try:
        made = tools(resource, number, journal)
        await made.begin(at)
        made.turn_begins(at)
        return await step(made)
    finally:
        await resource.close()


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("arrives", [True, False])
async def test_a_step_killed_at_any_call_goes_on_with_every_effect_once(at: int, arrives: bool, tmp_path: Path) -> None:
    ledger, journal = tmp_path / "effects", Journal()
    async with host(ledger=ledger, replayable=False) as running, proxied(running) as proxy:
        with pytest.raises(OutcomeUnknown):
            await _cut_at(running, proxy, journal, at, arrives)
        assert journal.requests[at - 1].reply is None, "its intent is durable, its reply is not"
        assert await attempt(running.transport(), 1, journal, journal.boundary()) == [1, 2, 3]
        assert set(effects(ledger).values()) == {1}
        assert len(effects(ledger)) == 3


async def _cut_at(running: Running, proxy: Proxy, journal: Journal, at: int, arrives: bool) -> None:
    """The first attempt; its call number `at` gets no answer, and `arrives` or not."""
    resource = HttpHost(running.transport(proxy.url))
    made = tools(resource, 0, journal)
    await made.begin(None)
    made.turn_begins(None)
    try:
        for _ in range(1, at):
            await made.call("notes", "add", {"by": 1})
        (proxy.lost if arrives else proxy.kept)["sessions/call"] = 1
        await made.call("notes", "add", {"by": 1})
    finally:
        await resource.close()


@pytest.mark.parametrize("replayable", [True, False])
async def test_a_step_whose_host_died_too_starts_over_where_effects_leave_the_session(
    replayable: bool, tmp_path: Path
) -> None:
    ledger, journal = tmp_path / "effects", Journal()
    options = ("--ledger", str(ledger), *(() if replayable else ("--no-replayable",)))
    async with HostProcess(*options) as process:
        resource = HttpHost(process.transport())
        made = tools(resource, 0, journal)
        await made.begin(None)
        made.turn_begins(None)
        assert await made.call("notes", "add", {"by": 1}) == 1
        await journal.intent(0, 1, "notes", 1, journal.requests[0].digest)
        await resource.call(SESSION, ONE, request(1, 1))  # applied, and its reply is not recorded
        await resource.close()
        await process.again()
        if replayable:
            assert await attempt(process.transport(), 1, journal, journal.boundary()) == [1, 2, 3]
            return
        with pytest.raises(NotContinuable):
            await attempt(process.transport(), 1, journal, journal.boundary())
        assert set(effects(ledger).values()) == {1}


async def test_a_call_that_waited_at_the_gate_for_a_dead_attempt_cannot_be_done_beside_the_next_one(
    tmp_path: Path,
) -> None:
    ledger = tmp_path / "effects"
    async with host(ledger=ledger) as running:
        old, new = HttpHost(running.transport(timeout_s=0.2)), HttpHost(running.transport())
        await old.start(SESSION, ONE, b"", 0)
        await running.core.prepare("c1", time.time() + 5)
        with pytest.raises(OutcomeUnknown):
            await old.call(SESSION, ONE, request(0, 0))
        claiming = asyncio.create_task(new.claim(SESSION, Claim(2, 1)))
        await asyncio.sleep(0.1)
        running.core.control.end(Operation.RESUME, "c1")
        revision = await claiming
        found, reply = await new.standing(SESSION, Claim(2, 1), request(0, 0))
        assert found is (Standing.APPLIED if revision else Standing.NOT_APPLIED)
        if reply is None:
            reply = await new.call(SESSION, Claim(2, 1), request(0, 0))
        assert (opened(reply.content), effects(ledger)) == (1, {f"{SESSION}.0.0": 1})
        with pytest.raises(ResourceInvalid):
            await old.call(SESSION, ONE, request(1, 1))
        await old.close()
        await new.close()


class _Counting(Environment):
    """Adds one in each of two turns."""

    max_new_tokens, max_turns = 4, 2

    def __init__(self, resource: HttpHost) -> None:
        self._resource = resource

    @property
    def resources(self) -> dict[str, ResourceHost]:
        return {"notes": self._resource}

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> bytes:
        return b"{}"

    def episode(self) -> Episode:
        return _Counted()


class _Counted(Episode):
    checkpoint_mode = CheckpointMode.STATELESS

    async def reset(self, task: bytes, seed: int) -> list[Message]:
        return [Message("user", "?")]

    async def step(self, action: Action) -> StepResult:
        count = await self.tools.call("notes", "add", {"by": 1})
        return StepResult(count == 2, float(count), [Message("user", "?")])


async def test_the_agents_result_stays_with_the_host_until_its_receipt_is_acknowledged(tmp_path: Path) -> None:
    ledger = tmp_path / "effects"
    async with host(ledger=ledger) as running:
        sink, resource = Sink(), HttpHost(running.transport())
        await Agent(
            _Counting(resource), TOKENIZER, scripted("a", "b"), sink, seed=1, temperature=1.0,
            position=lambda ordinal: ordinal, run="run",
        ).run(dispatch(), [])  # fmt: skip
        (receipt,) = sink.records[-1][-1]
        assert (receipt.host, receipt.boot, receipt.session) == ("notes", "b1", "run/g0/0~0")
        assert (receipt.capture, receipt.call) == ("g0/0~0", "g0/0~0.1")
        _, (kept,) = await resource.unacknowledged()
        assert json.loads(kept.content) == {"rollout": "g0/0", "reward": 2.0, "turns": 2}
        assert await resource.acknowledge("b1", [owed(receipt)])
        assert (len(effects(ledger)), set(effects(ledger).values())) == (2, {1})
        assert not running.core.sessions.whole()
        await resource.close()
