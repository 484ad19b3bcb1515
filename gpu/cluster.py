"""A run's processes on a Ray cluster: connect, place, find, replace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray._private import utils

from gpu.actors import (
    ArchivistActor,
    EngineActor,
    Hosted,
    Remote,
    TrainerActor,
    WorkerActor,
    actor_name,
    find_actor,
    start_actor,
    start_helper,
)
from gpu.collector import collect_by_the_clock
from gpu.fence import until_fenced
from gpu.fleet import Fleet
from gpu.metrics import publish_for_ever
from gpu.place import may_live
from gpu.prepare import claim_manager
from gpu.spec import RunSpec
from storage.clock import SystemClock
from storage.errors import ActorLost, ResourceUnavailable, RunFenced, TidegateError
from storage.opening import open_store
from storage.schema import LedgerSnapshot

log = logging.getLogger(__name__)


def connect(address: str, namespace: str) -> None:
    """Connect this process to a Ray cluster. Raises `ResourceUnavailable`.

    Ray replaces the SIGTERM handler by an exit, while it is still starting, and then by one of its core that prints a
    stack and ends the process. It is kept from the first; after the second the handler is put back.
    """
    if ray.is_initialized():
        return
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    found = os.environ.get("RAY_ADDRESS") if address == "auto" else address
    theirs, utils.set_sigterm_handler = utils.set_sigterm_handler, _keep_sigterm_handler
    try:
        if found is None:
            ray.init(
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.WARNING,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",  # a cluster of this process is nobody else's
            )
        else:
            _check_reachable(found)
            ray.init(address=found, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceUnavailable(
            f"no Ray cluster at {found or 'this machine'}: {str(error).splitlines()[0]}",
            expected="a running cluster, with the same RAY_AUTH_MODE as here",
            action="start it (`ray start --head`), or set cluster.address",
        ) from error
    finally:
        utils.set_sigterm_handler = theirs
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _keep_sigterm_handler(handler: object) -> None:
    """In place of Ray's own, in this process only."""


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes. Raises `OSError`."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((host, int(port)), timeout=10.0).close()


def check_resources(spec: RunSpec) -> None:
    """Refuse what this cluster can never place, before anything is started. Raises `ResourceUnavailable`."""
    there = ray.cluster_resources()
    processes = [spec.engine.process] * spec.fleet.num_engines + [spec.worker.process] * spec.fleet.num_workers
    processes.append(spec.trainer)
    for name, asked in (("GPU", sum(p.num_gpus for p in processes)), ("CPU", sum(p.num_cpus for p in processes))):
        if asked > there.get(name, 0.0):
            raise ResourceUnavailable(
                f"{asked:g} {name}s for {spec.fleet.num_engines} engines, {spec.fleet.num_workers} workers, a trainer",
                expected=f"at most {there.get(name, 0.0):g}, all that this Ray cluster has",
                action="ask for less (generation.gpus, training.gpus, .cpus), or add nodes",
            )


FAREWELL_S = 3.0
"""So long a fenced manager still answers: whoever waits for it is told why it ends."""


class ManagerActor(Hosted):
    """The manager with its fleet. The fleet's processes are detached too: a dead manager's successor stops them. A
    fenced manager has no successor here, so it stops them itself."""

    async def make(self, *args: Any) -> int:
        """Claim the run; returns the incarnation."""
        spec, owner, reason = args
        self._collecting = asyncio.create_task(collect_by_the_clock())
        store = open_store(spec.storage_url)
        manager = await asyncio.to_thread(claim_manager, store, spec, SystemClock(), owner, reason)
        self.target = manager
        manager.archive = RayArchive(spec)
        manager.start()
        self._fleet = Fleet(manager, RayLauncher(spec, manager.incarnation), self._weights(spec), spec.fleet)
        self._fleet.start()
        self._publishing = asyncio.create_task(publish_for_ever(spec.run, manager.metrics))
        self._end = asyncio.create_task(self._end_when_fenced(spec, until_fenced(
            manager, store, spec.run, spec.steps.alive_s / 3
        )))  # fmt: skip
        return manager.incarnation

    async def _end_when_fenced(self, spec: RunSpec, fenced: Coroutine[Any, Any, None]) -> None:
        """The newer incarnation lives elsewhere: nothing of this one may stay on its GPUs. Where a newer manager has
        this one's name, the trainer is that one's."""
        await fenced
        log.error("op=fence run=%s decision=end reason=%s", spec.run, self.target.callers.fatal)
        await self._fleet.stop()
        await asyncio.sleep(FAREWELL_S)
        me = ray.get_runtime_context()
        with contextlib.suppress(ActorLost):
            named = find_actor(spec.namespace, spec.run, "manager")
            if named._actor_id.hex() == me.get_actor_id():
                stop_actor(spec, "trainer")
        ray.kill(me.current_actor)

    @staticmethod
    def _weights(spec: RunSpec) -> Callable[[str], Coroutine[Any, Any, object]]:
        async def fetch(digest: str) -> object:
            return await Remote("trainer", find_actor(spec.namespace, spec.run, "trainer")).weights(digest)

        return fetch


