"""Environments of verifiers: its real tasksets, rewards and control flow around our agent loop."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpu.environments.base import Action, CheckpointMode, Environment
from gpu.environments.registry import make_environment, recipe_fingerprint
from gpu.environments.tools import NotContinuable
from storage.errors import ConfigurationRefused
from tests.gpu.agents import Sink, agent, dispatch, interrupted, scripted

installed = pytest.mark.skipif(find_spec("verifiers") is None, reason="pip install 'tidegate[verifiers]'")

SPELLING = """
import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Spelling"]


class SpellingConfig(vf.TasksetConfig):
    words: list[str] = ["tide", "gate", "wave"]
    endless: bool = False


class Word(vf.TaskData):
    answer: str


class Spell(vf.Task[Word]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def ended(self, trace) -> float:
        return float(not trace.is_truncated)

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns


class Spelling(vf.Taskset[Spell, SpellingConfig]):
    @property
    def bounded(self) -> bool:
        return not self.config.endless

    def load(self) -> Iterator[Spell]:
        words = self.config.words
        for word in itertools.cycle(words) if self.config.endless else words:
            yield Spell(Word(prompt=f"spell {word}: ", system_prompt="be brief. ", answer=word), self.config.task)
"""

GUESSING = """
import itertools

import verifiers.v1 as vf

__all__ = ["Guessing", "GuessingEnv"]
WORLDS = itertools.count()


class Hidden(vf.TaskData):
    number: int


class Guess(vf.Task[Hidden]):
    @vf.metric
    async def asked(self, trace) -> float:
        return sum(message.role == "user" for message in trace.messages)


class Guessing(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for number in range(3, 8):
            yield Guess(Hidden(prompt="guess: ", number=number), self.config.task)


class GuessingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    forgetful: str = ""


class GuessingEnv(vf.Env[GuessingConfig]):
    async def run(self, task, agents):
        another, tries = self.config.forgetful and next(WORLDS) % 2, 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                tries += 1
                if another and self.config.forgetful == "breaks":
                    raise RuntimeError("broken world")
                if another and self.config.forgetful == "ends":
                    break
                said = "what? " if another else "no. "
                segment = await interaction.turn(said)
        interaction.trace.record_reward("tries", 0.0 if segment.terminated else 1 - 0.1 * tries)
"""

UNFIT = """
import verifiers.v1 as vf

__all__ = ["Odd"]


class OddConfig(vf.TasksetConfig):
    kind: str


class Sandboxed(vf.Task[vf.TaskData]):
    @vf.reward
    async def tests(self, trace, runtime) -> float:
        return 1.0


class Prepared(vf.Task[vf.TaskData]):
    async def setup(self, trace, runtime) -> None:
        await runtime.run(["true"], {})


class Stopped(vf.Task[vf.TaskData]):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


class Boxed(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True


class Odd(vf.Taskset[vf.Task, OddConfig]):
    def load(self):
        prompt = "go" if self.config.kind != "Seen" else [
            vf.UserMessage(content=[{"type": "image_url", "image_url": {"url": "x"}}])
        ]
        if self.config.kind != "Empty":
            yield globals().get(self.config.kind, vf.Task)(vf.TaskData(prompt=prompt), self.config.task)
"""


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("tide_spelling", SPELLING), ("tide_guessing", GUESSING), ("tide_odd", UNFIT)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


def played(taskset: str = "tide-spelling", **options: Any) -> Environment:
    return make_environment("verifiers", {"taskset": taskset, **options})


@installed
@pytest.mark.usefixtures("tasksets")
async def test_an_answer_gets_the_weighted_rewards_of_its_task() -> None:
    environment = played()
    assert environment.episode().checkpoint_mode is CheckpointMode.STATELESS
    for answer, finished, reward in (("gate", True, 1.5), ("gate", False, 1.0), ("{[", True, 0.5), ("", False, 0.0)):
        episode = environment.episode()
        opening = await episode.reset(environment.task(1), 0)
        assert [tuple(message) for message in opening] == [("system", "be brief. "), ("user", "spell gate: ")]
        result = await episode.step(Action(answer, finished))
        assert (result.done, result.reward) == (True, reward)
        assert json.loads(result.record)["metrics"] == {"turns": 1.0}


@installed
@pytest.mark.usefixtures("tasksets")
def test_a_task_depends_on_the_index_and_the_configuration_alone() -> None:
    one, same, other = played(), played(), played(options={"words": ["ebb", "flow"]})
    assert [one.task(i) for i in (2, 0, 1)] == [same.task(i) for i in (2, 0, 1)]
    assert (len(one), len(other)) == (3, 2)
    assert one.task(0) != other.task(0)
    endless = played(options={"endless": True}, size=7)
    assert len(endless) == 7
    assert json.loads(endless.task(6))["data"]["answer"] == "tide"
    assert recipe_fingerprint(one) != recipe_fingerprint(played("tide-guessing"))


@installed
@pytest.mark.usefixtures("tasksets")
async def test_the_environment_answers_the_policy_until_it_ends() -> None:
    sink, generate = Sink(), scripted("1", "2", "3")
    await agent(played("tide-guessing"), generate, sink).run(dispatch(), [])
    assert generate.prompts == ["guess: ", "guess: 1no. ", "guess: 1no. 2no. "]
    assert sink.ended[0].reward == pytest.approx(0.8)
    assert json.loads(sink.ended[0].record) == {"rewards": {"tries": 0.8}, "metrics": {"asked": 3.0}}


@installed
@pytest.mark.usefixtures("tasksets")
async def test_after_the_last_turn_the_environment_scores_what_there_is() -> None:
    sink = Sink()
    await agent(played("tide-guessing", max_turns=2), scripted("1", "2"), sink).run(dispatch(), [])
    assert (len(sink.turns), sink.ended[0].reward) == (1, 0.0)


@installed
@pytest.mark.usefixtures("tasksets")
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_rollout_that_is_replayed_goes_on_with_the_same_tokens_and_reward(cut: int) -> None:
    whole, resumed = await interrupted(played("tide-guessing", restore="replay"), ["1", "9", "2", "3"], cut)
    for a, b in zip(whole, resumed, strict=True):
        assert (a.tokens.tolist(), a.mask.tolist(), a.reward) == (b.tokens.tolist(), b.mask.tolist(), b.reward)


@installed
@pytest.mark.usefixtures("tasksets")
@pytest.mark.parametrize("forgetful", ["says", "ends", "breaks"])
async def test_an_environment_that_says_something_else_makes_the_rollout_start_over(forgetful: str) -> None:
    environment = played("tide-guessing", config={"forgetful": forgetful}, restore="replay")
    with pytest.raises(NotContinuable):
        await interrupted(environment, ["1", "2", "3"], 2)


@installed
@pytest.mark.usefixtures("tasksets")
def test_conversations_start_over_unless_they_may_be_replayed() -> None:
    assert played("tide-guessing").episode().checkpoint_mode is CheckpointMode.RESTART_ONLY
    assert played("tide-guessing", restore="replay").episode().checkpoint_mode is CheckpointMode.EXPORT_RESTORE


@installed
@pytest.mark.usefixtures("tasksets")
async def test_what_the_environment_raises_ends_the_attempt_and_is_no_reward() -> None:
    environment = played("tide-guessing", config={"forgetful": "breaks"})
    sink = Sink()
    await agent(environment, scripted("3"), sink).run(dispatch(), [])
    with pytest.raises(RuntimeError, match="broken world"):
        await agent(environment, scripted("1"), sink).run(dispatch(), [])
    assert len(sink.ended) == 1


@installed
@pytest.mark.usefixtures("tasksets")
async def test_an_episode_that_is_given_up_leaves_nothing_running() -> None:
    environment = played("tide-guessing")
    episode = environment.episode()
    await episode.reset(environment.task(0), 0)
    await episode.step(Action("1", True))
    del episode
    gc.collect()
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@installed
@pytest.mark.usefixtures("tasksets")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"taskset": "no-such-taskset"}, "no_such_taskset"),
        ({"taskset": "tide-spelling", "env": "no-such-env"}, "no_such_env"),
        ({"taskset": "tide-spelling", "options": {"letters": 3}}, "letters"),
        ({"taskset": "tide-spelling", "options": {"endless": True}}, "needs a `size`"),
        ({"taskset": "tide-spelling", "size": 0}, "size"),
        ({"taskset": "tide-spelling", "restore": "rewind"}, "replay, restart"),
        ({"taskset": "tide-spelling", "env": "user-sim"}, "assistant, user"),
        ({"taskset": "tide-odd", "options": {"kind": "Sandboxed"}}, "asks for a runtime"),
        ({"taskset": "tide-odd", "options": {"kind": "Prepared"}}, "asks for a runtime"),
        ({"taskset": "tide-odd", "options": {"kind": "Stopped"}}, "hooks"),
        ({"taskset": "tide-odd", "options": {"kind": "Boxed"}}, "container"),
        ({"taskset": "tide-odd", "options": {"kind": "Seen"}}, "not text"),
        ({"taskset": "tide-odd", "options": {"kind": "Empty"}}, "no tasks"),
    ],
)
def test_what_can_not_be_played_in_process_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationRefused, match=why):
        make_environment("verifiers", options)


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigurationRefused, match=r"pip install 'tidegate\[verifiers\]'"):
        played()
