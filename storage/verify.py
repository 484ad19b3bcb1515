"""`verify`: prove from storage alone what a run promises.

Each ordinal handed out is in exactly one place, each consumed group was trained once, the staleness bound held, every
token row belongs to the attempt that was sealed, every object is what its digest says, and checkpoints hold the state
that the journal committed. The records are folded by the same transitions that ran live; on top, this module counts by
itself and looks into the payloads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from storage import schema
from storage.buffers import buffers_digest
from storage.checkpoint import read_buffers, read_manifest
from storage.errors import (
    ArtifactCorrupt,
    LineageInvalid,
    ReferenceInvalid,
    StalenessExceeded,
    StorageUnusable,
    StoreUnavailable,
    TidegateError,
)
from storage.filesystem import Store
from storage.journal import fold_segment, kept_snapshots, read_journal, recorded_snapshots
from storage.ledger import Block, Lease, Ledger, TrainedGroup
from storage.payload import TurnRow, decode_block
from storage.reader import PayloadReader
from storage.runs import RunInfo, open_run
from storage.samples import assemble
from storage.segment import Row, Segment
from storage.snapshot import ledger_rows, read_rows


@dataclass(slots=True)
class Report:
    """What was proven and what was found. `problems` is empty for a sound run; counts are of the whole run."""

    run: str
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
    steps_redone: int = 0
    steps_diverged: int = 0
    checkpoints: int = 0
    snapshots: int = 0
    evaluations: int = 0
    evaluations_mixed: int = 0
    evaluations_due: int = 0
    segments: int = 0
    problems: list[str] = field(default_factory=lambda: [])

    @property
    def sound(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Auditor:
    """Follows a journal segment by segment. `audit` returns the first problem of a segment as an exception."""

    def __init__(self, store: Store, info: RunInfo) -> None:
        self.ledger = Ledger(info.num_siblings)
        self.trained: Counter[int] = Counter()
        self.staleness: Counter[int] = Counter()
        self.evaluated: Counter[tuple[str, int]] = Counter()
        self.mixed = 0
        self._info = info
        self._reader = PayloadReader(store, info.run)
        self._leases: dict[int, tuple[int, ...]] = {}
        self._versions: set[tuple[int, int]] = set()
        self._weights: dict[str, set[int]] = {}
        self._store = store
        self._unread: dict[str, schema.PayloadStored] = {}
        """Payload files that no trained or unsettled group has led to yet."""
        self.snapshots: dict[int, schema.LedgerSnapshot] = {}
        """By slot: those that the ledger must equal, if they are there."""
        self.snapshots_proven = 0

    def count(self, segment: Segment) -> None:
        """Count trained groups and evaluations from the raw records, whatever the ledger thinks of them."""
        for row in segment.rows:
            if isinstance(row.record, schema.LeaseIssued):
                self._leases[row.record.lease] = row.record.groups
            elif isinstance(row.record, schema.StepCommitted):
                self.trained.update(self._leases.get(row.record.lease, ()))
            elif isinstance(row.record, schema.EvaluationDone):
                self.evaluated[row.record.suite, row.record.step] += 1
                self.mixed += row.record.mixed

    def audit(self, segment: Segment) -> None:
        """Fold one segment and check its meaning. Raises what is wrong."""
        self._check_snapshot(segment.header.slot)
        for row in segment.rows:
            self._before(row)
        trained: list[tuple[Lease, dict[str, Block]]] = []

        def note(row: Row) -> None:  # a checkpoint later in the segment may make the ledger forget the step
            if isinstance(row.record, schema.StepCommitted):
                lease = self.ledger.steps[row.record.step].lease
                trained.append((lease, {name: self.ledger.blocks[name] for name in lease.blocks}))

        fold_segment(self.ledger, segment, note)
        for lease, blocks in trained:
            self._check_lease(lease, blocks)

    def audit_unsettled(self) -> None:
        """The durable turns of groups that are not settled yet. Raises what is wrong."""
        for group in self.ledger.groups.values():
            for sibling, rollout in enumerate(group.rollouts):
                for row in self._rows(rollout.rows, self.ledger.blocks):
                    if (row.group, row.sibling) != (group.ordinal, sibling):
                        raise _conflict(group.ordinal, sibling, f"a row of {row.group}/{row.sibling}", "its own rows")

    def audit_unread(self) -> None:
        """Payload files of work that came to nothing. Raises what is wrong."""
        for name, record in self._unread.items():
            self._reader.block_rows(name, Block(record.digest, record.size, inline=False, batches=record.batches))

    def _rows(self, references: Sequence[tuple[str, int]], blocks: Mapping[str, Block]) -> list[TurnRow]:
        for name, _ in references:
            self._unread.pop(name, None)
            if name in blocks:
                self._reader.block_rows(name, blocks[name])  # whole, not only what is asked for
        return self._reader.rows(references, blocks)

    def _check_snapshot(self, slot: int) -> None:
        """A snapshot says what the records before it say."""
        record = self.snapshots.get(slot)
        if record is None:
            return
        try:
            found = read_rows(self._store, self._info.run, record)
        except ArtifactCorrupt as error:
            if error.code == "missing" and record not in kept_snapshots(self._store, self._info.run):
                return  # newer ones have replaced it
            raise
        if found != ledger_rows(self.ledger):
            raise ReferenceInvalid(
                f"the ledger snapshot of slot {slot} differs from the records before it",
                expected="the ledger that they add up to",
                action="the snapshot was altered; delete it, and a restore takes an older one",
                code="conflict",
            )
        self.snapshots_proven += 1

    def _before(self, row: Row) -> None:
        record = row.record
        if isinstance(record, schema.PolicyPublished):
            self._versions.add((record.incarnation, record.number))
            self._weights.setdefault(record.digest, set()).add(record.number)
        elif isinstance(record, schema.EvaluationDone):
            self._check_evaluated(record)
        elif isinstance(record, schema.PayloadStored):
            if row.blob is not None:
                self._reader.remember(record.block, decode_block(row.blob, record.digest, record.block))
            elif not record.inline:
                self._unread[record.block] = record

    def _check_evaluated(self, record: schema.EvaluationDone) -> None:
        """The digest is of published weights: those of its step, unless others took part."""
        versions = self._weights.get(record.digest, set())
        known = record.step in versions or (record.mixed and bool(versions))
        if not known and record.samples > record.failed:
            raise LineageInvalid(
                f"the evaluation of {record.suite!r} at step {record.step} names weights {record.digest[:12]}"
                f" of versions {sorted(versions)}",
                expected="the published weights of its step, or of another version where it is mixed",
                action="the journal was altered",
                code="version_unknown",
            )

    def _check_lease(self, lease: Lease, blocks: Mapping[str, Block]) -> None:
        for group in lease.groups:
            slots = [self._rows(references, blocks) for references in group.rows]
            self._check_samples(slots, group)
            rows = [row for slot in slots for row in slot]
            self._check_versions(rows, lease.version)
            oldest = min(lease.version, *(row.oldest for row in rows))
            self._check_staleness(lease, group.ordinal, oldest, group.oldest)

    def _check_samples(self, slots: list[list[TurnRow]], group: TrainedGroup) -> None:
        """The slots and samples of a trained group are those that were sealed."""
        stated = zip(group.samples, group.rewards, strict=True)
        assembled = assemble(slots, group.ordinal, self._info.num_siblings)
        for sibling, (samples, (count, reward)) in enumerate(zip(assembled, stated, strict=True)):
            if len(samples) != count:
                raise _conflict(group.ordinal, sibling, f"{len(samples)} samples", f"{count} samples")
            if samples[0].reward != reward:
                raise _conflict(group.ordinal, sibling, f"reward {samples[0].reward}", f"reward {reward}")

    def _check_versions(self, rows: list[TurnRow], version: int) -> None:
        for row in rows:
            for span in row.spans:
                if (span.incarnation, span.number) not in self._versions or span.number > version:
                    raise LineageInvalid(
                        f"rollout {row.group}/{row.sibling} has tokens of version ({span.incarnation}, {span.number})",
                        expected=f"a published version, at most {version}",
                        action="the payload was altered",
                        code="version_unknown",
                    )

    def _check_staleness(self, lease: Lease, ordinal: int, oldest: int, recorded: int) -> None:
        if oldest != recorded:
            raise _conflict(ordinal, 0, f"oldest version {oldest} in its tokens", f"oldest version {recorded}")
        staleness = lease.version - oldest
        self.staleness[staleness] += 1
        bound = self._info.staleness
        if bound is not None and staleness > bound:
            raise StalenessExceeded(
                f"group {ordinal} was trained at version {lease.version} with tokens of version {oldest}",
                expected=f"staleness at most {bound}",
                action="the run broke its own rule; report this as a bug",
            )


def _conflict(group: int, sibling: int, found: str, expected: str) -> ReferenceInvalid:
    return ReferenceInvalid(
        f"rollout {group}/{sibling} has {found} in its payload",
        expected=f"{expected}, as the journal says",
        action="the payload or the journal was altered",
        code="conflict",
    )


def verify(store: Store, run: str, say: Callable[[str], None] = lambda line: None) -> Report:
    """Audit a whole run. Raises only what makes an audit impossible: `UnknownRun`, `SchemaUnsupported`, and a store
    that does not answer."""
    info = open_run(store, run)
    auditor = Auditor(store, info)
    report = Report(run, staleness_bound=info.staleness)
    sound = True
    try:
        auditor.snapshots = {record.slot: record for record in recorded_snapshots(store, run)}
        for segment in read_journal(store, run):
            auditor.count(segment)
            report.segments += 1
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
        _try(report, auditor.audit_unread)
        _check_checkpoints(store, run, auditor.ledger, report, say)
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


def _check_checkpoints(store: Store, run: str, ledger: Ledger, report: Report, say: Callable[[str], None]) -> None:
    for record in ledger.checkpoints:
        say(f"op=verify phase=checkpoint step={record.step} bytes={record.size}")
        _try(report, lambda record=record: _check_checkpoint(store, run, ledger, record))


def _check_checkpoint(store: Store, run: str, ledger: Ledger, record: schema.CheckpointPublished) -> None:
    manifest = read_manifest(store, run, record.manifest, record.digest)
    actual = buffers_digest(read_buffers(store, run, manifest), manifest.meta)
    step = ledger.steps.get(record.step)
    if actual != manifest.state_digest or (step is not None and step.state_digest != actual):
        raise ReferenceInvalid(
            f"checkpoint of step {record.step} holds state {actual[:12]}",
            expected=f"state {step.state_digest[:12] if step else manifest.state_digest[:12]}, as committed",
            action="restore the checkpoint from a copy",
            code="conflict",
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
    report.steps_redone, report.steps_diverged = counts["step_redone"], counts["steps_diverged"]
    report.checkpoints = counts["checkpoint_published"]
    report.snapshots = auditor.snapshots_proven
    again = [key for key, times in auditor.evaluated.items() if times > 1]
    if again:
        report.problems.append(f"[evaluated_twice] {len(again)} evaluations have several results, e.g. {again[0]}")
    report.evaluations, report.evaluations_mixed = len(auditor.evaluated), auditor.mixed
    report.evaluations_due = len(ledger.due)
