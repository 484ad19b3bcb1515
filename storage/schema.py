"""The records of the journal: what can be said about a run, in one place.

A record is frozen, strictly typed, and stored as one narrow row (kind, JSON body, optional bytes). Unknown kinds and
fields refuse. `FIELD_HASH` covers every kind, field and type, so that two programs with different records never read
each other's journals by accident. The first released schema is 1; a revision before the release is refused, never
upgraded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import get_type_hints

import msgspec

SCHEMA = 1


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of all records. Ordinals, steps, attempts and versions count from 0; tuples in one record run parallel."""


class RunClaimed(Record, frozen=True, forbid_unknown_fields=True):
    """A new incarnation owns the run; every live attempt of older ones is closed."""

    incarnation: int
    owner: str
    reason: str


class Forked(Record, frozen=True, forbid_unknown_fields=True):
    """The run goes on from `step` of another run, as that one was at record `position`, its commit; directly after the
    first claim. `storage` is the other store's url without credentials. Of its ordinals below `frontier`, those neither
    `consumed` nor `discarded` (half-open intervals) nor `quarantined` start whole again here, from their prompts.
    `checkpoint` is this run's own copy; its position is this record's."""

    run: str
    storage: str
    step: int
    position: int
    state_digest: str
    weights_digest: str
    checkpoint: CheckpointPublished
    frontier: int
    consumed: tuple[tuple[int, int], ...]
    discarded: tuple[tuple[int, int], ...]
    quarantined: tuple[int, ...]
    reasons: tuple[str, ...]
    attempts: tuple[tuple[int, ...], ...]
    boundaries: tuple[tuple[int, ...], ...]
    recovery: str
    fingerprint: str


class PolicyPublished(Record, frozen=True, forbid_unknown_fields=True):
    """Policy version (incarnation, number) may be activated. `number` = committed steps it contains."""

    incarnation: int
    number: int
    digest: str
    parent: str


class RecipeDeclared(Record, frozen=True, forbid_unknown_fields=True):
    """What results of groups first dispatched from here on mean, and how such a group is recovered when it loses an
    attempt. `recovery`: "sibling" keeps sealed siblings, "prompt_group" redoes all. `fingerprint`: digest of
    environment, reward and template; a group that is unfinished when it changes is redone whole."""

    recovery: str
    fingerprint: str


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
    revisions: dict[str, int] | None = {}


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


class LeaseIssued(Record, frozen=True, forbid_unknown_fields=True):
    """The trainer may train `step` on `groups`, in this order, with policy version `version`."""

    lease: int
    step: int
    groups: tuple[int, ...]
    version: int
    final: bool


class LeaseRolledBack(Record, frozen=True, forbid_unknown_fields=True):
    """The lease ended untrained; its groups are completed again."""

    lease: int
    reason: str


class StepCommitted(Record, frozen=True, forbid_unknown_fields=True):
    """The optimizer step happened; its lease is consumed. The digests are those after the step."""

    step: int
    lease: int
    state_digest: str
    weights_digest: str
    metrics: dict[str, float]


class StepRedone(Record, frozen=True, forbid_unknown_fields=True):
    """A committed step was trained again after a restore; the digests are what came out."""

    step: int
    state_digest: str
    weights_digest: str
    matches: bool


class StepsReverted(Record, frozen=True, forbid_unknown_fields=True):
    """Committed steps after `to_step`, up to `from_step`, are not in the lineage any more: the trainer was restored to
    the state after `to_step` (a checkpoint's, or 0 for the initial weights), which has these digests, "" for step 0.

    Checkpoints after it leave with them (they were damaged), and so do evaluations of their weights. The groups they
    trained are unsettled again and start whole, and so does every other group with durable work: its tokens may come
    from versions that nobody will ever train from again. Groups that were discarded or quarantined stay so. Only an
    incarnation that has published no version and issued no lease yet may say this, so that (incarnation, number) of a
    version is never used twice.
    """

    from_step: int
    to_step: int
    state_digest: str
    weights_digest: str


class CheckpointPublished(Record, frozen=True, forbid_unknown_fields=True):
    """The trainer's state after `step` is complete in the store; `position` is the sequence number of that commit."""

    step: int
    position: int
    manifest: str
    digest: str
    size: int
    written: int


class Retired(Record, frozen=True, forbid_unknown_fields=True):
    """The checkpoints `manifests` and the payload blocks `blocks` have lost their meaning: nobody may begin to rely on
    them, and they may be deleted. The checkpoints `kept` stay, for forks and for people: no restore begins there any
    more. Steps up to the oldest checkpoint that is left are final."""

    manifests: tuple[str, ...]
    kept: tuple[str, ...]
    blocks: tuple[str, ...]


