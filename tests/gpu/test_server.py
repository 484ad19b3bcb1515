"""An engine behind calls: clients get their own results, pauses keep requests back, and a failure reaches everybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu.generation.client import EngineClient
from gpu.generation.engine import Cached, Finish, Generated, GenRequest, Sampling, Version
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from gpu.local import Process
from storage.buffers import buffers_digest
from storage.errors import ActorLost, ArtifactCorrupt, ConfigurationRefused, EngineFailed
from tests.faults.house import House, small
from tests.gpu.engines import weights_of


class Slow(FakeEngine):
    """Cannot change weights in flight; steps only when told, and refuses prompts above 5 tokens."""

    capabilities = frozenset({"determinism"})

    def __init__(self) -> None:
        super().__init__(tokens=3)
        self.going = True
        self.fail: Exception | None = None

    def add(self, request: GenRequest) -> None:
        if len(request.prompt) > 5:
            raise ConfigurationRefused("a long prompt", expected="5 tokens", action="shorten it")
        super().add(request)

    def step(self) -> list[Generated]:
        if self.fail is not None:
            raise self.fail
        return super().step() if self.going else []


def request(name: str, length: int = 2) -> GenRequest:
    return GenRequest(name, tuple(range(length)), Sampling(8, 1.0, 7, frozenset({0})))


WEIGHTS = weights_of(1)


def version(number: int) -> Version:
    return Version(1, number, buffers_digest(WEIGHTS))


@pytest.fixture
async def served() -> AsyncIterator[tuple[EngineServer, Slow]]:
    engine = Slow()
    server = EngineServer(engine, Cached.KEEP)
    await server.update(version(0), WEIGHTS)
    yield server, engine
    await server.close()


async def collect(server: EngineServer, client: str, count: int) -> list[Generated]:
    found: list[Generated] = []
    async with asyncio.timeout(5.0):
        while len(found) < count:
            found += await server.collect(client, 1.0)
    return found


Served = tuple[EngineServer, Slow]


async def test_each_client_gets_exactly_its_own_results(served: Served) -> None:
    server, _ = served
    await server.submit("a", [request("a1"), request("a2")])
    await server.submit("b", [request("b1")])
    assert {result.id for result in await collect(server, "a", 2)} == {"a1", "a2"}
    assert [result.id for result in await collect(server, "b", 1)] == ["b1"]
    assert await server.collect("a", 0.01) == []


async def test_a_refused_request_is_answered_with_its_reason_and_the_others_go_on(served: Served) -> None:
    server, _ = served
    refused = await server.submit("a", [request("long", 9), request("ok")])
    assert list(refused) == ["long"]
    assert "a long prompt" in refused["long"]
    assert [result.id for result in await collect(server, "a", 1)] == ["ok"]


async def test_a_pause_finishes_what_runs_keeps_back_what_comes_and_lets_it_go_at_the_end(served: Served) -> None:
    server, engine = served
    engine.going = False
    await server.submit("a", [request("before")])
    pausing = asyncio.create_task(server.pause())
    await asyncio.sleep(0.05)
    assert not pausing.done(), "an open call is not interrupted"
    during = asyncio.create_task(server.submit("a", [request("during"), request("long", 9)]))
    engine.going = True
    await asyncio.wait_for(pausing, 5.0)
    before = (await collect(server, "a", 1))[0]
    assert {span.number for span in before.spans} == {0}
    await server.update(version(1), WEIGHTS)
    assert not during.done()
    await server.resume()
    assert list(await during) == ["long"], "what was kept back can be refused like anything else"
    after = (await collect(server, "a", 1))[0]
    assert (after.id, {span.number for span in after.spans}) == ("during", {1})
    await server.resume()


async def test_a_client_forgotten_during_a_pause_leaves_nothing_behind(served: Served) -> None:
    server, _ = served
    await server.pause()
    waiting = asyncio.create_task(server.submit("gone", [request("x")]))
    await asyncio.sleep(0.02)
    await server.forget("gone")
    await server.resume()
    assert await waiting == {}
    assert (await server.stats()).tokens == 0


async def test_a_client_forgotten_while_it_waits_for_results_gets_none_and_no_error(served: Served) -> None:
    """Its worker has died; the call that waits for it must not end as an untyped error when another result comes."""
    server, _ = served
    assert await server.submit("gone", []) == {}
    waiting = asyncio.create_task(server.collect("gone", 5.0))
    await asyncio.sleep(0.02)
    await server.forget("gone")
    await server.submit("other", [request("x")])
    assert [result.id for result in await collect(server, "other", 1)] == ["x"]
    assert await waiting == []


async def test_cancelling_ends_open_calls_with_what_they_have(served: Served) -> None:
    server, engine = served
    engine.going = False
    await server.submit("a", [request("a1"), request("a2")])
    assert await server.cancel() == 2
    assert {result.finish for result in await collect(server, "a", 2)} == {Finish.ABORT}


async def test_weights_of_another_digest_are_refused_and_the_old_version_still_answers(served: Served) -> None:
    server, _ = served
    with pytest.raises(ArtifactCorrupt):
        await server.update(version(1), weights_of(2))
    await server.submit("a", [request("a1")])
    assert (await collect(server, "a", 1))[0].spans[-1].number == 0


async def test_a_failure_of_the_engine_reaches_every_call_with_its_cause(served: Served) -> None:
    server, engine = served
    watching = asyncio.create_task(server.run())
    collecting = asyncio.create_task(server.collect("a", 30.0))
    await asyncio.sleep(0.02)
    engine.fail = MemoryError("out of device memory")
    await server.submit("a", [request("a1")])
    for call in (watching, collecting):
        with pytest.raises(EngineFailed, match="out of device memory"):
            await asyncio.wait_for(call, 5.0)
    for late in (server.submit("a", [request("a2")]), server.stats(), server.update(version(1), WEIGHTS)):
        with pytest.raises(EngineFailed, match="out of device memory"):
            await late


async def test_the_death_of_an_engine_ends_every_request_of_a_client(served: Served) -> None:
    server, engine = served
    engine.going = False
    process = Process("engine", server)
    client = EngineClient(process, "a")
    calls = [asyncio.create_task(client.generate(request(f"r{i}"))) for i in range(3)]
    await asyncio.sleep(0.05)
    process.kill()
    for outcome in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5.0):
        assert isinstance(outcome, ActorLost)
    assert client.lost
    with pytest.raises(ActorLost):
        await client.generate(request("late"))
    await client.close()


async def test_a_request_that_cannot_fit_fails_alone(served: Served) -> None:
    server, _ = served
    client = EngineClient(server, "a")
    outcomes = await asyncio.wait_for(
        asyncio.gather(client.generate(request("long", 9)), client.generate(request("ok")), return_exceptions=True), 5.0
    )
    assert isinstance(outcomes[0], ConfigurationRefused)
    assert isinstance(outcomes[1], Generated)
    await client.close()


@pytest.mark.parametrize("mode", ["boundary", "frontier"])
async def test_a_run_whose_engines_finish_their_calls_before_an_update_trains_everything(
    mode: str, tmp_path: Path
) -> None:
    """And no call of such an engine mixes two versions."""
    engines: list[NoSwap] = []

    def make(spec: object) -> EngineServer:
        engines.append(NoSwap())
        return EngineServer(engines[-1], Cached.KEEP)

    house = House(tmp_path, small(generation={"in_flight_updates": False}, drain={"mode": mode}), engine=make)
    await house.run()
    assert house.check().steps == 8
    assert engines
    assert all(len(result.spans) == 1 for engine in engines for result in engine.ended)


class NoSwap(FakeEngine):
    capabilities = frozenset({"determinism", "checksum"})

    def __init__(self) -> None:
        super().__init__(slots=8, tokens=3, vocabulary=40)
        self.ended: list[Generated] = []

    def step(self) -> list[Generated]:
        ended = super().step()
        self.ended += ended
        return ended
