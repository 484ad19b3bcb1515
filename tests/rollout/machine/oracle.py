"""What the records of a run say, counted in the plainest way and without the ledger.

Each record is judged against those before it by the rules of ownership; the picture that results is what the ledger's
views must show. One oracle reads one lineage: after a crash a new one reads what is durable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gpu.rollout.limits import Limits
from gpu.rollout.messages import Identity
from storage import schema
from storage.ledger import Ledger
from storage.schema import KIND_OF, Record
from tests.rollout.machine.slot import Slot

RESTART_ONLY = "pen"
"""The resource after whose change a rollout can only start over."""
SUBMISSIONS = ("group_reserved", "groups_dispatched", "attempts_minted")


@dataclass
class Owned:
    """An unsettled group. `whole`: it is redone whole when it loses an attempt; `lost`: it lost one since it began."""

    slots: list[Slot]
    whole: bool = False
    lost: bool = False
    dispatched: bool = False
    completed: bool = False
    leased: bool = False

    @property
    def place(self) -> str:
        if self.completed:
            return "leased" if self.leased else "completed"
        return "generating" if self.sealed or any(slot.live for slot in self.slots) else "reserved"

    @property
    def sealed(self) -> bool:
        return all(slot.sealed for slot in self.slots)

    @property
    def oldest(self) -> int:
        return min(version for slot in self.slots for version in slot.versions)


class Oracle:
    """Raises AssertionError for a record that breaks a rule. `staleness` is the bound for leases from now on. `tally`
    counts what happened, by kind and by reason."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.staleness: int | None = None
        self.tally: Counter[str] = Counter()
        self.groups: dict[int, Owned] = {}
        self.settled: dict[int, str] = {}
        self.trained: Counter[int] = Counter()
        self.lease: schema.LeaseIssued | None = None
        self.states: dict[int, tuple[int, str, str]] = {}
        self.base = 0
        self.tried: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self.retired: dict[str, int] = {}
        self.batches: dict[int, dict[int, list[Slot]]] = {}
        self.published_in = 0
        self.frontier = self.incarnation = self.step = self.snapshot = 0
        self.due: set[tuple[str, int]] = set()
        self.evaluated: set[tuple[str, int]] = set()
        self.recovery = "sibling"
        self.finished = ""
        self._next_lease = 1
        self._used: dict[int, list[Slot]] = {}

    # ------------------------------------------------------------------ the picture

    @property
    def places(self) -> dict[int, str]:
        """Where each unsettled group is."""
        return {ordinal: group.place for ordinal, group in self.groups.items()}

    @property
    def checkpoint(self) -> int:
        """The newest one's step."""
        return max(self.tried.values(), default=0)

    @property
    def live(self) -> set[Identity]:
        return {
            Identity(ordinal, sibling, slot.attempt, slot.incarnation)
            for ordinal, sibling, slot in self._slots()
            if slot.live
        }

    @property
    def dispatched(self) -> int:
        return sum(group.dispatched for group in self.groups.values())

    def _slots(self) -> Iterator[tuple[int, int, Slot]]:
        for ordinal, group in self.groups.items():
            for sibling, slot in enumerate(group.slots):
                yield ordinal, sibling, slot

    def compare(self, ledger: Ledger) -> None:
        """The ledger's views show this picture; each ordinal handed out is in exactly one place of them."""
        places = self.places
        shown = {ordinal: group.state.value for ordinal, group in ledger.groups.items()}
        assert shown == places
        settled = {
            "consumed": sorted(ledger.consumed),
            "discarded": sorted(ledger.discarded),
            "quarantined": sorted(ledger.quarantined),
        }
        for where, ordinals in settled.items():
            assert ordinals == sorted([o for o, found in self.settled.items() if found == where]), where
        found = sorted([*shown, *settled["consumed"], *settled["discarded"], *settled["quarantined"]])
        assert found == list(range(ledger.frontier)), "each ordinal below the frontier is in exactly one place"
        assert ledger.frontier == self.frontier
        counts = Counter(places.values())
        states = ledger.state_counts()
        assert states == {name: counts[name] for name in states}
        assert ledger.retained == sum(states.values()) == len(self.groups)
        assert ledger.live == sum([slot.live for group in self.groups.values() for slot in group.slots])
        assert ledger.dispatched == self.dispatched
        assert (ledger.step, ledger.incarnation) == (self.step, self.incarnation)
        for shown, known in (
            (ledger.checkpoints, self.tried),
            (ledger.kept, self.kept),
            (ledger.retired, self.retired),
        ):
            assert {one.manifest: one.step for one in shown} == known
        assert sorted(ledger.steps) == list(range(self.base + 1, self.step + 1)), "what a redo needs"
        assert (set(ledger.due), ledger.evaluated) == (self.due, self.evaluated)
        assert not any(group.whole and group.lost for group in self.groups.values()), "redone whole"
        assert (ledger.lease.lease if ledger.lease else None) == (self.lease.lease if self.lease else None)
        for ordinal, sibling, slot in self._slots():
            if not slot.sealed:
                slot.compare(ledger.groups[ordinal].rollouts[sibling].boundary)
            assert slot.live or not (slot.unfit and slot.turns), "turns that nobody can go on from are given up"
        for kind in KIND_OF.values():
            assert ledger.counts[kind] == self.tally[kind], kind

    # ------------------------------------------------------------------ one record

    def see(self, record: Record, *, held: bool = False) -> None:
        """`held`: a hold is up, or admission is closed for good."""
        kind = KIND_OF[type(record)]
        assert not self.finished or kind == "run_claimed", "nothing but claims after the end"
        assert not (held and kind in (*SUBMISSIONS, "lease_issued")), f"{kind} under a hold"
        judge = getattr(self, f"_{kind}", None)
        if judge is not None:
            judge(record)
        self.tally[kind] += 1
        if isinstance(reason := getattr(record, "reason", None), str):
            self.tally[f"{kind} {reason.split(' ')[0]}"] += 1

    def _run_claimed(self, record: schema.RunClaimed) -> None:
        assert record.incarnation == self.incarnation + 1
        self.incarnation = record.incarnation
        for group in self.groups.values():
            group.lost |= any(slot.live for slot in group.slots) and any(slot.turns for slot in group.slots)
        for _, _, slot in self._slots():
            slot.live = False

    def _group_reserved(self, record: schema.GroupReserved) -> None:
        assert record.first == self.frontier
        for ordinal in range(record.first, record.first + record.count):
            self.groups[ordinal] = Owned([Slot() for _ in range(self._limits.num_siblings)])
        self.frontier += record.count

    def _attempts_minted(self, record: schema.AttemptsMinted) -> None:
        group = self.groups[record.group]
        assert not group.completed
        for sibling, attempt, boundary in zip(record.siblings, record.attempts, record.boundaries, strict=True):
            slot = group.slots[sibling]
            assert attempt == slot.attempt + 1, "attempts are contiguous"
            assert not slot.live, "one attempt of a rollout at a time"
            assert not slot.sealed, "a sealed attempt is the last one"
            assert boundary == (slot.last if slot.turns else -1), "an attempt goes on from the last boundary there is"
            assert not (slot.unfit and slot.turns), "nor from turns that another could not go on from"
            assert not slot.uses(RESTART_ONLY), "nor from what can only start over"
            self.tally["continued"] += boundary >= 0
            self.tally["continued from an answer"] += slot.answer >= 0
            self.tally["continued with an open request"] += slot.open is not None
            self._start(slot, attempt, record.version)
        if not group.dispatched:
            group.dispatched, group.whole = True, self.recovery == "prompt_group"

    def _groups_dispatched(self, record: schema.GroupsDispatched) -> None:
        assert record.siblings == self._limits.num_siblings
        for ordinal in range(record.first, record.first + record.count):
            group = self.groups[ordinal]
            assert not group.dispatched
            for slot in group.slots:
                assert slot.attempt == -1, "a fresh group has had no attempt"
                self._start(slot, 0, record.version)
            group.dispatched, group.whole = True, self.recovery == "prompt_group"

    def _start(self, slot: Slot, attempt: int, version: int) -> None:
        assert version <= self.step, "a version that was published"
        slot.start(attempt, self.incarnation, version)

    def _current(self, ordinal: int, sibling: int, attempt: int) -> Slot:
        slot = self.groups[ordinal].slots[sibling]
        assert (slot.live, slot.attempt) == (True, attempt), "only the live attempt counts"
        return slot

    def _attempt_abandoned(self, record: schema.AttemptAbandoned) -> None:
        self._current(record.group, record.sibling, record.attempt).abandon(record.reason)
        self.groups[record.group].lost = True

    def _turn_committed(self, record: schema.TurnCommitted) -> None:
        slot = self._current(record.group, record.sibling, record.attempt)
        if slot.answer >= 0:
            self.tally["turn with an account" if record.row >= 0 else "turn without an account"] += 1
        slot.turned(record, self.step)

    def _model_answered(self, record: schema.ModelAnswered) -> None:
        self._current(record.group, record.sibling, record.attempt).answered(record, self.step)

    def _request_intent(self, record: schema.RequestIntent) -> None:
        self._current(record.group, record.sibling, record.attempt).intend(record)

    def _request_result(self, record: schema.RequestResult) -> None:
        slot = self._current(record.group, record.sibling, record.attempt)
        late = slot.open is not None and record.attempt != slot.asked_by
        self.tally["result for an older attempt"] += late
        self.tally["change" if slot.result(record) else "no change"] += 1

    def _resource_exported(self, record: schema.ResourceExported) -> None:
        self._current(record.group, record.sibling, record.attempt).export(record)

    def _continuation_discarded(self, record: schema.ContinuationDiscarded) -> None:
        assert len(set(zip(record.groups, record.siblings, strict=True))) == len(record.groups) > 0
        for ordinal, sibling in zip(record.groups, record.siblings, strict=True):
            slot = self.groups[ordinal].slots[sibling]
            assert not slot.live
            assert not slot.sealed, "a result is never given up"
            assert slot.turns, "there is something to give up"
            assert slot.unfit or slot.uses(RESTART_ONLY), "and a reason to"
            slot.drop()

    def _sealed(self, record: schema.Sealed) -> None:
        columns = (record.groups, record.siblings, record.attempts, record.oldest, record.samples, record.rewards)
        for ordinal, sibling, attempt, oldest, samples, reward in zip(*columns, strict=True):
            slot = self._current(ordinal, sibling, attempt)
            assert abs(reward) < float("inf"), "a reward is a finite number"
            self.tally["sealed out of an answer"] += slot.answer >= 0
            slot.seal(oldest, samples - 1, self.step)

    def _group_completed(self, record: schema.GroupCompleted) -> None:
        for ordinal in record.groups:
            assert self.groups[ordinal].sealed, "a completed group has all its siblings"
            self.groups[ordinal].completed = True

    def _settle(self, ordinal: int, where: str) -> None:
        assert ordinal not in self.settled, "settled once"
        self.settled[ordinal] = where
        del self.groups[ordinal]

    def _group_discarded(self, record: schema.GroupDiscarded) -> None:
        for ordinal in record.groups:
            assert not self.groups[ordinal].leased
            self._settle(ordinal, "discarded")

    def _group_requeued(self, record: schema.GroupRequeued) -> None:
        group = self.groups[record.group]
        assert group.place in ("reserved", "completed")
        self._drop(group)

    def _drop(self, group: Owned) -> None:
        group.completed, group.lost, group.whole = False, False, self.recovery == "prompt_group"
        for slot in group.slots:
            slot.drop()

    def _group_quarantined(self, record: schema.GroupQuarantined) -> None:
        group = self.groups[record.group]
        assert group.place == "reserved", "no attempt of it is live"
        attempts, losses = self._limits.max_attempts, self._limits.max_losses
        assert any(slot.failures >= attempts or slot.losses >= losses for slot in group.slots), "a budget is spent"
        self._used[record.group] = [slot.again() for slot in group.slots]
        self._settle(record.group, "quarantined")

    def _quarantine_released(self, record: schema.QuarantineReleased) -> None:
        assert self.settled.pop(record.group) == "quarantined"
        self.groups[record.group] = Owned(self._used.pop(record.group))

    def _lease_issued(self, record: schema.LeaseIssued) -> None:
        assert self.lease is None, "one lease at a time"
        assert (record.lease, record.step, record.version) == (self._next_lease, self.step + 1, self.step)
        for ordinal in record.groups:
            group = self.groups[ordinal]
            assert group.place == "completed"
            age = record.version - group.oldest
            assert age >= 0, "no token is newer than the version that trains it"
            assert self.staleness is None or age <= self.staleness, "the staleness bound holds at training"
            group.leased = True
        self.lease, self._next_lease = record, record.lease + 1
        self.tally["lease_final"] += record.final

    def _lease_rolled_back(self, record: schema.LeaseRolledBack) -> None:
        for ordinal in self._close_lease(record.lease).groups:
            self.groups[ordinal].leased = False

    def _close_lease(self, lease: int) -> schema.LeaseIssued:
        found, self.lease = self.lease, None
        assert found is not None
        assert found.lease == lease
        return found

    def _step_committed(self, record: schema.StepCommitted) -> None:
        lease = self._close_lease(record.lease)
        assert record.step == lease.step == self.step + 1
        self.batches[record.step] = {o: [slot.again() for slot in self.groups[o].slots] for o in lease.groups}
        for ordinal in lease.groups:
            self._settle(ordinal, "consumed")
        self.trained.update(lease.groups)
        assert max(self.trained.values()) == 1, "each group is trained once"
        self.step = record.step
        self.states[record.step] = (record.lease, record.state_digest, record.weights_digest)

    def _step_redone(self, record: schema.StepRedone) -> None:
        lease, _, _ = self.states[record.step]
        self.states[record.step] = (lease, record.state_digest, record.weights_digest)

    def _checkpoint_published(self, record: schema.CheckpointPublished) -> None:
        assert self.checkpoint < record.step <= self.step
        self.tried[record.manifest] = record.step

    def _retired(self, record: schema.Retired) -> None:
        for name in record.manifests:
            self.retired[name] = self.tried.pop(name) if name in self.tried else self.kept.pop(name)
        for name in record.kept:
            self.kept[name] = self.tried.pop(name)
        self.base = min(self.tried.values())
        gone = [self.retired[name] for name in record.manifests]
        assert self.base > max([*self.kept.values(), *gone]), "the oldest go"

    def _deleted(self, record: schema.Deleted) -> None:
        for name in record.manifests:
            del self.retired[name]

    def _policy_published(self, record: schema.PolicyPublished) -> None:
        assert self.published_in <= record.incarnation == self.incarnation
        self.published_in = record.incarnation

    def _steps_reverted(self, record: schema.StepsReverted) -> None:
        assert self.published_in < self.incarnation, "no number of a version is used twice in one incarnation"
        assert self.lease is None
        assert not self.live
        assert record.to_step in [0, *self.tried.values()]
        for group in self.groups.values():
            if any(slot.turns for slot in group.slots):
                self._drop(group)
        for step in range(record.to_step + 1, record.from_step + 1):
            for ordinal, slots in self.batches.pop(step).items():
                assert self.settled.pop(ordinal) == "consumed"
                self.trained[ordinal] -= 1
                self.groups[ordinal] = Owned(slots)
            del self.states[step]
        for name in [name for name, step in self.tried.items() if step > record.to_step]:
            self.retired[name] = self.tried.pop(name)
        self.due = {key for key in self.due if key[1] <= record.to_step}
        self.evaluated = {key for key in self.evaluated if key[1] <= record.to_step}
        self.step = record.to_step

    def _recipe_declared(self, record: schema.RecipeDeclared) -> None:
        self.recovery = record.recovery

    def _evaluation_due(self, record: schema.EvaluationDue) -> None:
        new = {(suite, record.step) for suite in record.suites}
        assert record.step == self.step
        assert not new & (self.due | self.evaluated), "due once"
        self.due |= new

    def _evaluation_done(self, record: schema.EvaluationDone) -> None:
        assert (record.suite, record.step) in self.due, "one result of each"
        self.due.remove((record.suite, record.step))
        self.evaluated.add((record.suite, record.step))
        self.tally["evaluation mixed"] += record.mixed

    def _ledger_snapshot(self, record: schema.LedgerSnapshot) -> None:
        assert record.slot > self.snapshot, "each is newer"
        self.snapshot = record.slot

    def _run_finished(self, record: schema.RunFinished) -> None:
        assert not self.groups, "every group is settled at the end"
        assert not self.due, "every evaluation has its result"
        self.finished = record.reason
