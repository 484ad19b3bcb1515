"""The rollout worker: takes attempts, runs their agent loops, makes their tokens durable, and reports in batches.

A worker owns nothing: when it dies, its attempts are tried again elsewhere. It stops by itself when its incarnation
ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from gpu.environments.agent import Agent, Generate, GenerationAborted
from gpu.environments.base import Environment
from gpu.generation.client import EngineCalls, EngineClient
from gpu.generation.engine import Generated, GenRequest
from gpu.generation.suites import MakeAgent, Suites
from gpu.models.tokenizer import Tokenizer
from gpu.rollout.messages import Accepted, Dispatch, Ended, Outcome, PlainEnded, Report, Turn, Work
from gpu.rollout.signal import Signal
from storage.errors import ActorLost, EngineFailed, ReferenceInvalid
from storage.filesystem import Store
from storage.payload import INLINE_BYTES, TurnRow, encode_block
from storage.reader import PayloadReader
from storage.retry import create_until_known
from storage.runs import RunPaths

TAKE_S = 5.0
LINGER_S = 0.005
MAX_REPORT = 128

Entry = Turn | Ended | PlainEnded


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
        self._running: set[asyncio.Task[None]] = set()
        self._out: list[tuple[TurnRow | None, Entry]] = []
        self._reported = Signal()
        self._blocks = 0
        self._agent = Agent(
            environment, tokenizer, self._generate, self, seed=seed, temperature=temperature, position=position
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
            await self._stop([reporter, taker, *self._running])

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    async def _take_loop(self) -> None:
        while True:
            room = self._concurrency - len(self._running)
            if room <= 0:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                continue
            work = await self._manager.take(self._incarnation, self._name, room, TAKE_S)
            self._serving = work.engines or self._serving
            for dispatch in work.dispatches:
                task = asyncio.create_task(self._attempt(dispatch))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, dispatch: Dispatch) -> None:
        """Whatever ends an attempt without a result is reported as such, never as a reward."""
        try:
            if dispatch.plain is None:
                await self._agent.run(dispatch, await self._before(dispatch))
            else:
                await self._suites.run(dispatch)
        except (EngineFailed, ActorLost) as error:
            self._failed(dispatch, Outcome.ENGINE_LOST, error)
        except GenerationAborted as error:
            self._failed(dispatch, Outcome.ABORTED, error)
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
        return await asyncio.to_thread(reader.rows, continuation.rows, continuation.blocks)

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

    def turn(self, dispatch: Dispatch, boundary: int, row: TurnRow, state: bytes) -> None:
        self._push(row, Turn(dispatch.identity, boundary, row.turn, row.sample, -1, row.oldest, state))

    def end(self, dispatch: Dispatch, row: TurnRow) -> None:
        sealed = Ended(dispatch.identity, Outcome.SEALED, -1, row.num_generated, row.oldest, row.reward,
                       samples=row.sample + 1)  # fmt: skip
        self._push(row, sealed)

    # ------------------------------------------------------------------ reports

    def _push(self, row: TurnRow | None, entry: Entry) -> None:
        self._out.append((row, entry))
        self._reported.notify()

    async def _report_loop(self) -> None:
        """One report in flight at a time, so turns arrive in order; what comes meanwhile goes into the next."""
        while True:
            event = self._reported.current()
            if not self._out:
                await event.wait()
                await asyncio.sleep(LINGER_S)
                continue
            batch, self._out = self._out[:MAX_REPORT], self._out[MAX_REPORT:]
            report = await asyncio.to_thread(self._encode, batch)
            await self._manager.report(self._incarnation, report)

    def _encode(self, batch: list[tuple[TurnRow | None, Entry]]) -> Report:
        """Number the rows, encode them, and make a large block durable before the report that names it."""
        rows, index_of = number_rows([row for row, _ in batch])
        turns: list[Turn] = []
        ended: list[Ended] = []
        plain: list[PlainEnded] = []
        for at, (row, entry) in enumerate(batch):
            if isinstance(entry, Turn):
                turns.append(replace(entry, row=index_of[at]))
            elif isinstance(entry, PlainEnded):
                plain.append(entry)
            else:
                ended.append(entry if row is None else replace(entry, row=index_of[at]))
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
