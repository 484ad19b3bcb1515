"""The driver and the trainer of a simulated world: lease, train, commit, publish, checkpoint, restore with redo.

The driver is a generator: it may die at any yield, or stop there and go on after a newer driver took its place. Each
yield says whether it got further. The trainer is a hash chain over what it trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gpu.rollout.control import RolloutControl
from gpu.rollout.messages import Caller, Grant, Wait
from storage.buffers import NamedBuffer, buffers_digest
from storage.capture import capture_of
from storage.errors import RunFenced
from storage.ledger import Block, Lease
from storage.publisher import ThreadPublisher
from storage.reader import PayloadReader
from storage.restore import load_base, plan_restore
from storage.samples import assemble
from tests.simulation.incarnations import RUN

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass
class Trainer:
    """`last` is the lease it trained last and what came out: a repeated request trains nothing."""

    step: int = 0
    digest: str = ""
    last: tuple[int, int, str] = (0, 0, "")
    alive: bool = True
    buffers: dict[str, NamedBuffer] = field(default_factory=dict)

    def train(self, lease: Lease, expected: str) -> str:
        if self.last[:2] == (lease.step, lease.lease):
            return self.last[2]
        assert (self.step + 1, self.digest) == (lease.step, expected), "compare-and-set of the trainer's state"
        trained = tuple(group.ordinal for group in lease.groups)
        state = hashlib.sha256(f"{self.digest}:{trained}".encode()).digest()
        self.buffers = {"weights/w": NamedBuffer("U8", (len(state),), np.frombuffer(state, np.uint8))}
        self.step, self.digest = lease.step, buffers_digest(self.buffers, "{}")
        self.last = (lease.step, lease.lease, self.digest)
        return self.digest


class Drivers:
    """The driver in place, and those that were replaced without knowing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._driver: Iterator[bool] | None = None
        self._replaced: list[tuple[Iterator[bool], int]] = []
        self._attempt = 0
        self._issued: set[int] = set()
        self.publishing = False
        """A publication that may come to count is under way, or its driver died."""
        self.trainer = Trainer()
        self.trained_staleness: list[int] = []

    # ------------------------------------------------------------------ which driver

    def drive(self) -> bool:
        if self._driver is None:
            self._start()
        try:
            return next(self._driver)
        except StopIteration:
            self._world.done = True
            return True

    def _start(self) -> None:
        self._attempt += 1
        self._driver = self._drive(self._attach(self._attempt))

    def _attach(self, attempt: int) -> Caller:
        """As the manager does it: older tokens are refused from now on, and their holds are released."""
        manager = self._world.manager
        attaching = manager.callers.attach("driver", False, "sim", attempt)
        try:
            attaching.send(None)
        except StopIteration as answer:
            manager.control.admission.release_token(answer.value.token - 1)
            return answer.value
        raise AssertionError("no call is open, so nothing is waited for")

    def lose(self, *, stopped: bool) -> None:
        """The driver dies, or stops and goes on later; the trainer lives on and keeps its last result."""
        if self._driver is not None and stopped:
            self._replaced.append((self._driver, self._attempt))
        self._world.tally["drivers_replaced"] += 1
        self._start()

    def manager_lost(self, *, trainer_too: bool) -> None:
        if self._driver is not None:
            self._replaced.append((self._driver, self._attempt))
        self._driver, self.publishing = None, False
        if trainer_too:
            self.trainer = Trainer(alive=False)

    @property
    def any_replaced(self) -> bool:
        return bool(self._replaced)

    def wake_replaced(self) -> None:
        """A driver that was replaced goes on: its next call is refused, and so is its attempt to attach again."""
        old, attempt = self._replaced.pop(self._world.rng.randrange(len(self._replaced)))
        seq, writes = self._world.control.books.journal.last_seq, self._world.store.writes
        try:
            next(old, None)
        except RunFenced:
            self._world.tally["drivers_refused"] += 1
        else:
            raise AssertionError("a replaced driver was served")
        if self._world.manager.callers.owner:
            try:
                self._attach(attempt)
            except RunFenced:
                self._world.tally["attempts_refused"] += 1
            else:
                raise AssertionError("an older attempt displaced a newer one")
        assert (seq, writes) == (self._world.control.books.journal.last_seq, self._world.store.writes)

    # ------------------------------------------------------------------ the loop

    def _pause(self, caller: Caller, *, progress: bool = True) -> Iterator[bool]:
        """Others run; the next call says who calls."""
        yield progress
        self._world.manager.callers.check(caller)

    def _durable(self, caller: Caller, seq: int) -> Iterator[bool]:
        writer = self._world.manager.writer
        while writer.durable_seq < seq:
            writer.want(seq)
            yield from self._pause(caller, progress=False)

    def _drive(self, caller: Caller) -> Iterator[bool]:
        self._world.manager.callers.check(caller)
        control = self._world.control
        yield from self._durable(caller, control.books.journal.last_seq)
        if control.ledger.finished:
            return
        if not self.trainer.alive:
            self._restore(control)
            yield from self._pause(caller)
        if self.trainer.step == control.ledger.step:  # else an uncommitted step of a dead driver is in it: lease first
            yield from self._publish(caller, control)
        while (grant := control.try_lease()) is not None:
            if isinstance(grant, Wait):
                yield from self._pause(caller, progress=False)
            else:
                yield from self._step(caller, control, grant)
        while not self._world.exams.over(control):
            yield from self._pause(caller, progress=False)
        yield from self._durable(caller, control.finish("source exhausted"))

    def _step(self, caller: Caller, control: RolloutControl, grant: Grant) -> Iterator[bool]:
        world, lease = self._world, grant.lease
        self._check_lease(control, grant)
        yield from self._pause(caller)
        trained = self.trainer.last[:2] == (lease.step, lease.lease)
        if world.faults and not trained and world.rng.random() < 0.05:
            control.leasing.roll_back(lease.lease, "dice")
            world.tally["leases_rolled_back"] += 1
            return
        self._read(lease, grant.blocks, grant.hot)
        digest = self.trainer.train(lease, control.ledger.state_digest)
        yield from self._pause(caller)
        seq = control.leasing.commit(lease.lease, lease.step, digest, digest, {})
        if world.faults and world.rng.random() < 0.3:
            seq = control.leasing.commit(lease.lease, lease.step, digest, digest, {})
        yield from self._durable(caller, seq)
        yield from self._publish(caller, control)
        if world.rng.random() < world.shape.checkpoints:
            yield from self._checkpoint(caller, control)

    def _publish(self, caller: Caller, control: RolloutControl) -> Iterator[bool]:
        hold = control.acquire("driver", "update_weights", caller.token, ttl_s=30.0)
        yield from self._pause(caller)
        if self._world.rng.random() < 0.3:
            while control.admission.still_open(hold.hold):
                yield from self._pause(caller, progress=False)
        yield from self._durable(caller, control.publish_policy(self.trainer.digest))
        self._world.engine_version = control.ledger.step
        control.serve(control.ledger.step)
        self._world.exams.due(control)
        yield from self._pause(caller)
        control.admission.release(hold.hold)

    # ------------------------------------------------------------------ checkpoint and restore

    def _checkpoint(self, caller: Caller, control: RolloutControl) -> Iterator[bool]:
        trainer = self.trainer
        step, digest, buffers = trainer.step, trainer.digest, trainer.buffers
        if control.ledger.step != step or not buffers:
            return
        capture = capture_of(step, digest, digest, "{}", buffers)
        self.publishing = True
        written = ThreadPublisher(self._world.store).publish(RUN, control.ledger.incarnation, capture, None)
        yield from self._pause(caller)
        yield from self._durable(caller, control.publish_checkpoint(step, *written))
        self.publishing = False
        self._world.tally["checkpoints"] += 1

    def _restore(self, control: RolloutControl) -> None:
        """Checkpoint plus redo, as a real trainer does it, or the checkpoint alone."""
        plan = plan_restore(control.ledger, RUN)
        base = load_base(self._world.store, plan)
        assert not base.rejected, base.rejected
        digest = base.manifest.state_digest if base.manifest else ""
        assert base.manifest is None or buffers_digest(base.buffers, base.manifest.meta) == digest
        trainer = Trainer(step=base.step, digest=digest)
        if self._world.requeues and base.step < plan.step:
            control.revert(base.step, digest, digest)
            self.trainer = trainer
            return
        for step in range(base.step + 1, plan.step + 1):
            self._read(plan.steps[step].lease, plan.blocks, {})
            digest = trainer.train(plan.steps[step].lease, trainer.digest)
            assert control.redone(step, digest, digest), "a redone step reaches the same state"
        assert trainer.digest == control.ledger.state_digest
        self.trainer = trainer

    def _read(self, lease: Lease, blocks: Mapping[str, Block], hot: Mapping[str, bytes]) -> None:
        """The batch that the trainer is about to train, from where its rows lie."""
        reader = PayloadReader(self._world.store, RUN, hot.get)
        for group in lease.groups:
            rows = [reader.rows(references, blocks) for references in group.rows]
            slots = assemble(rows, group.ordinal, self._world.limits.num_siblings)
            assert [slot[0].reward for slot in slots] == list(group.rewards)
            assert [len(slot) for slot in slots] == list(group.samples)

    def _check_lease(self, control: RolloutControl, grant: Grant) -> None:
        assert control.admission.is_open or grant.lease.lease in self._issued, "no lease while a hold is up"
        self._issued.add(grant.lease.lease)
        bound = self._world.limits.staleness
        for group in grant.lease.groups:
            staleness = grant.lease.version - group.oldest
            self.trained_staleness.append(staleness)
            assert bound is None or 0 <= staleness <= bound
