"""Guess a hidden letter in a few turns: a multi-turn game with hidden state that survives a kill at any turn."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.models.tokenizer import Message


class GuessLetter(Environment):
    """Letters a..(`letters`-th); each wrong guess is answered "<" or ">" (the hidden letter is before or after it).

    The reward is 1 - 0.1 per wrong guess, and 0 when `turns` guesses were wrong. The first token is the guess.
    """

    def __init__(self, letters: int = 16, turns: int = 5) -> None:
        if not 2 <= letters <= 26 or turns < 1:
            raise ValueError("2 <= letters <= 26 and turns >= 1")
        self._letters = letters
        self.max_turns = turns
        self.max_new_tokens = 1

    def __len__(self) -> int:
        return self._letters

    def task(self, index: int) -> bytes:
        return json.dumps({"letter": chr(ord("a") + index)}).encode()

    def episode(self) -> Episode:
        return _Guess(self.max_turns)


class _Guess(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self, turns: int) -> None:
        self._turns, self._used, self._letter = turns, 0, ""
        self._asked: list[str] = []

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        self._letter = json.loads(task)["letter"]
        return [Message("user", "?")]

    async def step(self, action: Action) -> StepResult:
        guess = action.text[:1]
        self._used += 1
        self._asked.append(guess)
        record = json.dumps({"asked": self._asked})
        if guess == self._letter:
            return StepResult(True, 1.0 - 0.1 * (self._used - 1), record=record)
        if self._used >= self._turns:
            return StepResult(True, 0.0, record=record)
        hint = "<" if self._letter < guess else ">"
        return StepResult(False, messages=[Message("user", hint)], record=record)

    def export_state(self) -> bytes:
        return json.dumps({"letter": self._letter, "used": self._used, "asked": self._asked}).encode()

    def restore_state(self, data: bytes) -> None:
        state = json.loads(data)
        self._letter, self._used, self._asked = state["letter"], state["used"], state["asked"]
