"""Ten turns, each of which writes into a database file of the rollout: an effect that is counted from outside."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.resources import ResourceHost
from gpu.environments.sqlite_host import SqliteHost
from gpu.models.tokenizer import Message

NAME = f"{__name__}:Ledgered"
TURNS = 10


class Keeping(SqliteHost):
    """Its files stay when their rollout is over, for whoever counts."""

    async def end(self, session: str) -> None:
        pass


class Ledgered(Environment):
    max_turns, max_new_tokens = TURNS, 2

    def __init__(self, folder: str, tasks: int) -> None:
        self._tasks, self._hosts = tasks, {"words": Keeping(folder)}

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        return json.dumps({"index": index}).encode()

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return self._hosts

    def episode(self) -> Episode:
        return _Ledgered()


class _Ledgered(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self) -> None:
        self._letters: list[int] = []

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        return [Message("user", f"{json.loads(task)['index']}>")]

    async def step(self, action: Action) -> StepResult:
        if not self._letters:
            await self.tools.call("words", "execute", {"sql": "create table words (n integer, said text)"})
        self._letters.append(sum(map(ord, action.text)))
        turn = len(self._letters)
        await self.tools.call("words", "execute", {"sql": f"insert into words values ({turn}, '{self._letters[-1]}')"})
        found = await self.tools.read("words", "query", {"sql": "select count(*) from words"})
        assert found["rows"] == [[turn]], "the rollout sees each of its words once"
        return StepResult(turn == TURNS, sum(self._letters) % 101 / 101, [Message("user", ">")])

    def export_state(self) -> bytes:
        return json.dumps(self._letters).encode()

    def restore_state(self, data: bytes) -> None:
        self._letters = json.loads(data)


def written(folder: Path) -> dict[str, list[int]]:
    """By session, as its file is named: the turns that were written, in order."""
    found: dict[str, list[int]] = {}
    for path in folder.glob("*.db"):
        with closing(sqlite3.connect(path)) as connection:
            found[path.name] = [turn for (turn,) in connection.execute("select n from words order by rowid")]
    return found
