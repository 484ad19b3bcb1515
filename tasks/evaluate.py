"""Evaluation beside training: begun after the weights of a due step are served, and waited for at two places only:
before the next weights are activated, and at the end of the run, each within a bound."""

from __future__ import annotations

import logging

from prefect import task

from gpu.rollout.evaluation_calls import Evaluated
from storage.schema import EvaluationDone
from tasks.session import PHASE, Session, session

log = logging.getLogger(__name__)


def evaluates(step: int, *, last: bool = False) -> bool:
    """Whether the weights after `step` are due: every so many steps, and those of the last one."""
    every = session().spec.evaluation.every
    return every is not None and step > 0 and (last or step % every == 0)


@task(task_run_name="evaluate-{step}", **PHASE)
async def start_evaluations(step: int) -> int:
    """Begin the evaluation of the weights after `step`, which goes on beside training. Returns how many suites began;
    none when they were begun before."""
    one = session()
    return await one.manager.evaluate(one.caller, step)


async def evaluations_delay(step: int) -> bool:
    """Whether activating the weights after `step` now would make a running evaluation mixed."""
    one = session()
    if one.spec.evaluation.every is None:
        return False
    found: Evaluated = await one.manager.evaluated(one.caller, step)
    _note(one, found)
    return bool(found.delaying)


@task(task_run_name="await_evaluations-{step}", **PHASE)
async def await_evaluations(step: int) -> int:
    """Let evaluations of the weights so far end before those of `step` are activated, at most `evaluation.deadline`
    seconds. Admission is open meanwhile. Returns how many will be mixed."""
    one = session()
    found: Evaluated = await one.manager.await_evaluations(one.caller, step, one.spec.evaluation.deadline_s)
    _note(one, found)
    return len(found.delaying)


@task(task_run_name="end_evaluations-{step}", **PHASE)
async def end_evaluations(step: int) -> int:
    """Wait for every evaluation, at most `evaluation.end_deadline` seconds; the end of the run counts what is not
    finished then as failed samples. Returns how many evaluations that concerns."""
    one = session()
    found: Evaluated = await one.manager.await_evaluations(one.caller, None, one.spec.evaluation.end_s)
    _note(one, found)
    for name in found.running:
        log.warning("op=evaluate evaluation=%r decision=end_unfinished reason=evaluation.end_deadline", name)
    return len(found.running)


def _note(one: Session, found: Evaluated) -> None:
    """Keep the newest result of each suite for the lines of steps."""
    one.evaluated.update(found.newest)


def line(done: EvaluationDone) -> str:
    """One line about a result."""
    metrics = " ".join(f"{name}={value:.3f}" for name, value in done.metrics.items())
    versions = f"mixed={done.oldest}..{done.newest}" if done.mixed else "mixed=no"
    return (
        f"op=evaluate suite={done.suite} step={done.step} {versions} tasks={done.tasks} samples={done.samples}"
        f" failed={done.failed} {metrics}"
    )
