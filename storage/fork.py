"""A fork: a new run from a published checkpoint of another one, which stays as it is.

It takes over the trainer's state and the position in the source. Groups that were not settled there start whole again,
also those trained later; leases, versions, attempts and evaluations are never inherited. What it writes counts once the
first segment of the new run is there, in this order: objects (named by content), run.json (exclusive, says of what it
is the fork), manifest, segment. A fork that was killed is made again under the same name; of two, one gets the segment.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import msgspec

from storage import schema
from storage.checkpoint import Manifest, read_manifest, read_whole
from storage.clock import Clock
from storage.each import each
from storage.errors import (
    ArtifactCorrupt,
    FingerprintMismatch,
    ForkRefused,
    RestoreRefused,
    RunExists,
    RunFenced,
    TwoOwners,
    UnknownCheckpoint,
    UnknownRun,
)
from storage.filesystem import Store, create_same
from storage.fork_transitions import FORK_INCARNATION, FORK_POSITION
from storage.journal import JournalWriter, Tail, store_frozen
from storage.ledger import Ledger
from storage.opening import probe
from storage.pins import holding
from storage.runs import ABSENT, Origin, RunInfo, RunPaths, check_name, create_run, flat, open_run
from storage.s3_location import without_credentials
from storage.schema import CheckpointPublished
from storage.survey import Survey, survey
from storage.transitions import apply

MAY_DIFFER = frozenset({"environment", "num_siblings", "staleness"})
"""What a fork may change beside its settings: unsettled groups start whole again, so nothing is left that was generated
under the old environment, group size or bound. `source` says what an ordinal means, and the fork inherits ordinals;
`model` says what the tensors of the state are; what is unknown here has a meaning of its own."""

log = logging.getLogger(__name__)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fork:
    """What a fork took over and what it did not. `consumed`, `discarded` and `quarantined` are inherited ordinals,
    `requeued` those that start again; of the source's later steps (`steps_left`) `groups_left` groups had been trained.
    `settings_left` were in force at the checkpoint and are others here."""

    run: str
    storage: str
    new: str
    new_storage: str
    step: int
    position: int
    state_digest: str
    consumed: int
    discarded: int
    quarantined: int
    requeued: int
    frontier: int
    steps_left: list[int]
    groups_left: int
    evaluations_left: int
    evaluations_dropped: list[str]
    settings_left: dict[str, str]
    size: int
    written: int
    rejected: list[str]
    damage: dict[str, str | int] | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def fork_run(
    source: Store,
    run: str,
    target: Store,
    made: RunInfo,
    *,
    step: int | None = None,
    last_good: bool = False,
    clock: Clock,
    say: Say = lambda line: None,
) -> Fork:
    """Make `made`, a run without an origin, in `target` from the checkpoint of `step` of `run`, by default the newest
    that can be read. `last_good` takes a damaged journal as far as it is good.

    Raises `UnknownRun`, `UnknownCheckpoint`, `FingerprintMismatch`, `RunExists`, `ForkRefused`, `ArtifactCorrupt` for a
    named checkpoint and `RestoreRefused` when none can be read.
    """
    check_name(made.run)
    info = open_run(source, run)
    check_meaning(info, made)
    made = msgspec.structs.replace(made, settings=msgspec.json.decode(msgspec.json.encode(made.settings)))
    begun = _begun(target, made)
    if step is None and begun is not None and begun.origin is not None:
        step = begun.origin.step
    rejected: list[str] = []
    found = survey(source, run, info.num_siblings, say=say)
    if not last_good:
        _refuse_damage(found, run, made.run)
    for record in _chosen(found, run, step):
        making = _Making(source, info, target, made, begun, record, clock, say)
        try:
            with holding(source, run, record.manifest, f"fork {made.run}", clock):
                return making.make(last_good, rejected)
        except ArtifactCorrupt as error:
            if step is not None:
                raise
            rejected.append(f"checkpoint of step {record.step}: {error}")
            log.error("op=fork run=%s step=%d decision=take_an_older_one reason=%s", run, record.step, error)
    raise RestoreRefused(
        "; ".join(rejected),
        expected="one published checkpoint that can be read",
        action="restore the damaged objects from a copy",
    )


def check_meaning(info: RunInfo, made: RunInfo) -> None:
    """A fork inherits ordinals and tensors, which must mean the same. Raises `FingerprintMismatch`."""
    old, new = info.fingerprints, made.fingerprints
    for name in sorted((old.keys() | new.keys()) - MAY_DIFFER):
        if old.get(name) != new.get(name):
            raise FingerprintMismatch(
                f"{name} = {new.get(name, ABSENT)[:60]}",
                expected=f"{name} = {old.get(name, ABSENT)[:60]}, as run {info.run!r} was started with",
                action="leave what changes it as it was, or start a new run: positions in the source and tensors would"
                " mean something else",
                code=f"fingerprint_{name}",
            )


# ---------------------------------------------------------------------- what there is


def _begun(target: Store, made: RunInfo) -> RunInfo | None:
    """The same fork, left unfinished. Raises `RunExists` for any other run of the name."""
    try:
        found = open_run(target, made.run)
    except UnknownRun:
        found = None
    if target.size(RunPaths(made.run).segment(0)) is not None:
        raise _exists(target, made.run, _what(found))
    if found is None:
        return None
    if msgspec.structs.replace(found, created=made.created, origin=None) != made or found.origin is None:
        raise _exists(
            target, made.run, _what(found) if found.origin is None else "an unfinished fork of other settings"
        )
    return found


def _what(info: RunInfo | None) -> str:
    if info is None or info.origin is None:
        return "a run of its own"
    return f"a complete fork of {info.origin.run}@{info.origin.step}"


def _exists(target: Store, run: str, what: str) -> RunExists:
    return RunExists(
        f"run {run!r} in {target.url} is {what}",
        expected="a new name, or this very fork left unfinished",
        action=f"go on with it: tidegate resume {run}; or choose another name",
    )


def _refuse_damage(found: Survey, run: str, new: str) -> None:
    if found.damage is not None:
        raise ForkRefused(
            f"the journal of run {run!r} is damaged at slot {found.damage.slot}: {found.damage.error.found}",
            expected="a journal that can be read to its end",
            action="restore the object from a copy, or fork from the last good position, which lists what is lost:"
            f" tidegate fork {run} {new} --last-good",
            code="damaged",
        ) from found.damage.error


def _chosen(found: Survey, run: str, step: int | None) -> Iterator[CheckpointPublished]:
    """The checkpoints to try, best first."""
    wanted = [record for record in found.checkpoints if step in (None, record.step)]
    if not wanted:
        known = ", ".join(str(record.step) for record in found.checkpoints) or "none"
        raise UnknownCheckpoint(
            f"run {run!r} has checkpoints of steps: {known}" + (" before its damage" if found.damage else ""),
            expected="one at all" if step is None else f"one of step {step}",
            action="name a step that has a checkpoint, as RUN@STEP",
        )
    return reversed(wanted)


# ---------------------------------------------------------------------- one try


@dataclass(slots=True)
class _Making:
    """A fork from one checkpoint, which is pinned."""

    source: Store
    info: RunInfo
    target: Store
    made: RunInfo
    begun: RunInfo | None
    record: CheckpointPublished
    clock: Clock
    say: Say

    def make(self, last_good: bool, rejected: list[str]) -> Fork:
        """Raises `ArtifactCorrupt` when the checkpoint is not what the journal says."""
        run, record = self.info.run, self.record
        found = survey(self.source, run, self.info.num_siblings, record.position, self.say)
        if not last_good:
            _refuse_damage(found, run, self.made.run)
        if record not in found.checkpoints or found.then is None:
            raise UnknownCheckpoint(
                f"the checkpoint of step {record.step} of run {run!r} was retired meanwhile",
                expected="a published checkpoint",
                action="fork again, from a newer one",
            )
        manifest = self._manifest(found)
        origin = Origin(run, without_credentials(self.source.url), record.step, record.digest)
        if self.begun is None:
            probe(self.target, RunPaths(self.made.run).root)
        elif self.begun.origin != origin:
            raise _exists(self.target, self.made.run, "an unfinished fork of another checkpoint")
        written = self._copy(manifest)
        self._describe(origin)
        forked, copied = self._forked(found.then, origin, manifest)
        written += create_same(self.target, RunPaths(self.made.run).manifest(forked.checkpoint.manifest), copied)
        forked = msgspec.structs.replace(forked, checkpoint=msgspec.structs.replace(forked.checkpoint, written=written))
        self._commit(forked)
        return self._report(found, found.then, forked, rejected)

    def _manifest(self, found: Survey) -> Manifest:
        """The source's, which holds a state that the journal knows."""
        run, record = self.info.run, self.record
        manifest = read_manifest(self.source, run, record.manifest, record.digest)
        states = found.states.get(record.step, set())
        if manifest.step != record.step or manifest.state_digest not in states:
            raise ArtifactCorrupt(
                f"{RunPaths(run).manifest(record.manifest)} is of step {manifest.step}, state"
                f" {manifest.state_digest[:12]}",
                expected=f"step {record.step} with state {' or '.join(sorted(state[:12] for state in states))}, as"
                " committed",
                action="take another checkpoint",
                code="mixed_cut",
            )
        return manifest

    # ------------------------------------------------------------------ writing, in the order of the module

    def _copy(self, manifest: Manifest) -> int:
        """Every object of the checkpoint, proven; returns the bytes written."""
        total, lock = sum(manifest.objects.values()), threading.Lock()
        done = 0

        def copy(item: tuple[str, int]) -> int:
            nonlocal done
            written = self._copy_one(*item)
            with lock:
                done += item[1]
                self.say(f"op=fork phase=copy step={manifest.step} done={done} of={total}")
            return written

        return sum(each(copy, list(manifest.objects.items())))

    def _copy_one(self, digest: str, size: int) -> int:
        run, key = self.made.run, RunPaths(self.made.run).object(digest)
        try:
            if self.target.size(key) is not None:
                read_whole(self.target, run, digest, size)
                return 0
        except ArtifactCorrupt as error:
            raise ForkRefused(
                f"{error.found} in {self.target.url}, left by an earlier fork", expected=error.expected,
                action="delete it, or choose another name", code="left_over",
            ) from error  # fmt: skip
        return create_same(self.target, key, read_whole(self.source, self.info.run, digest, size))

    def _describe(self, origin: Origin) -> None:
        """run.json, from which on the name belongs to this fork."""
        if self.begun is None:
            try:
                create_run(self.target, msgspec.structs.replace(self.made, origin=origin))
            except RunExists:
                other = _begun(self.target, self.made)
                if other is None or other.origin != origin:
                    raise

    def _forked(self, then: Ledger, origin: Origin, manifest: Manifest) -> tuple[schema.Forked, bytes]:
        """The record of the fork, and the bytes of its manifest."""
        copied = msgspec.json.encode(msgspec.structs.replace(manifest, run=self.made.run, incarnation=FORK_INCARNATION))
        name = f"{manifest.step:09d}-{FORK_INCARNATION:06d}.json"
        digest = hashlib.sha256(copied).hexdigest()
        checkpoint = CheckpointPublished(manifest.step, FORK_POSITION, name, digest, self.record.size, 0)
        ordinals = sorted(then.quarantined)
        held = [then.quarantined[ordinal] for ordinal in ordinals]
        num = self.made.num_siblings
        return schema.Forked(
            origin.run, origin.storage, manifest.step, self.record.position, manifest.state_digest,
            manifest.weights_digest, checkpoint, then.frontier, tuple(then.consumed.intervals()),
            tuple(then.discarded.intervals()), tuple(ordinals), tuple(one.reason for one in held),
            tuple(_resized(one.attempts, num, -1) for one in held),
            tuple(_resized(one.boundaries, num, 0) for one in held), then.recipe.recovery, then.recipe.fingerprint,
        ), copied  # fmt: skip

    def _commit(self, forked: schema.Forked) -> None:
        """The first segment: with it the fork is there. Raises `RunExists` when somebody else's is."""
        run, came = self.made.run, f"{forked.run}@{forked.step}"
        records = schema.RunClaimed(FORK_INCARNATION, f"fork of {came}", "fork"), forked
        ledger = Ledger(self.made.num_siblings)
        journal = JournalWriter(run, FORK_INCARNATION, uuid.uuid4().hex[:12], Tail(), self.clock)
        for record in records:
            apply(ledger, ledger.next_seq, record)
            journal.append(record)
        try:
            store_frozen(self.target, run, FORK_INCARNATION, journal.freeze())
        except (RunFenced, TwoOwners) as error:
            raise _exists(self.target, run, "one that somebody else began at the same time") from error

    def _report(self, found: Survey, then: Ledger, forked: schema.Forked, rejected: list[str]) -> Fork:
        ledger, damage = found.ledger, found.damage
        new = {name: str(value) for name, value in flat(self.made.settings)}
        lost: dict[str, str | int] | None = None
        if damage is not None:
            lost = {"found": damage.error.found, "code": damage.error.code, "slot": damage.slot,
                    "segments_lost": damage.segments, "segments_unreadable": damage.unreadable}  # fmt: skip
        return Fork(
            run=forked.run, storage=forked.storage, new=self.made.run, new_storage=self.target.url, step=forked.step,
            position=forked.position, state_digest=forked.state_digest, consumed=len(then.consumed),
            discarded=len(then.discarded), quarantined=len(then.quarantined), requeued=len(then.groups),
            frontier=then.frontier, steps_left=sorted(found.trained),
            groups_left=sum(len(groups) for groups in found.trained.values()),
            evaluations_left=len(ledger.evaluated), evaluations_dropped=[f"{suite} at {at}" for suite, at in then.due],
            settings_left={
                name: value for name, value in then.settings.items()
                if new.get(name, ABSENT) != value and name not in _PLACES
            },
            size=forked.checkpoint.size, written=forked.checkpoint.written, rejected=rejected, damage=lost,
        )  # fmt: skip


_PLACES = ("run", "storage.url")


def _resized(values: tuple[int, ...], num: int, unused: int) -> tuple[int, ...]:
    """What siblings had used up, for a group of another size."""
    return (*values, *[unused] * num)[:num]
