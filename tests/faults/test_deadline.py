"""A run whose attempts end before their time is over, at any phase of a step: what the message says is what storage
holds, and the next attempt goes on from there."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.ending import within
from flows.train import TASKS, Phases, plain, save_last, training_step, update
from gpu.spec import DeadlineSpec
from storage.errors import DeadlineReached
from storage.filesystem import Bytes
from storage.inspection import summary
from storage.local import LocalStore
from tasks.deadline import Deadline
from tasks.run import finish_run, open_session, restore_trainer
from tasks.session import session
from tests.faults.house import House, small

UNLIMITED = DeadlineSpec(None, 1.0, 30.0, None)


class Attempts:
    """Attempts at one run, each with a deadline of its own."""

    def __init__(self, house: House) -> None:
        self.house = house

    async def one(self, until: Deadline, phases: Phases) -> None:
        await within(until, phases, self._work(phases))

    async def _work(self, phases: Phases) -> None:
        await open_session(self.house.spec, self.house.cluster, "flow-run")
        resumed = await restore_trainer.fn()
        self.house.resumed.append(resumed)
        step = resumed.step
        if not resumed.ahead:
            await update(phases, step, save=False)
        while await training_step(phases, step + 1):
            step += 1
        await save_last(phases, step)
        await finish_run.fn("source exhausted")

    def stored(self) -> tuple[int, int]:
        """The last committed step and the newest checkpoint's, from storage alone."""
        found = summary(self.house.store, "faults")
        return found["step"], max(found["checkpoints"], default=0)

    def checkpoints(self) -> list[int]:
        """Of every manifest that is complete."""
        return sorted(int(path.name[:9]) for path in (self.house.folder / "runs/faults/checkpoints").iterdir())


def with_phase(phases: Phases, name: str, then: Callable[[int], Any], when: int, *, after: bool) -> Phases:
    """The phases, one of which does something before or after its work for step `when`."""
    whole = getattr(phases, name)

    async def changed(step: int) -> Any:
        if step == when and not after:
            then(step)
        result = await whole(step)
        if step == when and after:
            then(step)
        return result

    return dataclasses.replace(phases, **{name: changed})


def with_publication(phases: Phases, when: int) -> Phases:
    """The phases; the checkpoint that is being uploaded beside training is published before step `when` begins."""
    whole = phases.lease_batch

    async def changed(step: int) -> Any:
        upload = session().upload
        if step == when and upload is not None:
            await asyncio.wait([upload])
        return await whole(step)

    return dataclasses.replace(phases, lease_batch=changed)


