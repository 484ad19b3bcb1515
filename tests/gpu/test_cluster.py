"""A run's processes on a real Ray cluster of this machine, which declares a GPU it does not have."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from flows.settings import environment
from gpu.actors import Remote, find_actor, start_actor
from gpu.cluster import ManagerActor, RayCluster, check_resources, processes_of
from gpu.spec import RunSpec
from storage.errors import ActorLost, ResourceUnavailable, RunFenced
from storage.history import read_all
from storage.journal import rows_of
from storage.local import LocalStore
from storage.schema import LedgerSnapshot, RunClaimed
from storage.verify import verify
from tasks.run import Resumed
from tests import servers
from tests.faults.house import RUN, attempt, small, until
from tests.processes import wait_for

NAMESPACE = "test-cluster"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two CPUs and one declared GPU."""
    with servers.ray_instance(num_cpus=2, num_gpus=1, namespace=NAMESPACE, object_store_memory=128 << 20):
        yield


def spec_of(folder: Path, **changes: dict[str, object]) -> RunSpec:
    changes.setdefault("generation", {})
    changes["generation"] = {"engines": 1, "workers": 1, "cpus": 0.25, **changes["generation"]}
    changes["storage"] = {"url": str(folder), "flush_interval": 0.05, **changes.get("storage", {})}
    changes["cluster"] = {"namespace": NAMESPACE, "restart_pause": 0.1, **changes.get("cluster", {})}
    return small(**changes).spec(RUN)


async def kill(spec: RunSpec, kind: str) -> None:
    """SIGKILL the process of a kind that lives now."""
    name = next(name for name in processes_of(spec) if name.split("-")[0] == kind)
    os.kill(await find_actor(spec.namespace, spec.run, name).pid.remote(), signal.SIGKILL)


def archivists() -> list[int]:
    """Process ids of archivists, which have no name in Ray."""
    found = Path("/proc").glob("[0-9]*/cmdline")
    return [int(one.parent.name) for one in found if one.read_bytes().startswith(b"ray::ArchivistActor")]


async def test_a_run_on_ray_survives_the_death_of_each_of_its_processes(tmp_path: Path) -> None:
    """Engine and worker are replaced beside the driver; manager and trainer fail its attempt, and the next resumes. The
    archivist ends with its manager, and the next one has its own."""
    spec = spec_of(
        tmp_path, generation={"gpus": 0.5}, training={"gpus": 0.25}, storage={"snapshot_every": 8},
        environment={"name": "reverse", "options": {"letters": 3}, "epochs": 1},
    )  # fmt: skip
    check_resources(spec)
    free = ray.available_resources().get("GPU", 0.0)
    resumed: list[Resumed] = []
    victims = {3: "engine", 8: "worker", 13: "manager", 18: "trainer"}
    gpus: list[float] = []
    background: list[asyncio.Task[None]] = []

    def stepped(step: int) -> None:
        gpus.append(free - ray.available_resources().get("GPU", 0.0))
        if step in victims:
            background.append(asyncio.ensure_future(kill(spec, victims.pop(step))))

    attempts = 0
    while True:
        attempts += 1
        assert attempts <= 6
        try:
            await attempt(spec, RayCluster(spec), resumed.append, stepped)
            break
        except ActorLost:
            continue
    await asyncio.gather(*background)
    assert not victims, "every process was killed"
    assert attempts >= 3, "the deaths of manager and trainer each failed an attempt"
    assert max(gpus) == 0.75, "engine and trainer were placed with the GPU fractions they asked for"
    report = verify(LocalStore(tmp_path), RUN)
    assert report.sound, report.problems
    assert (report.handed_out, report.consumed, report.unsettled) == (64, 64, 0)
    assert report.finished == "source exhausted"
    rows = list(rows_of(read_all(LocalStore(tmp_path), RUN)))
    _, second, *_ = [row.seq for row in rows if isinstance(row.record, RunClaimed)]
    snapshots = [row.seq for row in rows if isinstance(row.record, LedgerSnapshot)]
    assert min(snapshots) < second < max(snapshots), "of the first incarnation, and of a later one"

    # The run is over: another attempt finds that out, and closing leaves no process behind.
    await attempt(spec, RayCluster(spec), resumed.append, stepped)
    await RayCluster(spec).close()
    for _ in range(100):
        if not processes_of(spec):
            break
        await asyncio.sleep(0.1)
    assert processes_of(spec) == []
    await asyncio.to_thread(wait_for, lambda: not archivists())
    with pytest.raises(ActorLost):
        await Remote("manager", find_actor(NAMESPACE, RUN, "manager")).status()


