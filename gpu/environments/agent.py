"""The agent loop: one rollout from its first prompt, or from its last boundary, to its reward.

Each turn's tokens go to `RolloutSink` when the turn ends, or before its first action that changes a resource, and are
durable before the rollout's next model call. An environment may replace the context: the rollout then goes on in a new
output sample. What the loop raises ends the attempt; it never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.resources import Claim, Reply, ResourceHost
from gpu.environments.tools import Exported, Sessions, Tools
from gpu.generation.engine import Finish, Generated, GenRequest, Sampling
from gpu.models.tokenizer import Tokenizer
from gpu.rollout.messages import Dispatch, Identity
from gpu.rollout.source import rollout_seed
from storage.errors import ContinuationInvalid
from storage.ledger import Boundary
from storage.payload import TurnRow, account_row
from storage.samples import assemble_slot, check_spans, misfit
from storage.schema import Receipt

Generate = Callable[[GenRequest], Awaitable[Generated]]


class GenerationAborted(Exception):
    """The engine ended a request before its time: the attempt is aborted."""


class AgentState(msgspec.Struct, frozen=True, array_like=True):
    """What goes on after a turn: the environment's answer as token ids (int32, little-endian), whether it opens a new
    sample, and the environment's exported state."""

    answer: bytes
    new_context: bool
    environment: bytes

    def tokens(self) -> list[int]:
        return np.frombuffer(self.answer, "<i4").tolist()

    @classmethod
    def of(cls, tokens: Sequence[int], environment: bytes, *, new_context: bool) -> AgentState:
        return cls(np.array(tokens, "<i4").tobytes(), new_context, environment)


class _Place(NamedTuple):
    """Where a turn stands: its output sample, the sample's tokens before it, and the ids that open it."""

    sample: int
    context: list[int]
    fresh: list[int]


class Turned(NamedTuple):
    """A finished turn. `call` are the tokens of its model call; `row` is what is not durable yet of it: the call, or,
    where that was reported as answered, the environment's account of the turn, if it gave one."""

    call: TurnRow
    row: TurnRow | None


class RolloutSink(Protocol):
    """Where progress and the end of an attempt are reported, in order."""

    def turn(
        self,
        dispatch: Dispatch,
        boundary: int,
        turned: Turned,
        state: bytes,
        revisions: dict[str, int],
        exports: Sequence[Exported],
    ) -> None:
        """A finished turn that another follows."""
        ...

    def answered(self, dispatch: Dispatch, boundary: int, call: TurnRow) -> None:
        """An answer that is about to be acted on."""
        ...

    def intent(
        self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, revision: int, digest: str
    ) -> None: ...

    def result(
        self, dispatch: Dispatch, boundary: int, cursor: int, resource: str, digest: str, reply: Reply
    ) -> None: ...

    async def settled(self, dispatch: Dispatch) -> None:
        """Returns when everything is durable that the attempt has reported."""
        ...

    def end(self, dispatch: Dispatch, turned: Turned, receipts: tuple[Receipt, ...]) -> None:
        """The last turn, with the reward in its row, and receipts of hosts that keep the result."""
        ...


