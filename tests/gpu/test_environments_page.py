"""The code of docs/environments.md runs as it stands, and does what the page says."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from gpu.environments import registry
from gpu.environments.base import Environment
from gpu.environments.registry import make_environment, topology_of
from storage.errors import ConfigurationRefused
from tests.gpu.agents import Sink, agent, dispatch, interrupted, scripted

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


@pytest.fixture(autouse=True)
def my_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    (tmp_path / "my_tasks.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)


async def rewarded(environment: Environment, *answers: str) -> tuple[float, Sequence[str]]:
    sink, generate = Sink(), scripted(*answers)
    await agent(environment, generate, sink).run(dispatch(), [])
    return sink.ended[0].reward, generate.prompts


async def test_one_turn_is_asked_and_scored() -> None:
    environment = make_environment("my_tasks:Spelling", {"words": ["gate"]})
    assert await rewarded(environment, "etag") == (1.0, ["spell gate backwards: "])
    assert await rewarded(environment, "gate") == (0.0, ["spell gate backwards: "])
    with pytest.raises(ConfigurationRefused, match="at least one word"):
        make_environment("my_tasks:Spelling", {"words": []})


@pytest.mark.parametrize(
    ("name", "options", "answers", "reward"),
    [
        ("my_tasks:Countdown", {}, ["1", "x", "2", "2"], 1.0),
        ("my_tasks:Countdown", {}, ["x"] * 12, 0.0),
        ("my_tasks:Change", {}, ["20", "0", "what", "30", "done"], 1.0),
        ("my_tasks:Change", {}, ["40", "20", "101", "done"], 0.0),
        ("my_tasks:Change", {}, ["20", "30", "x", "x", "x", "x"], 1.0),
        (
            "gymnasium",
            {"env": "FrozenLake-v1", "text": "my_tasks:Compass", "options": {"is_slippery": False}},
            ["south", "up", "south", "east", "east", "south", "east"],
            1.0,
        ),
    ],
)
async def test_several_turns_go_on_from_each_of_them_after_a_crash(
    name: str, options: dict[str, Any], answers: list[str], reward: float
) -> None:
    for cut in range(1, len(answers)):
        environment = make_environment(name, options)
        whole, resumed = await interrupted(environment, answers, cut)
        for a, b in zip(whole, resumed, strict=True):
            assert (a.tokens.tolist(), a.mask.tolist(), a.reward) == (b.tokens.tolist(), b.mask.tolist(), b.reward)
        assert whole[0].reward == reward


async def test_the_till_counts_each_coin_once_and_says_why_not() -> None:
    reward, prompts = await rewarded(make_environment("my_tasks:Change", {}), "20", "0", "hm", "30", "done")
    assert reward == 1.0
    assert prompts[-1] == "make 50: 20 20. 0 1 to 100 cents. hm a number, or done. 30 50. "
    topology = topology_of(make_environment("my_tasks:Change", {}))
    assert (topology.episode, dict(topology.modes)) == ("export_restore", {"till": "export_restore"})


def test_a_name_of_its_own_loads_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    toml = re.search(r'\[project.entry-points."(.*?)"\]\n(\w+) = "(.*?)"', PAGE.read_text())
    assert toml is not None
    group, name, value = toml.groups()
    assert group == registry.GROUP
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint(name, value, group)])
    assert type(make_environment(name, {})).__name__ == "Spelling"


def test_the_table_names_every_built_in_environment_with_its_options() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE))
    assert list(rows) == list(registry.BUILT_IN)
    for name, options in rows.items():
        parameters = list(inspect.signature(registry._load(name)).parameters)
        assert re.findall(r"`(\w+)`", options) == parameters, name
