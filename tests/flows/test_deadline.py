"""What fits before the end of an attempt, on a clock that moves only when told to."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gpu.spec import DeadlineSpec
from storage.clock import VirtualClock
from storage.errors import ConfigurationRefused
from tasks.deadline import LEAVE_S, SPREAD, Deadline, Ending
from tests.faults.house import small, until


def made(
    limit: float | None = 100.0, reserve: float = 10.0, notice: str | None = None
) -> tuple[Deadline, VirtualClock]:
    clock = VirtualClock(1000.0)
    return Deadline(DeadlineSpec(limit, reserve, 30.0, notice), clock), clock


def test_an_attempt_without_a_limit_never_stops() -> None:
    one, clock = made(limit=None)
    clock.advance(1e9)
    one.check_step("now")
    assert (one.ends, one.left(), one.latest()) == (None, None, None)


def test_a_step_begins_only_when_its_commit_leaves_time_for_the_publication() -> None:
    one, clock = made(limit=100.0, reserve=10.0)
    one.trained(20.0)
    last = 1100.0 - LEAVE_S - 10.0 - 20.0
    clock.advance(last - 1000.0 - 0.01)
    one.check_step("before step 5")
    clock.advance(0.02)
    with pytest.raises(Ending, match="limit of 100 s: stopped before step 5"):
        one.check_step("before step 5")
    assert one.stopping.is_set()


def test_what_takes_no_step_goes_on_until_the_publication_would_not_fit() -> None:
    one, clock = made(limit=100.0, reserve=10.0)
    one.trained(60.0)
    clock.advance(100.0 - LEAVE_S - 10.0 - 0.01)
    one.check("while waiting")
    clock.advance(0.02)
    with pytest.raises(Ending):
        one.check("while waiting")


def test_the_reserve_is_measured_and_the_setting_is_its_floor() -> None:
    one, _ = made(reserve=10.0)
    one.published(2.0)
    assert one.reserve == 10.0
    one.published(30.0)
    one.published(5.0)
    assert one.reserve == SPREAD * 30.0
    for _ in range(5):
        one.published(8.0)
    assert one.reserve == SPREAD * 8.0, "what was slow long ago says nothing about the next one"


def test_a_notice_only_ever_brings_the_end_forward() -> None:
    one, clock = made(limit=100.0)
    one.notice("late", 500.0)
    assert (one.ends, one.reason) == (1100.0, "the attempt's limit of 100 s")
    clock.advance(20.0)
    one.notice("spot", 30.0)
    assert (one.ends, one.reason) == (1050.0, "spot")
    one.check_step("before a step that fits")
    one.notice("SIGTERM", 60.0, at_once=True)
    assert one.ends == 1050.0
    with pytest.raises(Ending, match="spot"):
        one.check("at once")


def test_a_short_notice_keeps_two_thirds_of_itself_for_the_publication() -> None:
    one, _ = made(limit=None)
    one.notice("spot", 6.0)
    assert one.left() == 4.0


async def test_work_that_may_be_given_up_is_when_it_is_time_to_stop() -> None:
    one, _ = made(limit=None)
    assert await one.unless(asyncio.sleep(0, "done"), "there") == "done"
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(one.unless(endless(), "while it waited"))
    await asyncio.sleep(0)
    one.notice("spot", 30.0, at_once=True)
    with pytest.raises(Ending, match="spot: stopped while it waited"):
        await waiting
    assert ended.is_set()


@pytest.mark.parametrize(
    ("text", "seconds"), [("120\n", 120.0), ("", 30.0), ("soon", 30.0), ("nan", 30.0), ("-1", 30.0)]
)
async def test_a_notice_file_says_how_long_or_leaves_it_to_the_setting(
    tmp_path: Path, text: str, seconds: float
) -> None:
    path = tmp_path / "preempted"
    one, clock = made(limit=None, notice=str(path))
    watching = asyncio.create_task(one.watch())
    await asyncio.sleep(0.6)
    assert one.ends is None
    path.write_text(text)
    await until(lambda: one.ends is not None)
    assert one.ends == clock.monotonic() + seconds
    clock.advance(seconds)
    async with asyncio.timeout(10):
        await watching
    assert one.stopping.is_set()


async def test_the_first_sigterm_is_a_notice_and_the_second_does_what_it_did_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        one, _ = made(limit=None)
        with one.hearing():
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(10):
                await one.stopping.wait()
            assert (heard, one.reason) == ([], "SIGTERM")
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_limit_that_leaves_no_time_for_any_step_is_refused() -> None:
    with pytest.raises(ConfigurationRefused, match="no step would ever begin"):
        small(checkpoint={"deadline": 10.0, "reserve": 10.0}).check()