STEP = ["lease_batch", "train_batch", "hold_admission", "drain_rollouts", "update_weights", "release_admission"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", STEP)
async def test_a_notice_in_any_phase_ends_the_attempt_with_its_last_step_published(
    tmp_path: Path, name: str, after: bool
) -> None:
    house = House(tmp_path, small(checkpoint={"every": 3}))
    attempts, until = Attempts(house), Deadline(UNLIMITED)
    phases = with_phase(plain(TASKS), name, lambda step: until.notice("spot", 30.0, at_once=True), 5, after=after)
    with pytest.raises(DeadlineReached, match=r"spot: stopped .*; the state after step .* is published") as ended:
        await attempts.one(until, phases)
    committed, checkpoint = attempts.stored()
    assert (ended.value.code, ended.value.exit_code, checkpoint) == ("published", 75, committed)
    assert f"the state after step {committed} is published" in str(ended.value)
    assert committed == (4 if name == "lease_batch" else 5)
    house.cluster.kill("manager")  # the machine goes away
    house.cluster.kill("trainer")
    await house.run()
    assert (house.resumed[1].base, house.resumed[1].redone) == (committed, 0)
    house.check()


async def test_a_batch_that_does_not_come_does_not_hold_up_the_end(tmp_path: Path) -> None:
    house = House(tmp_path)
    attempts, until = Attempts(house), Deadline(UNLIMITED)

    def starve(step: int) -> None:
        house.manager().control.scheduler.gate = lambda: None
        house.manager().control.leasing._ready = lambda: []  # type: ignore[method-assign]
        asyncio.get_running_loop().call_later(0.3, lambda: until.notice("spot", 30.0, at_once=True))

    phases = with_phase(plain(TASKS), "lease_batch", starve, 3, after=False)
    with pytest.raises(DeadlineReached, match="stopped while step 3 waited for its batch; the state after step 2 is"):
        await attempts.one(until, phases)
    assert attempts.stored() == (2, 2)
    await house.cluster.close()


async def test_steps_use_the_time_that_a_notice_leaves(tmp_path: Path) -> None:
    """Not at once: by the clock of the notice."""
    house = House(tmp_path, small(environment={"epochs": None}, training={"steps": 100000}))
    attempts, until = Attempts(house), Deadline(DeadlineSpec(None, 0.5, 30.0, None))
    phases = with_phase(plain(TASKS), "train_batch", lambda step: until.notice("spot", 6.0), 1, after=True)
    with pytest.raises(DeadlineReached, match="is published"):
        await attempts.one(until, phases)
    committed, checkpoint = attempts.stored()
    assert committed == checkpoint
    assert committed > 5
    await house.cluster.close()


class HangingStore(LocalStore):
    """Does not answer for checkpoints while `hangs`."""

    hangs = False

    def create(self, key: str, data: Bytes) -> None:
        while self.hangs and ("/objects/" in key or "/checkpoints/" in key):
            time.sleep(0.01)
        super().create(key, data)


async def test_a_publication_that_does_not_end_is_given_up_in_time_and_said_to_be_missing(tmp_path: Path) -> None:
    store = HangingStore(tmp_path)
    house = House(tmp_path, small(checkpoint={"every": 3}), store=store)
    attempts, until = Attempts(house), Deadline(UNLIMITED)

    def notice(step: int) -> None:
        store.hangs = True
        until.notice("spot", 4.0, at_once=True)

    phases = with_phase(with_publication(plain(TASKS), 5), "train_batch", notice, 5, after=True)
    with pytest.raises(DeadlineReached) as ended:
        await attempts.one(until, phases)
    assert until.ends is not None
    assert until.now() < until.ends
    assert ended.value.code == "not_published"
    assert "the state after step 5 was NOT published: its publication had not ended" in str(ended.value)
    assert "a resume redoes steps 4 to 5 from the journal and generates nothing again" in str(ended.value)
    assert attempts.stored() == (5, 3)
    assert attempts.checkpoints() == [3], "no manifest of a checkpoint that is not whole"
    store.hangs = False
    house.cluster.kill("manager")
    house.cluster.kill("trainer")
    await house.run()
    assert (house.resumed[1].base, house.resumed[1].redone) == (3, 2)
    house.check()


async def test_a_notice_during_redo_ends_between_two_steps_and_keeps_what_was_redone(tmp_path: Path) -> None:
    house = House(tmp_path, small(checkpoint={"every": 100, "max_unsaved": 200}))
    attempts = Attempts(house)
    first = Deadline(UNLIMITED)

    def die(step: int) -> None:
        house.cluster.kill("trainer")

    with pytest.raises(Exception, match="trainer"):
        await attempts.one(first, with_phase(plain(TASKS), "release_admission", die, 6, after=True))
    assert attempts.stored() == (6, 0)
    until = Deadline(UNLIMITED)
    trainer, _ = await house.cluster.trainer()
    whole = trainer.target._redo

    def redo(step: int) -> Any:
        if step == 3:
            loop.call_soon_threadsafe(lambda: until.notice("spot", 30.0, at_once=True))
        return whole(step)

    loop = asyncio.get_running_loop()
    trainer.target._redo = redo
    with pytest.raises(
        DeadlineReached, match="stopped before step 4 was redone; the state after step 3 is published"
    ) as e:
        await attempts.one(until, plain(TASKS))
    assert "a resume redoes steps 4 to 6 from the journal" in str(e.value)
    assert attempts.stored() == (6, 3)
    await house.run()
    assert (house.resumed[-1].base, house.resumed[-1].redone) == (3, 3)
    house.check()


async def test_a_lost_trainer_after_the_notice_is_a_reason_and_not_another_end(tmp_path: Path) -> None:
    house = House(tmp_path, small(checkpoint={"every": 3}))
    attempts, until = Attempts(house), Deadline(UNLIMITED)

    def gone(step: int) -> None:
        until.notice("spot", 30.0, at_once=True)
        house.cluster.kill("trainer")

    phases = with_phase(with_publication(plain(TASKS), 5), "train_batch", gone, 5, after=True)
    with pytest.raises(DeadlineReached, match=r"step 5 was NOT published: \[actor_lost\].*checkpoint is of step 3"):
        await attempts.one(until, phases)
    await house.run()
    house.check()


async def test_a_notice_before_the_run_is_opened_changes_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    until = Deadline(UNLIMITED)

    async def work() -> None:
        until.notice("spot", 30.0, at_once=True)
        until.check("before the run was claimed")
        session()

    with pytest.raises(DeadlineReached, match="before the run was claimed; the run was not opened yet"):
        await within(until, plain(TASKS), work())
    assert not house.store.list("runs")
    await house.cluster.close()
