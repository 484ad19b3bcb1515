"""Guess a hidden letter in a few turns: a multi-turn game with hidden state that survives a kill at any turn."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.models.tokenizer import Message


class GuessLetter(Environment):
    """Letters a..(`letters`-th); each wrong guess is answered "<" or ">" (the hidden letter is before or after it).

    The reward is 1 - 0.1 per wrong guess, and 0 when `turns` guesses were wrong. The first token is the guess.
    With `compact_every` k the conversation is compacted after every k wrong guesses: a new one opens with what is
    known, "d?k" for a letter between d and k.
    """

    def __init__(self, letters: int = 16, turns: int = 5, compact_every: int | None = None) -> None:
        if not 2 <= letters <= 26 or turns < 1 or (compact_every is not None and compact_every < 1):
            raise ValueError("2 <= letters <= 26, turns >= 1 and compact_every >= 1")
        self._letters, self._compact_every = letters, compact_every
        self.max_turns = turns
        self.max_new_tokens = 1

    def __len__(self) -> int:
        return self._letters

    def task(self, index: int) -> bytes:
        return json.dumps({"letter": chr(ord("a") + index)}).encode()

    def episode(self) -> Episode:
        return _Guess(self.max_turns, self._compact_every)


class _Guess(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self, turns: int, compact_every: int | None) -> None:
        self._turns, self._compact_every = turns, compact_every
        self._used, self._letter = 0, ""
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
        if self._compact_every is not None and self._used % self._compact_every == 0:
            return StepResult(False, messages=[Message("user", self._known())], record=record, new_context=True)
        hint = "<" if self._letter < guess else ">"
        return StepResult(False, messages=[Message("user", hint)], record=record)

    def _known(self) -> str:
        letters = [guess for guess in self._asked if "a" <= guess <= "z"]
        below = max((guess for guess in letters if guess < self._letter), default="")
        above = min((guess for guess in letters if guess > self._letter), default="")
        return f"{below}?{above}"

    def export_state(self) -> bytes:
        return json.dumps({"letter": self._letter, "used": self._used, "asked": self._asked}).encode()

    def restore_state(self, data: bytes) -> None:
        state = json.loads(data)
        self._letter, self._used, self._asked = state["letter"], state["used"], state["asked"]
