"""The processes of a run as Ray actors, and calls to them that speak our errors.

Each actor hosts one part and answers `call(method, ...)` for it. Ray restarts none of them by itself: the manager's
fleet replaces engines and workers, a retried driver replaces manager and trainer. Torch is imported only in processes
that compute with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from gpu.collector import collect_by_the_clock
from gpu.spec import ProcessSpec, RunSpec
from storage.archivist import Archivist
from storage.errors import ActorLost, ResourceUnavailable, TidegateError
from storage.opening import open_store
from storage.publisher_process import open_publisher
from storage.runs import open_run
from storage.schema import LedgerSnapshot


class Remote:
    """An actor whose methods are awaited like a local object's.

    Errors of ours arrive as themselves; a dead actor is `ActorLost`.
    """

    def __init__(self, name: str, handle: Any) -> None:
        self.name, self._handle = name, handle

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("__"):
            raise AttributeError(method)

        async def call(*args: Any, **named: Any) -> Any:
            try:
                return await self._handle.call.remote(method, *args, **named)
            except RayTaskError as error:
                if isinstance(error.cause, TidegateError):
                    raise error.cause from None
                raise
            except (RayActorError, GetTimeoutError) as error:
                raise ActorLost(
                    f"{self.name} does not answer: {str(error).splitlines()[0]}",
                    expected="a living process",
                    action="nothing for engines and workers; retry the flow run for manager and trainer",
                ) from error

        return call


class Hosted:
    """Base of our actors: one target object, called by method name."""

    target: Any = None

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        """A call of the target; one that comes early waits until the target is made."""
        await self._opened.wait()
        return await getattr(self.target, method)(*args, **named)

    async def open(self, *args: Any) -> Any:
        """Make the target."""
        result = await self.make(*args)
        self._opened.set()
        return result

    async def make(self, *args: Any) -> Any:
        """Set `target`; on the actor's loop."""
        raise NotImplementedError

    async def pid(self) -> int:
        return os.getpid()


def options(name: str, namespace: str, process: ProcessSpec | None) -> dict[str, Any]:
    """How Ray places and names a process. Detached, so that it outlives the driver."""
    return {
        "name": name,
        "namespace": namespace,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 1000,
        "num_cpus": process.num_cpus if process else 0,
        "num_gpus": process.num_gpus if process else 0,
    }


class TrainerActor(Hosted):
    async def make(self, *args: Any) -> None:
        from gpu.building import build_trainer
        from gpu.training.ray_host import RayTrainerHost

        (spec,) = args
        store, publisher = open_store(spec.storage_url), open_publisher(spec.storage_url)
        self.target = RayTrainerHost(store, spec.run, lambda: build_trainer(spec), publisher)


class EngineActor(Hosted):
    async def make(self, *args: Any) -> None:
        from gpu.building import build_engine

        (spec,) = args
        self.target = build_engine(spec)

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        await self._opened.wait()
        if method == "update":
            version, (reference,) = args
            return await self.target.update(version, await reference)
        return await super().call(method, *args, **named)


class WorkerActor(Hosted):
    async def make(self, *args: Any) -> None:
        from gpu.building import build_worker

        spec, name, incarnation, manager = args

        def engines(engine: str) -> Any:
            return Remote(engine, find_actor(spec.namespace, spec.run, engine))

        self.target = build_worker(
            spec, name, incarnation, cast("Any", Remote("manager", manager)), engines, open_store(spec.storage_url)
        )


class ArchivistActor(Hosted):
    """Reads the journal beside the manager and writes ledger snapshots."""

    async def make(self, *args: Any) -> None:
        (spec,) = args
        self._collecting = asyncio.create_task(collect_by_the_clock())
        store = open_store(spec.storage_url)
        info = await asyncio.to_thread(open_run, store, spec.run)
        self._archivist = Archivist(store, spec.run, info.num_siblings)
        self._one = asyncio.Lock()
        self.target = self

    async def snapshot(self, slot: int) -> LedgerSnapshot:
        async with self._one:
            return await asyncio.to_thread(self._archivist.snapshot, slot)


def actor_name(run: str, process: str) -> str:
    return f"{run}/{process}"


def find_actor(namespace: str, run: str, process: str) -> Any:
    """The living actor of that name. Raises `ActorLost`."""
    try:
        return ray.get_actor(actor_name(run, process), namespace=namespace)
    except ValueError as error:
        raise ActorLost(
            f"no process {process} of run {run!r}", expected="a living process", action="retry; it is started again"
        ) from error


def _unplaced(spec: RunSpec, process: str, resources: ProcessSpec | None) -> ResourceUnavailable:
    asked = f"{resources.num_cpus} CPUs and {resources.num_gpus} GPUs" if resources else "no CPU or GPU"
    there, free = ray.cluster_resources(), ray.available_resources()
    return ResourceUnavailable(
        f"{process} was not ready after {spec.start_s:.0f} s; it asked for {asked}",
        expected=f"room in a cluster of {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs, of which "
        f"{free.get('CPU', 0):g} and {free.get('GPU', 0):g} are free",
        action="ask for less, free or add nodes, or raise cluster.start_deadline",
    )


def _create(kind: type[Hosted], spec: RunSpec, process: str, resources: ProcessSpec | None) -> Any:
    made = ray.remote(kind).options(**options(actor_name(spec.run, process), spec.namespace, resources))
    try:
        return made.remote()
    except ValueError as error:  # what Ray raises for a name that is taken
        raise ActorLost(
            f"another {process} of run {spec.run!r} was started at the same moment",
            expected="its name to be free",
            action="retry: if another flow run drives this run, the answer says so",
        ) from error


async def start_helper(kind: type[Hosted], spec: RunSpec, process: str) -> Any:
    """Start a process without a name that takes no CPU and ends with this one; returns the handle. Raises as
    `start_actor` does."""
    return await _open(ray.remote(kind).options(num_cpus=0).remote(), spec, process, None, spec)


async def start_actor(
    kind: type[Hosted], spec: RunSpec, process: str, resources: ProcessSpec | None, *args: Any
) -> Any:
    """Start a process and open its part; returns the handle. Raises `ResourceUnavailable` when it cannot be placed
    within the bound, and what opening it raises."""
    return await _open(_create(kind, spec, process, resources), spec, process, resources, *args)


async def _open(handle: Any, spec: RunSpec, process: str, resources: ProcessSpec | None, *args: Any) -> Any:
    try:
        async with asyncio.timeout(spec.start_s):
            await handle.open.remote(*args)
        return handle
    except TimeoutError as error:
        ray.kill(handle)
        raise _unplaced(spec, process, resources) from error
    except RayTaskError as error:
        ray.kill(handle)
        raise (error.cause if isinstance(error.cause, TidegateError) else error) from None
    except RayActorError as error:
        raise ActorLost(
            f"{process} died while it started: {str(error).splitlines()[0]}",
            expected="a process that starts",
            action="look at the Ray logs of the process",
        ) from error
