"""The training flow: what happens in which order, and nothing else.

`training_step` is a plain function; its phases are Prefect tasks. Whoever drives (the flow, a chunk of steps in one
task, a test) passes the phases it wants. Prefect is not the memory: a retried flow run asks the manager and the journal
where the run stands.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any

from prefect import flow, task
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging import get_logger, get_run_logger

from flows.config import RunConfig
from flows.ending import within
from flows.fenced import Attempt, settle
from gpu.cluster import RayCluster, check_resources, connect, release_owner
from gpu.prepare import preflight
from gpu.spec import RunSpec
from storage.errors import ActorLost, TidegateError
from storage.inspection import steps as committed_steps
from storage.opening import open_store
from tasks.admission import hold_admission, release_admission
from tasks.deadline import Deadline
from tasks.drain import drain_rollouts
from tasks.evaluate import await_evaluations, end_evaluations, evaluates, evaluations_delay, start_evaluations
from tasks.metrics import MetricsLog
from tasks.optimize import lease_batch, prefetch_batch, train_batch
from tasks.publish import check_saved, finish_upload, publish_checkpoint, unsaved
from tasks.report import Progress, publish_curve, resume_report, reward_curve
from tasks.run import Opened, claim_run, finish_run, restore_trainer, why_lost
from tasks.session import PHASE, deadline, session
from tasks.watch import watched
from tasks.weights import update_weights

Phase = Callable[[int], Awaitable[Any]]
DEFAULTS = RunConfig()
RELEASE_S = 10.0
"""For a release at the end of an attempt; the hold's own deadline is behind it."""


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a step, in order, and those of evaluation; each takes the step's number."""

    lease_batch: Phase
    train_batch: Phase
    hold_admission: Phase
    drain_rollouts: Phase
    update_weights: Phase
    publish_checkpoint: Phase
    release_admission: Phase
    start_evaluations: Phase
    await_evaluations: Phase
    end_evaluations: Phase


TASKS = Phases(
    lease_batch,
    train_batch,
    hold_admission,
    drain_rollouts,
    update_weights,
    publish_checkpoint,
    release_admission,
    start_evaluations,
    await_evaluations,
    end_evaluations,
)


def plain(phases: Phases) -> Phases:
    """The same phases without task runs, for steps that share one task and for tests."""
    return Phases(**{field.name: getattr(phases, field.name).fn for field in fields(phases)})


async def training_step(phases: Phases, step: int) -> bool:
    """One step; False when the source is exhausted. Generation of later batches goes on beside lease and train."""
    steps, until = session().spec.steps, deadline()
    check_saved(session(), step)
    until.check_step(f"before step {step}")
    if not await until.unless(phases.lease_batch(step), f"while step {step} waited for its batch"):
        return False
    await prefetch_batch()
    until.check_step(f"before step {step} was trained")
    await phases.train_batch(step)
    await update(phases, step, save=step % steps.checkpoint_every == 0)
    return True


async def update(phases: Phases, step: int, *, save: bool) -> None:
    """Bring the weights after `step` to the engines under a hold, which is released whatever happens. Before it,
    evaluations of the weights so far may end; after it, those of the new ones begin. Nothing else waits for them."""
    until, before = deadline(), f"before the weights of step {step} were served"
    until.check(before)
    if await evaluations_delay(step):
        await until.unless(phases.await_evaluations(step), before)
    await phases.hold_admission(step)
    try:
        await until.unless(phases.drain_rollouts(step), before)
        await until.unless(phases.update_weights(step), before)
        if save:
            await phases.publish_checkpoint(step)
    finally:
        await phases.release_admission(step)
    if evaluates(step):
        await phases.start_evaluations(step)


async def evaluate_last(phases: Phases, step: int) -> None:
    """The weights after the last step are evaluated whatever its number, and the run ends with every result."""
    if evaluates(step, last=True):
        await phases.start_evaluations(step)
        await deadline().unless(phases.end_evaluations(step), "while the last evaluations went on")


async def save_last(phases: Phases, step: int) -> None:
    """The state after the last step is published before the run is closed. Raises `RestoreRefused` otherwise."""
    one = session()
    await finish_upload(one)
    if step and one.saved_step < step:
        await phases.hold_admission(step)
        try:
            while not await phases.publish_checkpoint(step):  # noqa: ASYNC110 - an older driver's ends first, elsewhere
                await asyncio.sleep(0.5)
        finally:
            await phases.release_admission(step)
        await finish_upload(one)
    if one.saved_step < step:
        raise unsaved(one, step)


# ---------------------------------------------------------------------- the flow


async def release_holds(flow: object, flow_run: FlowRun, state: State) -> None:
    """Hook of a flow run that failed, crashed or was cancelled, usually in another process: release what it held.

    Best effort and bounded; the hold's own deadline is behind it. Nothing is released while a driver of the flow run
    may live: the process that ended may be an older one.
    """
    logger = get_logger("tidegate.hooks")
    config = RunConfig.model_validate(flow_run.parameters.get("config") or {})
    name = run_name(config, str(flow_run.id))
    try:
        async with asyncio.timeout(30.0):
            connect(config.cluster.address, config.cluster.namespace)
            released = await release_owner(config.cluster.namespace, name, str(flow_run.id))
        logger.info("op=release_holds run=%s state=%s released=%s", name, state.name, released)
    except (TidegateError, TimeoutError) as error:
        logger.warning("op=release_holds run=%s state=%s decision=leave_to_deadline reason=%s", name, state.name, error)


