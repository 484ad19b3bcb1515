"""Real processes killed exactly between two phases, and the attempt after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage import schema
from storage.errors import ActorLost
from tasks.publish import finish_upload
from tasks.session import session
from tests.composition.rig import GPU, PHASES, Rig, durable

pytestmark = [*GPU, pytest.mark.slow]


async def cut(rig: Rig, step: int, *, published: bool) -> None:
    """Take `step`, kill the manager between its commit and the activation of its version, and resume.

    `published`: the version is durable and no engine knows of it; else only the step is durable."""
    old = (await rig.weights())["engine"]
    await PHASES.lease_batch(step)
    await PHASES.train_batch(step)
    await PHASES.hold_admission(step)
    await PHASES.drain_rollouts(step)
    await rig.until_status(lambda s: s["groups"]["completed"] == 2 and durable(s), "two more groups are complete")
    dead = session()
    digest = await dead.trainer.publish(dead.caller, step)
    if published:
        await dead.manager.publish_policy(dead.caller, digest)
    incarnation, orphan = dead.caller.incarnation, rig.process("engine")
    await rig.kill("manager")

    # What is true at this moment: the step is committed, its version known or not, and the engine has the old one.
    ledger, sealed = rig.ledger(), rig.sealed()
    assert (ledger.step, ledger.weights_digest) == (step, digest)
    assert rig.versions()[-1] == (incarnation, step if published else step - 1)
    assert len(ledger.completed) == 2
    assert await orphan.checksum() == old != digest
    with pytest.raises(ActorLost):
        await dead.manager.activate(dead.caller, dead.hold)
    with pytest.raises(ActorLost):
        await PHASES.release_admission(step)

    resumed = await rig.drive()
    assert (resumed.incarnation, resumed.step, resumed.warm) == (incarnation + 1, step, True)
    assert rig.versions()[-1] == (incarnation + 1, step), "the version is published by its new incarnation"
    assert set((await rig.weights()).values()) == {digest}
    assert rig.process("engine").name != orphan.name
    await PHASES.lease_batch(step + 1)
    assert {group.ordinal for group in session().grant.lease.groups} == set(ledger.completed), "finished work is kept"
    assert sealed <= rig.sealed()


async def test_a_manager_killed_between_commit_and_activation_is_succeeded_by_one_that_replays_the_version(
    start: Callable[..., Rig],
) -> None:
    """Once after `policy_published` is durable and once before it; each time generation goes on and loses nothing."""
    rig = start()
    await rig.drive()
    await cut(rig, 1, published=True)
    await cut(rig, 2, published=False)
    report = await rig.finish(3)
    assert (report.incarnations, report.steps_redone, report.rollouts_regenerated) == (3, 0, 0)
    assert report.rollouts_sealed == report.consumed * rig.spec.limits.num_siblings, "each rollout ended exactly once"
    assert report.rollouts_reused > 0
    await rig.close()


async def test_a_killed_trainer_comes_back_bit_for_bit_from_its_checkpoint_and_redone_steps(
    start: Callable[..., Rig],
) -> None:
    """The engine dies with it: its successor has the weights from nobody but the restored trainer."""
    rig = start(tasks=14, free=14)
    await rig.drive()
    await rig.steps(1, 3)
    await finish_upload(session())  # of step 3; the steps after it live in the journal only
    await rig.steps(4, 4)
    committed = rig.records(schema.StepCommitted)[-1]
    await PHASES.lease_batch(5)
    engine = rig.name("engine")
    await rig.kill("trainer")
    with pytest.raises(ActorLost):
        await PHASES.train_batch(5)
    await rig.kill("engine")

    resumed = await rig.drive()
    assert (resumed.incarnation, resumed.warm) == (1, False)
    assert (resumed.step, resumed.base, resumed.redone, resumed.diverged) == (4, 3, 1, 0)
    status = await session().trainer.status()
    assert (status.step, status.state_digest) == (committed.step, committed.state_digest)
    assert [record.state_digest for record in rig.records(schema.StepRedone)] == [committed.state_digest]
    assert set((await rig.weights()).values()) == {committed.weights_digest}
    assert rig.name("engine") != engine

    report = await rig.finish(5)
    assert (report.incarnations, report.steps_redone, report.steps_diverged) == (1, 1, 0)
    issued = [record.step for record in rig.records(schema.LeaseIssued)]
    assert issued == [1, 2, 3, 4, 5, 6, 7], "the lost step is trained from its own lease"
    await rig.close()
