"""An environment that takes its time, so that a fast machine does not finish a run while a test looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gpu.environments.base import Action, CheckpointMode, Episode, StepResult
from gpu.environments.reverse import ReverseLetters
from gpu.models.tokenizer import Message


class Unhurried(ReverseLetters):
    """Reverse letters; each answer is thought about for `pause` seconds."""

    def __init__(self, letters: int, pause: float) -> None:
        super().__init__(letters)
        self._pause = pause

    def episode(self) -> Episode:
        return _Pausing(super().episode(), self._pause)


class _Pausing(Episode):
    checkpoint_mode = CheckpointMode.STATELESS

    def __init__(self, inner: Episode, pause: float) -> None:
        self._inner, self._pause = inner, pause

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        return await self._inner.reset(task, seed)

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self._pause)
        return await self._inner.step(action)
