"""The rollout manager: asyncio around rollout control, and the run's only journal writer.

It decides nothing itself. Calls carry the incarnation, a driver's calls also its token; older ones are refused with
`RunFenced`. Every wait has a deadline or ends with the manager, and says what it waits for. A fatal error reaches every
waiter at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.rollout.archiving import Archive, Archiving
from gpu.rollout.calls import Attached, Callers
from gpu.rollout.committer import Committer, FlushSettings
from gpu.rollout.control import RolloutControl
from gpu.rollout.drain import Drain, Drained, DrainPolicy
from gpu.rollout.draining import Drainer
from gpu.rollout.engine_control import EngineControl
from gpu.rollout.evaluation import Suite
from gpu.rollout.evaluation_calls import EvaluationCalls
from gpu.rollout.group_work import judge_groups
from gpu.rollout.limits import Limits
from gpu.rollout.messages import Caller, Grant, Hold, Wait
from gpu.rollout.operations import Operations
from gpu.rollout.pausing import Pausing
from gpu.rollout.people_calls import PeopleCalls
from gpu.rollout.results import GroupFilter
from gpu.rollout.retaining import Retaining
from gpu.rollout.signal import Signal, wait_event
from gpu.rollout.topology import NO_RESOURCES, Topology
from gpu.rollout.waits import Waits
from gpu.rollout.watchdog import Watchdog
from gpu.rollout.worker_calls import WorkerCalls
from storage.clock import Clock
from storage.errors import ActorLost, DeadlineExceeded
from storage.filesystem import Store
from storage.journal import JournalWriter, claim
from storage.ledger import UNDECLARED, Ledger, Policy, Recipe
from storage.restore import RestorePlan, plan_restore
from storage.retention import Retention
from storage.runs import RunInfo
from storage.schema import CheckpointPublished


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    """`driver_silence_s`: see `Callers`. `commit_deadline_s` bounds a call's wait for durability; the record stays
    queued beyond it, and the call can be repeated. A ledger snapshot is due after `snapshot_every` segments."""

    flush: FlushSettings
    driver_silence_s: float
    commit_deadline_s: float
    snapshot_every: int
    retention: Retention


class RolloutManager(WorkerCalls, EvaluationCalls, PeopleCalls):
    """Made by `open_manager`; `start` it on a running loop. Before that `engines` may be replaced, and `archive` set:
    without it nobody writes ledger snapshots."""

    def __init__(
        self,
        store: Store,
        info: RunInfo,
        control: RolloutControl,
        clock: Clock,
        settings: ManagerSettings,
        dice: random.Random,
        judge: GroupFilter | None = None,
    ) -> None:
        self.info, self._clock, self._settings = info, clock, settings
        self.control = control
        self.changed = Signal()
        self.callers = Callers(control.ledger.incarnation, clock, settings.driver_silence_s, self.changed)
        self.waits = Waits(clock)
        self.operations, self.pausing = Operations(), Pausing()
        self.watchdog = Watchdog(self, clock)
        self._drainer = Drainer(control, self.callers, self.changed, self.waits, clock)
        self._judge = judge
        self.committer = Committer(store, info.run, control, settings.flush, self.changed, dice)
        self._loops: list[asyncio.Task[None]] = []
        self._lost_workers: set[str] = set()
        self.engines = EngineControl()
        self.archiving = Archiving(self, settings.snapshot_every)
        self.archive: Archive | None = None
        self.retaining = Retaining(self, store, settings.retention, clock)

    # ------------------------------------------------------------------ life

    @property
    def incarnation(self) -> int:
        return self.control.ledger.incarnation

    def start(self) -> None:
        """Begin writing and ticking."""
        loops = [
            self.committer.run(),
            self.watchdog.run(),
            self.retaining.run(),
            *([judge_groups(self, self._judge)] if self._judge else []),
            *([self.archiving.run(self.archive)] if self.archive else []),
        ]
        self._loops = [asyncio.create_task(self._guard(loop)) for loop in loops]

    async def stop(self) -> None:
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    def kill(self) -> None:
        """Stop in the middle of whatever runs, for in-process clusters that simulate a death."""
        for loop in self._loops:
            loop.cancel()

    async def _guard(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except Exception as error:  # noqa: BLE001 - whatever ends a loop ends the incarnation, with its cause
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the incarnation with its first cause."""
        self.control.admission.close(f"fatal: {self.callers.fail(error).code}")

    def appended(self) -> None:
        """Records were appended outside a call: they become durable, and waiters look again."""
        self.committer.appended()
        self.changed.notify()

    async def _durable(self, seq: int, what: str) -> None:
        """Raises `DeadlineExceeded`; the record stays queued and the call may be repeated."""
        self.committer.appended()
        try:
            async with asyncio.timeout(self._settings.commit_deadline_s):
                await self.committer.durable(seq, self.callers.alive)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{what} is not durable after {self._settings.commit_deadline_s:.0f} s: {self.committer.waits_for}",
                expected="a store that accepts writes",
                action="repair the store; the call can be repeated",
                code="commit",
            ) from error
        self.changed.notify()

    # ------------------------------------------------------------------ driver: batches

    async def attach(self, owner: str, take_over: bool, place: str, attempt: int = 0) -> Attached:
        """Become the driver, which runs at `place` (host:pid). The holds of the one before are released. Raises
        `RunBusy` and `RunFenced`, see `Callers`."""
        replaced = self.callers.owner
        caller = await self.callers.attach(owner, take_over, place, attempt)
        self.pausing.end(self.control.admission.release_token(caller.token - 1), self.engines)
        self.changed.notify()
        return Attached(caller, replaced, self.control.ledger.finished, self.control.found)

    async def lease(self, caller: Caller, deadline_s: float) -> Grant | None:
        """The next batch; None when a finite source is exhausted. Raises `DeadlineExceeded` with the reason."""
        deadline = self._clock.monotonic() + deadline_s
        with self.callers.call(caller):
            while True:
                event = self.changed.current()
                self.callers.check(caller)
                found = self.control.try_lease()
                self.committer.appended()
                self.waits.note("trainer", found if isinstance(found, Wait) else None)
                if not isinstance(found, Wait):
                    return found
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    circle = self.watchdog.look()
                    self.waits.note("trainer", None)
                    raise DeadlineExceeded(
                        f"no batch for step {self.control.ledger.step + 1} after {deadline_s:.0f} s:"
                        f" {found.reason}{f' (a circle: {circle})' if circle else ''}",
                        expected=f"a batch; {found.who} can provide it",
                        action="look at `tidegate status`",
                        code="lease",
                    )
                await wait_event(event, min(left, 1.0))

    async def commit(
        self, caller: Caller, lease: int, step: int, state_digest: str, weights_digest: str, metrics: dict[str, float]
    ) -> None:
        """The step happened; returns when that is durable. May be repeated."""
        with self.callers.call(caller):
            seq = self.control.leasing.commit(lease, step, state_digest, weights_digest, metrics)
            self.changed.notify()
            await self._durable(seq, f"the commit of step {step}")

    async def roll_back(self, caller: Caller, lease: int, reason: str) -> None:
        """The trainer is proven untouched: its groups are completed again. May be repeated."""
        with self.callers.call(caller):
            await self._durable(self.control.leasing.roll_back(lease, reason), f"the rollback of lease {lease}")

    def peek(self, caller: Caller, count: int) -> Grant | None:
        """References and hot bytes of up to `count` groups that may be leased next; grants nothing."""
        self.callers.check(caller)
        return self.control.leasing.peek(count)

    # ------------------------------------------------------------------ driver: holds, versions, checkpoints

    async def acquire(self, caller: Caller, purpose: str, ttl_s: float) -> Hold:
        """Close admission until `release`, this driver's successor, or `ttl_s` seconds after the last `renew`."""
        self.callers.check(caller)
        hold = self.control.acquire(self.callers.owner, purpose, caller.token, ttl_s)
        self.changed.notify()
        return hold

    async def renew(self, caller: Caller, hold: int, epoch: int) -> None:
        self.callers.check(caller)
        self.control.admission.renew(hold, epoch)

    async def release(self, caller: Caller, hold: int) -> None:
        """Idempotent."""
        self.callers.check(caller)
        self.control.admission.release(hold)
        await self.pausing.ended([hold], self.engines)
        self.changed.notify()

    async def release_owner(self, owner: str) -> list[int]:
        """Release the holds of a dead driver, named by its owner; for hooks in another process. Idempotent."""
        if owner != self.callers.owner:
            return []
        released = self.control.admission.release_token(self.callers.token)
        await self.pausing.ended(released, self.engines)
        self.changed.notify()
        return released

    async def drain(self, caller: Caller, hold: Hold, policy: DrainPolicy) -> Drained:
        """Wait as the policy says. Raises `DeadlineExceeded` naming what has not ended, when it says so, and
        `HoldRefused` when the hold ends first."""
        started = self._clock.monotonic()
        with self.callers.call(caller):
            self.control.admission.confirm(hold.hold, hold.epoch)
            if policy.mode is Drain.BOUNDARY:
                self.pausing.begin(hold.hold)
            draining = self._drainer.drain(caller, hold, policy, self.engines)
            left = await self.operations.under(hold.hold, draining)
            self.committer.appended()
        return Drained(self._clock.monotonic() - started, left)

    async def publish_policy(self, caller: Caller, digest: str) -> Policy:
        """Record the weights of the last committed step as a version; returns when that is durable."""
        with self.callers.call(caller):
            await self._durable(self.control.publish_policy(digest), "the policy version")
        assert self.control.ledger.policy is not None
        return self.control.ledger.policy

    async def activate(self, caller: Caller, hold: Hold) -> None:
        """Bring the published version to the engines, under a hold that is still up. Rolls forward only. Raises
        `HoldRefused` when the hold ends first; engines that confirmed serve, the others get no traffic."""
        with self.callers.call(caller):
            self.control.admission.confirm(hold.hold, hold.epoch)
            assert self.control.ledger.policy is not None, "publish before activating"
            activating = self.engines.activate(self.control.ledger.policy)
            await self.operations.under(hold.hold, activating)

    async def prepare_checkpoint(self, caller: Caller, hold: Hold) -> None:
        """A capture may happen now. Raises `HoldRefused`."""
        self.callers.check(caller)
        self.control.prepare_checkpoint(hold.hold, hold.epoch)

    async def publish_checkpoint(
        self, caller: Caller, step: int, manifest: str, digest: str, size: int, written: int
    ) -> None:
        """The captured state is complete in the store; returns when that is durable. May be repeated. Raises
        `CheckpointRefused`."""
        with self.callers.call(caller):
            flight = self.retaining.flight
            await self.retaining.check(manifest, digest)
            seq = self.control.publish_checkpoint(step, manifest, digest, size, written)
            await self._durable(seq, f"the checkpoint of step {step}")
            self.retaining.published(flight)

    # ------------------------------------------------------------------ driver: restore and end

    async def plan(self, caller: Caller) -> RestorePlan:
        """What a trainer needs to reach the last committed step. Waits until everything it names is durable."""
        with self.callers.call(caller):
            await self._durable(self.control.books.journal.last_seq, "the journal")
            return plan_restore(self.control.ledger, self.info.run)

    async def flush(self, caller: Caller) -> None:
        """Returns when everything the journal was told so far is durable."""
        with self.callers.call(caller):
            await self._durable(self.control.books.journal.last_seq, "the journal")

    async def redone(self, caller: Caller, step: int, state_digest: str, weights_digest: str) -> bool:
        """A committed step was trained again; whether the digests agree."""
        self.callers.check(caller)
        matches = self.control.redone(step, state_digest, weights_digest)
        self.committer.appended()
        return matches

    async def revert(self, caller: Caller, to_step: int, state_digest: str, weights_digest: str) -> None:
        """Committed steps after `to_step` are taken back; returns when that is durable. May be repeated."""
        with self.callers.call(caller):
            seq = self.control.revert(to_step, state_digest, weights_digest)
            self.changed.notify()
            await self._durable(seq, f"the return to step {to_step}")

    async def retire(self, caller: Caller, reason: str) -> None:
        """End this incarnation, so that the driver goes on with the next one. What it was told is durable."""
        await self.flush(caller)
        self.fail(ActorLost(f"the manager was retired: {reason}", expected="its successor", action="nothing"))

    async def newest_checkpoint(self, caller: Caller) -> CheckpointPublished | None:
        """What a publication that begins now may refer to."""
        await self.retaining.begin(caller)
        return self.control.ledger.checkpoints[-1] if self.control.ledger.checkpoints else None

    async def _acknowledged(self, caller: Caller) -> None:
        """Until no host waits for an acknowledgement. Raises what ends the caller."""
        while owed := self.control.results.acknowledging.owed:
            event = self.changed.current()
            self.callers.check(caller)
            self.waits.note("driver", Wait(f"{owed} results to be acknowledged", "hosts", "acknowledgement"))
            await wait_event(event, 1.0)
        self.waits.note("driver", None)

    async def finish(self, caller: Caller, reason: str) -> None:
        """Settle what is left, close for good. May be repeated."""
        with self.callers.call(caller):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.commit_deadline_s):
                    await self.retaining.settled()  # nothing can be recorded after the end
                    await self._acknowledged(caller)
            await self._durable(self.control.finish(reason), "the end of the run")


