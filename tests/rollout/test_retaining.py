"""A manager retires with each checkpoint and deletes when no publication can be under way, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest

from gpu.rollout.committer import FlushSettings
from gpu.rollout.manager import ManagerSettings, RolloutManager, open_manager
from gpu.rollout.results import keep_all
from storage.buffers import buffers_digest
from storage.capture import CaptureBuffers, capture_of
from storage.checkpoint import Written, check_objects, read_manifest
from storage.clock import SystemClock
from storage.errors import CheckpointRefused, RunFenced, StoreUnavailable
from storage.journal import claim, fold, read_journal, rows_of
from storage.pins import pin
from storage.publisher import Newest, ThreadPublisher
from storage.retention import Retention
from storage.runs import RunPaths, open_run
from storage.schema import CheckpointPublished, Deleted, Record, Retired
from storage.verify import verify
from tests.rollout.building import RUN
from tests.rollout.desk import Desk, Outage, until
from tests.storage.published_runs import floats

PATHS = RunPaths(RUN)
KEEP = Retention(last=2, every=0, payload="keep", pin_s=3600.0)


class Deletions(Outage):
    """Says when a delete of checkpoint data begins, which waits while `gate` is closed; `stuck` keys fail, and `away`
    is no answer. Remembers what was durable when it came."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()
        self.stuck = ""
        self.away = False
        self.deletes: list[str] = []

    def delete(self, keys: Iterable[str]) -> list[str]:
        listed = list(keys)
        if not any("/objects/" in key or "/checkpoints/" in key or "/payload/" in key for key in listed):
            return super().delete(listed)
        self.begun.set()
        assert self.gate.wait(20.0)
        if self.away:
            raise StoreUnavailable("no reply", expected="a reply", action="again")
        refused = [key for key in listed if self.stuck and self.stuck in key]
        went = [key for key in listed if key not in refused]
        self.deletes += went
        return refused + super().delete(went)

    def there(self, key: str) -> bool:
        return key in self._objects


class Run:
    """A manager with a driver that trains and publishes checkpoints whose shards the test chooses: `frozen` is the same
    in each, `step` is new in each, and the third may come again."""

    def __init__(self, desk: Desk, store: Deletions) -> None:
        self.desk, self.store = desk, store
        self.step = 0

    @property
    def manager(self) -> RolloutManager:
        return self.desk.manager

    async def train(self) -> None:
        self.step += 1
        await self.desk.finish(await self.desk.take(100))
        await self.desk.commit(await self.desk.lease(5.0))
        await self.desk.update(self.step)

    async def begin(self) -> CheckpointPublished | None:
        return await self.manager.newest_checkpoint(self.desk.caller)

    def upload(self, newest: CheckpointPublished | None, third: float = -1.0, step: int | None = None) -> Written:
        step = self.step if step is None else step
        tensors = {"frozen": floats(1.0), "step": floats(100.0 + step)}
        tensors["third"] = floats(third if third >= 0 else 1000.0 + step)
        capture = capture_of(step, buffers_digest(tensors, "{}"), "w", "{}", tensors, buffers=CaptureBuffers(4))
        base = Newest(newest.manifest, newest.digest) if newest else None
        return ThreadPublisher(self.store).publish(RUN, self.manager.incarnation, capture, base)

    async def record(self, written: Written, step: int | None = None) -> None:
        await self.manager.publish_checkpoint(self.desk.caller, step or self.step, *written)

    async def publish(self, third: float = -1.0) -> None:
        """A step and its checkpoint."""
        await self.train()
        await self.record(self.upload(await self.begin(), third))

    async def quiet(self) -> None:
        await until(lambda: not self.manager.retaining._working and not self.manager.retaining._wanted)

    def check(self) -> None:
        """Every checkpoint that the ledger has is whole."""
        ledger = self.manager.control.ledger
        for one in (*ledger.kept, *ledger.checkpoints):
            check_objects(self.store, RUN, read_manifest(self.store, RUN, one.manifest, one.digest))

    def steps(self) -> tuple[list[int], list[int]]:
        ledger = self.manager.control.ledger
        return [one.step for one in ledger.checkpoints], [one.step for one in ledger.retired]

    def records(self) -> list[Record]:
        return [row.record for row in rows_of(read_journal(self.store, RUN))]

    async def problem(self) -> str:
        status = cast("dict[str, Any]", await self.manager.status())
        return status["retention"]["problem"]

    async def restart(self, retention: Retention = KEEP) -> None:
        """The manager is killed, and its successor claims."""
        self.manager.kill()
        settings = ManagerSettings(FlushSettings(0.01, 1 << 20, 0.05), 60.0, 5.0, 8, retention)
        self.desk.manager = await asyncio.to_thread(
            lambda: open_manager(self.store, open_run(self.store, RUN), self.desk.limits, SystemClock(), settings,
                                 owner="next", reason="killed", length=None, group_filter=keep_all)
        )  # fmt: skip
        self.desk.engines.manager, self.manager.engines = self.manager, self.desk.engines
        self.manager.start()
        self.desk.caller = (await self.desk.attach("flow")).caller
        await self.desk.update(self.step)


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    store = Deletions()
    desk = Desk(retention=KEEP, store=store)
    async with desk.opened():
        yield Run(desk, store)
        store.gate.set()
    # `opened` stops the manager that the desk has then


