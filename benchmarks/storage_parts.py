"""A run written by hand for the storage benchmark: the product's records and the ledger they add up to, no control."""

from __future__ import annotations

import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from storage import schema
from storage.archivist import Archivist
from storage.clock import SystemClock
from storage.filesystem import Bytes, Store
from storage.journal import JournalWriter, claim, store_frozen
from storage.ledger import Ledger
from storage.opening import open_store
from storage.payload import TurnRow, VersionSpan, encode_block
from storage.retention import Retention, plan
from storage.retry import create_until_known
from storage.runs import RunPaths, create_run, make_run
from storage.transitions import apply

RUN = "bench"
SIBLINGS = 8
TOKENS = 512
SNAPSHOT_EVERY = 64
RETENTION = Retention(last=3, every=0, payload="keep", pin_s=86400.0)
"""As a run has it when nothing else is said."""
_archivists: dict[str, Archivist] = {}


def archive(url: str, slot: int) -> schema.LedgerSnapshot:
    """In a process of its own, as in the product."""
    one = _archivists.setdefault(url, Archivist(open_store(url), RUN, SIBLINGS))
    return one.snapshot(slot)


class Far:
    """A store whose every write takes `seconds` longer."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def create(self, key: str, data: Bytes) -> None:
        time.sleep(self._seconds)
        self._store.create(key, data)


class Append(NamedTuple):
    """Seconds from finished rollouts to their durable record, and the sizes of the two objects that were created."""

    seconds: float
    payload: int
    segment: int


class HandWritten:
    """`ledger` holds `unsettled` groups with live attempts; each `append` changes at least 256 rows and keeps that
    number. With `archived` the ledger is snapshot beside it."""

    def __init__(self, store: Store, *, archived: bool = False) -> None:
        self.store, self.clock = store, SystemClock()
        info = make_run(run=RUN, created=0.0, num_siblings=SIBLINGS, staleness=None, fingerprints={}, settings={})
        create_run(store, info)
        claimed = claim(store, RUN, SIBLINGS, owner="bench", writer="w", reason="start", clock=self.clock)
        self.ledger: Ledger = claimed.ledger
        self.journal = JournalWriter(RUN, claimed.incarnation, "w", claimed.tail, self.clock)
        self._pool = ProcessPoolExecutor(1, get_context("spawn")) if archived else None
        self._archiving: Future[schema.LedgerSnapshot] | None = None
        self._blocks = 0
        self.snapshots = 0
        self.put(schema.PolicyPublished(1, 0, "weights-0", ""))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    # ------------------------------------------------------------------ records

    def put(self, *records: schema.Record) -> None:
        for record in records:
            apply(self.ledger, self.ledger.next_seq, record)
            self.journal.append(record)

    def flush(self) -> int:
        """Everything is durable; returns the size of the segment."""
        frozen = self.journal.freeze()
        store_frozen(self.store, RUN, 1, frozen)
        self.journal.confirm(frozen)
        self.ledger.placed(frozen.slot, frozen.last)
        if self._pool is not None:
            self._archive(self._pool)
        return len(frozen.data)

    def _archive(self, pool: ProcessPoolExecutor) -> None:
        newest = self.ledger.snapshot.slot if self.ledger.snapshot else 0
        if self._archiving is None and self.journal.slot - newest >= SNAPSHOT_EVERY:
            self._archiving = pool.submit(archive, self.store.url, self.journal.slot)
        elif self._archiving is not None and self._archiving.done():
            self.put(self._archiving.result())
            self._archiving, self.snapshots = None, self.snapshots + 1

    def dispatch(self, groups: int) -> range:
        first = self.ledger.frontier
        self.put(
            schema.GroupReserved(first, groups),
            schema.GroupsDispatched(first, groups, SIBLINGS, self.ledger.step),
        )
        return range(first, first + groups)

    # ------------------------------------------------------------------ what is measured

    def append(self, first: int) -> Append:
        """32 rollouts of four groups from `first` are sealed with 512 tokens each, and the groups complete; 14 groups
        that are live end, and 18 begin: 320 rows. The payload is an object of its own, as the worker writes it."""
        rows = [token_row(group, sibling) for group in range(first, first + 4) for sibling in range(SIBLINGS)]
        started = time.perf_counter()
        self._blocks += 1
        block = encode_block(f"000001-w-{self._blocks:08d}", rows)
        create_until_known(self.store, RunPaths(RUN).block(block.name), block.data, time.sleep)
        self.put(block.stored(), sealed(block.name, rows), schema.GroupCompleted(tuple(range(first, first + 4))))
        self.put(schema.GroupDiscarded(tuple(range(first, first + 18)), "bench"))
        self.dispatch(18)
        size = self.flush()
        return Append(time.perf_counter() - started, len(block.data), size)

    def train(self, batch: int, checkpoint_every: int = 10) -> None:
        """A step of fresh groups, from dispatch to commit: what a settled group leaves behind."""
        groups = tuple(self.dispatch(batch))
        step = self.ledger.step + 1
        for start in range(0, batch, 16):
            self._blocks += 1
            name = f"000001-w-{self._blocks:08d}"
            rows = [(group, sibling) for group in groups[start : start + 16] for sibling in range(SIBLINGS)]
            self.put(schema.PayloadStored(name, "0" * 64, 0, inline=False), seal(name, rows))
        self.put(
            schema.GroupCompleted(groups),
            schema.LeaseIssued(self.ledger.next_lease, step, groups, step - 1, final=False),
            schema.StepCommitted(step, self.ledger.next_lease, f"state-{step}", f"weights-{step}", {"loss": 0.0}),
        )
        parent = self.ledger.policy.digest if self.ledger.policy else ""
        self.put(schema.PolicyPublished(1, step, f"weights-{step}", parent))
        if step % checkpoint_every == 0:
            position = self.ledger.steps[step].seq
            self.put(schema.CheckpointPublished(step, position, f"{step}.json", "0" * 64, 1, 1))
            planned = plan(self.ledger, RETENTION)
            if planned is not None:
                self.put(planned, schema.Deleted(planned.manifests, planned.blocks))


def token_row(group: int, sibling: int) -> TurnRow:
    mask = np.ones(TOKENS, np.int8)
    tokens = np.arange(TOKENS, dtype=np.int32) + group
    logprobs = np.linspace(-3.0, 0.0, TOKENS, dtype=np.float32)
    span = (VersionSpan(1, 0, TOKENS),)
    return TurnRow(group, sibling, 0, 0, 0, 0, tokens, logprobs, mask, span, True, 1.0, "")


def sealed(name: str, rows: list[TurnRow]) -> schema.Sealed:
    return seal(name, [(row.group, row.sibling) for row in rows])


def seal(name: str, rows: list[tuple[int, int]]) -> schema.Sealed:
    groups, siblings = zip(*rows, strict=True)
    n = len(rows)
    ones = (1,) * n
    return schema.Sealed(name, groups, siblings, (0,) * n, tuple(range(n)), ones, (TOKENS,) * n, (0,) * n, (1.0,) * n)


def bare(store: Store, number: int, sizes: tuple[int, ...]) -> float:
    """Seconds of nothing but creating objects of such sizes, one after the other."""
    bodies = [bytes(size) for size in sizes]
    started = time.perf_counter()
    for part, body in enumerate(bodies):
        store.create(f"raw/{number:08d}-{part}", body)
    return time.perf_counter() - started
