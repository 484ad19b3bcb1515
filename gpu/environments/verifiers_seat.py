"""The policy's seat in an environment of verifiers: its turns are asked for, and answered from outside.

It offers what an environment's `run` uses of an agent, `run` and `interaction`, and keeps the same trace, so that
rewards and metrics find what they read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gpu.environments.base import Action
from gpu.environments.packages import need
from gpu.models.tokenizer import Message


class Exchange:
    """Between an environment that runs and an agent loop that steps: one turn at a time."""

    def __init__(self) -> None:
        self._asked: asyncio.Queue[Sequence[Any]] = asyncio.Queue(1)
        self._answers: asyncio.Queue[Action] = asyncio.Queue(1)

    async def ask(self, messages: Sequence[Any]) -> Action:
        """The policy's answer to what is new in the conversation."""
        await self._asked.put(messages)
        return await self._answers.get()

    async def asked(self) -> Sequence[Any]:
        return await self._asked.get()

    def answer(self, action: Action) -> None:
        self._answers.put_nowait(action)


class Seats:
    """The agents of an episode by name, of which there is one. `traces` are the finished ones."""

    def __init__(self, config: Any, exchange: Exchange, max_turns: int) -> None:
        found = need("verifiers.v1.configs.agent", "verifiers").agent_config_fields(config)
        self.traces: list[Any] = []
        for name, agent in found.items():
            setattr(self, name, _Seat(name, agent, exchange, max_turns, self.traces))


class _Seat:
    trainable = True

    def __init__(self, name: str, config: Any, exchange: Exchange, max_turns: int, traces: list[Any]) -> None:
        self.name, self.config = name, config
        self._exchange, self._max_turns, self._traces = exchange, max_turns, traces
        self._taken = False

    async def run(self, task: Any) -> Any:
        """One answer to the task's prompt; the scored trace."""
        async with self.interaction(task) as held:
            await held.turn()
            held.trace.stop("agent_completed")
        return held.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Interaction]:
        """Turns with the policy. Leaving it scores the trace."""
        if self._taken:
            raise RuntimeError("the environment opens a second conversation; an episode here has one")
        self._taken = True
        held = _Interaction(task, self._trace(task), self._exchange, self._max_turns)
        await task.setup(held.trace, None)
        yield held
        held.trace.stop("user_closed")
        await task.finalize(held.trace, None)
        await task.score(held.trace)
        held.trace.ok = True
        self._traces.append(held.trace)

    def _trace(self, task: Any) -> Any:
        vf = need("verifiers.v1", "verifiers")
        state = need("verifiers.v1.state", "verifiers").state_cls(type(task))
        traced = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        return vf.Trace(task=traced, state=state(), agent=vf.AgentInfo(config=self.config, name=self.name))


class _Interaction:
    """A conversation that the environment holds with the policy."""

    def __init__(self, task: Any, trace: Any, exchange: Exchange, max_turns: int) -> None:
        self.trace = trace
        self._task, self._exchange, self._max_turns = task, exchange, max_turns

    async def turn(self, message: Any = None) -> Any:
        """The policy's next answer: to the task's prompt without a `message`, or to that. Terminated, without an
        answer, after the last turn."""
        types = need("verifiers.v1.types", "verifiers")
        segment = need("verifiers.v1.agent", "verifiers").Segment
        if self.trace.num_turns >= self._max_turns:
            self.trace.stop("max_turns")
            return segment([], terminated=True)
        new = [] if self.trace.nodes else self._opening(types)
        if message is not None:
            new += [types.UserMessage(content=message)] if isinstance(message, str) else list(message)
        if not new:
            raise RuntimeError("the environment asks for a turn without a prompt or a message")
        for one in new:
            self._keep(one)
        action = await self._exchange.ask(new)
        answer = types.AssistantMessage(content=action.text)
        self._keep(answer, sampled=True)
        call = need("verifiers.v1.trace", "verifiers").ModelCall
        finish = "stop" if action.finished else "length"
        self.trace.calls.append(call(node=len(self.trace.nodes) - 1, finish_reason=finish))
        return segment([answer])

    def _opening(self, types: Any) -> list[Any]:
        data = self._task.data
        system = [types.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        prompt = [types.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
        return [*system, *prompt]

    def _keep(self, message: Any, *, sampled: bool = False) -> None:
        nodes, node = self.trace.nodes, need("verifiers.v1.graph", "verifiers").MessageNode
        nodes.append(node(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


def as_prompt(message: Any) -> Message:
    """Raises `ValueError` for what is not text of a system, a user or an assistant."""
    if message.role not in ("system", "user", "assistant") or not isinstance(message.content, str):
        raise ValueError(f"a {message.role} message of verifiers that is not text")
    return Message(message.role, message.content)
