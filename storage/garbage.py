"""What lies in a run's folder and has no meaning: what fenced incarnations and killed writers left. `tidegate gc`.

Nothing is garbage because two listings say so, nor because it is old (but for what no key leads to). Each kind has a
proof that no record can ever name it, also when a manager starts, or goes on, at this very moment:

* A manifest or payload file carries the number of the incarnation that wrote it, and a manager records only those of
  its own incarnation. So one of an incarnation below the newest claim that no record names stays without a record. A
  checkpoint's step only goes up, so neither is a manifest of a step at or before the newest one ever recorded.
* A ledger snapshot, and the archive that comes with it, is recorded only for a slot after the newest recorded one.
* A slot below `journal/low` is read by nobody, but for the claim that a stopped writer must find there.
* An object carries no incarnation: a publication may find it and count on it at any moment. It is garbage when the run
  is finished, which publishes nothing ever again; in a run that goes on only its manager can tell, between two
  publications (`gpu.rollout.retaining`). Without a living manager objects are left alone.
* A retired checkpoint is the manager's to delete; when the run is finished there is none to do it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from storage import schema
from storage.clock import Clock
from storage.each import each
from storage.errors import SlotsRetired
from storage.filesystem import Leftover, Littered, Store
from storage.history import read_all
from storage.journal import fold, has_claim, kept_snapshots, rows_of
from storage.ledger import Ledger
from storage.low import read_low
from storage.pins import counts, pinned
from storage.retention import UNREADABLE, objects_of
from storage.runs import RunInfo, RunPaths, flat, open_run
from storage.schema import CheckpointPublished

KINDS = ("objects", "manifests", "payload", "snapshots", "history", "journal", "temporary_files", "uploads", "pins")
UNFINISHED = "the run goes on and no manager of it answers here, which alone can tell: resume the run and try again"
_MANIFEST = re.compile(r"(\d{9})-(\d{6})\.json")
_BLOCK = re.compile(r"(\d+)-.+\.arrow")
_SNAPSHOT = re.compile(r"(\d{12})-[0-9a-f]{16}\.arrow")
_ARCHIVE = re.compile(r"\d{12}-(\d{12})-[0-9a-f]{64}\.arrow")
_SEGMENT = re.compile(r"(\d{12})\.arrow")


class Item(NamedTuple):
    """An object of a store, and its bytes."""

    key: str
    size: int


@dataclass(slots=True)
class Garbage:
    """By kind: what was found, and why a kind was left alone."""

    finished: bool
    items: dict[str, list[Item]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    leftovers: list[Leftover] = field(default_factory=lambda: [])
    skipped: dict[str, str] = field(default_factory=lambda: {})


def find_garbage(store: Store, run: str, clock: Clock, grace_s: float) -> Garbage:
    """Reads only. What no key leads to counts when it is older than `grace_s` seconds. Raises what a fold raises."""
    info = open_run(store, run)
    ledger, _ = fold(store, run, info.num_siblings)
    pin_s = _pin_seconds(info, ledger)
    pins = pinned(store, run, clock, pin_s)
    found = Garbage(bool(ledger.finished))
    finder = _Finder(store, run, ledger, pins)
    found.items["manifests"] = finder.sized(finder.manifests())
    found.items["snapshots"] = finder.sized(finder.snapshots())
    found.items["history"] = finder.sized(finder.archives())
    found.items["journal"] = finder.sized(finder.segments())
    found.items["pins"] = finder.sized(finder.pins(clock, pin_s))
    try:
        found.items["payload"] = finder.sized(finder.payload())
    except SlotsRetired as error:
        found.skipped["payload"] = f"what the journal's first records named is not known: {error.found}"
    if not ledger.finished:
        found.skipped["objects"] = UNFINISHED
    else:
        try:
            found.items["objects"] = orphan_objects(store, run, finder.living())
        except UNREADABLE as error:
            found.skipped["objects"] = f"a checkpoint that is needed cannot be read: {error}"
    if isinstance(store, Littered):
        found.leftovers = store.leftovers(RunPaths(run).root, clock.wall() - grace_s)
    for one in found.leftovers:
        found.items[one.kind].append(Item(one.name, one.size))
    return found


def delete_garbage(store: Store, garbage: Garbage, *, pins: bool) -> list[str]:
    """Delete what was found, pins only when `pins`; returns the keys that could not be deleted. Objects go before the
    manifests that lead to them."""
    theirs = {"objects"} if not garbage.finished else set[str]()  # the manager of a run that goes on deletes them
    kinds = [kind for kind in KINDS if kind not in theirs and (kind != "pins" or pins)]
    loose = {one.name for one in garbage.leftovers}
    keys = [item.key for kind in kinds for item in garbage.items[kind] if item.key not in loose]
    failed = store.delete(keys) if keys else []
    return failed + (store.drop(garbage.leftovers) if isinstance(store, Littered) else [])


def orphan_objects(store: Store, run: str, living: Sequence[CheckpointPublished]) -> list[Item]:
    """Objects that none of the checkpoints `living` needs. The caller knows that no publication can be under way.
    Raises one of `storage.retention.UNREADABLE`."""
    needed = objects_of(store, run, living)
    keys = store.list(RunPaths(run).objects)
    return _sized(store, [key for key in keys if key.rpartition("/")[2] not in needed])


def _sized(store: Store, keys: Iterable[str]) -> list[Item]:
    """With their sizes; one that is gone meanwhile is not there."""
    listed = sorted(keys)
    sizes = each(store.size, listed)
    return [Item(key, size) for key, size in zip(listed, sizes, strict=True) if size is not None]


def _pin_seconds(info: RunInfo, ledger: Ledger) -> float:
    """As the run's settings in force say; a run that says nothing lets no pin expire."""
    settings = {name: str(value) for name, value in flat(info.settings)} | ledger.settings
    return float(settings.get("retention.pin_hours", inf)) * 3600


