"""A seeded world around the real rollout control and the real journal: virtual clock, memory store, no threads.

Every action of every process is one step; the seed decides which process moves, what fails, what is lost, and when a
process dies. The oracle looks at the control after each step and at storage at the end.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from gpu.rollout.control import RolloutControl
from gpu.rollout.limits import Limits, Order, Submission
from gpu.rollout.messages import Dispatch, Ended, Grant, Outcome, Report, Turn, Wait
from gpu.rollout.results import keep_all, zero_variance
from storage.buffers import NamedBuffer, buffers_digest
from storage.checkpoint import Capture, write_checkpoint
from storage.clock import VirtualClock
from storage.errors import CommitUnknown, RunFenced, StoreUnavailable, TwoOwners
from storage.filesystem import Bytes
from storage.journal import Frozen, JournalWriter, claim, store_frozen
from storage.memory import MemoryStore
from storage.payload import TurnRow, VersionSpan, encode_block
from storage.restore import plan_restore
from storage.runs import create_run, make_run
from storage.verify import Report as VerifyReport
from storage.verify import verify

RUN = "sim"


class FaultyStore(MemoryStore):
    """A memory store whose creates are refused, or applied with a lost reply, as the world's dice say."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__("sim")
        self.rng = rng
        self.faults = True

    def create(self, key: str, data: Bytes) -> None:
        dice = self.rng.random() if self.faults and "/journal/" in key else 1.0
        if dice < 0.05:
            raise StoreUnavailable("503", expected="an answer", action="retry")
        super().create(key, data)
        if dice < 0.12:
            raise CommitUnknown("lost reply", expected="a reply", action="read back")


@dataclass
class Trainer:
    """Deterministic stand-in: its state is a hash chain over what it trained. None = it must be restored."""

    step: int = 0
    digest: str = ""
    last: tuple[int, int, str] = (0, 0, "")
    alive: bool = True

    def train(self, grant_step: int, lease: int, groups: tuple[int, ...], expected: str) -> str:
        if self.last[:2] == (grant_step, lease):
            return self.last[2]
        assert (self.step + 1, self.digest) == (grant_step, expected), "compare-and-set of the trainer's state"
        self.step, self.digest = grant_step, state_of(self.digest, groups)
        self.last = (grant_step, lease, self.digest)
        return self.digest


def state_of(previous: str, groups: tuple[int, ...]) -> str:
    buffers, meta = checkpoint_parts(hashlib.sha256(f"{previous}:{groups}".encode()).hexdigest())
    return buffers_digest(buffers, meta)


def checkpoint_parts(seed: str) -> tuple[dict[str, NamedBuffer], str]:
    data = np.frombuffer(bytes.fromhex(seed), np.uint8)
    return {"weights/w": NamedBuffer("U8", (len(data),), data)}, "{}"


@dataclass
class Running:
    dispatch: Dispatch
    turn: int = 0
    position: int = 0
    oldest: int = 10**9
    boundary: int = 0


@dataclass
class Incarnation:
    """A manager process: control, writer, and the segment in flight."""

    control: RolloutControl
    writer: JournalWriter
    frozen: Frozen | None = None


