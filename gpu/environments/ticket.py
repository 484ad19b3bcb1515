"""A ticket desk behind HTTP: half of the tasks only look something up, the others change the world outside.

A rollout that has only looked goes on after a crash; one that has opened a ticket, or may have, starts over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.http_tool import HttpTool
from gpu.environments.resources import ResourceHost, ToolError
from gpu.environments.slow_tool import TOPICS
from gpu.environments.words import command, spoken
from gpu.models.tokenizer import Message


class Ticket(Environment):
    """The desk is at `url` (see `gpu.environments.slow_tool`); without an answer within `timeout` seconds a rollout
    starts over. "?printer" asks for the priority of a topic, "+printer 3" opens a ticket and is told its number,
    "!3" answers.

    Tasks ask in turn for the priority of a topic, and for a ticket with the right priority; the answer is its number.
    The reward is 1 or 0, and 0 after `turns` answers.
    """

    max_new_tokens = 24

    def __init__(self, url: str, timeout: float = 30.0, turns: int = 5) -> None:
        if not url.startswith(("http://", "https://")) or timeout <= 0 or turns < 1:
            raise ValueError("url begins with http, timeout > 0 and turns >= 1")
        self._url, self._timeout = url, timeout
        self.max_turns = turns

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return {"desk": HttpTool(self._url, timeout_s=self._timeout)}

    def __len__(self) -> int:
        return 2 * len(TOPICS)

    def task(self, index: int) -> bytes:
        return json.dumps({"topic": sorted(TOPICS)[index // 2], "opens": index % 2 == 1}).encode()

    def episode(self) -> Episode:
        return _Request(self.max_turns)


class _Request(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self, turns: int) -> None:
        self._turns, self._used = turns, 0
        self._topic, self._opens = "", False
        self._right = ""
        """The answer, once it can be known."""

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        wanted = json.loads(task)
        self._topic, self._opens = wanted["topic"], wanted["opens"]
        self._right = "" if self._opens else str(TOPICS[self._topic])
        ask = "open a ticket for {} with its priority. its number?" if self._opens else "which priority has {}?"
        return [Message("user", f"{ask.format(self._topic)} ?topic to look up, +topic priority to open, !number>")]

    async def step(self, action: Action) -> StepResult:
        self._used += 1
        sign, rest = command(action.text, "?+!")
        record = json.dumps(action.text)
        if sign == "!":
            return StepResult(True, float(bool(rest) and rest == self._right), record=record)
        said = await self._asked(sign, rest)
        if self._used >= self._turns:
            return StepResult(True, 0.0, record=record)
        return StepResult(False, messages=[Message("user", spoken(said))], record=record)

    async def _asked(self, sign: str, rest: str) -> str:
        try:
            if sign == "?":
                return str(await self.tools.read("desk", "priority", {"topic": rest}))
            topic, _, priority = rest.partition(" ")
            if sign == "+" and priority.isdecimal():
                return await self._open({"topic": topic, "priority": int(priority)})
        except ToolError as error:
            return str(error)
        return "?topic, +topic priority or !number"

    async def _open(self, ticket: dict[str, Any]) -> str:
        number = str(await self.tools.call("desk", "open", ticket))
        if self._opens and ticket == {"topic": self._topic, "priority": TOPICS[self._topic]}:
            self._right = number
        return number

    def export_state(self) -> bytes:
        return json.dumps({"used": self._used, "right": self._right}).encode()

    def restore_state(self, data: bytes) -> None:
        state = json.loads(data)
        self._used, self._right = state["used"], state["right"]
