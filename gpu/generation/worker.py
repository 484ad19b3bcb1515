"""The rollout worker: takes attempts, runs their agent loops, makes their tokens durable, and reports in batches.

A worker owns nothing: when it dies, its attempts are tried again elsewhere. It stops by itself when its incarnation
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from gpu.environments import tools
from gpu.environments.agent import Agent, Generate, GenerationAborted, Turned
from gpu.environments.base import Environment
from gpu.environments.resources import Reply
from gpu.environments.tools import NotContinuable
from gpu.generation.client import EngineCalls, EngineClient
from gpu.generation.engine import Generated, GenRequest
from gpu.generation.suites import MakeAgent, Suites
from gpu.models.tokenizer import Tokenizer
from gpu.rollout.messages import (
    Accepted,
    AckBatch,
    Acked,
    Answered,
    Dispatch,
    Ended,
    Exported,
    Identity,
    Intent,
    Outcome,
    PlainEnded,
    Progress,
    Report,
    Result,
    Turn,
    Work,
)
from gpu.rollout.signal import Signal
from storage.errors import (
    ActorLost,
    ArtifactCorrupt,
    ContinuationInvalid,
    DeadlineExceeded,
    EngineFailed,
    ReferenceInvalid,
    ResourceInvalid,
    RunFenced,
)
from storage.filesystem import Store
from storage.payload import INLINE_BYTES, TurnRow, encode_block
from storage.reader import PayloadReader
from storage.retry import create_until_known
from storage.runs import RunPaths
from storage.schema import Receipt

TAKE_S = 5.0
LINGER_S = 0.005
MAX_REPORT = 128

Entry = Progress | Ended | PlainEnded


def number_rows(rows: Sequence[TurnRow | None]) -> tuple[list[TurnRow], dict[int, int]]:
    """The rows in the order in which they are stored, those of a rollout together and in the order of its turns; and
    where each of the given ones is."""
    found = [(row, at) for at, row in enumerate(rows) if row is not None]
    found.sort(key=lambda one: (one[0].group, one[0].sibling))
    return [row for row, _ in found], {at: index for index, (_, at) in enumerate(found)}


class ManagerCalls(Protocol):
    """The calls of `RolloutManager` that a worker makes, local or remote."""

    async def take(self, incarnation: int, worker: str, limit: int, timeout: float) -> Work: ...

    async def report(self, incarnation: int, report: Report) -> Accepted: ...

    async def settled(self, incarnation: int, seq: int) -> None: ...

    async def acknowledged(self, incarnation: int, acked: Acked) -> None: ...


class AttemptOver(Exception):
    """The attempt is not live any more: it stops, and nothing is to be said of it."""


class _Out(NamedTuple):
    """What is to be reported, with its token row."""

    row: TurnRow | None
    entry: Entry


class _Wait(NamedTuple):
    """Somebody waits until everything before it is durable; `durable` is told then, or that the attempt is over."""

    identity: Identity
    durable: asyncio.Future[None]


class RolloutWorker:
    """`engines` finds an engine by name; `concurrency` rollouts run at once; `suites` makes the agents of evaluation
    suites. Make it on a running event loop."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        manager: ManagerCalls,
        engines: Callable[[str], EngineCalls],
        environment: Environment,
        tokenizer: Tokenizer,
        store: Store,
        run: str,
        *,
        seed: int,
        temperature: float,
        position: Callable[[int], int],
        concurrency: int,
        suites: Callable[[Generate], MakeAgent],
    ) -> None:
        self._name, self._incarnation, self._manager, self._find = name, incarnation, manager, engines
        self._store, self._run_name, self._concurrency = store, run, concurrency
        self._reader = PayloadReader(store, run)
        self._clients: dict[str, EngineClient] = {}
        self._serving: tuple[str, ...] = ()
        self._running: dict[asyncio.Task[None], Identity] = {}
        self._out: list[_Out | _Wait] = []
        self._seq = -1
        self._settling: set[asyncio.Task[None]] = set()
        self._reported = Signal()
        self._blocks = 0
        self._agent = Agent(
            environment, tokenizer, self._generate, self, seed=seed, temperature=temperature, position=position, run=run
        )
        self._suites = Suites(suites(self._generate), lambda ended: self._push(None, ended))

    # ------------------------------------------------------------------ life

    async def run(self) -> None:
        """Work until the incarnation ends; raises `RunFenced` or `ActorLost` then."""
        reporter = asyncio.create_task(self._report_loop())
        taker = asyncio.create_task(self._take_loop())
        try:
            done, _ = await asyncio.wait([reporter, taker], return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await self._stop([reporter, taker, *self._running, *self._settling])

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        for host in self._agent.hosts.values():
            await host.close()

    async def _take_loop(self) -> None:
        while True:
            room = self._concurrency - len(self._running)
            if room <= 0:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                continue
            work = await self._manager.take(self._incarnation, self._name, room, TAKE_S)
            self._serving = work.engines or self._serving
            for batch in work.acks:
                self._beside(self._acknowledge(batch))
            for dispatch in work.dispatches:
                task = asyncio.create_task(self._attempt(dispatch))
                self._running[task] = dispatch.identity
                task.add_done_callback(self._running.pop)

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, dispatch: Dispatch) -> None:
        """Whatever ends an attempt without a result is reported as such, never as a reward."""
        try:
            if dispatch.plain is None:
                await self._agent.run(dispatch, await self._before(dispatch))
            else:
                await self._suites.run(dispatch)
        except AttemptOver:
            return
        except (NotContinuable, ResourceInvalid) as error:
            self._failed(dispatch, Outcome.NOT_CONTINUABLE, error)
        except (EngineFailed, ActorLost) as error:
            self._failed(dispatch, Outcome.ENGINE_LOST, error)
        except GenerationAborted as error:
            self._failed(dispatch, Outcome.ABORTED, error)
        except ContinuationInvalid as error:
            self._failed(dispatch, Outcome.NOT_CONTINUABLE if error.code == "replay" else Outcome.FAILED, error)
        except ReferenceInvalid as error:
            self._failed(dispatch, Outcome.MALFORMED, error)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; the cause is kept in the record
            self._failed(dispatch, Outcome.FAILED, error)

    async def _before(self, dispatch: Dispatch) -> list[TurnRow]:
        """The durable turns of a continuation, from the manager's memory or from storage."""
        continuation = dispatch.continuation
        if continuation is None:
            return []
        reader = PayloadReader(self._store, self._run_name, continuation.hot.get)
        try:
            return await asyncio.to_thread(reader.rows, continuation.rows, continuation.blocks)
        except (ReferenceInvalid, ArtifactCorrupt) as error:
            raise NotContinuable(
                f"its turns cannot be read: {error}", expected="readable turns", action="nothing: it starts over"
            ) from error

    async def _generate(self, request: GenRequest) -> Generated:
        """Siblings share an engine, so that their common prompt is computed once."""
        serving = self._serving
        if not serving:
            raise EngineFailed("no engine serves", expected="a serving engine", action="nothing: one is being started")
        name = serving[int(request.id[1 : request.id.index("/")]) % len(serving)]
        client = self._clients.get(name)
        if client is None or client.lost:
            client = self._clients[name] = EngineClient(self._find(name), self._name)
        return await client.generate(request)

    def _failed(self, dispatch: Dispatch, outcome: Outcome, error: Exception) -> None:
        kind = Ended if dispatch.plain is None else PlainEnded
        self._push(None, kind(dispatch.identity, outcome, detail=f"{type(error).__name__}: {error}"))

    # ------------------------------------------------------------------ RolloutSink

    def turn(
        self,
        dispatch: Dispatch,
        boundary: int,
        turned: Turned,
        state: bytes,
        revisions: dict[str, int],
        exports: Sequence[tools.Exported],
    ) -> None:
        one, call, row = dispatch.identity, turned.call, turned.row
        for resource, export in exports:
            self._push(None, Exported(one, resource, export.revision, export.state))
        start, tokens = (call.start, len(call.tokens)) if row is call else (call.start + len(call.tokens), 0)
        self._push(
            row, Turn(one, boundary, call.turn, call.sample, -1, start, tokens, call.oldest, state, revisions)
        )  # fmt: skip

    def answered(self, dispatch: Dispatch, boundary: int, call: TurnRow) -> None:
        one = dispatch.identity
        self._push(call, Answered(one, boundary, call.turn, call.sample, -1, call.start, len(call.tokens), call.oldest))

    def intent(self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        self._push(None, Intent(dispatch.identity, boundary, cursor, resource, revision, digest))

    def result(self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        self._push(None, Result(dispatch.identity, boundary, cursor, resource, reply.revision, digest, reply.content))

    async def settled(self, dispatch: Dispatch) -> None:
        durable = asyncio.get_running_loop().create_future()
        self._out.append(_Wait(dispatch.identity, durable))
        self._reported.notify()
        await durable

    def end(self, dispatch: Dispatch, turned: Turned, receipts: tuple[Receipt, ...]) -> None:
        assert turned.row is not None, "the last turn says that it is done"
        call, row = turned.call, turned.row
        sealed = Ended(dispatch.identity, Outcome.SEALED, -1, call.num_generated, call.oldest, row.reward,
                       samples=call.sample + 1, receipts=receipts)  # fmt: skip
        self._push(row, sealed)

    # ------------------------------------------------------------------ reports

    def _push(self, row: TurnRow | None, entry: Entry) -> None:
        self._out.append(_Out(row, entry))
        self._reported.notify()

    async def _report_loop(self) -> None:
        """One report in flight at a time, so that entries arrive in order; what comes meanwhile goes into the next."""
        while True:
            event = self._reported.current()
            if not self._out:
                await event.wait()
                await asyncio.sleep(LINGER_S)
                continue
            batch = self._batch()
            waiting = {one.identity: one.durable for one in batch if isinstance(one, _Wait)}
            said = [one for one in batch if isinstance(one, _Out)]
            if said:
                report = await asyncio.to_thread(self._encode, said)
                accepted = await self._manager.report(self._incarnation, report)
                self._seq = accepted.seq
                self._stop_attempts(accepted.over)
                for identity in accepted.over:
                    _tell(waiting.pop(identity, None), AttemptOver())
            if waiting:
                self._beside(self._settle(self._seq, list(waiting.values())))

    def _batch(self) -> list[_Out | _Wait]:
        """What goes into the next report. An export is of the turn that follows it, and neither counts alone."""
        count = min(MAX_REPORT, len(self._out))
        while isinstance(last := self._out[count - 1], _Out) and isinstance(last.entry, Exported):
            count += 1
        batch, self._out = self._out[:count], self._out[count:]
        return batch

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _acknowledge(self, batch: AckBatch) -> None:
        """Deliver to a host that its results are durable; it is tried again elsewhere when that fails."""
        host = self._agent.hosts.get(batch.host)
        try:
            if host is None:
                raise KeyError(f"no resource {batch.host!r} here")
            done = await host.acknowledge(batch.boot, batch.owed)
            acked = Acked(batch, done, replaced=not done, detail="" if done else "another process is in its place")
        except Exception as error:  # noqa: BLE001 - a host may raise anything; what is owed stays owed
            acked = Acked(batch, done=False, detail=f"{type(error).__name__}: {error}"[:300])
        with contextlib.suppress(RunFenced, ActorLost):
            await self._manager.acknowledged(self._incarnation, acked)

    def _stop_attempts(self, over: Sequence[Identity]) -> None:
        """Nothing that they still do can count."""
        if over:
            for task in [task for task, identity in self._running.items() if identity in over]:
                task.cancel()

    async def _settle(self, seq: int, waiting: list[asyncio.Future[None]]) -> None:
        """Tell those who wait when record `seq` is durable. While the store is away they wait, without having done
        anything; when the incarnation ends, so do they."""
        while True:
            try:
                await self._manager.settled(self._incarnation, seq)
            except DeadlineExceeded:
                continue
            except (RunFenced, ActorLost) as error:
                for one in waiting:
                    _tell(one, error)
                return
            for one in waiting:
                _tell(one)
            return

    def _encode(self, batch: list[_Out]) -> Report:
        """Number the rows, encode them, and make a large block durable before the report that names it."""
        rows, index_of = number_rows([out.row for out in batch])
        turns: list[Progress] = []
        ended: list[Ended] = []
        plain: list[PlainEnded] = []
        for at, (row, entry) in enumerate(batch):
            if isinstance(entry, PlainEnded):
                plain.append(entry)
            elif isinstance(entry, Ended):
                ended.append(entry if row is None else replace(entry, row=index_of[at]))
            elif isinstance(entry, Turn | Answered) and row is not None:
                turns.append(replace(entry, row=index_of[at]))
            else:
                turns.append(entry)
        if not rows:
            return Report(self._name, "", "", 0, None, tuple(turns), tuple(ended), tuple(plain))
        self._blocks += 1
        block = encode_block(f"{self._incarnation:06d}-{self._name}-{self._blocks:08d}", rows)
        inline = len(block.data) < INLINE_BYTES
        if not inline:
            create_until_known(self._store, RunPaths(self._run_name).block(block.name), block.data, time.sleep)
        return Report(
            self._name,
            block.name,
            block.digest,
            len(block.data),
            block.data if inline else None,
            tuple(turns),
            tuple(ended),
            tuple(plain),
            block.batches,
        )


def _tell(durable: asyncio.Future[None] | None, error: Exception | None = None) -> None:
    if durable is None or durable.done():
        return
    if error is None:
        durable.set_result(None)
    else:
        durable.set_exception(error)