async def test_a_run_keeps_its_newest_checkpoints_and_nothing_else(run: Run) -> None:
    for _ in range(6):
        await run.publish()
        await run.quiet()
    assert run.steps() == ([5, 6], [])
    run.check()
    assert len(run.store.list(PATHS.checkpoints)) == 2
    assert len(run.store.list(PATHS.objects)) == 5, "the frozen shard, and two of each"
    assert sum(isinstance(record, Deleted) for record in run.records()) == 4
    assert verify(run.store, RUN).deleted == 4


async def test_nothing_is_deleted_before_the_retirement_is_durable(run: Run) -> None:
    for _ in range(2):
        await run.publish()
    await run.train()
    written = run.upload(await run.begin())
    run.store.answers.clear()  # no record becomes durable
    recording = asyncio.ensure_future(run.record(written))
    await asyncio.sleep(0.1)
    assert run.steps() == ([2, 3], [1])
    assert not run.store.begun.is_set()
    run.store.answers.set()
    await recording
    await until(run.store.begun.is_set)
    assert any(isinstance(record, Retired) for record in run.records())


async def test_a_publication_waits_for_the_deletion_under_way_and_then_nothing_is_deleted_until_it_is_recorded(
    run: Run,
) -> None:
    """It finds an object of a retired checkpoint that holds what it is about to write."""
    await run.publish(third=7.0)
    await run.publish()
    run.store.gate.clear()
    await run.publish()
    await until(run.store.begun.is_set)
    await run.train()
    beginning = asyncio.ensure_future(run.begin())
    await asyncio.sleep(0.05)
    assert not beginning.done(), "a deletion is under way"
    run.store.gate.set()
    newest = await asyncio.wait_for(beginning, 5.0)
    before = len(run.store.deletes)
    written = run.upload(newest, third=7.0)
    await asyncio.sleep(0.05)
    assert len(run.store.deletes) == before
    await run.record(written)
    await run.quiet()
    run.check()
    assert run.steps() == ([3, 4], [])


async def test_a_publication_that_began_before_the_deletion_could_keeps_what_it_found(run: Run) -> None:
    """The retired checkpoint cannot be deleted at first; the next publication counts on an object of it."""
    run.store.stuck = "/objects/"
    await run.publish(third=7.0)
    await run.publish()
    await run.publish()
    await run.quiet()
    assert run.steps() == ([2, 3], [1])
    assert "could not be deleted" in await run.problem()
    await run.train()
    written = run.upload(await run.begin(), third=7.0)
    run.store.stuck = ""
    await asyncio.sleep(0.05)
    await run.record(written)
    await run.quiet()
    run.check()
    assert run.steps() == ([3, 4], [])
    assert await run.problem() == ""
    assert len(run.store.list(PATHS.checkpoints)) == 2


