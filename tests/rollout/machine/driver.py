"""What the driver, the engines, time and people do in the state machine."""

from __future__ import annotations

import hashlib
import random

import numpy as np

from gpu.rollout.messages import Grant, Wait
from storage import schema
from storage.archivist import Archivist
from storage.buffers import NamedBuffer, buffers_digest
from storage.capture import capture_of
from storage.errors import AckMismatch, HoldRefused, LeaseRefused, LedgerInvalid
from storage.publisher import ThreadPublisher
from tests.rollout.building import RUN
from tests.rollout.machine.world import TALLY, Held, World


class Driver(World):
    """A call that had no occasion returns False."""

    # ------------------------------------------------------------------ the trainer

    archived = -1
    """The newest record of a ledger snapshot."""

    def lease(self, rng: random.Random) -> bool:
        open_ = self.oracle.lease
        found = self.control.try_lease()
        self.follow()
        lease = self.oracle.lease
        if open_ is not None:
            assert isinstance(found, Grant)
            assert lease is open_, "an open lease is issued again"
        elif self.closed:
            assert isinstance(found, Wait)
        if isinstance(found, Grant):
            assert lease is not None
            assert (found.lease.lease, found.lease.step) == (lease.lease, lease.step)
            assert tuple(group.ordinal for group in found.lease.groups) == lease.groups
            assert len(lease.groups) == self.limits.batch or lease.final
        elif found is None:
            assert not self.oracle.groups, "None means that everything is settled"
        return open_ is None and lease is not None

    def _train(self, lease: schema.LeaseIssued) -> tuple[int, int, str, str]:
        """What a trainer comes to: it depends on the state before and on the batch, on nothing else."""
        before = self.oracle.states[self.oracle.step][1] if self.oracle.step else ""
        return lease.lease, lease.step, self._state(f"{before}:{lease.groups}"), f"weights-{lease.step}"

    def _state(self, text: str) -> str:
        data = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        buffers = {"weights/w": NamedBuffer("U8", (len(data),), data)}
        digest = buffers_digest(buffers, "{}")
        self.buffers[digest] = buffers
        return digest

    def commit(self, rng: random.Random) -> bool:
        if self.oracle.lease is None:
            return False
        leasing, done = self.control.leasing, self._train(self.oracle.lease)
        if rng.random() < 0.2:
            other = (done[0], done[1] + 1, "s", "w")
            self.refuse("commit of another step", LeaseRefused, lambda: leasing.commit(*other, {}))
            self.refuse("end with an open lease", LeaseRefused, lambda: self.control.finish("enough"))
            self.checkpoint(rng)  # refused
        leasing.commit(*done, {"loss": 1.0})
        self.follow()
        self.commits.append(done)
        if rng.random() < 0.3:
            with self.unchanged("repeated commit"):
                leasing.commit(*done, {"loss": 1.0})
            self.refuse("rollback after commit", LeaseRefused, lambda: leasing.roll_back(done[0], "late"))
        if rng.random() < 0.5:
            self.activate(rng)
        return True

    def commit_again(self, rng: random.Random) -> None:
        """After a lost reply, and perhaps a crash: it counts once, or is done now, or is refused."""
        if not self.commits:
            return
        commit, done = self.control.leasing.commit, rng.choice(self.commits[-3:])
        lease, step, state, _ = done
        known, found = self.oracle.states.get(step), self.oracle.lease
        if known is not None and known[0] == lease:
            # An older one may have left the ledger with its checkpoint, or have been redone to another state.
            if self.oracle.step - step < 2 and step > self.oracle.base and known[1] == state:
                with self.unchanged("repeated commit"):
                    commit(*done, {})
        elif found is not None and self._train(found) == done:
            commit(*done, {})
            TALLY["commit after the crash that lost it"] += 1
        elif found is None or (found.lease, found.step) != (lease, step):
            self.refuse("commit of another lineage", LeaseRefused, lambda: commit(*done, {}))

    def settle_what_is_not_open(self, rng: random.Random) -> None:
        leasing = self.control.leasing
        lease, step = rng.randint(50, 90), self.oracle.step + 1
        self.refuse("unknown commit", LeaseRefused, lambda: leasing.commit(lease, step, "s", "w", {}))
        self.refuse("unknown rollback", LeaseRefused, lambda: leasing.roll_back(lease, "x"))

    def roll_back(self, rng: random.Random) -> bool:
        if self.oracle.lease is None:
            return False
        leasing, done = self.control.leasing, self._train(self.oracle.lease)
        leasing.roll_back(done[0], "untouched")
        self.follow()
        with self.unchanged("repeated rollback"):
            leasing.roll_back(done[0], "untouched")
        self.refuse("commit after rollback", LeaseRefused, lambda: leasing.commit(*done, {}))
        return True

    def activate(self, rng: random.Random) -> bool:
        """The weights after the last step are published, and every engine confirms them."""
        if self.oracle.finished or self.serving == self.oracle.step:
            return False
        digest = f"weights-{self.oracle.step}"
        self.control.publish_policy(digest)
        with self.unchanged("repeated publication"):
            self.control.publish_policy(digest)
        self.control.serve(self.oracle.step)
        self.serving = self.oracle.step
        return True

    def lose_the_engines(self, rng: random.Random) -> None:
        self.control.serve(None)
        self.refuse(
            "version that nobody published", LedgerInvalid, lambda: self.control.serve(self.oracle.step + 1)
        )  # fmt: skip
        if rng.random() < 0.5:
            self.control.serve(self.serving)
        else:
            self.serving = None

    def redo(self, rng: random.Random) -> None:
        """A restored trainer goes through the last step again, and may come to another state."""
        step = self.oracle.step
        if self.oracle.checkpoint < step and not self.oracle.finished:
            _, state, weights = self.oracle.states[step]
            same = rng.random() < 0.8
            assert self.control.redone(step, state if same else self._state(f"{state} redone"), weights) is same

    def revert(self, rng: random.Random) -> None:
        """A restored trainer does not redo the steps after its checkpoint: they are taken back."""
        bases = [*([0] if self.control.ledger.from_genesis else []), *self.oracle.tried.values()]
        bases = [step for step in bases if step < self.oracle.step]
        if not bases or self.oracle.finished:
            return
        step = rng.choice(bases)
        _, state, weights = self.oracle.states[step] if step else (0, "", "")
        self.control.revert(step, state, weights)
        self.follow()
        with self.unchanged("repeated revert"):
            self.control.revert(step, state, weights)

    def checkpoint(self, rng: random.Random) -> None:
        step = self.oracle.step
        if not step or self.oracle.finished:
            return
        held = self._acquire("driver", 1, 30.0)
        hold, epoch = held.hold.hold, held.hold.epoch
        if self.oracle.lease is not None:
            self.refuse(
                "checkpoint with an open lease", HoldRefused, lambda: self.control.prepare_checkpoint(hold, epoch)
            )
        else:
            self.control.prepare_checkpoint(hold, epoch)
            _, state, weights = self.oracle.states[step]
            capture = capture_of(step, state, weights, "{}", self.buffers[state])
            written = ThreadPublisher(self.bench.store).publish(RUN, self.oracle.incarnation, capture, None)
            self.control.publish_checkpoint(step, *written)
            self.follow()
            with self.unchanged("repeated checkpoint"):
                self.control.publish_checkpoint(step, *written)
            self.delete_retired(rng)
        self._release(held)

    # ------------------------------------------------------------------ holds and time

    def acquire(self, rng: random.Random) -> None:
        if len(self.holds) < 3:
            self._acquire(rng.choice(["driver", "evaluation"]), rng.randint(1, 2), rng.choice([1.0, 30.0]))

    def _acquire(self, owner: str, token: int, ttl_s: float) -> Held:
        hold = self.control.acquire(owner, "test", token, ttl_s)
        assert hold.hold not in self.holds
        assert hold.epoch > self.epoch, "the epoch moves at each acquire"
        frontier = self.oracle.live | set(self.unpublished)
        assert hold.frontier == len(frontier) + self.live_plain
        self.epoch = hold.epoch
        self.holds[hold.hold] = held = Held(hold, token, ttl_s, self.bench.clock.monotonic() + ttl_s, frontier)
        self.follow()
        return held

    def renew(self, rng: random.Random) -> None:
        for held in [] if self.oracle.finished else self.holds.values():
            self.control.admission.renew(held.hold.hold, held.hold.epoch)
            held.expires = self.bench.clock.monotonic() + held.ttl_s

    def release(self, rng: random.Random) -> None:
        for held in rng.sample([*self.holds.values()], rng.randint(min(1, len(self.holds)), len(self.holds))):
            self._release_for_good(held.hold.hold, held.hold.epoch)

    def _release_for_good(self, hold: int, epoch: int) -> None:
        admission, wrong = self.control.admission, epoch + (0 if self.oracle.finished else 1)
        self.refuse("wrong epoch", HoldRefused, lambda: admission.renew(hold, wrong))
        self._release(self.holds[hold])
        with self.unchanged("repeated release"):
            assert admission.release(hold) is False
        self.refuse("hold that ended", HoldRefused, lambda: self.control.prepare_checkpoint(hold, epoch))

    def _release(self, held: Held) -> None:
        del self.holds[held.hold.hold]
        assert self.control.admission.release(held.hold.hold) is (not self.closed), "it reopens at the last release"
        self._ended([held.hold.hold])

    def _ended(self, holds: list[int]) -> None:
        for hold in holds:
            self.holds.pop(hold, None)
        epoch = self.control.admission.epoch
        assert epoch == self.epoch + (bool(holds) and not self.closed), "the epoch moves at each reopening"
        self.epoch = epoch
        self.follow()

    def lose_a_driver(self, rng: random.Random) -> None:
        token = rng.randint(1, 2)
        mine = [hold for hold, held in self.holds.items() if held.token == token]
        assert self.control.admission.release_token(token) == mine
        self._ended(mine)

    def wait(self, rng: random.Random) -> None:
        self._wait(rng.choice([0.3, 1.0, 5.0, 40.0]))

    def _wait(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)
        late = [hold for hold, held in self.holds.items() if held.expires <= self.bench.clock.monotonic()]
        self.control.tick()
        assert [hold.hold for hold in self.control.expire()] == late, "a hold ends when its owner is silent"
        TALLY["holds expired"] += len(late)
        self._ended(late)

    def delete_retired(self, rng: random.Random) -> None:
        """Some of the retired checkpoints are gone."""
        gone = tuple(sorted(self.oracle.retired)[: rng.randint(0, 2)])
        if gone and not self.oracle.finished:
            self.control.books.record(schema.Deleted(gone, ()))

    # ------------------------------------------------------------------ people

    def release_from_quarantine(self, rng: random.Random) -> None:
        found = sorted(ordinal for ordinal, where in self.oracle.settled.items() if where == "quarantined")
        if found and not self.oracle.finished:
            self.control.release_quarantined([rng.choice(found)])

    def evaluate(self, rng: random.Random) -> None:
        """The last step is to be evaluated; asking again begins nothing."""
        step = self.oracle.step
        if step and not self.oracle.finished:
            self.control.evaluations.due(step)
            self.follow()
            with self.unchanged("repeated evaluation"):
                assert self.control.evaluations.due(step) == 0

    def change_the_configuration(self, rng: random.Random) -> None:
        if not self.oracle.finished:
            self.control.books.record(schema.ConfigChanged({"batch": "1 -> 1"}))

    def archive(self, rng: random.Random) -> None:
        """The ledger is written down as it was before the next slot; the record may get lost."""
        slot, newest = self.bench.writer.slot, self.control.ledger.snapshot
        writer = self.bench.writer
        under_way = writer.durable_seq < self.archived <= writer.last_seq
        if not self.oracle.finished and not under_way and (newest is None or newest.slot < slot):
            written = Archivist(self.bench.store, RUN, self.limits.num_siblings).snapshot(slot)
            if rng.random() < 0.9:
                self.archived = self.control.books.record(written)

    def finish(self, rng: random.Random) -> None:
        if self.oracle.lease is not None:
            self.refuse("end with an open lease", LeaseRefused, lambda: self.control.finish("enough"))
        elif self.oracle.owed:
            self.refuse("end with an acknowledgement owed", AckMismatch, lambda: self.control.finish("enough"))
        elif self.oracle.finished or (self.oracle.step > 1 and rng.random() < 0.2):
            self._finish()

    def _finish(self) -> None:
        self.acknowledge_all()
        self.control.finish("enough")
        self.running, self.plain, self.judged = [], {}, {}
        self.follow()
        with self.unchanged("repeated end"):
            self.control.finish("enough")
