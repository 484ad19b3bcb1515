"""Who may drive a run: the whole table of `Callers.attach`."""

from __future__ import annotations

import asyncio

import pytest

from gpu.rollout.calls import Callers
from gpu.rollout.messages import Caller
from gpu.rollout.signal import Signal
from storage.clock import VirtualClock
from storage.errors import ActorLost, RunBusy, RunFenced, TidegateError

SILENCE_S = 60.0
INCARNATION = 3


class Door:
    """Callers with a clock; "a" drives."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1000.0)
        self.callers = Callers(INCARNATION, self.clock, SILENCE_S, Signal())

    async def attach(self, owner: str, *, take_over: bool = False, attempt: int = 1) -> Caller:
        return await self.callers.attach(owner, take_over, f"here:{owner}", attempt)

    def silence(self) -> None:
        self.clock.advance(SILENCE_S)


@pytest.fixture
async def door() -> Door:
    one = Door()
    assert await one.attach("a") == Caller(INCARNATION, 1)
    return one


@pytest.mark.parametrize("take_over", [False, True])
@pytest.mark.parametrize("attempt", [1, 2])
async def test_the_same_owner_gets_the_next_token_and_its_older_one_is_refused(
    take_over: bool, attempt: int, door: Door
) -> None:
    """Also with an equal attempt number: Prefect does not count what follows a suspension."""
    assert await door.attach("a", take_over=take_over, attempt=attempt) == Caller(INCARNATION, 2)
    door.callers.check(Caller(INCARNATION, 2))
    with pytest.raises(RunFenced, match="driver 1"):
        door.callers.check(Caller(INCARNATION, 1))


@pytest.mark.parametrize("take_over", [False, True])
async def test_an_attempt_that_wakes_up_after_its_successor_attached_is_refused(take_over: bool, door: Door) -> None:
    newer = await door.attach("a", attempt=2)
    with pytest.raises(RunFenced, match="attempt 1 of a"):
        await door.attach("a", take_over=take_over, attempt=1)
    door.callers.check(newer)


async def test_another_owner_is_refused_while_the_driver_lives(door: Door) -> None:
    door.clock.advance(SILENCE_S - 1)
    with pytest.raises(RunBusy, match="driven by a, which called 59 s ago") as caught:
        await door.attach("b")
    assert caught.value.exit_code == 2
    assert "--take-over" in caught.value.action
    door.callers.check(Caller(INCARNATION, 1))
    assert (door.callers.owner, door.callers.token) == ("a", 1)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("take_over", [False, True])
async def test_another_owner_gets_in_when_it_says_so_or_the_driver_is_silent(
    silent: bool, take_over: bool, door: Door
) -> None:
    if not (silent or take_over):
        return  # the case above
    if silent:
        door.silence()
    taken = await door.attach("b", take_over=take_over)
    assert taken == Caller(INCARNATION, 2)
    assert (door.callers.owner, door.callers.place) == ("b", "here:b")
    with pytest.raises(RunFenced):
        door.callers.check(Caller(INCARNATION, 1))


async def test_a_call_of_the_driver_ends_its_silence(door: Door) -> None:
    door.silence()
    door.callers.check(Caller(INCARNATION, 1))
    with pytest.raises(RunBusy):
        await door.attach("b")


@pytest.mark.parametrize("how", ["take_over", "silence"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
async def test_a_displaced_owner_never_comes_back(how: str, again: bool, quiet: bool, door: Door) -> None:
    """However it was displaced, whether it says take_over, and also when its successor is silent."""
    if how == "silence":
        door.silence()
    taken = await door.attach("b", take_over=how == "take_over")
    if quiet:
        door.silence()
    with pytest.raises(RunFenced, match="a, from which b took this run") as caught:
        await door.attach("a", take_over=again, attempt=7)
    assert caught.value.code == "displaced"
    assert "new flow run" in caught.value.action
    door.callers.check(taken)


async def test_who_took_over_may_retry_and_a_third_may_take_over_from_it(door: Door) -> None:
    await door.attach("b", take_over=True)
    assert await door.attach("b", take_over=True, attempt=2) == Caller(INCARNATION, 3)
    assert await door.attach("c", take_over=True) == Caller(INCARNATION, 4)
    for displaced in "ab":
        with pytest.raises(RunFenced, match="took this run"):
            await door.attach(displaced, take_over=True)


async def test_who_was_refused_as_busy_may_come_later(door: Door) -> None:
    """It never drove, so it was not displaced. Its attempts count from its own first one."""
    await door.attach("a", attempt=5)
    with pytest.raises(RunBusy):
        await door.attach("b", attempt=1)
    door.silence()
    assert await door.attach("b", attempt=2) == Caller(INCARNATION, 3)


@pytest.mark.parametrize("fatal", [ValueError("broken"), RunFenced("newer", expected="none", action="stop")])
@pytest.mark.parametrize("owner", ["a", "b"])
async def test_a_manager_that_has_ended_lets_nobody_in_and_says_why(fatal: Exception, owner: str, door: Door) -> None:
    door.callers.fail(fatal)
    door.callers.fail(ActorLost("a later cause", expected="", action=""))
    with pytest.raises(TidegateError, match=r"broken|newer") as caught:
        await door.attach(owner, take_over=True)
    assert isinstance(caught.value, RunFenced) == isinstance(fatal, RunFenced)


async def test_a_new_driver_waits_for_the_open_call_of_the_displaced_one(door: Door) -> None:
    with door.callers.call(Caller(INCARNATION, 1)):
        coming = asyncio.create_task(door.attach("b", take_over=True))
        await asyncio.sleep(0.02)
        assert not coming.done()
        with pytest.raises(RunFenced):
            door.callers.check(Caller(INCARNATION, 1))
    assert await coming == Caller(INCARNATION, 2)
