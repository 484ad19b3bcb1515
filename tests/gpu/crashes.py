"""Crashes of attempts: the record after which one ends, and the continuation that its records make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from gpu.environments.base import Environment
from gpu.environments.tools import NotContinuable
from gpu.generation.engine import Finish
from gpu.rollout.messages import Continuation
from storage.ledger import Boundary, Requested
from storage.payload import TurnRow
from tests.gpu.agents import Sink, agent, dispatch, scripted


class Crash(Exception):
    """The process is gone."""


class DyingSink(Sink):
    """Keeps `left` records; the attempt ends when one more comes."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self._left = left
        keep = self.records

        class Records(list[tuple[Any, ...]]):
            def append(self, record: tuple[Any, ...]) -> None:
                if len(self) >= left:
                    raise Crash
                super().append(record)

        self.records = Records(keep)


def folded(records: Sequence[tuple[Any, ...]]) -> tuple[Boundary | None, list[TurnRow]]:
    """The last boundary of records, and the rows before it."""
    at: Boundary | None = None
    rows: list[TurnRow] = []
    for kind, *said in records:
        if kind == "turn":
            index, turned, state, revisions, exports = said
            kept = {**(at.exports if at else {}), **{one.resource: one.export for one in exports}}
            call = turned.call
            at = Boundary(index, call.turn, call.sample, state, 0, 0, 0, revisions=revisions, exports=kept)
            rows += [turned.row] if turned.row is not None else []
        elif kind == "answered":
            index, call = said
            last = at or Boundary(0, 0, 0, b"", 0, 0, 0)
            at = replace(last, index=index, turn=call.turn, sample=call.sample, pending=True, requests=())
            rows.append(call)
        elif kind == "intent":
            _, _, resource, revision, digest = said
            assert at is not None
            at = replace(at, requests=(*at.requests, Requested(resource, digest, revision, revision, None)))
        elif kind == "result":
            _, cursor, resource, digest, reply = said
            assert at is not None
            done = Requested(resource, digest, at.revision(resource), reply.revision, reply.content)
            at = replace(at, requests=(*at.requests[:cursor], done))
    return at, rows


@dataclass
class Played:
    """A rollout that crashed after `cut` records: its reward, what each attempt kept, and whether it started over."""

    reward: float
    sinks: list[Sink]
    restarted: bool


async def play(make: Callable[[int], Environment], group: int, answers: Sequence[str], cut: int) -> Played:
    """`make(attempt)` is the environment that the process of an attempt has. The answers are the same in each."""
    first = DyingSink(cut)
    try:
        await _attempt(make(0), first, group, answers, 0, None, [])
    except Crash:
        at, rows = folded(first.records)
    else:
        return Played(first.ended[0].reward, [first], False)
    second = Sink()
    try:
        await _attempt(make(1), second, group, answers, 1, at, rows)
    except NotContinuable:
        third = Sink()
        await _attempt(make(2), third, group, answers, 2, None, [])
        return Played(third.ended[0].reward, [first, second, third], True)
    return Played(second.ended[0].reward, [first, second], False)


async def _attempt(
    environment: Environment,
    sink: Sink,
    group: int,
    answers: Sequence[str],
    attempt: int,
    at: Boundary | None,
    rows: list[TurnRow],
) -> None:
    turns = 0 if at is None else at.turn + 1
    running = agent(environment, scripted(*answers[turns:], finish=Finish.STOP), sink)
    continuation = None if at is None else Continuation((), {}, {}, at)
    boundary = 0 if at is None else at.index + 1
    try:
        await running.run(dispatch(group, attempt, boundary, continuation), rows)
    finally:
        for host in running.hosts.values():
            await host.close()
