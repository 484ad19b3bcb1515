"""The journal of a run: one writer, one total order, the only commit point.

Slot k exists because somebody created it exclusively; that gives order, fencing, crash safety and recovery at once.
`read_journal` proves the hash chain while it reads, `fold` begins at the newest ledger snapshot. `claim` makes the
caller the writer. `JournalWriter` is the synchronous core of writing: it freezes what has arrived into the bytes of the
next slot, and whoever drives it (a thread, a simulation) stores those bytes, unchanged, until the outcome is known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from storage import schema
from storage.clock import Clock
from storage.errors import ArtifactCorrupt, ObjectExists, ObjectMissing, RunFenced, SlotsRetired, TwoOwners
from storage.filesystem import Store, read_proven
from storage.ledger import Ledger
from storage.low import check_not_retired, read_low
from storage.runs import RunPaths
from storage.schema import Record
from storage.segment import GENESIS, Row, Segment, decode_segment, encode_segment, make_header
from storage.snapshot import KEPT, read_snapshot
from storage.transitions import apply

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tail:
    """A place between two segments: the next slot, the next sequence number, the digest to chain to, the newest ledger
    snapshot recorded before it."""

    slot: int = 0
    seq: int = 0
    digest: str = GENESIS
    snapshot: schema.LedgerSnapshot | None = None


def read_segment(store: Store, run: str, slot: int) -> Segment | None:
    """The segment in `slot`, or None when the slot is free. Raises `ArtifactCorrupt`, `SchemaUnsupported`."""
    key = RunPaths(run).segment(slot)
    try:
        segment = read_proven(store, key, lambda data: decode_segment(data, key))
    except ObjectMissing:
        return None
    if (segment.header.run, segment.header.slot) != (run, slot):
        raise ArtifactCorrupt(
            f"{key} says it is slot {segment.header.slot} of run {segment.header.run!r}",
            expected=f"slot {slot} of run {run!r}",
            action="objects were moved or mixed; restore them from a copy",
            code="mixed_cut",
        )
    return segment


def has_claim(store: Store, run: str, slot: int) -> bool:
    """Whether a slot holds a claim, and must stay for ever. One that cannot be read may hold one."""
    try:
        segment = read_segment(store, run, slot)
    except ArtifactCorrupt as error:
        log.error("op=retire slot=%d decision=keep_it reason=%s", slot, error)
        return True
    return segment is not None and any(isinstance(row.record, schema.RunClaimed) for row in segment.rows)


def read_journal(store: Store, run: str, tail: Tail | None = None) -> Iterator[Segment]:
    """The segments from `tail` to the end, proving chain and sequence. Raises `ArtifactCorrupt`, and `SlotsRetired`
    when the journal does not reach back to `tail` any more.

    The end is found by probing forward: a stale listing must not cut a journal. A listing can only add what probing
    cannot see, a later segment, which makes the free slot a hole.
    """
    tail = tail or Tail()
    while (segment := _next_segment(store, run, tail.slot)) is not None:
        check_follows(segment, tail, RunPaths(run).segment(tail.slot))
        yield segment
        tail = after(segment)


def check_follows(segment: Segment, tail: Tail, where: str) -> None:
    """Raises `ArtifactCorrupt` for a segment that is not the one after `tail`."""
    header = segment.header
    if (header.slot, header.previous, header.first) != (tail.slot, tail.digest, tail.seq):
        raise ArtifactCorrupt(
            f"{where} has slot {header.slot}, which follows {header.previous[:12]}… at record {header.first}",
            expected=f"slot {tail.slot} after {tail.digest[:12]}… at record {tail.seq}",
            action="restore the journal from a copy, or `tidegate fork RUN NEW --last-good`",
            code="chain",
        )


def _next_segment(store: Store, run: str, slot: int) -> Segment | None:
    """The segment in `slot`; None at the end of the journal. Raises `SlotsRetired`, `ArtifactCorrupt` for a hole."""
    segment = read_segment(store, run, slot)
    if segment is not None:
        return segment
    check_not_retired(store, run, slot)
    paths = RunPaths(run)
    later = [key for key in store.list(paths.journal, paths.segment(slot)) if key.endswith(".arrow")]
    if not later:
        return None
    # Slots are created in order, so a writer that is at work has filled this one before the later ones.
    segment = read_segment(store, run, slot)
    if segment is None:
        check_not_retired(store, run, slot)
        raise ArtifactCorrupt(
            f"{paths.segment(slot)} is missing, and {len(later)} later segments are there",
            expected="a journal without a hole",
            action="restore the object from a copy, or `tidegate fork RUN NEW --last-good`",
            code="missing",
        )
    return segment


def after(segment: Segment) -> Tail:
    header = segment.header
    return Tail(header.slot + 1, header.last + 1, segment.digest, header.snapshot)


def fold_segment(ledger: Ledger, segment: Segment, look: Callable[[Row], None] = lambda row: None) -> None:
    """Apply a segment's records, checking that its incarnation is the one that claimed last. `look` comes after each:
    the next may take away what this one brought."""
    for row in segment.rows:
        apply(ledger, row.seq, row.record)
        look(row)
    if segment.header.incarnation != ledger.incarnation:
        raise TwoOwners(
            f"slot {segment.header.slot} was written by incarnation {segment.header.incarnation}",
            expected=f"incarnation {ledger.incarnation}, which claimed last",
            action="the journal was altered; `tidegate fork RUN NEW --last-good`",
            code="writer",
        )
    if segment.header.snapshot != ledger.snapshot:
        raise ArtifactCorrupt(
            f"slot {segment.header.slot} points to the ledger snapshot {segment.header.snapshot}",
            expected=f"the newest one that was recorded, {ledger.snapshot}",
            action="the journal was altered; `tidegate fork RUN NEW --last-good`",
            code="pointer",
        )
    ledger.placed(segment.header.slot, segment.header.last)


def find_end(store: Store, run: str, low: int) -> int:
    """The first free slot from `low` on, by doubling and halving: slots are created in order. Other writers may have
    gone on meanwhile. A hole is taken for the end; whoever reads on from there finds out."""
    paths = RunPaths(run)

    def taken(slot: int) -> bool:
        return store.size(paths.segment(slot)) is not None

    last, step = low - 1, 1
    while taken(last + step):
        last, step = last + step, 2 * step
    free = last + step
    while free - last > 1:
        middle = (last + free) // 2
        if taken(middle):
            last = middle
        else:
            free = middle
    return free


def recorded_snapshots(store: Store, run: str, end: int | None = None) -> Iterator[schema.LedgerSnapshot]:
    """The ledger snapshots that were recorded before slot `end` (the journal's end by default), newest first, as far
    back as there are segments. Raises what reading a segment raises."""
    low = read_low(store, run)
    end = find_end(store, run, low) if end is None else end
    segment = read_segment(store, run, end - 1) if end > low else None
    while segment is not None and (record := segment.header.snapshot) is not None:
        yield record
        segment = read_segment(store, run, record.slot - 1)


def kept_snapshots(store: Store, run: str) -> list[schema.LedgerSnapshot]:
    """The recorded ledger snapshots that nobody deletes, newest first."""
    return list(islice(recorded_snapshots(store, run), KEPT))


def restore_point(store: Store, run: str, num_siblings: int, end: int | None = None) -> tuple[Ledger, Tail]:
    """Where a fold begins: the newest ledger snapshot recorded before slot `end` (the journal's end by default) that
    can be read, or the first slot. A damaged snapshot is passed over, with the reason in the log.

    Raises `SlotsRetired` when the journal cannot be folded from any place.
    """
    for record in recorded_snapshots(store, run, end):
        try:
            ledger = read_snapshot(store, run, record, num_siblings)
            return ledger, Tail(record.slot, record.position, record.chain, ledger.snapshot)
        except ArtifactCorrupt as error:
            log.error("op=restore phase=snapshot slot=%d decision=take_an_older_one reason=%s", record.slot, error)
    check_not_retired(store, run, 0)
    return Ledger(num_siblings), Tail()


def fold(store: Store, run: str, num_siblings: int) -> tuple[Ledger, Tail]:
    """The ledger at the end of the journal, from the newest snapshot on. Raises `SlotsRetired` when it cannot be folded
    from any place."""
    while True:
        low = read_low(store, run)
        try:
            return _fold_from(store, run, *restore_point(store, run, num_siblings))
        except SlotsRetired:
            if read_low(store, run) == low:
                raise  # nobody retired anything meanwhile


def _fold_from(store: Store, run: str, ledger: Ledger, tail: Tail) -> tuple[Ledger, Tail]:
    for segment in read_journal(store, run, tail):
        fold_segment(ledger, segment)
        tail = after(segment)
    return ledger, tail


class Frozen(NamedTuple):
    """The bytes of a slot, fixed at the first attempt to store them."""

    slot: int
    first: int
    last: int
    data: bytes
    digest: str
    waited: bool


class JournalWriter:
    """Records in, frozen slots out. Not thread-safe: call it from one thread; only `store_frozen` may run elsewhere."""

    def __init__(self, run: str, incarnation: int, writer: str, tail: Tail, clock: Clock) -> None:
        self._run, self._incarnation, self._writer, self._clock = run, incarnation, writer, clock
        self._tail = tail
        self._pending: list[Row] = []
        self._pending_bytes = 0
        self._in_flight: Frozen | None = None
        self._next_seq = tail.seq
        self._durable = tail.seq - 1
        self._oldest_undurable: float | None = None
        self._wanted = -1
        self._snapshot = tail.snapshot

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest appended record."""
        return self._next_seq - 1

    @property
    def durable_seq(self) -> int:
        """Every record up to this one is durable."""
        return self._durable

    @property
    def slot(self) -> int:
        return self._tail.slot

    @property
    def tail(self) -> Tail:
        """Where the next segment goes; everything before it is durable."""
        return self._tail

    @property
    def undurable_bytes(self) -> int:
        return self._pending_bytes + (len(self._in_flight.data) if self._in_flight else 0)

    def undurable_age(self) -> float:
        """Seconds since the oldest record that is not durable was appended; 0 when there is none."""
        return 0.0 if self._oldest_undurable is None else self._clock.monotonic() - self._oldest_undurable

    def append(self, record: Record, blob: bytes | None = None) -> int:
        """Queue a record; returns its sequence number."""
        seq = self._next_seq
        self._pending.append(Row(seq, self._clock.wall(), record, blob))
        field = schema.BYTES.get(type(record))
        self._pending_bytes += 128 + len(blob or b"") + (len(getattr(record, field)) if field else 0)
        self._next_seq += 1
        if self._oldest_undurable is None:
            self._oldest_undurable = self._clock.monotonic()
        if isinstance(record, schema.LedgerSnapshot):
            self._snapshot = record
        return seq

    def want(self, seq: int) -> None:
        """Somebody waits for `seq`: the next cut need not wait for the flush interval."""
        self._wanted = max(self._wanted, seq)

    def due(self, flush_interval: float, max_bytes: int) -> bool:
        """Whether to cut now: nothing is in flight, and somebody waits, or the oldest record or the size says so."""
        if self._in_flight is not None or not self._pending:
            return False
        return (
            self._wanted > self._durable or self.undurable_age() >= flush_interval or self._pending_bytes >= max_bytes
        )

    def freeze(self) -> Frozen:
        """Fix the bytes of the next slot. One at a time: confirm it before the next."""
        assert self._in_flight is None, "one create in flight"
        rows, self._pending, self._pending_bytes = self._pending, [], 0
        header = make_header(
            run=self._run,
            incarnation=self._incarnation,
            writer=self._writer,
            slot=self._tail.slot,
            first=rows[0].seq,
            last=rows[-1].seq,
            previous=self._tail.digest,
            snapshot=self._snapshot,
        )
        data, digest = encode_segment(header, rows)
        self._in_flight = Frozen(self._tail.slot, rows[0].seq, rows[-1].seq, data, digest, self._wanted >= rows[0].seq)
        return self._in_flight

    def confirm(self, frozen: Frozen) -> None:
        """The slot exists with exactly these bytes."""
        assert self._in_flight is frozen, "confirm what is in flight"
        self._in_flight = None
        self._tail = Tail(frozen.slot + 1, frozen.last + 1, frozen.digest, self._snapshot)
        self._durable = frozen.last
        # An upper bound of the age: the pending records came after the freeze began at the earliest.
        self._oldest_undurable = self._clock.monotonic() if self._pending else None


def store_frozen(store: Store, run: str, incarnation: int, frozen: Frozen) -> None:
    """Create the slot, or find out that it holds these very bytes already (a lost reply of an earlier try).

    Raises `RunFenced` when a newer incarnation took the slot, `TwoOwners` when anybody else did, and the store's
    `StoreUnavailable` and `CommitUnknown`, after which the same call may be repeated.
    """
    key = RunPaths(run).segment(frozen.slot)
    try:
        store.create(key, frozen.data)
    except ObjectExists:
        _raise_unless_ours(store, key, incarnation, frozen)


def _raise_unless_ours(store: Store, key: str, incarnation: int, frozen: Frozen) -> None:
    """The slot is taken: read who has it."""

    def prove(data: bytes) -> Segment | None:
        return None if data == frozen.data else decode_segment(data, key)

    try:
        segment = read_proven(store, key, prove)
    except ObjectMissing as error:
        raise RunFenced(
            f"slot {frozen.slot} was taken by another writer and has been retired since",
            expected=f"incarnation {incarnation} to be the newest",
            action="stop; the newer incarnation owns the run",
        ) from error
    if segment is not None:
        raise _taken(segment, incarnation, frozen.slot)


def _taken(segment: Segment, incarnation: int, slot: int) -> RunFenced | TwoOwners:
    claim = next((row.record for row in segment.rows if isinstance(row.record, schema.RunClaimed)), None)
    if claim is not None and claim.incarnation > incarnation:
        return RunFenced(
            f"slot {slot} was claimed by incarnation {claim.incarnation} ({claim.owner})",
            expected=f"incarnation {incarnation} to be the newest",
            action="stop; the newer incarnation owns the run",
        )
    return TwoOwners(
        f"slot {slot} holds records of incarnation {segment.header.incarnation}, writer {segment.header.writer}",
        expected=f"the records of incarnation {incarnation}",
        action="two writers used one incarnation; stop both and run verify",
        code="writer",
    )


class Claimed(NamedTuple):
    ledger: Ledger
    tail: Tail
    incarnation: int


def claim(
    store: Store,
    run: str,
    num_siblings: int,
    *,
    owner: str,
    writer: str,
    reason: str,
    clock: Clock,
    check: Callable[[Ledger], None] = lambda ledger: None,
) -> Claimed:
    """Become the writer of `run`: fold to the end, take the next slot with the next incarnation.

    `check` validates the folded ledger before anything is written; what it raises passes through.
    A claimant that loses the slot folds what won it and tries the next one; one that slept while slots were retired
    starts again, also when it won a slot that was deleted meanwhile. `writer` must be unique per process. Raises
    `SlotsRetired` when the journal cannot be folded from its beginning.
    """
    ledger, tail = fold(store, run, num_siblings)
    while True:
        check(ledger)
        frozen = _claim_segment(ledger, tail, run, owner, writer, reason, clock)
        try:
            store_frozen(store, run, ledger.incarnation + 1, frozen)
            check_not_retired(store, run, frozen.slot)
        except SlotsRetired:
            ledger, tail = fold(store, run, num_siblings)
            continue
        except (RunFenced, TwoOwners):
            ledger, tail = _fold_on(store, run, num_siblings, ledger, tail)
            continue
        apply(ledger, tail.seq, schema.RunClaimed(ledger.incarnation + 1, owner, reason))
        ledger.placed(frozen.slot, frozen.last)
        return Claimed(ledger, Tail(frozen.slot + 1, frozen.last + 1, frozen.digest, tail.snapshot), ledger.incarnation)


def _fold_on(store: Store, run: str, num_siblings: int, ledger: Ledger, tail: Tail) -> tuple[Ledger, Tail]:
    try:
        return _fold_from(store, run, ledger, tail)
    except SlotsRetired:
        return fold(store, run, num_siblings)


def _claim_segment(ledger: Ledger, tail: Tail, run: str, owner: str, writer: str, reason: str, clock: Clock) -> Frozen:
    core = JournalWriter(run, ledger.incarnation + 1, writer, tail, clock)
    core.append(schema.RunClaimed(ledger.incarnation + 1, owner, reason))
    return core.freeze()


def rows_of(segments: Iterator[Segment] | Sequence[Segment]) -> Iterator[Row]:
    for segment in segments:
        yield from segment.rows
