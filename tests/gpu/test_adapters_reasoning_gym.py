"""Questions of reasoning-gym, scored by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpu.environments.base import Action, CheckpointMode, Environment
from gpu.environments.registry import make_environment, recipe_fingerprint
from storage.errors import ConfigurationRefused

pytest.importorskip("reasoning_gym", reason="its dependency pycosat needs a C compiler: make test says so")

DATASETS = ("leg_counting", "basic_arithmetic", "sokoban", "countdown", "prime_factorization", "mini_sudoku", "arc_agi")


def questions(dataset: str = "leg_counting", **options: object) -> Environment:
    return make_environment("reasoning_gym", {"dataset": dataset, "size": 6, **options})


async def answered(environment: Environment, index: int, text: str) -> tuple[float, dict[str, object]]:
    episode = environment.episode()
    await episode.reset(environment.task(index), 0)
    result = await episode.step(Action(text, True))
    assert result.done
    return result.reward, json.loads(result.record)


@pytest.mark.parametrize("dataset", DATASETS)
async def test_a_right_answer_scores_one_and_garbage_less(dataset: str) -> None:
    environment = questions(dataset)
    for index in range(3):
        answer = json.loads(environment.task(index))["answer"]
        assert (await answered(environment, index, f"let me think <answer>{answer}</answer>"))[0] == 1.0
        for garbage in ("", "no tags", "<answer></answer>", "<answer>garbage</answer>", "<answer>{[(</answer>"):
            assert 0.0 <= (await answered(environment, index, garbage))[0] < 1.0


async def test_an_answer_that_its_scorer_can_not_read_is_worth_nothing_and_says_why() -> None:
    reward, record = await answered(questions("prime_factorization"), 0, "<answer>seven</answer>")
    assert reward == 0.0
    assert "ValueError" in str(record["unreadable"])


async def test_the_prompt_and_the_tag_can_be_chosen() -> None:
    environment = questions(system_prompt="", answer_tag="")
    answer = json.loads(environment.task(0))["answer"]
    assert await answered(environment, 0, f" {answer}\n") == (1.0, {"answer": answer})
    for prompt, roles in (("", ["user"]), ("simple", ["system", "user"]), ("be brief", ["system", "user"])):
        messages = await questions(system_prompt=prompt).episode().reset(environment.task(0), 0)
        assert [message.role for message in messages] == roles
    assert messages[0].content == "be brief"
    assert messages[1].content == json.loads(environment.task(0))["question"]


def test_a_task_depends_on_the_index_the_seed_and_nothing_else() -> None:
    one, same, other = questions(), questions(), questions(seed=1)
    assert len(one) == 6
    assert [one.task(i) for i in (5, 0, 3)] == [same.task(i) for i in (5, 0, 3)]
    assert one.task(0) != one.task(1)
    assert one.task(0) != other.task(0)


def test_tasks_are_the_same_in_a_process_with_another_hash_seed() -> None:
    code = (
        "from gpu.environments.registry import make_environment as make\n"
        f"for name in {DATASETS!r}:\n"
        "    print(make('reasoning_gym', {'dataset': name, 'size': 4}).task(3).decode())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    made = [make_environment("reasoning_gym", {"dataset": name, "size": 4}).task(3).decode() for name in DATASETS]
    assert said.splitlines() == made


async def test_datasets_can_be_mixed() -> None:
    mixed = [{"name": name, "weight": 1, "config": {}} for name in ("leg_counting", "basic_arithmetic")]
    environment = make_environment(
        "reasoning_gym", {"dataset": "composite", "size": 20, "options": {"datasets": mixed}}
    )
    entries = [json.loads(environment.task(i)) for i in range(20)]
    assert {entry["metadata"]["source_dataset"] for entry in entries} == {"leg_counting", "basic_arithmetic"}
    for index, entry in enumerate(entries):
        assert (await answered(environment, index, f"<answer>{entry['answer']}</answer>"))[0] == 1.0
    assert recipe_fingerprint(environment) != recipe_fingerprint(questions())


def test_a_rollout_has_nothing_to_restore() -> None:
    assert questions().episode().checkpoint_mode is CheckpointMode.STATELESS


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "dataset"),
        ({"dataset": "leg_countin"}, "leg_counting"),
        ({"dataset": "leg_counting", "size": 0}, "size >= 1"),
        ({"dataset": "leg_counting", "options": {"legs": 3}}, "legs"),
        ({"dataset": "leg_counting", "options": {"seed": 3}}, "seed"),
        ({"dataset": "leg_counting", "options": {"min_animals": 9, "max_animals": 2}}, "max_animals"),
        ({"dataset": "word_ladder"}, "order of Python's sets"),
        ({"dataset": "composite", "options": {"datasets": []}}, "at least one dataset"),
        ({"dataset": "composite", "options": {"datasets": ["leg_counting"]}}, "mapping"),
        (
            {"dataset": "composite", "options": {"datasets": [{"name": "ransom_note", "weight": 1, "config": {}}]}},
            "order of Python's sets",
        ),
    ],
)
def test_options_that_can_not_be_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigurationRefused, match=why):
        make_environment("reasoning_gym", options)


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigurationRefused, match=r"pip install 'tidegate\[reasoning-gym\]'"):
        questions()
