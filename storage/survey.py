"""A run as seen by who goes on from a place in its past: the checkpoints it published, the ledger as it was at one of
them, and what came after. A damaged journal is one up to its first segment that is not what it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from storage import schema
from storage.errors import SlotsRetired, StoreError, TidegateError, UserError
from storage.filesystem import Store
from storage.history import read_all
from storage.journal import fold_segment, read_segment
from storage.ledger import Ledger
from storage.runs import RunPaths
from storage.schema import CheckpointPublished
from storage.segment import Row, Segment
from storage.snapshot import ledger_rows, rebuild
from storage.transitions import apply


def segments(store: Store, run: str) -> Iterator[Segment]:
    """The whole journal, from the first record on."""
    return read_all(store, run)


def published(ledger: Ledger) -> list[CheckpointPublished]:
    """The checkpoints that are not retired, oldest first."""
    return [*ledger.kept, *ledger.checkpoints]


@dataclass(frozen=True, slots=True)
class Damage:
    """Why `slot` is not the journal's next segment. From it on there are `segments` in the store, of which `unreadable`
    say nothing any more."""

    error: TidegateError
    slot: int
    segments: int
    unreadable: int


class Survey:
    """Made by `survey`. `position` is -1, or the record to stop and look at."""

    def __init__(self, num_siblings: int, position: int) -> None:
        self.ledger = Ledger(num_siblings)
        """At the end, or at the damage."""
        self.then: Ledger | None = None
        """As it was right after record `position`."""
        self.trained: dict[int, tuple[int, ...]] = {}
        """Groups of the steps committed after `position`, as far as known."""
        self.checkpoints: list[CheckpointPublished] = []
        """Oldest first, those of commits before any damage."""
        self.states: dict[int, set[str]] = {}
        """Digests that the trainer's state after a step had: as committed, as redone."""
        self.damage: Damage | None = None
        self.slot = 0
        """The first that was not read well."""
        self._position = position
        self._commits: dict[int, int] = {}
        self._leases: dict[int, tuple[int, ...]] = {}

    def follow(self, segment: Segment) -> None:
        """The next segment. Raises what folding raises."""
        if segment.header.first <= self._position <= segment.header.last:
            self.then = _folded_to(self.ledger, segment.rows, self._position)
        fold_segment(self.ledger, segment)
        for row in segment.rows:
            self._note_state(row)
            self._note_step(row)
        self.slot = segment.header.slot + 1
        self.checkpoints = published(self.ledger)

    def _note_state(self, row: Row) -> None:
        record = row.record
        if isinstance(record, schema.StepCommitted | schema.StepRedone | schema.Forked):
            self.states.setdefault(record.step, set()).add(record.state_digest)
        if isinstance(record, schema.StepCommitted | schema.Forked):
            self._commits[record.step] = row.seq

    def _note_step(self, row: Row) -> None:
        record = row.record
        if isinstance(record, schema.LeaseIssued):
            self._leases[record.lease] = record.groups
        elif isinstance(record, schema.LeaseRolledBack):
            self._leases.pop(record.lease, None)
        elif isinstance(record, schema.StepCommitted):
            groups = self._leases.pop(record.lease, ())
            if row.seq > self._position:
                self.trained[record.step] = groups
        elif isinstance(record, schema.StepsReverted):
            self.trained = {step: groups for step, groups in self.trained.items() if step <= record.to_step}

    def look_behind(self, store: Store, run: str, error: TidegateError) -> None:
        """The journal ends at `self.slot`, with `error`: what segments from there on still say. A checkpoint that one
        of them publishes is as good as any, if its step was committed before: that commit proves the state."""
        first = RunPaths(run).segment(self.slot)
        slots = sorted(int(key[-18:-6]) for key in store.list(RunPaths(run).journal) if key.endswith(".arrow"))
        slots = [slot for slot in slots if RunPaths(run).segment(slot) >= first]
        unreadable = 0
        for slot in slots:
            rows = _legible(store, run, slot)
            unreadable += not rows
            for row in rows:
                self._note_step(row)
                record = row.record
                if isinstance(record, CheckpointPublished) and self._commits.get(record.step) == record.position:
                    self.checkpoints = [one for one in self.checkpoints if one.step != record.step] + [record]
        self.checkpoints.sort(key=lambda record: record.step)
        self.damage = Damage(error, self.slot, len(slots), unreadable)


def survey(
    store: Store, run: str, num_siblings: int, position: int = -1, say: Callable[[str], None] = lambda line: None
) -> Survey:
    """Read a whole journal, or a damaged one up to its damage. Raises what says nothing about the journal: a store that
    does not answer, a schema of another version."""
    found = Survey(num_siblings, position)
    try:
        for segment in segments(store, run):
            found.follow(segment)
            if found.slot % 200 == 0:
                say(f"op=survey phase=journal segments={found.slot} step={found.ledger.step}")
    except (UserError, StoreError, SlotsRetired):
        raise
    except TidegateError as error:
        found.look_behind(store, run, error)
    return found


def _folded_to(ledger: Ledger, rows: Sequence[Row], position: int) -> Ledger:
    """A copy of a ledger between two segments, after the next segment's rows up to `position`."""
    then = rebuild(ledger_rows(ledger))
    for row in rows:
        if row.seq <= position:
            apply(then, row.seq, row.record)
    return then


def _legible(store: Store, run: str, slot: int) -> list[Row]:
    """What a segment says by itself, whatever it follows; nothing when it is not what its digest says."""
    try:
        segment = read_segment(store, run, slot)
    except (UserError, StoreError):
        raise
    except TidegateError:
        return []  # counted
    return segment.rows if segment else []
