"""Begin, resume and end a run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

import msgspec
from prefect import task

from gpu.fence import fence_of
from gpu.place import this_place
from gpu.rollout.calls import Attached
from gpu.rollout.messages import Found
from gpu.rollout.signal import seen
from gpu.spec import RunSpec
from gpu.training.messages import RestoredBase, Trained, TrainerStatus
from storage.errors import ActorLost, RestoreRefused, RunFenced, TidegateError, UserError
from storage.opening import open_store
from storage.restore import RestorePlan
from tasks.session import PHASE, Session, deadline, session, use

log = logging.getLogger(__name__)


class Opened(msgspec.Struct, frozen=True):
    """A driver's start. `new` says that the manager was started by it; `finished` why the run is over, or ""; `found`
    what the incarnation began with."""

    incarnation: int
    token: int
    new: bool
    finished: str
    found: Found = Found()


class Resumed(msgspec.Struct, frozen=True):
    """How a driver found its run. `step` is the last committed one; `warm`: the trainer needed no restore; `ahead`: it
    holds one step more, trained and not yet committed; `reverted` steps were taken back instead of redone."""

    incarnation: int
    step: int
    base: int
    redone: int
    diverged: int
    warm: bool
    ahead: bool
    rejected: tuple[str, ...]
    reverted: int = 0


class Cluster(Protocol):
    """Where a run's processes live: Ray, or this process."""

    async def manager(self, owner: str) -> tuple[Any, bool]:
        """The run's living manager, or a new incarnation; whether it is new."""
        ...

    async def trainer(self) -> tuple[Any, bool]:
        """The run's living trainer, or a new one with nothing loaded; whether it is new."""
        ...

    async def stop_trainer(self) -> None:
        """End a trainer that nobody has claimed."""
        ...


async def open_session(
    spec: RunSpec, cluster: Cluster, owner: str, *, take_over: bool = False, attempt: int = 0
) -> Opened:
    """Find or start the run's manager and trainer, become the driver, and make that the session of this context.
    `attempt` counts the attempts of the owner.

    Raises `RunBusy`, `RunFenced` and what `prepare_run` raises."""
    # Both take seconds to start; the trainer waits for orders until it is claimed.
    starting = asyncio.ensure_future(cluster.trainer())
    starting.add_done_callback(seen)
    try:
        manager, new = await cluster.manager(owner)
    except (UserError, RunFenced):  # there is no run to train here
        with contextlib.suppress(TidegateError):
            if (await starting)[1]:
                await cluster.stop_trainer()
        raise
    trainer, _ = await starting
    attached: Attached = await manager.attach(owner, take_over, this_place(), attempt)
    one = Session(spec, attached.caller, manager, trainer)

    async def reopen(reason: str) -> None:
        one.moving = True
        await one.manager.retire(one.caller, reason)
        one.manager, _ = await cluster.manager(owner)
        one.caller = (await one.manager.attach(owner, False, this_place(), attempt)).caller
        await one.trainer.claim(one.caller)
        one.moving = False

    one.reopen = reopen
    use(one)
    return Opened(attached.caller.incarnation, attached.caller.token, new, attached.finished, attached.found)


@task(task_run_name="claim_run", **PHASE)
async def claim_run(spec: RunSpec, cluster: Cluster, owner: str, take_over: bool, attempt: int) -> Opened:
    """Find the run's living manager or claim its next incarnation, and become its driver."""
    return await open_session(spec, cluster, owner, take_over=take_over, attempt=attempt)


async def why_lost(one: Session, error: ActorLost) -> TidegateError:
    """The reason behind a lost process: a fenced incarnation ends with all its processes, and its driver may only see
    that they are gone. Says `error` itself when the store cannot be read."""
    try:
        store = open_store(one.spec.storage_url)
        return await asyncio.to_thread(fence_of, store, one.spec.run, one.caller.incarnation) or error
    except (TidegateError, OSError):
        return error


@task(task_run_name="restore_trainer", **PHASE)
async def restore_trainer() -> Resumed:
    """Bring the trainer to exactly the run's last committed step: keep it if it is there, else checkpoint plus redo, or
    under the policy `requeue` the checkpoint, whose step is the last one from then on.

    Redone steps train the journaled groups in their order and generate nothing. Raises `RestoreRefused`, and `Ending`
    between two of them.
    """
    one = session()
    plan: RestorePlan = await one.manager.plan(one.caller)
    one.saved_step = plan.checkpoints[0].step if plan.checkpoints else 0
    one.committed = plan.step
    status: TrainerStatus = await one.trainer.claim(one.caller)
    if _holds_the_run(status, plan):
        one.step = plan.step
        return Resumed(one.caller.incarnation, plan.step, plan.step, 0, 0, True, status.step > plan.step, ())
    base: RestoredBase = await one.trainer.restore(one.caller, plan)
    one.step, diverged = base.step, 0
    if base.step < plan.step and one.spec.steps.redo == "requeue":
        return await _revert(one, plan, base)
    for step in range(base.step + 1, plan.step + 1):
        deadline().check(f"before step {step} was redone")
        trained: Trained = await one.trainer.redo(one.caller, step)
        matches = await one.manager.redone(one.caller, step, trained.state_digest, trained.weights_digest)
        diverged += not matches
        one.step = step
        log.info("op=redo step=%d of=%d matches=%s", step, plan.step, matches)
        if not matches and one.spec.steps.strict_redo:
            raise RestoreRefused(
                f"step {step} was redone to state {trained.state_digest[:12]}",
                expected=f"state {plan.steps[step].state_digest[:12]}, as committed",
                action="resume on the hardware and software of the run, or set checkpoint.strict_redo to false",
                code="diverged",
            )
    return Resumed(
        one.caller.incarnation, plan.step, base.step, plan.step - base.step, diverged, False, False, base.rejected
    )


async def _revert(one: Session, plan: RestorePlan, base: RestoredBase) -> Resumed:
    """Take back the committed steps after the base. An incarnation that has published a version is succeeded first."""
    if not plan.fresh:
        assert one.reopen is not None, "sessions are opened by open_session"
        await one.reopen(f"steps {base.step + 1} to {plan.step} are reverted")
    status: TrainerStatus = await one.trainer.status()
    digests = (status.state_digest, status.weights_digest) if base.step else ("", "")
    await one.manager.revert(one.caller, base.step, *digests)
    log.info("op=revert from=%d to=%d", plan.step, base.step)
    one.saved_step = one.committed = base.step
    reverted = plan.step - base.step
    return Resumed(one.caller.incarnation, base.step, base.step, 0, 0, False, False, base.rejected, reverted)


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
