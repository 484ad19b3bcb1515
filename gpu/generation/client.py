"""A worker's side of an engine: single requests in, batched calls out, results back to whoever waits."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gpu.generation.engine import Generated, GenRequest
from gpu.rollout.signal import Signal
from storage.errors import ActorLost, ConfigurationRefused, EngineFailed

COLLECT_S = 5.0


class EngineCalls(Protocol):
    """The calls of `EngineServer` that a worker makes, local or remote."""

    async def submit(self, client: str, requests: list[GenRequest]) -> dict[str, str]: ...

    async def collect(self, client: str, timeout: float) -> list[Generated]: ...


class EngineClient:
    """One engine as one worker sees it. `generate` raises `ConfigurationRefused` for a request that cannot fit, and
    `EngineFailed` or `ActorLost` when the engine is gone."""

    def __init__(self, engine: EngineCalls, client: str) -> None:
        self._engine, self._client = engine, client
        self._waiting: dict[str, asyncio.Future[Generated]] = {}
        self._queue: list[GenRequest] = []
        self._kick = Signal()
        self._lost: Exception | None = None
        self._loops = [asyncio.create_task(loop) for loop in (self._submit(), self._collect())]

    @property
    def lost(self) -> bool:
        return self._lost is not None

    async def generate(self, request: GenRequest) -> Generated:
        if self._lost is not None:
            raise self._lost
        done: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = done
        self._queue.append(request)
        self._kick.notify()
        try:
            return await done
        finally:
            self._waiting.pop(request.id, None)

    async def _submit(self) -> None:
        while self._lost is None:
            kick = self._kick.current()
            if not self._queue:
                await kick.wait()
                await asyncio.sleep(0)  # let the siblings of a group come along
                continue
            batch, self._queue = self._queue, []
            try:
                refused = await self._engine.submit(self._client, batch)
            except (ActorLost, EngineFailed) as error:
                self._lose(error)
                return
            for name, reason in refused.items():
                self._settle(name, ConfigurationRefused(
                    reason, expected="a request that fits the engine", action="see generation.max_length"
                ))  # fmt: skip

    async def _collect(self) -> None:
        while self._lost is None:
            try:
                results = await self._engine.collect(self._client, COLLECT_S)
            except (ActorLost, EngineFailed) as error:
                self._lose(error)
                return
            for result in results:
                self._settle(result.id, result)

    def _settle(self, name: str, outcome: Generated | Exception) -> None:
        done = self._waiting.get(name)
        if done is None or done.done():
            return
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def _lose(self, error: Exception) -> None:
        self._lost = error
        for name in list(self._waiting):
            self._settle(name, error)
        self._kick.notify()

    async def close(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
