"""Each object of a run in turn is gone, cut, or holds what another one should: a restore refuses, or goes round it and
ends where it would have ended, and `verify` says what is wrong. Nothing is written before that.

`test_flipped_bytes` does the same with single bits.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from storage.errors import ArtifactCorrupt, SlotsRetired
from storage.history import read_all
from storage.journal import fold, kept_snapshots
from storage.low import raise_low, read_low
from storage.memory import MemoryStore
from storage.runs import RunPaths
from storage.snapshot import ledger_rows
from storage.verify import verify
from tests.faults.test_flipped_bytes import KINDS, judge, kind_of, named, restored, running
from tests.simulation.store import SimStore
from tests.simulation.world import RUN

SEEDS = range(1, 4 if os.environ.get("TIDEGATE_BOUNDARIES", "0") != "0" else 2)
DAMAGES: dict[str, Callable[[bytes, bytes], bytes | None]] = {
    "gone": lambda held, other: None,
    "empty": lambda held, other: b"",
    "half": lambda held, other: held[: len(held) // 2],
    "a byte short": lambda held, other: held[:-1],
    "a byte too long": lambda held, other: held + b"\0",
    "another one's": lambda held, other: other,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_object_of_any_kind_that_is_damaged_is_noticed_before_anything_live_changes(damage: str) -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        _damage_each(seed, damage, seen)
    assert {kind for kind in KINDS if seen[kind]} == KINDS - ({"run.json"} if damage == "another one's" else set())
    assert min(seen[how] for how in ("refused", "went round", "older checkpoint")) > 0, seen


def _damage_each(seed: int, damage: str, seen: Counter[str]) -> None:
    world = running(seed)
    store = world.store
    whole, known = restored(store), named(store)
    keys = [key for key in store.keys("runs/") if kind_of(key) != "payload" or key in known]
    last = RunPaths(RUN).segment(world.manager.writer.slot - 1)
    dispensable = {last} | {key for key in keys if kind_of(key) == "ledger"} - kept(store)  # see below; and retention
    for key in keys:
        if damage == "gone" and key in dispensable:
            continue
        others = [other for other in keys if kind_of(other) == kind_of(key) and other != key]
        if damage == "another one's" and not others:
            continue
        held = store.alter(key, None)
        altered = DAMAGES[damage](held, store.read(others[0]) if others else b"")
        assert altered != held
        if altered is not None:
            store.alter(key, altered)
        writes = store.writes
        outcome = judge(store, whole)
        assert outcome, f"{key} is {damage}, and nobody noticed"
        assert store.writes == writes
        seen.update([outcome, kind_of(key)])
        store.alter(key, held)
    assert restored(store) == whole


def kept(store: SimStore) -> set[str]:
    """Ledger snapshots that nobody may delete."""
    return {RunPaths(RUN).snapshot(record.slot, record.digest) for record in kept_snapshots(store, RUN)}


def test_a_run_without_its_last_segment_is_the_run_before_it_and_no_hole() -> None:
    """What an end looks like: nobody can tell it from a segment that never was. Nothing else is given up with it."""
    world = running(0)
    store: SimStore = world.store
    segments = list(read_all(store, RUN))
    store.alter(RunPaths(RUN).segment(len(segments) - 1), None)
    ledger, tail = fold(store, RUN, world.limits.num_siblings)
    assert tail.slot == len(segments) - 1
    assert ledger.next_seq == segments[-1].header.first
    assert verify(store, RUN).sound


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5"])
def test_the_mark_of_retired_slots_must_be_a_number(value: bytes) -> None:
    store = running(0).store
    raise_low(store, RUN, 1)
    store.alter(RunPaths(RUN).low, value)
    writes = store.writes
    with pytest.raises(ArtifactCorrupt, match="slot number"):
        fold(store, RUN, 1)
    assert store.writes == writes


def test_a_mark_of_retired_slots_that_is_too_high_is_refused_and_not_believed_to_be_the_end() -> None:
    world = running(0)
    store: MemoryStore = world.store
    before, _ = fold(store, RUN, world.limits.num_siblings)
    low = read_low(store, RUN)
    raise_low(store, RUN, 10**6)
    with pytest.raises((SlotsRetired, ArtifactCorrupt)):
        fold(store, RUN, world.limits.num_siblings)
    store.alter(RunPaths(RUN).low, str(low).encode())  # type: ignore[attr-defined]
    assert ledger_rows(fold(store, RUN, world.limits.num_siblings)[0]) == ledger_rows(before)
