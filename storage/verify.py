"""`verify`: prove from storage alone what a run promises.

Each ordinal handed out is in exactly one place, each consumed group was trained once, the staleness bound held, every
token row belongs to the attempt that was sealed, every object is what its digest says, and checkpoints hold the state
that the journal committed. The records are folded by the same transitions that ran live; on top, this module counts by
itself and looks into the payloads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from storage import schema
from storage.auditor import Auditor
from storage.buffers import buffers_digest
from storage.checkpoint import read_buffers, read_manifest
from storage.errors import (
    ArtifactCorrupt,
    ReferenceInvalid,
    SlotsRetired,
    StorageUnusable,
    StoreUnavailable,
    TidegateError,
)
from storage.filesystem import Store
from storage.history import read_all
from storage.intervals import IntervalSet
from storage.journal import Tail, after, recorded_snapshots, rows_of
from storage.ledger import Ledger
from storage.low import read_low
from storage.runs import RunInfo, open_run

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Report:
    """What was proven and what was found. `problems` is empty for a sound run; counts are of the whole run."""

    run: str
    forked_from: str = ""
    inherited_steps: int = 0
    inherited_consumed: int = 0
    inherited_discarded: int = 0
    inherited_quarantined: int = 0
    requeued_by_fork: int = 0
    finished: str = ""
    steps: int = 0
    incarnations: int = 0
    handed_out: int = 0
    consumed: int = 0
    discarded: int = 0
    quarantined: int = 0
    unsettled: int = 0
    lost: int = 0
    trained_twice: int = 0
    staleness_bound: int | None = None
    staleness_max: int = 0
    staleness_mean: float = 0.0
    rollouts_sealed: int = 0
    samples_sealed: int = 0
    rollouts_reused: int = 0
    rollouts_continued: int = 0
    rollouts_regenerated: int = 0
    rollouts_given_up: int = 0
    acknowledgements_owed: int = 0
    acknowledgements_expired: int = 0
    steps_redone: int = 0
    steps_diverged: int = 0
    steps_reverted: int = 0
    groups_reverted: int = 0
    checkpoints: int = 0
    checkpoints_kept: int = 0
    retired: int = 0
    deleted: int = 0
    payload_retired: int = 0
    snapshots: int = 0
    evaluations: int = 0
    evaluations_mixed: int = 0
    evaluations_due: int = 0
    segments: int = 0
    segments_retired: int = 0
    problems: list[str] = field(default_factory=lambda: [])

    @property
    def sound(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def verify(store: Store, run: str, say: Callable[[str], None] = lambda line: None) -> Report:
    """Audit a whole run. Raises only what makes an audit impossible: `UnknownRun`, `SchemaUnsupported`, and a store
    that does not answer."""
    info = open_run(store, run)
    auditor = Auditor(store, info)
    report = Report(run, staleness_bound=info.staleness)
    sound, low, tail = True, 0, Tail()
    try:
        low = report.segments_retired = read_low(store, run)
        auditor.snapshots = {record.slot: record for record in recorded_snapshots(store, run)}
        for segment in read_all(store, run):
            auditor.count(segment)
            report.segments += 1
            tail = after(segment)
            if report.segments % 200 == 0:
                say(f"op=verify phase=journal segments={report.segments} step={auditor.ledger.step}")
            if sound:
                sound = _try(report, lambda segment=segment: auditor.audit(segment))
    except (StoreUnavailable, StorageUnusable):
        raise
    except TidegateError as error:
        report.problems.append(str(error))
    if sound:
        _try(report, auditor.audit_unsettled)
        _try(report, lambda: auditor.audit_unread(lambda: _retired_since(store, run, auditor.ledger, tail)))
        _try(report, lambda: auditor.audit_history(low))
        _check_checkpoints(store, run, auditor.ledger, tail, report, say)
    _check_origin(info, auditor, report, sound)
    _fill(report, auditor)
    return report


def _try(report: Report, check: Callable[[], None]) -> bool:
    try:
        check()
        return True
    except (StoreUnavailable, StorageUnusable):
        raise  # an audit that could not read has found nothing
    except TidegateError as error:
        report.problems.append(str(error))
        return False


def _check_checkpoints(
    store: Store, run: str, ledger: Ledger, tail: Tail, report: Report, say: Callable[[str], None]
) -> None:
    """Those that restores try, and those that are kept for forks. `tail` is where the ledger ends."""
    for record in (*ledger.kept, *ledger.checkpoints):
        say(f"op=verify phase=checkpoint step={record.step} bytes={record.size}")
        try:
            _check_checkpoint(store, run, ledger, record)
        except ArtifactCorrupt as error:
            if record.manifest not in _retired_since(store, run, ledger, tail):
                report.problems.append(str(error))
        except (StoreUnavailable, StorageUnusable):
            raise
        except TidegateError as error:
            report.problems.append(str(error))


def _retired_since(store: Store, run: str, ledger: Ledger, tail: Tail) -> set[str]:
    """Checkpoints and blocks that a run which goes on has retired after `tail`, where `ledger` ends: they may be
    gone."""
    found: set[str] = set()
    try:
        for row in rows_of(read_all(store, run, tail)):
            if isinstance(row.record, schema.Retired):
                found.update(row.record.manifests, row.record.blocks)
            elif isinstance(row.record, schema.StepsReverted):
                found.update(one.manifest for one in ledger.checkpoints if one.step > row.record.to_step)
    except (ArtifactCorrupt, SlotsRetired) as error:
        log.warning("op=verify phase=retired_since decision=take_what_was_read reason=%s", error)
    return found


def _check_checkpoint(store: Store, run: str, ledger: Ledger, record: schema.CheckpointPublished) -> None:
    manifest = read_manifest(store, run, record.manifest, record.digest)
    actual = buffers_digest(read_buffers(store, run, manifest), manifest.meta)
    step, inherited = ledger.steps.get(record.step), ledger.inherited
    committed = step.state_digest if step else manifest.state_digest
    if inherited is not None and inherited.step == record.step:
        committed = inherited.state_digest
    if actual != manifest.state_digest or committed != actual:
        raise ReferenceInvalid(
            f"checkpoint of step {record.step} holds state {actual[:12]}",
            expected=f"state {committed[:12]}, as committed",
            action="restore the checkpoint from a copy",
            code="conflict",
        )


def _check_origin(info: RunInfo, auditor: Auditor, report: Report, sound: bool) -> None:
    """A fork is one of what its run.json says, and trained nothing that it inherited as trained."""
    forked, origin = auditor.forked, info.origin
    if (origin is None) != (forked is None):
        report.problems.append(f"[fork] run.json says that the run is a fork of {origin}, its journal says: {forked}")
    if forked is None or origin is None:
        return
    if (origin.run, origin.storage, origin.step) != (forked.run, forked.storage, forked.step):
        report.problems.append(f"[fork] a fork of {origin.run}@{origin.step} says that it is one of"
                               f" {forked.run}@{forked.step}")  # fmt: skip
    report.forked_from = f"{forked.run}@{forked.step} in {forked.storage}"
    report.inherited_steps = forked.step
    if (counts := auditor.ledger.inherited) is None:
        return  # a record that the fold refused
    report.inherited_consumed, report.inherited_discarded = counts.consumed, counts.discarded
    report.inherited_quarantined, report.requeued_by_fork = counts.quarantined, counts.requeued
    inherited = IntervalSet.of(forked.consumed)
    again = [ordinal for ordinal in auditor.trained if ordinal in inherited]
    consumed = len(auditor.ledger.consumed)
    if again or (sound and consumed != len(inherited) + len(auditor.trained)):
        report.problems.append(
            f"[fork] {consumed} groups consumed, {len(inherited)} of them inherited and {len(auditor.trained)} trained"
            f" here, {len(again)} of which were inherited as trained"
        )


def _fill(report: Report, auditor: Auditor) -> None:
    ledger, counts = auditor.ledger, auditor.ledger.counts
    missing = ledger.missing_ordinals()
    twice = [ordinal for ordinal, times in auditor.trained.items() if times > 1]
    if missing:
        report.problems.append(f"[lost] {len(missing)} ordinals have no state, the first is {missing[0]}")
    if twice:
        report.problems.append(
            f"[trained_twice] {len(twice)} groups were trained more than once, the first is {twice[0]}"
        )
    ages = auditor.staleness
    report.finished, report.steps, report.incarnations = ledger.finished, ledger.step, ledger.incarnation
    report.handed_out, report.consumed, report.discarded = ledger.frontier, len(ledger.consumed), len(ledger.discarded)
    report.quarantined, report.unsettled = len(ledger.quarantined), len(ledger.groups)
    report.lost, report.trained_twice = len(missing), len(twice)
    report.staleness_max = max(ages, default=0)
    report.staleness_mean = sum(age * n for age, n in ages.items()) / max(1, ages.total())
    report.rollouts_sealed, report.rollouts_reused = counts["rollouts_sealed"], counts["rollouts_reused"]
    report.samples_sealed = counts["samples_sealed"]
    report.rollouts_continued, report.rollouts_regenerated = (
        counts["rollouts_continued"],
        counts["rollouts_regenerated"],
    )
    report.rollouts_given_up = counts["rollouts_discarded"]
    report.acknowledgements_owed = len(ledger.obligations)
    report.acknowledgements_expired = counts["obligations_expired"]
    report.steps_redone, report.steps_diverged = counts["step_redone"], counts["steps_diverged"]
    report.steps_reverted, report.groups_reverted = auditor.steps_reverted, auditor.groups_reverted
    report.checkpoints, report.checkpoints_kept = counts["checkpoint_published"], len(ledger.kept)
    report.retired, report.deleted = auditor.retired["retired"], auditor.retired["deleted"]
    report.payload_retired = auditor.rows_unproven
    report.snapshots = auditor.snapshots_proven
    again = [key for key, times in auditor.evaluated.items() if times > 1]
    if again:
        report.problems.append(f"[evaluated_twice] {len(again)} evaluations have several results, e.g. {again[0]}")
    report.evaluations, report.evaluations_mixed = len(auditor.evaluated), auditor.mixed
    report.evaluations_due = len(ledger.due)
