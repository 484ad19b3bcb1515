"""What the phases of one driver share: whom they call, as whom, and what is under way.

Live objects never travel as task parameters or results; a phase takes the session of its context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from prefect.cache_policies import NO_CACHE

from gpu.rollout.messages import Caller, Grant, Hold
from gpu.spec import RunSpec
from storage.schema import EvaluationDone
from tasks.deadline import Deadline

PHASE: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}
"""No result of a phase is kept by Prefect: its cache fails open, and the journal is the memory. No phase is retried by
itself, whatever PREFECT_TASKS_DEFAULT_RETRIES says: a phase that failed ends the attempt, and a fenced driver stops."""


@dataclass(slots=True)
class Session:
    """One driver of one run. `manager` and `trainer` answer calls (local objects, or actors behind `gpu.calls`)."""

    spec: RunSpec
    caller: Caller
    manager: Any
    trainer: Any
    grant: Grant | None = None
    hold: Hold | None = None
    renewing: asyncio.Task[None] | None = None
    upload: asyncio.Task[None] | None = None
    upload_problem: str = ""
    saved_step: int = 0
    step: int = 0
    """The optimizer steps in the trainer's state, as far as they are committed."""
    moving: bool = False
    """From the end of an incarnation that this driver retires to the beginning of the next."""
    reopen: Callable[[str], Awaitable[None]] | None = None
    """Go on in the next incarnation, for a reason."""
    committed: int = 0
    """The last committed step; above `step` only while a restore redoes steps."""
    history: list[dict[str, float]] = field(default_factory=lambda: [])
    evaluated: dict[str, EvaluationDone] = field(default_factory=lambda: {})


class _Slot:
    """Shared by a flow and its tasks, which run in copies of its context."""

    session: Session | None = None

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline


_current: ContextVar[_Slot] = ContextVar("tidegate_session")


def begin(until: Deadline | None = None) -> None:
    """Make room for one driver's session in this context; call it before the task that opens the session. The attempt
    ends as `until` says, by default not before its work does."""
    _current.set(_Slot(until or Deadline()))


def use(opened: Session) -> None:
    """Make it the session of this driver and of its tasks."""
    _current.get().session = opened


def deadline() -> Deadline:
    """The one of this driver's attempt."""
    return _current.get().deadline


def opened() -> Session | None:
    """The session of this driver, None before it is opened."""
    return _current.get().session


def session() -> Session:
    """The session of this driver."""
    found = _current.get().session
    assert found is not None, "open a session first"
    return found
