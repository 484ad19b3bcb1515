"""The state of a run: the fold of its journal records.

`storage.transitions.apply` is the only way to change it.

                reserve          mint               all siblings sealed      lease            step committed
    (source) ───► RESERVED ───────► GENERATING ───────────► COMPLETED ─────────► LEASED ──────────► consumed
                     ▲                 │  │                     │                   │
                     ├── abandoned ────┘  └──► discarded ◄──────┤                   │
                     ├── requeued ◄─────────────────────────────┘                   └── rolled back ──► COMPLETED
                     └──► quarantined (attempt budget spent; only a person releases it)

A rollout (sibling) is waiting, live (an attempt is minted), or sealed; at most one attempt is sealed, the last one.
The ledger holds what is unsettled, and the steps that a redo may need; older settled groups are intervals. What it
consists of is encoded by position (`array_like`): ledger snapshots hold many of each.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from storage import schema
from storage.errors import ReferenceInvalid, TwoOwners
from storage.intervals import IntervalSet
from storage.ledger_entries import (
    COMPLETED,
    GENERATING,
    LEASED,
    LIVE,
    RESERVED,
    SEALED,
    UNDECLARED,
    UNKNOWN_VERSION,
    WAITING,
    Block,
    Boundary,
    Export,
    Group,
    GroupState,
    Inherited,
    Lease,
    Obligation,
    Policy,
    Quarantined,
    Recipe,
    Requested,
    Rollout,
    RolloutState,
    Step,
    TrainedGroup,
    make_lease,
    next_samples,
    trained_group,
)
from storage.schema import Record

__all__ = [
    "COMPLETED",
    "GENERATING",
    "LEASED",
    "LIVE",
    "RESERVED",
    "SEALED",
    "UNDECLARED",
    "UNKNOWN_VERSION",
    "WAITING",
    "Block",
    "Boundary",
    "Export",
    "Group",
    "GroupState",
    "Inherited",
    "Lease",
    "Ledger",
    "Obligation",
    "Policy",
    "Quarantined",
    "Recipe",
    "Requested",
    "Rollout",
    "RolloutState",
    "Step",
    "TrainedGroup",
    "make_lease",
    "next_samples",
    "trained_group",
]
"""With its entries, which are defined elsewhere."""


@dataclass(slots=True)
class Ledger:
    """See the module. `num_siblings` is n, rollouts per group."""

    num_siblings: int
    incarnation: int = 0
    recipe: Recipe = UNDECLARED
    frontier: int = 0
    groups: dict[int, Group] = field(default_factory=lambda: {})
    completed: dict[int, None] = field(default_factory=lambda: {})
    oldest_counts: Counter[int] = field(default_factory=lambda: Counter[int]())
    consumed: IntervalSet = field(default_factory=IntervalSet)
    discarded: IntervalSet = field(default_factory=IntervalSet)
    quarantined: dict[int, Quarantined] = field(default_factory=lambda: {})
    blocks: dict[str, Block] = field(default_factory=lambda: {})
    lease: Lease | None = None
    next_lease: int = 1
    step: int = 0
    state_digest: str = ""
    weights_digest: str = ""
    steps: dict[int, Step] = field(default_factory=lambda: {})
    checkpoints: list[schema.CheckpointPublished] = field(default_factory=lambda: [])
    """Those that a restore tries, oldest first; `steps` are those after the oldest."""
    kept: list[schema.CheckpointPublished] = field(default_factory=lambda: [])
    """Older ones that stay for forks and for people."""
    retired: list[schema.CheckpointPublished] = field(default_factory=lambda: [])
    """Those that nobody may begin to rely on, and that may be in the store still."""
    retired_blocks: dict[str, None] = field(default_factory=lambda: {})
    """Payload blocks of the same kind."""
    policy: Policy | None = None
    initial_weights: str = ""
    dispatched: int = 0
    live: int = 0
    """Attempts that are live."""
    totals: Counter[GroupState] = field(default_factory=lambda: Counter[GroupState]())
    """Unsettled groups by state."""
    obligations: dict[tuple[int, int, int, str], Obligation] = field(default_factory=lambda: {})
    """By group, sibling, attempt and host."""
    due: dict[tuple[str, int], None] = field(default_factory=lambda: {})
    """Evaluations (suite, step) without a result yet."""
    evaluated: set[tuple[str, int]] = field(default_factory=lambda: set())
    """Evaluations (suite, step) that have their result."""
    settings: dict[str, str] = field(default_factory=lambda: {})
    """Those that were changed since the run began, by dotted name."""
    snapshot: schema.LedgerSnapshot | None = None
    """The newest one that was recorded."""
    history: list[str] = field(default_factory=lambda: [])
    """Names of the archives that hold the journal up to the newest snapshot, in order."""
    replaced: list[str] = field(default_factory=lambda: [])
    """Archives whose place others took with the newest snapshot."""
    inherited: Inherited | None = None
    """Of a fork."""
    finished: str = ""
    counts: Counter[str] = field(default_factory=lambda: Counter[str]())
    next_seq: int = 0
    idle_blocks: list[str] = field(default_factory=lambda: [])
    """Blocks that lost their last unsettled user; whoever keeps hot copies takes names from here."""
    spent_files: dict[str, None] | None = None
    """Blocks in files of their own that nothing needs any more, for whoever deletes them; None: nobody does."""
    _unplaced: deque[tuple[int, str]] = field(default_factory=lambda: deque[tuple[int, str]]())

    def placed(self, slot: int, last_seq: int) -> None:
        """The segment that ends with `last_seq` exists as `slot`: inline payloads in it can be found there."""
        while self._unplaced and self._unplaced[0][0] <= last_seq:
            block = self.blocks.get(self._unplaced.popleft()[1])
            if block is not None:
                block.slot = slot

    # ------------------------------------------------------------------ views

    @property
    def retained(self) -> int:
        """Unsettled groups."""
        return len(self.groups)

    def state_counts(self) -> dict[str, int]:
        return {state.value: self.totals[state] for state in GroupState}

    @property
    def from_genesis(self) -> bool:
        """Whether every committed step is still there, so that the initial weights are a base too."""
        return len(self.steps) == self.step

    def missing_ordinals(self) -> list[int]:
        """Ordinals below the frontier that are in no place; always empty in a valid run."""
        return [ordinal for ordinal in range(self.frontier) if not self._known(ordinal)]

    def _known(self, ordinal: int) -> bool:
        return (
            ordinal in self.groups
            or ordinal in self.consumed
            or ordinal in self.discarded
            or ordinal in self.quarantined
        )

    # ------------------------------------------------------------------ helpers of the transitions

    def group(self, ordinal: int, record: Record, seq: int) -> Group:
        group = self.groups.get(ordinal)
        if group is not None:
            return group
        settled = {
            "consumed": ordinal in self.consumed,
            "discarded": ordinal in self.discarded,
            "quarantined": ordinal in self.quarantined,
        }
        where = next((name for name, there in settled.items() if there), "never reserved")
        raise TwoOwners(
            f"record {seq} ({schema.KIND_OF[type(record)]}) names group {ordinal}, which is {where}",
            expected="an unsettled group",
            action="the journal was altered or written by two owners; `tidegate fork RUN NEW --last-good`",
        )

    def set_oldest(self, group: Group) -> None:
        """Recompute the oldest version of a group and the index by it, after any change of its rollouts."""
        known = [rollout.oldest for rollout in group.rollouts if rollout.oldest != UNKNOWN_VERSION]
        known += [rollout.minted_version for rollout in group.rollouts if rollout.state is LIVE]
        self.move_oldest(group, min(known, default=UNKNOWN_VERSION))

    def move_oldest(self, group: Group, oldest: int) -> None:
        if oldest != group.oldest:
            self._uncount(group.oldest)
            group.oldest = oldest
            if oldest != UNKNOWN_VERSION:
                self.oldest_counts[oldest] += 1

    def _uncount(self, version: int) -> None:
        if version == UNKNOWN_VERSION:
            return
        left = self.oldest_counts[version] - 1
        if left:
            self.oldest_counts[version] = left
        else:
            del self.oldest_counts[version]

    def set_state(self, group: Group, state: GroupState) -> None:
        before = group.state
        if before is COMPLETED:
            del self.completed[group.ordinal]
        if state is COMPLETED:
            self.completed[group.ordinal] = None
        self.totals[before] -= 1
        self.totals[state] += 1
        group.state = state

    def add_group(self, group: Group) -> None:
        """A reserved group, new or released from quarantine."""
        self.groups[group.ordinal] = group
        self.totals[RESERVED] += 1

    def settle(self, group: Group) -> None:
        """Remove a group from the unsettled; its live attempts are closed, its blocks lose their users."""
        self.take_out(group)
        for rollout in group.rollouts:
            if rollout.rows:
                self.release_rows(rollout.rows)

    def take_out(self, group: Group) -> None:
        if group.state is COMPLETED:
            del self.completed[group.ordinal]
        self.totals[group.state] -= 1
        self.live -= group.num_live
        self._uncount(group.oldest)
        self.dispatched -= group.dispatched
        del self.groups[group.ordinal]

    def check_block(self, name: str, record: Record, seq: int) -> Block:
        block = self.blocks.get(name)
        if block is None:
            raise ReferenceInvalid(
                f"record {seq} ({schema.KIND_OF[type(record)]}) names block {name!r}, which no record stored",
                expected="a payload_stored record before it",
                action="the journal was altered; `tidegate fork RUN NEW --last-good`",
                code="orphan",
            )
        return block

    def use_row(self, row: tuple[str, int], record: Record, seq: int) -> None:
        self.check_block(row[0], record, seq).users += 1

    def release_rows(self, rows: Iterable[tuple[str, int]]) -> None:
        for name, _ in rows:
            block = self.blocks[name]
            block.users -= 1
            if not block.users:
                self.idle_blocks.append(name)
                self._drop_unused(name, block)

    def keep_rows(self, lease: Lease) -> None:
        """The rows of a lease that is committed: no unsettled rollout uses them any more, a redo may."""
        for name, count in lease.blocks.items():
            block = self.blocks[name]
            block.users -= count
            block.retained += count
            if not block.users:
                self.idle_blocks.append(name)

    def forget_rows(self, lease: Lease) -> None:
        """No redo needs the rows of this committed lease any more."""
        for name, count in lease.blocks.items():
            block = self.blocks[name]
            block.retained -= count
            self._drop_unused(name, block)

    def _drop_unused(self, name: str, block: Block) -> None:
        if not block.users and not block.retained:
            del self.blocks[name]
            if self.spent_files is not None and not block.inline:
                self.spent_files[name] = None

    def drop_work(self, rollout: Rollout) -> None:
        """Forget the durable turns and the seal of a rollout; its attempt numbers go on."""
        self.release_rows(rollout.rows)
        self.counts["tokens_wasted"] += rollout.tokens
        rollout.rows, rollout.samples, rollout.tokens, rollout.boundary = (), 0, 0, None
        rollout.oldest, rollout.reward, rollout.state = UNKNOWN_VERSION, math.nan, WAITING

    def add_unplaced(self, seq: int, name: str) -> None:
        self._unplaced.append((seq, name))
