"""Gymnasium environments in words: real toy games, and worlds that forget what they said."""

from __future__ import annotations

import gc
import itertools
import json
import sys
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium import spaces

from gpu.environments.base import Action, Environment, Episode, StepResult
from gpu.environments.registry import make_environment, recipe_fingerprint, topology_of
from gpu.environments.tools import NotContinuable
from storage.errors import ConfigurationRefused
from tests.gpu.agents import Sink, agent, dispatch, interrupted, scripted

LAKE = {"env": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}
FIRM = {**LAKE, "options": {"is_slippery": False}}
SAFE = ("down", "down", "right", "right", "down", "right")


def played(**options: Any) -> Environment:
    return make_environment("gymnasium", options)


async def begun(environment: Environment, *words: str, index: int = 0) -> tuple[Episode, StepResult | None]:
    episode = environment.episode()
    await episode.reset(environment.task(index), 0)
    result = None
    for word in words:
        result = await episode.step(Action(word, True))
    return episode, result


async def test_the_goal_of_a_game_is_worth_its_reward_and_a_hole_nothing() -> None:
    for words, reward in ((SAFE, 1.0), (("right", "down"), 0.0)):
        _, result = await begun(played(**FIRM), *words)
        assert result is not None
        assert (result.done, result.reward) == (True, reward)


async def test_a_policy_reads_what_the_game_shows_and_says_actions_by_name() -> None:
    sink, generate = Sink(), scripted("go down", "*", "i go up no down!", *SAFE[2:])
    await agent(played(**FIRM, rules="find g: "), generate, sink).run(dispatch(), [])
    assert generate.prompts[0] == "find g: 0"
    assert generate.prompts[1:3] == ["find g: 0go down4", "find g: 0go down4*say one of: left, down, right, up"]
    assert sink.ended[0].reward == 1.0
    assert json.loads(sink.turns[1][1].record) == {"action": None, "reward": 0.0}


async def test_a_picture_in_letters_marks_what_its_colours_mark() -> None:
    environment = played(**FIRM, render=True)
    (shown,) = await environment.episode().reset(environment.task(0), 0)
    assert shown.content == "[S]FFF\nFHFH\nFFFH\nHFFG"


async def test_an_episode_ends_after_its_last_turn_with_the_reward_so_far() -> None:
    _, result = await begun(played(**FIRM, max_turns=3), "left", "?", "left")
    assert result is not None
    assert (result.done, result.reward) == (True, 0.0)


@pytest.mark.parametrize("env", ["Taxi-v4", "Blackjack-v1", "FrozenLake8x8-v1"])
async def test_the_games_that_gymnasium_ships_can_be_played_by_the_numbers_of_their_actions(env: str) -> None:
    for index in range(3):
        _, result = await begun(played(env=env, max_turns=2), "0", "1", index=index)
        assert result is not None


def test_a_task_depends_on_the_index_the_seed_and_nothing_else() -> None:
    one, same, other = played(**LAKE, tasks=50), played(**LAKE, tasks=50), played(**LAKE, tasks=50, seed=1)
    tasks = [one.task(i) for i in range(50)]
    assert tasks == [same.task(i) for i in range(50)]
    assert len({json.loads(task)["seed"] for task in (*tasks, *(other.task(i) for i in range(50)))}) == 100


@pytest.mark.parametrize("cut", [1, 2, 5, 7])
@pytest.mark.parametrize(
    ("game", "answers"),
    [
        (LAKE, ["down", "what", "left", "down", "right", "right", "down", "right"]),
        ({"env": "Taxi-v4"}, ["0", "4", "5", "what", "1", "2", "0", "5"]),
    ],
)
async def test_a_rollout_killed_after_any_turn_goes_on_with_the_same_tokens_and_reward(
    game: dict[str, Any], answers: list[str], cut: int
) -> None:
    whole, resumed = await interrupted(played(**game, max_turns=8), answers, cut)
    for a, b in zip(whole, resumed, strict=True):
        assert (a.tokens.tolist(), a.mask.tolist(), a.reward) == (b.tokens.tolist(), b.mask.tolist(), b.reward)


async def test_what_was_dealt_is_dealt_again() -> None:
    environment = played(env="Blackjack-v1", actions=["stick", "hit"])
    indices = [i for i in range(40) if not (await begun(environment, "hit", index=i))[1].done]
    assert len(indices) > 10
    for index in indices:
        first, _ = await begun(environment, "hit", index=index)
        state = first.export_state()
        second, _ = await begun(environment, index=index)
        second.restore_state(state)
        assert second.export_state() == state
        assert await first.step(Action("stick", True)) == await second.step(Action("stick", True))


