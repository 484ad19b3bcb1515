"""Whoever writes ledger snapshots: it follows the journal by itself, so the writer spends nothing on them.

It folds what is durable with the transitions that ran live, creates objects named by their content, and deletes only
what newer recorded snapshots have replaced: two archivists, or one that slept, do no harm. A snapshot counts once the
writer has recorded it.
"""

from __future__ import annotations

from itertools import islice

from storage.errors import ArtifactCorrupt, SlotsRetired
from storage.filesystem import Store
from storage.journal import Tail, after, fold_segment, read_journal, recorded_snapshots, restore_point
from storage.ledger import Ledger
from storage.runs import RunPaths
from storage.schema import LedgerSnapshot
from storage.snapshot import KEPT, write_snapshot


class Archivist:
    """One run's. Its memory is that of one ledger."""

    def __init__(self, store: Store, run: str, num_siblings: int) -> None:
        self._store, self._run, self._num_siblings = store, run, num_siblings
        self._at: tuple[Ledger, Tail] | None = None

    def snapshot(self, slot: int) -> LedgerSnapshot:
        """Write the ledger as it is before `slot`, below which all slots are durable. Blocks on storage; may be
        repeated. Raises what reading a journal raises."""
        at, self._at = self._at, None  # half a fold is of no use
        if at is None or at[1].slot > slot:
            at = restore_point(self._store, self._run, self._num_siblings, slot)
        try:
            ledger, tail = self._follow(*at, slot)
        except SlotsRetired:
            ledger, tail = self._follow(*restore_point(self._store, self._run, self._num_siblings, slot), slot)
        written = write_snapshot(self._store, self._run, ledger, tail.slot, tail.digest)
        self._at = ledger, tail
        self._delete_old(slot)
        return written

    def _delete_old(self, slot: int) -> None:
        """Those that `KEPT` newer ones, recorded before `slot`, have made superfluous; two at a time, so that one whose
        deletion failed gets another."""
        old = islice(recorded_snapshots(self._store, self._run, slot), KEPT, KEPT + 2)
        self._store.delete([RunPaths(self._run).snapshot(record.slot, record.digest) for record in old])

    def _follow(self, ledger: Ledger, tail: Tail, slot: int) -> tuple[Ledger, Tail]:
        if tail.slot == slot:
            return ledger, tail
        for segment in read_journal(self._store, self._run, tail):
            fold_segment(ledger, segment)
            tail = after(segment)
            if tail.slot == slot:
                return ledger, tail
        raise ArtifactCorrupt(
            f"the journal of run {self._run!r} ends at slot {tail.slot}",
            expected=f"slot {slot - 1}, which is durable",
            action="restore the journal from a copy",
            code="missing",
        )
