"""The manager alone loses its way to the store while another incarnation takes over: it says
so, writes nothing, and stops when the way is free again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.seaweed import S3Server
from gpu.building import build_trainer
from gpu.local import LocalCluster
from gpu.training.host import TrainerHost
from storage.clock import SystemClock
from storage.errors import RunFenced, StoreUnavailable
from storage.filesystem import Store
from storage.local import LocalStore
from storage.opening import open_store
from tests.faults.house import RUN, House, small, until
from tests.faults.proxy import Fault, proxied


class Behind:
    """A store behind a way that may be cut: then no call gets through."""

    def __init__(self, inner: Store) -> None:
        self._inner, self.cut, self.refused = inner, False, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._or_not(found) if callable(found) else found

    def _or_not(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **named: Any) -> Any:
            if self.cut:
                self.refused += 1
                raise StoreUnavailable("no way to the store", expected="a way", action="wait")
            return call(*args, **named)

        return attempt


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store, Callable[[bool], None]]]:
    """The store as the manager sees it, the same place as the others see it, and what cuts and opens the way."""
    if request.param == "local":
        behind = Behind(LocalStore(tmp_path / "store"))
        yield behind, LocalStore(tmp_path / "store"), lambda cut: setattr(behind, "cut", cut)  # type: ignore[misc]
        return
    server: S3Server = request.getfixturevalue("seaweed")
    prefix = f"p/{uuid.uuid4().hex[:8]}"
    with proxied(server.endpoint) as proxy:

        def cut(now: bool) -> None:
            proxy.clear()
            if now:
                proxy.add(Fault.REFUSED, times=10**9)

        yield open_store(server.url(prefix, endpoint=proxy.endpoint)), open_store(server.url(prefix)), cut


def house_on(folder: Path, store: Store, others: Store) -> House:
    """The manager and its workers use `store`, the trainer uses `others`."""
    house = House(folder, small(storage={"snapshot_every": 1000}), store=store)
    house.cluster = LocalCluster(
        house.spec, store, SystemClock(), engine=house.engine,
        trainer=lambda spec, _: TrainerHost(others, spec.run, lambda: build_trainer(spec)),
    )  # fmt: skip
    return house


def journal(store: Store) -> dict[str, bytes]:
    return {key: store.read(key) for key in store.list(f"runs/{RUN}/journal")}


async def test_a_manager_that_cannot_reach_the_store_is_succeeded_elsewhere_and_writes_nothing_more(
    way: tuple[Store, Store, Callable[[bool], None]], tmp_path: Path
) -> None:
    theirs, direct, cut = way
    lonely = house_on(tmp_path, theirs, direct)
    driving = asyncio.create_task(lonely._attempt())
    await until(lambda: "manager" in lonely.cluster.processes and lonely.manager().control.ledger.step >= 3)
    manager = lonely.manager()
    cut(True)
    await until(lambda: bool(manager.committer.waits_for))
    assert not driving.done(), "it waits, and says why"
    before = await asyncio.to_thread(journal, direct)
    successor = House(tmp_path, small(storage={"snapshot_every": 1000}), store=direct)
    await successor.run()
    assert successor.check().incarnations == 2
    after = await asyncio.to_thread(journal, direct)
    assert before.items() <= after.items()
    cut(False)
    with pytest.raises(RunFenced):
        await asyncio.wait_for(driving, 60.0)
    await lonely.cluster.close()
    assert await asyncio.to_thread(journal, direct) == after, "nothing unacknowledged counts"
    assert isinstance(manager.callers.fatal, RunFenced)
    successor.check()
