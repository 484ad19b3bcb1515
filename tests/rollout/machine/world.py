"""One example of the state machine: the control, what each caller believes, and the oracle that follows."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpu.rollout.control import RolloutControl
from gpu.rollout.limits import Limits, Submission
from gpu.rollout.messages import Dispatch, Hold, Identity, Intent, Report
from storage import schema
from storage.buffers import NamedBuffer
from storage.payload import TurnRow
from tests.rollout.building import Bench
from tests.rollout.machine.oracle import Oracle

TALLY: Counter[str] = Counter()
"""What happened in all examples: the machine's own counts and the oracles'."""


@dataclass
class Acting:
    """An answer that an attempt acts on: its boundary, its tokens, the number of requests made. `open` is the request
    whose result is not reported."""

    boundary: int
    call: TurnRow
    cursor: int = 0
    open: Intent | None = None


@dataclass
class Attempt:
    """An attempt in a worker. `samples`: of each turn so far, the output sample it belongs to; `revisions` and
    `exported` of its resources."""

    dispatch: Dispatch
    worker: str
    boundary: int
    samples: list[int]
    revisions: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    exported: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    acting: Acting | None = None

    @property
    def identity(self) -> Identity:
        return self.dispatch.identity


@dataclass
class Held:
    """A hold that its owner believes in, and what was executing when it was acquired."""

    hold: Hold
    token: int
    ttl_s: float
    expires: float
    frontier: set[Identity]


class World:
    """`running` are attempts in workers, `plain` those of evaluations and whose they are, `stale` reports that must not
    count any more, `handed` every attempt that ever went to a worker, `unpublished` sealed ones that are not durable,
    `judged` the groups whose verdict is being worked out. `serving` is the version the engines confirmed."""

    def open(self, bench: Bench) -> None:
        self.bench = bench
        self.running: list[Attempt] = []
        self.stale: list[Report] = []
        self.handed: set[Identity] = set()
        self.buffers: dict[str, dict[str, NamedBuffer]] = {}
        self.commits: list[tuple[int, int, str, str]] = []
        self.serving: int | None = None
        self.begin_again()
        self.serving = 0

    def begin_again(self) -> None:
        """A new incarnation knows nothing but what is durable."""
        self.running, self.serving = [], None
        self.plain: dict[Identity, str] = {}
        self.judged: dict[int, tuple[float, ...]] = {}
        self.unpublished: dict[Identity, int] = {}
        self.holds: dict[int, Held] = {}
        self.epoch = 0
        self.read_again()

    @property
    def control(self) -> RolloutControl:
        return self.bench.control

    @property
    def limits(self) -> Limits:
        return self.bench.limits

    @property
    def live_plain(self) -> int:
        """Attempts of evaluations, taken or not."""
        live = self.control.status()["live_plain"]
        assert isinstance(live, int)
        return live

    @property
    def closed(self) -> bool:
        return bool(self.holds or self.oracle.finished)

    def read_again(self) -> None:
        """A new lineage: what is durable. All but its last record, the new claim, was counted when it was written."""
        self.oracle = Oracle(self.limits)
        *counted, _ = self.bench.writer.history
        for record in counted:
            self.oracle.see(record)
        self.oracle.staleness = self.limits.staleness
        self.seen, self.counted = len(counted), self.oracle.tally.copy()
        self.see()

    def see(self) -> None:
        """Judge what was written since the last look."""
        written = self.bench.writer.history
        for record in written[self.seen :]:
            self.oracle.see(record, held=self.closed)
        if len(written) > self.seen:
            TALLY.update(self.oracle.tally - self.counted)
            self.seen, self.counted = len(written), self.oracle.tally.copy()

    def follow(self) -> None:
        """Judge what was written, then compare every view."""
        self.see()
        self.control.check_conservation()
        self.oracle.compare(self.control.ledger)
        self._compare_permits()

    def _compare_permits(self) -> None:
        ledger, admission = self.control.ledger, self.control.admission
        assert ledger.dispatched <= self.limits.max_completed
        if self.limits.submission is Submission.SAMPLE:
            assert ledger.live + self.live_plain <= self.limits.max_executing
        else:
            assert ledger.state_counts()["generating"] <= self.limits.max_executing
        assert {attempt.identity for attempt in self.running} <= self.oracle.live
        assert len(self.plain) <= self.live_plain
        assert len(self.judged) <= self.limits.max_postprocessing
        executing = self.oracle.live | set(self.unpublished)
        for held in self.holds.values():
            open_ = {identity for identity in admission.still_open(held.hold.hold) if identity.group >= 0}
            assert open_ == held.frontier & executing
        assert admission.is_open == (not self.closed)

    def _buffered(self) -> int:
        """Completed groups whose completion is durable."""
        undurable = self.bench.writer.history[self.bench.writer.durable_seq + 1 :]
        late = {o for record in undurable if isinstance(record, schema.GroupCompleted) for o in record.groups}
        return sum(place == "completed" and o not in late for o, place in self.oracle.places.items())

    def _picture(self) -> tuple[Any, ...]:
        """Everything that a call could change, except the count of ignored results."""
        status, ledger = dict(self.control.status()), self.control.ledger
        del status["ignored"], status["ignored_plain"]
        places = {ordinal: group.state for ordinal, group in ledger.groups.items()}
        return (status, places, self.bench.writer.last_seq, list(ledger.consumed), list(ledger.discarded),
                sorted(ledger.quarantined), ledger.lease, ledger.policy, self.control.admission.epoch)  # fmt: skip

    @contextlib.contextmanager
    def unchanged(self, what: str) -> Iterator[None]:
        before = self._picture()
        yield
        assert self._picture() == before, what
        TALLY[f"unchanged: {what}"] += 1

    def refuse(self, what: str, error: type[Exception], call: Callable[[], object]) -> None:
        with self.unchanged(what), pytest.raises(error):
            call()

    # ------------------------------------------------------------------ storage and death

    def freeze(self, rng: random.Random) -> None:
        self.bench.freeze()

    def land(self, rng: random.Random) -> None:
        if self.bench.frozen is not None:
            self.bench.land()
            self.published()

    def flush(self, rng: random.Random) -> bool:
        if self.bench.writer.last_seq == self.bench.writer.durable_seq:
            return False
        self.bench.flush()
        self.published()
        return True

    def published(self) -> None:
        self.unpublished = {i: seq for i, seq in self.unpublished.items() if seq > self.bench.writer.durable_seq}
        self.follow()
        cap = self.limits.eviction_cap
        assert cap is None or self._buffered() <= cap, "what enters the buffer beyond its cap pushes others out"
