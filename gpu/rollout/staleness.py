"""The hard staleness bound, without throwing work away.

Let o(g) be the oldest version that generated a token of group g, and deadline(g) = o(g) + S. A group must be trained at
a version <= its deadline. Every version trains at most B groups, so a set of unsettled groups can be trained in time
exactly when, for every d >= v (the version that trains next), at most B (d - v + 1) of them have deadline <= d. Both
rules below keep that invariant: `room` when a group starts, `select` when a batch is taken. Within it, completion
order decides. In steady state it admits B (S + 1) unsettled groups, and a prompt slower than the bound is waited for
and trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

UNBOUNDED = 1 << 62


def room(counts: Mapping[int, int], staleness: int | None, batch: int, trains_at: int, generated_at: int) -> int:
    """How many more groups, whose first token will come from version `generated_at`, can still be trained in time.

    `counts` maps oldest version to number of unsettled started groups; `trains_at` is v for the earliest of them (the
    version of an open lease, else the current one).
    """
    if staleness is None:
        return UNBOUNDED
    deadline = generated_at + staleness
    if deadline < trains_at:
        return 0
    due = sum([n for oldest, n in counts.items() if oldest < generated_at])
    # Such a group counts for every d >= its own deadline, so later ones, checked when they were admitted, count again.
    left = UNBOUNDED
    for oldest in range(generated_at, max(generated_at, *counts) + 1 if counts else generated_at + 1):
        due += counts.get(oldest, 0)
        left = min(left, batch * (oldest + staleness - trains_at + 1) - due)
    return max(0, left)


@dataclass(frozen=True, slots=True)
class Selection:
    """`chosen` ordinals in order of preference, or None and why; `overdue` cannot be trained within the bound."""

    chosen: tuple[int, ...] | None
    overdue: tuple[int, ...]
    reason: str = ""
    culprits: tuple[int, ...] = ()


def select(
    ready: Sequence[tuple[int, int]],
    unready: Iterable[tuple[int, int]],
    staleness: int | None,
    batch: int,
    version: int,
) -> Selection:
    """Choose `batch` groups to train at `version`. `ready` (completed, in order of preference) and `unready` (started,
    not completed) are (ordinal, oldest version)."""
    if staleness is None:
        return _enough([ordinal for ordinal, _ in ready], batch, ())
    overdue = tuple(ordinal for ordinal, oldest in ready if oldest + staleness < version)
    fresh = [(ordinal, oldest + staleness) for ordinal, oldest in ready if oldest + staleness >= version]
    waiting = [(ordinal, oldest + staleness) for ordinal, oldest in unready if oldest + staleness >= version]
    due_now = [ordinal for ordinal, deadline in waiting if deadline == version]
    if due_now:
        return Selection(
            None, overdue, f"{len(due_now)} groups reach their staleness deadline at version {version}", tuple(due_now)
        )
    chosen = [ordinal for ordinal, deadline in fresh if deadline == version]
    if len(chosen) > batch:
        return _enough(chosen[:batch], batch, (*overdue, *chosen[batch:]))
    picked = set(chosen)
    last = max([version, *(deadline for _, deadline in fresh), *(deadline for _, deadline in waiting)])
    for d in range(version + 1, last + 1):
        left = sum(deadline <= d for ordinal, deadline in fresh if ordinal not in picked)
        left += sum(deadline <= d for _, deadline in waiting)
        over = left - batch * (d - version)
        if over <= 0:
            continue
        more = [ordinal for ordinal, deadline in fresh if deadline <= d and ordinal not in picked][:over]
        if len(more) < over:
            culprits = tuple(ordinal for ordinal, deadline in waiting if deadline <= d)
            return Selection(None, overdue, f"{over - len(more)} more groups must finish before version {d}", culprits)
        chosen += more
        picked.update(more)
    chosen += [ordinal for ordinal, _ in fresh if ordinal not in picked][: max(0, batch - len(chosen))]
    return _enough(chosen, batch, overdue)


def _enough(chosen: list[int], batch: int, overdue: tuple[int, ...]) -> Selection:
    if len(chosen) < batch:
        return Selection(None, overdue, f"{len(chosen)} of {batch} groups are ready")
    return Selection(tuple(chosen[:batch]), overdue)
