"""Plain executions: prompt groups of sources that cannot reserve, for evaluation.

No receipts, no records, no group of the ledger. What holds all the same: a group takes executing capacity (E) in the
unit of the policy and gives it back exactly once, however its rollouts end; a result of an older attempt, of another
incarnation or of a closed source is counted and changes nothing; a rollout that fails for good is a sample without a
reward, never a reward of 0. Pure, like everything that the scheduler decides with.

    WAITING ──take──► LIVE ──sealed──────────────────► done, with a sample
       ▲                │ ──budget spent─────────────► done, without
       └────────────────┘ failed, or its process died: attempt + 1, at once
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from gpu.rollout.capabilities import Capabilities
from gpu.rollout.limits import Limits, Submission
from gpu.rollout.messages import Dispatch, Identity, Outcome, PlainEnded, PlainTask

LOSSES = (Outcome.ENGINE_LOST, Outcome.WORKER_LOST)


class Sample(NamedTuple):
    """A finished rollout: its reward, and the versions that generated its tokens."""

    reward: float
    tokens: int
    oldest: int
    newest: int


class PlainGroup(NamedTuple):
    """A finished group; None for a sample that failed for good."""

    task: PlainTask
    samples: tuple[Sample | None, ...]


class _Rollout(msgspec.Struct, gc=False):
    attempt: int = -1
    live: bool = False
    failures: int = 0
    losses: int = 0
    sample: Sample | None = None


class _Group(msgspec.Struct):
    task: PlainTask
    source: PlainSource
    rollouts: tuple[_Rollout, ...]
    unfinished: int

    def result(self) -> PlainGroup:
        return PlainGroup(self.task, tuple([rollout.sample for rollout in self.rollouts]))


class PlainSource:
    """An iterator of prompts, `samples` rollouts each, and the buffer of its finished groups.

    A group takes one of `capacity` places when it is submitted and leaves it in `pop`, so that a finished one always
    has room and a consumer that does not come stops submission.
    """

    def __init__(self, tasks: Iterator[PlainTask], samples: int, capacity: int, *, finite: bool) -> None:
        assert samples >= 1, "a group has rollouts"
        assert capacity >= 1, "a finished group has room"
        self.capabilities = Capabilities(finite, reservable=False, resumable=False)
        self.samples = samples
        self._tasks, self._capacity = tasks, capacity
        self._next = next(tasks, None)
        self._finished: deque[PlainGroup] = deque()
        self.running = 0

    @property
    def blocked(self) -> bool:
        """At its transport capacity."""
        return self.running + len(self._finished) >= self._capacity

    @property
    def ready(self) -> bool:
        """Another group may be submitted, as far as the source is concerned."""
        return self._next is not None and not self.blocked

    @property
    def exhausted(self) -> bool:
        """Everything was submitted, has ended and was taken."""
        return self._next is None and not self.running and not self._finished

    def submit(self) -> PlainTask:
        task, self._next = self._next, next(self._tasks, None)
        assert task is not None, "only while ready"
        self.running += 1
        return task

    def finish(self, group: PlainGroup) -> None:
        self.running -= 1
        self._finished.append(group)

    def pop(self) -> PlainGroup | None:
        """The next finished group."""
        return self._finished.popleft() if self._finished else None


class Plain:
    """The plain executions of one incarnation. `used` of E in the unit of the policy; `release(identity)` is called
    once per execution that has ended."""

    def __init__(self, limits: Limits, incarnation: int, release: Callable[[Identity], None]) -> None:
        self._limits, self._incarnation, self._release = limits, incarnation, release
        self._by_sample = limits.submission is Submission.SAMPLE
        self._share = plain_share(limits)
        self._groups: dict[int, _Group] = {}
        self._waiting: dict[tuple[int, int], None] = {}
        self._next = -1
        self.sources: list[PlainSource] = []
        self.used = 0
        self.live = 0
        self.ignored: Counter[str] = Counter()

    # ------------------------------------------------------------------ sources

    def open(self, source: PlainSource) -> None:
        self.sources.append(source)

    def close(self, source: PlainSource) -> list[PlainGroup]:
        """Forget a source. Its live executions end here, and the results they may still send are late. Returns its
        unfinished groups as far as they came. Idempotent."""
        mine = [number for number, group in self._groups.items() if group.source is source]
        left: list[PlainGroup] = []
        for number in mine:
            group = self._groups.pop(number)
            for sibling, rollout in enumerate(group.rollouts):
                self._waiting.pop((number, sibling), None)
                if rollout.live:
                    self._end_attempt(number, sibling, rollout)
            self.used -= not self._by_sample
            left.append(group.result())
        source.running -= len(mine)
        self.sources = [one for one in self.sources if one is not source]
        return left

    # ------------------------------------------------------------------ submission

    def _cost(self, source: PlainSource) -> int:
        return source.samples if self._by_sample else 1

    def claim(self) -> int:
        """E that the cheapest waiting group lacks within the plain share: owned groups leave it free."""
        left = self._share - self.used
        costs = [self._cost(source) for source in self.sources if source.ready]
        if self._waiting and self._by_sample:
            costs.append(1)
        return min([cost for cost in costs if cost <= left], default=0)

    def take(self, room: int, version: int) -> list[Dispatch]:
        """Attempts to start now with `room` of E: first again what ended without a result, then whole new groups, one
        of each source in turn."""
        room = min(room, self._share - self.used)
        minted: list[Dispatch] = []
        for number, sibling in list(self._waiting)[: max(0, room) if self._by_sample else None]:
            del self._waiting[number, sibling]
            minted.append(self._mint(number, sibling, version))
        room -= len(minted) if self._by_sample else 0
        while (source := self._fitting(room)) is not None:
            minted += self._submit(source, version)
            room -= self._cost(source)
            self.sources.remove(source)
            self.sources.append(source)
        return minted

    def _fitting(self, room: int) -> PlainSource | None:
        return next((source for source in self.sources if source.ready and self._cost(source) <= room), None)

    def _submit(self, source: PlainSource, version: int) -> list[Dispatch]:
        number, self._next = self._next, self._next - 1
        rollouts = tuple([_Rollout() for _ in range(source.samples)])
        self._groups[number] = _Group(source.submit(), source, rollouts, source.samples)
        self.used += not self._by_sample
        return [self._mint(number, sibling, version) for sibling in range(source.samples)]

    def _mint(self, number: int, sibling: int, version: int) -> Dispatch:
        group = self._groups[number]
        rollout = group.rollouts[sibling]
        rollout.attempt, rollout.live = rollout.attempt + 1, True
        self.live += 1
        self.used += self._by_sample
        return Dispatch(self._identity(number, sibling, rollout), version, 0, None, group.task)

    def _identity(self, number: int, sibling: int, rollout: _Rollout) -> Identity:
        """Groups count down from -1, so no owned execution has it; the incarnation tells it from earlier ones."""
        return Identity(number, sibling, rollout.attempt, self._incarnation)

    # ------------------------------------------------------------------ ends

    def end(self, ended: PlainEnded, newest: int) -> bool:
        """An attempt ended; `newest` is the newest published version. False when it is not a live one: too late, or
        twice."""
        identity = ended.identity
        group = self._groups.get(identity.group)
        rollout = group.rollouts[identity.sibling] if group and 0 <= identity.sibling < len(group.rollouts) else None
        if (
            group is None
            or rollout is None
            or not rollout.live
            or (identity.attempt, identity.incarnation) != (rollout.attempt, self._incarnation)
        ):
            self.ignored[ended.outcome.value] += 1
            return False
        self._end_attempt(identity.group, identity.sibling, rollout)
        if ended.outcome is Outcome.SEALED and _well_formed(ended, newest):
            rollout.sample = Sample(ended.reward, ended.tokens, ended.oldest, ended.newest)
        else:
            rollout.losses += ended.outcome in LOSSES
            rollout.failures += ended.outcome not in LOSSES
            if rollout.failures < self._limits.max_attempts and rollout.losses < self._limits.max_losses:
                self._waiting[identity.group, identity.sibling] = None
                return True
        self._finish_rollout(identity.group, group)
        return True

    def _end_attempt(self, number: int, sibling: int, rollout: _Rollout) -> None:
        rollout.live = False
        self.live -= 1
        self.used -= self._by_sample
        self._release(self._identity(number, sibling, rollout))

    def _finish_rollout(self, number: int, group: _Group) -> None:
        group.unfinished -= 1
        if not group.unfinished:
            del self._groups[number]
            self.used -= not self._by_sample
            group.source.finish(group.result())


def _well_formed(ended: PlainEnded, newest: int) -> bool:
    return ended.tokens >= 1 and 0 <= ended.oldest <= ended.newest <= newest and math.isfinite(ended.reward)


def plain_share(limits: Limits) -> int:
    """How much of E plain executions may use at once: half, and never so much that no owned group fits beside them.

    The rest is always left to training, however slow they are."""
    owned = limits.num_siblings if limits.submission is Submission.SAMPLE else 1
    return max(0, min(limits.max_executing // 2, limits.max_executing - owned))
