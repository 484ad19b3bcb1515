"""Gymnasium environments as conversations: what they show becomes text, the policy's words become actions.

An episode is `reset` with a seed that is the task, then a step a turn; the reward is the sum of its rewards. Where the
environment is deterministic under its seed a rollout goes on after a crash: its actions are done again and the answers
compared.
"""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from gpu.environments.base import Action, CheckpointMode, Environment, Episode, StepResult
from gpu.environments.packages import named, need
from gpu.environments.replay import Script, actions, diverged
from gpu.models.tokenizer import Message
from storage.errors import ConfigurationRefused

RESTORES = {"replay": CheckpointMode.EXPORT_RESTORE, "restart": CheckpointMode.RESTART_ONLY}


class Text(Protocol):
    """Between an environment and a policy; one for each episode. A replay shows it the same things again."""

    def show(self, observation: Any, reward: float, info: Mapping[str, Any]) -> str:
        """What the policy reads after a reset or a step."""
        ...

    def parse(self, text: str) -> Any:
        """The action. Raises `ValueError` with what the policy is told when there is none in the text."""
        ...


class Gymnasium(Environment):
    """`tasks` seeds of the environment `env`, an id that `gymnasium.make` knows ("module:Id-v0" imports the module
    first), made with `options`. `rules` opens each conversation.

    `text` names a function "module:function" that gets the environment and returns its `Text`. Without one, texts
    stand for themselves and other observations are printed, or drawn with `render` ("ansi"; what a colour marks stands
    in brackets); discrete actions are said by their names, `actions` in their order, or by their numbers. A turn
    without an action is answered with what was expected, and counts. After `max_turns` the episode ends with the
    reward so far.

    `restore`: "replay" or "restart" after a crash; replay unless the environment is registered as nondeterministic.
    """

    def __init__(
        self,
        env: str,
        options: Mapping[str, Any] | None = None,
        tasks: int = 1024,
        seed: int = 0,
        rules: str = "",
        actions: Sequence[str] | None = None,
        render: bool = False,
        text: str | None = None,
        max_turns: int = 32,
        max_new_tokens: int = 64,
        restore: str | None = None,
    ) -> None:
        if min(tasks, max_turns, max_new_tokens) < 1:
            raise ValueError("tasks, max_turns and max_new_tokens >= 1")
        if restore is not None and restore not in RESTORES:
            raise ValueError(f"restore is one of {', '.join(RESTORES)}")
        if text is not None and (actions is not None or render):
            raise ValueError("`actions` and `render` are for environments without a `text` of their own")
        self.max_turns, self.max_new_tokens = max_turns, max_new_tokens
        self.rules = rules
        self._id, self._options, self._tasks, self._seed = env, dict(options or {}), tasks, seed
        self._actions, self._render = actions, render
        self._text = None if text is None else cast("Callable[[Any], Text]", named(text))
        self._try_out(restore)

    def _try_out(self, restore: str | None) -> None:
        """Everything that can be wrong with the options shows when one is made."""
        gymnasium = need("gymnasium", "gymnasium")
        try:
            env = self.make()
        except (gymnasium.error.Error, ImportError, AssertionError) as error:
            raise ConfigurationRefused(
                f"gymnasium does not make {self._id!r} with {self._options}: {error}",
                expected="an environment that is registered on every worker",
                action="check environment.options, or install the package that registers it",
            ) from error
        try:
            self.text_of(env)
            nondeterministic = env.spec is not None and env.spec.nondeterministic
            self.mode = RESTORES[restore or ("restart" if nondeterministic else "replay")]
            self._recipe = [type(env.unwrapped)]
        finally:
            env.close()

    @property
    def recipe(self) -> Sequence[type]:
        return self._recipe

    def __len__(self) -> int:
        return self._tasks

    def task(self, index: int) -> bytes:
        digest = hashlib.sha256(f"{self._seed}/{index}".encode()).digest()
        return json.dumps({"index": index, "seed": int.from_bytes(digest[:4])}).encode()

    def episode(self) -> Episode:
        return _Played(self)

    def make(self) -> Any:
        drawn = {"render_mode": "ansi"} if self._render else {}
        return need("gymnasium", "gymnasium").make(self._id, **self._options, **drawn)

    def text_of(self, env: Any) -> Text:
        return Plain(env, self._actions, render=self._render) if self._text is None else self._text(env)


