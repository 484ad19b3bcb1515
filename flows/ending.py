"""How an attempt of a flow run ends before its time is over: with the state after its last committed step published, or
with a message that says why not. Either way the run goes on from there when it is resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from prefect.logging import get_logger

from gpu.training.messages import TrainerStatus
from storage.errors import DeadlineExceeded, DeadlineReached, RunFenced, TidegateError, UserError
from tasks.deadline import Deadline, Ending
from tasks.publish import finish_upload
from tasks.session import Session, begin, opened

if TYPE_CHECKING:
    from flows.train import Phases

T = TypeVar("T")
CANCEL_S = 1.0
"""For what is under way at the very end to notice that it was given up."""

log = get_logger("tidegate.ending")


async def within(until: Deadline, phases: Phases, work: Coroutine[Any, Any, T]) -> T:
    """Do the work of an attempt, which opens a session, as long as there is time. Raises `DeadlineReached`, always
    before `until.ends`, and what `work` raises."""
    begin(until)
    with until.hearing():
        main = asyncio.ensure_future(_stop_in_time(until, phases, work))
        watch = asyncio.ensure_future(until.watch())
        try:
            await asyncio.wait([main, watch], return_when=asyncio.FIRST_COMPLETED)
            if not main.done():
                await watch
                main.cancel()
                await asyncio.wait([main], timeout=CANCEL_S)
            if main.done() and not main.cancelled():
                return await main
            raise unpublished(until, "when the time was over", _under_way(until))
        finally:
            for task in (main, watch):
                task.cancel()
            await asyncio.wait([main, watch], timeout=CANCEL_S if until.left() == 0.0 else None)


async def _stop_in_time(until: Deadline, phases: Phases, work: Coroutine[Any, Any, T]) -> T:
    at = "while it was publishing"
    try:
        try:
            return await work
        except Ending as ending:
            at = ending.at
            raise await publish_and_end(until, phases, at) from ending
    except (RunFenced, UserError, DeadlineReached):
        raise
    except TidegateError as error:
        if not until.stopping.is_set():
            raise
        raise unpublished(until, at, str(error)) from error  # where everything is being taken away, losses are expected


async def publish_and_end(until: Deadline, phases: Phases, at: str) -> DeadlineReached:
    """Publish the state after the last committed step unless it is, and make the journal durable; returns what ends
    the attempt."""
    one, began = opened(), until.now()
    if one is None:
        return _reached(until, at, "the run was not opened yet, and nothing was trained", "not_opened")
    until.publishing = True
    log.info("op=deadline reason=%s decision=publish step=%d at=%s left=%.1f", until.reason, one.step, at, until.left())
    why = await _publish(one, phases)
    await one.manager.flush(one.caller)
    if why:
        return unpublished(until, at, why)
    seconds = f"{until.now() - began:.1f} s later" if until.now() - began >= 0.05 else "already"
    rest = f"; {_redoes(one, one.step)}" if one.committed > one.step else ""
    return _reached(until, at, f"the state after step {one.step} is published ({seconds}){rest}", "published")


async def _publish(one: Session, phases: Phases) -> str:
    """Why the state after the last committed step is not in the store at the end; "" when it is."""
    await phases.release_admission(one.step)
    await finish_upload(one)
    if one.step <= one.saved_step:
        return ""
    status: TrainerStatus = await one.trainer.status()
    if status.step == one.step + 1 and status.ahead_of:  # trained by a driver that died before its commit
        await phases.lease_batch(one.step + 1)
        await phases.train_batch(one.step + 1)
    await phases.hold_admission(one.step)
    try:
        await _roll_back(one)
        while not await phases.publish_checkpoint(one.step):  # noqa: ASYNC110 - an older driver's ends first, elsewhere
            await asyncio.sleep(0.2)
    finally:
        await phases.release_admission(one.step)
    await finish_upload(one)
    return "" if one.saved_step >= one.step else one.upload_problem


async def _roll_back(one: Session) -> None:
    """A lease that was issued and whose training has not begun: its groups stay completed. Raises `LeaseRefused` when
    the trainer is not where the lease began."""
    try:
        grant = await one.manager.lease(one.caller, 0.0)
    except DeadlineExceeded:
        return  # none is open, and none is issued under the hold
    if grant is not None:
        await one.manager.roll_back(one.caller, grant.lease.lease, "deadline")
        one.grant = None


def _under_way(until: Deadline) -> str:
    one = opened()
    if not until.publishing or one is None:
        return "what was under way had not ended"
    return "its publication had not ended" + (f" ({one.upload_problem})" if one.upload_problem else "")


def unpublished(until: Deadline, at: str, why: str) -> DeadlineReached:
    """The attempt ends, and the newest checkpoint stays what it was."""
    one = opened()
    if one is None:
        return _reached(until, at, f"the run was not opened yet ({why})", "not_opened")
    if one.saved_step >= one.step and one.step:
        return _reached(until, at, f"the state after step {one.step} is published ({why})", "published")
    found = f"the state after step {one.committed} was NOT published: {why}"
    newest = f"the newest checkpoint is of step {one.saved_step}" if one.saved_step else "there is no checkpoint"
    return _reached(until, at, f"{found}; {newest}; {_redoes(one, one.saved_step)}", "not_published")


def _redoes(one: Session, base: int) -> str:
    committed = one.committed
    if base >= committed:
        return "a resume redoes nothing"
    steps = f"steps {base + 1} to {committed}" if base + 1 < committed else f"step {committed}"
    if one.spec.steps.redo == "requeue":
        return f"a resume takes back {steps}, whose groups start again"
    return f"a resume redoes {steps} from the journal and generates nothing again"


def _reached(until: Deadline, at: str, what: str, code: str) -> DeadlineReached:
    return DeadlineReached(
        f"{until.reason}: stopped {at}; {what}",
        expected="more time",
        action="resume the run: retry the flow run, or `tidegate resume`",
        code=code,
    )
