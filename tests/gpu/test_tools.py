"""Episodes that change resources: each change once, whenever the worker dies, and the same rollout comes out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.resources import ResourceHost, ToolError
from gpu.environments.sessions import Session, SessionHost
from gpu.environments.tools import NotContinuable
from gpu.models.tokenizer import Message
from storage.errors import ContinuationInvalid
from tests.gpu.continuing import OneRollout, by_turn


class Notes(Session):
    """Numbers that were added; `world` sees each effect from outside."""

    def __init__(self, world: list[str]) -> None:
        self.world, self.total = world, 0

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "total":
            return self.total
        if arguments["number"] == 0:
            raise ToolError("nothing to add")
        if arguments["number"] == 9:
            self.world.append("9")
            raise RuntimeError("it broke after its effect")
        self.world.append(str(arguments["number"]))
        self.total += arguments["number"]
        return self.total

    def export_state(self) -> bytes:
        return str(self.total).encode()

    def restore_state(self, data: bytes) -> None:
        self.total = int(data)


class Adding(Environment):
    """Each digit of an answer is added, by a request of its own, between two that read; "!" ends with the total."""

    max_new_tokens, max_turns = 8, 6

    def __init__(self, host: ResourceHost) -> None:
        self._hosts = {"notes": host}

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> bytes:
        return b"{}"

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return self._hosts

    def episode(self) -> Episode:
        return _Adding()


class _Adding(Episode):
    checkpoint_mode = CheckpointMode.EXPORT_RESTORE

    def __init__(self) -> None:
        self.said: list[str] = []

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        return [Message("user", "?")]

    async def step(self, action: Action) -> StepResult:
        self.said.append(action.text)
        seen = [await self.tools.read("notes", "total")] if action.text[:1] != "-" else []
        for digit in action.text:
            if digit.isdigit():
                try:
                    seen.append(await self.tools.call("notes", "add", {"number": int(digit)}))
                except ToolError as error:
                    seen.append(str(error))
        record = json.dumps([self.said, seen]) if "r" in action.text else ""
        if action.text.endswith("!"):
            total = await self.tools.read("notes", "total")
            return StepResult(True, float(total), record=record)
        return StepResult(False, messages=[Message("user", f"{seen[-1]};" if seen else ";")], record=record)

    def export_state(self) -> bytes:
        return json.dumps(self.said).encode()

    def restore_state(self, data: bytes) -> None:
        self.said = json.loads(data)


ANSWERS = ("12", "-", "3r", "40", "5!")


class Lasting(SessionHost):
    """Its sessions outlive the worker, as those of another process do."""

    survives = True


def rollout(host: str = "lasting", answers: Sequence[str] = ANSWERS, **options: Any) -> tuple[OneRollout, list[str]]:
    """With the effects that the world has seen. The host is that of one long process, or one in each worker."""
    world: list[str] = []
    one = Lasting(lambda task, seed: Notes(world), **options)

    def make() -> Environment:
        mine = SessionHost(lambda task, seed: Notes(world), **options)
        return Adding(one if host == "lasting" else mine)

    return OneRollout(make, by_turn(*answers)), world


async def reference() -> tuple[OneRollout, list[str]]:
    one, world = rollout()
    assert await one.attempt()
    one.check()
    return one, world


async def test_a_rollout_reads_changes_and_is_told_what_was_refused() -> None:
    one, world = await reference()
    (sample,) = one.samples()
    assert (sample.reward, world) == (15.0, ["1", "2", "3", "4", "5"])
    kinds = [
        type(record).__name__ for record in one.records[one.setup + 1 :] if type(record).__name__ != "PayloadStored"
    ]
    acting = ["ModelAnswered", "RequestResult", "RequestIntent", "RequestResult"]
    assert kinds == [
        *acting, "RequestIntent", "RequestResult", "ResourceExported", "TurnCommitted", "TurnCommitted",
        *acting, "ResourceExported", "TurnCommitted",
        *acting, "RequestIntent", "RequestResult", "ResourceExported", "TurnCommitted",
        *acting, "RequestResult", "Sealed",
    ]  # fmt: skip


@pytest.mark.parametrize("lazy", [True, False], ids=["grouped", "each at once"])
@pytest.mark.parametrize("second", [None, 1, 4])
async def test_a_worker_that_dies_before_any_of_its_reports_changes_nothing_twice(
    lazy: bool, second: int | None
) -> None:
    """`second`: the next worker dies too, so many reports later."""
    whole, world = await reference()
    for at in range(whole.reported):
        one, effects = rollout()
        one.lazy, one.dies_before = lazy, at
        assert not await one.attempt(), at
        one.dies_before = -1 if second is None else one.reported + second
        await one.until_sealed()
        one.check()
        assert one.content() == whole.content(), at
        assert effects == world, at


async def test_a_worker_that_dies_between_an_intent_and_its_request_sends_it_once() -> None:
    whole, world = await reference()
    hit = 0
    for at in range(whole.reported):
        one, effects = rollout()
        one.dies_after_intent = at
        hit += not await one.attempt()
        if one.rollout.state.value != "sealed":
            assert await one.attempt()
        one.check()
        assert (one.content(), effects) == (whole.content(), world)
    assert hit == 5 + 1


async def test_sessions_of_a_dead_process_come_back_from_their_exports() -> None:
    """Their effects are inside the session: it is the state that must be right, whatever was made again."""
    whole, _ = await reference()
    for at in range(whole.reported):
        one, _ = rollout("own")
        one.dies_before = at
        assert not await one.attempt(), at
        assert await one.attempt()
        one.check()
        assert one.content() == whole.content(), at


async def test_without_replay_a_session_that_went_on_after_its_export_starts_over() -> None:
    restarted = 0
    whole, _ = await reference()
    for at in range(whole.reported):
        one, _ = rollout("own", replayable=False)
        one.lazy, one.dies_before = False, at
        assert not await one.attempt()
        try:
            assert await one.attempt()
        except NotContinuable:
            restarted += 1
            one.give_up("not_continuable")
            assert await one.attempt()
        one.check()
        assert one.samples()[0].reward == 15.0
    assert 0 < restarted < whole.reported


async def test_generation_is_repeated_for_the_turn_in_flight_only() -> None:
    whole, _ = await reference()
    for at in range(whole.reported):
        one, _ = rollout()
        one.lazy, one.dies_before = False, at
        assert not await one.attempt()
        assert await one.attempt()
        assert len(one.generate.calls) <= len(ANSWERS) + 1, at  # type: ignore[attr-defined]


async def test_what_broke_after_its_effect_is_never_made_again_in_its_lineage() -> None:
    one, world = rollout(answers=("19", "2!"))
    with pytest.raises(RuntimeError, match="broke"):
        await one.attempt()
    one._durable()
    with pytest.raises(NotContinuable, match="not known whether"):
        await one.attempt()
    assert world == ["1", "9"]


async def test_a_resource_that_can_only_restart_is_not_gone_on_with() -> None:
    one, _ = rollout("own", mode=CheckpointMode.RESTART_ONLY)
    one.lazy, one.dies_before = False, 12
    assert not await one.attempt()
    with pytest.raises(NotContinuable, match="can only start over"):
        await one.attempt()
    one.give_up("restart_only")
    assert await one.attempt()
    assert one.samples()[0].reward == 15.0


class Fickle(Adding):
    """Its step calls something else the second time."""

    times = 0

    def episode(self) -> Episode:
        Fickle.times += 1
        found = _Adding()
        if Fickle.times > 1:
            found.said = ["other"]
        whole = found.step

        async def step(action: Action) -> StepResult:
            return await whole(action._replace(text="7" if Fickle.times > 1 else action.text))

        found.step = step  # type: ignore[method-assign]
        return found


async def test_a_step_that_makes_other_calls_than_before_is_found_out() -> None:
    world: list[str] = []
    host = Lasting(lambda task, seed: Notes(world))
    one = OneRollout(lambda: Fickle(host), by_turn("-12", "3!"))
    one.lazy, one.dies_before = False, 5
    assert not await one.attempt()
    with pytest.raises(ContinuationInvalid, match="call 0 of this step") as caught:
        await one.attempt()
    assert caught.value.code == "replay"
    assert world == ["1", "2"][: len(world)]


async def test_resources_are_called_in_a_step_only() -> None:
    class Early(_Adding):
        async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
            await self.tools.call("notes", "add", {"number": 1})
            return []

    class Eager(Adding):
        def episode(self) -> Episode:
            return Early()

    one = OneRollout(lambda: Eager(SessionHost(lambda task, seed: Notes([]))), by_turn("1"))
    with pytest.raises(RuntimeError, match="only"):
        await one.attempt()


class Hasty(Adding):
    """Its step begins all its calls at once."""

    def episode(self) -> Episode:
        return _Hasty()


class _Hasty(_Adding):
    async def step(self, action: Action) -> StepResult:
        calls = [self.tools.call("notes", "add", {"number": int(digit)}) for digit in action.text if digit.isdigit()]
        totals = await asyncio.gather(*calls)
        done = action.text.endswith("!")
        return StepResult(done, float(totals[-1]) if done else 0.0, messages=[Message("user", f"{totals};")])


async def test_calls_that_are_begun_at_once_are_made_one_after_another_also_after_a_crash() -> None:
    world: list[str] = []
    host = Lasting(lambda task, seed: Notes(world))
    whole = OneRollout(lambda: Hasty(host), by_turn("123", "45!"))
    assert await whole.attempt()
    assert world == ["1", "2", "3", "4", "5"]
    for at in range(whole.reported):
        effects: list[str] = []
        mine = Lasting(lambda task, seed, effects=effects: Notes(effects))
        one = OneRollout(lambda mine=mine: Hasty(mine), by_turn("123", "45!"))
        one.dies_before = at
        assert not await one.attempt()
        await one.until_sealed()
        one.check()
        assert (one.content(), effects) == (whole.content(), world), at