async def test_a_flight_whose_driver_died_still_holds_up_deletion(run: Run) -> None:
    """The trainer answers the next driver from memory, so what the dead driver's upload found must stay."""
    run.store.stuck = "/checkpoints/"
    await run.publish(third=7.0)
    await run.publish()
    await run.publish()
    await run.quiet()
    await run.train()
    written = run.upload(await run.begin(), third=7.0)
    run.store.stuck = ""
    run.desk.caller = (await run.desk.attach("flow")).caller
    run.store.begun.clear()
    answer = await run.manager.collect_objects(True)
    assert (answer.found, "being published" in answer.skipped) == ([], True)
    await asyncio.sleep(0.05)
    assert not run.store.begun.is_set()
    await run.begin()
    await run.record(written)
    await run.quiet()
    run.check()
    assert run.steps() == ([3, 4], [])


async def test_a_publication_recorded_late_does_not_end_the_next_ones_protection(run: Run) -> None:
    for _ in range(2):
        await run.publish()
    await run.train()
    first = run.upload(await run.begin())
    run.store.answers.clear()
    late = asyncio.ensure_future(run.record(first))
    await asyncio.sleep(0.05)
    await run.begin()  # the driver gave up waiting and begins another
    run.store.answers.set()
    await late
    await asyncio.sleep(0.1)
    assert not run.store.begun.is_set()
    await run.train()
    await run.record(run.upload(await run.begin()))
    await run.quiet()
    assert run.steps() == ([3, 4], [])


async def test_an_older_driver_begins_nothing(run: Run) -> None:
    old = run.desk.caller
    run.desk.caller = (await run.desk.attach("flow")).caller
    with pytest.raises(RunFenced):
        await run.manager.newest_checkpoint(old)
    assert run.manager.retaining.flight == 0


@pytest.mark.parametrize("moment", ["retired", "half deleted", "manifest left", "not recorded"])
async def test_a_successor_goes_on_with_a_deletion_from_wherever_it_was(run: Run, moment: str) -> None:
    for _ in range(2):
        await run.publish()
    run.store.gate.clear()
    await run.publish()
    await until(run.store.begun.is_set)
    manifest = run.manager.control.ledger.retired[0].manifest
    if moment in ("half deleted", "manifest left"):
        record = run.manager.control.ledger.retired[0]
        digests = sorted(read_manifest(run.store, RUN, record.manifest, record.digest).objects)
        shared = read_manifest(run.store, RUN, *_named(run.manager.control.ledger.checkpoints[0])).objects
        own = [PATHS.object(digest) for digest in digests if digest not in shared]
        for key in own[:1] if moment == "half deleted" else own:
            run.store._objects.pop(key)
    elif moment == "not recorded":
        run.store._objects.pop(PATHS.manifest(manifest))
    run.manager.kill()
    run.store.gate.set()
    await run.restart()
    await run.quiet()
    await until(lambda: run.steps() == ([2, 3], []))
    run.check()
    if moment != "not recorded":
        assert len(run.store.list(PATHS.objects)) == 5
    assert run.store.list(PATHS.checkpoints) == [PATHS.manifest(one.manifest) for one in
                                                 run.manager.control.ledger.checkpoints]  # fmt: skip
    await run.publish()
    run.check()


def _named(one: CheckpointPublished) -> tuple[str, str]:
    return one.manifest, one.digest


async def test_a_manager_that_ends_in_the_middle_of_a_deletion_makes_no_further_call(run: Run) -> None:
    for _ in range(2):
        await run.publish()
    run.store.gate.clear()
    await run.publish()
    await until(run.store.begun.is_set)
    await run.manager.stop()
    run.store.gate.set()
    await until(lambda: bool(run.store.deletes))
    await asyncio.sleep(0.1)
    assert len(run.store.list(PATHS.checkpoints)) == 3, "the manifest was the next call"


async def test_a_stopped_manager_that_goes_on_deletes_nothing_more(run: Run) -> None:
    for _ in range(2):
        await run.publish()
    run.store.gate.clear()
    await run.publish()
    await until(run.store.begun.is_set)  # one call is under way
    claim(run.store, RUN, 2, owner="other", writer="other", reason="take over", clock=SystemClock())
    run.store.gate.set()
    await until(lambda: bool(run.store.deletes))
    await until(lambda: not run.manager.retaining._working)
    assert len(run.store.list(PATHS.checkpoints)) == 3, "the manifest was the next call"
    assert not any(isinstance(record, Deleted) for record in run.records())


