"""Reverse a few letters: the demo task of the tiny model, learnable from random weights in about 200 steps."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.models.tokenizer import Message


class ReverseLetters(Environment):
    """All words of `letters` letters over `alphabet`; "bac>" asks for "cab" and the end of the turn."""

    def __init__(self, letters: int = 3, alphabet: str = "abcd") -> None:
        if letters < 1 or not alphabet:
            raise ValueError("letters >= 1 and a non-empty alphabet")
        self._words = ["".join(word) for word in itertools.product(alphabet, repeat=letters)]
        self.max_new_tokens = letters + 2

    def __len__(self) -> int:
        return len(self._words)

    def task(self, index: int) -> bytes:
        return json.dumps({"word": self._words[index]}).encode()

    def episode(self) -> Episode:
        return _Reverse()


class _Reverse(Episode):
    checkpoint_mode = CheckpointMode.STATELESS
    _answer = ""

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        word = json.loads(task)["word"]
        self._answer = word[::-1]
        return [Message("user", f"{word}>")]

    async def step(self, action: Action) -> StepResult:
        """Share of right positions over the longer of answer and output; ending the turn counts as one."""
        answer, output = self._answer + "\n", action.text + "\n" * action.finished
        right = sum(a == b for a, b in zip(answer, output, strict=False))
        return StepResult(True, right / max(len(answer), len(output)))
