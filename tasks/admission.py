"""Close and reopen admission around an update."""

from __future__ import annotations

import asyncio

from prefect import task

from gpu.rollout.messages import Hold
from gpu.rollout.signal import seen
from tasks.session import PHASE, Session, session


@task(task_run_name="hold_admission-{step}", **PHASE)
async def hold_admission(step: int) -> int:
    """Close reservations and leases; remember what executes now. Returns the size of that frontier.

    The hold is renewed beside the phases that work under it, for as long as this driver lives."""
    one = session()
    ttl = one.spec.steps.hold_ttl_s
    hold: Hold = await one.manager.acquire(one.caller, f"step {step}", ttl)
    one.hold = hold
    one.renewing = asyncio.create_task(_renew(one, hold, ttl / 3))
    one.renewing.add_done_callback(seen)
    return hold.frontier


async def _renew(one: Session, hold: Hold, every: float) -> None:
    """A renewal that fails ends renewing; the effect that relies on the hold then says why."""
    while True:
        await asyncio.sleep(every)
        await one.manager.renew(one.caller, hold.hold, hold.epoch)


@task(task_run_name="release_admission-{step}", **PHASE)
async def release_admission(step: int) -> None:
    """Reopen admission. Idempotent; always runs, whatever failed."""
    one = session()
    if one.renewing is not None:
        one.renewing.cancel()
        await asyncio.wait([one.renewing])
        one.renewing = None
    if one.hold is not None:
        await one.manager.release(one.caller, one.hold.hold)
        one.hold = None
