"""The numbers that bound rollout control, and the arithmetic that refuses those which must deadlock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from storage.errors import ConfigurationRefused


class Submission(Enum):
    """What "executing" counts: whole groups, or rollouts whose credits return one by one."""

    GROUP = "group"
    SAMPLE = "sample"


class Order(Enum):
    """Which completed groups a lease takes first, within the staleness rule."""

    FIFO = "fifo"
    LIFO = "lifo"


@dataclass(frozen=True, slots=True)
class Limits:
    """See design section "capacities". Groups unless a name says otherwise; seconds end in _s.

    `staleness` None means unbounded. `max_completed` (P) counts groups from first dispatch to settlement. `max_backoff`
    groups may wait for their next attempt at once; a further one does not wait. `max_postprocessing` groups may be in
    group-level work at once. `max_attempts` and `max_losses` bound
    the failures and the process deaths of one rollout before its group is quarantined.
    """

    num_siblings: int
    batch: int
    staleness: int | None
    submission: Submission
    order: Order
    max_executing: int
    max_retained: int
    max_completed: int
    max_hot_bytes: int
    eviction_cap: int | None
    prefetch: int
    max_backoff: int
    max_postprocessing: int
    max_attempts: int
    max_losses: int
    backoff_base_s: float
    backoff_max_s: float
    undurable_age_s: float
    undurable_bytes: int
    discard_end_of_source: bool

    @property
    def executing_groups(self) -> int:
        """Whole groups that can execute at once."""
        return self.max_executing if self.submission is Submission.GROUP else self.max_executing // self.num_siblings


def check_limits(limits: Limits) -> list[str]:
    """Refuse what must deadlock, with the arithmetic (`ConfigurationRefused`); returns warnings."""
    _check_positive(limits)
    n, batch = limits.num_siblings, limits.batch
    if limits.max_completed < batch + limits.max_backoff:
        raise _refuse(
            f"max_completed (P) = {limits.max_completed} < batch {batch} + max_backoff {limits.max_backoff}"
            f" = {batch + limits.max_backoff}: groups in backoff could hold every place of a batch",
            f"max_completed >= {batch + limits.max_backoff}",
        )
    if limits.max_retained < limits.max_completed:
        raise _refuse(
            f"max_retained (R) = {limits.max_retained} < max_completed (P) = {limits.max_completed}: P never fills",
            f"max_retained >= {limits.max_completed}",
        )
    if limits.submission is Submission.SAMPLE and limits.max_executing < n:
        raise _refuse(
            f"max_executing (E) = {limits.max_executing} rollouts < n = {n}: no whole group could ever be submitted",
            f"max_executing >= {n}",
        )
    if limits.eviction_cap is not None and limits.eviction_cap < batch:
        raise _refuse(
            f"eviction_cap = {limits.eviction_cap} < batch {batch}: a batch would be evicted before it is complete",
            f"eviction_cap >= {batch}, or null",
        )
    if limits.max_hot_bytes < n:
        raise _refuse(
            f"max_hot_bytes = {limits.max_hot_bytes} cannot hold the payload of one group of {n} rollouts",
            "room for one group",
        )
    if limits.staleness == 0 and limits.prefetch:
        raise _refuse(
            f"staleness = 0 with prefetch = {limits.prefetch}: a batch of version v cannot exist before v",
            "prefetch = 0, or staleness >= 1",
        )
    if limits.max_completed < limits.executing_groups:
        return [
            f"max_completed (P) = {limits.max_completed} < {limits.executing_groups} groups that could execute (E):"
            " generation will idle while finished groups wait for the trainer"
        ]
    return []


def check_group_bytes(limits: Limits, bytes_per_group: int) -> None:
    """Refuse a memory bound below one group's payload, once the longest rollout is known. See `check_limits`."""
    if limits.max_hot_bytes < bytes_per_group:
        raise _refuse(
            f"max_hot_bytes = {limits.max_hot_bytes} < {bytes_per_group} bytes, one group at the token limit",
            f"max_hot_bytes >= {bytes_per_group}",
        )


def _check_positive(limits: Limits) -> None:
    for name in (
        "num_siblings",
        "batch",
        "max_executing",
        "max_retained",
        "max_completed",
        "max_postprocessing",
        "max_attempts",
        "max_losses",
    ):
        if getattr(limits, name) < 1:
            raise _refuse(f"{name} = {getattr(limits, name)}", f"{name} >= 1")
    for name in ("prefetch", "max_backoff", "backoff_base_s", "backoff_max_s", "undurable_age_s", "undurable_bytes"):
        if getattr(limits, name) < 0:
            raise _refuse(f"{name} = {getattr(limits, name)}", f"{name} >= 0")
    if limits.staleness is not None and limits.staleness < 0:
        raise _refuse(f"staleness = {limits.staleness}", "staleness >= 0, or null for unbounded")


def _refuse(found: str, expected: str) -> ConfigurationRefused:
    return ConfigurationRefused(found, expected=expected, action="change the run configuration", code="deadlock")
