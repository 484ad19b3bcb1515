"""Manager processes of a simulated world: claimants that race, the one that writes, those that were stopped and go on.

Two claimants change each other only through the one create that wins a slot, so every interleaving of theirs equals
one in which the first winner runs as a whole between two operations of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu.rollout.calls import Callers
from gpu.rollout.control import RolloutControl
from gpu.rollout.messages import Report
from gpu.rollout.signal import Signal
from storage import journal
from storage.errors import CommitUnknown, RunFenced, StoreUnavailable
from storage.journal import Frozen, JournalWriter
from storage.low import read_low
from storage.runs import RunPaths
from storage.schema import ConfigChanged, RunClaimed
from tests.simulation.store import Delayed, slot_of

if TYPE_CHECKING:
    from tests.simulation.world import World

RUN = "sim"
UNANSWERED = (StoreUnavailable, CommitUnknown)
ENDURANCE = 2
"""How often a stopped manager is refused before it gives up."""


@dataclass
class Incarnation:
    """A manager process: control, writer, who may call it, and the segment in flight."""

    name: str
    control: RolloutControl
    writer: JournalWriter
    callers: Callers
    slot: int
    frozen: Frozen | None = None
    reports: list[Report] = field(default_factory=list)
    refusals: int = 0

    @property
    def number(self) -> int:
        return self.control.ledger.incarnation


class Incarnations:
    """`claimed` is slot and writer of every claim that somebody knows to have won."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._claimants = 0
        self.claimed: dict[int, tuple[int, str]] = {}
        self.stopped: list[Incarnation] = []

    # ------------------------------------------------------------------ claiming

    def start(self, old: Incarnation | None) -> Incarnation:
        """Claimants come until one knows that it won. `old` is a manager that is alive meanwhile."""
        world = self._world
        while True:
            try:
                winner = self._claim(old, depth=0)
            except UNANSWERED:
                world.tally["claimants_died"] += 1
                continue
            newest = max([winner, *self.stopped], key=lambda known: known.number)
            if newest is not winner:  # somebody claimed after it had won, before it knew
                self.stopped.remove(newest)
                self.stopped.append(winner)
            return newest

    def _claim(self, old: Incarnation | None, depth: int) -> Incarnation:
        world = self._world
        self._claimants += 1
        name = f"m{self._claimants}"
        with world.store.interleave(self._others(old, depth)):
            claimed = journal.claim(
                world.store, RUN, world.limits.num_siblings, owner="sim", writer=name, reason="start", clock=world.clock
            )
        slot = claimed.tail.slot - 1
        assert claimed.incarnation not in self.claimed, "two claimants got one incarnation"
        assert slot not in [known for known, _ in self.claimed.values()], "two claimants won one slot"
        newer = [
            number for number, (known, _) in self.claimed.items() if (known > slot) != (number > claimed.incarnation)
        ]
        assert not newer, "incarnations are in the order of their slots"
        self.claimed[claimed.incarnation] = (slot, name)
        writer = JournalWriter(RUN, claimed.incarnation, name, claimed.tail, world.clock)
        control = RolloutControl(
            claimed.ledger, writer, world.limits, world.clock, length=world.length,
            group_filter=world.judges.verdict, judged_outside=world.judges.outside, suites=world.exams.suites,
            retention=world.retention, topology=world.actors.topology,
        )  # fmt: skip
        control.declare(world.judges.recipe())
        world.tally["incarnations"] += 1
        return Incarnation(name, control, writer, Callers(claimed.incarnation, world.clock, 60.0, Signal()), slot)

    def _others(self, old: Incarnation | None, depth: int) -> list[tuple[int, Callable[[], None]]]:
        """Who acts between which two operations of a claimant: it reads each slot, creates, and reads what beat it."""
        world, rng = self._world, self._world.rng
        if not world.faults or depth > 1 or rng.random() > world.shape.races:
            return []
        acts: list[Callable[[], None]] = [lambda: self._race(old, depth), self.land]
        if old is not None:
            acts.append(lambda: self._flush_meanwhile(old))
        end = len(world.store.slots())
        return [(max(0, end + rng.randrange(-1, 5)), rng.choice(acts)) for _ in range(rng.choice([1, 1, 2, 3]))]

    def _race(self, old: Incarnation | None, depth: int) -> None:
        world = self._world
        try:
            other = self._claim(old, depth + 1)
        except UNANSWERED:
            world.tally["claimants_died"] += 1
            return
        world.tally["claims_raced"] += 1
        self.stopped.append(other)

    def _flush_meanwhile(self, old: Incarnation) -> None:
        """The manager that is being replaced stores its tail: before the claim that is legal, afterwards refused."""
        try:
            if self.flush(old, due=False):
                self._world.tally["flushed_during_claim"] += 1
        except RunFenced:
            self._world.tally["zombies_refused"] += 1

    # ------------------------------------------------------------------ writing

    def flush(self, manager: Incarnation, *, due: bool) -> bool:
        """One try to make the tail durable; whether something became durable. Raises `RunFenced`."""
        writer, world = manager.writer, self._world
        if manager.frozen is None:
            if writer.last_seq == writer.durable_seq or (due and not writer.due(world.shape.flush_s, 1 << 20)):
                return False
            manager.frozen = writer.freeze()
        frozen = manager.frozen
        try:
            journal.store_frozen(world.store, RUN, manager.control.ledger.incarnation, frozen)
        except UNANSWERED:
            return False
        writer.confirm(frozen)
        manager.control.ledger.placed(frozen.slot, frozen.last)
        manager.frozen = None
        manager.control.durable(writer.durable_seq)
        return True

    def in_flight(self, manager: Incarnation) -> None:
        """The process is gone, a create of it may still be under way."""
        if manager.frozen is None and manager.writer.last_seq > manager.writer.durable_seq:
            manager.frozen = manager.writer.freeze()
        if manager.frozen is not None:
            late = Delayed(RunPaths(RUN).segment(manager.frozen.slot), manager.frozen.data)
            self._world.store.delayed.append(late)

    # ------------------------------------------------------------------ those who are late

    def land(self) -> None:
        """A create that timed out arrives now: a legal segment if its slot is free, else refused."""
        world, store = self._world, self._world.store
        if not store.delayed:
            return
        index = world.rng.randrange(len(store.delayed))
        late, writes = store.delayed[index], store.writes
        if not store.land(index):
            world.tally["delayed_refused"] += 1
            assert store.writes == writes, "a refused create changes nothing"
            return
        world.tally["delayed_landed"] += 1
        if slot_of(late.key) < read_low(store, RUN):
            world.tally["delayed_landed_retired"] += 1  # the bytes it held once, and nobody reads it any more
        elif not world.claiming:
            frozen = world.manager.frozen
            own = frozen is not None and frozen.data == late.data
            assert own or self._claim_of_the_dead(late.key), "only what the owner has in flight may still arrive"

    def check_fenced(self, manager: Incarnation) -> None:
        """The owner was fenced: only a claimant that died without knowing that it won can have done that."""
        assert manager.frozen is not None
        assert self._claim_of_the_dead(RunPaths(RUN).segment(manager.frozen.slot)), "fenced by nobody"

    def _claim_of_the_dead(self, key: str) -> bool:
        """Whether the segment is the claim of a claimant that never learned its outcome."""
        rows = journal.decode_segment(self._world.store.read(key), key).rows
        claims = [row.record.incarnation for row in rows if isinstance(row.record, RunClaimed)]
        return len(rows) == 1 and bool(claims) and claims[0] not in self.claimed

    def wake(self) -> None:
        """A stopped manager goes on as if nothing had happened: nothing of it may become durable."""
        world = self._world
        old = world.rng.choice(self.stopped)
        writes = world.store.writes
        self._go_on(old)
        if old.writer.last_seq == old.writer.durable_seq:
            self.stopped.remove(old)  # its run is finished: nothing is left that it could try
            return
        try:
            if self.flush(old, due=False):
                world.tally["replies_found"] += 1  # its slot had held its bytes since before the claim
        except RunFenced:
            world.tally["zombies_refused"] += 1
            old.refusals += 1
            if old.refusals >= ENDURANCE:
                self.stopped.remove(old)
        assert world.store.writes == writes, "a fenced manager writes nothing"

    def _go_on(self, old: Incarnation) -> None:
        control, rng = old.control, self._world.rng
        dice = rng.random()
        if dice < 0.3:
            control.take("zombie's worker", 2)
        elif dice < 0.6 and old.reports:
            control.report(rng.choice(old.reports))
        elif dice < 0.8:
            control.try_lease()
        if old.writer.last_seq == old.writer.durable_seq and not control.ledger.finished:
            control.books.record(ConfigChanged({"still": "here"}))
        control.expire()
        control.tick()
        control.check_conservation()
