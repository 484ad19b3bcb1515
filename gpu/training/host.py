"""The trainer behind calls: one step at a time in a thread, while asyncio answers.

Calls carry values only. A call that is repeated after a lost reply, or by the next driver, gets the same answer; while
a step runs, others wait for it. The weights of the last published version are kept for engines that start later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from gpu.rollout.messages import Caller, Grant
from gpu.training.checkpoints import Checkpoints
from gpu.training.messages import RestoredBase, Trained, TrainerStatus
from gpu.training.trainer import Trainer
from storage.buffers import NamedBuffer
from storage.checkpoint import Written
from storage.errors import LeaseRefused, LineageInvalid, RestoreRefused, RunFenced
from storage.filesystem import Store
from storage.ledger import Block, Lease
from storage.publisher import Publisher, ThreadPublisher
from storage.reader import PayloadReader
from storage.restore import RestorePlan, load_base
from storage.samples import Sample, assemble
from storage.schema import CheckpointPublished

T = TypeVar("T")


class TrainerHost:
    """`build` makes the trainer (in a thread: it loads a model). `publisher` writes the checkpoints; by default threads
    of this process do, as they must for a store that lives in its memory (tests, clusters of one process)."""

    def __init__(
        self, store: Store, run: str, build: Callable[[], Trainer], publisher: Publisher | None = None
    ) -> None:
        self._store, self._run, self._build = store, run, build
        self._trainer: Trainer | None = None
        self._lock = asyncio.Lock()
        self._busy = ""
        self._caller = Caller(0)
        self._hot: Mapping[str, bytes] = {}
        self._reader = PayloadReader(store, run, lambda name: self._hot.get(name))
        self._plan: RestorePlan | None = None
        self._checkpoints = Checkpoints(run, publisher or ThreadPublisher(store))
        self._published: tuple[str, object] = ("", None)

    async def _do(self, caller: Caller, what: str, action: Callable[[], T]) -> T:
        async with self._lock:
            if caller != self._caller:
                raise self._fenced(caller)
            self._busy = what
            try:
                return await asyncio.to_thread(action)
            finally:
                self._busy = ""

    def _ready(self) -> Trainer:
        if self._trainer is None:
            self._trainer = self._build()
        return self._trainer

    def _status(self) -> TrainerStatus:
        one, progress = self._trainer, self._checkpoints.progress
        if one is None:
            return TrainerStatus(-1, "", "", False, self._busy, "", *progress)
        digests = one.state_digest, one.weights_digest
        return TrainerStatus(one.step, *digests, one.clean, self._busy, one.ahead_of, *progress)

    async def status(self) -> TrainerStatus:
        """Answers at once, also while a step runs."""
        return self._status()

    async def claim(self, caller: Caller) -> TrainerStatus:
        """Belong to a newer driver: older ones are refused from now on. Waits until the open call ended.

        Within one incarnation the answer for the last step can still be repeated; a newer incarnation does not know
        whether the lease of that step was durable, so for it the step never happened. Raises `RunFenced`.
        """
        if (caller.incarnation, caller.token) < (self._caller.incarnation, self._caller.token):
            raise self._fenced(caller)
        newer = caller.incarnation > self._caller.incarnation
        self._caller = caller
        async with self._lock:
            if newer and self._trainer is not None:
                self._trainer.forget_last()
            return self._status()

    def _fenced(self, caller: Caller) -> RunFenced:
        mine = self._caller
        return RunFenced(
            f"a call to the trainer of incarnation {caller.incarnation}, driver {caller.token}",
            expected=f"incarnation {mine.incarnation}, driver {mine.token}",
            action="stop; somebody newer drives this run",
        )

    # ------------------------------------------------------------------ restore

    async def restore(self, caller: Caller, plan: RestorePlan) -> RestoredBase:
        """Load the newest valid checkpoint of the plan, or the initial weights. Raises `RestoreRefused`."""
        return await self._do(caller, "restore", lambda: self._restore(plan))

    def _restore(self, plan: RestorePlan) -> RestoredBase:
        base = load_base(self._store, plan)
        fresh = self._trainer is None or base.manifest is None
        trainer = self._build() if fresh else self._ready()
        if base.manifest is not None:
            trainer.load(base.step, base.buffers, base.manifest.meta, base.manifest.state_digest)
        self._trainer, self._plan = trainer, plan
        self._checkpoints.restart(trainer, whole=bool(base.rejected))
        return RestoredBase(base.step, tuple(base.rejected))

    async def redo(self, caller: Caller, step: int) -> Trained:
        """Train a committed step again from its journaled groups, in the same order; generates nothing."""
        return await self._do(caller, f"redo {step}", lambda: self._redo(step))

    def _redo(self, step: int) -> Trained:
        if self._plan is None or step not in self._plan.steps:
            raise RestoreRefused(
                f"step {step} is not in the restore plan",
                expected="a committed step after the restored checkpoint",
                action="restore again from the manager's plan",
            )
        trainer, lease = self._ready(), self._plan.steps[step].lease
        samples = self._samples(lease, self._plan.blocks)
        return trainer.train(step, lease.lease, trainer.state_digest, samples, lease.version)

    # ------------------------------------------------------------------ steps

    async def train(self, caller: Caller, grant: Grant) -> Trained:
        """One optimizer step on a leased batch: a compare-and-set from the state the grant names."""
        return await self._do(caller, f"train {grant.lease.step}", lambda: self._train(grant))

    def _train(self, grant: Grant) -> Trained:
        self._hot = grant.hot
        samples = self._samples(grant.lease, grant.blocks)
        lease = grant.lease
        return self._ready().train(lease.step, lease.lease, grant.state_digest, samples, lease.version)

    def _samples(self, lease: Lease, blocks: Mapping[str, Block]) -> list[list[list[Sample]]]:
        """Group by group, the samples of each slot."""
        self._reader.load((row for group in lease.groups for rows in group.rows for row in rows), blocks)
        return [
            assemble([self._reader.rows(rows, blocks) for rows in group.rows], group.ordinal, len(group.rewards))
            for group in lease.groups
        ]

    async def prefetch(self, grant: Grant) -> int:
        """Read and decode the blocks of groups that will probably be leased next; returns how many blocks."""
        reader = PayloadReader(self._store, self._run, grant.hot.get)
        decoded = await asyncio.to_thread(
            lambda: {name: reader.block_rows(name, block) for name, block in grant.blocks.items()}
        )
        async with self._lock:
            for name, rows in decoded.items():
                self._reader.remember(name, rows)
        return len(decoded)

    # ------------------------------------------------------------------ weights

    async def publish(self, caller: Caller, step: int) -> str:
        """Freeze the weights after `step` for the engines; returns their digest. Raises `LeaseRefused`."""
        return await self._do(caller, f"publish {step}", lambda: self._publish(step))

    def _publish(self, step: int) -> str:
        trainer = self._ready()
        if trainer.step != step or not trainer.clean:
            raise LeaseRefused(
                f"weights of step {step} while the trainer is at step {trainer.step}",
                expected="the trainer to be exactly at that step",
                action="commit or restore first",
                code="state",
            )
        if self._published[0] != trainer.weights_digest:
            self._published = (trainer.weights_digest, self.freeze(trainer.weights()))
        return trainer.weights_digest

    def freeze(self, weights: dict[str, NamedBuffer]) -> object:
        """Weights that later steps do not touch, in a form that can be handed to engines. Overridden where processes
        share an object store."""
        return {name: NamedBuffer(b.dtype, b.shape, b.data.copy()) for name, b in weights.items()}

    async def weights(self, digest: str) -> object:
        """The frozen weights of a published version. Raises `LineageInvalid` when they are not the newest."""
        if self._published[0] != digest:
            raise LineageInvalid(
                f"weights {digest[:12]} while the published ones are {self._published[0][:12]}",
                expected="the newest published version",
                action="ask for the current version",
                code="version_unknown",
            )
        return self._published[1]

    # ------------------------------------------------------------------ checkpoints

    async def capture(self, caller: Caller, step: int) -> int:
        """Copy the state after `step`; returns its size in bytes. Nothing to do when it is captured already; 0, and
        nothing done, while the capture of another step is being published."""
        return await self._do(caller, f"capture {step}", lambda: self._checkpoints.capture(self._ready(), step))

    async def upload(self, caller: Caller, step: int, newest: CheckpointPublished | None) -> Written:
        """Publish the captured state, beside training. May be repeated: after a failure with the same capture, after a
        lost reply for the same answer."""
        if caller != self._caller:
            raise self._fenced(caller)
        return await asyncio.to_thread(self._checkpoints.publish, step, caller.incarnation, newest)
