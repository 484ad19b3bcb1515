"""An engine behind calls: a thread steps it, asyncio answers.

Requests of many clients share the engine; each client collects its own results in batches. Commands (updates, aborts)
run in the engine's thread between two steps. A failure of the engine's thread ends the server and every call with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gpu.generation.engine import Cached, Engine, EngineStats, Generated, GenRequest, Version
from gpu.generation.weights import check_digest
from gpu.rollout.signal import Signal, wait_event
from storage.buffers import NamedBuffer
from storage.errors import ConfigurationRefused, EngineFailed

T = TypeVar("T")


class EngineServer:
    """Make it on a running event loop. `cached` is the policy for cached keys and values at weight updates."""

    def __init__(self, engine: Engine, cached: Cached) -> None:
        self._engine, self._cached = engine, cached
        self._loop = asyncio.get_running_loop()
        self._in_flight = "in_flight_swap" in engine.capabilities
        self._commands: deque[Callable[[], None]] = deque()
        self._work = threading.Event()
        self._closed = False
        self._failure: BaseException | None = None
        self._client_of: dict[str, str] = {}
        self._results: dict[str, list[Generated]] = {}
        self._arrived = Signal()
        self._open: set[asyncio.Future[Any]] = set()
        self._holding = False
        self._resumed = Signal()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            while not self._closed:
                while self._commands:
                    self._commands.popleft()()
                ended = self._engine.step()
                if ended:
                    self._loop.call_soon_threadsafe(self._deliver, ended)
                elif not self._busy():
                    self._work.wait()
                    self._work.clear()
        except Exception as error:  # noqa: BLE001 - whatever ends the thread is told to every caller
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                self._loop.call_soon_threadsafe(self._fail, error)

    def _busy(self) -> bool:
        stats = self._engine.stats()
        return bool(self._commands) or (stats.version is not None and stats.running + stats.waiting > 0)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for done in self._open:
            _settle(done, None, self._died())
        self._arrived.notify()

    def _deliver(self, ended: list[Generated]) -> None:
        for result in ended:
            client = self._client_of.pop(result.id, None)
            if client in self._results:
                self._results[client].append(result)
        self._arrived.notify()

    async def _in_thread(self, action: Callable[[], T]) -> T:
        """Run `action` between two steps; its result or its exception."""
        done: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = action()
            except Exception as error:  # noqa: BLE001 - handed to the caller
                self._loop.call_soon_threadsafe(_settle, done, None, error)
            else:
                self._loop.call_soon_threadsafe(_settle, done, result, None)

        self._alive()
        self._open.add(done)
        self._commands.append(run)
        self._work.set()
        try:
            return await done
        finally:
            self._open.discard(done)

    def _alive(self) -> None:
        if self._failure is not None or self._closed:
            raise self._died() from self._failure

    def _died(self) -> EngineFailed:
        return EngineFailed(
            f"the engine failed: {self._failure!r}", expected="a running engine", action="nothing: it is replaced"
        )

    # ------------------------------------------------------------------ requests

    async def submit(self, client: str, requests: list[GenRequest]) -> dict[str, str]:
        """Queue requests of a client, after a pause when one is on. Returns those the engine refused, with the reason;
        they get no result."""
        self._alive()
        self._results.setdefault(client, [])
        while self._holding:
            await wait_event(self._resumed.current(), 1.0)
            self._alive()
            if client not in self._results:
                return {}  # it was forgotten meanwhile
        for request in requests:
            self._client_of[request.id] = client
        return await self._in_thread(lambda: self._add(requests))

    def _add(self, requests: list[GenRequest]) -> dict[str, str]:
        refused: dict[str, str] = {}
        for request in requests:
            try:
                self._engine.add(request)
            except ConfigurationRefused as error:
                refused[request.id] = str(error)
                self._client_of.pop(request.id, None)
        return refused

    async def collect(self, client: str, timeout: float) -> list[Generated]:
        """Results that arrived for a client; waits up to `timeout` seconds for the first."""
        self._results.setdefault(client, [])
        event = self._arrived.current()
        self._alive()
        if not self._results[client]:
            await wait_event(event, timeout)
            self._alive()
            if client not in self._results:
                return []  # it was forgotten meanwhile
        results, self._results[client] = self._results[client], []
        return results

    async def forget(self, client: str) -> int:
        """A client is gone: abort its requests. Returns how many."""
        mine = {name for name, owner in self._client_of.items() if owner == client}
        self._results.pop(client, None)
        ended = await self._in_thread(lambda: self._engine.abort(mine)) if mine else []
        for name in mine:
            self._client_of.pop(name, None)
        return len(ended)

    # ------------------------------------------------------------------ weights

    async def update(self, version: Version, weights: Mapping[str, NamedBuffer]) -> Version:
        """Verify and install a version. When it raises, the old one still answers."""
        await asyncio.to_thread(check_digest, weights, version.digest)
        await self._in_thread(lambda: self._engine.update(version, weights, self._cached, verified=True))
        return version

    async def pause(self) -> None:
        """Return when weights may change. An engine that swaps in flight need not wait; another one keeps new requests
        back and finishes the open ones."""
        if self._in_flight:
            return
        self._holding = True
        while True:
            stats = await self._in_thread(self._engine.stats)
            if not stats.running + stats.waiting:
                return
            event = self._arrived.current()
            await wait_event(event, 0.5)

    async def resume(self) -> None:
        """Idempotent."""
        self._holding = False
        self._resumed.notify()

    async def cancel(self) -> int:
        """Abort every open request of an engine that cannot swap in flight; returns how many."""
        if self._in_flight:
            return 0
        ended = await self._in_thread(lambda: self._engine.abort(None))
        self._deliver(ended)
        return len(ended)

    # ------------------------------------------------------------------ looking

    async def stats(self) -> EngineStats:
        self._alive()
        return await self._in_thread(self._engine.stats)

    async def checksum(self) -> str:
        return await self._in_thread(self._engine.checksum)

    async def score(self, sequences: list[list[int]]) -> list[Any]:
        return await self._in_thread(lambda: self._engine.score(sequences))

    async def run(self) -> None:
        """Never returns while the engine lives; raises when it failed. Whoever watches the engine waits on this."""
        while True:
            event = self._arrived.current()
            self._alive()
            await wait_event(event, 1.0)

    async def close(self) -> None:
        self._closed = True
        self._work.set()
        await asyncio.to_thread(self._thread.join, 10.0)
        self._arrived.notify()


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
