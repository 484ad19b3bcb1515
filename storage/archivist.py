"""Whoever writes ledger snapshots and history: it follows the journal by itself, so the writer spends nothing on them.

It folds what is durable with the transitions that ran live, creates objects named by their content, and deletes only
what recorded snapshots have replaced: two archivists, or one that slept, do no harm. What it writes counts once the
writer has recorded it. What a recorded snapshot retires is deleted with the next one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from itertools import islice

from storage.archives import Archive, end_of
from storage.errors import ArtifactCorrupt, SlotsRetired, StorageUnusable, StoreError
from storage.filesystem import Store
from storage.history import Historian
from storage.journal import (
    Tail,
    after,
    check_follows,
    fold_segment,
    has_claim,
    read_journal,
    read_segment,
    recorded_snapshots,
    restore_point,
)
from storage.ledger import Ledger
from storage.low import read_low, retire_slots
from storage.runs import RunPaths
from storage.schema import LedgerSnapshot
from storage.segment import Segment
from storage.snapshot import KEPT, write_snapshot

log = logging.getLogger(__name__)


class Archivist:
    """One run's. Its memory is that of one ledger and of the segments since the last snapshot."""

    def __init__(self, store: Store, run: str, num_siblings: int) -> None:
        self._store, self._run, self._num_siblings = store, run, num_siblings
        self._historian = Historian(store, run)
        self._undeleted: list[str] = []
        self._behind = sys.maxsize
        """The lowest slot that may still have to be deleted; not known at first."""
        self._at: tuple[Ledger, Tail, list[Segment]] | None = None

    def snapshot(self, slot: int) -> LedgerSnapshot:
        """Archive the slots below `slot`, all of which are durable, and write the ledger as it is before it. Blocks on
        storage; may be repeated. Raises what reading a journal raises."""
        at, self._at = self._at, None  # half a fold is of no use
        if at is None or at[1].slot > slot:
            at = self._begin(slot)
        try:
            ledger, tail, segments = self._follow(*at, slot)
        except SlotsRetired:
            ledger, tail, segments = self._follow(*self._begin(slot), slot)
        recorded = list(islice(recorded_snapshots(self._store, self._run, slot), KEPT + 1))
        history, segments, low = self._to_archive(ledger.history, segments, recorded, slot)
        archive = self._historian.extend(history, segments)
        written = write_snapshot(self._store, self._run, ledger, tail.slot, tail.digest, archive, low)
        self._at = ledger, tail, segments
        if recorded:
            try:
                self._delete_old(recorded, ledger.replaced)
            except (StoreError, StorageUnusable) as error:  # a snapshot counts, whatever else is still there
                log.error("op=archive slot=%d decision=delete_later reason=%s", slot, error)
        return written

    def _to_archive(
        self, history: list[str], segments: list[Segment], recorded: list[LedgerSnapshot], slot: int
    ) -> tuple[list[str], list[Segment], int]:
        """The archives that stay, the segments that follow them, and the slot below which all may go: those that the
        `KEPT` newest snapshots do not need, and whose archives were read back. An archive that is damaged while its
        segments are still there is written again."""
        before = recorded[0].low if recorded else 0
        low = max(before, recorded[KEPT - 2].slot) if len(recorded) >= KEPT - 1 else before
        damaged = self._historian.first_damaged(history, before, low)
        archived = end_of(history)
        if damaged is None:
            return history, [segment for segment in segments if segment.header.slot >= archived], low
        first = Archive.of(damaged).first
        if first < read_low(self._store, self._run):
            return history, [segment for segment in segments if segment.header.slot >= archived], before
        history = [name for name in history if Archive.of(name).first < first]
        return history, self._read_again(first, slot), before

    def _read_again(self, first: int, slot: int) -> list[Segment]:
        """Segments of slots [first, slot), which are in the journal. Raises what reading it raises."""
        found: list[Segment] = []
        for place in range(first, slot):
            segment = read_segment(self._store, self._run, place)
            if segment is None:
                raise self._ends(place, slot)
            if found:
                check_follows(segment, after(found[-1]), RunPaths(self._run).segment(place))
            found.append(segment)
        return found

    def _begin(self, slot: int) -> tuple[Ledger, Tail, list[Segment]]:
        return *restore_point(self._store, self._run, self._num_siblings, slot), []

    def _delete_old(self, recorded: list[LedgerSnapshot], replaced: Iterable[str]) -> None:
        """What the newest recorded snapshot has made superfluous: archives it replaces, snapshots that `KEPT` newer
        ones replace, slots it retires. Slots come last: through them the others are found after a crash. What could not
        be deleted is tried again."""
        paths, newest = RunPaths(self._run), recorded[0]
        self._behind = min(self._behind, recorded[1].low) if len(recorded) > 1 else 0
        self._undeleted += [paths.archive(name) for name in replaced]
        self._undeleted += [paths.snapshot(record.slot, record.digest) for record in recorded[KEPT:]]
        self._undeleted = self._store.delete(self._undeleted)
        chosen = [slot for slot in range(self._behind, newest.low) if not has_claim(self._store, self._run, slot)]
        self._undeleted += retire_slots(self._store, self._run, chosen, newest.low)
        self._behind = newest.low

    def _follow(
        self, ledger: Ledger, tail: Tail, segments: list[Segment], slot: int
    ) -> tuple[Ledger, Tail, list[Segment]]:
        if tail.slot == slot:
            return ledger, tail, segments
        for segment in read_journal(self._store, self._run, tail):
            fold_segment(ledger, segment)
            tail = after(segment)
            segments.append(segment)
            if tail.slot == slot:
                return ledger, tail, segments
        raise self._ends(tail.slot, slot)

    def _ends(self, at: int, slot: int) -> ArtifactCorrupt:
        return ArtifactCorrupt(
            f"the journal of run {self._run!r} ends at slot {at}",
            expected=f"slot {slot - 1}, which is durable",
            action="restore the journal from a copy",
            code="missing",
        )
