"""A whole cluster in one process: the same parts without Ray, for tests, notebooks and first steps.

Each part is a process that can be killed: its calls, running and later ones, then raise `ActorLost`, as they would in a
cluster. Documented fake: nothing here survives the Python process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from gpu.building import build_engine, build_trainer, build_worker
from gpu.fleet import Fleet
from gpu.generation.server import EngineServer
from gpu.prepare import claim_manager
from gpu.rollout.manager import RolloutManager
from gpu.rollout.signal import seen
from gpu.spec import RunSpec
from gpu.training.host import TrainerHost
from storage.archivist import Archivist
from storage.clock import Clock
from storage.errors import ActorLost, RunFenced
from storage.filesystem import Store
from storage.schema import LedgerSnapshot


class Process:
    """An object whose coroutine methods can be called until it is killed."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target = name, target
        self.dead = False
        self._calls: set[asyncio.Future[Any]] = set()

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*args: Any, **named: Any) -> Any:
            if self.dead:
                raise self._lost()
            running = asyncio.ensure_future(getattr(self.target, method)(*args, **named))
            self._calls.add(running)
            running.add_done_callback(self._ended)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                if self.dead and running.cancelled():
                    raise self._lost() from None
                raise  # the caller was cancelled; the call goes on, as in another process

        return call

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._calls.discard(call)
        seen(call)

    def kill(self) -> None:
        """Like SIGKILL: nothing is cleaned up, no reply is sent."""
        self.dead = True
        for call in list(self._calls):
            call.cancel()

    @classmethod
    def gone(cls, name: str) -> Process:
        """A process that is not there any more."""
        one = cls(name, None)
        one.dead = True
        return one

    def _lost(self) -> ActorLost:
        return ActorLost(f"{self.name} is dead", expected="a living process", action="retry; it is started again")


class LocalArchivist:
    """Archives in a thread of this process."""

    def __init__(self, store: Store, spec: RunSpec) -> None:
        self._archivist = Archivist(store, spec.run, spec.limits.num_siblings)
        self._one = asyncio.Lock()

    async def snapshot(self, slot: int) -> LedgerSnapshot:
        async with self._one:
            return await asyncio.to_thread(self._archivist.snapshot, slot)


class LocalCluster:
    """The processes of one run, by name. `engine` and `trainer` make those parts; tests pass deterministic ones."""

    def __init__(
        self,
        spec: RunSpec,
        store: Store,
        clock: Clock,
        *,
        engine: Callable[[RunSpec], EngineServer] = build_engine,
        trainer: Callable[[RunSpec, Store], TrainerHost] | None = None,
    ) -> None:
        self._spec, self._store, self._clock, self._engine = spec, store, clock, engine
        self._make_trainer = trainer or (lambda one, place: TrainerHost(place, one.run, lambda: build_trainer(one)))
        self.processes: dict[str, Process] = {}
        self.fleet: Fleet | None = None

    # ------------------------------------------------------------------ what a driver asks for

    async def manager(self, owner: str) -> tuple[Process, bool]:
        """The living manager, or a new incarnation; whether it is new."""
        found = self.processes.get("manager")
        if found is not None and not found.dead:
            fatal = await found.condition()
            if fatal is None:
                return found, False
            if isinstance(fatal, RunFenced):
                raise fatal
        await self._stop_all(but=("trainer",))
        reason = "start" if found is None else "the manager died"
        manager = await asyncio.to_thread(claim_manager, self._store, self._spec, self._clock, owner, reason)
        process = self.processes["manager"] = Process("manager", manager)
        manager.archive = self._archive
        manager.start()
        self.fleet = Fleet(manager, self, self._weights, self._spec.fleet)
        self.fleet.start()
        return process, True

    async def trainer(self) -> tuple[Process, bool]:
        """The living trainer, or a new one with nothing loaded; whether it is new."""
        found = self.processes.get("trainer")
        if found is not None and not found.dead:
            return found, False
        found = self.processes["trainer"] = Process("trainer", self._make_trainer(self._spec, self._store))
        return found, True

    async def stop_trainer(self) -> None:
        """End the trainer, which nobody has claimed."""
        await self.stop("trainer")

    async def _archive(self, slot: int) -> LedgerSnapshot:
        found = self.processes.get("archivist")
        if found is None or found.dead:
            found = self.processes["archivist"] = Process("archivist", LocalArchivist(self._store, self._spec))
        return await found.snapshot(slot)

    async def _weights(self, digest: str) -> object:
        trainer, _ = await self.trainer()
        return await trainer.weights(digest)

    # ------------------------------------------------------------------ Launcher

    async def engine(self, name: str) -> Any:
        self.processes[name] = Process(name, self._engine(self._spec))
        return self.processes[name]

    async def worker(self, name: str) -> Any:
        manager = self.processes["manager"]
        worker = build_worker(
            self._spec, name, manager.target.incarnation, cast("Any", manager), self._find_engine, self._store
        )
        self.processes[name] = Process(name, worker)
        return self.processes[name]

    def _find_engine(self, name: str) -> Any:
        return self.processes.get(name) or Process.gone(name)

    async def stop(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            if isinstance(process.target, EngineServer):
                await process.target.close()

    # ------------------------------------------------------------------ death

    def kinds(self, kind: str) -> list[str]:
        """Names of living processes of a kind: manager, trainer, engine, worker, archivist."""
        return [name for name, process in self.processes.items() if name.split("-")[0] == kind and not process.dead]

    def kill(self, name: str) -> None:
        """SIGKILL one process. The manager's loops stop in the middle of whatever they do."""
        process = self.processes[name]
        process.kill()
        if isinstance(process.target, RolloutManager):
            process.target.kill()
            if self.fleet is not None:
                self.fleet.kill()

    async def _stop_all(self, but: tuple[str, ...] = ()) -> None:
        if self.fleet is not None:
            self.fleet.kill()
        for name in [name for name in self.processes if name not in but]:
            process = self.processes[name]
            if isinstance(process.target, RolloutManager):
                process.target.kill()
            await self.stop(name)

    async def close(self) -> None:
        """End everything."""
        await self._stop_all()
