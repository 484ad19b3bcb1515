"""Small parts for tests of the agent loop: a sink that keeps everything, and engines that answer at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.environments.agent import Agent, Generate, Turned
from gpu.environments.base import Environment
from gpu.environments.resources import Reply
from gpu.environments.tools import Exported
from gpu.generation.engine import Cached, Finish, Generated, GenRequest, Version
from gpu.generation.fake_engine import FakeEngine
from gpu.models.tokenizer import CharTokenizer, Message
from gpu.rollout.messages import Continuation, Dispatch, Identity
from storage.ledger import Boundary
from storage.payload import TurnRow, VersionSpan
from storage.samples import Sample, assemble_slot
from storage.schema import Receipt

TOKENIZER = CharTokenizer()


class Sink:
    """Keeps what an agent reports. `records` are its actions, in order."""

    def __init__(self) -> None:
        self.turns: list[tuple[int, TurnRow, bytes]] = []
        self.ended: list[TurnRow] = []
        self.records: list[tuple[Any, ...]] = []

    def turn(
        self,
        dispatch: Dispatch,
        boundary: int,
        turned: Turned,
        state: bytes,
        revisions: dict[str, int],
        exports: Sequence[Exported],
    ) -> None:
        self.turns.append((boundary, turned.call, state))
        self.records.append(("turn", boundary, turned, state, revisions, tuple(exports)))

    def answered(self, dispatch: Dispatch, boundary: int, call: TurnRow) -> None:
        self.records.append(("answered", boundary, call))

    def intent(self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        self.records.append(("intent", boundary, cursor, resource, revision, digest))

    async def settled(self, dispatch: Dispatch) -> None:
        """At once."""

    def result(self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        self.records.append(("result", boundary, cursor, resource, digest, reply))

    def end(self, dispatch: Dispatch, turned: Turned, receipts: tuple[Receipt, ...]) -> None:
        assert turned.row is not None
        self.ended.append(turned.row)
        self.records.append(("end", turned, receipts))

    @property
    def rows(self) -> list[TurnRow]:
        return [*(row for _, row, _ in self.turns), *self.ended]


def scripted(*answers: str, finish: Finish = Finish.STOP):
    """An engine that says the given words, one turn each, and remembers its prompts."""
    left, prompts = list(answers), []

    async def generate(request: GenRequest) -> Generated:
        prompts.append(TOKENIZER.decode(request.prompt))
        ids = TOKENIZER.prompt([Message("assistant", left.pop(0))])
        if finish is Finish.STOP:
            ids.append(next(iter(TOKENIZER.stop_ids)))
        return Generated(request.id, np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32),
                         (VersionSpan(1, 3, len(ids)),), finish)  # fmt: skip

    generate.prompts = prompts
    return generate


def agent(environment: Environment, generate, sink: Sink) -> Agent:
    return Agent(environment, TOKENIZER, generate, sink, seed=1, temperature=1.0, position=lambda ordinal: ordinal)


def dispatch(group: int = 0, attempt: int = 0, boundary: int = 0, continuation: Continuation | None = None) -> Dispatch:
    return Dispatch(Identity(group, 0, attempt, 1), 3, boundary, continuation)


def faked(version: int = 3) -> Generate:
    """The fake engine, whose tokens depend on the rollout and the turn alone; it never ends a turn itself."""
    engine = FakeEngine(tokens=99, vocabulary=28, by_rollout=True)
    engine.update(Version(1, version), {}, Cached.KEEP)

    async def generate(request: GenRequest) -> Generated:
        engine.add(request)
        ended: list[Generated] = []
        while not ended:
            ended = engine.step()
        return ended[0]

    return generate


def durable(records: Sequence[tuple[Any, ...]]) -> list[TurnRow]:
    """The rows that a sink was told of, in order."""
    rows: list[TurnRow] = []
    for record in records:
        if record[0] == "answered":
            rows.append(record[2])
        elif record[0] in ("turn", "end"):
            row = record[2 if record[0] == "turn" else 1].row
            rows += [] if row is None else [row]
    return rows


async def interrupted(environment: Environment, answers: Sequence[str], cut: int) -> tuple[list[Sample], list[Sample]]:
    """The samples of a rollout of task 0 that was played whole, and of one that died after `cut` turns and went on."""
    whole, resumed = Sink(), Sink()
    await agent(environment, scripted(*answers), whole).run(dispatch(), [])
    ends = [position for position, record in enumerate(whole.records) if record[0] == "turn"]
    last = ends[cut - 1]
    _, boundary, _, state, revisions, _ = whole.records[last]
    turns = [record for record in whole.records[: last + 1] if record[0] == "turn"]
    exports = {one.resource: one.export for record in turns for one in record[5]}
    at = Boundary(boundary, cut - 1, 0, state, 0, 0, 0, revisions=revisions, exports=exports)
    before = durable(whole.records[: last + 1])
    generate = scripted(*answers[cut:])
    going_on = dispatch(0, 1, boundary + 1, Continuation((), {}, {}, at))
    await agent(environment, generate, resumed).run(going_on, before)
    assert len(generate.prompts) == len(ends) + 1 - cut, "finished turns are not generated again"
    return assemble_slot(durable(whole.records), 0, 0), assemble_slot([*before, *durable(resumed.records)], 0, 0)
