"""Which attempts start now: the submission scheduler and its queue.

A whole group is submitted when every gate has room: admission open, an engine version confirmed, E executing, P
completed, R retained, and the staleness rule. Later attempts of single siblings need only E. Attempts are minted here
and handed to whichever worker asks; a worker that dies gives its attempts back. Pure: it decides, others wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat

from gpu.rollout.admission import Admission
from gpu.rollout.backoff import Backoff
from gpu.rollout.books import Books
from gpu.rollout.limits import Limits, Submission
from gpu.rollout.messages import Continuation, Dispatch, Identity, Wait
from gpu.rollout.plain import Plain
from gpu.rollout.staleness import room
from gpu.rollout.topology import NO_RESOURCES, Topology
from storage import schema
from storage.ledger import GENERATING, UNKNOWN_VERSION, WAITING, Boundary, Group, Rollout


class Scheduler:
    """`version` is the policy version every serving engine has confirmed, None while no engine serves. `length` is the
    number of ordinals of the source, None when endless. `plain` executions share E, its queue and `active`."""

    def __init__(
        self,
        books: Books,
        limits: Limits,
        admission: Admission,
        length: int | None,
        plain: Plain,
        topology: Topology = NO_RESOURCES,
    ) -> None:
        self._books, self._limits, self._admission, self._length = books, limits, admission, length
        self._topology = topology
        self._plain = plain
        self._queue: deque[Dispatch] = deque()
        self._waiting: dict[int, None] = dict.fromkeys(
            ordinal for ordinal, group in books.ledger.groups.items() if _missing(group)
        )
        self.backoff = Backoff(limits.backoff_base_s, limits.backoff_max_s, limits.max_backoff)
        self.active: dict[Identity, str] = {}
        self.version: int | None = None
        self._bursts = deque([(0, books.clock.monotonic())])

    # ------------------------------------------------------------------ what happened

    def waits(self, ordinal: int) -> None:
        """The group has siblings without an attempt (again)."""
        self._waiting[ordinal] = None

    def settled(self, ordinal: int) -> None:
        """The group is no longer to be dispatched: it is complete or settled."""
        self._waiting.pop(ordinal, None)
        self.backoff.drop(ordinal)

    def ended(self, identity: Identity) -> None:
        self.active.pop(identity, None)

    def published(self, identities: Iterable[Identity]) -> None:
        """Live attempts are sealed."""
        for identity in identities:
            del self.active[identity]

    @property
    def num_waiting(self) -> int:
        """Groups with siblings that wait for another attempt."""
        return len(self._waiting)

    def oldest_age(self) -> float:
        """Seconds since the oldest unsettled group was handed out, as far as this incarnation knows."""
        if not self._books.ledger.groups:
            return 0.0
        self._forget_bursts()
        return self._books.clock.monotonic() - self._bursts[0][1]

    def _forget_bursts(self) -> None:
        """Keep when groups were handed out only back to the oldest unsettled one."""
        oldest = next(iter(self._books.ledger.groups))
        while len(self._bursts) > 1 and self._bursts[1][0] <= oldest:
            self._bursts.popleft()

    def of_worker(self, worker: str) -> list[Identity]:
        return [identity for identity, owner in self.active.items() if owner == worker]

    # ------------------------------------------------------------------ what may happen

    @property
    def exhausted(self) -> bool:
        """The source has no further ordinal."""
        return self._length is not None and self._books.ledger.frontier >= self._length

    def gate(self) -> Wait | None:
        """What closes every submission, or None."""
        closed = self._admission.why_closed()
        if closed:
            return Wait(closed, "the owner of the hold", "hold", "driver")
        if self.version is None:
            return Wait(
                "no engine has confirmed the current policy version", "weight update, engine start", "version", "driver"
            )
        age, size = self._books.journal.undurable_age(), self._books.journal.undurable_bytes
        if age > self._limits.undurable_age_s or size > self._limits.undurable_bytes:
            return Wait(f"the journal's tail is not durable for {age:.1f} s, {size} bytes", "storage", "storage")
        return None

    def why_idle(self) -> Wait | None:
        """The first gate that keeps the next group from being submitted; None when nothing does."""
        ledger, limits = self._books.ledger, self._limits
        gate = self.gate()
        if gate is not None:
            return gate
        if self._room() - self._plain.claim() < self._cost():
            live = ledger.live + self._plain.live
            return Wait(f"executing (E): {live} rollouts are live", "workers and engines", "E", "workers")
        if ledger.dispatched >= limits.max_completed:
            places = f"{ledger.dispatched} of {limits.max_completed} groups"
            return Wait(f"completed (P): {places}", "the trainer", "P", "trainer")
        if ledger.retained >= limits.max_retained:
            return Wait(
                f"retained (R): {ledger.retained} of {limits.max_retained} groups", "the trainer", "R", "trainer"
            )
        if not self._admissible():
            bound = f"staleness bound {limits.staleness} at version {ledger.step}"
            return Wait(bound, "the trainer", "staleness", "trainer")
        if len(self.backoff):
            return Wait(f"{len(self.backoff)} groups in backoff", "time", "backoff")
        return Wait("the source is exhausted", "nobody", "source") if self.exhausted else None

    def _room(self) -> int:
        """Free executing capacity, in the unit of the policy."""
        ledger = self._books.ledger
        used = ledger.live if self._limits.submission is Submission.SAMPLE else ledger.totals[GENERATING]
        return self._limits.max_executing - used - self._plain.used

    def _cost(self) -> int:
        return self._limits.num_siblings if self._limits.submission is Submission.SAMPLE else 1

    def _admissible(self) -> int:
        """How many fresh groups the staleness rule lets start."""
        assert self.version is not None
        ledger, limits = self._books.ledger, self._limits
        return room(ledger.oldest_counts, limits.staleness, limits.batch, ledger.step, self.version)

    # ------------------------------------------------------------------ doing it

    def take(self, worker: str, limit: int) -> list[Dispatch]:
        """Up to `limit` attempts for this worker, minting new ones as far as the gates allow."""
        self._fill()
        taken: list[Dispatch] = []
        unreadable: list[Dispatch] = []
        queue, active = self._queue, self.active
        while queue and len(taken) < limit:
            dispatch = queue.popleft()
            if dispatch.identity not in active:
                continue
            if dispatch.boundary:
                found = self._continued(dispatch)
                if found is None:
                    unreadable.append(dispatch)
                    continue
                dispatch = found
            active[dispatch.identity] = worker
            taken.append(dispatch)
        queue.extendleft(reversed(unreadable))
        return taken

    def _continued(self, dispatch: Dispatch) -> Dispatch | None:
        """With the continuation, if the attempt has one; None while its turns cannot be read."""
        identity = dispatch.identity
        rollout = self._books.ledger.groups[identity.group].rollouts[identity.sibling]
        if rollout.boundary is None:
            return dispatch
        if not self._readable(rollout):
            return None
        return Dispatch(identity, dispatch.version, dispatch.boundary, self._continuation(rollout, rollout.boundary))

    def _readable(self, rollout: Rollout) -> bool:
        """Whether a worker can read the turns of a continuation: each is hot, or durable at a known place."""
        blocks = ((name, self._books.ledger.blocks[name]) for name, _ in rollout.rows)
        return all(not block.inline or block.slot >= 0 or self._books.hot.get(name) for name, block in blocks)

    def _continuation(self, rollout: Rollout, boundary: Boundary) -> Continuation:
        names = {name for name, _ in rollout.rows}
        return Continuation(
            rows=rollout.rows,
            blocks={name: self._books.ledger.blocks[name] for name in names},
            hot={name: data for name in names if (data := self._books.hot.get(name)) is not None},
            at=boundary,
        )

    def _fill(self) -> None:
        if self.gate() is not None:
            return
        for ordinal in self.backoff.release_due(self._books.clock.monotonic()):
            self._waiting.setdefault(ordinal, None)
        if self._waiting:
            self._dispatch_waiting()
        self._submit_new(self._submit_plain() if self._plain.sources else 0)

    def _dispatch_waiting(self) -> None:
        """Attempts of groups that are owned already: earliest deadline first, then in order of the source."""
        ledger = self._books.ledger
        again: list[Dispatch] = []
        known = [ledger.groups[ordinal] for ordinal in self._waiting if ordinal not in self.backoff]
        for group in sorted(known, key=_urgency):
            missing = [] if spent(group, self._limits) else _missing(group)
            if not missing:
                self._waiting.pop(group.ordinal)
                continue
            fits = self._fits(group, len(missing))
            if fits:
                again += self._mint(group, missing[:fits])
        # Retries and restored groups go before attempts that were minted and nobody has taken yet.
        self._queue.extendleft(reversed(again))

    def _fits(self, group: Group, missing: int) -> int:
        """How many of a group's missing siblings may start."""
        ledger, room = self._books.ledger, self._room()
        if group.oldest == UNKNOWN_VERSION and not self._admissible():
            return 0
        if not group.dispatched and ledger.dispatched >= self._limits.max_completed:
            return 0
        if self._limits.submission is Submission.GROUP:
            return missing if group.num_live or room >= 1 else 0
        if not group.dispatched and room < missing:
            return 0
        return min(room, missing)

    def _submit_plain(self) -> int:
        """Plain executions within their share of E; returns what fresh groups leave free of it for them."""
        assert self.version is not None
        minted = self._plain.take(self._room(), self.version)
        self.active.update(dict.fromkeys([dispatch.identity for dispatch in minted], ""))
        self._queue.extend(minted)
        return self._plain.claim()

    def _submit_new(self, keep: int) -> None:
        """Fresh groups, as many as the gates allow; `keep` of E stays free."""
        ledger, limits = self._books.ledger, self._limits
        most = min(
            (self._room() - keep) // self._cost(),
            limits.max_completed - ledger.dispatched,
            limits.max_retained - ledger.retained,
            _most_left(self._length, ledger.frontier),
        )
        count = min(most, self._admissible()) if most > 0 else 0
        if count > 0:
            first, incarnation = ledger.frontier, ledger.incarnation
            assert self.version is not None
            self._books.record(schema.GroupReserved(first, count))
            self._bursts.append((first, self._books.clock.monotonic()))
            self._forget_bursts()
            self._books.record(schema.GroupsDispatched(first, count, limits.num_siblings, self.version))
            siblings = range(limits.num_siblings)
            ordinals = range(first, first + count)
            minted = [Identity(ordinal, sibling, 0, incarnation) for ordinal in ordinals for sibling in siblings]
            self.active.update(zip(minted, repeat("")))
            version = self.version
            self._queue.extend([Dispatch(identity, version, 0) for identity in minted])

    def give_up(self, group: Group, siblings: list[int]) -> int:
        """Drop the turns from which these waiting siblings cannot go on; returns of how many."""
        lost: dict[str, list[int]] = {}
        for sibling in siblings:
            at = group.rollouts[sibling].boundary
            if at is not None and (reason := self._topology.why_not_continuable(at)):
                lost.setdefault(reason, []).append(sibling)
        for reason, found in lost.items():
            self._books.record(schema.ContinuationDiscarded((group.ordinal,) * len(found), tuple(found), reason))
        return sum(map(len, lost.values()))

    def _mint(self, group: Group, siblings: list[int]) -> list[Dispatch]:
        assert self.version is not None
        ledger = self._books.ledger
        self.give_up(group, siblings)
        rollouts = [group.rollouts[sibling] for sibling in siblings]
        attempts = tuple(rollout.attempt + 1 for rollout in rollouts)
        boundaries = tuple(rollout.boundary.index if rollout.boundary else -1 for rollout in rollouts)
        self._books.record(schema.AttemptsMinted(group.ordinal, tuple(siblings), attempts, boundaries, self.version))
        minted = [
            Dispatch(
                Identity(group.ordinal, sibling, rollout.attempt, ledger.incarnation), self.version, rollout.boundaries
            )
            for sibling, rollout in zip(siblings, rollouts, strict=True)
        ]
        self.active.update(dict.fromkeys([dispatch.identity for dispatch in minted], ""))
        if len(siblings) == len(group.rollouts) or not _missing(group):
            self._waiting.pop(group.ordinal, None)
        return minted


def spent(group: Group, limits: Limits) -> Rollout | None:
    """A rollout whose attempt budget is used up: its group is set aside as soon as none of its siblings is live."""
    for rollout in group.rollouts:
        if rollout.failures >= limits.max_attempts or rollout.losses >= limits.max_losses:
            return rollout
    return None


def _missing(group: Group) -> list[int]:
    return [sibling for sibling, rollout in enumerate(group.rollouts) if rollout.state is WAITING]


def _urgency(group: Group) -> tuple[bool, int, int]:
    return (group.oldest == UNKNOWN_VERSION, group.oldest, group.ordinal)


def _most_left(length: int | None, frontier: int) -> int:
    """Ordinals the source can still hand out."""
    return 1 << 62 if length is None else max(0, length - frontier)
