"""One optimizer step with every real part (trainer, torch engine behind its server, Ray actors, journal on a folder),
its update under a hold over rollouts that are in the middle of their turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu.rollout.messages import Identity
from storage import schema
from storage.errors import DeadlineExceeded
from storage.payload import VersionSpan
from storage.reader import PayloadReader
from storage.samples import assemble
from tasks.session import session
from tests.composition.gated import OPEN, PASSED, WAITS, marks
from tests.composition.rig import GPU, PHASES, Rig, actor_processes, durable, until
from tests.faults.house import RUN

pytestmark = GPU
HANDED_OUT = (schema.GroupReserved, schema.GroupsDispatched, schema.AttemptsMinted, schema.LeaseIssued)


def live(rig: Rig) -> set[Identity]:
    """Attempts of the first incarnation that storage knows to have begun and not to have been sealed."""
    sealed = rig.sealed()
    return {
        Identity(*attempt, 1)
        for record in rig.records(schema.Record)
        for attempt in schema.minted(record)
        if attempt not in sealed
    }


def spans(rig: Rig, ordinal: int) -> list[tuple[int, list[VersionSpan]]]:
    """For each sibling of a trained group: its attempt, and the versions of its generated tokens."""
    ledger = rig.ledger()
    trained = [group for step in ledger.steps.values() for group in step.lease.groups if group.ordinal == ordinal]
    reader = PayloadReader(rig.store, RUN)
    slots = assemble([reader.rows(rows, ledger.blocks) for rows in trained[0].rows], ordinal, len(trained[0].rows))
    return [(sample.attempt, list(sample.spans)) for slot in slots for sample in slot]


async def first_step(rig: Rig) -> None:
    """From nothing to a committed step and four live rollouts: groups 4 and 5 wait for their tool."""
    resumed = await rig.drive()
    assert (resumed.incarnation, resumed.step, resumed.base, resumed.redone) == (1, 0, 0, 0)
    assert len(actor_processes()) == 4, "manager, trainer, engine and worker run below this process"
    assert rig.versions() == [(1, 0)]
    assert len(set((await rig.weights()).values())) == 1, "version 0 is everywhere"
    await until(lambda: marks(rig.folder, WAITS) == 4, "every gated rollout waits for its tool")
    await rig.until_status(lambda s: s["groups"]["completed"] == 4 and durable(s), "the others are complete")
    assert await PHASES.lease_batch(1) == rig.spec.limits.batch
    metrics = await PHASES.train_batch(1)
    assert metrics["trained_groups"] == rig.spec.limits.batch, "the step had something to learn from"
    assert [record.step for record in rig.records(schema.StepCommitted)] == [1], "durable when the phase ends"


@pytest.mark.parametrize(
    "in_flight", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["calls are parked", "calls go on"]
)
async def test_a_step_brings_one_set_of_weights_everywhere_and_live_rollouts_go_on_with_both_versions(
    in_flight: bool, start: Callable[..., Rig]
) -> None:
    """Live rollouts call the model again under the hold. An engine that cannot change weights in flight keeps these
    calls back until the release; the other one answers them with the new version at once."""
    rig = start(
        tasks=10, free=4, rollout={"staleness": 2}, generation={"in_flight_updates": in_flight},
        checkpoint={"every": 50},
    )  # fmt: skip
    await first_step(rig)
    before, old = live(rig), await rig.process("engine").checksum()
    assert {identity.group for identity in before} == {4, 5}

    # Hold and drain: the frontier is what is live, and nobody waits for it.
    assert await PHASES.hold_admission(1) == len(before) == 4
    one = session()
    assert one.hold is not None
    assert one.hold.frontier == len(before)
    since = (await rig.status())["journal"]["last_seq"]
    assert await PHASES.drain_rollouts(1) == 0, "a rollout that waits for a tool counts as parked"
    assert live(rig) == before

    # The update, with calls that come between drain and update, or after it.
    said = (await rig.process("engine").stats()).tokens
    if not in_flight:
        (rig.folder / OPEN).touch()
        await until(lambda: marks(rig.folder, PASSED) == 4, "every gated rollout goes on to its next call")
    digest = await PHASES.update_weights(1)
    weights = await rig.weights()
    assert set(weights.values()) == {digest}, weights
    assert digest != old
    if in_flight:
        (rig.folder / OPEN).touch()
        await until(lambda: not live(rig), "they end under the hold")
    else:
        stats = await rig.process("engine").stats()
        assert (stats.tokens, stats.running, stats.waiting) == (said, 0, 0), "no call goes on between drain and release"
        assert live(rig) == before

    # Under the hold there is work to hand out, and nobody gets it.
    status = await rig.status()
    assert (status["serving_version"], rig.versions()) == (1, [(1, 0), (1, 1)])
    assert "hold" in status["submission_waits_for"]
    with pytest.raises(DeadlineExceeded, match="hold"):
        await one.manager.lease(one.caller, 0.1)
    until_release = (await rig.status())["journal"]["last_seq"]

    await PHASES.release_admission(1)
    await until(lambda: not before & live(rig), "the same executions end")
    under = [row.record for row in rig.rows() if since < row.seq <= until_release]
    assert any(isinstance(record, schema.PolicyPublished) for record in under)
    assert not [record for record in under if isinstance(record, HANDED_OUT)]
    await rig.verify()

    report = await rig.finish(2)
    assert (report.incarnations, report.rollouts_regenerated) == (1, 0)
    for attempt, found in spans(rig, 4) + spans(rig, 5):
        assert attempt == 0, "the execution that the hold found, not a later one"
        assert [(span.incarnation, span.number) for span in found] == [(1, 0), (1, 1)]
    await rig.close()
