"""Begin, resume and end a run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from prefect import task

from gpu.training.host import RestoredBase, TrainerStatus
from gpu.training.trainer import Trained
from storage.errors import RestoreRefused
from storage.restore import RestorePlan
from tasks.session import PHASE, session

log = logging.getLogger(__name__)


class Resumed(msgspec.Struct, frozen=True):
    """How a driver found its run. `step` is the last committed one; `warm` says that the trainer needed no restore."""

    incarnation: int
    step: int
    base: int
    redone: int
    diverged: int
    warm: bool
    rejected: tuple[str, ...]


@task(task_run_name="restore_trainer", **PHASE)
async def restore_trainer() -> Resumed:
    """Bring the trainer to exactly the run's last committed step: keep it if it is there, else checkpoint plus redo.

    Redone steps train the journaled groups in their order and generate nothing. Raises `RestoreRefused`.
    """
    return await restore()


async def restore(say: Callable[[str], None] = log.info) -> Resumed:
    one = session()
    plan: RestorePlan = await one.manager.plan(one.caller)
    one.saved_step = plan.checkpoints[0].step if plan.checkpoints else 0
    status: TrainerStatus = await one.trainer.claim(one.caller)
    if _holds_the_run(status, plan):
        return Resumed(one.caller.incarnation, plan.step, plan.step, 0, 0, True, ())
    base: RestoredBase = await one.trainer.restore(one.caller, plan)
    diverged = 0
    for step in range(base.step + 1, plan.step + 1):
        trained: Trained = await one.trainer.redo(one.caller, step)
        matches = await one.manager.redone(one.caller, step, trained.state_digest, trained.weights_digest)
        diverged += not matches
        say(f"op=redo step={step} of={plan.step} matches={matches}")
        if not matches and one.spec.steps.strict_redo:
            raise RestoreRefused(
                f"step {step} was redone to state {trained.state_digest[:12]}",
                expected=f"state {plan.steps[step].state_digest[:12]}, as committed",
                action="resume on the hardware and software of the run, or set recovery.strict to false",
                code="diverged",
            )
    return Resumed(one.caller.incarnation, plan.step, base.step, plan.step - base.step, diverged, False, base.rejected)


def _holds_the_run(status: TrainerStatus, plan: RestorePlan) -> bool:
    """Whether a live trainer is clean and at the last committed step, or exactly one trained and uncommitted step ahead
    (its driver died before the commit: the step's lease is issued again, and the trainer repeats its answer)."""
    if not status.clean:
        return False
    if status.step == plan.step:
        return plan.step == 0 or status.state_digest == plan.state_digest
    return status.step == plan.step + 1 and bool(status.ahead_of) and plan.state_digest in ("", status.ahead_of)


@task(task_run_name="finish_run", **PHASE)
async def finish_run(reason: str) -> None:
    """Settle what is left, close the run for good."""
    one = session()
    await one.manager.finish(one.caller, reason)
