"""A treasure in a dark cave: a text game with hidden state and chance, which goes on from an export after any turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.models.tokenizer import Message

BAT = 0.125
"""Chance in each turn that a bat carries the player to another cell without a pit."""


class Cell(NamedTuple):
    x: int
    y: int

    def near(self, other: Cell) -> bool:
        return abs(self.x - other.x) + abs(self.y - other.y) == 1


STEPS = {"n": Cell(0, -1), "e": Cell(1, 0), "s": Cell(0, 1), "w": Cell(-1, 0)}


class Cave(Environment):
    """`tasks` caves of `size` x `size` cells with one treasure and `pits` pits; the player begins at 0,0 and goes n, e,
    s or w, the first letter of the answer. The world says where the player is, "breeze" beside a pit and "glow" beside
    the treasure; walls and other answers cost a turn.

    The reward of the treasure is 1 - 0.5 / `turns` for each turn before it; a pit, or `turns` turns without it, give 0.
    A treasure may be behind pits: then only the bat gets there. The bat is drawn from the seed of the episode.
    """

    max_new_tokens = 8

    def __init__(self, size: int = 4, pits: int = 2, turns: int = 10, tasks: int = 64) -> None:
        if size < 2 or not 0 <= pits <= size * size - 2 or turns < 1 or tasks < 1:
            raise ValueError("size >= 2, turns >= 1, tasks >= 1, and 0 <= pits <= size * size - 2")
        self._size, self._pits, self._tasks = size, pits, tasks
        self.max_turns = turns

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        cells = [Cell(x, y) for x in range(self._size) for y in range(self._size)][1:]
        cells.sort(key=lambda cell: hashlib.sha256(f"{index} {cell.x} {cell.y}".encode()).digest())
        return json.dumps({"treasure": cells[0], "pits": cells[1 : 1 + self._pits]}).encode()

    def episode(self) -> Episode:
        return _Walk(self._size, self.max_turns)


class _Walk(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self, size: int, turns: int) -> None:
        self._size, self._turns = size, turns
        self._treasure, self._pits = Cell(0, 0), frozenset[Cell]()
        self._at, self._used = Cell(0, 0), 0
        self._chance = np.random.default_rng(0)

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        hidden = json.loads(task)
        self._treasure, self._pits = Cell(*hidden["treasure"]), frozenset(Cell(*pit) for pit in hidden["pits"])
        self._chance = np.random.default_rng(seed)
        return [Message("user", f"find the treasure. go n, e, s or w. {self._seen()}")]

    async def step(self, action: Action) -> StepResult:
        self._used += 1
        bat = self._chance.random() < BAT
        self._at = self._carried() if bat else self._moved(action.text.strip()[:1].lower())
        record = json.dumps({"at": self._at, "bat": bat})
        if self._at == self._treasure:
            return StepResult(True, 1.0 - 0.5 * (self._used - 1) / self._turns, record=record)
        if self._at in self._pits or self._used >= self._turns:
            return StepResult(True, 0.0, record=record)
        return StepResult(False, messages=[Message("user", ("a bat! " if bat else "") + self._seen())], record=record)

    def _moved(self, direction: str) -> Cell:
        by = STEPS.get(direction, Cell(0, 0))
        to = Cell(self._at.x + by.x, self._at.y + by.y)
        return to if 0 <= to.x < self._size and 0 <= to.y < self._size else self._at

    def _carried(self) -> Cell:
        cells = [Cell(x, y) for x in range(self._size) for y in range(self._size)]
        free = [cell for cell in cells if cell not in self._pits]
        return free[int(self._chance.random() * len(free))]

    def _seen(self) -> str:
        breeze = " breeze" * any(self._at.near(pit) for pit in self._pits)
        glow = " glow" * self._at.near(self._treasure)
        return f"{self._at.x},{self._at.y}{breeze}{glow}>"

    def export_state(self) -> bytes:
        chance: dict[str, Any] = dict(self._chance.bit_generator.state)
        return json.dumps({"at": self._at, "used": self._used, "chance": chance}).encode()

    def restore_state(self, data: bytes) -> None:
        state = json.loads(data)
        self._at, self._used = Cell(*state["at"]), state["used"]
        self._chance.bit_generator.state = state["chance"]
