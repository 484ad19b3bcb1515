"""One violating example for each class and code of error that data in a store can lead to.

Each edits a sound run in exactly one way, with chain and digests made to fit again where the meaning is what is wrong,
and says where that is noticed: `claim` is what a resume does before it writes, `restore` what a trainer reads, `verify`
the audit, `apply` a transition that a live manager would make.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np

from storage import schema
from storage.archivist import Archivist
from storage.clock import VirtualClock
from storage.difference import Published
from storage.journal import JournalWriter, Tail, claim, fold, read_journal, rows_of, store_frozen
from storage.ledger import Ledger
from storage.low import raise_low
from storage.memory import MemoryStore
from storage.payload import TurnRow, VersionSpan
from storage.reader import PayloadReader
from storage.restore import load_base, plan_restore
from storage.retry import create_until_known
from storage.runs import DIGEST, RunPaths, check_fresh, create_run, make_run, open_run
from storage.samples import assemble
from storage.schema import PayloadStored, Record
from storage.segment import Row, encode_segment
from storage.transitions import apply
from storage.verify import verify
from tests.rollout.building import limits
from tests.simulation.shapes import PLAIN
from tests.simulation.world import RUN, World
from tests.storage.editing import rewrite
from tests.storage.test_sampled_runs import edit_rows

PATHS = RunPaths(RUN)
Edit = Callable[[MemoryStore], None]
Notice = Callable[[MemoryStore], Any]


@dataclass(frozen=True)
class Violation:
    """`notice` raises class `kind` with `code`, or, for `verify`, reports that code."""

    kind: str
    code: str
    what: str
    edit: Edit
    notice: Notice
    exit_code: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.code}-{self.what}"


# ---------------------------------------------------------------------- sound runs


@cache
def _objects(*, multi_turn: bool, files: bool, acting: bool) -> dict[str, bytes]:
    shape = replace(PLAIN, files=float(files), checkpoints=1.0, acting=float(acting))
    world = World(3, length=12, multi_turn=multi_turn, limits=limits(), shape=shape)
    world.filter = lambda rewards: ""
    world.run(chaos=0)
    assert verify(world.store, RUN).sound
    return dict(world.store._objects)


def sound(*, multi_turn: bool = True, files: bool = False, acting: bool = False) -> MemoryStore:
    """A finished run of 12 groups with checkpoints; its blocks travel in the journal, or are `files`. `acting`: its
    rollouts act on the model's answers."""
    store = MemoryStore()
    store._objects = dict(_objects(multi_turn=multi_turn, files=files, acting=acting))
    return store


# ---------------------------------------------------------------------- where it is noticed


def claims(store: MemoryStore) -> None:
    info = open_run(store, RUN)
    claim(store, RUN, info.num_siblings, owner="o", writer="new", reason="resume", clock=VirtualClock())


def restores(store: MemoryStore) -> None:
    """A trainer's restore, as far as the samples of every step that it may have to redo."""
    info = open_run(store, RUN)
    plan = plan_restore(fold(store, RUN, info.num_siblings)[0], RUN)
    load_base(store, plan)
    reader = PayloadReader(store, RUN)
    for step in plan.steps.values():
        for group in step.lease.groups:
            assemble([reader.rows(rows, plan.blocks) for rows in group.rows], group.ordinal, info.num_siblings)


def verifies(store: MemoryStore) -> list[str]:
    return verify(store, RUN).problems


def starts(store: MemoryStore) -> None:
    check_fresh(store, RUN)


def creates(store: MemoryStore) -> None:
    create_run(store, make_run(run=RUN, created=0, num_siblings=2, staleness=1, fingerprints={}, settings={}))


def applies(record: Callable[[Ledger], Record], skip: int = 0) -> Notice:
    def notice(store: MemoryStore) -> None:
        ledger = fold(store, RUN, 2)[0]
        apply(ledger, ledger.next_seq + skip, record(ledger))

    return notice


# ---------------------------------------------------------------------- edits


def nothing(store: MemoryStore) -> None:
    """The run is as it was: the call is wrong."""


def records(change: Callable[[Record], Record | list[Record] | None], times: int = 0) -> Edit:
    """Replace records, or drop them, or put several in their place; the first `times` that change, 0: all."""

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        kept: list[tuple[Row, int]] = []
        done = 0
        for row, incarnation in zip(list(rows), list(incarnations), strict=True):
            found = row.record if times and done >= times else change(row.record)
            done += found is not row.record
            for number, record in enumerate(found if isinstance(found, list) else [found]):
                if record is not None:
                    keep = record is row.record or (number == 0 and not isinstance(found, list))
                    kept.append((row._replace(record=record, blob=row.blob if keep else None), incarnation))
        assert done, "the run has such a record"
        rows[:], incarnations[:] = [row for row, _ in kept], [incarnation for _, incarnation in kept]

    return lambda store: rewrite(store, RUN, edit)


