"""Close and reopen admission around an update."""

from __future__ import annotations

from prefect import task

from gpu.rollout.messages import Hold
from tasks.session import PHASE, session


@task(task_run_name="hold_admission-{step}", **PHASE)
async def hold_admission(step: int) -> int:
    """Close reservations and leases; remember what executes now. Returns the size of that frontier."""
    one = session()
    hold: Hold = await one.manager.acquire(one.caller, f"step {step}", one.spec.steps.hold_ttl_s)
    one.hold = hold
    return len(hold.frontier)


@task(task_run_name="release_admission-{step}", **PHASE)
async def release_admission(step: int) -> None:
    """Reopen admission. Idempotent; always runs, whatever failed."""
    one = session()
    if one.hold is not None:
        await one.manager.release(one.caller, one.hold.hold)
        one.hold = None
