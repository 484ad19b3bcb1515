"""Tasks for SQL: a table is made, filled and asked. Each statement of the policy takes effect once, whatever dies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.resources import ResourceHost, ToolError
from gpu.environments.sqlite_host import SqliteHost
from gpu.environments.words import command, spoken
from gpu.models.tokenizer import Message

ROWS = 3
_FENCE = re.compile(r"^```\w*\s*|\s*```$")
_QUESTIONS = ("the sum of v", "the largest v", "how many v are over 50")


class Workspace(Environment):
    """`tasks` tables of three rows to make and to ask. Each answer is one SQL statement, "!84" is final. Half of the
    reward is for the table, half for the answer; after `turns` answers without a final one it is 0.

    `folder` is where each node keeps the databases, see `SqliteHost`.
    """

    def __init__(self, folder: str | None = None, turns: int = 6, tokens: int = 64, tasks: int = 256) -> None:
        if turns < 1 or tokens < 1 or tasks < 1:
            raise ValueError("turns >= 1, tokens >= 1 and tasks >= 1")
        self._folder, self._tasks = folder, tasks
        self.max_turns, self.max_new_tokens = turns, tokens

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return {"workspace": SqliteHost(self._folder)}

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        drawn = hashlib.sha256(f"workspace {index}".encode()).digest()
        values = [drawn[row] % 100 for row in range(ROWS)]
        answers = (sum(values), max(values), sum(value > 50 for value in values))
        asked = index % len(_QUESTIONS)
        return json.dumps({"values": values, "question": _QUESTIONS[asked], "answer": answers[asked]}).encode()

    def episode(self) -> Episode:
        return _Work(self.max_turns)


class _Work(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self, turns: int) -> None:
        self._turns, self._used = turns, 0
        self._rows: list[list[int]] = []
        self._answer = 0

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        wanted = json.loads(task)
        self._rows = [[key, value] for key, value in enumerate(wanted["values"], 1)]
        self._answer = wanted["answer"]
        rows = ", ".join(f"{key} {value}" for key, value in self._rows)
        return [Message("user", f"sql: make table t(k, v) of {rows}. {wanted['question']}? !number to answer>")]

    async def step(self, action: Action) -> StepResult:
        self._used += 1
        sign, rest = command(action.text, "!")
        record = json.dumps(action.text)
        if sign == "!":
            made = await self._said("select k, v from t order by k")
            right = (rest == str(self._answer)) + (made == json.dumps(self._rows))
            return StepResult(True, right / 2, record=record)
        said = await self._said(_FENCE.sub("", rest))
        if self._used >= self._turns:
            return StepResult(True, 0.0, record=record)
        return StepResult(False, messages=[Message("user", spoken(said))], record=record)

    async def _said(self, sql: str) -> str:
        reads = sql.lstrip("( ").lower().startswith(("select", "values", "explain"))
        try:
            if reads:
                return json.dumps((await self.tools.read("workspace", "query", {"sql": sql}))["rows"])
            done = await self.tools.call("workspace", "execute", {"sql": sql})
        except ToolError as error:
            return str(error)
        return json.dumps(done["rows"]) if done["rows"] else f"{done['changed']} changed"

    def export_state(self) -> bytes:
        return json.dumps({"used": self._used}).encode()

    def restore_state(self, data: bytes) -> None:
        self._used = json.loads(data)["used"]