@dataclass
class World:
    seed: int
    length: int = 16
    kills: bool = True
    multi_turn: bool = True
    limits: Limits | None = None
    trained_staleness: list[int] = field(default_factory=list)
    identities: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.clock = VirtualClock()
        self.store = FaultyStore(self.rng)
        self.limits = self.limits or self._draw_limits()
        self.filter = self.rng.choice([keep_all, keep_all, zero_variance])
        self.blocks = 0
        self.faults = True
        self.workers: dict[str, list[Running]] = {}
        self.reports: list[Report] = []
        self.stale_reports: list[Report] = []
        self.zombies: list[tuple[int, Frozen]] = []
        self.trainer = Trainer()
        self.driver: Iterator[None] | None = None
        self.manager: Incarnation | None = None
        self.engine_version: int | None = None
        self.done = False
        self.events: list[str] = []
        self.issued: set[int] = set()
        create_run(self.store, make_run(run=RUN, created=0.0, num_siblings=self.limits.num_siblings,
                   staleness=self.limits.staleness, fingerprints={}, settings={}))  # fmt: skip
        self._claim()

    def _draw_limits(self) -> Limits:
        rng = self.rng
        n, batch = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        staleness = rng.choice([None, 0, 1, 2, 3])
        submission = rng.choice(list(Submission))
        backoff = rng.choice([0, 1, 2])
        completed = batch + backoff + rng.choice([0, 1, 4])
        return Limits(
            num_siblings=n, batch=batch, staleness=staleness, submission=submission,
            order=rng.choice(list(Order)) if staleness is not None else Order.FIFO,
            max_executing=(n if submission is Submission.SAMPLE else 1) * rng.choice([1, 2, 4]) + rng.choice([0, 1]),
            max_retained=completed + rng.choice([0, 2]), max_completed=completed,
            max_hot_bytes=rng.choice([4096, 1 << 20]),
            eviction_cap=rng.choice([None, None, batch + 1]), prefetch=0, max_backoff=backoff,
            max_attempts=rng.choice([2, 3, 6]), max_losses=50, backoff_base_s=0.5, backoff_max_s=4.0,
            undurable_age_s=5.0, undurable_bytes=1 << 20, discard_end_of_source=rng.random() < 0.2,
        )  # fmt: skip

    # ------------------------------------------------------------------ manager

    def _claim(self) -> None:
        name = f"m{len(self.zombies)}-{self.rng.random()}"
        self.store.faults = False  # a claimant retries until it knows; the store's own faults are exercised on appends
        claimed = claim(self.store, RUN, self.limits.num_siblings, owner="sim", writer=name, reason="start",
                        clock=self.clock)  # fmt: skip
        self.store.faults = self.faults
        writer = JournalWriter(RUN, claimed.incarnation, name, claimed.tail, self.clock)
        control = RolloutControl(claimed.ledger, writer, self.limits, self.clock, length=self.length,
                                 group_filter=self.filter)  # fmt: skip
        self.manager = Incarnation(control, writer)
        self.engine_version = None
        self.driver = None

    def flush(self) -> None:
        """One try to make the tail durable."""
        manager = self.manager
        if manager.frozen is None:
            if manager.writer.last_seq == manager.writer.durable_seq:
                return
            manager.frozen = manager.writer.freeze()
        try:
            store_frozen(self.store, RUN, manager.control.ledger.incarnation, manager.frozen)
        except (StoreUnavailable, CommitUnknown):
            return
        manager.writer.confirm(manager.frozen)
        manager.control.ledger.placed(manager.frozen.slot, manager.frozen.last)
        manager.frozen = None
        manager.control.durable(manager.writer.durable_seq)

    def kill_manager(self) -> None:
        """SIGKILL: the undurable tail is gone; what was in flight may still be tried by a zombie."""
        self.events.append("kill manager")
        if self.manager.frozen is not None:
            self.zombies.append((self.manager.control.ledger.incarnation, self.manager.frozen))
        elif self.manager.writer.last_seq > self.manager.writer.durable_seq:
            self.zombies.append((self.manager.control.ledger.incarnation, self.manager.writer.freeze()))
        self.stale_reports += self.reports
        self.reports = []
        self.workers = {}
        self.trainer = Trainer(alive=False)
        self._claim()

    def zombie(self) -> None:
        """A stopped manager continues: its write must be refused, or be bytes that were stored before its fence."""
        incarnation, frozen = self.rng.choice(self.zombies)
        try:
            store_frozen(self.store, RUN, incarnation, frozen)
        except (RunFenced, TwoOwners):
            return
        except (StoreUnavailable, CommitUnknown):
            return

    # ------------------------------------------------------------------ workers

    def work(self) -> None:
        """One worker takes work, advances one rollout, or says what ended."""
        if len(self.workers) < 2:
            self.workers[f"w{self.rng.random()}"] = []
        name = self.rng.choice(list(self.workers))
        running = self.workers[name]
        if not running or self.rng.random() < 0.3:
            for dispatch in self.manager.control.take(name, self.rng.randint(1, 4)):
                assert dispatch.identity not in self.identities, "an attempt is dispatched once"
                self.identities.add(dispatch.identity)
                running.append(self._start(dispatch))
            return
        moved = self.rng.sample(running, self.rng.randint(1, len(running)))
        self.reports.append(self._advance(name, running, moved))

    def _start(self, dispatch: Dispatch) -> Running:
        run = Running(dispatch, boundary=dispatch.boundary)
        if dispatch.continuation is not None:
            run.turn = dispatch.continuation.turn + 1
            run.position = int(dispatch.continuation.state)
        return run

    def _advance(self, name: str, running: list[Running], moved: list[Running]) -> Report:
        rows: list[TurnRow] = []
        turns: list[Turn] = []
        ended: list[Ended] = []
        for run in moved:
            dice = self.rng.random()
            if self.faults and dice < 0.2:
                running.remove(run)
                outcome = self.rng.choice([Outcome.FAILED, Outcome.ABORTED, Outcome.ENGINE_LOST, Outcome.MALFORMED])
                ended.append(Ended(run.dispatch.identity, outcome, detail="dice"))
                continue
            version = self.engine_version if self.engine_version is not None else run.dispatch.version
            version = max(version, run.dispatch.version)
            if self.multi_turn and dice < 0.4 and run.turn < 3:
                rows.append(self._row(run, version, done=False))
                turns.append(Turn(run.dispatch.identity, run.boundary, run.turn, len(rows) - 1, version,
                                  str(run.position + 2).encode()))  # fmt: skip
                run.turn, run.position, run.boundary = run.turn + 1, run.position + 2, run.boundary + 1
                continue
            running.remove(run)
            row = self._row(run, version, done=True)
            rows.append(row)
            ended.append(Ended(run.dispatch.identity, Outcome.SEALED, len(rows) - 1, 1, version, row.reward))
        self.blocks += 1
        incarnation = self.manager.control.ledger.incarnation
        block = encode_block(f"{incarnation}-{name}-{self.blocks}", rows)
        return Report(name, block.name, block.digest, len(block.data), block.data, tuple(turns), tuple(ended))

    def _row(self, run: Running, version: int, *, done: bool) -> TurnRow:
        identity = run.dispatch.identity
        return TurnRow(
            identity.group, identity.sibling, identity.attempt, run.turn, run.position,
            np.array([1, 2], np.int32), np.array([0, -0.5], np.float32), np.array([0, 1], np.int8),
            (VersionSpan(identity.incarnation, version, 1),), done, float(self.rng.random() < 0.5), "",
        )  # fmt: skip

    def deliver(self) -> None:
        """A report arrives: in any order, perhaps twice, perhaps of a dead incarnation."""
        if self.faults and self.stale_reports and self.rng.random() < 0.3:
            accepted = self.manager.control.report(self.rng.choice(self.stale_reports))
            assert accepted.accepted == 0, "a late result settles nothing"
            return
        if not self.reports:
            return
        report = self.reports.pop(self.rng.randrange(len(self.reports)) if self._unordered() else 0)
        self.manager.control.report(report)
        if self.faults and self.rng.random() < 0.2:
            again = self.manager.control.report(report)
            assert again.accepted == 0, "an identical repeat is a no-op"

    def _unordered(self) -> bool:
        return not self.multi_turn

    def lose_worker(self) -> None:
        if self.workers:
            name = self.rng.choice(list(self.workers))
            del self.workers[name]
            self.stale_reports += [report for report in self.reports if report.worker == name]
            self.reports = [report for report in self.reports if report.worker != name]
            self.manager.control.lose_worker(name)

    # ------------------------------------------------------------------ driver and trainer

    def drive(self) -> None:
        if self.driver is None:
            self.driver = self._drive()
        try:
            next(self.driver)
        except StopIteration:
            self.done = True

    def _durable(self, seq: int) -> Iterator[None]:
        while self.manager.writer.durable_seq < seq:
            self.manager.writer.want(seq)
            yield

    def _drive(self) -> Iterator[None]:
        """The driver's loop; it may be dropped at any yield and started again."""
        control = self.manager.control
        yield from self._durable(self.manager.writer.last_seq)
        if control.ledger.finished:
            return
        if not self.trainer.alive:
            self._restore()
        yield
        if self.trainer.step == control.ledger.step:  # else an uncommitted step of a dead driver is in it: lease first
            yield from self._publish(control)
        while True:
            grant = control.try_lease()
            if grant is None:
                yield from self._durable(control.finish("source exhausted"))
                return
            if isinstance(grant, Wait):
                yield
                continue
            self._check_lease(control, grant)
            yield
            groups = tuple(group.ordinal for group in grant.lease.groups)
            if (
                self.faults
                and self.rng.random() < 0.05
                and self.trainer.last[:2] != (grant.lease.step, grant.lease.lease)
            ):
                control.leasing.roll_back(grant.lease.lease, "dice")
                continue
            digest = self.trainer.train(grant.lease.step, grant.lease.lease, groups, control.ledger.state_digest)
            yield
            for _ in range(1 + (self.faults and self.rng.random() < 0.3)):
                seq = control.leasing.commit(grant.lease.lease, grant.lease.step, digest, digest, {})
            yield from self._durable(seq)
            yield from self._publish(control)
            if self.rng.random() < 0.3:
                yield from self._checkpoint(control)

    def _publish(self, control: RolloutControl) -> Iterator[None]:
        hold = control.acquire("driver", "update_weights", 1, ttl_s=30.0)
        yield
        if self.rng.random() < 0.3:
            while control.admission.still_open(hold.hold):
                yield
        yield from self._durable(control.publish_policy(self.trainer.digest))
        self.engine_version = control.ledger.step
        control.serve(control.ledger.step)
        yield
        control.admission.release(hold.hold)

    def _checkpoint(self, control: RolloutControl) -> Iterator[None]:
        step, digest = self.trainer.step, self.trainer.digest
        if step == 0 or control.ledger.step != step:
            return
        seed = hashlib.sha256(f"{self._before(step)}:{self._groups(step)}".encode()).hexdigest()
        buffers, meta = checkpoint_parts(seed)
        self.store.faults = False
        written = write_checkpoint(
            self.store, RUN, control.ledger.incarnation, Capture(step, digest, digest, meta, buffers)
        )
        self.store.faults = self.faults
        yield
        yield from self._durable(control.publish_checkpoint(step, *written))

    def _groups(self, step: int) -> tuple[int, ...]:
        return tuple(group.ordinal for group in self.manager.control.ledger.steps[step].lease.groups)

    def _before(self, step: int) -> str:
        steps = self.manager.control.ledger.steps
        if step - 1 in steps:
            return steps[step - 1].state_digest
        return self.chain[step - 1]

    def _restore(self) -> None:
        """Checkpoint plus redo, as a real trainer does it."""
        control = self.manager.control
        plan = plan_restore(control.ledger, RUN)
        base = plan.checkpoints[0].step if plan.checkpoints else 0
        trainer = Trainer(step=base, digest=self.chain[base])
        for step in range(base + 1, plan.step + 1):
            lease = plan.steps[step].lease
            digest = trainer.train(step, lease.lease, tuple(group.ordinal for group in lease.groups), trainer.digest)
            assert control.redone(step, digest, digest), "a redone step reaches the same state"
        assert trainer.digest == control.ledger.state_digest
        self.trainer = trainer

    @property
    def chain(self) -> dict[int, str]:
        """The digest after each committed step, recomputed from the journal (what the checkpoint object would hold)."""
        from storage.journal import read_journal
        from storage.schema import StepCommitted

        found = {0: ""}
        for segment in read_journal(self.store, RUN):
            for row in segment.rows:
                if isinstance(row.record, StepCommitted):
                    found[row.record.step] = row.record.state_digest
        return found

    # ------------------------------------------------------------------ oracle

    def _check_lease(self, control: RolloutControl, grant: Grant) -> None:
        assert control.admission.is_open or grant.lease.lease in self.issued, "no lease while a hold is up"
        self.issued.add(grant.lease.lease)
        for group in grant.lease.groups:
            staleness = grant.lease.version - group.oldest
            self.trained_staleness.append(staleness)
            assert self.limits.staleness is None or 0 <= staleness <= self.limits.staleness

    def check(self) -> None:
        control = self.manager.control
        control.check_conservation()
        ledger, limits = control.ledger, self.limits
        live = sum(group.num_live for group in ledger.groups.values())
        assert ledger.live == live == len(control.scheduler.active)
        assert ledger.dispatched == sum(group.dispatched for group in ledger.groups.values()) <= limits.max_completed
        assert ledger.retained <= limits.max_retained
        if limits.submission is Submission.SAMPLE:
            assert ledger.live <= limits.max_executing
        counted: dict[int, int] = {}
        for group in ledger.groups.values():
            if group.oldest >= 0:
                counted[group.oldest] = counted.get(group.oldest, 0) + 1
        assert dict(ledger.oldest_counts) == counted
        users: dict[str, int] = {}
        for group in ledger.groups.values():
            for rollout in group.rollouts:
                for name, _ in rollout.rows:
                    users[name] = users.get(name, 0) + 1
        assert {name: block.users for name, block in ledger.blocks.items() if block.users} == users

    def step(self) -> None:
        dice = self.rng.random()
        if dice < 0.02 and self.faults and self.kills:
            self.kill_manager()
        elif dice < 0.04 and self.faults and self.zombies:
            self.zombie()
        elif dice < 0.06 and self.faults:
            self.driver = None  # the driver dies; the trainer lives on and keeps its last result
            self.manager.control.admission.release_token(1)
        elif dice < 0.08 and self.faults:
            self.lose_worker()
        elif dice < 0.35:
            self.work()
        elif dice < 0.55:
            self.deliver()
        elif dice < 0.75:
            self.flush()
        else:
            self.drive()
        self.clock.advance(self.rng.random() * 0.3)
        self.manager.control.tick()
        self.check()

    def run(self, chaos: int, limit: int = 20_000) -> VerifyReport:
        """`chaos` steps with faults, then without until the end; more than `limit` steps mean no progress."""
        for count in range(limit):
            if count == chaos:
                self.faults = self.store.faults = False
            if self.done:
                return self._audit()
            self.step()
        raise AssertionError(f"no progress: {self.manager.control.status()}")

    def _audit(self) -> VerifyReport:
        while self.manager.writer.durable_seq < self.manager.writer.last_seq:
            self.flush()
        report = verify(self.store, RUN)
        assert report.sound, report.problems
        assert report.consumed + report.discarded + report.quarantined == report.handed_out == self.length
        assert report.unsettled == report.lost == report.trained_twice == 0
        return report
