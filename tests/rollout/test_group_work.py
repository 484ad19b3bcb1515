"""Group-level work: bounded, tried again when it raises, and never the end of a finished group."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from gpu.rollout.committer import FlushSettings
from gpu.rollout.manager import ManagerSettings, open_manager
from gpu.rollout.messages import Ended, Outcome, Report, Wait
from gpu.rollout.results import GroupFilter
from storage.clock import SystemClock
from storage.memory import MemoryStore
from storage.runs import create_run, make_run
from storage.verify import verify
from tests.faults.house import until
from tests.rollout.building import RETENTION, RUN, Bench, limits
from tests.rollout.desk import Engines


class Moody:
    """A filter that raises as long as it is in a bad mood."""

    def __init__(self, answer: object = "") -> None:
        self.bad, self.calls, self.answer = True, 0, answer

    def __call__(self, rewards: Sequence[float]) -> str:
        self.calls += 1
        if self.bad:
            raise RuntimeError("no judge today")
        return self.answer  # type: ignore[return-value]


def test_a_filter_that_raises_keeps_the_group_its_places_and_says_so_until_it_works() -> None:
    moody = Moody()
    bench = Bench(group_filter=moody, max_completed=4, max_retained=4, batch=2, max_executing=100)
    bench.seal(bench.control.take("w", 4))
    ledger = bench.control.ledger
    assert ledger.state_counts()["generating"] == ledger.dispatched
    waiting = bench.control.try_lease()
    assert isinstance(waiting, Wait)
    assert "no judge today" in waiting.who
    failed = bench.control.status()["group_level_work"]["failed"]  # type: ignore[index]
    assert set(failed) == {0, 1}
    assert failed[0]["tries"] == 1
    bench.clock.advance(0.5)
    bench.control.tick()
    assert moody.calls == 2, "not before its backoff"
    bench.clock.advance(0.6)
    bench.control.tick()
    assert moody.calls == 4
    moody.bad = False
    bench.clock.advance(10.0)
    bench.control.tick()
    bench.flush()
    assert bench.train() == (0, 1)
    assert ledger.counts["rollouts_minted"] == ledger.counts["rollouts_sealed"] + ledger.live, "nothing was redone"


def test_work_that_raised_is_tried_again_when_a_checkpoint_is_prepared() -> None:
    moody = Moody()
    bench = Bench(group_filter=moody)
    bench.seal(bench.control.take("w", 2))
    moody.bad = False
    hold = bench.control.acquire("o", "checkpoint", 1, 10.0)
    bench.control.prepare_checkpoint(hold.hold, hold.epoch)
    assert bench.control.ledger.state_counts()["completed"] == 1
    assert bench.control.results.judging.num_failed == 0


def test_a_filter_that_answers_with_anything_but_a_text_is_a_failure_and_no_verdict() -> None:
    moody = Moody(answer=True)
    moody.bad = False
    bench = Bench(group_filter=moody)
    bench.seal(bench.control.take("w", 2))
    assert "returned True" in bench.control.results.judging.why()
    assert bench.control.ledger.state_counts()["completed"] == 0


def test_a_group_that_waits_for_its_verdict_survives_a_restart_and_the_end_of_the_run() -> None:
    moody = Moody()
    bench = Bench(group_filter=moody, length=2)
    bench.seal(bench.control.take("w", 4))
    bench.restart()
    bench.activate()
    assert len(bench.control.results.judging) == 2
    moody.bad = False
    bench.control.tick()
    bench.flush()
    assert bench.control.ledger.counts["rollouts_minted"] == 4, "finished siblings are kept"
    assert bench.train() == (0, 1)
    bench.control.finish("done")
    bench.flush()
    assert verify(bench.store, RUN).sound


def test_a_run_that_ends_settles_groups_whose_work_never_succeeded() -> None:
    bench = Bench(group_filter=Moody(), length=2)
    bench.seal(bench.control.take("w", 4))
    bench.control.finish("enough")
    bench.flush()
    assert bench.control.ledger.counts["discarded_run_finished"] == 2
    assert not len(bench.control.results.judging)
    assert verify(bench.store, RUN).sound


class Slow:
    """A user's filter that takes its time; counts how many are at work."""

    def __init__(self) -> None:
        self.go, self.lock = threading.Event(), threading.Lock()
        self.now = self.most = self.calls = 0

    def __call__(self, rewards: Sequence[float]) -> str:
        with self.lock:
            self.calls += 1
            self.now += 1
            self.most = max(self.most, self.now)
            first = self.calls == 1
        self.go.wait(10.0)
        with self.lock:
            self.now -= 1
        if first:
            raise RuntimeError("once")
        return "dull" if rewards[0] == 0 else ""


