"""Rollouts whose environment replaces their context: several output samples, across continuations too."""

from __future__ import annotations

import msgspec
import pytest

from gpu.environments.agent import AgentState
from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.registry import make_environment
from gpu.generation.engine import Finish
from gpu.models.tokenizer import Message
from gpu.rollout.messages import Continuation
from storage.errors import ReferenceInvalid
from storage.ledger import Boundary
from storage.payload import VersionSpan
from storage.samples import Sample, assemble_slot
from tests.gpu.agents import TOKENIZER, Sink, agent, dispatch, faked, scripted

GROUP = 9


def compacting() -> Environment:
    return make_environment("guess", {"letters": 26, "compact_every": 2})


async def test_a_compacted_conversation_goes_on_in_a_sample_of_its_own() -> None:
    sink = Sink()
    generate = scripted(*"pdhkj", finish=Finish.LENGTH)
    await agent(compacting(), generate, sink).run(dispatch(GROUP), [])
    assert generate.prompts == ["?", "?p<", "d?p", "d?ph>", "h?k"]
    assert [(row.turn, row.sample, row.start, row.done) for row in sink.rows] == [
        (0, 0, 0, False), (1, 0, 2, False), (2, 1, 0, False), (3, 1, 4, False), (4, 2, 0, True)
    ]  # fmt: skip
    assert [msgspec.msgpack.decode(state, type=AgentState).new_context for _, _, state in sink.turns] == [
        False, True, False, True
    ]  # fmt: skip
    samples = assemble_slot(sink.rows, GROUP, 0)
    assert [TOKENIZER.decode(sample.tokens.tolist()) for sample in samples] == ["?p<d", "d?ph>k", "h?kj"]
    assert [sample.mask.tolist() for sample in samples] == [[0, 1, 0, 1], [0, 0, 0, 1, 0, 1], [0, 0, 0, 1]]
    assert [sample.spans[-1].end for sample in samples] == [2, 2, 1]
    assert [sample.reward for sample in samples] == pytest.approx([0.6] * 3), "four wrong guesses"


async def test_what_is_known_is_open_on_a_side_where_nothing_was_guessed() -> None:
    generate = scripted(*"pq d", finish=Finish.LENGTH)
    await agent(make_environment("guess", {"turns": 4, "compact_every": 1}), generate, Sink()).run(dispatch(GROUP), [])
    assert generate.prompts == ["?", "?p", "?p", "?p"], "a space is no letter"


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
async def test_a_rollout_killed_in_any_of_its_samples_goes_on_as_if_uninterrupted(cut: int) -> None:
    whole = Sink()
    await agent(compacting(), faked(), whole).run(dispatch(GROUP), [])
    assert [row.sample for row in whole.rows] == [0, 0, 1, 1, 2]
    boundary, _, state = whole.turns[cut - 1]
    before = whole.rows[:cut]
    resumed = Sink()
    at = Boundary(boundary, cut - 1, before[-1].sample, state, 0, 0, 0)
    continuation = Continuation((), {}, {}, at)
    await agent(compacting(), faked(version=4), resumed).run(dispatch(GROUP, 1, boundary + 1, continuation), before)
    assert [row.turn for row in resumed.rows] == list(range(cut, 5)), "finished turns are not generated again"
    joined, reference = assemble_slot([*before, *resumed.rows], GROUP, 0), assemble_slot(whole.rows, GROUP, 0)
    assert [content(sample) for sample in joined] == [content(sample) for sample in reference]
    assert {sample.attempt for sample in joined} == {1}
    versions = [span.number for sample in joined for span in sample.spans]
    assert versions == sorted(versions)
    assert (versions[0], versions[-1]) == (3, 4)


def content(sample: Sample) -> tuple[object, ...]:
    return sample.index, sample.tokens.tolist(), sample.logprobs.tolist(), sample.mask.tolist(), sample.reward


class Agents(Environment):
    """Two agents speak in turn, each in a conversation of its own: `says` opens the second one."""

    max_new_tokens, max_turns = 1, 2

    def __init__(self, says: str, mode: str = "restart_only") -> None:
        self._says, self._mode = says, CheckpointMode(mode)

    def __len__(self) -> int:
        return 4

    def task(self, index: int) -> bytes:
        return b"{}"

    def episode(self) -> Episode:
        return _Agents(self._says, self._mode)


class _Agents(Episode):
    def __init__(self, says: str, mode: CheckpointMode) -> None:
        self._says, self._second, self.checkpoint_mode = says, False, mode

    async def reset(self, task: bytes, seed: int):
        return [Message("user", "first:")]

    async def step(self, action: Action) -> StepResult:
        if self._second:
            return StepResult(True, 0.5)
        self._second = True
        return StepResult(False, messages=[Message("user", self._says)] * bool(self._says), new_context=True)


async def test_an_environment_that_can_only_restart_has_samples_too() -> None:
    sink = Sink()
    await agent(Agents("second:"), scripted("a", "b", finish=Finish.LENGTH), sink).run(dispatch(), [])
    samples = assemble_slot(sink.rows, 0, 0)
    assert [TOKENIZER.decode(sample.tokens.tolist()) for sample in samples] == ["first:a", "second:b"]
    assert [sample.spans for sample in samples] == [(VersionSpan(1, 3, 1),)] * 2


async def test_a_new_context_without_a_prompt_is_refused_before_anything_is_generated() -> None:
    sink = Sink()
    generate = scripted("a", "b", finish=Finish.LENGTH)
    with pytest.raises(ReferenceInvalid, match="empty context") as caught:
        await agent(Agents(""), generate, sink).run(dispatch(), [])
    assert caught.value.code == "prompt"
    assert len(generate.prompts) == 1
    assert sink.rows == []


async def test_turns_that_do_not_make_samples_are_not_reported_as_a_result() -> None:
    """A continuation whose rows do not belong to its rollout."""
    whole, resumed = Sink(), Sink()
    await agent(compacting(), faked(), whole).run(dispatch(GROUP), [])
    boundary, _, state = whole.turns[1]
    other = [whole.rows[1], whole.rows[1]]
    continuation = Continuation((), {}, {}, Boundary(boundary, 1, 0, state, 0, 0, 0))
    with pytest.raises(ReferenceInvalid):
        await agent(compacting(), faked(), resumed).run(dispatch(GROUP, 1, boundary + 1, continuation), other)
    assert resumed.ended == []
