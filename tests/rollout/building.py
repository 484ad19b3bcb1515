"""Small parts for tests of rollout control: limits with plain numbers, and a control on a memory store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu.rollout.control import RolloutControl
from gpu.rollout.evaluation import Suite
from gpu.rollout.limits import Limits, Order, Submission
from gpu.rollout.messages import Dispatch, Ended, Grant, Outcome, PlainEnded, Report, Turn, Wait
from gpu.rollout.results import GroupFilter, keep_all
from gpu.rollout.topology import NO_RESOURCES, Topology
from storage.clock import VirtualClock
from storage.filesystem import Store
from storage.history import read_all
from storage.journal import Frozen, JournalWriter, claim, rows_of, store_frozen
from storage.memory import MemoryStore
from storage.payload import TurnRow, VersionSpan, encode_block
from storage.retention import Retention
from storage.runs import create_run, make_run
from storage.schema import AttemptAbandoned, Record

RUN = "r"
RETENTION = Retention(last=3, every=0, payload="keep", pin_s=60.0)


def limits(**changes: object) -> Limits:
    values: dict[str, object] = {
        "num_siblings": 2, "batch": 2, "staleness": 1, "submission": Submission.SAMPLE, "order": Order.FIFO,
        "max_executing": 8, "max_retained": 8, "max_completed": 6, "max_hot_bytes": 1 << 20, "eviction_cap": None,
        "prefetch": 0, "max_backoff": 2, "max_postprocessing": 8, "max_attempts": 3, "max_losses": 10,
        "backoff_base_s": 1.0, "backoff_max_s": 8.0, "undurable_age_s": 5.0, "undurable_bytes": 1 << 20,
        "discard_end_of_source": False,
    }  # fmt: skip
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


class Logged(JournalWriter):
    """Also adds each record to `history`, which begins with what was durable when the incarnation began."""

    history: list[Record]

    def append(self, record: Record, blob: bytes | None = None) -> int:
        self.history.append(record)
        return super().append(record, blob)


class Bench:
    """A control with its store and clock, and shorthand for what workers, engines and the trainer do.

    `frozen` is the segment that was cut and is not confirmed yet.
    """

    def __init__(
        self,
        *,
        length: int | None = None,
        group_filter: GroupFilter = keep_all,
        store: Store | None = None,
        created: bool = False,
        suites: Sequence[Suite] = (),
        retention: Retention = RETENTION,
        topology: Topology = NO_RESOURCES,
        **changes: object,
    ) -> None:
        self.suites, self.retention, self.topology = suites, retention, topology
        self.limits = limits(**changes)
        self.clock = VirtualClock()
        self.store = store or MemoryStore()
        self.length, self.group_filter = length, group_filter
        self.judged_outside = False
        self.blocks = 0
        if not created:
            create_run(self.store, make_run(run=RUN, created=0.0, num_siblings=self.limits.num_siblings,
                       staleness=self.limits.staleness, fingerprints={}, settings={}))  # fmt: skip
        self.restart()
        self.activate()

    def restart(self) -> None:
        """A new incarnation from what is durable."""
        claimed = claim(self.store, RUN, self.limits.num_siblings, owner="t", writer=f"w{self.clock.monotonic()}",
                        reason="test", clock=self.clock)  # fmt: skip
        self.clock.advance(0.001)
        self.writer = Logged(RUN, claimed.incarnation, f"w{claimed.incarnation}", claimed.tail, self.clock)
        self.writer.history = [row.record for row in rows_of(read_all(self.store, RUN))]
        self.frozen: Frozen | None = None
        self.control = RolloutControl(
            claimed.ledger, self.writer, self.limits, self.clock, length=self.length, group_filter=self.group_filter,
            judged_outside=self.judged_outside, suites=self.suites, retention=self.retention,
            topology=self.topology,
        )  # fmt: skip

    def judge_outside(self) -> None:
        """From a new incarnation on, groups wait for verdicts that the test brings in."""
        self.judged_outside = True
        self.restart()
        self.activate()

    def activate(self) -> None:
        self.control.publish_policy(self.digest())
        self.control.serve(self.control.ledger.step)

    def digest(self) -> str:
        return f"weights-{self.control.ledger.step}"

    def freeze(self) -> None:
        """Cut the next segment, if there is anything to cut and none is under way."""
        if self.frozen is None and self.writer.last_seq > self.writer.durable_seq:
            self.frozen = self.writer.freeze()

    def land(self, *, confirmed: bool = True) -> None:
        """The segment under way is stored; whoever waits for it learns that only when `confirmed`."""
        frozen = self.frozen
        if frozen is None:
            return
        store_frozen(self.store, RUN, self.control.ledger.incarnation, frozen)
        if not confirmed:
            return
        self.frozen = None
        self.writer.confirm(frozen)
        self.control.ledger.placed(frozen.slot, frozen.last)
        self.control.durable(frozen.last)

    def flush(self) -> None:
        """Everything becomes durable."""
        while self.writer.last_seq > self.writer.durable_seq:
            self.freeze()
            self.land()

    def rows(self, dispatches: list[Dispatch], reward: float, version: int | None = None) -> list[TurnRow]:
        """The last turns of attempts."""
        return [
            self.row(d, d.continuation.at.turn + 1 if d.continuation else 0, d.version if version is None else version,
                     reward)
            for d in dispatches
        ]  # fmt: skip

    def row(self, dispatch: Dispatch, turn: int, version: int, reward: float, *, done: bool = True) -> TurnRow:
        """A turn of one prompt token and one generated token."""
        identity = dispatch.identity
        return TurnRow(
            identity.group, identity.sibling, identity.attempt, turn, 0, 2 * turn, np.array([1, 2], np.int32),
            np.array([0, -0.5], np.float32), np.array([0, 1], np.int8),
            (VersionSpan(identity.incarnation, version, 1),), done, reward, "",
        )  # fmt: skip

    def report_of(self, dispatches: list[Dispatch], reward: float = 1.0, version: int | None = None) -> Report:
        self.blocks += 1
        block = encode_block(
            f"{self.control.ledger.incarnation}-w-{self.blocks}", self.rows(dispatches, reward, version)
        )
        ended = tuple(
            Ended(d.identity, Outcome.SEALED, row, 1, d.version if version is None else version, reward)
            for row, d in enumerate(dispatches)
        )
        return Report("w", block.name, block.digest, len(block.data), block.data, (), ended)

    def turn_of(self, dispatch: Dispatch, turn: int, boundary: int) -> Report:
        self.blocks += 1
        row = self.row(dispatch, turn, dispatch.version, 0.0, done=False)
        block = encode_block(f"{self.control.ledger.incarnation}-w-{self.blocks}", [row])
        made = Turn(dispatch.identity, boundary, turn, 0, 0, 2 * turn, 2, dispatch.version, b"state")
        return Report("w", block.name, block.digest, len(block.data), block.data, (made,), ())

    def seal(self, dispatches: list[Dispatch], reward: float = 1.0, version: int | None = None) -> None:
        """Finish attempts and make that durable."""
        self.control.report(self.report_of(dispatches, reward, version))
        self.flush()

    def fail(self, dispatch: Dispatch, outcome: Outcome = Outcome.FAILED) -> None:
        self.control.report(Report("w", "", "", 0, None, (), (Ended(dispatch.identity, outcome, detail="boom"),)))

    def abandoned(self) -> list[AttemptAbandoned]:
        """The attempts that ended without a result, as the journal says."""
        self.flush()
        records = [row.record for segment in read_all(self.store, RUN) for row in segment.rows]
        return [record for record in records if isinstance(record, AttemptAbandoned)]

    def end_plain(
        self, dispatches: list[Dispatch], outcome: Outcome = Outcome.SEALED, reward: float = 1.0, tokens: int = 2
    ) -> int:
        """End plain attempts, with tokens of the version they were dispatched at; returns how many counted."""
        ended = tuple(PlainEnded(d.identity, outcome, tokens, d.version, d.version, reward) for d in dispatches)
        return self.control.report(Report("w", "", "", 0, None, (), (), ended)).accepted

    def train(self) -> tuple[int, ...]:
        """One whole step; returns its groups."""
        return self.commit(self.grant())

    def grant(self) -> Grant:
        """A lease, which must be possible."""
        grant = self.control.try_lease()
        assert isinstance(grant, Grant), grant
        return grant

    def commit(self, grant: Grant) -> tuple[int, ...]:
        """The step of a lease happened, and its weights are served."""
        step = grant.lease.step
        self.control.leasing.commit(grant.lease.lease, step, f"state-{step}", f"weights-{step}", {})
        self.flush()
        self.activate()
        return ordinals(grant)

    def waits(self) -> Wait:
        """What the trainer waits for."""
        found = self.control.try_lease()
        assert isinstance(found, Wait), found
        return found

    def place(self, ordinal: int) -> str:
        """Where an ordinal is."""
        ledger = self.control.ledger
        if ordinal in ledger.groups:
            return ledger.groups[ordinal].state.value
        settled = {"consumed": ledger.consumed, "discarded": ledger.discarded, "quarantined": ledger.quarantined}
        return next((where for where, there in settled.items() if ordinal in there), "nowhere")

    def counts(self, prefix: str) -> dict[str, int]:
        """The ledger's counts whose names begin so, without the prefix."""
        counts = self.control.ledger.counts
        return {name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix) and n}


def ordinals(grant: Grant) -> tuple[int, ...]:
    return tuple(group.ordinal for group in grant.lease.groups)