class _Finder:
    """Looks at one run, as its journal was a moment ago."""

    def __init__(self, store: Store, run: str, ledger: Ledger, pins: set[str]) -> None:
        self._store, self._run, self._ledger, self._pins = store, run, ledger, pins
        self._paths = RunPaths(run)

    def sized(self, keys: Iterable[str]) -> list[Item]:
        return _sized(self._store, keys)

    def living(self) -> list[CheckpointPublished]:
        """Checkpoints whose objects stay, in a finished run."""
        ledger = self._ledger
        return [*ledger.kept, *ledger.checkpoints, *[one for one in ledger.retired if one.manifest in self._pins]]

    def _named(self, folder: str, form: re.Pattern[str]) -> list[tuple[str, re.Match[str]]]:
        """Keys below a folder that have a name as this program gives them; others are none of its business."""
        matches = [(key, form.fullmatch(key.rpartition("/")[2])) for key in self._store.list(folder)]
        return [(key, match) for key, match in matches if match is not None]

    def _is_past(self, incarnation: int) -> bool:
        """Whether nothing of an incarnation can come to be recorded any more."""
        return incarnation < self._ledger.incarnation or bool(self._ledger.finished)

    def manifests(self) -> list[str]:
        ledger = self._ledger
        known = {one.manifest for one in (*ledger.kept, *ledger.checkpoints)}
        retired = {one.manifest for one in ledger.retired}
        known |= retired & self._pins if ledger.finished else retired
        newest = ledger.checkpoints[-1].step if ledger.checkpoints else -1
        return [
            key
            for key, name in self._named(self._paths.checkpoints, _MANIFEST)
            if name[0] not in known and (self._is_past(int(name[2])) or int(name[1]) <= newest)
        ]

    def snapshots(self) -> list[str]:
        newest = self._ledger.snapshot
        kept = {self._paths.snapshot(one.slot, one.digest) for one in kept_snapshots(self._store, self._run)}
        last = newest.slot if newest else -1
        named = self._named(self._paths.ledger, _SNAPSHOT)
        return [key for key, name in named if key not in kept and (self._ledger.finished or int(name[1]) <= last)]

    def archives(self) -> list[str]:
        ledger, last = self._ledger, self._ledger.snapshot.slot if self._ledger.snapshot else -1
        known = {f"{name}.arrow" for name in ledger.history}
        known |= set() if ledger.finished else {f"{name}.arrow" for name in ledger.replaced}  # an archivist may
        named = self._named(self._paths.history, _ARCHIVE)
        return [key for key, name in named if name[0] not in known and (ledger.finished or int(name[1]) <= last)]

    def segments(self) -> list[str]:
        """Retired ones that an archivist which died did not delete."""
        low = read_low(self._store, self._run)
        named = [(key, int(name[1])) for key, name in self._named(self._paths.journal, _SEGMENT)]
        return [key for key, slot in named if slot < low and not has_claim(self._store, self._run, slot)]

    def payload(self) -> list[str]:
        """Raises `SlotsRetired`."""
        named = self._named(self._paths.payload, _BLOCK)
        past = {
            key.rpartition("/")[2].removesuffix(".arrow"): key for key, name in named if self._is_past(int(name[1]))
        }
        if not past:
            return []
        retired = self._ledger.retired_blocks if self._ledger.finished else {}
        recorded = {
            row.record.block
            for row in rows_of(read_all(self._store, self._run))
            if isinstance(row.record, schema.PayloadStored)
        }
        return [key for block, key in past.items() if block not in recorded or block in retired]

    def pins(self, clock: Clock, pin_s: float) -> list[str]:
        """Those that are ignored."""
        keys = self._store.list(self._paths.pins)
        return [key for key in keys if not counts(self._store, key, clock, pin_s)]
