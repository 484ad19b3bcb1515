"""What must hold in a simulated world: after each step, looked up in the ledger; at the end, proven from storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu.rollout.control import RolloutControl
from gpu.rollout.limits import Limits, Submission
from storage import schema
from storage.journal import read_segment
from storage.low import read_low
from storage.verify import Report

if TYPE_CHECKING:
    from tests.simulation.world import World

PROVEN = ("steps_redone", "rollouts_reused", "rollouts_regenerated", "rollouts_continued", "rollouts_sealed",
          "steps_reverted", "consumed", "discarded", "quarantined", "segments", "segments_retired", "lost",
          "trained_twice")  # fmt: skip


def check(control: RolloutControl, limits: Limits) -> None:
    """The ledger's counts and indexes equal what its groups say, and no capacity is exceeded."""
    control.check_conservation()
    ledger = control.ledger
    live = dispatched = 0
    counted: dict[int, int] = {}
    users: dict[str, int] = {}
    for group in ledger.groups.values():
        live += group.num_live
        dispatched += group.dispatched
        if group.oldest >= 0:
            counted[group.oldest] = counted.get(group.oldest, 0) + 1
        for rollout in group.rollouts:
            for name, _ in rollout.rows:
                users[name] = users.get(name, 0) + 1
    assert ledger.live == live
    assert live + control.plain.live == len(control.scheduler.active)
    assert ledger.dispatched == dispatched <= limits.max_completed
    assert len(ledger.groups) <= limits.max_retained + ledger.counts["groups_reverted"], "what came back has no room"
    if limits.submission is Submission.SAMPLE:
        assert live + control.plain.live <= limits.max_executing
    assert ledger.oldest_counts == counted
    assert {name: block.users for name, block in ledger.blocks.items() if block.users} == users


def check_report(world: World, report: Report) -> None:
    """The run is sound and complete, its journal has no hole, and every claim that was won is where it was won."""
    assert report.sound, report.problems
    assert report.consumed + report.discarded + report.quarantined == report.handed_out == world.length
    assert report.unsettled == report.lost == report.trained_twice == 0
    assert report.finished
    low = read_low(world.store, "sim")
    slots = [slot for slot in world.store.slots() if slot >= low]
    assert slots == list(range(low, report.segments)), "every segment is in the chain"
    assert report.segments_retired == low
    granted = max(world.drivers.trained_staleness, default=0)
    assert report.staleness_max <= granted
    # A lease that a revert rolled back was granted and never trained.
    assert report.staleness_max == granted or report.steps_reverted
    assert report.incarnations >= len(world.incarnations.claimed)
    for number, (slot, writer) in world.incarnations.claimed.items():
        segment = read_segment(world.store, "sim", slot)
        assert segment is not None
        assert segment.header.writer == writer
        assert [row.record.incarnation for row in segment.rows if isinstance(row.record, schema.RunClaimed)] == [number]
    assert not world.control.ledger.due
    world.exams.check(set(world.control.ledger.evaluated))
    world.tally["rollouts_discarded"] += world.control.ledger.counts["rollouts_discarded"]
    for name in PROVEN:
        world.tally[name] += getattr(report, name)