async def test_a_manager_that_ended_with_an_error_but_still_answers_is_replaced_at_once(tmp_path: Path) -> None:
    """Its name is still taken when its successor starts."""
    spec = spec_of(tmp_path)
    incarnations: list[int] = []
    for reason in ("first", "second"):
        manager, new = await RayCluster(spec).manager("flow-run")
        assert new
        incarnations.append((await manager.attach("flow-run", False, "here:1")).caller.incarnation)
        with pytest.raises(Exception, match="await"):  # `fail` is no call for others: it answers nothing
            await manager.fail(ValueError(reason))
        condition = await manager.condition()
        assert reason in condition.found
    await RayCluster(spec).close()
    assert incarnations == [1, 2]


async def last_words(manager: Remote) -> object:
    """The condition of a manager just before it was gone."""
    said: object = None
    while True:
        try:
            said = await manager.condition()
        except ActorLost:
            return said
        await asyncio.sleep(0.1)


async def test_a_run_claimed_from_another_cluster_ends_here_with_all_its_processes(tmp_path: Path) -> None:
    """Two namespaces see as little of each other as two clusters. Nobody drives the first and nothing happens in it, so
    it finds out by looking; its manager says why before it ends, and what belongs to the newer one lives on."""
    old, new = (
        spec_of(tmp_path, cluster={"namespace": f"{NAMESPACE}-{name}", "alive_deadline": 15.0})
        for name in ("old", "new")
    )
    manager, _ = await RayCluster(old).manager("first")
    await RayCluster(old).trainer()
    old_engine = "engine-1-0-0"
    await until(lambda: old_engine in processes_of(old))

    watching = asyncio.create_task(last_words(manager))
    await RayCluster(new).manager("second")
    await RayCluster(new).trainer()
    said = await asyncio.wait_for(watching, 60.0)
    assert isinstance(said, RunFenced)
    assert "incarnation 2" in said.found
    await until(lambda: processes_of(old) == [])
    assert {"manager", "trainer"} <= set(processes_of(new))
    assert await Remote("manager", find_actor(new.namespace, RUN, "manager")).condition() is None
    await RayCluster(new).close()


async def test_two_drivers_that_start_a_manager_at_once_share_it_or_one_is_told_so(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    found = await asyncio.gather(*(RayCluster(spec).manager(owner) for owner in "ab"))
    assert sorted(new for _, new in found) == [False, True]
    # The later one had looked before the earlier one created it.
    with pytest.raises(ActorLost, match="at the same moment"):
        await start_actor(ManagerActor, spec, "manager", None, spec, "b", "start")
    assert (await found[0][0].attach("a", False, "here:1")).caller.incarnation == 1
    await RayCluster(spec).close()


@pytest.mark.parametrize(
    ("section", "says"), [("generation", "1.5 GPUs"), ("training", "1.5 GPUs"), ("cpus", "9.25 CPUs")]
)
def test_what_the_cluster_does_not_have_is_refused_before_anything_starts(
    section: str, says: str, tmp_path: Path
) -> None:
    asked = {"generation": {"cpus": 4.5, "engines": 1, "workers": 1}} if section == "cpus" else {section: {"gpus": 1.5}}
    if section == "cpus":
        asked["training"] = {"cpus": 0.25}
    spec = spec_of(tmp_path / "store", **asked)
    with pytest.raises(ResourceUnavailable) as caught:
        check_resources(spec)
    assert caught.value.exit_code == 2
    assert says in caught.value.found
    assert not (tmp_path / "store").exists()


async def test_what_others_occupy_is_an_error_after_the_bound_that_says_what_is_free(tmp_path: Path) -> None:
    @ray.remote(num_gpus=1, num_cpus=0)
    class Neighbour:
        def ready(self) -> bool:
            return True

    neighbour = Neighbour.remote()
    await neighbour.ready.remote()
    spec = spec_of(tmp_path, training={"gpus": 1.0}, cluster={"start_deadline": 6.0})
    check_resources(spec)
    try:
        with pytest.raises(ResourceUnavailable, match="and 0 are free") as caught:
            await RayCluster(spec).trainer()
        assert "trainer" in caught.value.found
        assert "1.0 GPUs" in caught.value.found
    finally:
        ray.kill(neighbour)
        await RayCluster(spec).close()


def test_a_cluster_that_is_not_there_is_an_error_with_its_address() -> None:
    """In a process of its own: this one is connected."""
    code = (
        "from gpu.cluster import connect\nfrom storage.errors import ResourceUnavailable\n"
        "try:\n    connect('127.0.0.1:1', 'x')\nexcept ResourceUnavailable as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environment()},
    )
    assert "no Ray cluster at 127.0.0.1:1" in done.stdout