async def finished_groups(work: GroupFilter, count: int) -> dict[str, object]:
    store = MemoryStore()
    create_run(store, make_run(run=RUN, created=0.0, num_siblings=2, staleness=None, fingerprints={}, settings={}))
    manager = open_manager(
        store,
        make_run(run=RUN, created=0.0, num_siblings=2, staleness=None, fingerprints={}, settings={}),
        limits(staleness=None, max_executing=100, max_completed=50, max_retained=50, max_postprocessing=2,
               backoff_base_s=0.05),
        SystemClock(), ManagerSettings(FlushSettings(0.01, 1 << 20, 0.05), 60.0, 5.0, 64, RETENTION),
        owner="o", reason="start", length=count, group_filter=work, judged_outside=True,
    )  # fmt: skip
    manager.engines = Engines()
    manager.start()
    manager.control.publish_policy("w")
    manager.serve(0)
    taken = (await manager.take(manager.incarnation, "w", 2 * count, 1.0)).dispatches
    ended = tuple(
        Ended(d.identity, Outcome.SEALED, row, 1, 0, float(d.identity.group % 2)) for row, d in enumerate(taken)
    )
    began = time.monotonic()
    await manager.report(manager.incarnation, Report("w", "b", "0" * 64, 0, None, (), ended))
    reported = time.monotonic() - began
    await asyncio.sleep(0.1)
    found: dict[str, object] = {"reported": reported, "status": await manager.status()}
    work.go.set()  # type: ignore[attr-defined]
    await until(lambda: not len(manager.control.results.judging))
    found["counts"] = dict(manager.control.ledger.counts)
    found["states"] = manager.control.ledger.state_counts()
    await manager.stop()
    return found


async def test_slow_group_level_work_is_bounded_and_never_blocks_the_manager() -> None:
    slow = Slow()
    found = await finished_groups(slow, 10)
    assert slow.most == 2, "never more at once than there are places"
    status = found["status"]["group_level_work"]  # type: ignore[index]
    assert (status["at_work"], status["waiting"]) == (2, 8)
    assert found["states"] == {"reserved": 0, "generating": 0, "completed": 5, "leased": 0}
    assert found["counts"]["discarded_dull"] == 5  # type: ignore[index]
    assert slow.calls == 11, "the one that raised was tried again"


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_verdicts_from_outside_come_in_any_order_and_late_ones_change_nothing(order: list[int]) -> None:
    bench = Bench(length=3, max_executing=100, staleness=None)
    bench.judge_outside()
    bench.seal(bench.control.take("w", 6))
    begun = dict(bench.control.results.begin_judging())
    assert set(begun) == {0, 1, 2}
    bench.control.results.discard([1], "by_hand")
    for ordinal in order:
        bench.control.results.judge(ordinal, "")
    bench.control.results.judge(order[0], "")
    bench.control.results.judging_failed(1, RuntimeError("late"))
    assert bench.control.ledger.state_counts()["completed"] == 2
    assert not len(bench.control.results.judging)
    bench.control.check_conservation()