def of(kind: type[Record], change: Callable[[Any], Any], times: int = 1) -> Edit:
    return records(lambda record: change(record) if isinstance(record, kind) else record, times)


def changing(kind: type[Record], **changes: object) -> Edit:
    return of(kind, lambda record: msgspec.structs.replace(record, **changes))


def before_the_first_seal(store: MemoryStore) -> None:
    """The journal ends with the block of the first seal."""

    def edit(rows: list[Row], incarnations: list[int]) -> None:
        at = next(at for at, row in enumerate(rows) if isinstance(row.record, schema.Sealed))
        del rows[at:], incarnations[at:]

    rewrite(store, RUN, edit)


def first_seal(**changes: object) -> Notice:
    found = next(row.record for row in rows_of(read_journal(sound(), RUN)) if isinstance(row.record, schema.Sealed))
    return applies(lambda ledger: msgspec.structs.replace(found, **changes))


def turns(change: Callable[[TurnRow], TurnRow]) -> Edit:
    return lambda store: edit_rows(store, change)


def told(**changes: object) -> Edit:
    """run.json says something else, with its digest right."""

    def edit(store: MemoryStore) -> None:
        stated = msgspec.json.decode(store._objects[PATHS.info])
        del stated[DIGEST]
        stated |= changes
        digest = hashlib.sha256(msgspec.json.encode(stated)).hexdigest()
        store._objects[PATHS.info] = msgspec.json.encode({**stated, DIGEST: digest})

    return edit


def segment(slot: int, /, **changes: object) -> Edit:
    """A segment with another header, whose digest is right."""

    def edit(store: MemoryStore) -> None:
        found = list(read_journal(store, RUN))[slot]
        header = msgspec.structs.replace(found.header, **changes)
        store._objects[PATHS.segment(slot)] = encode_segment(header, found.rows)[0]

    return edit


def without(key: str) -> Edit:
    def edit(store: MemoryStore) -> None:
        del store._objects[key]

    return edit


def flip(prefix: str) -> Edit:
    """One bit in the middle of every object there."""

    def edit(store: MemoryStore) -> None:
        for key in [key for key in store._objects if key.startswith(f"{PATHS.root}/{prefix}")]:
            flip_in(store, key)

    return edit


