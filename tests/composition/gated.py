"""An environment whose tool keeps rollouts waiting until a test opens its gate: a file, to work across processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from gpu.environments.base import Action, Environment, Episode, StepResult
from gpu.models.tokenizer import Message

NAME = f"{__name__}:Gated"
OPEN, WAITS, PASSED = "open", "waits", "passed"


class Gated(Environment):
    """Two turns. Between them, tasks from `free` on wait for the file `folder`/open, and leave a mark before and after.

    Rewards have so fine a grain that siblings always differ: every step has something to learn from."""

    max_turns = 2
    max_new_tokens = 6

    def __init__(self, folder: str, tasks: int, free: int) -> None:
        self._folder, self._tasks, self._free = Path(folder), tasks, free

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        return json.dumps({"index": index}).encode()

    def episode(self) -> Episode:
        return _Gated(self._folder, self._free)


class _Gated(Episode):
    def __init__(self, folder: Path, free: int) -> None:
        self._folder, self._free = folder, free
        self._name, self._index, self._said = "", 0, ""

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        self._index = json.loads(task)["index"]
        self._name = f"{self._index}-{seed}"
        return [Message("user", f"{self._index}>")]

    async def step(self, action: Action) -> StepResult:
        if self._said:
            letters = f"{self._said}{action.text}"
            return StepResult(True, sum(map(ord, letters)) / 128 / len(letters))
        self._said = f"{action.text}|"
        if self._index >= self._free:
            (self._folder / f"{WAITS}-{self._name}").touch()
            await self._gate()
            (self._folder / f"{PASSED}-{self._name}").touch()
        return StepResult(False, messages=[Message("user", "again>")])

    async def _gate(self) -> None:
        while not (self._folder / OPEN).exists():  # noqa: ASYNC110 - who opens it is another process
            await asyncio.sleep(0.005)


def marks(folder: Path, what: str) -> int:
    """How many rollouts have left that mark."""
    return len(list(folder.glob(f"{what}-*")))
