"""Sums in words with a calculator: the tool only answers, so there is nothing to lose when a process dies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu.environments.arithmetic import evaluate
from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.resources import ResourceHost, ToolError
from gpu.environments.sessions import Session, SessionHost
from gpu.environments.words import command, spoken
from gpu.models.tokenizer import Message

_Numbers = tuple[int, int, int]
_STORIES: tuple[tuple[str, Callable[[_Numbers], int]], ...] = (
    ("{0} rows of {1} seats, {2} are taken. how many are free?", lambda n: n[0] * n[1] - n[2]),
    ("{0} and {1} nuts, {2} in a bag. how many full bags?", lambda n: (n[0] + n[1]) // n[2]),
    ("{0} bags of {1} nuts, shared by {2}. how many are left over?", lambda n: n[0] * n[1] % n[2]),
    ("{0} and {1} boxes, {2} cups in each. how many cups?", lambda n: (n[0] + n[1]) * n[2]),
)


class Calculate(Environment):
    """`tasks` questions of two operations. An answer "=12*7" has the expression evaluated, its value is the next
    message; "!84" is final, and right or wrong: the reward is 1 or 0. After `turns` answers it is 0."""

    max_new_tokens = 32

    def __init__(self, turns: int = 4, tasks: int = 256) -> None:
        if turns < 1 or tasks < 1:
            raise ValueError("turns >= 1 and tasks >= 1")
        self.max_turns, self._tasks = turns, tasks

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return {"calculator": SessionHost(lambda task, seed: _Calculator(), mode=CheckpointMode.STATELESS)}

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        drawn = hashlib.sha256(f"calculate {index}".encode()).digest()
        numbers = (11 + drawn[0] % 80, 11 + drawn[1] % 80, 3 + drawn[2] % 7)
        story, answer = _STORIES[index % len(_STORIES)]
        return json.dumps({"question": story.format(*numbers), "answer": answer(numbers)}).encode()

    def episode(self) -> Episode:
        return _Question(self.max_turns)


class _Question(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self, turns: int) -> None:
        self._turns, self._used, self._answer = turns, 0, 0

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        asked = json.loads(task)
        self._answer = asked["answer"]
        return [Message("user", f"{asked['question']} =expression to compute, !number to answer>")]

    async def step(self, action: Action) -> StepResult:
        self._used += 1
        sign, rest = command(action.text, "=!")
        record = json.dumps(action.text)
        if sign == "!" or self._used >= self._turns:
            return StepResult(True, float(sign == "!" and rest == str(self._answer)), record=record)
        said = await self._computed(rest) if sign == "=" else "=expression or !number"
        return StepResult(False, messages=[Message("user", spoken(said))], record=record)

    async def _computed(self, expression: str) -> str:
        try:
            return str(await self.tools.read("calculator", "evaluate", {"expression": expression}))
        except ToolError as error:
            return str(error)

    def export_state(self) -> bytes:
        return json.dumps({"used": self._used}).encode()

    def restore_state(self, data: bytes) -> None:
        self._used = json.loads(data)["used"]


class _Calculator(Session):
    def handle(self, operation: str, arguments: dict[str, Any]) -> int | float:
        if operation != "evaluate":
            raise ToolError(f"no operation {operation}")
        return evaluate(arguments["expression"])
