"""Tasks of reasoning-gym: about a hundred generators of questions with answers that can be checked.

An entry is a function of the dataset's seed and its index, so a task is the same in every process. The reward is the
dataset's own score, in 0..1, of the answer that was found between its tags.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.packages import need
from gpu.models.tokenizer import Message
from storage.errors import ConfigurationRefused

DRIFTING = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Datasets whose entries depend on the order of Python's sets too, which is another one in each process."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""What scorers raise for an answer of a form that they do not know."""


class ReasoningGym(Environment):
    """`size` entries of `dataset` with that `seed`; `options` are the fields of its configuration. The dataset
    "composite" mixes others: its option `datasets` lists `{"name", "weight", "config"}`.

    `system_prompt` is the name of one of the package's prompts, or a text of your own; with an empty one the question
    stands alone. The answer is what stands between the last tags named `answer_tag`; with an empty one it is the whole
    text.
    """

    def __init__(
        self,
        dataset: str,
        size: int = 500,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        system_prompt: str = "default",
        answer_tag: str = "answer",
        max_new_tokens: int = 512,
    ) -> None:
        if size < 1 or max_new_tokens < 1:
            raise ValueError("size >= 1 and max_new_tokens >= 1")
        self.max_new_tokens = max_new_tokens
        self._dataset = _dataset(dataset, size, seed, options or {})
        utils = need("reasoning_gym.utils", "reasoning-gym")
        self._extract, self._tag = utils.extract_answer, answer_tag
        self._system = utils.SYSTEM_PROMPTS.get(system_prompt, system_prompt)

    @property
    def recipe(self) -> Sequence[type]:
        mixed = getattr(self._dataset, "datasets", {})
        return [type(self._dataset), *(type(dataset) for dataset in mixed.values())]

    def __len__(self) -> int:
        return len(self._dataset)

    def task(self, index: int) -> bytes:
        return json.dumps({"index": index, **self._dataset[index]}).encode()

    def episode(self) -> Episode:
        return _Question(self)

    def opening(self, question: str) -> Sequence[Message]:
        asked = Message("user", question)
        return [Message("system", self._system), asked] if self._system else [asked]

    def score(self, index: int, text: str) -> tuple[float, str]:
        """Of a completion; with the answer that was found, as JSON for people. The entry is made anew: some have
        parts that JSON does not keep."""
        answer = self._extract(text, self._tag) if self._tag else text.strip()
        try:
            reward = float(self._dataset.score_answer(answer, self._dataset[index]))
        except UNREADABLE as error:
            return 0.0, json.dumps({"answer": answer, "unreadable": repr(error)})
        return reward, json.dumps({"answer": answer})


class _Question(Episode):
    checkpoint_mode = CheckpointMode.STATELESS

    def __init__(self, environment: ReasoningGym) -> None:
        self._environment, self._index = environment, 0

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        entry = json.loads(task)
        self._index = entry["index"]
        return self._environment.opening(entry["question"])

    async def step(self, action: Action) -> StepResult:
        reward, record = await asyncio.to_thread(self._environment.score, self._index, action.text)
        return StepResult(True, reward, record=record)


def _dataset(name: str, size: int, seed: int, options: Mapping[str, Any]) -> Any:
    factory = need("reasoning_gym", "reasoning-gym").factory
    if name not in factory.DATASETS:
        raise ConfigurationRefused(
            f"no dataset {name!r} in reasoning-gym",
            expected=", ".join(sorted(factory.DATASETS)),
            action="check environment.options.dataset",
        )
    try:
        options = _mixture(options) if name == "composite" else options
        drifting = DRIFTING.intersection([name, *(one.name for one in options.get("datasets", ()))])
        if drifting:
            raise ValueError(f"entries of {', '.join(sorted(drifting))} depend on the order of Python's sets")
        return factory.create_dataset(name, size=size, seed=seed, **options)
    except (AssertionError, AttributeError) as error:  # how the package checks a configuration
        raise ValueError(str(error)) from error


def _mixture(options: Mapping[str, Any]) -> dict[str, Any]:
    spec = need("reasoning_gym.composite", "reasoning-gym").DatasetSpec
    return {**options, "datasets": [spec(**one) for one in options.get("datasets", ())]}
