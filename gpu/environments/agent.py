"""The agent loop: one rollout from its first prompt, or from its last durable turn, to its reward.

Each turn's tokens go to `RolloutSink` when the turn ends. An environment may replace the context: the rollout then goes
on in a new output sample. What the loop raises ends the attempt; it never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.generation.engine import Finish, Generated, GenRequest, Sampling
from gpu.models.tokenizer import Tokenizer
from gpu.rollout.messages import Dispatch, Identity
from gpu.rollout.source import rollout_seed
from storage.errors import ContinuationInvalid
from storage.payload import TurnRow
from storage.samples import assemble_slot, check_spans, misfit

Generate = Callable[[GenRequest], Awaitable[Generated]]


class GenerationAborted(Exception):
    """The engine ended a request before its time: the attempt is aborted."""


class AgentState(msgspec.Struct, frozen=True):
    """What goes on after a turn: the environment's answer as token ids, whether it opens a new sample, and the
    environment's exported state."""

    answer: tuple[int, ...]
    new_context: bool
    environment: bytes


class _Place(NamedTuple):
    """Where a turn stands: its output sample, the sample's tokens before it, and the ids that open it."""

    sample: int
    context: list[int]
    fresh: list[int]


class RolloutSink(Protocol):
    """Where turns and the end of an attempt are reported."""

    def turn(self, dispatch: Dispatch, boundary: int, row: TurnRow, state: bytes) -> None:
        """A finished turn that another follows."""
        ...

    def end(self, dispatch: Dispatch, row: TurnRow) -> None:
        """The last turn, with the reward."""
        ...


class Agent:
    """Runs rollouts of one environment. `position` maps an ordinal to a task; `temperature` holds for every turn. The
    ordinal of a plain dispatch is the index of its task: the same randomness for the same task at every step."""

    def __init__(
        self,
        environment: Environment,
        tokenizer: Tokenizer,
        generate: Generate,
        sink: RolloutSink,
        *,
        seed: int,
        temperature: float,
        position: Callable[[int], int],
    ) -> None:
        self._environment, self._tokenizer, self._generate, self._sink = environment, tokenizer, generate, sink
        self._seed, self._temperature, self._position = seed, temperature, position

    async def run(self, dispatch: Dispatch, before: Sequence[TurnRow]) -> None:
        """One attempt. `before` are the turns of the continuation, empty from scratch. Raises `ReferenceInvalid` when
        the turns do not make samples; nothing of the last turn is then reported."""
        identity = dispatch.identity
        ordinal = identity.group if dispatch.plain is None else dispatch.plain.index
        episode = self._environment.episode()
        seed = rollout_seed(self._seed, ordinal, identity.sibling, 0)
        opening = await episode.reset(self._environment.task(self._position(ordinal)), seed)
        place = _resume(episode, dispatch, before) if before else _Place(0, [], self._tokenizer.prompt(opening))
        rows = list(before)
        turns = _Turns(self._sink, dispatch, hold_back=episode.checkpoint_mode is CheckpointMode.RESTART_ONLY)
        for turn in range(len(before), self._environment.max_turns):
            generated = await self._turn(identity, ordinal, turn, place.context + place.fresh)
            stopped = generated.finish is Finish.STOP
            result = await episode.step(Action(self._tokenizer.decode(generated.tokens.tolist()), stopped))
            rows.append(_row(identity, turn, place, generated, result))
            if result.done:
                assemble_slot(rows, identity.group, identity.sibling)
                turns.flush()
                self._sink.end(dispatch, rows[-1])
                return
            place = self._next(place, rows[-1], result, stopped)
            turns.add(rows[-1], _state(episode, place))
        raise ContinuationInvalid(
            f"rollout {identity} is not done after {self._environment.max_turns} turns",
            expected="an end by then",
            action="let the environment end its episodes within max_turns",
        )

    def _next(self, place: _Place, row: TurnRow, result: StepResult, stopped: bool) -> _Place:
        if result.new_context:
            return _Place(place.sample + 1, [], self._tokenizer.prompt(result.messages))
        return _Place(
            place.sample, place.context + row.tokens.tolist(), self._tokenizer.extend(result.messages, stopped)
        )

    async def _turn(self, identity: Identity, ordinal: int, turn: int, prompt: list[int]) -> Generated:
        if not prompt:
            raise misfit(f"rollout {identity}", f"an empty context in turn {turn}", "a prompt", "prompt")
        seed = rollout_seed(self._seed, ordinal, identity.sibling, (identity.attempt << 16) + turn)
        sampling = Sampling(self._environment.max_new_tokens, self._temperature, seed, self._tokenizer.stop_ids)
        generated = await self._generate(GenRequest(f"{identity}.{turn}", tuple(prompt), sampling))
        if generated.finish is Finish.ABORT:
            raise GenerationAborted(f"request {generated.id} ended after {len(generated.tokens)} tokens")
        check_spans(generated.spans, len(generated.tokens), f"rollout {identity}")
        return generated


class _Turns:
    """Reports turns as they end; those of an environment that can only restart are held back until the last."""

    def __init__(self, sink: RolloutSink, dispatch: Dispatch, *, hold_back: bool) -> None:
        self._sink, self._dispatch, self._hold_back = sink, dispatch, hold_back
        self._held: list[tuple[TurnRow, bytes]] = []
        self._boundary = dispatch.boundary

    def add(self, row: TurnRow, state: bytes) -> None:
        self._held.append((row, state))
        if not self._hold_back:
            self.flush()

    def flush(self) -> None:
        for row, state in self._held:
            self._sink.turn(self._dispatch, self._boundary, row, state)
            self._boundary += 1
        self._held.clear()


def _resume(episode: Episode, dispatch: Dispatch, before: Sequence[TurnRow]) -> _Place:
    """Restore the environment after the last durable turn; where the turn after it stands."""
    assert dispatch.continuation is not None, "only a continuation has turns before it"
    state = msgspec.json.decode(dispatch.continuation.state, type=AgentState)
    if episode.checkpoint_mode is CheckpointMode.EXPORT_RESTORE:
        episode.restore_state(state.environment)
    last = before[-1].sample
    if state.new_context:
        return _Place(last + 1, [], list(state.answer))
    context = [token for row in before if row.sample == last for token in row.tokens.tolist()]
    return _Place(last, context, list(state.answer))


def _state(episode: Episode, place: _Place) -> bytes:
    """What the turn at `place` needs to begin."""
    exports = episode.checkpoint_mode is CheckpointMode.EXPORT_RESTORE
    environment = episode.export_state() if exports else b""
    return msgspec.json.encode(AgentState(tuple(place.fresh), not place.context, environment))


def _row(identity: Identity, turn: int, place: _Place, generated: Generated, result: StepResult) -> TurnRow:
    """The turn's new tokens: what the environment said (mask 0), then what was generated (mask 1)."""
    given, made = len(place.fresh), len(generated.tokens)
    return TurnRow(
        group=identity.group,
        sibling=identity.sibling,
        attempt=identity.attempt,
        turn=turn,
        sample=place.sample,
        start=len(place.context),
        tokens=np.concatenate([np.array(place.fresh, np.int32), generated.tokens]),
        logprobs=np.concatenate([np.zeros(given, np.float32), generated.logprobs]),
        mask=np.repeat(np.array([0, 1], np.int8), [given, made]),
        spans=generated.spans,
        done=result.done,
        reward=result.reward,
        record=result.record,
    )
