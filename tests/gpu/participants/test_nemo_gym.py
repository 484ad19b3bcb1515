"""The adapter for NeMo Gym resources servers, against a stand-in that speaks their routes: seed, tools, verify."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpu.environments.base import CheckpointMode
from gpu.environments.nemo_gym import NemoGym, opening, tool_calls
from gpu.environments.participants.errors import HostFailed, OutcomeUnknown
from gpu.environments.registry import make_environment, topology_of
from gpu.environments.resources import Claim, Request, Standing, canonical
from gpu.models.tokenizer import CharTokenizer, Message
from storage.errors import ConfigurationRefused, ResourceInvalid
from tests.gpu.agents import Sink, agent, dispatch, scripted
from tests.gpu.participants.hosts import served

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
TASK = {
    "responses_create_params": {"input": [{"role": "user", "content": "count to two"}], "tools": [ADD]},
    "expected_count": 2,
}


class StandIn:
    """A counter per cookie. `said` is what came, `fault` what happens to a route instead."""

    def __init__(self) -> None:
        self.url = ""
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.counts: dict[str, int] = {}
        self.fault: dict[str, web.Response | None] = {}
        self.verified: dict[str, Any] = {}

    async def serve(self, request: web.Request) -> web.Response:
        route, body = request.path[1:], await request.json()
        self.said.append((route, body))
        session = request.cookies.get("session", "")
        if route in self.fault:
            answer = self.fault[route]
            if answer is None:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            return web.Response(status=answer.status, body=answer.body)
        match route:
            case "seed_session":
                session = f"s{len(self.counts)}"
                self.counts[session] = 0
                answer = web.json_response({})
                answer.set_cookie("session", session)
                return answer
            case "add":
                if "by" not in body:
                    return web.json_response({"detail": "by is missing"}, status=422)
                self.counts[session] += body["by"]
                return web.json_response({"count": self.counts[session]})
            case "verify":
                self.verified = body
                reward = float(self.counts[session] == body["expected_count"])
                return web.json_response({**body, "reward": reward})
            case _:
                return web.json_response({"detail": "Not Found"}, status=404)


@asynccontextmanager
async def standing_in() -> AsyncGenerator[StandIn]:
    server = StandIn()
    app = web.Application()
    app.router.add_post("/{route:.*}", server.serve)
    async with served(app) as (url, _):
        server.url = url
        yield server


def gym(tmp_path: Path, server: StandIn, task: dict[str, Any] = TASK, **options: Any) -> NemoGym:
    data = tmp_path / "tasks.jsonl"
    data.write_text(json.dumps(task) + "\n\n")
    made = make_environment("nemo_gym", {"url": server.url, "data": str(data), **options})
    assert isinstance(made, NemoGym)
    return made


class Letters(CharTokenizer):
    """With what tool calls are written in."""

    ALPHABET = CharTokenizer.ALPHABET + "\"ABCDEFGHIJKLMNOPQRSTUVWXYZ\\'$^~`"

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = 128


def call(by: object) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"by": {json.dumps(by)}}}}}</tool_call>'


async def play(environment: NemoGym, *answers: str, monkeypatch: pytest.MonkeyPatch) -> Sink:
    """A rollout that gives these answers."""
    letters, sink = Letters(), Sink()
    monkeypatch.setattr("tests.gpu.agents.TOKENIZER", letters)
    try:
        await agent(environment, scripted(*answers), sink).run(dispatch(0), [])
    finally:
        await environment.resources["gym"].close()
    return sink


async def test_a_rollout_seeds_calls_its_tools_and_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with standing_in() as server:
        sink = await play(gym(tmp_path, server), call(1) + call(1), "that was two", monkeypatch=monkeypatch)
        assert [route for route, _ in server.said] == ["seed_session", "add", "add", "verify"]
        assert server.said[0][1] == TASK
        assert sink.ended[0].reward == 1.0
        output = server.verified["response"]["output"]
        assert [item["type"] for item in output] == [*("function_call", "function_call_output") * 2, "message"]
        assert json.loads(output[3]["output"]) == {"count": 2}
        assert (output[2]["call_id"], json.loads(output[2]["arguments"])) == (output[3]["call_id"], {"by": 1})
        assert output[4]["content"][0]["text"] == "that was two"
        assert server.verified["expected_count"] == 2


async def test_two_rollouts_have_sessions_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with standing_in() as server:
        environment = gym(tmp_path, server)
        for answer, reward in ((call(2), 1.0), (call(1), 0.0)):
            sink = await play(environment, answer, "done", monkeypatch=monkeypatch)
            assert sink.ended[0].reward == reward
        assert server.counts == {"s0": 2, "s1": 1}


async def test_a_refused_call_is_told_to_the_policy_and_reserved_routes_are_no_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {**TASK, "responses_create_params": {"input": "go", "tools": [ADD, {"name": "verify"}, {"name": "../x"}]}}
    wrong = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in ("seed_session", "../x", "fly")
    )
    async with standing_in() as server:
        sink = await play(
            gym(tmp_path, server, task), wrong + '<tool_call>{"name": "add"}</tool_call>', "", monkeypatch=monkeypatch
        )
        assert [route for route, _ in server.said] == ["seed_session", "add", "verify"]
        answers = [item["output"] for item in server.verified["response"]["output"] if "output" in item]
        assert all("no tool" in answer for answer in answers[:3])
        assert "by is missing" in answers[3]
        assert sink.ended[0].reward == 0.0


async def test_the_last_turn_is_verified_whatever_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with standing_in() as server:
        sink = await play(gym(tmp_path, server, turns=2), call(1), call(1), monkeypatch=monkeypatch)
        assert (len(sink.turns), sink.ended[0].reward) == (1, 1.0)


@pytest.mark.parametrize(
    ("route", "answer", "error"),
    [
        ("add", web.Response(status=500, body=b"boom"), HostFailed),
        ("add", web.Response(status=302), HostFailed),
        ("add", None, OutcomeUnknown),
        ("seed_session", web.Response(status=422, body=b"{}"), HostFailed),
        ("verify", web.Response(status=500), HostFailed),
        ("verify", web.Response(body=b"{}"), HostFailed),
        ("verify", web.Response(body=b"[]"), HostFailed),
        ("verify", web.Response(body=b'{"reward": NaN}'), HostFailed),
        ("verify", web.Response(body=b'{"reward": true}'), HostFailed),
        ("verify", web.Response(body=b'{"reward": 0.0, "mask_sample": true}'), HostFailed),
    ],
)
async def test_what_the_server_cannot_do_is_an_error_and_never_a_reward(
    route: str, answer: web.Response | None, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing_in() as server:
        server.fault[route] = answer
        with pytest.raises(error):
            await play(gym(tmp_path, server), call(1), "done", monkeypatch=monkeypatch)
        assert [said for said, _ in server.said].count(route) == 1, "and nothing is sent twice"


async def test_a_session_whose_answer_was_lost_is_uncertain_and_its_standing_unknown(tmp_path: Path) -> None:
    async with standing_in() as server:
        environment = gym(tmp_path, server)
        resource = environment.resources["gym"]
        one, asked = Claim(1, 0), Request("run/g0/0~0.0.0", "add", canonical({"by": 1}), 0)
        await resource.start("run/g0/0~0", one, environment.task(0), 0)
        server.fault["add"] = None
        with pytest.raises(OutcomeUnknown):
            await resource.call("run/g0/0~0", one, asked)
        assert await resource.standing("run/g0/0~0", one, asked) == (Standing.UNKNOWN, None)
        with pytest.raises(ResourceInvalid):
            await resource.call("run/g0/0~0", one, asked)
        await resource.close()


async def test_it_can_only_start_over(tmp_path: Path) -> None:
    async with standing_in() as server:
        environment = gym(tmp_path, server)
        topology = topology_of(environment)
        assert (topology.episode, topology.modes) == ("restart_only", {"gym": "restart_only"})
        resource = environment.resources["gym"]
        assert (resource.checkpoint_mode, resource.replayable, resource.survives) == (
            *(CheckpointMode.RESTART_ONLY, False, False),
        )


def test_tools_are_told_in_the_system_message() -> None:
    both = opening({"input": [{"role": "developer", "content": "be brief"}], "tools": [ADD]})
    assert [one.role for one in both] == ["system"]
    assert both[0].content.startswith("be brief")
    assert '"name": "add"' in both[0].content
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert opening({"input": [{"role": "user", "content": parts}]}) == [Message("user", "ab")]


@pytest.mark.parametrize(
    "text", ["", "<tool_call>{</tool_call>", "<tool_call>{}</tool_call>", '<tool_call>{"name": 1}</tool_call>', "{}"]
)
def test_what_is_no_call_is_none(text: str) -> None:
    assert tool_calls(text) == []


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", '{"responses_create_params": {}}',
             '{"responses_create_params": {"input": [{"role": "tool", "content": ""}]}}']
)  # fmt: skip
def test_a_data_set_that_is_none_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text(json.dumps(TASK) + "\n" + line if line else "")
    with pytest.raises(ConfigurationRefused, match="line 2" if line else "without a task"):
        NemoGym("http://127.0.0.1:1", str(data))
    with pytest.raises(ConfigurationRefused):
        make_environment("nemo_gym", {"url": "http://127.0.0.1:1", "data": str(tmp_path / "none")})
    with pytest.raises(ConfigurationRefused):
        make_environment("nemo_gym", {"url": "http://user:key@a", "data": str(data)})
