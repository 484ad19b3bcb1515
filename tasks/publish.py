"""Capture and publish checkpoints."""

from __future__ import annotations

import asyncio
import logging

from prefect import task

from gpu.rollout.signal import seen
from storage.checkpoint import Written
from storage.errors import (
    ActorLost,
    CommitUnknown,
    RestoreRefused,
    RunFenced,
    StoreUnavailable,
    TidegateError,
    UploadLost,
)
from storage.schema import CheckpointPublished
from tasks.session import PHASE, Session, deadline, session

TRIES, PAUSE_S = 3, 2.0
"""For one capture. Each request of a try is itself repeated by the store until its deadline."""

log = logging.getLogger(__name__)


@task(task_run_name="publish_checkpoint-{step}", **PHASE)
async def publish_checkpoint(step: int) -> int:
    """Capture the state after `step` under the hold; upload and publication go on beside training. Returns its size in
    bytes, 0 when another publication is still under way, be it an older driver's (the next due step tries again)."""
    one, began = session(), deadline().now()
    if one.upload is not None and not one.upload.done():
        return 0
    await finish_upload(one)
    assert one.hold is not None, "hold before capturing"
    await one.manager.prepare_checkpoint(one.caller, one.hold)
    size: int = await one.trainer.capture(one.caller, step)
    if size:
        one.upload = asyncio.create_task(_upload(one, step, began))
        one.upload.add_done_callback(seen)
    return size


async def _upload(one: Session, step: int, began: float) -> None:
    newest = await one.manager.newest_checkpoint(one.caller)
    written = await _written(one, step, newest)
    await one.manager.publish_checkpoint(one.caller, step, *written)
    one.saved_step = step
    deadline().published(deadline().now() - began)


async def _written(one: Session, step: int, newest: CheckpointPublished | None) -> Written:
    """The captured state in the store. What may pass is tried again with the same capture, so often; then the next
    checkpoint takes its place."""
    for left in reversed(range(TRIES)):
        try:
            return await one.trainer.upload(one.caller, step, newest)
        except (StoreUnavailable, CommitUnknown, UploadLost) as error:
            one.upload_problem = str(error)
            if not left:
                raise
            log.warning("op=publish_checkpoint step=%d decision=repeat left=%d reason=%s", step, left, error)
            await asyncio.sleep(PAUSE_S)
    raise AssertionError("the last try returns or raises")


async def finish_upload(one: Session) -> None:
    """Wait for the publication under way. Its failure is remembered and shown; it never stops generation by itself."""
    if one.upload is None:
        return
    upload, one.upload = one.upload, None
    try:
        await upload
        one.upload_problem = ""
    except (ActorLost, RunFenced):
        raise  # not the storage's problem: this driver's attempt is over
    except TidegateError as error:
        one.upload_problem = str(error)
        log.warning("op=publish_checkpoint decision=retry_at_next_checkpoint reason=%s", error)


def check_saved(one: Session, step: int) -> None:
    """Refuse to go on too far past the last good checkpoint. Raises `RestoreRefused`."""
    if step - one.saved_step > one.spec.steps.max_unsaved:
        raise unsaved(one, step)


def unsaved(one: Session, step: int) -> RestoreRefused:
    return RestoreRefused(
        f"step {step} is {step - one.saved_step} steps after the last published checkpoint ({one.upload_problem})",
        expected=f"at most {one.spec.steps.max_unsaved}, and none at the end of the run",
        action="repair the storage, then retry the flow run",
        code="unsaved",
    )
