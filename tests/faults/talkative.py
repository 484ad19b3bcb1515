"""A ten-turn environment whose every answer changes a resource that outlives the workers, and the ledger that counts
the effects from outside."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.resources import Claim, Reply, Request, ResourceHost
from gpu.environments.sessions import Session, SessionHost
from gpu.models.tokenizer import Message

NAME = "tests.faults.talkative:Talkative"
TURNS = 10
MIXED = 3
"""Every third task uses the resource that can only restart."""
EFFECTS: dict[str, Counter[str]] = {}
"""By world: how often each request took effect."""
_HOSTS: dict[str, ResourceHost] = {}


class Book(Session):
    """Words in the order in which they were written."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        self.words.append(arguments["word"])
        return len(self.words)

    def export_state(self) -> bytes:
        return json.dumps(self.words).encode()

    def restore_state(self, data: bytes) -> None:
        self.words = json.loads(data)


class Elsewhere(SessionHost):
    """In a process that no test kills: what has begun there goes on, whatever becomes of the caller."""

    survives = True

    def __init__(self, world: str, **options: Any) -> None:
        super().__init__(lambda task, seed: Book(), **options)
        self._world = world

    async def call(self, session: str, claim: Claim, request: Request) -> Reply:
        return await asyncio.shield(asyncio.ensure_future(self._do(session, claim, request)))

    async def _do(self, session: str, claim: Claim, request: Request) -> Reply:
        await asyncio.sleep(0.001)
        before = self._held[session].revision if session in self._held else -1
        reply = await super().call(session, claim, request)
        if reply.revision > before:
            EFFECTS.setdefault(self._world, Counter())[request.id] += 1
        await asyncio.sleep(0.001)
        return reply


class Talkative(Environment):
    """`tasks` tasks; `mixed`: some write into a book that can only restart, beside the one that does not. A turn is one
    token; the reward is made of all words."""

    max_new_tokens, max_turns = 1, TURNS

    def __init__(self, world: str, tasks: int, mixed: bool = False) -> None:
        self._tasks, self._mixed = tasks, mixed
        self._hosts = {"book": _HOSTS.setdefault(f"{world}/book", Elsewhere(world))}
        if mixed:
            slip = Elsewhere(world, mode=CheckpointMode.RESTART_ONLY)
            self._hosts["slip"] = _HOSTS.setdefault(f"{world}/slip", slip)

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        return json.dumps({"slip": self._mixed and index % MIXED == 0}).encode()

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return self._hosts

    def episode(self) -> Episode:
        return _Talk()


class _Talk(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self) -> None:
        self._words: list[str] = []
        self._slip = False

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        self._slip = json.loads(task)["slip"]
        return [Message("user", "?")]

    async def step(self, action: Action) -> StepResult:
        self._words.append(action.text)
        count = await self.tools.call("book", "write", {"word": action.text})
        assert count == len(self._words), "the book has exactly the words of this rollout"
        if self._slip and len(self._words) == 2:
            await self.tools.call("slip", "write", {"word": action.text})
        done = len(self._words) == TURNS
        reward = sum(map(ord, "".join(self._words))) % 97 / 97
        return StepResult(done, reward, [Message("user", f"{count % 10}")], record=json.dumps(self._words))

    def export_state(self) -> bytes:
        return json.dumps(self._words).encode()

    def restore_state(self, data: bytes) -> None:
        self._words = json.loads(data)
