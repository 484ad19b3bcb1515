"""Sessions that died with their process: a request whose reply never came is made again only where that is safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.resources import ResourceHost
from gpu.environments.sessions import Session, SessionHost
from gpu.models.tokenizer import Message
from tests.gpu.crashes import play


class Outside(Session):
    """Counts for itself; every change is also seen by `world`."""

    def __init__(self, world: list[str]) -> None:
        self._world, self._count = world, 0

    def handle(self, operation: str, arguments: dict[str, Any]) -> int:
        self._world.append(operation)
        self._count += 1
        return self._count

    def export_state(self) -> bytes:
        return str(self._count).encode()

    def restore_state(self, data: bytes) -> None:
        self._count = int(data)


class Letters(Environment):
    """Each answer is a change, "c" the last one."""

    max_new_tokens, max_turns = 4, 3

    def __init__(self, world: list[str], mode: CheckpointMode, *, replayable: bool) -> None:
        self._world, self._mode, self._replayable = world, mode, replayable

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        return {
            "world": SessionHost(lambda task, seed: Outside(self._world), mode=self._mode, replayable=self._replayable)
        }

    def __len__(self) -> int:
        return 1

    def task(self, index: int) -> bytes:
        return b"{}"

    def episode(self) -> Episode:
        return _Letters()


class _Letters(Episode):
    checkpoint_mode = CheckpointMode.STATELESS

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        return [Message("user", "?")]

    async def step(self, action: Action) -> StepResult:
        await self.tools.call("world", action.text)
        return StepResult(action.text == "c", 1.0, [Message("user", ">")])


@pytest.mark.parametrize("mode", [CheckpointMode.EXPORT_RESTORE, CheckpointMode.RESTART_ONLY])
async def test_a_change_outside_the_session_is_never_made_twice_by_one_lineage(mode: CheckpointMode) -> None:
    for cut in range(11):
        world: list[str] = []
        played = await play(lambda attempt: Letters(world, mode, replayable=False), 0, ["a", "b", "c"], cut)  # noqa: B023
        whole = world[-3:]
        assert whole == ["a", "b", "c"], cut
        before = world[:-3]
        assert before == ["a", "b", "c"][: len(before)], cut
        assert played.restarted == bool(before), cut


async def test_a_change_inside_the_session_is_made_again_on_its_export() -> None:
    mode = CheckpointMode.EXPORT_RESTORE
    for cut in range(11):
        world: list[str] = []
        played = await play(lambda attempt: Letters(world, mode, replayable=True), 0, ["a", "b", "c"], cut)  # noqa: B023
        assert (played.reward, played.restarted) == (1.0, False), cut
        assert len(world) <= 4, "at most the last one"
