"""The audit behind `verify`: it folds a run's records and looks into what they name.

Counts are made from the raw records, whatever the ledger thinks of them; token rows, ledger snapshots and archives are
read and compared with what the records say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from storage import schema
from storage.archives import Archive
from storage.errors import (
    ArtifactCorrupt,
    LineageInvalid,
    ReferenceInvalid,
    StalenessExceeded,
    TidegateError,
)
from storage.filesystem import Store
from storage.history import history_of, read_archive
from storage.journal import fold_segment, kept_snapshots, read_segment
from storage.ledger import Block, Lease, Ledger, TrainedGroup
from storage.payload import TurnRow, decode_block
from storage.reader import PayloadReader
from storage.runs import RunInfo
from storage.samples import assemble
from storage.segment import Row, Segment
from storage.snapshot import ledger_rows, read_rows


class Auditor:
    """Follows a journal segment by segment. `audit` returns the first problem of a segment as an exception."""

    def __init__(self, store: Store, info: RunInfo) -> None:
        self.ledger = Ledger(info.num_siblings)
        self.trained: Counter[int] = Counter()
        self.staleness: Counter[int] = Counter()
        self.evaluated: Counter[tuple[str, int]] = Counter()
        self.mixed = 0
        self.forked: schema.Forked | None = None
        self._info = info
        self._reader = PayloadReader(store, info.run)
        self._leases: dict[int, tuple[int, ...]] = {}
        self._steps: dict[int, tuple[int, ...]] = {}
        self.steps_reverted = self.groups_reverted = 0
        self._versions: set[tuple[int, int]] = set()
        self._weights: dict[str, set[int]] = {}
        self._store = store
        self._unread: dict[str, schema.PayloadStored] = {}
        """Payload files that no trained or unsettled group has led to yet."""
        self._digests = bytearray()
        self._claims: list[int] = []
        self.retired: Counter[str] = Counter()
        """How many checkpoints and blocks were `retired`, and how many are `deleted`."""
        self._retired_blocks: set[str] = set()
        self._unproven: dict[str, TidegateError] = {}
        """Payload files that trained groups need and that cannot be read, and why: they may be retired later on."""
        self.rows_unproven = 0
        self.snapshots: dict[int, schema.LedgerSnapshot] = {}
        """By slot: those that the ledger must equal, if they are there."""
        self.snapshots_proven = 0

    def count(self, segment: Segment) -> None:
        """Count trained groups and evaluations from the raw records, whatever the ledger thinks of them."""
        for row in segment.rows:
            if isinstance(row.record, schema.LeaseIssued):
                self._leases[row.record.lease] = row.record.groups
            elif isinstance(row.record, schema.StepCommitted):
                groups = self._steps[row.record.step] = self._leases.get(row.record.lease, ())
                self.trained.update(groups)
            elif isinstance(row.record, schema.StepsReverted):
                self._take_back(row.record)
            elif isinstance(row.record, schema.EvaluationDone):
                self.evaluated[row.record.suite, row.record.step] += 1
                self.mixed += row.record.mixed
            elif isinstance(row.record, schema.Forked):
                self.forked = row.record

    def _take_back(self, record: schema.StepsReverted) -> None:
        """What was trained and evaluated after `to_step` is no part of the surviving lineage."""
        for step in range(record.to_step + 1, record.from_step + 1):
            groups = self._steps.pop(step, ())
            self.trained -= Counter(groups)
            self.groups_reverted += len(groups)
        self.steps_reverted += record.from_step - record.to_step
        for key in [key for key in self.evaluated if key[1] > record.to_step]:
            del self.evaluated[key]

    def audit(self, segment: Segment) -> None:
        """Fold one segment and check its meaning. Raises what is wrong."""
        self._check_snapshot(segment.header.slot)
        self._digests += bytes.fromhex(segment.digest)
        for row in segment.rows:
            self._before(row)
        fold_segment(self.ledger, segment, self._after)

    def _after(self, row: Row) -> None:
        if isinstance(row.record, schema.StepCommitted):
            self._check_lease(self.ledger.steps[row.record.step].lease, self.ledger.blocks)

    def audit_unsettled(self) -> None:
        """The durable turns of groups that are not settled yet. Raises what is wrong."""
        for group in self.ledger.groups.values():
            for sibling, rollout in enumerate(group.rollouts):
                for row in self._rows(rollout.rows, self.ledger.blocks):
                    if (row.group, row.sibling) != (group.ordinal, sibling):
                        raise _conflict(group.ordinal, sibling, f"a row of {row.group}/{row.sibling}", "its own rows")

    def audit_unread(self, retired_since: Callable[[], set[str]]) -> None:
        """Payload files that nothing led to, and those that could not be read: a retired one need not be there, also
        when it was retired since the audit came to the journal's end. Raises what is wrong."""
        wrong = {name: error for name, error in self._unproven.items() if name not in self._retired_blocks}
        for name, record in self._unread.items():
            if name not in self._retired_blocks:
                try:
                    self._reader.block_rows(
                        name, Block(record.digest, record.size, inline=False, batches=record.batches)
                    )
                except (ReferenceInvalid, ArtifactCorrupt) as error:
                    wrong[name] = error
        later = retired_since() if wrong else set[str]()
        for name, error in wrong.items():
            if name not in later:
                raise error

    def audit_history(self, low: int) -> None:
        """Archives of segments that are still in the journal hold those, and a claim stays there for ever. Raises what
        is wrong; `low` as it was when the audit began."""
        names = [name for name in self.ledger.history if Archive.of(name).end > low]
        for name in names:
            try:
                self._check_archive(name)
            except ArtifactCorrupt as error:
                if error.code == "missing" and name not in history_of(self._store, self._info.run):
                    continue  # a larger one has replaced it
                raise
        for slot in self._claims:
            segment = read_segment(self._store, self._info.run, slot) if slot < low else None
            if slot < low and (segment is None or segment.digest != self._digest(slot)):
                raise ReferenceInvalid(
                    f"slot {slot} holds {'nothing' if segment is None else segment.digest[:12]}",
                    expected=f"the claim {self._digest(slot)[:12]}, which a writer that slept must find there",
                    action="restore the object from a copy",
                    code="missing",
                )

    def _check_archive(self, name: str) -> None:
        for segment in read_archive(self._store, self._info.run, name):
            slot = segment.header.slot
            if segment.digest != self._digest(slot):
                raise ReferenceInvalid(
                    f"history archive {name} has {segment.digest[:12]} as slot {slot}",
                    expected=f"{self._digest(slot)[:12]}, as in the journal",
                    action="the archive was altered",
                    code="conflict",
                )

    def _digest(self, slot: int) -> str:
        return self._digests[32 * slot : 32 * slot + 32].hex()

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
        if isinstance(record, schema.RunClaimed):
            self._claims.append(len(self._digests) // 32 - 1)
        elif isinstance(record, schema.PolicyPublished):
            self._versions.add((record.incarnation, record.number))
            self._weights.setdefault(record.digest, set()).add(record.number)
        elif isinstance(record, schema.StepsReverted):
            self._versions.clear()  # work of older versions was dropped: what is trained from here on is newer
        elif isinstance(record, schema.EvaluationDone):
            self._check_evaluated(record)
        elif isinstance(record, schema.Retired):
            self.retired["retired"] += len(record.manifests) + len(record.blocks)
            self._retired_blocks.update(record.blocks)
        elif isinstance(record, schema.Deleted):
            self.retired["deleted"] += len(record.manifests) + len(record.blocks)
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
            if not self._readable([row for references in group.rows for row in references]):
                self._check_staleness(lease, group.ordinal, group.oldest, group.oldest)
                continue
            slots = [self._rows(references, blocks) for references in group.rows]
            self._check_samples(slots, group)
            rows = [row for slot in slots for row in slot]
            self._check_versions(rows, lease.version)
            oldest = min([lease.version, *[row.oldest for row in rows if not row.is_account]])
            self._check_staleness(lease, group.ordinal, oldest, group.oldest)

    def _readable(self, references: Sequence[tuple[str, int]]) -> bool:
        """Whether the payload files of these rows can be read. If not, what they hold cannot be proven: that is fine
        if they turn out to be retired."""
        for name in {name: None for name, _ in references}:
            block = self.ledger.blocks[name]
            if block.inline or name in self._unproven:
                continue
            try:
                self._reader.block_rows(name, block)
            except (ReferenceInvalid, ArtifactCorrupt) as error:
                self._unread.pop(name, None)
                self._unproven[name] = error
        unproven = sum(name in self._unproven for name, _ in references)
        self.rows_unproven += unproven
        return not unproven

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