class Forgetful(gymnasium.Env[str, str]):
    """Says something else in each new world, of which `worlds` counts."""

    observation_space = action_space = spaces.Text(20, charset="abcdefghijklmnopqrstuvwxyz 0123456789")
    worlds = itertools.count()
    closed: ClassVar[list[int]] = []

    def __init__(self, form: str = "says") -> None:
        self._form, self._world = form, next(self.worlds)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "hello", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        fresh = self._world % 2 == 0
        if self._form == "breaks" and not fresh:
            raise RuntimeError("broken world")
        ended = self._form == "ends" and not fresh
        said = f"world {self._world}" if self._form == "says" else f"you said {action}"
        return said, 0.5 if self._form == "pays" and not fresh else 0.0, ended, action == "bye", {}

    def close(self) -> None:
        self.closed.append(self._world)


gymnasium.register("tests/Forgetful-v0", entry_point=Forgetful)
gymnasium.register("tests/Chance-v0", entry_point=Forgetful, nondeterministic=True)


@pytest.mark.parametrize("form", ["says", "pays", "ends", "breaks"])
async def test_a_world_that_is_another_one_after_a_crash_makes_the_rollout_start_over(form: str) -> None:
    environment = played(env="tests/Forgetful-v0", options={"form": form})
    Forgetful.worlds = itertools.count()
    with pytest.raises(NotContinuable, match="start"):
        await interrupted(environment, ["a", "b", "bye"], 2)


async def test_texts_are_actions_and_observations_as_they_stand() -> None:
    generate = scripted("hi you", "bye")
    await agent(played(env="tests/Forgetful-v0", options={"form": "echoes"}), generate, Sink()).run(dispatch(), [])
    assert generate.prompts == ["hello", "hellohi youyou said hi you"]


async def test_worlds_are_closed_when_their_episodes_are_gone() -> None:
    environment = played(env="tests/Forgetful-v0")
    Forgetful.closed.clear()
    episode, _ = await begun(environment, "a")
    assert Forgetful.closed == []
    del episode
    gc.collect()
    assert len(Forgetful.closed) == 1


def test_what_can_not_be_replayed_starts_over() -> None:
    for options, mode in (
        ({"env": "tests/Forgetful-v0"}, "export_restore"),
        ({"env": "tests/Forgetful-v0", "restore": "restart"}, "restart_only"),
        ({"env": "tests/Chance-v0"}, "restart_only"),
        ({"env": "tests/Chance-v0", "restore": "replay"}, "export_restore"),
    ):
        assert topology_of(played(**options)).episode == mode


class Shouting:
    """A text of our own: compass points, with what came of the last one."""

    def __init__(self, env: Any) -> None:
        self._points = dict(zip("wsen", range(env.action_space.n), strict=True))

    def show(self, observation: Any, reward: float, info: Any) -> str:
        return f"at {observation}, {reward:g} more"

    def parse(self, text: str) -> int:
        if text not in self._points:
            raise ValueError("w, s, e or n")
        return self._points[text]


async def test_a_text_of_ones_own_shows_and_parses() -> None:
    environment = played(env="FrozenLake-v1", options={"is_slippery": False}, text=f"{__name__}:Shouting")
    generate = scripted("s", "down", *"seese")
    sink = Sink()
    await agent(environment, generate, sink).run(dispatch(), [])
    assert generate.prompts[2] == "at 0, 0 mores" + "at 4, 0 moredown" + "w, s, e or n"
    assert sink.ended[0].reward == 1.0


def test_the_code_of_the_game_is_part_of_the_recipe() -> None:
    assert recipe_fingerprint(played(**LAKE)) == recipe_fingerprint(played(env="FrozenLake8x8-v1"))
    assert recipe_fingerprint(played(**LAKE)) != recipe_fingerprint(played(env="Taxi-v4"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "env"),
        ({"env": "FrozenLake-v99"}, "FrozenLake"),
        ({"env": "no_such_package:Lake-v0"}, "no_such_package"),
        ({"env": "FrozenLake-v1", "options": {"slippery": True}}, "slippery"),
        ({"env": "FrozenLake-v1", "actions": ["left", "right"]}, "4 different words"),
        ({"env": "FrozenLake-v1", "actions": ["left", "left", "right", "up"]}, "4 different words"),
        ({"env": "FrozenLake-v1", "restore": "rewind"}, "replay, restart"),
        ({"env": "FrozenLake-v1", "max_turns": 0}, "max_turns"),
        ({"env": "Blackjack-v1", "render": True}, "does not render as text"),
        ({"env": "MountainCarContinuous-v0"}, "a `text` of their own"),
        ({"env": "FrozenLake-v1", "text": "no_such_module:text"}, "no_such_module"),
        ({"env": "FrozenLake-v1", "text": f"{__name__}:Shouting", "render": True}, "without a `text`"),
    ],
)
def test_options_that_can_not_be_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationRefused, match=why):
        played(**options)


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigurationRefused, match=r"pip install 'tidegate\[gymnasium\]'"):
        played(**LAKE)
