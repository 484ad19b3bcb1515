"""Retention: which checkpoints and payload files a run keeps, and the deletion of the others.

`plan` decides, from a ledger and the run's settings; the manager records that (`retired`), and when the record is
durable `Deletion` deletes and says what is gone (`deleted`). Whoever needs a checkpoint beyond that pins it first and
checks then that it is not retired: because the pins are listed after the retirement is durable, either the pin is seen
here, or the retirement there.

Objects belong to several checkpoints. Only those go which no checkpoint needs that is left, kept, or pinned, and a
manifest goes after its objects: whoever stops in between, or finds a key that could not be deleted, goes on from
there. A retired checkpoint whose manifest is damaged holds up nothing: what it referred to is found by
`storage.garbage`. One that is still needed holds up every object, because what it needs is not known.

The caller sees to it that no publication is under way that could come to count: it might have found an object in the
store instead of writing it, which then goes. See `gpu.rollout.retaining`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from storage.checkpoint import read_manifest
from storage.clock import Clock
from storage.each import each
from storage.errors import ArtifactCorrupt, CheckpointRefused, SchemaUnsupported, StorageUnusable, StoreError
from storage.filesystem import Store
from storage.ledger import Ledger
from storage.pins import pinned
from storage.runs import RunPaths
from storage.schema import CheckpointPublished, Deleted, Retired

BATCH = 200
"""Keys of one delete call; between two of them a deletion can be stopped."""
MOST_BLOCKS = 2000
"""Blocks that one record retires; the others have to wait for the next."""
UNREADABLE = (ArtifactCorrupt, SchemaUnsupported, msgspec.MsgspecError)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """A run keeps its newest `last` checkpoints for restores, and each of a step that `every` divides (0: none) for
    forks and people. `payload`: "keep" the files of settled groups, so that all tokens can be proven for ever, or only
    what is "needed" to go on. A pin older than `pin_s` seconds is ignored."""

    last: int
    every: int
    payload: Literal["keep", "needed"]
    pin_s: float


def plan(ledger: Ledger, retention: Retention, spent: Iterable[str] = ()) -> Retired | None:
    """What loses its meaning now; None when nothing does. `spent` are payload files that nothing needs."""

    def stays(one: CheckpointPublished) -> bool:
        return bool(retention.every) and one.step % retention.every == 0

    older = ledger.checkpoints[: -retention.last]
    gone = [one.manifest for one in (*ledger.kept, *older) if not stays(one)]
    kept = [one.manifest for one in older if stays(one)]
    blocks = islice((name for name in spent if _unneeded(ledger, name)), MOST_BLOCKS)
    planned = Retired(tuple(gone), tuple(kept), tuple(blocks))
    return planned if planned.manifests or planned.kept or planned.blocks else None


def _unneeded(ledger: Ledger, block: str) -> bool:
    return block not in ledger.blocks and block not in ledger.retired_blocks


@dataclass(frozen=True, slots=True)
class Doomed:
    """What a deletion works on: a ledger's retired checkpoints and blocks, and the checkpoints that are left."""

    retired: tuple[CheckpointPublished, ...]
    blocks: tuple[str, ...]
    needed: tuple[CheckpointPublished, ...]

    @classmethod
    def of(cls, ledger: Ledger) -> Doomed:
        return cls(tuple(ledger.retired), tuple(ledger.retired_blocks), (*ledger.kept, *ledger.checkpoints))

    def __bool__(self) -> bool:
        return bool(self.retired or self.blocks)


