"""Environments of verifiers (`verifiers.v1`): its taskset, its control flow and its rewards around our generation.

The environment's own `run` is played with a seat whose turns the agent loop generates: no model endpoint, no harness
program, no sandbox. What needs one of those is refused when the environment is made, never scored without it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.packages import need
from gpu.environments.replay import Script, actions, diverged
from gpu.environments.verifiers_seat import Exchange, Seats, as_prompt
from gpu.models.tokenizer import Message
from storage.errors import ConfigurationRefused


class Verifiers(Environment):
    """The taskset with the id `taskset`, an installed package, with `options` as its configuration, played in the
    environment `env` (its own by default, and a single answer where it has none).

    `size` bounds the tasks; an endless taskset needs one. `config` is the environment's configuration beside its
    taskset. After `max_turns` answers the environment sees its exchange ended and scores what there is.

    `restore` after a crash: "restart", or "replay" for an environment that says the same again to the same answers. A
    rollout of a single answer has nothing to restore.
    """

    def __init__(
        self,
        taskset: str,
        options: Mapping[str, Any] | None = None,
        env: str = "",
        config: Mapping[str, Any] | None = None,
        size: int | None = None,
        max_turns: int | None = None,
        max_new_tokens: int = 512,
        restore: str = "restart",
    ) -> None:
        modes = {"replay": CheckpointMode.EXPORT_RESTORE, "restart": CheckpointMode.RESTART_ONLY}
        if restore not in modes:
            raise ValueError(f"restore is one of {', '.join(modes)}")
        if max_new_tokens < 1 or (size is not None and size < 1) or (max_turns is not None and max_turns < 1):
            raise ValueError("size, max_turns and max_new_tokens >= 1")
        self._played = _environment({**(config or {}), "id": env, "taskset": {**(options or {}), "id": taskset}})
        single = type(self._played) is need("verifiers.v1", "verifiers").SingleAgentEnv
        self.mode = CheckpointMode.STATELESS if single else modes[restore]
        self.max_turns = 1 if single else max_turns or 32
        self.max_new_tokens = max_new_tokens
        self._tasks = _tasks(self._played.taskset, size)
        for task in self._tasks:
            _check(task)

    @property
    def recipe(self) -> Sequence[type]:
        return [type(self._played), type(self._played.taskset), type(self._tasks[0])]

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, index: int) -> bytes:
        return json.dumps({"index": index, "data": self._tasks[index].data.model_dump(mode="json")}).encode()

    def episode(self) -> Episode:
        return _Rollout(self)

    async def play(self, index: int, exchange: Exchange) -> tuple[float, dict[str, Any]]:
        """One episode of the environment; its reward, and what it is made of."""
        vf = need("verifiers.v1", "verifiers")
        task, played = self._tasks[index], self._played
        traced = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        seats = Seats(played.config, exchange, self.max_turns)
        await played.setup(seats)
        await played.run(task, seats)
        episode = vf.Episode(task=traced, traces=seats.traces)
        await played.finalize(task, episode)
        (trace,) = seats.traces
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return trace.reward, {"rewards": rewards, "metrics": dict(trace.metrics)}


class _Rollout(Episode):
    def __init__(self, environment: Verifiers) -> None:
        self.checkpoint_mode = environment.mode
        self._environment = environment
        self._script = Script()
        self._owed = b""
        """An export whose actions are to be done again, before the next step."""

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        self._exchange = exchange = Exchange()
        self._play = asyncio.create_task(self._environment.play(json.loads(task)["index"], exchange))
        weakref.finalize(self, self._play.cancel).atexit = False
        opening = await self._heard()
        if opening is None:
            raise RuntimeError("the environment ended without an answer of the policy")
        return opening

    async def step(self, action: Action) -> StepResult:
        await self._catch_up()
        said = await self._say(action)
        if said is not None:
            return StepResult(False, messages=said)
        reward, record = self._play.result()
        return StepResult(True, reward, record=json.dumps(record))

    async def _say(self, action: Action) -> Sequence[Message] | None:
        self._script.actions.append([action.text, action.finished])
        self._exchange.answer(action)
        return await self._heard()

    async def _heard(self) -> Sequence[Message] | None:
        """What the policy is to answer; None when the environment has ended. Raises what it raised."""
        asked = asyncio.ensure_future(self._exchange.asked())
        try:
            await asyncio.wait([asked, self._play], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._play.result()
                return None
            said = [as_prompt(message) for message in asked.result()]
        finally:
            asked.cancel()
        self._script.answered(said)
        return said

    async def _catch_up(self) -> None:
        owed, self._owed = self._owed, b""
        if not owed:
            return
        for text, finished in actions(owed):
            try:
                said = await self._say(Action(text, finished))
            except Exception as error:
                raise diverged(f"{error!r} to answer {len(self._script.actions)}") from error
            if said is None:
                raise diverged(f"an end after {len(self._script.actions)} answers")
        self._script.check(owed)

    def export_state(self) -> bytes:
        return self._owed or self._script.export()

    def restore_state(self, data: bytes) -> None:
        self._owed = data


def _environment(config: dict[str, Any]) -> Any:
    """Raises `ConfigurationRefused` for packages and settings that do not exist."""
    need("verifiers.v1", "verifiers")
    loaders = need("verifiers.v1.utils.loaders", "verifiers")
    try:
        made = loaders.load_environment(loaders.resolve_env_config(config))
    except (ImportError, AttributeError) as error:
        raise ConfigurationRefused(
            f"verifiers does not load the taskset {config['taskset']['id']!r} in {config['id']!r}: {error}",
            expected="an installed taskset, and an installed environment, of verifiers.v1",
            action="install their packages on every node, or correct the ids",
        ) from error
    seats = need("verifiers.v1.configs.agent", "verifiers").agent_config_fields(made.config)
    if len(seats) != 1:
        raise _unfit(f"the environment has the seats {', '.join(seats)}", "a single one, the policy's")
    if made.taskset.toolsets(made.taskset.config):
        raise _unfit("the taskset serves tools", "none")
    return made


def _tasks(taskset: Any, size: int | None) -> list[Any]:
    if size is None and not taskset.bounded:
        raise ValueError("an endless taskset needs a `size`")
    found = list(taskset if size is None else taskset.take(size))
    if not found:
        raise ValueError("the taskset has no tasks")
    return found


def _check(task: Any) -> None:
    """That its messages and its rewards are all there is to a task."""
    if task.NEEDS_CONTAINER or task.data.image is not None:
        raise _unfit("a task runs in a container", "one that does not")
    if task.toolsets(task.config):
        raise _unfit("a task has tools", "none")
    decorated = need("verifiers.v1.utils.decorators", "verifiers").discover_decorated
    if decorated(task, "intercept") or task.hooks("stop"):
        raise _unfit("a task has @intercept or @stop hooks", "an environment that ends its exchange itself")
    for hook in _hooks(task):
        parameter = inspect.signature(hook).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            raise _unfit(f"{hook.__qualname__} asks for a runtime", "what the messages alone decide")
    if isinstance(task.data.prompt, list):
        for message in task.data.prompt:
            as_prompt(message)


def _hooks(task: Any) -> list[Any]:
    """Everything of a task that is called around an exchange."""
    base = need("verifiers.v1", "verifiers").Task
    own = [name for name in ("setup", "finalize") if getattr(type(task), name) is not getattr(base, name)]
    judges = [judge.score for judge in task.plugged_judges()]
    return [*(getattr(task, name) for name in own), *task.hooks("metric"), *task.hooks("reward"), *judges]


def _unfit(found: str, expected: str) -> ConfigurationRefused:
    return ConfigurationRefused(
        found, expected=expected, action="use another environment, or write one: docs/environments.md"
    )
