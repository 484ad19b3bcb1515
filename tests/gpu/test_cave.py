"""The cave: its rules, and that an export after any turn has all of it, the dice too."""

from __future__ import annotations

import json

import pytest

from gpu.environments.base import Action, Episode
from gpu.environments.cave import Cave
from gpu.environments.registry import make_environment, topology_of
from storage.errors import ConfigurationRefused
from tests.gpu.agents import TOKENIZER, Sink, agent, dispatch, faked
from tests.gpu.crashes import play

TASK = json.dumps({"treasure": [2, 1], "pits": [[1, 1], [3, 3]]}).encode()
CALM = 1
"""A seed without a bat in the first turns."""


BATS = 30
"""A rollout that bats carry in its first and in its last turn."""


async def walk(episode: Episode, path: str) -> list[str]:
    said: list[str] = []
    for direction in path:
        result = await episode.step(Action(direction, True))
        said.append(str(result.reward) if result.done else result.messages[0].content)
    return said


async def test_the_world_says_what_is_near_and_pays_for_few_turns() -> None:
    episode = Cave().episode()
    (message,) = await episode.reset(TASK, CALM)
    assert message.content == "find the treasure. go n, e, s or w. 0,0>"
    assert await walk(episode, "nes") == ["0,0>", "1,0 breeze>", "0.0"], "a wall, and a pit"
    episode = Cave().episode()
    await episode.reset(TASK, CALM)
    assert await walk(episode, "ees") == ["1,0 breeze>", "2,0 glow>", "0.9"]
    episode = Cave(turns=2).episode()
    await episode.reset(TASK, CALM)
    assert await walk(episode, "?x") == ["0,0>", "0.0"], "out of turns"


async def test_the_bat_carries_to_any_cell_without_a_pit() -> None:
    found: set[str] = set()
    for seed in range(200):
        episode = Cave().episode()
        await episode.reset(TASK, seed)
        for said in await walk(episode, "n"):
            found.add(said)
    carried = {said.split()[2].rstrip(">") for said in found if said.startswith("a bat!")}
    assert len(carried) > 8
    assert not carried & {"1,1", "3,3", "2,1"}
    assert "1.0" in found, "even to the treasure"


def test_tasks_are_caves_of_their_own_and_the_same_for_ever() -> None:
    environment = make_environment("cave", {"tasks": 32})
    tasks = [json.loads(environment.task(index)) for index in range(len(environment))]
    assert len({str(task) for task in tasks}) > 28
    for task in tasks:
        hidden = [tuple(task["treasure"]), *map(tuple, task["pits"])]
        assert len(set(hidden)) == 3
        assert (0, 0) not in hidden
    assert environment.task(0) == Cave().task(0)
    assert topology_of(environment).episode == "export_restore"


@pytest.mark.parametrize("seed", range(20))
async def test_an_episode_that_is_exported_after_every_turn_is_the_same(seed: int) -> None:
    environment = Cave(turns=12)
    task, path = environment.task(seed), "esnwesssenwe"
    whole = environment.episode()
    await whole.reset(task, seed)
    moved = environment.episode()
    await moved.reset(task, seed)
    for direction in path:
        expected = await whole.step(Action(direction, True))
        assert await moved.step(Action(direction, True)) == expected
        if expected.done:
            break
        assert moved.export_state() == whole.export_state()
        again = environment.episode()
        await again.reset(task, seed)
        again.restore_state(moved.export_state())
        moved = again


@pytest.mark.parametrize("cut", range(10))
async def test_a_rollout_killed_after_any_turn_ends_as_if_it_had_not_been(cut: int) -> None:
    whole = await play(lambda attempt: Cave(), BATS, ["n"] * 10, 100)
    assert ["true" in said for said in _kept(*whole.sinks)] == [True, *[False] * 8, True]
    played = await play(lambda attempt: Cave(), BATS, ["n"] * 10, cut)
    assert (played.reward, played.restarted) == (whole.reward, False)
    assert _kept(*played.sinks) == _kept(*whole.sinks)


def _kept(*sinks: Sink) -> list[str]:
    return [
        record[1].call.record if record[0] == "end" else record[2].call.record for s in sinks for record in s.records
    ]


async def test_whatever_a_model_says_the_episode_ends() -> None:
    for group in range(8):
        sink = Sink()
        await agent(make_environment("cave", {}), faked(), sink).run(dispatch(group), [])
        assert 0.0 <= sink.ended[0].reward <= 1.0
    assert TOKENIZER.decode(sink.rows[0].tokens.tolist()).startswith("find the treasure")


def test_sizes_that_cannot_be_are_the_users_mistake() -> None:
    for options in ({"size": 1}, {"pits": 15}, {"pits": -1}, {"turns": 0}, {"tasks": 0}):
        with pytest.raises(ConfigurationRefused):
            make_environment("cave", options)
