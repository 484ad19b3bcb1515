"""The training flow: what happens in which order, and nothing else.

`training_step` is a plain function; its phases are Prefect tasks. Whoever drives (the flow, a chunk of steps in one
task, a test) passes the phases it wants. Prefect is not the memory: a retried flow run asks the manager and the journal
where the run stands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any

from tasks.admission import hold_admission, release_admission
from tasks.drain import drain_rollouts
from tasks.optimize import lease_batch, prefetch_batch, train_batch
from tasks.publish import check_saved, finish_upload, publish_checkpoint, unsaved
from tasks.session import session
from tasks.weights import update_weights

Phase = Callable[[int], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a step, in order; each takes the step's number."""

    lease_batch: Phase
    train_batch: Phase
    hold_admission: Phase
    drain_rollouts: Phase
    update_weights: Phase
    publish_checkpoint: Phase
    release_admission: Phase


TASKS = Phases(
    lease_batch, train_batch, hold_admission, drain_rollouts, update_weights, publish_checkpoint, release_admission
)


def plain(phases: Phases) -> Phases:
    """The same phases without task runs, for steps that share one task and for tests."""
    return Phases(**{field.name: getattr(phases, field.name).fn for field in fields(phases)})


async def training_step(phases: Phases, step: int) -> bool:
    """One step; False when the source is exhausted. Generation of later batches goes on beside lease and train."""
    steps = session().spec.steps
    check_saved(session(), step)
    if not await phases.lease_batch(step):
        return False
    await prefetch_batch()
    await phases.train_batch(step)
    await update(phases, step, save=step % steps.checkpoint_every == 0)
    return True


async def update(phases: Phases, step: int, *, save: bool) -> None:
    """Bring the weights after `step` to the engines under a hold, which is released whatever happens."""
    await phases.hold_admission(step)
    try:
        await phases.drain_rollouts(step)
        await phases.update_weights(step)
        if save:
            await phases.publish_checkpoint(step)
    finally:
        await phases.release_admission(step)


async def save_last(phases: Phases, step: int) -> None:
    """The state after the last step is published before the run is closed. Raises `RestoreRefused` otherwise."""
    one = session()
    await finish_upload(one)
    if step and one.saved_step < step:
        await phases.hold_admission(step)
        try:
            await phases.publish_checkpoint(step)
        finally:
            await phases.release_admission(step)
        await finish_upload(one)
    if one.saved_step < step:
        raise unsaved(one, step)