class Deletion:
    """One go at deleting what was retired; blocks on storage. `go_on` is asked before each call that deletes, and ends
    the deletion when it says no. Afterwards `deleted` says what is gone, also after an error, and `problem` what is
    not, and why, "" when all went well or was stopped."""

    def __init__(
        self, store: Store, run: str, doomed: Doomed, retention: Retention, clock: Clock, go_on: Callable[[], bool]
    ) -> None:
        self._store, self._run, self._doomed = store, run, doomed
        self._retention, self._clock, self._go_on = retention, clock, go_on
        self._manifests: list[str] = []
        self._blocks: list[str] = []
        self._failed: list[str] = []
        self._problems: list[str] = []
        self.pins: set[str] = set()
        self.objects: dict[str, set[str]] = {}
        """Digests by manifest: those that it was about to delete."""
        self.unsure: set[str] = set()
        """Keys whose deletion the store has not answered: it may still come."""

    @property
    def deleted(self) -> Deleted | None:
        """The record to write; None when nothing is gone."""
        if not self._manifests and not self._blocks:
            return None
        return Deleted(tuple(self._manifests), tuple(self._blocks))

    @property
    def problem(self) -> str:
        failed = [f"{len(self._failed)} keys could not be deleted, e.g. {self._failed[0]}"] if self._failed else []
        return "; ".join(self._problems + failed)

    def run(self) -> None:
        """Faults of the store end it and are the `problem`."""
        try:
            self._delete_blocks()
            if self._doomed.retired:
                self._delete_checkpoints()
        except (StoreError, StorageUnusable) as error:
            self._problems.append(str(error))

    def _delete_blocks(self) -> None:
        paths = RunPaths(self._run)
        for at in range(0, len(self._doomed.blocks), BATCH):
            names = self._doomed.blocks[at : at + BATCH]
            failed = self._delete([paths.block(name) for name in names])
            if failed is None:
                return
            self._blocks += [name for name in names if paths.block(name) not in failed]

    def _delete_checkpoints(self) -> None:
        self.pins = pinned(self._store, self._run, self._clock, self._retention.pin_s)
        needed = self._needed_objects()
        for one in self._doomed.retired:
            if one.manifest in self.pins or needed is None:
                continue
            if not self._delete_checkpoint(one, needed):
                return

    def _needed_objects(self) -> set[str] | None:
        """Digests that no deletion may touch; None when they are not known."""
        pins = [one for one in self._doomed.retired if one.manifest in self.pins]
        try:
            return objects_of(self._store, self._run, [*self._doomed.needed, *pins])
        except UNREADABLE as error:
            self._problems.append(f"a checkpoint that is needed cannot be read, so no object is deleted: {error}")
            return None

    def _delete_checkpoint(self, one: CheckpointPublished, needed: set[str]) -> bool:
        """False when it was stopped."""
        paths = RunPaths(self._run)
        try:
            objects = objects_of(self._store, self._run, [one]) - needed
        except UNREADABLE as error:
            log.warning(
                "op=retain run=%s manifest=%s decision=without_objects reason=%s", self._run, one.manifest, error
            )
            objects = set[str]()
        self.objects[one.manifest] = objects
        keys = [paths.object(digest) for digest in sorted(objects)]
        whole = True
        for at in range(0, len(keys), BATCH):
            failed = self._delete(keys[at : at + BATCH])
            if failed is None:
                return False
            whole = whole and not failed
        if not whole:
            return True  # the next deletion goes on from the manifest
        failed = self._delete([paths.manifest(one.manifest)])
        if failed is None:
            return False
        if not failed:
            self._manifests.append(one.manifest)
        return True

    def _delete(self, keys: list[str]) -> set[str] | None:
        """The keys that could not be deleted; None when the deletion was stopped before."""
        if not self._go_on():
            return None
        try:
            failed = self._store.delete(keys)
        except StoreError:
            self.unsure.update(keys)
            raise
        self._failed += failed
        return set(failed)


def objects_of(store: Store, run: str, checkpoints: Sequence[CheckpointPublished]) -> set[str]:
    """Digests of every object of these checkpoints. Raises one of `UNREADABLE`, and the store's errors."""
    found = each(lambda one: read_manifest(store, run, one.manifest, one.digest).objects, checkpoints)
    return {digest for objects in found for digest in objects}


def check_lasting(
    store: Store, run: str, written: tuple[str, str], endangered: set[str], dying: Sequence[CheckpointPublished],
    needed: Sequence[CheckpointPublished],
) -> None:  # fmt: skip
    """A checkpoint (manifest name, digest) that is to be recorded rests on nothing that a stopped writer may still be
    deleting: neither `endangered` objects nor those of `dying` checkpoints, but for what `needed` ones share with them.
    Raises `CheckpointRefused`, and what reading its manifest raises."""
    found = read_manifest(store, run, *written).objects.keys()
    shared = found & (endangered | {digest for one in dying for digest in _readable(store, run, one)})
    if shared and (lost := shared - objects_of(store, run, needed)):
        raise CheckpointRefused(
            f"{written[0]} refers to {len(lost)} objects of a retired checkpoint, e.g. {min(lost)[:16]}…, which a"
            " stopped manager may still be deleting",
            expected="objects of its own, or of a checkpoint that stays",
            action="nothing: the next checkpoint takes its place",
        )


def _readable(store: Store, run: str, one: CheckpointPublished) -> set[str]:
    """Its objects; none when its manifest is gone, which is deleted after them."""
    try:
        return objects_of(store, run, [one])
    except UNREADABLE:
        return set()
