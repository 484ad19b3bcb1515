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

from storage.record import Record
from storage.rollout_records import (
    AckDone,
    AttemptAbandoned,
    AttemptsMinted,
    ContinuationDiscarded,
    GroupCompleted,
    GroupDiscarded,
    GroupQuarantined,
    GroupRequeued,
    GroupReserved,
    GroupsDispatched,
    ModelAnswered,
    ObligationExpired,
    PayloadStored,
    QuarantineReleased,
    Receipt,
    RequestIntent,
    RequestResult,
    ResourceExported,
    Sealed,
    TurnCommitted,
)

__all__ = [
    "AckDone",
    "AttemptAbandoned",
    "AttemptsMinted",
    "ContinuationDiscarded",
    "GroupCompleted",
    "GroupDiscarded",
    "GroupQuarantined",
    "GroupRequeued",
    "GroupReserved",
    "GroupsDispatched",
    "ModelAnswered",
    "ObligationExpired",
    "PayloadStored",
    "QuarantineReleased",
    "Receipt",
    "Record",
    "RequestIntent",
    "RequestResult",
    "ResourceExported",
    "Sealed",
    "TurnCommitted",
]
"""Records that are defined elsewhere; all of them are known by this module."""

SCHEMA = 1


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
