"""The built-in environments, the registry, and the agent loop over turns."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpu.environments.agent import AgentState, GenerationAborted
from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.registry import make_environment
from gpu.generation.engine import Finish
from gpu.models.tokenizer import Message
from gpu.rollout.messages import Continuation
from storage.errors import ConfigurationRefused, ContinuationInvalid
from storage.ledger import Boundary
from storage.samples import assemble_slot
from tests.gpu.agents import TOKENIZER, Sink, agent, dispatch, scripted


async def test_reversing_is_scored_by_right_places_over_the_longer_text() -> None:
    environment = make_environment("reverse", {})
    assert len(environment) == 64
    index = next(i for i in range(64) if json.loads(environment.task(i))["word"] == "bac")
    for answer, reward in (("cab", 1.0), ("cad", 3 / 4), ("cabd", 3 / 5), ("", 0.0), ("bca", 1 / 4)):
        sink = Sink()
        generate = scripted(answer)
        await agent(environment, generate, sink).run(dispatch(index), [])
        assert sink.ended[0].reward == pytest.approx(reward), answer
        assert generate.prompts == ["bac>"]


async def test_addition_takes_the_last_number_of_the_answer() -> None:
    environment = make_environment("addition", {})
    assert (len(environment), len({environment.task(i) for i in range(81)})) == (81, 81)
    episode = environment.episode()
    messages = await episode.reset(environment.task(0), 0)
    assert messages[0].content == "What is 1+1? Reply with only the number."
    for answer, reward in (("2", 1.0), ("1 + 1 = 2", 1.0), ("2 or 3", 0.0), ("two", 0.0), ("", 0.0)):
        assert (await episode.step(Action(answer, True))).reward == reward


async def test_guessing_takes_turns_and_rewards_fewer_of_them() -> None:
    environment = make_environment("guess", {})
    sink = Sink()
    generate = scripted("h", "l", "j", finish=Finish.LENGTH)
    await agent(environment, generate, sink).run(dispatch(9), [])
    assert generate.prompts == ["?", "?h>", "?h>l<"]
    assert sink.ended[0].reward == pytest.approx(0.8)
    assert [boundary for boundary, _, _ in sink.turns] == [0, 1]
    (sample,) = assemble_slot([*(row for _, row, _ in sink.turns), sink.ended[0]], 9, 0)
    assert TOKENIZER.decode(sample.tokens.tolist()) == "?h>l<j"
    assert sample.mask.tolist() == [0, 1, 0, 1, 0, 1]


async def test_an_episode_that_never_guesses_right_ends_with_nothing() -> None:
    sink = Sink()
    await agent(make_environment("guess", {}), scripted(*"abcde", finish=Finish.LENGTH), sink).run(dispatch(9), [])
    assert (len(sink.turns), sink.ended[0].reward) == (4, 0.0)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
async def test_a_rollout_killed_after_any_turn_goes_on_with_the_same_tokens_and_reward(cut: int) -> None:
    environment = make_environment("guess", {})
    whole = Sink()
    answers = "pdhkj"
    await agent(environment, scripted(*answers, finish=Finish.LENGTH), whole).run(dispatch(9), [])
    boundary, _, state = whole.turns[cut - 1]
    before = [row for _, row, _ in whole.turns[:cut]]
    resumed = Sink()
    continuation = Continuation((), {}, {}, Boundary(boundary, cut - 1, 0, state, 0, 0, 0))
    generate = scripted(*answers[cut:], finish=Finish.LENGTH)
    await agent(environment, generate, resumed).run(dispatch(9, 1, boundary + 1, continuation), before)
    assert len(generate.prompts) == 5 - cut, "finished turns are not generated again"
    rows = [*before, *(row for _, row, _ in resumed.turns), resumed.ended[0]]
    (joined,) = assemble_slot(rows, 9, 0)
    (reference,) = assemble_slot([*(row for _, row, _ in whole.turns), whole.ended[0]], 9, 0)
    assert joined.tokens.tolist() == reference.tokens.tolist()
    assert joined.mask.tolist() == reference.mask.tolist()
    assert joined.reward == reference.reward
    assert [b for b, _, _ in resumed.turns] == list(range(boundary + 1, 4))


class Restarting(Environment):
    max_new_tokens, max_turns = 1, 2

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> bytes:
        return b"{}"

    def episode(self) -> Episode:
        return _Restarting()


class _Restarting(Episode):
    checkpoint_mode = CheckpointMode.RESTART_ONLY

    async def reset(self, task: bytes, seed: int):
        return [Message("user", "?")]

    async def step(self, action: Action) -> StepResult:
        if action.text == "!":
            raise RuntimeError("broken world")
        return StepResult(action.text == "x", 1.0, [Message("user", ">")])


async def test_turns_of_an_environment_that_can_only_restart_come_with_the_end() -> None:
    sink = Sink()
    generate = scripted("a", "x", finish=Finish.LENGTH)
    seen: list[int] = []
    end = sink.end

    def ending(*said: Any) -> None:
        seen.append(len(sink.turns))
        end(*said)

    sink.end = ending
    await agent(Restarting(), generate, sink).run(dispatch(), [])
    assert seen == [1]
    assert msgspec.msgpack.decode(sink.turns[0][2], type=AgentState).environment == b""


async def test_a_broken_world_and_an_endless_one_raise_and_give_no_reward() -> None:
    for answers, error in (("!", RuntimeError), ("ab", ContinuationInvalid)):
        sink = Sink()
        with pytest.raises(error):
            await agent(Restarting(), scripted(*answers, finish=Finish.LENGTH), sink).run(dispatch(), [])
        assert sink.ended == []


async def test_an_aborted_generation_ends_the_attempt_without_a_reward() -> None:
    sink = Sink()
    with pytest.raises(GenerationAborted):
        await agent(make_environment("reverse", {}), scripted("a", finish=Finish.ABORT), sink).run(dispatch(), [])
    assert sink.ended == sink.turns == []


def test_an_import_path_names_an_environment_and_mistakes_are_the_users() -> None:
    assert isinstance(make_environment("tests.gpu.test_environments:Restarting", {}), Restarting)
    for name, options, says in (
        ("nothing", {}, "no environment 'nothing'"),
        ("no.such.module:X", {}, "No module named"),
        ("gpu.environments.guess:Nothing", {}, "Nothing"),
        ("guess", {"letters": 1}, "2 <= letters"),
        ("guess", {"compact_every": 0}, "compact_every >= 1"),
        ("guess", {"colour": 1}, "colour"),
        ("gpu.models.tokenizer:CharTokenizer", {}, "makes a CharTokenizer"),
    ):
        with pytest.raises(ConfigurationRefused, match=says) as caught:
            make_environment(name, options)
        assert caught.value.exit_code == 2
