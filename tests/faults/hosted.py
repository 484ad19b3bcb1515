"""Three turns, each of which changes a session on a host behind HTTP that also keeps the result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.participants.client import HttpHost
from gpu.environments.participants.transport import Transport
from gpu.environments.resources import ResourceHost
from gpu.models.tokenizer import Message

NAME = f"{__name__}:Hosted"
TURNS = 3


class Hosted(Environment):
    max_turns, max_new_tokens = TURNS, 1

    def __init__(self, url: str, tasks: int) -> None:
        self._url, self._tasks = url, tasks

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        return json.dumps({"index": index}).encode()

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return {"notes": HttpHost(Transport(self._url, "notes"))}

    def episode(self) -> Episode:
        return _Hosted()


class _Hosted(Episode):
    """What it knows is on the host."""

    checkpoint_mode = CheckpointMode.STATELESS

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        self._index = json.loads(task)["index"]
        return [Message("user", "?")]

    async def step(self, action: Action) -> StepResult:
        count = await self.tools.call("notes", "add", {"by": 1})
        return StepResult(count == TURNS, (self._index + sum(map(ord, action.text))) % 7 / 7, [Message("user", ".")])
