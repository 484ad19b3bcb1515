"""Each process kind is killed at seeded moments, in process with real parts; what is trained stays the source."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path

import pytest

from gpu.building import build_trainer
from gpu.generation.engine import Cached
from gpu.generation.fake_engine import FakeEngine
from gpu.generation.server import EngineServer
from gpu.local import LocalCluster
from gpu.rollout.messages import Caller, Grant
from gpu.training.host import TrainerHost
from gpu.training.messages import Trained
from storage.clock import SystemClock
from storage.errors import ActorLost, CommitUnknown, StoreUnavailable
from storage.filesystem import Bytes
from storage.local import LocalStore
from tests.faults.house import House, small, until

KINDS = ["driver", "manager", "worker", "engine", "trainer"]
ROUNDS = int(os.environ.get("TIDEGATE_KILLS", "1"))


@pytest.mark.parametrize("round_", range(ROUNDS))
@pytest.mark.parametrize("kind", KINDS)
async def test_a_kill_at_a_seeded_moment_loses_and_repeats_nothing(kind: str, round_: int, tmp_path: Path) -> None:
    dice = random.Random(f"{kind}-{round_}")
    house = House(tmp_path, small(environment={"name": "reverse", "options": {"letters": 3}, "epochs": 1}))
    killed: list[int] = []

    async def chaos(house: House) -> None:
        await until(lambda: "manager" in house.cluster.processes)
        for target in sorted(dice.sample(range(20), 2)):
            await until(lambda target=target: house.manager().control.ledger.step >= target)
            await asyncio.sleep(dice.random() * 0.1)
            killed.append(house.kill(kind, dice))
            await asyncio.sleep(0.05)

    await house.run(chaos)
    report = house.check()
    assert any(killed), "the kill must have hit"
    if kind in ("driver", "worker", "engine"):
        assert report.incarnations == 1, "healed inside the incarnation"
    if kind == "manager":
        assert report.incarnations > 1
    if kind in ("driver", "manager", "trainer"):
        assert house.attempts > 1, "the flow attempt failed and its retry resumed"


@pytest.mark.parametrize("seed", range(max(1, ROUNDS // 2)))
async def test_many_kills_of_every_kind_in_one_run(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    house = House(tmp_path, small(environment={"name": "reverse", "options": {"letters": 3}, "epochs": 1}))
    hits: dict[str, int] = dict.fromkeys(KINDS, 0)

    steps = house.length // house.spec.limits.batch
    moments = sorted(dice.sample(range(1, steps - 2), 8))  # counted in steps: a fast machine has the same ones

    def done() -> int:
        return house.manager().control.ledger.step if house.cluster.kinds("manager") else -1

    async def chaos(house: House) -> None:
        for moment in moments:
            await until(lambda moment=moment: done() >= moment)
            await asyncio.sleep(dice.random() * 0.02)
            kind = dice.choice(KINDS)
            hits[kind] += house.kill(kind, dice)

    await house.run(chaos, timeout=120.0)
    house.check()
    assert sum(hits.values()) >= 3


class Trapped(TrainerHost):
    """A trainer that calls `trap(step)` after the optimizer step, before anybody learns of it."""

    trap = staticmethod(lambda step: None)

    async def train(self, caller: Caller, grant: Grant) -> Trained:
        trained = await super().train(caller, grant)
        await asyncio.sleep(0)
        type(self).trap(trained.step)
        await asyncio.sleep(0.01)
        return trained


def trapped_house(folder: Path, trap) -> House:
    class Here(Trapped):
        pass

    Here.trap = staticmethod(trap)
    house = House(folder)
    house.cluster = LocalCluster(
        house.spec, house.store, SystemClock(), engine=house.engine,
        trainer=lambda spec, store: Here(store, spec.run, lambda: build_trainer(spec)),
    )  # fmt: skip
    return house


@pytest.mark.parametrize("victims", [["driver"], ["trainer"], ["manager"], ["driver", "manager", "trainer"]])
async def test_death_right_after_the_optimizer_step_and_before_its_commit(victims: list[str], tmp_path: Path) -> None:
    dice, done = random.Random(0), []

    def trap(step: int) -> None:
        if step == 4 and not done:
            done.append(step)
            for victim in victims:
                assert house.kill(victim, dice)

    house = trapped_house(tmp_path, trap)
    await house.run()
    report = house.check()
    assert done == [4]
    assert house.attempts == 2
    if victims == ["driver"]:
        assert house.resumed[-1].ahead, "the trained step is committed by the next driver, not trained again"
        assert report.steps_redone == 0
    if "trainer" in victims:
        assert house.resumed[-1].redone == 3 - house.resumed[-1].base
        assert house.steps_seen.count(4) == 1, "the lost step is trained from its own lease, issued again"


class FlakyStore(LocalStore):
    """Fails journal creates while `trouble` counts down: refused, or applied with a lost reply."""

    trouble = 0
    applied = False
    failed = 0

    def create(self, key: str, data: Bytes) -> None:
        if "/journal/" in key and self.trouble > 0:
            self.trouble -= 1
            self.failed += 1
            if self.applied:
                with contextlib.suppress(FileExistsError):
                    super().create(key, data)
                raise CommitUnknown("no reply", expected="a reply", action="read back")
            raise StoreUnavailable("no answer", expected="an answer", action="retry")
        super().create(key, data)


@pytest.mark.parametrize("applied", [False, True], ids=["append failed", "reply lost"])
async def test_a_commit_whose_append_fails_or_whose_reply_is_lost_is_retried_until_known(
    applied: bool, tmp_path: Path
) -> None:
    store = FlakyStore(tmp_path)
    store.applied = applied

    def trap(step: int) -> None:
        if step in (2, 5):
            store.trouble = 3

    house = trapped_house(tmp_path, trap)
    house.store = store
    house.cluster._store = store
    await house.run()
    report = house.check()
    assert store.failed >= (6 if not applied else 2)
    assert (house.attempts, report.incarnations) == (1, 1)


async def test_a_commit_whose_reply_never_reaches_the_driver_is_not_trained_again(tmp_path: Path) -> None:
    house = House(tmp_path)
    lost: list[int] = []

    async def chaos(house: House) -> None:
        await until(lambda: "manager" in house.cluster.processes)
        manager = house.manager()
        commit = manager.commit

        async def losing(*args, **named):
            await commit(*args, **named)
            if not lost:
                lost.append(args[2])
                raise ActorLost("the reply was lost", expected="a reply", action="ask again")

        manager.commit = losing

    await house.run(chaos)
    report = house.check()
    assert lost
    assert house.attempts == 2
    assert report.steps_redone == 0
    assert house.resumed[-1].warm


async def test_a_manager_that_dies_during_an_update_leaves_no_version_in_doubt(tmp_path: Path) -> None:
    house = House(tmp_path)
    dice = random.Random(1)

    async def chaos(house: House) -> None:
        await until(lambda: "manager" in house.cluster.processes)
        await until(lambda: house.manager().control.ledger.step >= 3)
        await until(lambda: not house.manager().control.admission.is_open)
        house.kill("manager", dice)

    await house.run(chaos)
    assert house.check().incarnations == 2


async def test_a_zombie_driver_is_refused_everywhere(tmp_path: Path) -> None:
    from storage.errors import RunFenced
    from tasks.run import open_session
    from tasks.session import begin, session

    house = House(tmp_path)
    begin()
    await open_session(house.spec, house.cluster, "first")
    old = session()
    begin()
    await open_session(house.spec, house.cluster, "first")
    new = session()
    assert new.caller.token == old.caller.token + 1
    await new.trainer.claim(new.caller)
    for call in (
        lambda: old.manager.lease(old.caller, 1.0),
        lambda: old.manager.commit(old.caller, 1, 1, "s", "w", {}),
        lambda: old.manager.acquire(old.caller, "x", 1.0),
        lambda: old.manager.publish_policy(old.caller, "d"),
        lambda: old.manager.finish(old.caller, "x"),
        lambda: old.trainer.publish(old.caller, 0),
        lambda: old.trainer.claim(old.caller),
    ):
        with pytest.raises(RunFenced):
            await call()
    await house.cluster.close()


async def test_another_flow_run_cannot_take_a_live_run_without_saying_so(tmp_path: Path) -> None:
    from storage.errors import RunBusy
    from tasks.run import open_session
    from tasks.session import begin

    house = House(tmp_path)
    begin()
    await open_session(house.spec, house.cluster, "first")
    with pytest.raises(RunBusy, match="driven by first") as caught:
        await open_session(house.spec, house.cluster, "second")
    assert caught.value.exit_code == 2
    opened = await open_session(house.spec, house.cluster, "second", take_over=True)
    assert opened.token == 2
    await house.cluster.close()


class Slow(FakeEngine):
    """Takes a moment for each token, so that turns lie apart."""

    def step(self):
        import time

        time.sleep(0.03)
        return super().step()


@pytest.mark.parametrize("victim", ["worker", "manager", "engine"])
async def test_a_multi_turn_rollout_survives_a_kill_at_its_last_turn(victim: str, tmp_path: Path) -> None:
    house = House(
        tmp_path,
        small(
            environment={"name": "guess", "options": {"letters": 12, "turns": 4}},
            generation={"workers": 1, "engines": 1},
            storage={"flush_interval": 0.002},
        ),
        engine=lambda spec: EngineServer(Slow(slots=8, tokens=1, vocabulary=28), Cached.KEEP),
    )
    dice = random.Random(2)
    seen: list[tuple[int, int]] = []

    def last_turns() -> list[tuple[int, int]]:
        groups = house.manager().control.ledger.groups.values()
        return [
            (group.ordinal, sibling)
            for group in groups
            for sibling, rollout in enumerate(group.rollouts)
            if rollout.state.value == "live" and rollout.boundary is not None and rollout.boundary.turn == 2
        ]

    async def chaos(house: House) -> None:
        await until(lambda: "manager" in house.cluster.processes)
        await until(lambda: bool(last_turns()) and house.manager().control.books.journal.undurable_age() == 0)
        seen.extend(last_turns())
        house.kill(victim, dice)

    await house.run(chaos)
    report = house.check()
    assert len(seen) >= 1
    assert report.rollouts_continued >= len(seen), "it goes on from its last turn"
