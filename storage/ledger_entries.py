"""What a ledger consists of: groups and their rollouts, leases, steps, blocks, obligations.

Encoded by position (`array_like`): ledger snapshots hold many of each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import msgspec

from storage import schema

UNKNOWN_VERSION = -1


class GroupState(Enum):
    RESERVED = "reserved"
    GENERATING = "generating"
    COMPLETED = "completed"
    LEASED = "leased"

    __hash__ = object.__hash__  # Enum's own is a Python function, and these are keys on the hottest paths


class RolloutState(Enum):
    WAITING = "waiting"
    LIVE = "live"
    SEALED = "sealed"


# Reading a member through its class is a Python call in 3.11.
RESERVED, GENERATING, COMPLETED = GroupState.RESERVED, GroupState.GENERATING, GroupState.COMPLETED
LEASED = GroupState.LEASED
WAITING, LIVE, SEALED = RolloutState.WAITING, RolloutState.LIVE, RolloutState.SEALED


class Requested(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A request to a resource, of the answer that is being acted on. `before` and `after` are revisions; `reply` is
    None while it is not known whether the resource has done it."""

    resource: str
    digest: str
    before: int
    after: int
    reply: bytes | None


class Export(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A session's state at a revision."""

    revision: int
    state: bytes


class Boundary(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The last durable point of an unfinished rollout, where an attempt may continue: in output sample `sample`, of
    which `position` tokens are durable. `attempt` came there; `root` is the attempt that started from scratch.

    `pending`: the model has answered in `turn`, and of the actions in its answer `requests` are done or begun; `state`
    is then still the one before that turn, b"" before the first. `revisions` are those of the resources when the
    answer came, None when they are not known; `exports` the newest state of each.
    """

    index: int
    turn: int
    sample: int
    state: bytes
    attempt: int
    root: int
    position: int
    pending: bool = False
    requests: tuple[Requested, ...] = ()
    revisions: dict[str, int] | None = {}
    exports: dict[str, Export] = {}

    def revision(self, resource: str) -> int:
        """The revision that a resource is at, as far as is known; 0: the rollout has not changed it."""
        found = (self.revisions or {}).get(resource, 0)
        for request in self.requests:
            if request.resource == resource:
                found = request.after
        return found


def next_samples(sample: int) -> range:
    """Output samples that a turn may belong to after one of `sample`, -1 before the first: the open one or the next."""
    return range(max(sample, 0), sample + 2)


class Rollout(msgspec.Struct, gc=False, array_like=True):
    """One sibling. `rows` are (block, row) of its durable turns in order; `oldest` the oldest version in them;
    `samples` and `tokens` are those of the seal."""

    attempt: int = -1
    incarnation: int = 0
    state: RolloutState = WAITING
    minted_version: int = UNKNOWN_VERSION
    oldest: int = UNKNOWN_VERSION
    rows: tuple[tuple[str, int], ...] = ()
    samples: int = 0
    tokens: int = 0
    reward: float = math.nan
    boundary: Boundary | None = None
    boundaries: int = 0
    failures: int = 0
    losses: int = 0
    closed_by_claim: bool = False


class Obligation(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An acknowledgement that is owed to a host for the result of an attempt. `incarnation` is the attempt's."""

    group: int
    sibling: int
    attempt: int
    incarnation: int
    receipt: schema.Receipt


class Recipe(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """See `schema.RecipeDeclared`."""

    recovery: str = "sibling"
    fingerprint: str = ""


UNDECLARED = Recipe()


class Group(msgspec.Struct, gc=False, array_like=True):
    """One prompt and its siblings. `dispatched` once an attempt was minted: it then holds a completed slot until it is
    settled. `oldest` is the oldest version in its durable turns and live attempts, unknown when there are none."""

    ordinal: int
    rollouts: tuple[Rollout, ...]
    state: GroupState = RESERVED
    dispatched: bool = False
    num_live: int = 0
    num_sealed: int = 0
    oldest: int = UNKNOWN_VERSION
    completed_seq: int = -1
    recipe: Recipe = UNDECLARED
    """As it was at the first dispatch, or when the group was last requeued whole."""


class TrainedGroup(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a redo needs of a leased group: for each sibling, in order, the references to its token rows, the number of
    its output samples, and its reward. `attempts` and `boundaries` are how far each had counted: the group goes on from
    there if its step is reverted."""

    ordinal: int
    rows: tuple[tuple[tuple[str, int], ...], ...]
    samples: tuple[int, ...]
    rewards: tuple[float, ...]
    oldest: int
    attempts: tuple[int, ...]
    boundaries: tuple[int, ...]


def trained_group(group: Group) -> TrainedGroup:
    """A completed group as a lease names it."""
    columns = [(one.rows, one.samples, one.reward, one.attempt, one.boundaries) for one in group.rollouts]
    rows, samples, rewards, attempts, boundaries = zip(*columns, strict=True)
    return TrainedGroup(group.ordinal, rows, samples, rewards, group.oldest, attempts, boundaries)


class Lease(msgspec.Struct, frozen=True, gc=False, array_like=True):
    lease: int
    step: int
    version: int
    groups: tuple[TrainedGroup, ...]
    final: bool
    blocks: dict[str, int]
    """How many rows of each block its groups have."""


def make_lease(lease: int, step: int, version: int, groups: Iterable[Group], *, final: bool) -> Lease:
    trained = tuple([trained_group(group) for group in groups])
    blocks = Counter([name for group in trained for rows in group.rows for name, _ in rows])
    return Lease(lease, step, version, trained, final, dict(blocks))


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step that a restore may have to redo."""

    lease: Lease
    state_digest: str
    weights_digest: str
    seq: int


class Block(msgspec.Struct, gc=False, array_like=True):
    """Where token rows lie. `slot` of an inline block is known once its segment exists. `users` counts rows of
    unsettled rollouts, `retained` rows of committed steps that a redo may need."""

    digest: str
    size: int
    inline: bool
    slot: int = -1
    users: int = 0
    retained: int = 0
    batches: tuple[tuple[int, int, int, int], ...] = ()
    """See `schema.PayloadStored`."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Why, and what the rollouts had used up: a released group goes on with new attempt numbers."""

    reason: str
    attempts: tuple[int, ...]
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    incarnation: int
    number: int
    digest: str


class Inherited(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a fork began with, see `schema.Forked`; the last four count ordinals."""

    run: str
    storage: str
    step: int
    position: int
    state_digest: str
    consumed: int
    discarded: int
    quarantined: int
    requeued: int
