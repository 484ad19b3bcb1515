"""A seeded world around the real rollout control and the real journal: virtual clock, memory store, no threads.

Every action of every process is one step; the seed decides which process moves, what fails, what is lost, and when a
process dies. The oracle looks at the control after each step and at storage at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from gpu.rollout.control import RolloutControl
from gpu.rollout.limits import Limits
from gpu.rollout.results import keep_all, zero_variance
from storage.archivist import Archivist
from storage.clock import VirtualClock
from storage.errors import RunFenced
from storage.retention import Deletion, Doomed, Retention
from storage.runs import create_run, make_run
from storage.verify import Report as VerifyReport
from storage.verify import verify
from tests.simulation import memo, oracle
from tests.simulation.actors import Actors
from tests.simulation.alterations import Alterations
from tests.simulation.drivers import Drivers
from tests.simulation.exams import Exams
from tests.simulation.incarnations import RUN, Incarnation, Incarnations
from tests.simulation.judges import Judges
from tests.simulation.shapes import PLAIN, Shape, draw_limits
from tests.simulation.store import SimStore
from tests.simulation.workers import Workers

__all__ = ["RUN", "World", "play"]

LIMIT = 20_000
"""More steps than any world needs."""


class World:
    """One run from its first claim to its proof. `tally` counts what happened; `claiming` while no manager is owner.

    `faulty_start`: already the first claimants may race, fail and die.
    """

    def __init__(
        self,
        seed: int,
        length: int = 16,
        *,
        multi_turn: bool = True,
        limits: Limits | None = None,
        shape: Shape = PLAIN,
        faulty_start: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.length, self.multi_turn, self.shape = length, multi_turn, shape
        self.clock = VirtualClock()
        self.store = SimStore(self.rng)
        self.faults = self.store.faults = faulty_start
        self.limits = limits or draw_limits(self.rng, shape)
        filters = [keep_all, keep_all, zero_variance if self.limits.num_siblings > 1 else keep_all]
        self.filter: Callable[[Sequence[float]], str] = self.rng.choice(filters)
        self.requeues = random.Random(f"redo {seed}").random() < 0.4
        self.tally: Counter[str] = Counter(worlds=1)
        self.engine_version: int | None = None
        self.done = False
        self.idle: list[Callable[[], bool]] = []
        self.archivist = Archivist(self.store, RUN, self.limits.num_siblings)
        self.snapshot_every = self.rng.choice(shape.snapshot_every)
        self.archived = -1
        dice = random.Random(f"retention {seed}")
        self.retention = Retention(
            dice.choice([2, 3]), dice.choice([0, 0, 2, 3]), dice.choice(["keep", "needed"]), 60.0
        )
        self._recorded = -1
        create_run(
            self.store,
            make_run(
                run=RUN,
                created=0.0,
                num_siblings=self.limits.num_siblings,
                staleness=self.limits.staleness,
                fingerprints={},
                settings={},
            ),
        )
        self.judges, self.exams, self.actors = Judges(self, seed), Exams(self, seed), Actors(self, seed)
        self.workers, self.drivers = Workers(self), Drivers(self)
        self.incarnations, self.alterations = Incarnations(self), Alterations(self)
        self.claiming = True
        with memo.remembering():
            self.manager = self.incarnations.start(None)
        self.claiming = False
        self.faults = self.store.faults = True

    @property
    def control(self) -> RolloutControl:
        """The control of the manager that owns the run."""
        return self.manager.control

    def flush(self) -> bool:
        try:
            return self.incarnations.flush(self.manager, due=True)
        except RunFenced:
            self.incarnations.check_fenced(self.manager)
            self.tally["owners_fenced"] += 1
            self._succeed(self.manager)
            return True

    def archive(self) -> bool:
        """A due ledger snapshot, now or after a while in which the archivist slept; its record may never come."""
        slot, newest = self.manager.writer.slot, self.control.ledger.snapshot
        due = slot - (newest.slot if newest else 0) >= self.snapshot_every
        if not due or self.control.ledger.finished or self.archived > self.manager.writer.durable_seq:
            return False
        if self.rng.random() < 0.1:
            self.archivist = Archivist(self.store, RUN, self.limits.num_siblings)
        written = self.archivist.snapshot(slot)
        self.tally["snapshots_written"] += 1
        if self.rng.random() < 0.9:
            self.archived = self.control.books.record(written)
        return True

    def retain(self) -> bool:
        """What is retired goes, if it is allowed to; some keys cannot be deleted now, and it may be stopped in its
        middle. The record may get lost with the manager."""
        control = self.control
        retired_durably = self.manager.writer.durable_seq == self.manager.writer.last_seq
        if self.drivers.publishing or not retired_durably or not Doomed.of(control.ledger) or control.ledger.finished:
            return False
        go_on = (lambda: self.rng.random() < 0.9) if self.faults else (lambda: True)
        deletion = Deletion(self.store, RUN, Doomed.of(control.ledger), self.retention, self.clock, go_on)
        deletion.run()
        if (gone := deletion.deleted) is None:
            return False
        control.books.record(gone)
        self.tally["retired_deleted"] += len(gone.manifests) + len(gone.blocks)
        return True

    # ------------------------------------------------------------------ faults

    def kill_manager(self) -> None:
        """SIGKILL: the undurable tail is gone, a create of it may still arrive."""
        self.tally["kills"] += 1
        if self.rng.random() < 0.5:
            self.incarnations.in_flight(self.manager)
        self._succeed(None)

    def stop_manager(self) -> None:
        """It stops, and goes on later, perhaps while its successor claims."""
        self.tally["managers_stopped"] += 1
        self._succeed(self.manager)

    def _succeed(self, alive: Incarnation | None) -> None:
        self.archived = -1
        on_the_way = self.workers.lose_all(alive)
        self.drivers.manager_lost(trainer_too=True)
        self.claiming = True
        # Checkpoints exist late in a run, so they would rarely be met.
        if self.rng.random() < self.shape.alterations * (3 if self.control.ledger.checkpoints else 1):
            self.alterations.strike()
        if alive is not None:
            alive.reports = on_the_way
        if self.rng.random() < 0.3:
            self.incarnations.land()
        successor = self.incarnations.start(alive)
        if alive is not None:
            self.incarnations.stopped.append(alive)
        self.manager, self.claiming, self.engine_version = successor, False, None

    def fault(self) -> None:
        """One of the faults that are possible now."""
        possible: list[Callable[[], None]] = [
            self.kill_manager,
            self.stop_manager,
            lambda: self.drivers.lose(stopped=True),
            lambda: self.drivers.lose(stopped=False),
        ]
        if self.workers.any:
            possible += [self.workers.lose_one] * 2
        if self.workers.stale:
            possible.append(self.workers.deliver_late)
        if self.incarnations.stopped:
            possible += [self.incarnations.wake] * 3
        if self.store.delayed:
            possible += [self.incarnations.land] * 2
        if self.actors.any_late:
            possible += [self.actors.go_on_late] * 3
        if self.drivers.any_replaced:
            possible.append(self.drivers.wake_replaced)
        self.rng.choice(possible)()

    # ------------------------------------------------------------------ the schedule

    def step(self) -> None:
        """Some process moves. Those that had nothing to do wait until another one has changed something or time has
        passed."""
        rate = self.shape.fault_rate * (self.shape.late_faults if self.control.ledger.step else 1)
        if self.faults and self.rng.random() < rate:
            self.fault()
            self.idle.clear()
        else:
            self._move()
        self.clock.advance(0.125)
        self.control.expire()
        self.control.tick()
        if not self.idle or self._recorded != self.control.books.journal.last_seq:
            oracle.check(self.control, self.limits)
            self._recorded = self.control.books.journal.last_seq

    def _move(self) -> None:
        able = [move for move in self._moves() if move not in self.idle]
        if not able:
            self.idle.clear()
            self.clock.advance(0.5)
            return
        move = self.rng.choice(able)
        if move():
            self.idle.clear()
        else:
            self.idle.append(move)

    def _moves(self) -> list[Callable[[], bool]]:
        moves = [self.workers.work, self.drivers.drive]
        if self.workers.reports:
            moves.append(self.workers.deliver)
        if self.manager.frozen is not None or self.manager.writer.last_seq > self.manager.writer.durable_seq:
            moves.append(self.flush)
        if self.judges.outside:
            moves.append(self.judges.work)
        if self.snapshot_every:
            moves.append(self.archive)
        if self.control.ledger.retired or self.control.ledger.retired_blocks:
            moves.append(self.retain)
        return moves

    def run(self, chaos: int, limit: int = LIMIT) -> VerifyReport:
        """`chaos` steps with faults, then without until the end; more than `limit` steps mean no progress."""
        with memo.remembering():
            for count in range(limit):
                if count >= chaos:
                    self.faults = self.store.faults = False
                if self.done:
                    self.tally["steps"] += count
                    return self._audit()
                self.step()
        raise AssertionError(f"no progress: {self.control.status()}")

    def _audit(self) -> VerifyReport:
        """What is late comes now, and changes nothing but who claimed last; then the proof from storage alone."""
        self.faults = self.store.faults = False
        assert self.manager.writer.durable_seq == self.manager.writer.last_seq, "the end is durable"
        while self.store.delayed:
            self.incarnations.land()
        writes = self.store.writes
        while self.incarnations.stopped:
            self.incarnations.wake()
        assert self.store.writes == writes, "whoever comes after the end changes nothing"
        report = verify(self.store, RUN)
        oracle.check_report(self, report)
        if self.actors.acting:
            self.actors.outside.check()
        return report


def play(seed: int, shape: Shape) -> tuple[World, VerifyReport]:
    """The whole world of a seed, at its end, and its proof."""
    dice = random.Random(f"world {seed}")
    with memo.remembering():
        multi_turn = dice.random() < shape.multi_turn
        world = World(seed, length=dice.choice(shape.lengths), multi_turn=multi_turn, shape=shape, faulty_start=True)
        report = world.run(chaos=dice.choice(shape.chaos))
    return world, report
