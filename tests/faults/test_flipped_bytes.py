"""One byte is flipped in each object of a run in turn: a restore refuses, or goes round it and ends where it would have
ended, and `verify` says what is wrong. Nothing is written before that."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from storage.errors import TidegateError
from storage.history import read_all
from storage.journal import fold, rows_of
from storage.reader import PayloadReader
from storage.restore import load_base, plan_restore
from storage.retention import Doomed
from storage.runs import RunPaths, open_run
from storage.schema import PayloadStored
from storage.snapshot import ledger_rows
from storage.verify import verify
from tests.simulation import memo
from tests.simulation.shapes import SHAPES
from tests.simulation.store import SimStore
from tests.simulation.world import RUN, World

KINDS = {"journal", "ledger", "history", "payload", "objects", "checkpoints", "run.json"}
PLACES = 2


def running(seed: int) -> World:
    """A world in the middle of its run, everything durable, with unsettled groups and steps to redo, and nothing there
    that has lost its meaning."""
    world = World(seed, length=14, shape=replace(SHAPES["large"], checkpoints=0.6, files=0.5))
    world.snapshot_every = 4
    world.faults = world.store.faults = False
    with memo.remembering():
        while (world.control.ledger.step < 4 or Doomed.of(world.control.ledger)) and not world.done:
            world.step()
        while world.manager.writer.last_seq > world.manager.writer.durable_seq:
            world.incarnations.flush(world.manager, due=False)
    return world


def restored(store: SimStore) -> tuple[object, ...]:
    """What a resume builds on: the ledger, the trainer's state, and every token row that is still needed."""
    info = open_run(store, RUN)
    ledger, tail = fold(store, RUN, info.num_siblings)
    plan = plan_restore(ledger, RUN)
    base = load_base(store, plan)
    reader = PayloadReader(store, RUN)
    steps = [step.lease.groups for number, step in plan.steps.items() if number > base.step]
    needed = {row for groups in steps for group in groups for rows in group.rows for row in rows}
    needed |= {row for group in ledger.groups.values() for rollout in group.rollouts for row in rollout.rows}
    rows = [repr(reader.rows([row], ledger.blocks)) for row in sorted(needed)]
    state = base.manifest.state_digest if base.manifest else ""
    return ledger_rows(ledger), tail, base.step, state, rows


def test_a_flipped_byte_in_any_object_is_detected_before_anything_live_changes() -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        flip_everywhere(seed, seen)
    assert {kind for kind in KINDS if seen[kind]} == KINDS
    assert min(seen[how] for how in ("refused", "went round", "older checkpoint")) > 0, seen


def flip_everywhere(seed: int, seen: Counter[str]) -> None:
    world = running(seed)
    store, dice = world.store, random.Random(seed)
    assert verify(store, RUN).sound
    whole, known = restored(store), named(store)
    for key in store.keys("runs/"):
        if kind_of(key) == "payload" and key not in known:
            continue  # its report has not arrived: the run does not know it
        held = store.alter(key, None)
        for place in dice.sample(range(len(held)), min(PLACES, len(held))):
            store.alter(key, held[:place] + bytes([held[place] ^ (1 << dice.randrange(8))]) + held[place + 1 :])
            writes = store.writes
            outcome = judge(store, whole)
            assert outcome, f"byte {place} of {key} went unnoticed"
            assert store.writes == writes
            seen[outcome] += 1
            seen[kind_of(key)] += 1
        store.alter(key, held)
    assert restored(store) == whole


def kind_of(key: str) -> str:
    return key.split("/")[2]


def named(store: SimStore) -> set[str]:
    """Payload files that the journal knows."""
    rows = rows_of(read_all(store, RUN))
    return {RunPaths(RUN).block(row.record.block) for row in rows if isinstance(row.record, PayloadStored)}


def judge(store: SimStore, whole: tuple[object, ...]) -> str:
    """How the flip was noticed, "" when it was not."""
    try:
        found = restored(store)
    except TidegateError:
        return "refused"
    try:
        sound = verify(store, RUN).sound
    except TidegateError:
        sound = False
    if found == whole:
        return "" if sound else "went round"
    # An older checkpoint instead of the damaged one: the same ledger, more steps to redo.
    return "older checkpoint" if found[:2] == whole[:2] and not sound else ""