def flip_in(store: MemoryStore, key: str) -> None:
    data = bytearray(store._objects[key])
    data[len(data) // 2] ^= 1
    store._objects[key] = bytes(data)


def manifests(change: Callable[[dict[str, Any]], None]) -> Edit:
    """Every manifest says something else, and the records name it so."""

    def edit(store: MemoryStore) -> None:
        digests: dict[str, str] = {}
        for key in store.list(PATHS.checkpoints):
            stated = msgspec.json.decode(store._objects[key])
            change(stated)
            store._objects[key] = msgspec.json.encode(stated)
            digests[key.rpartition("/")[2]] = hashlib.sha256(store._objects[key]).hexdigest()
        of(
            schema.CheckpointPublished,
            lambda record: msgspec.structs.replace(record, digest=digests.get(record.manifest, record.digest)),
            times=0,
        )(store)

    return edit


def manifest_elsewhere(store: MemoryStore) -> None:
    """The newest checkpoint's."""
    published = [row.record for row in rows_of(read_journal(sound(), RUN))
                 if isinstance(row.record, schema.CheckpointPublished)]  # fmt: skip
    last = published[-1].step
    of(
        schema.CheckpointPublished,
        lambda record: msgspec.structs.replace(record, manifest="../../../x") if record.step == last else record,
        times=0,
    )(store)


def of_another_size(stated: dict[str, Any]) -> None:
    stated["objects"] = {digest: size + 1 for digest, size in stated["objects"].items()}


def dropping(prefix: str, *, last: bool = False) -> Edit:
    def edit(store: MemoryStore) -> None:
        keys = sorted(store.list(f"{PATHS.root}/{prefix}"))
        del store._objects[keys[-1 if last else len(keys) // 2]]

    return edit


def emptied(prefix: str) -> Edit:
    def edit(store: MemoryStore) -> None:
        for key in store.list(f"{PATHS.root}/{prefix}"):
            del store._objects[key]

    return edit


def retired(store: MemoryStore) -> None:
    raise_low(store, RUN, 3)
    del store._objects[PATHS.segment(0)], store._objects[PATHS.segment(1)], store._objects[PATHS.segment(2)]


def snapshot_of_other_siblings(store: MemoryStore) -> None:
    info, end = open_run(store, RUN), len(list(read_journal(store, RUN)))
    record = Archivist(store, RUN, info.num_siblings).snapshot(end)
    _, tail = fold(store, RUN, 2)
    writer = JournalWriter(RUN, 1, "w", tail, VirtualClock())
    writer.append(record)
    store_frozen(store, RUN, 1, writer.freeze())


def claims_for_other_siblings(store: MemoryStore) -> None:
    claim(store, RUN, 5, owner="o", writer="new", reason="resume", clock=VirtualClock())


def writes_after_a_newer_claim(store: MemoryStore) -> None:
    """What a writer that slept meets: the slot it goes for holds a claim, written before it woke."""
    before, claimed = list(read_journal(store, RUN))[-2:]
    tail = Tail(claimed.header.slot, claimed.header.first, before.digest, None)
    writer = JournalWriter(RUN, before.header.incarnation, "slept", tail, VirtualClock())
    writer.append(schema.ConfigChanged({}))
    store_frozen(store, RUN, before.header.incarnation, writer.freeze())


def writes_another_block(store: MemoryStore) -> None:
    create_until_known(store, store.list(PATHS.payload)[0], b"other", lambda seconds: None)


def parts(store: MemoryStore) -> None:
    """Block records name parts that the files do not have."""

    def change(record: Any) -> Any:
        return msgspec.structs.replace(record, batches=((1, 8, 16, 0),))

    of(PayloadStored, change, times=0)(store)


def reads_step(store: MemoryStore) -> None:
    Published(store, RUN).at(4711)


def short(row: TurnRow) -> TurnRow:
    """No token of the turn was generated."""
    return replace(row, mask=np.zeros(len(row.mask), np.int8), spans=())


def own_prompt(row: TurnRow) -> TurnRow:
    return replace(row, mask=np.ones(len(row.mask), np.int8), spans=(VersionSpan(1, 0, len(row.mask)),))


def twice(record: Any) -> list[Record]:
    return [record, record]


V = Violation
SEALED = len(next(r.record for r in rows_of(read_journal(sound(), RUN)) if isinstance(r.record, schema.Sealed)).rows)
VIOLATIONS = [
    # --- the description of the run
    V("SchemaUnsupported", "schema_unsupported", "number", told(schema=2), claims, 2),
    V("SchemaUnsupported", "schema_unsupported", "fields", told(fields="0123456789abcdef"), claims, 2),
    V("SchemaUnsupported", "schema_unsupported", "pre_release", told(schema=0), claims, 2),
    V("SchemaUnsupported", "schema_unsupported", "segment", segment(2, fields="0123456789abcdef"), claims, 2),
    V("UnknownRun", "unknown_run", "no_description", without(PATHS.info), claims, 2),
    V("RunExists", "run_exists", "same_name", nothing, creates, 2),
    V("RestoreNotFresh", "restore_not_fresh", "journal_without_description", without(PATHS.info), starts, 2),
    V("RestoreNotFresh", "restore_not_fresh", "create", without(PATHS.info), creates, 2),
    V("ArtifactCorrupt", "mixed_cut", "description_of_another_run", told(run="other"), claims),
    V("ArtifactCorrupt", "digest", "description", flip("run.json"), claims),
    # --- objects
    V("ArtifactCorrupt", "digest", "segment", flip("journal"), claims),
    V("ArtifactCorrupt", "digest", "object", flip("objects"), verifies),
    V("ArtifactCorrupt", "digest", "manifest", flip("checkpoints"), verifies),
    V("ArtifactCorrupt", "size", "object", manifests(of_another_size), verifies),
    V("ArtifactCorrupt", "missing", "hole", dropping("journal"), claims),
    V("ArtifactCorrupt", "missing", "object", emptied("objects"), verifies),
    V("ArtifactCorrupt", "mixed_cut", "segment_of_another_run", segment(2, run="other"), claims),
    V("ArtifactCorrupt", "mixed_cut", "segment_of_another_slot", segment(2, slot=1), claims),
    V("ArtifactCorrupt", "mixed_cut", "rows", segment(2, last=4711), claims),
    V("ArtifactCorrupt", "chain", "previous", segment(2, previous="1" * 64), claims),
    V("ArtifactCorrupt", "header", "format", segment(2, format="other"), claims),
    V("ArtifactCorrupt", "pointer", "snapshot",
      segment(0, snapshot=schema.LedgerSnapshot(9, 9, "", "0" * 64, 1, "", 0)), verifies),
    V("ArtifactCorrupt", "path_outside", "manifest", manifest_elsewhere, verifies),
    V("ArtifactCorrupt", "format", "low", lambda store: store._objects.update({PATHS.low: b"seven"}), claims),
    V("ArtifactCorrupt", "artifact_corrupt", "block_name", nothing, writes_another_block),
    V("SlotsRetired", "slots_retired", "no_snapshot", retired, claims),
    V("RestoreRefused", "restore", "no_checkpoint", emptied("objects"), restores),
    V("UnknownCheckpoint", "unknown_checkpoint", "step", nothing, reads_step, 2),
    # --- what the records say
    V("IllegalTransition", "illegal_transition", "hole_in_the_source",
      of(schema.GroupReserved, lambda record: msgspec.structs.replace(record, first=record.first + 1)), claims),
    V("IllegalTransition", "slots", "group_completed_without_a_seal", of(schema.Sealed, lambda record: None), claims),
    V("IllegalTransition", "seal", "columns", changing(schema.Sealed, rows=()), claims),
    V("IllegalTransition", "seal", "tokens",
      of(schema.Sealed, lambda record: msgspec.structs.replace(record, tokens=(-1,) * len(record.tokens))), claims),
    V("IllegalTransition", "reward", "infinite", before_the_first_seal, first_seal(rewards=(float("inf"),) * SEALED)),
    V("IllegalTransition", "reward", "nan", before_the_first_seal, first_seal(rewards=(float("nan"),) * SEALED)),
    V("LedgerInvalid", "cursor", "sequence", nothing, applies(lambda ledger: schema.RunClaimed(9, "o", "r"), skip=3)),
    V("LedgerInvalid", "ledger_invalid", "snapshot_of_other_siblings", snapshot_of_other_siblings,
      claims_for_other_siblings),
    V("AttemptReused", "attempt_reused", "attempt_1_without_0", of(schema.GroupReserved, lambda record: [
        record, schema.AttemptsMinted(record.first, (0,), (1,), (-1,), 0)]), claims),
    V("TwoOwners", "two_owners", "settled_group",
      of(schema.StepCommitted, lambda record: [record, schema.GroupDiscarded((0, 1, 2, 3), "again")]), claims),
    V("TwoOwners", "lease", "two_leases", of(schema.LeaseIssued, twice), claims),
    V("TwoOwners", "token_row", "block", of(PayloadStored, twice), claims),
    V("TwoOwners", "writer", "incarnation", segment(0, incarnation=7), claims),
    V("RunFenced", "fenced", "newer_claim", claims, writes_after_a_newer_claim),
    V("ContinuationInvalid", "continuation", "boundary_that_is_not", of(schema.GroupReserved, lambda record: [
        record, schema.AttemptsMinted(record.first, (0,), (0,), (3,), 0)]), claims),
    V("ContinuationInvalid", "continuation", "turn_repeated", of(schema.TurnCommitted, twice), claims),
    V("ContinuationInvalid", "continuation", "turn_left_out", of(
        schema.TurnCommitted, lambda record: msgspec.structs.replace(record, turn=record.turn + 1)), claims),
    # --- what the records refer to
    V("ReferenceInvalid", "orphan", "block", of(PayloadStored, lambda record: None), claims),
    V("ReferenceInvalid", "missing", "payload_file", emptied("payload"), restores),
    V("ReferenceInvalid", "row_missing", "row", of(
        schema.Sealed, lambda record: msgspec.structs.replace(record, rows=tuple(row + 99 for row in record.rows)),
        times=0), restores),
    V("ReferenceInvalid", "row_digest", "parts", parts, restores),
    V("ReferenceInvalid", "conflict", "row_of_another_group", turns(lambda row: replace(row, group=row.group + 1)),
      restores),
    V("ReferenceInvalid", "conflict", "reward", turns(lambda row: replace(row, reward=row.reward + 1)), verifies),
    V("ReferenceInvalid", "gap", "turn", turns(lambda row: replace(row, turn=row.turn + 1)), restores),
    V("ReferenceInvalid", "overlap", "turn", turns(lambda row: replace(row, turn=min(row.turn, 0))), restores),
    V("ReferenceInvalid", "prefix", "start", turns(lambda row: replace(row, start=row.start + 1)), restores),
    V("ReferenceInvalid", "missing", "end", turns(lambda row: replace(row, done=False)), restores),
    V("ReferenceInvalid", "empty", "no_generated_token", turns(short), restores),
    V("ReferenceInvalid", "prompt", "no_prompt", turns(own_prompt), restores),
    V("ReferenceInvalid", "span", "end", turns(
        lambda row: replace(row, spans=tuple(span._replace(end=span.end + 1) for span in row.spans))), restores),
    V("ReferenceInvalid", "slots", "sibling_left_out", nothing, lambda store: assemble([], 0, 2)),
    V("LineageInvalid", "version_unknown", "span_of_a_version_to_come", turns(
        lambda row: replace(row, spans=tuple(span._replace(number=span.number + 50) for span in row.spans))),
      verifies),
    V("StalenessExceeded", "staleness", "bound", told(staleness=-1), verifies),
]  # fmt: skip