class Agent:
    """Runs rollouts of one environment. `position` maps an ordinal to a task; `temperature` holds for every turn; `run`
    is the name that sessions with resources begin with. The ordinal of a plain dispatch is the index of its task: the
    same randomness for the same task at every step."""

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
        run: str = "",
    ) -> None:
        self._environment, self._tokenizer, self._generate, self._sink = environment, tokenizer, generate, sink
        self._seed, self._temperature, self._position, self._run = seed, temperature, position, run
        self.hosts: Mapping[str, ResourceHost] = environment.resources

    async def run(self, dispatch: Dispatch, before: Sequence[TurnRow]) -> None:
        """One attempt. `before` are the rows of the continuation, empty from scratch. Raises `ReferenceInvalid` when
        the turns do not make samples (nothing of the last turn is then reported), and `NotContinuable`."""
        going = await self._begin(dispatch, before)
        for turn in range(going.first, self._environment.max_turns):
            call, stopped = await self._answer(going, turn)
            result, turned, revisions, exports = await self._step(going, call, stopped)
            if result.done:
                await self._finish(going, turned, result)
                return
            going.place = self._next(going.place, call, result, stopped)
            await going.progress.turn(turned, _state(going.episode, going.place), revisions, exports)
        raise ContinuationInvalid(
            f"rollout {dispatch.identity} is not done after {self._environment.max_turns} turns",
            expected="an end by then",
            action="let the environment end its episodes within max_turns",
        )

    async def _begin(self, dispatch: Dispatch, before: Sequence[TurnRow]) -> _Going:
        """The episode at its beginning, or where the continuation left it."""
        identity = dispatch.identity
        ordinal = identity.group if dispatch.plain is None else dispatch.plain.index
        at = dispatch.continuation.at if dispatch.continuation is not None else None
        seed = rollout_seed(self._seed, ordinal, identity.sibling, 0)
        task, episode = self._environment.task(self._position(ordinal)), self._environment.episode()
        progress = _Progress(self._sink, dispatch)
        progress.hold_back = episode.checkpoint_mode is CheckpointMode.RESTART_ONLY
        episode.tools = tools = self._tools(dispatch, task, seed, progress)
        opening = await episode.reset(task, seed)
        await tools.begin(at)
        _restore(episode, at)
        place = _Place(0, [], self._tokenizer.prompt(opening)) if at is None or not at.state else _place(before, at)
        pending = at if at is not None and at.pending else None
        first = 0 if at is None else at.turn + (not at.pending)
        return _Going(dispatch, ordinal, episode, tools, progress, place, list(before), first, pending)

    async def _answer(self, going: _Going, turn: int) -> tuple[TurnRow, bool]:
        """The policy's answer in this turn, generated now or before a crash, and whether it ended it itself."""
        if going.pending is not None:
            call = going.rows[-1]
            return call, int(call.tokens[-1]) in self._tokenizer.stop_ids
        identity, place = going.dispatch.identity, going.place
        generated = await self._turn(identity, going.ordinal, turn, place.context + place.fresh)
        going.rows.append(_call(identity, turn, place, generated))
        return going.rows[-1], generated.finish is Finish.STOP

    async def _step(
        self, going: _Going, call: TurnRow, stopped: bool
    ) -> tuple[StepResult, Turned, dict[str, int], list[Exported]]:
        """What the environment makes of an answer, with the revisions and exports after it."""
        going.progress.call = call
        going.tools.turn_begins(going.pending)
        said = self._tokenizer.decode(call.tokens[call.mask == 1].tolist())
        result = await going.episode.step(Action(said, stopped))
        acted, revisions, exports = await going.tools.turn_ended(last=result.done)
        turned = _turned(going.dispatch.identity, call, result, answered=acted)
        going.rows[-1:] = [row for row in (call if acted else None, turned.row) if row is not None]
        going.pending = None
        return result, turned, revisions, exports

    async def _finish(self, going: _Going, turned: Turned, result: StepResult) -> None:
        dispatch = going.dispatch
        assemble_slot(going.rows, dispatch.identity.group, dispatch.identity.sibling)
        going.progress.end(turned, await self._complete(dispatch, going.tools, turned.call, result))
        if going.tools.used:
            await self._sink.settled(dispatch)  # until then another attempt may have to go on with them
            await going.tools.end()

    def _tools(self, dispatch: Dispatch, task: bytes, seed: int, progress: _Progress) -> Tools:
        one = dispatch.identity
        at = dispatch.continuation.at if dispatch.continuation is not None else None
        run = self._run if dispatch.plain is None else f"{self._run}@{one.incarnation}"
        sessions = Sessions(run, one.group, one.sibling, one.attempt if at is None else at.root)
        return Tools(self.hosts, sessions, Claim(one.incarnation, one.attempt), task, seed, progress)

    async def _complete(
        self, dispatch: Dispatch, tools: Tools, call: TurnRow, result: StepResult
    ) -> tuple[Receipt, ...]:
        """Nobody would acknowledge what an evaluation came to."""
        if dispatch.plain is not None:
            return ()
        rollout = f"g{call.group}/{call.sibling}"
        said = {"rollout": rollout, "reward": result.reward, "turns": call.turn + 1}
        return await tools.complete(said, call.attempt, call.turn)

    def _next(self, place: _Place, call: TurnRow, result: StepResult, stopped: bool) -> _Place:
        if result.new_context:
            return _Place(place.sample + 1, [], self._tokenizer.prompt(result.messages))
        return _Place(
            place.sample, place.context + call.tokens.tolist(), self._tokenizer.extend(result.messages, stopped)
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


@dataclass(slots=True)
class _Going:
    """An attempt under way. `rows` are all of the rollout so far; the turn `first` is the next one; `pending` is the
    boundary whose answer is acted on again."""

    dispatch: Dispatch
    ordinal: int
    episode: Episode
    tools: Tools
    progress: _Progress
    place: _Place
    rows: list[TurnRow]
    first: int
    pending: Boundary | None


class _Held(NamedTuple):
    turned: Turned
    state: bytes
    revisions: dict[str, int]
    exports: Sequence[Exported]


class _Progress:
    """Numbers the boundaries of one attempt and reports them as they come. `hold_back`: the turns of an environment
    that can only restart are reported with its last one, or with an answer that is acted on."""

    def __init__(self, sink: RolloutSink, dispatch: Dispatch) -> None:
        self._sink, self._dispatch = sink, dispatch
        self._boundary = dispatch.boundary
        self._held: list[_Held] = []
        self.hold_back = False
        self.call: TurnRow | None = None

    async def turn(self, turned: Turned, state: bytes, revisions: dict[str, int], exports: Sequence[Exported]) -> None:
        """The next model call of the rollout waits until the turn is durable, so that a crash never costs more than the
        turn in flight."""
        self._held.append(_Held(turned, state, revisions, exports))
        if not self.hold_back:
            self._flush()
            await self._sink.settled(self._dispatch)

    def _flush(self) -> None:
        for held in self._held:
            self._sink.turn(self._dispatch, self._count(), *held)
        self._held.clear()

    def _count(self) -> int:
        self._boundary += 1
        return self._boundary - 1

    def end(self, turned: Turned, receipts: tuple[Receipt, ...]) -> None:
        self._flush()
        self._sink.end(self._dispatch, turned, receipts)

    # ------------------------------------------------------------------ `tools.Journal`

    def answered(self) -> int:
        assert self.call is not None, "a step acts on an answer"
        self._flush()
        boundary = self._count()
        self._sink.answered(self._dispatch, boundary, self.call)
        return boundary

    async def intent(self, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        self._sink.intent(self._dispatch, boundary, cursor, resource, revision, digest)
        await self._sink.settled(self._dispatch)

    def result(self, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        self._sink.result(self._dispatch, boundary, cursor, resource, digest, reply)


def _restore(episode: Episode, at: Boundary | None) -> None:
    """Bring the environment to where the last finished turn left it."""
    if at is not None and at.state and episode.checkpoint_mode is CheckpointMode.EXPORT_RESTORE:
        episode.restore_state(msgspec.msgpack.decode(at.state, type=AgentState).environment)


def _place(before: Sequence[TurnRow], at: Boundary) -> _Place:
    """Where the turn after the last finished one stands."""
    state = msgspec.msgpack.decode(at.state, type=AgentState)
    done = [row for row in before if row.turn < at.turn] if at.pending else before
    last = done[-1].sample
    if state.new_context:
        return _Place(last + 1, [], state.tokens())
    context = [token for row in done if row.sample == last for token in row.tokens.tolist()]
    return _Place(last, context, state.tokens())


def _state(episode: Episode, place: _Place) -> bytes:
    """What the turn at `place` needs to begin."""
    exports = episode.checkpoint_mode is CheckpointMode.EXPORT_RESTORE
    environment = episode.export_state() if exports else b""
    return msgspec.msgpack.encode(AgentState.of(place.fresh, environment, new_context=not place.context))


def _call(identity: Identity, turn: int, place: _Place, generated: Generated) -> TurnRow:
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
        done=False,
        reward=0.0,
        record="",
    )


def _turned(identity: Identity, call: TurnRow, result: StepResult, *, answered: bool) -> Turned:
    """With what the environment says of the turn: in the call's row, or in one of its own where that is durable."""
    said = {"done": result.done, "reward": result.reward, "record": result.record}
    if not answered:
        whole = replace(call, **said)
        return Turned(whole, whole)
    if not result.done and not result.record:
        return Turned(call, None)
    return Turned(call, account_row(call, identity.attempt, **said))
