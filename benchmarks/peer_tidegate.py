"""Tidegate in `storage_peers.py`: the journal's writer, the product's records, and its files on a local disk.

A change is the records that a run writes for it (groups dispatched, attempts abandoned and minted again, a block of
token rows stored, rollouts sealed, groups completed), cut into one slot. Blocks above 32 KB are files of their own,
created before the slot, as a worker does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peer_files import Plain
from benchmarks.peer_rows import COLUMNS, EXECUTING, RESERVED, SEALED, SIBLINGS, Base, Change, Payload
from storage import schema
from storage.clock import SystemClock
from storage.history import read_all
from storage.journal import JournalWriter, claim, fold, fold_segment, store_frozen
from storage.ledger import Ledger, RolloutState
from storage.local import LocalStore
from storage.payload import TurnRow, VersionSpan, encode_block
from storage.reader import PayloadReader
from storage.runs import RunPaths, create_run, make_run, open_run
from storage.segment import Row

RUN = "bench"
BASE_BLOCK = 1024
"""Rollouts of a block in the base state."""
_STATES = {RolloutState.WAITING: RESERVED, RolloutState.LIVE: EXECUTING, RolloutState.SEALED: SEALED}


class State(NamedTuple):
    """Everything a run's files hold: the records, the state they fold to, and the decoded token rows."""

    rows: list[Row]
    ledger: Ledger
    turns: list[TurnRow]


class Tidegate:
    def __init__(self, folder: Path) -> None:
        self._store = LocalStore(folder, fsync=True)
        self._blocks = 0

    def create(self, base: Base) -> None:
        info = make_run(run=RUN, created=0.0, num_siblings=SIBLINGS, staleness=1, fingerprints={}, settings={})
        create_run(self._store, info)
        claimed = claim(self._store, RUN, SIBLINGS, owner="bench", writer="w", reason="bench", clock=SystemClock())
        self._incarnation = claimed.incarnation
        self._writer = JournalWriter(RUN, claimed.incarnation, "w", claimed.tail, SystemClock())
        groups, begun = len(base.columns["group"]) // SIBLINGS, int((base.columns["state"] != RESERVED).sum())
        self._writer.append(schema.GroupReserved(0, groups))
        self._writer.append(schema.GroupsDispatched(0, begun // SIBLINGS, SIBLINGS, 0))
        self._cut()
        for start in range(0, len(base.payload.group), BASE_BLOCK):
            self._seal(Payload(*(part[start : start + BASE_BLOCK] for part in base.payload)))
            self._cut()

    def publish(self, change: Change) -> None:
        self._writer.append(schema.GroupsDispatched(change.dispatched.start, len(change.dispatched), SIBLINGS, 0))
        siblings = tuple(range(SIBLINGS))
        for group in change.failing:
            for sibling in siblings:
                self._writer.append(schema.AttemptAbandoned(group, sibling, change.attempt - 1, "environment", ""))
            attempts, boundaries = (change.attempt,) * SIBLINGS, (-1,) * SIBLINGS
            self._writer.append(schema.AttemptsMinted(group, siblings, attempts, boundaries, 0))
        self._seal(change.payload)
        self._cut()

    def _seal(self, payload: Payload) -> None:
        self._blocks += 1
        rows = [_turn(*one) for one in zip(*payload, strict=True)]
        block = encode_block(f"{self._incarnation:06d}-w-{self._blocks:08d}", rows)
        stored = block.stored()
        if not stored.inline:
            self._store.create(RunPaths(RUN).block(block.name), block.data)
        self._writer.append(stored, block.data if stored.inline else None)
        count = len(rows)
        groups = tuple(payload.group.tolist())
        self._writer.append(
            schema.Sealed(
                block.name, groups, tuple(payload.sibling.tolist()), tuple(payload.attempt.tolist()),
                tuple(range(count)), (1,) * count, tuple(row.num_generated for row in rows), (0,) * count,
                tuple(row.reward for row in rows),
            )
        )  # fmt: skip
        self._writer.append(schema.GroupCompleted(tuple(sorted(set(groups)))))

    def _cut(self) -> None:
        frozen = self._writer.freeze()
        store_frozen(self._store, RUN, self._incarnation, frozen)
        self._writer.confirm(frozen)

    def read(self) -> State:
        ledger, rows = Ledger(open_run(self._store, RUN).num_siblings), []
        for segment in read_all(self._store, RUN):
            fold_segment(ledger, segment)
            rows += segment.rows
        reader = PayloadReader(self._store, RUN)
        turns = [turn for name, block in ledger.blocks.items() for turn in reader.block_rows(name, block)]
        return State(rows, ledger, turns)

    def restart(self) -> Any:
        """What a restart reads: the state, and no token rows."""
        return fold(self._store, RUN, open_run(self._store, RUN).num_siblings)

    def content(self, state: State) -> Any:
        return state.rows, state.turns

    def plain(self, state: State) -> Plain:
        table = [
            (group.ordinal, sibling, one.attempt, _STATES[one.state], one.minted_version, one.oldest, one.samples,
             one.tokens, one.reward if one.samples else 0.0, one.failures)
            for group in state.ledger.groups.values() for sibling, one in enumerate(group.rollouts)
        ]  # fmt: skip
        columns = {
            name: np.array(values, kind)
            for (name, kind), values in zip(COLUMNS.items(), zip(*table, strict=True), strict=True)
        }
        return columns, [
            Payload(np.array([turn.group]), np.array([turn.sibling], np.int32), np.array([turn.attempt], np.int32),
                    turn.tokens[None], turn.logprobs[None])
            for turn in state.turns
        ]  # fmt: skip

    def close(self) -> None:
        return None


class Description:
    """Reads run.json, which says what a run is and never changes."""

    def __init__(self, folder: Path) -> None:
        self._store = LocalStore(folder)

    def read(self) -> Any:
        return open_run(self._store, RUN)

    def content(self, state: Any) -> Any:
        return state


def _turn(group: Any, sibling: Any, attempt: Any, tokens: Any, logprobs: Any) -> TurnRow:
    """A rollout of one turn, generated whole by version 0."""
    group, sibling, length = int(group), int(sibling), len(tokens)
    return TurnRow(
        group, sibling, int(attempt), 0, 0, 0, tokens, logprobs, np.ones(length, np.int8),
        (VersionSpan(1, 0, length),), True, (group * 7 + sibling) % 11 / 10, "",
    )  # fmt: skip