def run_name(config: RunConfig, flow_run_id: str) -> str:
    """A run without a name is named after its flow run, which a retry keeps."""
    return config.run or f"run-{flow_run_id[:8]}"


@flow(
    name="train",
    persist_result=False,
    validate_parameters=True,
    on_failure=[release_holds],
    on_crashed=[release_holds],
    on_cancellation=[release_holds],
)
async def train(config: RunConfig = DEFAULTS, take_over: bool = False) -> dict[str, Any] | State[Any]:
    """Train a run to its end, or resume it: a retried flow run goes on where the journal stands.

    Args:
        config: The run; one of the same name is resumed.
        take_over: Take the run away from another flow run that drives it, which then ends as RunFenced for good.
    """
    attempt = Attempt.current()
    return await settle(attempt, whole_run(config, take_over, attempt))


async def whole_run(config: RunConfig, take_over: bool, attempt: Attempt) -> dict[str, Any]:
    """What one attempt of a flow run does. Raises `RunFenced` when somebody newer drives the run, `RunBusy` when
    another flow run does and `take_over` does not say so."""
    logger = get_run_logger()
    await attempt.refuse_fenced()
    owner = str(attempt.flow_run)
    run = run_name(config, owner)
    for warning in config.check():
        logger.warning(warning)
    spec = config.spec(run)
    return await within(Deadline(spec.deadline), TASKS, from_claim_to_end(config, spec, owner, take_over, attempt))


async def from_claim_to_end(
    config: RunConfig, spec: RunSpec, owner: str, take_over: bool, attempt: Attempt
) -> dict[str, Any]:
    """An attempt whose time is running. Raises `Ending` when it is time to stop."""
    run = spec.run
    await asyncio.to_thread(preflight, spec)
    connect(spec.ray_address, spec.namespace)
    check_resources(spec)
    deadline().check("before the run was claimed")
    claiming = claim_run(spec, RayCluster(spec), owner, take_over, attempt.number)
    opened = await deadline().unless(claiming, "while the run was claimed")
    if opened.finished:
        get_run_logger().info("op=train run=%s decision=nothing_to_do reason=finished: %s", run, opened.finished)
        await RayCluster(spec).close()
        return {"run": run, "finished": opened.finished}
    try:
        done = await watched(session(), drive(spec, opened, config.flow.steps_per_task))
    except ActorLost as error:
        raise await why_lost(session(), error) from error
    finally:
        with contextlib.suppress(TidegateError, TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await release_admission.fn(0)
    await RayCluster(spec).close()
    history = await asyncio.to_thread(committed_steps, open_store(spec.storage_url), run)
    await publish_curve(run, await asyncio.to_thread(reward_curve, run, history))
    return done


async def drive(spec: RunSpec, opened: Opened, chunk: int) -> dict[str, Any]:
    """Restore, then step until the end."""
    logger, total = get_run_logger(), spec.steps.num_steps
    resumed = await restore_trainer()
    logger.info(await resume_report(spec.run, opened, resumed))
    step = resumed.step
    progress = Progress(spec.run, total, curves_of(spec))
    await progress.curves.backfill()
    if not resumed.ahead:
        await update(TASKS, step, save=False)
    step, reason = await every_step(step, total, chunk, progress)
    await save_last(TASKS, step)
    await evaluate_last(TASKS, step)
    progress.evaluations(session())
    await finish_run(reason)
    await progress.curves.flush()
    return {"run": spec.run, "finished": reason, "steps": step}


def curves_of(spec: RunSpec) -> MetricsLog:
    """This driver's writer of curves; their names tell incarnations and drivers apart."""
    one = session()
    driver = f"{one.caller.incarnation:06d}-{one.caller.token:06d}"
    return MetricsLog(open_store(spec.storage_url), spec.run, driver, one.manager)


async def every_step(step: int, total: int, chunk: int, progress: Progress) -> tuple[int, str]:
    """From the step after `step` to the end; returns the last committed one and why it is the last."""
    while step < total:
        last = min(total, step + chunk)
        done = await (one_step(step + 1, progress) if chunk == 1 else train_steps(step + 1, last, progress))
        if done < last:
            return done, "source exhausted"
        step = done
    return step, f"{total} steps"


async def one_step(step: int, progress: Progress) -> int:
    """A step whose phases are tasks of their own; returns the last committed step."""
    if not await training_step(TASKS, step):
        return step - 1
    await progress.step(step, session(), last=step == session().spec.steps.num_steps)
    return step


@task(task_run_name="steps-{first}-{last}", **PHASE)
async def train_steps(first: int, last: int, progress: Progress) -> int:
    """Several steps in one task, for steps faster than a second; returns the last committed step."""
    phases = plain(TASKS)
    for step in range(first, last + 1):
        if not await training_step(phases, step):
            return step - 1
        await progress.step(step, session(), last=step == session().spec.steps.num_steps)
    return last
