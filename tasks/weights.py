"""Bring the trained weights to the engines."""

from __future__ import annotations

from prefect import task

from tasks.session import PHASE, session


@task(task_run_name="update_weights-{step}", **PHASE)
async def update_weights(step: int) -> str:
    """Publish the version after `step` (durable), then activate it under the hold; rolls forward only. Returns its
    digest."""
    one = session()
    assert one.hold is not None, "hold before updating"
    digest: str = await one.trainer.publish(one.caller, step)
    await one.manager.publish_policy(one.caller, digest)
    await one.manager.activate(one.caller, one.hold)
    return digest