def open_manager(
    store: Store,
    info: RunInfo,
    limits: Limits,
    clock: Clock,
    settings: ManagerSettings,
    *,
    owner: str,
    reason: str,
    length: int | None,
    group_filter: GroupFilter,
    judged_outside: bool = False,
    recipe: Recipe = UNDECLARED,
    suites: Sequence[Suite] = (),
    topology: Topology = NO_RESOURCES,
    check: Callable[[Ledger], None] = lambda ledger: None,
) -> RolloutManager:
    """Claim the run's journal and restore control from it. Blocks on storage. Raises what makes a run unusable.

    `judged_outside`: the filter is a user's, may take its time, and runs in threads."""
    writer = uuid.uuid4().hex[:12]
    claimed = claim(
        store, info.run, info.num_siblings, owner=owner, writer=writer, reason=reason, clock=clock, check=check
    )
    journal = JournalWriter(info.run, claimed.incarnation, writer, claimed.tail, clock)
    control = RolloutControl(
        claimed.ledger,
        journal,
        limits,
        clock,
        length=length,
        group_filter=group_filter,
        judged_outside=judged_outside,
        suites=suites,
        retention=settings.retention,
        topology=topology,
    )
    control.declare(recipe)
    judge = group_filter if judged_outside else None
    return RolloutManager(store, info, control, clock, settings, random.Random(writer), judge)
