"""One rollout through the real agent, its hosts and the real ledger, with death at any moment: what a worker reports is
folded as the manager would fold it, what was not durable is lost, and the next attempt goes on from the boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu.environments.agent import Agent, Generate, Turned
from gpu.environments.base import Environment
from gpu.environments.resources import Reply
from gpu.environments.tools import Exported
from gpu.generation.engine import Finish, Generated, GenRequest
from gpu.models.tokenizer import Message
from gpu.rollout.messages import Continuation, Dispatch, Identity
from storage import schema
from storage.ledger import Ledger, Rollout
from storage.payload import TurnRow, VersionSpan
from storage.samples import Sample, assemble_slot
from storage.transitions import apply
from tests.gpu.agents import TOKENIZER


class Death(Exception):
    """The worker's process is gone."""


def by_turn(*answers: str) -> Generate:
    """An engine that says the same in the same turn, whatever the attempt."""

    async def generate(request: GenRequest) -> Generated:
        turn = int(request.id.rpartition(".")[2])
        ids = [*TOKENIZER.prompt([Message("assistant", answers[turn])]), min(TOKENIZER.stop_ids)]
        calls.append(request.id)
        return Generated(request.id, np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32),
                         (VersionSpan(1, 0, len(ids)),), Finish.STOP)  # fmt: skip

    calls: list[str] = []
    generate.calls = calls  # type: ignore[attr-defined]
    return generate


