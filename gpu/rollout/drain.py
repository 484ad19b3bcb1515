"""What an operation under a hold waits for before it acts, and what happens at its deadline."""

from __future__ import annotations

from enum import Enum

import msgspec


class Drain(Enum):
    """BOUNDARY: open model calls of engines that cannot change weights in flight; a rollout in its environment counts
    as parked. FRONTIER: the whole executions that were active when the hold was acquired. NONE: nothing."""

    BOUNDARY = "boundary"
    FRONTIER = "frontier"
    NONE = "none"


class DrainAction(Enum):
    """At the deadline. PROCEED: act anyway, the rest goes on across the update. CANCEL: end the rest, which is tried
    again later. FAIL: raise `DeadlineExceeded` that names the rest."""

    PROCEED = "proceed"
    CANCEL = "cancel"
    FAIL = "fail"


class DrainPolicy(msgspec.Struct, frozen=True):
    """How to drain, for how long (seconds), and then what."""

    mode: Drain
    deadline_s: float
    action: DrainAction


class Drained(msgspec.Struct, frozen=True):
    """How a drain ended: seconds it took, and executions that had not ended at the deadline."""

    seconds: float
    left: int
