"""One-digit addition in words: the demo task of a real language model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.models.tokenizer import Message


class Addition(Environment):
    """a + b for a, b in 1..`largest`; the reward is 1 when the last number in the answer is the sum."""

    max_new_tokens = 12

    def __init__(self, largest: int = 9) -> None:
        if largest < 1:
            raise ValueError("largest >= 1")
        self._largest = largest

    def __len__(self) -> int:
        return self._largest**2

    def task(self, index: int) -> bytes:
        a, b = divmod(index, self._largest)
        return json.dumps({"a": a + 1, "b": b + 1}).encode()

    def episode(self) -> Episode:
        return _Sum()


class _Sum(Episode):
    checkpoint_mode = CheckpointMode.STATELESS
    _sum = 0

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        numbers = json.loads(task)
        self._sum = numbers["a"] + numbers["b"]
        return [Message("user", f"What is {numbers['a']}+{numbers['b']}? Reply with only the number.")]

    async def step(self, action: Action) -> StepResult:
        found = re.findall(r"\d+", action.text)
        return StepResult(True, float(bool(found) and int(found[-1]) == self._sum), record=json.dumps(action.text))
