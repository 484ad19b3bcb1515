"""What a command needs of a run that may be alive: its store, and its manager if there is one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from flows.config import RunConfig
from storage.errors import ActorLost, ResourceUnavailable
from storage.filesystem import Store
from storage.opening import open_store, reach
from storage.runs import open_run


def open_reached(url: str) -> Store:
    """The store at `url`, which answers. Raises `StorageUnusable`."""
    store = open_store(url)
    reach(store, "runs")
    return store


def ask_manager(store: Store, run: str, ask: Callable[[Any], Awaitable[Any]]) -> Any | None:
    """What the run's manager answers; None when none lives on the cluster this process is told of (cluster.address of
    the run, else RAY_ADDRESS)."""
    config = RunConfig.model_validate(open_run(store, run).settings)
    if config.cluster.address == "auto" and "RAY_ADDRESS" not in os.environ:
        return None
    # Ray takes seconds to import, and most commands need none.
    from gpu.actors import Remote, find_actor
    from gpu.cluster import connect

    async def call() -> Any:
        return await ask(Remote("manager", find_actor(spec.namespace, spec.run, "manager")))

    try:
        spec = config.spec(run)
        connect(spec.ray_address, spec.namespace)
        return asyncio.run(call())
    except (ActorLost, ResourceUnavailable):
        return None
