"""How an attempt of a flow run ends when somebody newer drives its run, or when its time is over.

The first has two cases, told apart by the Prefect server. If the flow run is still in the very state that this attempt
entered, then another flow run drives the run: this one ends in a Failed state named `RunFenced`, which no retry and no
automation on failures takes up again. If the flow run has moved on without this process (which slept or was cut off,
and was given up), then its state is a newer attempt's: the older one leaves without proposing any, whatever ended it,
and says why in its log. An attempt whose time is over ends in a Crashed state named `DeadlineReached`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import anyio
import httpx
from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import Abort
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Crashed, Failed

from storage.errors import DeadlineReached, RunFenced

T = TypeVar("T")
FENCED = "RunFenced"
"""Name of the state; its events are `prefect.flow-run.RunFenced`, so that automations on `Failed` do not see them."""
DEADLINE_REACHED = "DeadlineReached"
"""As above. Nothing is wrong with such a flow run; it is resumed."""
PASSING = (StateType.CANCELLING, StateType.PAUSED)
"""States that others bring an attempt into while it still has the flow run."""


class Superseded(Abort):
    """Prefect's own signal to end without a state; the worker takes it for a handled end, not for a crash."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"a newer attempt of this flow run has it: {error}")
        self.error = error


class Attempt(NamedTuple):
    """One process's attempt of a flow run: its number, from 1, and the state it entered."""

    flow_run: UUID
    number: int
    entered: UUID | None

    @classmethod
    def current(cls) -> Attempt:
        """The one of this flow's context."""
        context = FlowRunContext.get()
        assert context is not None, "inside a flow"
        assert context.flow_run is not None, "inside a flow run"
        found = context.flow_run
        return cls(found.id, found.run_count, found.state.id if found.state else None)

    def has(self, found: FlowRun) -> bool:
        """Whether this attempt has the flow run that the server found."""
        return found.state is None or found.state.id == self.entered or found.state.type in PASSING

    async def refuse_fenced(self) -> None:
        """A flow run that ended as `RunFenced` never drives again, also when a person retries it. Raises
        `RunFenced`."""
        if self.number <= 1:
            return
        async with get_client() as client:
            states = await client.read_flow_run_states(self.flow_run)
        fenced = next((state for state in states if state.name == FENCED), None)
        if fenced is not None:
            raise RunFenced(
                f"a retry of a flow run that was displaced: {fenced.message}",
                expected="a flow run that nobody displaced",
                action="start a new flow run of this name; it may take over",
                code="displaced",
            )


async def settle(attempt: Attempt, work: Awaitable[T]) -> T | State[Any]:
    """Do `work`, the whole of a flow. Returns its result, or the state that ends a fenced flow run or one whose
    time is over; raises `Superseded`
    when the flow run belongs to a newer attempt, and else what `work` raises."""
    try:
        return await work
    except (Exception, asyncio.CancelledError) as error:
        found = await _ask(attempt)
        moved_on = not attempt.has(found) if found else isinstance(error, RunFenced)
        if moved_on:
            get_run_logger().error("op=train decision=leave_to_newer_attempt reason=%s", _text(error))
            raise Superseded(error) from error
        if isinstance(error, DeadlineReached):
            return _ended_early(error, found)
        if found is None or not isinstance(error, RunFenced):
            raise
        get_run_logger().error("op=train decision=end reason=%s", _text(error))
        await _never_retry(found)
        return Failed(name=FENCED, message=str(error), data=error)


def _ended_early(error: DeadlineReached, found: FlowRun | None) -> State[Any]:
    """Of type Crashed, because its surroundings ended the attempt: the Retry button takes it up, while Prefect's own
    retries, which would go on at once in this very process, do not. A flow run that a person cancels is Cancelled."""
    get_run_logger().warning("op=train decision=end reason=%s", error)
    if found is not None and found.state is not None and found.state.type is StateType.CANCELLING:
        return Cancelled(message=str(error), data=error)
    return Crashed(name=DEADLINE_REACHED, message=str(error), data=error)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


async def _ask(attempt: Attempt) -> FlowRun | None:
    """The flow run as the server has it; None when it does not answer. Also asked by a flow that is being cancelled."""
    with anyio.CancelScope(shield=True):
        try:
            async with get_client() as client:
                return await client.read_flow_run(attempt.flow_run)
        except httpx.HTTPError:
            return None


async def _never_retry(found: FlowRun) -> None:
    """Take back the retries of this flow run, wherever they were set."""
    policy = found.empirical_policy.model_copy(update={"retries": 0})
    async with get_client() as client:
        await client.update_flow_run(found.id, empirical_policy=policy)
