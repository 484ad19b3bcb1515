"""Bytes that change behind everybody's back: found by whoever reads them, or by `verify`, before anything changes.

Left out on purpose: the removal of the last segment, which looks like an earlier end to anybody.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from storage import journal
from storage.checkpoint import read_manifest
from storage.errors import TidegateError
from storage.ledger import Ledger
from storage.low import read_low
from storage.reader import PayloadReader
from storage.restore import load_base, plan_restore
from storage.runs import RunPaths
from storage.schema import CheckpointPublished
from storage.snapshot import ledger_rows
from storage.verify import verify
from tests.simulation.incarnations import RUN

if TYPE_CHECKING:
    from tests.simulation.world import World

PATHS = RunPaths(RUN)


class Victim(NamedTuple):
    """An object that is altered, and who must find it (raises AssertionError when nobody does)."""

    kind: str
    key: str
    found: Callable[[], None]
    removable: bool = True


class Alterations:
    def __init__(self, world: World) -> None:
        self._world = world

    def strike(self) -> None:
        """Alter one object while no manager lives, see that it is found, put it back."""
        world = self._world
        store, faults = world.store, world.store.faults
        store.faults = False
        ledger, _ = journal.fold(store, RUN, world.limits.num_siblings)
        victim = self._choose(ledger)
        held = store.alter(victim.key, None)
        data = altered(world.rng, held, victim.removable)
        if data is not None:
            store.alter(victim.key, data)
        writes = store.writes
        victim.found()
        assert store.writes == writes, "nothing is written before an altered object is found"
        store.alter(victim.key, held)
        store.faults = faults
        world.tally[f"altered_{victim.kind}"] += 1

    def _choose(self, ledger: Ledger) -> Victim:
        rng, store = self._world.rng, self._world.store
        low, newest, end = read_low(store, RUN), ledger.snapshot, store.slots()[-1]
        slot = rng.choice([slot for slot in store.slots() if slot >= low or slot in self._claims()])
        reader = self._verify_finds if newest and slot < newest.slot else self._claim_finds
        victims = [Victim("segment", PATHS.segment(slot), reader, slot < end)]
        if ledger.history:
            victims.append(Victim("history", PATHS.archive(rng.choice(ledger.history)), self._verify_finds))
        if newest is not None:
            key = PATHS.snapshot(newest.slot, newest.digest)
            victims.append(Victim("snapshot", key, lambda: self._fold_goes_round(ledger)))
        files = [name for name, block in ledger.blocks.items() if not block.inline and block.users + block.retained]
        if files:
            name = rng.choice(files)
            victims.append(Victim("payload", PATHS.block(name), lambda: self._reader_finds(ledger, name)))
        if ledger.checkpoints:
            record = rng.choice(ledger.checkpoints)
            manifest = read_manifest(store, RUN, record.manifest, record.digest)
            digest = sorted(manifest.objects)[0]
            for kind, key in (("manifest", PATHS.manifest(record.manifest)), ("shard", PATHS.object(digest))):
                victims.append(Victim(kind, key, lambda: self._restore_finds(ledger, record)))
        return rng.choice(victims[1:] * 2 + victims)  # segments are there in every world

    def _claims(self) -> set[int]:
        return {slot for slot, _ in self._world.incarnations.claimed.values()}

    # ------------------------------------------------------------------ who finds it

    def _claim_finds(self) -> None:
        world = self._world
        try:
            journal.claim(
                world.store, RUN, world.limits.num_siblings, owner="sim", writer="none", reason="x", clock=world.clock
            )
        except TidegateError:
            return
        raise AssertionError("a claim went over an altered segment")

    def _fold_goes_round(self, ledger: Ledger) -> None:
        """An older snapshot, or the first slot, leads to the same ledger."""
        found, _ = journal.fold(self._world.store, RUN, self._world.limits.num_siblings)
        assert ledger_rows(found) == ledger_rows(ledger)
        self._verify_finds()

    def _reader_finds(self, ledger: Ledger, name: str) -> None:
        try:
            PayloadReader(self._world.store, RUN).block_rows(name, ledger.blocks[name])
        except TidegateError:
            self._verify_finds()
            return
        raise AssertionError("an altered block was read")

    def _restore_finds(self, ledger: Ledger, record: CheckpointPublished) -> None:
        plan = plan_restore(ledger, RUN)
        valid = [found.step for found in plan.checkpoints if found is not record] + [0] * plan.genesis
        try:
            base = load_base(self._world.store, plan)
        except TidegateError:
            assert not valid, "a valid checkpoint was refused"
        else:
            assert valid
            assert base.step == max(valid), "the newest valid checkpoint"
            assert len(base.rejected) == (record.step > max(valid)), "each rejected checkpoint is reported"
        self._verify_finds()

    def _verify_finds(self) -> None:
        assert not verify(self._world.store, RUN).sound, "verify passed an altered object"


def altered(rng: random.Random, data: bytes, removable: bool) -> bytes | None:
    """One bit flipped, cut short, or gone (None)."""
    how = rng.choice(["flip", "flip", "cut", "gone"] if removable else ["flip", "flip", "cut"])
    if how == "gone":
        return None
    place = rng.randrange(len(data))
    if how == "cut":
        return data[:place]
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
