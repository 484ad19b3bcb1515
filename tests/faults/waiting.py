"""An environment in which some tasks wait until a test lets them go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gpu.environments.base import Action, Environment, Episode, StepResult
from gpu.models.tokenizer import Message

NAME = f"{__name__}:Waiting"


class Waiting(Environment):
    """Tasks of one or two turns; after the first, those from `free` on wait for `gate`. `waits` counts who waited."""

    max_new_tokens = 4
    gate = asyncio.Event()
    waits = 0

    def __init__(self, tasks: int, free: int, turns: int = 1) -> None:
        self._tasks, self._free, self.max_turns = tasks, free, turns

    @classmethod
    def shut(cls) -> None:
        cls.gate, cls.waits = asyncio.Event(), 0

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        return b"wait" if index >= self._free else b"go"

    def episode(self) -> Episode:
        return _Waiting(self.max_turns)


class _Waiting(Episode):
    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._waits = False

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        self._waits = task == b"wait"
        return [Message("user", "a>")]

    async def step(self, action: Action) -> StepResult:
        if self._waits:
            self._waits = False
            Waiting.waits += 1
            await Waiting.gate.wait()
        self._turns -= 1
        return StepResult(True, 1.0) if not self._turns else StepResult(False, messages=[Message("user", "b>")])