class Deleted(Record, frozen=True, forbid_unknown_fields=True):
    """These retired checkpoints and blocks are gone from the store."""

    manifests: tuple[str, ...]
    blocks: tuple[str, ...]


class EvaluationDue(Record, frozen=True, forbid_unknown_fields=True):
    """The weights after `step`, the last committed one, are to be evaluated on these suites."""

    step: int
    suites: tuple[str, ...]


class EvaluationDone(Record, frozen=True, forbid_unknown_fields=True):
    """The one result of (suite, step). `digest` is of the weights that were served when it began.

    `oldest` and `newest` are the versions that generated its tokens, -1 without any; `mixed`: not only version `step`.
    `failed` of its `samples` have no reward; `metrics` are over the others. A suite that the run no longer had has no
    tasks.
    """

    suite: str
    step: int
    digest: str
    mixed: bool
    oldest: int
    newest: int
    tasks: int
    samples: int
    failed: int
    metrics: dict[str, float]


class LedgerSnapshot(Record, frozen=True, forbid_unknown_fields=True):
    """The ledger as it was before slot `slot`, whose first record is `position` and which chains to `chain`, is in the
    store, with this digest and size. A restore may begin there.

    `archive` holds the slots up to it, and takes the place of every archive from its first slot on. Slots below `low`
    have lost their meaning in the journal: whoever finds this record durable may delete them."""

    slot: int
    position: int
    chain: str
    digest: str
    size: int
    archive: str
    low: int


class ConfigChanged(Record, frozen=True, forbid_unknown_fields=True):
    """Settings that differ from those of the previous incarnation, as "old -> new"."""

    changes: dict[str, str]


class RunFinished(Record, frozen=True, forbid_unknown_fields=True):
    """Nothing follows but claims; a resume is a no-op."""

    reason: str


def minted(record: Record) -> list[tuple[int, int, int]]:
    """(group, sibling, attempt) of every attempt that a record mints; empty for records of other kinds."""
    if isinstance(record, AttemptsMinted):
        return [(record.group, s, a) for s, a in zip(record.siblings, record.attempts, strict=True)]
    if isinstance(record, GroupsDispatched):
        groups = range(record.first, record.first + record.count)
        return [(group, sibling, 0) for group in groups for sibling in range(record.siblings)]
    return []


KINDS: dict[str, type[Record]] = {
    "run_claimed": RunClaimed,
    "forked": Forked,
    "policy_published": PolicyPublished,
    "recipe_declared": RecipeDeclared,
    "group_reserved": GroupReserved,
    "attempts_minted": AttemptsMinted,
    "groups_dispatched": GroupsDispatched,
    "attempt_abandoned": AttemptAbandoned,
    "payload_stored": PayloadStored,
    "turn_committed": TurnCommitted,
    "model_answered": ModelAnswered,
    "request_intent": RequestIntent,
    "request_result": RequestResult,
    "resource_exported": ResourceExported,
    "continuation_discarded": ContinuationDiscarded,
    "sealed": Sealed,
    "ack_done": AckDone,
    "obligation_expired": ObligationExpired,
    "group_completed": GroupCompleted,
    "group_discarded": GroupDiscarded,
    "group_requeued": GroupRequeued,
    "group_quarantined": GroupQuarantined,
    "quarantine_released": QuarantineReleased,
    "lease_issued": LeaseIssued,
    "lease_rolled_back": LeaseRolledBack,
    "step_committed": StepCommitted,
    "step_redone": StepRedone,
    "steps_reverted": StepsReverted,
    "checkpoint_published": CheckpointPublished,
    "retired": Retired,
    "deleted": Deleted,
    "evaluation_due": EvaluationDue,
    "evaluation_done": EvaluationDone,
    "ledger_snapshot": LedgerSnapshot,
    "config_changed": ConfigChanged,
    "run_finished": RunFinished,
}
BYTES: dict[type[Record], str] = {TurnCommitted: "state", RequestResult: "reply", ResourceExported: "state"}
"""Fields that lie beside the JSON body of their record, as bytes: they are most of it."""
KIND_OF: dict[type[Record], str] = {record: kind for kind, record in KINDS.items()}


def field_hash(types: Mapping[str, type]) -> str:
    """Digest over the names, fields and field types of `types`."""
    lines = [
        f"{kind}:{','.join(f'{name}={kind_!r}' for name, kind_ in get_type_hints(one).items())}"
        for kind, one in types.items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


FIELD_HASH = field_hash(KINDS)