class Plain:
    """The text of environments that have none of their own: see `Gymnasium`."""

    def __init__(self, env: Any, names: Sequence[str] | None, *, render: bool) -> None:
        spaces = need("gymnasium", "gymnasium").spaces
        self._env, self._render = env, render
        if render and "ansi" not in env.metadata.get("render_modes", ()):
            raise ValueError(f"{env} does not render as text; without `render` its observations are shown")
        if isinstance(env.action_space, spaces.Text):
            self._names = None
        elif isinstance(env.action_space, spaces.Discrete):
            self._names = _names(int(env.action_space.start), int(env.action_space.n), names)
        else:
            raise ValueError(f"actions of {env.action_space} need a `text` of their own")

    def show(self, observation: Any, reward: float, info: Mapping[str, Any]) -> str:
        if not self._render:
            return str(observation)
        drawn = re.sub(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", r"[\1]", self._env.render(), flags=re.DOTALL)
        return drawn.strip()

    def parse(self, text: str) -> Any:
        """The text itself, or the last of the actions' names in it."""
        if self._names is None:
            return text
        found = [name for name in re.findall(r"[-\w]+", text.lower()) if name in self._names]
        if not found:
            raise ValueError(f"say one of: {', '.join(self._names)}")
        return self._names[found[-1]]


def _names(start: int, count: int, names: Sequence[str] | None) -> dict[str, int]:
    """Actions by the words for them."""
    said = [str(start + number) for number in range(count)] if names is None else [name.lower() for name in names]
    if len(set(said)) != count or not all(re.fullmatch(r"[-\w]+", name) for name in said):
        raise ValueError(f"`actions` are {count} different words")
    return {name: start + number for number, name in enumerate(said)}


class _Played(Episode):
    def __init__(self, environment: Gymnasium) -> None:
        self.checkpoint_mode = environment.mode
        self._environment = environment
        self._script = Script()
        self._total, self._over, self._shown = 0.0, False, ""

    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        self._env = env = self._environment.make()
        weakref.finalize(self, env.close)
        self._text = self._environment.text_of(env)
        observation, info = env.reset(seed=json.loads(task)["seed"])
        self._seen(observation, 0.0, info)
        rules = self._environment.rules
        return [*([Message("system", rules)] if rules else []), Message("user", self._shown)]

    async def step(self, action: Action) -> StepResult:
        before = self._total
        try:
            move = self._text.parse(action.text)
        except ValueError as error:
            self._script.actions.append(None)
            done, said = None, str(error)
        else:
            done = self._env.action_space.to_jsonable([move])
            self._act(done)
            said = self._shown
        over = self._over or len(self._script.actions) >= self._environment.max_turns
        record = json.dumps({"action": done, "reward": self._total - before})
        return StepResult(over, self._total, [Message("user", said)], record)

    def _act(self, recorded: Any) -> None:
        """An action as it is recorded: the first time and in a replay it is the same value."""
        (move,) = self._env.action_space.from_jsonable(recorded)
        observation, reward, terminated, truncated, info = self._env.step(move)
        self._script.actions.append(recorded)
        self._total += float(reward)
        self._over = bool(terminated or truncated)
        self._seen(observation, float(reward), info)

    def _seen(self, observation: Any, reward: float, info: Mapping[str, Any]) -> None:
        self._shown = self._text.show(observation, reward, info)
        self._script.answered(self._shown, reward, self._over)

    def export_state(self) -> bytes:
        return self._script.export()

    def restore_state(self, data: bytes) -> None:
        """Raises `NotContinuable` when the environment is not where it was."""
        for recorded in actions(data):
            if recorded is None:
                self._script.actions.append(None)
                continue
            if self._over:
                raise diverged(f"an end after {len(self._script.actions)} actions")
            try:
                self._act(recorded)
            except Exception as error:
                raise diverged(f"{error!r} to action {len(self._script.actions)}") from error
        self._script.check(data)
