"""The built-in environments with tools: what they say and reward, and that a crash at any record changes neither."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gpu.environments.arithmetic import evaluate
from gpu.environments.calculate import Calculate
from gpu.environments.http_tool import REPLY_BYTES, HttpTool
from gpu.environments.registry import make_environment, topology_of
from gpu.environments.resources import Claim, Request, ToolError, canonical, opened
from gpu.environments.slow_tool import TOPICS, SlowTool, executed, serve
from gpu.environments.ticket import Ticket
from gpu.environments.words import command, spoken
from gpu.environments.workspace import Workspace
from gpu.models.tokenizer import Message
from storage.errors import ConfigurationRefused
from storage.samples import assemble_slot
from tests.gpu.agents import TOKENIZER, Sink, agent, dispatch, scripted
from tests.gpu.crashes import folded, play
from tests.gpu.hosts import refused_with

# ---------------------------------------------------------------------- words


def test_a_command_is_the_first_line_with_a_sign() -> None:
    assert command("=1+2", "=!") == ("=", "1+2")
    assert command(" let me see\n  ! 7 \n=3", "=!") == ("!", "7")
    assert command(" select 1\n", "!") == ("", "select 1")
    assert command("", "!") == ("", "")


def test_messages_have_only_characters_of_every_tokenizer() -> None:
    said = spoken('Near "SELCT": É syntax\terror')
    assert said == "near selct:  syntaxerror>"
    assert TOKENIZER.decode(TOKENIZER.prompt([Message("user", said)])) == said


# ---------------------------------------------------------------------- calculate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("-7 // 2", -4),
        ("7 % 4 - +1", 2),
        ("2**10", 1024),
        ("2**-1", 0.5),
        ("9/4", 2.25),
        ("1e3", 1000.0),
        (" 12 ", 12),
        ("2**255 - 1", 2**255 - 1),
    ],
)
def test_expressions_have_the_value_that_python_gives_them(text: str, value: float) -> None:
    found = evaluate(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1/0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("9**999999999999", "too large"),
        ("2.0**9999", "too large"),
        ("1e999", "too large"),
        ("9" * 150, "too large"),
        ("1" + "*99999999" * 20, "too large"),
        ("(0-8)**0.5", "no root"),
        ("", "not an expression"),
        ("1 +", "not an expression"),
        ("1\0", "not an expression"),
        ("(" * 150 + "1", "not an expression"),
        ("1" * 201, "longer than 200"),
        ("a", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("[1][0]", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 < 2", "only numbers"),
        ("~1", "only numbers"),
        ("1 << 9", "only numbers"),
        ("(1).real", "only numbers"),
        ("abs(1)", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("2j", "only numbers"),
        ("(x := 1)", "only numbers"),
        ("lambda: 1", "only numbers"),
    ],
)
def test_everything_else_is_refused_before_it_costs_anything(text: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        evaluate(text)


async def test_a_calculation_goes_through_the_tool_and_ends_with_an_answer() -> None:
    environment = make_environment("calculate", {})
    assert len({environment.task(i) for i in range(len(environment))}) > 250
    task = json.loads(environment.task(0))
    rows, seats, taken = [int(word) for word in task["question"].replace(",", "").split() if word.isdecimal()]
    sink = Sink()
    generate = scripted(f"={rows}*{seats}", f"={rows * seats}-{taken}", f"!{rows * seats - taken}")
    await agent(environment, generate, sink).run(dispatch(0), [])
    assert generate.prompts[1].endswith(f"={rows}*{seats}{rows * seats}>")
    assert generate.prompts[2].endswith(f"-{taken}{rows * seats - taken}>")
    assert sink.ended[0].reward == 1.0
    assert [record[0] for record in sink.records] == ["turn", "turn", "end"], "a tool that only answers leaves no trace"
    assert topology_of(environment).modes == {"calculator": "stateless"}


@pytest.mark.parametrize(
    ("answers", "messages", "reward"),
    [
        (["!1"], [], 0.0),
        (["=1/0", "=x", "hm", "=1"], ["division by zero>", "only numbers", "=expression or !number>"], 0.0),
        (["=1", "=1", "=1", "!{}"], ["1>", "1>", "1>"], 1.0),
    ],
)
async def test_mistakes_are_told_and_turns_are_counted(answers: list[str], messages: list[str], reward: float) -> None:
    environment = Calculate()
    right = json.loads(environment.task(5))["answer"]
    sink = Sink()
    generate = scripted(*(answer.format(right) for answer in answers))
    await agent(environment, generate, sink).run(dispatch(5), [])
    assert sink.ended[0].reward == reward
    for prompt, message in zip(generate.prompts[1:], messages, strict=True):
        assert message in prompt


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_calculation_that_crashed_goes_on_with_its_count_of_turns(cut: int) -> None:
    played = await play(lambda attempt: Calculate(), 0, ["=1", "=2", "=3", "=4"], cut)
    assert (played.reward, played.restarted) == (0.0, False)
    assert [record[0] for sink in played.sinks for record in sink.records] == [*["turn"] * 3, "end"]


# ---------------------------------------------------------------------- workspace


def work(environment: Workspace, group: int) -> list[str]:
    task = json.loads(environment.task(group))
    rows = ",".join(f"({key},{value})" for key, value in enumerate(task["values"], 1))
    return ["create table t(k,v)", f"insert into t values{rows}", "select sum(v) from t", f"!{task['answer']}"]


async def test_a_table_and_an_answer_are_half_of_the_reward_each(tmp_path: Path) -> None:
    environment = Workspace(str(tmp_path))
    create, insert, ask, answer = work(environment, 0)
    for answers, reward in (
        ([create, insert, ask, answer], 1.0),
        ([create, insert, "!no"], 0.5),
        ([answer], 0.5),
        ([create, insert, insert, answer], 0.5),
        (["!no"], 0.0),
        ([create, insert, *["select 1"] * 4], 0.0),
    ):
        sink = Sink()
        await agent(environment, scripted(*answers), sink).run(dispatch(0), [])
        assert sink.ended[0].reward == reward, answers
    assert [name for name in os.listdir(tmp_path) if not name.startswith("lock-")] == []


async def test_the_policy_reads_rows_counts_and_errors(tmp_path: Path) -> None:
    environment = Workspace(str(tmp_path))
    answers = ["create table t(k,v)", "insert into t values(1,2)", "select * from t", "selec", "drop table q", "!"]
    generate = scripted(*answers)
    await agent(environment, generate, Sink()).run(dispatch(0), [])
    said = ["0 changed>", "1 changed>", "[[1, 2]]>", "near selec: syntax error>", "no such table: q>"]
    for prompt, answer, message in zip(generate.prompts[1:], answers, said, strict=False):
        assert prompt.endswith(answer + message)
    assert generate.prompts[0].startswith("sql: make table t(k, v) of 1 ")


@pytest.mark.parametrize("survives", [True, False])
async def test_wherever_a_rollout_crashes_each_statement_takes_effect_once(survives: bool, tmp_path: Path) -> None:
    """With its database still there, and on another node, from its export."""

    def make(attempt: int) -> Workspace:
        folder = tmp_path / ("" if survives else f"{cut}-{attempt}")
        return Workspace(str(folder))

    cut, answers = 1000, work(Workspace(), 3)
    whole = await play(make, 3, answers, cut)
    records = len(whole.sinks[0].records)
    assert (records, whole.reward) == (10, 1.0)
    for cut in range(records):
        played = await play(make, 3, answers, cut)
        assert (played.reward, played.restarted) == (1.0, False), cut
        _, rows = folded([record for sink in played.sinks for record in sink.records])
        (sample,) = assemble_slot([*rows, played.sinks[-1].ended[0]], 3, 0)
        (reference,) = assemble_slot([*folded(whole.sinks[0].records)[1], whole.sinks[0].ended[0]], 3, 0)
        assert sample.tokens.tolist() == reference.tokens.tolist(), cut


# ---------------------------------------------------------------------- ticket


@asynccontextmanager
async def desk(ledger: Path, delay_s: float = 0.0) -> AsyncGenerator[str]:
    runner = await serve(SlowTool(ledger, delay_s), 0)
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


PHONE = sorted(TOPICS).index("phone")


async def test_looking_up_and_opening_are_different_tasks(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with desk(ledger) as url:
        environment = make_environment("ticket", {"url": url})
        for group, answers, reward in (
            (2 * PHONE, ["?phone", "!2"], 1.0),
            (2 * PHONE, ["!3"], 0.0),
            (2 * PHONE + 1, ["?phone", "+phone 2", "!1"], 1.0),
            (2 * PHONE + 1, ["+phone 1", "+phone 2", "!2"], 0.0),
            (2 * PHONE + 1, ["+phone 2", "!4"], 1.0),
            (2 * PHONE + 1, ["?nothing", "+nothing 1", "+phone x", "hm", "+phone 2"], 0.0),
        ):
            sink = Sink()
            running = agent(environment, scripted(*answers), sink)
            await running.run(dispatch(group), [])
            await running.hosts["desk"].close()
            assert sink.ended[0].reward == reward, answers
    assert [(change["number"], change["priority"]) for change in executed(ledger)] == [
        (1, 2), (2, 1), (3, 2), (4, 2), (5, 2),
    ]  # fmt: skip
    keys = [change["key"] for change in executed(ledger)]
    assert keys[0] == f"/g{2 * PHONE + 1}/0~0.1.0", "the rollout, the boundary of its answer, the first action"


async def test_a_rollout_that_opened_a_ticket_starts_over_and_one_that_only_looked_goes_on(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with desk(ledger) as url:
        for group, answers in ((2 * PHONE, ["?phone", "?light", "!2"]), (2 * PHONE + 1, ["?phone", "+phone 2", "!{}"])):
            opens = group % 2
            for cut in range(5 if opens else 2):
                before = len(executed(ledger))
                number = before + 1 + (opens and cut > 3)
                played = await play(
                    lambda attempt: Ticket(url), group, [answer.format(number) for answer in answers], cut
                )
                begun = bool(opens) and cut >= 3
                assert played.restarted == begun, (group, cut)
                made = [change["key"] for change in executed(ledger)[before:]]
                assert len(made) == len(set(made)), "no request is made twice"
                assert len(made) <= 1 + begun if opens else not made
                if not begun or cut > 3:
                    assert played.reward == 1.0, (group, cut)


async def test_without_an_answer_in_time_nobody_knows_and_nothing_is_sent_again(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    claim, session = Claim(1, 0), "run/g1/0~0"
    async with desk(ledger, 0.6) as url:
        host = HttpTool(url, timeout_s=0.4)
        await host.start(session, claim, b"{}", 0)
        ask = Request(f"{session}.0.0", "open", canonical({"topic": "door", "priority": 4}), 0)
        await refused_with("unanswered", host.call(session, claim, ask))
        await refused_with("uncertain", host.call(session, claim, ask))
        await host.close()
    assert [change["key"] for change in executed(ledger)] == [ask.id]


@pytest.mark.parametrize("how", ["redirect", "busy", "no json", "too long", "refusal without a reason", "gone"])
async def test_an_answer_that_is_none_leaves_a_change_uncertain_and_a_read_not(how: str) -> None:
    web = aiohttp.web
    asked: list[str] = []

    async def answer(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        asked.append(request.method)
        if how == "redirect":
            return web.Response(status=307, headers={"Location": str(request.url)}, text="1")
        if how == "gone":
            request.transport.abort()
        text = {"no json": "<html>", "too long": "1" * (REPLY_BYTES + 1)}.get(how, "{}")
        return web.Response(status={"busy": 503, "refusal without a reason": 400}.get(how, 200), text=text)

    application = web.Application()
    application.add_routes([web.route("*", "/do", answer)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address, port = runner.addresses[0][:2]
    host = HttpTool(f"http://{address}:{port}/")
    await host.start("s", Claim(1, 0), b"", 0)
    reads = Request("r", "do", b"{}", 0, reads=True)
    await refused_with("unanswered", host.call("s", Claim(1, 0), reads))
    await refused_with("unanswered", host.call("s", Claim(1, 0), Request("c", "do", b"{}", 0)))
    await refused_with("uncertain", host.call("s", Claim(1, 0), reads))
    assert asked.count("POST") == 1
    await host.close()
    await runner.cleanup()


async def test_the_desk_is_a_program_that_prints_its_url_and_keeps_its_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    command = ("-m", "gpu.environments.slow_tool", "--port", "0", "--delay", "0.01", "--ledger", str(ledger))
    for number in (1, 2):
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        host = HttpTool((await process.stdout.readline()).decode().strip())
        await host.start("s", Claim(1, 0), b"", 0)
        ask = Request("k", "open", canonical({"topic": "door", "priority": 4}), 0)
        assert opened((await host.call("s", Claim(1, 0), ask)).content) == number
        await host.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    assert executed(ledger)[1] == {"key": "k", "number": 2, "topic": "door", "priority": 4}


def test_options_that_cannot_be_are_the_users_mistake() -> None:
    for name, options in (
        ("ticket", {}),
        ("ticket", {"url": "desk"}),
        ("ticket", {"url": "http://desk", "timeout": 0}),
        ("calculate", {"turns": 0}),
        ("workspace", {"tokens": 0}),
    ):
        with pytest.raises(ConfigurationRefused):
            make_environment(name, options)
