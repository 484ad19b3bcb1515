"""A listing that is stale, incomplete or in no order, and clocks that jump: neither decides anything."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import gpu
import storage
from gpu.local import LocalCluster
from storage.clock import SystemClock, VirtualClock
from storage.errors import DeadlineExceeded, HoldRefused
from storage.history import read_all
from storage.runs import RunPaths
from storage.verify import verify
from tests.faults.house import House, small, until
from tests.faults.test_flipped_bytes import restored, running
from tests.simulation import memo
from tests.simulation.world import RUN, World

# ---------------------------------------------------------------------- listings

Listing = Callable[[list[str]], list[str]]
LISTINGS: dict[str, Listing] = {
    "nothing yet": lambda keys: [],
    "as it was": lambda keys: keys[: len(keys) // 2],
    "in no order": lambda keys: random.Random(len(keys)).sample(keys, len(keys)),
    "with gaps": lambda keys: keys[::2],
    "every key twice": lambda keys: keys + keys,
}


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_decides_nothing_in_a_claim_a_restore_or_an_audit(listing: str) -> None:
    for seed in range(2):
        world = running(seed)
        whole, report = restored(world.store), verify(world.store, RUN)
        honest = world.store.list
        world.store.list = lambda prefix, after="", honest=honest: LISTINGS[listing](honest(prefix, after))  # type: ignore[method-assign]
        assert restored(world.store) == whole
        assert verify(world.store, RUN) == report
        with memo.remembering():
            world.kill_manager()
        assert world.run(chaos=0).sound


# ---------------------------------------------------------------------- clocks


class Jumping(VirtualClock):
    """Its wall clock is set forward by an hour and back by a day, again and again."""

    jumps = (0.0, 3600.0, -86400.0, 7.0)

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(start)
        self.asked = 0

    def wall(self) -> float:
        self.asked += 1
        return super().wall() + self.jumps[self.asked % len(self.jumps)]


@pytest.mark.parametrize("seed", range(3))
def test_a_wall_clock_that_jumps_changes_nothing_but_the_times_that_are_written_down(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds: list[World] = []
    for clock in (VirtualClock, Jumping):
        monkeypatch.setattr("tests.simulation.world.VirtualClock", clock)
        worlds.append(World(seed, length=8))
        assert worlds[-1].run(chaos=100).sound
    records = [
        [(segment.header.slot, row.seq, row.record) for segment in read_all(world.store, RUN) for row in segment.rows]
        for world in worlds
    ]
    assert records[0] == records[1]
    times = [[row.time for segment in read_all(world.store, RUN) for row in segment.rows] for world in worlds]
    assert times[0] != times[1]
    assert sorted(times[1]) != times[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_machine_that_was_suspended_for_an_hour_anywhere_in_a_run_goes_on(seed: int) -> None:
    """The monotonic clock may count a suspension: every deadline is over at once."""
    world = World(seed, length=8)
    dice, moves = random.Random(seed), world.step
    pauses: list[int] = []

    def step() -> None:
        if dice.random() < 0.02:
            pauses.append(world.control.ledger.step)
            world.clock.advance(3600.0)
        moves()

    world.step = step  # type: ignore[method-assign]
    assert world.run(chaos=100).sound
    assert len(pauses) >= 3


class Machine(SystemClock):
    """The real clock of a machine that is suspended, or whose time is set."""

    suspended = set_by = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.suspended

    def wall(self) -> float:
        return super().wall() + self.set_by


@pytest.mark.parametrize(("suspended", "set_by"), [(3600.0, 0.0), (0.0, 3600.0), (0.0, -86400.0), (3600.0, -86400.0)])
async def test_a_run_with_real_parts_goes_on_after_its_clocks_have_jumped(
    suspended: float, set_by: float, tmp_path: Path
) -> None:
    house, clock = House(tmp_path, small()), Machine()
    house.cluster = LocalCluster(house.spec, house.store, clock, engine=house.engine)  # type: ignore[arg-type]

    async def jump(house: House) -> None:
        await until(lambda: "manager" in house.cluster.processes and house.manager().control.ledger.step >= 3)
        clock.suspended, clock.set_by = suspended, set_by

    try:
        await house.run(jump, retries=1)
    except (DeadlineExceeded, HoldRefused):
        assert suspended, "the wall clock ends nothing"
        await House(tmp_path, small()).run(retries=1)  # what a flow run's retry does
    house.check()


WALL = re.compile(r"\.wall\(\)|time\.time\(|datetime\.(now|utcnow|today)|time_ns\(")


def test_nothing_that_decides_reads_the_wall_clock() -> None:
    """Durable state and rollout control read it in one place: the time of a record, for people."""
    found = {
        path.name
        for folder in (Path(storage.__file__).parent, Path(gpu.__file__).parent / "rollout")
        for path in folder.rglob("*.py")
        if WALL.search(path.read_text())
    }
    ages = {"garbage.py", "pins.py"}  # which pins and left-over files are old: that only decides when they go
    assert found - {"clock.py"} - ages == {"journal.py"}
    assert RunPaths(RUN).segment(7).endswith("000000000007.arrow"), "nor is there a time in a name"
