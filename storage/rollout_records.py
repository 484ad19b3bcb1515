"""Records of groups, their rollouts, and what happens inside a rollout. See `storage.schema`."""

from __future__ import annotations

import msgspec

from storage.record import Record


class GroupReserved(Record, frozen=True, forbid_unknown_fields=True):
    """The next `count` ordinals, from `first`, left the source."""

    first: int
    count: int


class AttemptsMinted(Record, frozen=True, forbid_unknown_fields=True):
    """Attempts of siblings of one group; `boundaries` is the claimed continuation's boundary index, -1 from scratch.

    `version` is the policy version that all serving engines have confirmed at this moment.
    """

    group: int
    siblings: tuple[int, ...]
    attempts: tuple[int, ...]
    boundaries: tuple[int, ...]
    version: int


class GroupsDispatched(Record, frozen=True, forbid_unknown_fields=True):
    """Attempt 0 of all n `siblings` of `count` fresh groups from `first`, from scratch: what a burst of submissions
    mints. `version` as in `AttemptsMinted`."""

    first: int
    count: int
    siblings: int
    version: int


class AttemptAbandoned(Record, frozen=True, forbid_unknown_fields=True):
    """An attempt ended without a result. `reason` is an `Outcome` value; `detail` is for people."""

    group: int
    sibling: int
    attempt: int
    reason: str
    detail: str


class PayloadStored(Record, frozen=True, forbid_unknown_fields=True):
    """A block of token rows is durable: in this row's bytes (`inline`) or as payload/<block>.arrow.

    A large one is cut into `batches`: for each its number of rows, offset and length in bytes, and CRC-32, so that a
    reader of some rows reads those only.
    """

    block: str
    digest: str
    size: int
    inline: bool
    batches: tuple[tuple[int, int, int, int], ...] = ()


class TurnCommitted(Record, frozen=True, forbid_unknown_fields=True):
    """The boundary after a turn of a multi-turn rollout (`turn_complete`). The `tokens` new tokens of `turn` are row
    `row` of `block`; they extend the rollout's output sample `sample` from position `start`. `state` is the agent's and
    the environment's.

    After `ModelAnswered` of the same turn, which names the tokens, `row` is where the environment's own account of the
    turn lies, -1 when it has none, and `tokens` is 0. `revisions` are those of the resources that the rollout has
    changed; None: not known, so it depends on everything.
    """

    group: int
    sibling: int
    attempt: int
    boundary: int
    turn: int
    sample: int
    block: str
    row: int
    start: int
    tokens: int
    oldest: int
    state: bytes
    revisions: dict[str, int] | None = msgspec.field(default_factory=dict[str, int])


class ModelAnswered(Record, frozen=True, forbid_unknown_fields=True):
    """The boundary between a model call and the actions in its answer (`pending_model`): the call's tokens are durable,
    the environment has not said anything yet. Fields as in `TurnCommitted`. The call is named by its attempt and
    turn."""

    group: int
    sibling: int
    attempt: int
    boundary: int
    turn: int
    sample: int
    block: str
    row: int
    start: int
    tokens: int
    oldest: int


class RequestIntent(Record, frozen=True, forbid_unknown_fields=True):
    """Action `cursor` of the answer at `boundary` is about to change resource `resource`, which is at revision
    `revision`. `digest` is that of the operation and its input."""

    group: int
    sibling: int
    attempt: int
    boundary: int
    cursor: int
    resource: str
    revision: int
    digest: str


class RequestResult(Record, frozen=True, forbid_unknown_fields=True):
    """What the resource replied to action `cursor`, and the revision that it is at. A request that only reads has no
    intent before it and changes no revision."""

    group: int
    sibling: int
    attempt: int
    boundary: int
    cursor: int
    resource: str
    revision: int
    digest: str
    reply: bytes


class ResourceExported(Record, frozen=True, forbid_unknown_fields=True):
    """The whole session that a rollout has with a resource, as it is at this revision."""

    group: int
    sibling: int
    attempt: int
    resource: str
    revision: int
    state: bytes


class ContinuationDiscarded(Record, frozen=True, forbid_unknown_fields=True):
    """The durable turns of these unfinished rollouts, of which no attempt is live, are given up: they start over. Turns
    go away with this record only, or with all others of their group when that starts whole."""

    groups: tuple[int, ...]
    siblings: tuple[int, ...]
    reason: str


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Proof of a completed result that a host keeps until it is acknowledged. `place` is the rollout's in the columns
    of the record; `host` the resource; `boot` its process, `generation` the number of the begin of `session` there.
    `result` and `digest` (sha256 of canonical JSON) are the result's. `capture` and `call` name the key of the captured
    tokens and the last model call, both or neither."""

    place: int
    host: str
    boot: str
    session: str
    generation: int
    result: str
    digest: str
    capture: str | None = None
    call: str | None = None


class Sealed(Record, frozen=True, forbid_unknown_fields=True):
    """Finished attempts that came together; `rows` are the rows of their last turns in `block`.

    `samples` counts the output samples of each rollout. `oldest` is the oldest version that generated a token of the
    last turn; `tokens` counts generated tokens of it. Each of `receipts` is owed an acknowledgement from here on.
    """

    block: str
    groups: tuple[int, ...]
    siblings: tuple[int, ...]
    attempts: tuple[int, ...]
    rows: tuple[int, ...]
    samples: tuple[int, ...]
    tokens: tuple[int, ...]
    oldest: tuple[int, ...]
    rewards: tuple[float, ...]
    receipts: tuple[Receipt, ...] = ()


class AckDone(Record, frozen=True, forbid_unknown_fields=True):
    """The host accepted the acknowledgement of these attempts' results, and has released them."""

    host: str
    boot: str
    groups: tuple[int, ...]
    siblings: tuple[int, ...]
    attempts: tuple[int, ...]


class ObligationExpired(Record, frozen=True, forbid_unknown_fields=True):
    """What is owed to this process of a host is owed no more: another process has taken its place, or a person says so.
    Unreachable is no reason."""

    host: str
    boot: str
    reason: str


class GroupCompleted(Record, frozen=True, forbid_unknown_fields=True):
    """All siblings of these groups are sealed and the groups may be leased."""

    groups: tuple[int, ...]


class GroupDiscarded(Record, frozen=True, forbid_unknown_fields=True):
    """Settled without training: filtered, end of source, run finished."""

    groups: tuple[int, ...]
    reason: str


class GroupRequeued(Record, frozen=True, forbid_unknown_fields=True):
    """The group starts whole again; its sealed siblings are dropped."""

    group: int
    reason: str


class GroupQuarantined(Record, frozen=True, forbid_unknown_fields=True):
    """Settled because an attempt budget was spent; only a person releases it."""

    group: int
    reason: str


class QuarantineReleased(Record, frozen=True, forbid_unknown_fields=True):
    """A person gave the group another budget."""

    group: int