async def test_a_successor_records_no_checkpoint_on_what_its_predecessor_was_deleting(run: Run) -> None:
    await run.publish(third=7.0)
    await run.publish()
    run.store.gate.clear()
    await run.publish()
    await until(run.store.begun.is_set)
    run.manager.kill()  # its thread has a call under way, and goes on late
    late, run.store.gate = run.store.gate, threading.Event()
    run.store.gate.set()
    await run.restart()
    await until(lambda: run.steps() == ([2, 3], []))
    await run.train()
    written = run.upload(await run.begin(), third=7.0)
    with pytest.raises(CheckpointRefused):
        await run.record(written)
    late.set()
    await asyncio.sleep(0.05)
    await run.publish()
    await run.quiet()
    run.check()


async def test_a_store_that_refuses_deletion_is_shown_and_stops_nothing(run: Run) -> None:
    run.store.away = True
    for _ in range(4):
        await run.publish()
    await run.quiet()
    assert "no reply" in await run.problem()
    assert run.steps() == ([3, 4], [1, 2])
    run.store.away = False
    await run.publish()
    await run.quiet()
    assert await run.problem() == ""
    assert run.steps() == ([4, 5], [])


async def test_a_pinned_checkpoint_stays(run: Run) -> None:
    await run.publish()
    pin(run.store, RUN, run.manager.control.ledger.checkpoints[0].manifest, "reader", SystemClock())
    for _ in range(3):
        await run.publish()
        await run.quiet()
    assert run.steps() == ([3, 4], [1])
    one = run.manager.control.ledger.retired[0]
    check_objects(run.store, RUN, read_manifest(run.store, RUN, one.manifest, one.digest))


async def test_objects_that_killed_publications_left_are_collected_between_two_publications(run: Run) -> None:
    for _ in range(2):
        await run.publish()
    await run.train()
    run.upload(await run.begin(), third=7.0, step=99)  # its trainer dies, nobody records it
    await run.record(run.upload(await run.begin()))
    await run.quiet()
    expected = len(run.store.list(PATHS.objects))
    found = await run.manager.collect_objects(False)
    assert (len(found.found), found.skipped, len(run.store.list(PATHS.objects))) == (2, "", expected)
    found = await run.manager.collect_objects(True)
    assert (len(found.found), found.failed, len(run.store.list(PATHS.objects))) == (2, [], expected - 2)
    run.check()


async def test_the_end_of_a_run_waits_for_its_last_deletion(run: Run) -> None:
    for _ in range(2):
        await run.publish()
    run.store.gate.clear()
    await run.publish()
    await until(run.store.begun.is_set)
    ending = asyncio.ensure_future(run.manager.finish(run.desk.caller, "enough"))
    await asyncio.sleep(0.05)
    assert not ending.done()
    run.store.gate.set()
    await ending
    ledger, _ = fold(run.store, RUN, 2)
    assert (ledger.finished, ledger.retired) == ("enough", [])


async def test_payload_files_that_nothing_needs_go(run: Run) -> None:
    needed = Retention(last=2, every=0, payload="needed", pin_s=60.0)
    await run.restart(needed)
    names = [PATHS.block("000001-w-00000001"), PATHS.block("000002-w-00000001"), PATHS.block("other")]
    for name in names:
        run.store.create(name, b"rows")
    run.manager.retaining._listed, run.manager.retaining._wanted = False, True
    for _ in range(3):
        await run.publish()
        await run.quiet()
    there = run.store.list(PATHS.payload)
    assert names[0] not in there, "of an older incarnation, and no record needs it"
    assert names[1:] == [name for name in names if name in there], "may be about to be recorded; not ours"
    records = run.records()
    gone = {block for record in records if isinstance(record, Deleted) for block in record.blocks}
    assert gone == {block for record in records if isinstance(record, Retired) for block in record.blocks}
    assert gone.isdisjoint(run.manager.control.ledger.blocks)
