"""A run whose rollouts live on a host behind HTTP, while processes of the run are killed: each effect once, and the
host keeps nothing when the run is over."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from gpu.environments.participants.client import HttpHost
from gpu.generation.engine import Cached
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from gpu.spec import RunSpec
from storage import schema
from storage.history import read_all
from tests.faults import hosted
from tests.faults.house import RUN, House, small, until
from tests.gpu.participants.hosts import effects, host

TASKS, SIBLINGS = 8, 2


def engine(spec: RunSpec) -> EngineServer:
    return EngineServer(FakeEngine(slots=8, tokens=1, vocabulary=40, by_rollout=True), Cached.KEEP)


def house_of(folder: Path, url: str) -> House:
    config = small(
        environment={"name": hosted.NAME, "options": {"url": url, "tasks": TASKS}},
        rollout={"siblings": SIBLINGS, "executing": 8},
        generation={"max_length": 32},
    )
    return House(folder, config, engine=engine)


@pytest.mark.parametrize("kinds", [(), ("worker",), ("manager",), ("worker", "manager", "driver", "engine")], ids=str)
async def test_results_on_a_host_are_acknowledged_once_they_are_durable_whoever_dies(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    ledger, dice = tmp_path / "effects", random.Random(str(kinds))
    async with host(ledger=ledger) as running:
        house = house_of(tmp_path / "run", running.url)

        def done() -> int:
            found = house.cluster.kinds("manager")
            return house.manager().control.ledger.counts["rollouts_sealed"] if found else -1

        async def chaos(house: House) -> None:
            for moment in sorted(dice.sample(range(1, TASKS * SIBLINGS - 4), 3 if kinds else 0)):
                await until(lambda moment=moment: done() >= moment, 90.0)
                house.kill(dice.choice(kinds), dice)

        await house.run(chaos, timeout=120.0)
        report = house.check()
        assert (report.acknowledgements_owed, report.acknowledgements_expired) == (0, 0)
        resource = HttpHost(running.transport())
        _, kept = await resource.unacknowledged()
        await resource.close()
        assert kept == (), "nothing is kept for nobody"
        assert not running.core.sessions.whole(), "no session is left"
    counted = effects(ledger)
    assert set(counted.values()) == {1}
    lineages = Counter(request.rsplit(".", 2)[0] for request in counted)
    rollouts = {name.partition("~")[0] for name, turns in lineages.items() if turns == hosted.TURNS}
    assert len(rollouts) == TASKS * SIBLINGS, "each rollout has a lineage with each of its effects"
    acked = [
        pair
        for segment in read_all(house.store, RUN)
        for row in segment.rows
        if isinstance(row.record, schema.AckDone)
        for pair in zip(row.record.groups, row.record.siblings, strict=True)
    ]
    assert set(Counter(acked).values()) == {1}
    assert len(acked) == TASKS * SIBLINGS