class RayArchive:
    """The manager's archivist, a process of its own from the first snapshot on; it ends with the manager's."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._archivist: Remote | None = None

    async def __call__(self, slot: int) -> LedgerSnapshot:
        """Raises what the archivist raises, `ActorLost` when it died; the next call starts another."""
        if self._archivist is None:
            self._archivist = Remote("archivist", await start_helper(ArchivistActor, self._spec, "archivist"))
        try:
            return await self._archivist.snapshot(slot)
        except ActorLost:
            self._archivist = None
            raise


class RayLauncher:
    """Starts engines and workers for a manager's fleet."""

    def __init__(self, spec: RunSpec, incarnation: int) -> None:
        self._spec, self._incarnation = spec, incarnation

    async def engine(self, name: str) -> Any:
        handle = await start_actor(EngineActor, self._spec, name, self._spec.engine.process, self._spec)
        return Remote(name, handle)

    async def worker(self, name: str) -> Any:
        manager = find_actor(self._spec.namespace, self._spec.run, "manager")
        handle = await start_actor(
            WorkerActor, self._spec, name, self._spec.worker.process, self._spec, name, self._incarnation, manager
        )
        return Remote(name, handle)

    async def stop(self, name: str) -> None:
        stop_actor(self._spec, name)


def stop_actor(spec: RunSpec, process: str) -> bool:
    """Kill a process if it is there."""
    try:
        ray.kill(find_actor(spec.namespace, spec.run, process))
        return True
    except ActorLost:
        return False


def processes_of(spec: RunSpec) -> list[str]:
    """Names of the run's living processes."""
    prefix = actor_name(spec.run, "")
    found: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return [
        a["name"].removeprefix(prefix)
        for a in found
        if a["namespace"] == spec.namespace and a["name"].startswith(prefix)
    ]


async def release_owner(namespace: str, run: str, owner: str) -> list[int]:
    """Release the holds of a run's dead driver, if there is a living manager. A flow run whose older process ended may
    have a newer one that drives on: its holds stay."""
    try:
        manager = Remote("manager", find_actor(namespace, run, "manager"))
        if may_live((await manager.status())["driver_place"]):
            return []
        return await manager.release_owner(owner)
    except ActorLost:
        return []


class RayCluster:
    """The manager and the trainer of one run, as a driver finds or starts them."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    async def manager(self, owner: str) -> tuple[Remote, bool]:
        """The living manager, or a new incarnation. One that does not answer, or has ended with a fatal error, is
        replaced; a fenced one is not: somebody newer owns the run. Raises `RunFenced` and what claiming raises."""
        reason = "start"
        try:
            found = Remote("manager", find_actor(self._spec.namespace, self._spec.run, "manager"))
            fatal = await self._condition(found)
            if fatal is None:
                return found, False
            if isinstance(fatal, RunFenced):
                raise fatal
            reason = f"the manager ended: {fatal.code}"
        except ActorLost as error:
            reason = f"no manager: {error.found}"[:200]
        self._stop_fleet()
        handle = await start_actor(ManagerActor, self._spec, "manager", None, self._spec, owner, reason)
        return Remote("manager", handle), True

    async def _condition(self, manager: Remote) -> TidegateError | None:
        """The fatal error of a manager; raises `ActorLost` when it does not answer in time."""
        try:
            async with asyncio.timeout(self._spec.steps.alive_s):
                return await manager.condition()
        except TimeoutError as error:
            raise ActorLost(
                f"the manager did not answer for {self._spec.steps.alive_s:.0f} s",
                expected="an answer",
                action="nothing: it is replaced",
            ) from error

    def _stop_fleet(self) -> None:
        """Stop everything of older incarnations but the trainer, which may hold exactly the state of the journal."""
        for process in processes_of(self._spec):
            if process != "trainer":
                stop_actor(self._spec, process)

    async def trainer(self) -> tuple[Remote, bool]:
        """The living trainer, or a new one with nothing loaded; whether it is new."""
        try:
            found = Remote("trainer", find_actor(self._spec.namespace, self._spec.run, "trainer"))
            async with asyncio.timeout(self._spec.steps.alive_s):
                await found.status()
            return found, False
        except (ActorLost, TimeoutError):
            stop_actor(self._spec, "trainer")
            handle = await start_actor(TrainerActor, self._spec, "trainer", self._spec.trainer, self._spec)
            return Remote("trainer", handle), True

    async def stop_trainer(self) -> None:
        """End the trainer, which nobody has claimed."""
        stop_actor(self._spec, "trainer")

    async def close(self) -> None:
        """End every process of the run."""
        for process in processes_of(self._spec):
            stop_actor(self._spec, process)
