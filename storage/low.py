"""The lowest slot of a journal that still has meaning, `journal/low`; only ever raised.

Deleted slots look free. So an owner raises `low` before it deletes, and whoever finds a slot free or wins one reads
`low` afterwards: a slot below it means that he slept while the journal went on, and must start again from its end.
Segments with a claim are never deleted: they are what a stopped writer runs into.
"""

from __future__ import annotations

from collections.abc import Iterable

from storage.errors import ArtifactCorrupt, ObjectMissing, PreconditionFailed, SlotsRetired
from storage.filesystem import Store
from storage.runs import RunPaths


def read_low(store: Store, run: str) -> int:
    """0 while nothing was ever retired. Raises `ArtifactCorrupt`."""
    return _read(store, run)[0]


def _read(store: Store, run: str) -> tuple[int, str | None]:
    key = RunPaths(run).low
    try:
        data, token = store.read_versioned(key)
    except ObjectMissing:
        return 0, None
    if not data.isdigit():
        raise ArtifactCorrupt(
            f"{key} holds {data[:20]!r}",
            expected="a slot number",
            action="restore the object from a copy",
            code="format",
        )
    return int(data), token


def raise_low(store: Store, run: str, slot: int) -> int:
    """Make `low` at least `slot`; returns what it is."""
    while True:
        low, token = _read(store, run)
        if low >= slot:
            return low
        try:
            store.swap(RunPaths(run).low, str(slot).encode(), token)
            return slot
        except PreconditionFailed:
            continue  # another raise won; only ever upwards, so this ends


def retire_slots(store: Store, run: str, slots: Iterable[int], low: int) -> list[str]:
    """Raise `low`, then delete those of `slots` below it; none may hold a claim (the caller knows). Returns the keys
    that could not be deleted; they have lost their meaning all the same."""
    chosen = [slot for slot in slots if slot < low]
    if low:
        raise_low(store, run, low)
    return store.delete([RunPaths(run).segment(slot) for slot in chosen])


def check_not_retired(store: Store, run: str, slot: int) -> None:
    """Call it after `slot` was found free, or won. Raises `SlotsRetired`."""
    low = read_low(store, run)
    if slot < low:
        raise SlotsRetired(
            f"slot {slot} of run {run!r} is free because it was retired: the journal begins at slot {low}",
            expected=f"a slot at or above {low}",
            action="start again from the newest ledger snapshot",
        )