@dataclass
class OneRollout:
    """A run of one group with one sibling. Records are counted from 0 over all attempts; `dies_before` is the one whose
    report the process does not live to send, and what is not durable by then is lost."""

    make: Callable[[], Environment]
    generate: Generate
    seed: int = 1
    records: list[schema.Record] = field(default_factory=lambda: [])
    blocks: dict[str, TurnRow] = field(default_factory=lambda: {})
    dies_before: int = -1
    dies_after_intent: int = -1
    attempts: int = 0
    lost: int = 0
    lazy: bool = True
    """Records become durable when an intent waits for it; else each one at once."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(1)
        for record in (schema.RunClaimed(1, "o", ""), schema.PolicyPublished(1, 0, "w", ""),
                       schema.GroupReserved(0, 1)):  # fmt: skip
            self.put(record)
        self.setup = len(self.records)
        self._waiting: list[schema.Record] = []
        self._reported = 0

    def put(self, record: schema.Record) -> None:
        """As the manager does: an intent that is there already changes nothing."""
        if isinstance(record, schema.RequestIntent):
            at = self.rollout.boundary
            if at is not None and record.boundary == at.index and record.cursor < len(at.requests):
                return
        apply(self.ledger, self.ledger.next_seq, record)
        self.records.append(record)

    @property
    def rollout(self) -> Rollout:
        return self.ledger.groups[0].rollouts[0]

    @property
    def reported(self) -> int:
        """Records that attempts made."""
        return self._reported

    # ------------------------------------------------------------------ attempts

    async def attempt(self, environment: Environment | None = None) -> bool:
        """From the boundary, or from scratch; False when the process died on the way. `environment` is that of the
        process, a new one by default."""
        at = self.rollout.boundary
        number = self.attempts
        self.attempts += 1
        self.put(schema.AttemptsMinted(0, (0,), (number,), (at.index if at else -1,), 0))
        continuation = Continuation(self.rollout.rows, {}, {}, at) if at else None
        identity = Identity(0, 0, number, 1)
        dispatch = Dispatch(identity, 0, self.rollout.boundaries, continuation)
        before = [self.blocks[name] for name, _ in self.rollout.rows]
        agent = Agent(environment or self.make(), TOKENIZER, self.generate, self, seed=self.seed, temperature=1.0,
                      position=lambda ordinal: ordinal, run="run")  # fmt: skip
        try:
            await agent.run(dispatch, before)
        except Death:
            self.lost += len(self._waiting)
            self._waiting.clear()
            self.put(schema.AttemptAbandoned(0, 0, number, "worker_lost", ""))
            return False
        except BaseException:
            self._waiting.clear()
            self.put(schema.AttemptAbandoned(0, 0, number, "failed", ""))
            raise
        self._durable()
        return True

    def give_up(self, reason: str) -> None:
        self.put(schema.ContinuationDiscarded((0,), (0,), reason))

    async def until_sealed(self, most: int = 10) -> None:
        for _ in range(most):
            if await self.attempt():
                return
        raise AssertionError("not sealed")

    def samples(self) -> list[Sample]:
        return assemble_slot([self.blocks[name] for name, _ in self.rollout.rows], 0, 0)

    def content(self) -> list[tuple[Any, ...]]:
        """What the rollout is worth to a trainer, whoever generated it."""
        return [
            (one.index, one.tokens.tolist(), one.logprobs.tolist(), one.mask.tolist(), one.spans, one.reward)
            for one in self.samples()
        ]

    # ------------------------------------------------------------------ RolloutSink

    def _report(self, *records: schema.Record) -> None:
        for record in records:
            if self._reported == self.dies_before:
                self._reported += 1
                raise Death
            self._reported += 1
            self._waiting.append(record)
        if not self.lazy:
            self._durable()

    def _durable(self) -> None:
        for record in self._waiting:
            self.put(record)
        self._waiting.clear()

    def _block(self, row: TurnRow | None) -> list[schema.Record]:
        if row is None:
            return []
        name = f"b{len(self.blocks)}"
        self.blocks[name] = row
        return [schema.PayloadStored(name, "d", 1, inline=True)]

    def turn(
        self,
        dispatch: Dispatch,
        boundary: int,
        turned: Turned,
        state: bytes,
        revisions: dict[str, int],
        exports: Sequence[Exported],
    ) -> None:
        call, row = turned
        number = dispatch.identity.attempt
        stored = self._block(row)
        name = stored[0].block if stored else ""  # type: ignore[attr-defined]
        start, tokens = (call.start, len(call.tokens)) if row is call else (call.start + len(call.tokens), 0)
        self._report(
            *[schema.ResourceExported(0, 0, number, one, export.revision, export.state) for one, export in exports],
            *stored,
            schema.TurnCommitted(0, 0, number, boundary, call.turn, call.sample, name, 0 if stored else -1, start,
                                 tokens, call.oldest, state, revisions),
        )  # fmt: skip

    def answered(self, dispatch: Dispatch, boundary: int, call: TurnRow) -> None:
        (stored,) = self._block(call)
        self._report(stored, schema.ModelAnswered(
            0, 0, dispatch.identity.attempt, boundary, call.turn, call.sample, stored.block, 0, call.start,  # type: ignore[attr-defined]
            len(call.tokens), call.oldest,
        ))  # fmt: skip

    def intent(self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        number = dispatch.identity.attempt
        self._report(schema.RequestIntent(0, 0, number, boundary, cursor, resource, revision, digest))

    async def settled(self, dispatch: Dispatch) -> None:
        asked = bool(self._waiting) and isinstance(self._waiting[-1], schema.RequestIntent)
        self._durable()
        if asked and self._reported - 1 == self.dies_after_intent:
            raise Death

    def result(self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        self._report(schema.RequestResult(
            0, 0, dispatch.identity.attempt, boundary, cursor, resource, reply.revision, digest, reply.content
        ))  # fmt: skip

    def end(self, dispatch: Dispatch, turned: Turned, receipts: tuple[schema.Receipt, ...]) -> None:
        row = turned.row
        (stored,) = self._block(row)
        assert row is not None
        self._report(stored, schema.Sealed(
            stored.block, (0,), (0,), (dispatch.identity.attempt,), (0,), (row.sample + 1,),  # type: ignore[attr-defined]
            (turned.call.num_generated,), (turned.call.oldest,), (row.reward,), receipts,
        ))  # fmt: skip

    # ------------------------------------------------------------------ what must hold of the records

    def check(self) -> None:
        """Coordinates only go forward, and no action of a lineage has two intents or two results."""
        boundaries: list[int] = []
        asked: dict[tuple[int, int], int] = {}
        answered: dict[tuple[int, int], int] = {}
        for record in self.records:
            if isinstance(record, schema.TurnCommitted | schema.ModelAnswered):
                boundaries.append(record.boundary)
            elif isinstance(record, schema.RequestIntent):
                key = record.boundary, record.cursor
                asked[key] = asked.get(key, 0) + 1
            elif isinstance(record, schema.RequestResult):
                key = record.boundary, record.cursor
                answered[key] = answered.get(key, 0) + 1
        assert boundaries == list(range(len(boundaries)))
        assert set(asked.values()) <= {1}
        assert set(answered.values()) <= {1}
