"""Batches for the trainer: one lease at a time, judged with the version that will train it.

A lease is committed or rolled back exactly once; repeating either is harmless. Groups enter the buffer when the record
that completed them is durable, leave it in completion order (or newest first) within the staleness rule, and whatever
leaves otherwise is durably requeued or discarded first.
"""

from __future__ import annotations

from collections import Counter

from gpu.rollout.admission import Admission
from gpu.rollout.books import Books
from gpu.rollout.limits import Limits, Order
from gpu.rollout.messages import Grant, Wait
from gpu.rollout.results import Results
from gpu.rollout.scheduler import Scheduler
from gpu.rollout.staleness import select
from storage import schema
from storage.errors import LeaseRefused
from storage.ledger import RESERVED, UNKNOWN_VERSION, Group, Lease, make_lease


class Leasing:
    """`try_lease` answers with a grant, with what it waits for, or with None: the source is exhausted and settled."""

    def __init__(
        self, books: Books, limits: Limits, admission: Admission, scheduler: Scheduler, results: Results
    ) -> None:
        self._books, self._limits = books, limits
        self._admission, self._scheduler, self._results = admission, scheduler, results
        self.staleness: Counter[int] = Counter()
        """Leased groups by the versions between their oldest token and their training."""
        self._committed_last: tuple[int, int, str, str] | None = None
        self._rolled_back_last: int | None = None

    # ------------------------------------------------------------------ issue

    def try_lease(self) -> Grant | Wait | None:
        ledger = self._books.ledger
        if ledger.lease is not None:
            return self.grant(ledger.lease)
        closed = self._admission.why_closed()
        if closed:
            return Wait(closed, "the owner of the hold", "hold", "driver")
        ready = self._ready()
        if self._at_the_end():
            return self._last_batch(ready)
        selection = select(
            [(group.ordinal, group.oldest) for group in ready],
            self._unready(ready),
            self._limits.staleness,
            self._limits.batch,
            ledger.step,
        )
        for ordinal in selection.overdue:
            self.requeue(ordinal, "stale")
        if selection.chosen is not None:
            return self._issue(sorted(selection.chosen), final=False)
        restarted = [ordinal for ordinal in selection.culprits if self._restart_if_stuck(ordinal)]
        if restarted:
            return self.try_lease()
        return Wait(selection.reason, f"generation ({self._who(selection.culprits)})", "batch", "workers")

    def _who(self, culprits: tuple[int, ...]) -> str:
        """What a batch waits for, in detail."""
        stuck = self._results.judging.why()
        if stuck:
            return stuck
        idle = self._scheduler.why_idle()
        return f"groups {list(culprits[:5])}" if culprits else idle.reason if idle else "nothing keeps it"

    def _ready(self) -> list[Group]:
        """Completed groups whose completion is durable, in the order of preference."""
        ledger, durable = self._books.ledger, self._books.journal.durable_seq
        ready = [group for ordinal in ledger.completed if (group := ledger.groups[ordinal]).completed_seq <= durable]
        return ready if self._limits.order is Order.FIFO else ready[::-1]

    def _unready(self, ready: list[Group]) -> list[tuple[int, int]]:
        """Started groups that are not ready, with their oldest versions."""
        ledger = self._books.ledger
        taken = {group.ordinal for group in ready}
        return [
            (group.ordinal, group.oldest)
            for group in ledger.groups.values()
            if group.oldest != UNKNOWN_VERSION and group.ordinal not in taken
        ]

    def _at_the_end(self) -> bool:
        """Nothing but completed groups is left of a finite source."""
        ledger = self._books.ledger
        return self._scheduler.exhausted and len(ledger.completed) == ledger.retained

    def _last_batch(self, ready: list[Group]) -> Grant | Wait | None:
        if not self._books.ledger.completed:
            return None
        if len(ready) < len(self._books.ledger.completed):
            return Wait("the last groups are not durable yet", "storage", "storage")
        bound, step = self._limits.staleness, self._books.ledger.step
        overdue = [group.ordinal for group in ready if bound is not None and group.oldest + bound < step]
        if overdue:
            for ordinal in overdue:
                self.requeue(ordinal, "stale")
            again = f"groups {overdue[:5]} start again: beyond the staleness bound"
            return Wait(again, "generation", "batch", "workers")
        if len(ready) >= self._limits.batch:
            oldest_first = sorted(ready, key=lambda group: (group.oldest, group.ordinal))
            return self._issue(sorted(group.ordinal for group in oldest_first[: self._limits.batch]), final=False)
        if self._limits.discard_end_of_source:
            self._results.discard([group.ordinal for group in ready], "end_of_source")
            return None
        return self._issue(sorted(group.ordinal for group in ready), final=True)

    def _restart_if_stuck(self, ordinal: int) -> bool:
        """A group in backoff at its deadline starts whole again instead of holding up the batch."""
        group = self._books.ledger.groups[ordinal]
        if ordinal not in self._scheduler.backoff or group.state is not RESERVED:
            return False
        self.requeue(ordinal, "deadline")
        return True

    def _issue(self, ordinals: list[int], *, final: bool) -> Grant:
        ledger = self._books.ledger
        self._books.record(schema.LeaseIssued(ledger.next_lease, ledger.step + 1, tuple(ordinals), ledger.step, final))
        assert ledger.lease is not None
        self.staleness.update([ledger.step - group.oldest for group in ledger.lease.groups])
        return self.grant(ledger.lease)

    def grant(self, lease: Lease) -> Grant:
        """The open lease with where its rows lie."""
        hot = {name: data for name in lease.blocks if (data := self._books.hot.get(name)) is not None}
        ledger = self._books.ledger
        return Grant(lease, ledger.state_digest, {name: ledger.blocks[name] for name in lease.blocks}, hot)

    def buffered_staleness(self) -> Counter[int]:
        """Completed groups by how old they are now, in versions."""
        ledger = self._books.ledger
        return Counter([ledger.step - ledger.groups[ordinal].oldest for ordinal in ledger.completed])

    def peek(self, count: int) -> Grant | None:
        """The first `count` ready groups as if they were leased, for moving payload early; changes nothing."""
        ready = self._ready()[:count]
        if not ready:
            return None
        return self.grant(make_lease(0, 0, self._books.ledger.step, ready, final=False))

    # ------------------------------------------------------------------ settle

    def commit(self, lease: int, step: int, state_digest: str, weights_digest: str, metrics: dict[str, float]) -> int:
        """The step happened. Returns the sequence number to wait for. Raises `LeaseRefused`."""
        ledger = self._books.ledger
        this = (lease, step, state_digest, weights_digest)
        if this == self._committed_last or self._committed(*this):
            return self._books.journal.last_seq
        if ledger.lease is None or (ledger.lease.lease, ledger.lease.step) != (lease, step):
            raise self._refuse("commit", lease)
        seq = self._books.record(schema.StepCommitted(step, lease, state_digest, weights_digest, metrics))
        self._committed_last = this
        return seq

    def _committed(self, lease: int, step: int, state_digest: str, weights_digest: str) -> bool:
        done = self._books.ledger.steps.get(step)
        if done is None or done.lease.lease != lease:
            return False
        return (done.state_digest, done.weights_digest) == (state_digest, weights_digest)

    def roll_back(self, lease: int, reason: str) -> int:
        """The trainer is proven untouched: the groups are completed again. Raises `LeaseRefused`."""
        ledger = self._books.ledger
        if lease == self._rolled_back_last:
            return self._books.journal.last_seq
        if ledger.lease is None or ledger.lease.lease != lease:
            raise self._refuse("rollback", lease)
        self._rolled_back_last = lease
        return self._books.record(schema.LeaseRolledBack(lease, reason))

    def _refuse(self, what: str, lease: int) -> LeaseRefused:
        found = self._books.ledger.lease
        return LeaseRefused(
            f"{what} of lease {lease} while {f'lease {found.lease} is open' if found else 'no lease is open'}",
            expected=f"lease {lease} to be open, or this very {what} to be repeated",
            action="ask the manager for the open lease and start the step again",
        )

    # ------------------------------------------------------------------ leaving the buffer untrained

    def requeue(self, ordinal: int, reason: str) -> None:
        """The group starts whole again; its finished work is counted as waste."""
        self._books.record(schema.GroupRequeued(ordinal, reason))
        self._scheduler.backoff.drop(ordinal)
        self._scheduler.waits(ordinal)

    def evict(self) -> None:
        """Keep the buffer within its optional cap: stalest first, then the oldest."""
        cap = self._limits.eviction_cap
        if cap is None:
            return
        ready = self._ready()
        for group in sorted(ready, key=lambda group: (group.oldest, group.ordinal))[: max(0, len(ready) - cap)]:
            self.requeue(group.ordinal, "overflow")
