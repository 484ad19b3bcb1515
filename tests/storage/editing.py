"""Rewrite a run's journal so that every digest and the chain fit again: only its meaning is altered. And what
`verify` says of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

from storage import schema
from storage.journal import read_journal
from storage.memory import MemoryStore
from storage.runs import RunPaths
from storage.segment import GENESIS, Row, encode_segment, make_header
from storage.verify import verify
from tests.rollout.building import limits
from tests.simulation.world import RUN, World

Edit = Callable[[list[Row], list[int]], None]


def rewrite(store: MemoryStore, run: str, edit: Edit, snapshot: schema.LedgerSnapshot | None = None) -> None:
    """`edit` changes, in place, the list of all rows and the parallel list of the incarnations that wrote them. Every
    segment will point to `snapshot`."""
    rows: list[Row] = []
    incarnations: list[int] = []
    for segment in read_journal(store, run):
        rows += segment.rows
        incarnations += [segment.header.incarnation] * len(segment.rows)
    edit(rows, incarnations)
    paths = RunPaths(run)
    store.delete(list(store.list(paths.journal)))
    previous, start = GENESIS, 0
    for slot in range(len(rows)):
        end = start + 1
        while end < len(rows) and incarnations[end] == incarnations[start]:
            end += 1
        part = [row._replace(seq=start + index) for index, row in enumerate(rows[start:end])]
        header = make_header(run=run, incarnation=incarnations[start], writer="editor", slot=slot, first=start,
                             last=end - 1, previous=previous, snapshot=snapshot)  # fmt: skip
        data, previous = encode_segment(header, part)
        store.create(paths.segment(slot), data)
        start = end
        if start == len(rows):
            return


def finished_run(seed: int = 3, *, multi_turn: bool = False, **changes: object) -> MemoryStore:
    """A sound run of 12 ordinals with checkpoints, staleness bound 1, two siblings, batches of two. It was played once,
    and every caller gets a copy."""
    played = _played(seed, multi_turn, tuple(sorted(changes.items())))
    found = copy.copy(played)
    found._objects = dict(played._objects)  # pyright: ignore[reportPrivateUsage]
    return found


@functools.cache
def _played(seed: int, multi_turn: bool, changes: tuple[tuple[str, object], ...]) -> MemoryStore:
    world = World(seed, length=12, multi_turn=multi_turn, limits=limits(**dict(changes)))
    world.filter = lambda rewards: ""
    world.run(chaos=0)
    return world.store


def problems(store: MemoryStore) -> str:
    report = verify(store, RUN)
    assert not report.sound
    return "\n".join(report.problems)
