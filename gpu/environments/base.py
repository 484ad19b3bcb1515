"""The interface of an environment: a set of tasks, and an episode per rollout.

A task is immutable JSON bytes, a pure function of its index. An episode is `reset`, then `step` until it is done; a
single-turn task is done after one step. What an episode cannot do is an exception, which ends the attempt as failed; it
is never a reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from gpu.models.tokenizer import Message

if TYPE_CHECKING:
    from gpu.environments.resources import ResourceHost
    from gpu.environments.tools import Tools


class CheckpointMode(Enum):
    """What happens to an unfinished episode when its process dies.

    EXPORT_RESTORE  `export_state` after each turn; the rollout goes on from its last turn
    RESTART_ONLY    the rollout starts over
    STATELESS       nothing to keep; the conversation is all there is
    """

    EXPORT_RESTORE = "export_restore"
    RESTART_ONLY = "restart_only"
    STATELESS = "stateless"


class Action(NamedTuple):
    """What the policy said in one turn. `finished`: it ended the turn itself, with a stop token, not at the limit."""

    text: str
    finished: bool


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to one action. `reward` counts when `done`; `messages` open the next turn otherwise;
    `record` is kept with the turn, for people.

    `new_context`: the conversation so far ends here, and the next turn starts a new one whose prompt is `messages`
    alone (a compacted history, the view of another agent). Each conversation becomes a training sample of its own, with
    the rollout's reward.
    """

    done: bool
    reward: float = 0.0
    messages: Sequence[Message] = ()
    record: str = ""
    new_context: bool = False


class Episode(ABC):
    """One rollout's world. Not shared between rollouts."""

    checkpoint_mode = CheckpointMode.RESTART_ONLY
    """Of the episode's own memory; what it keeps in resources has a mode of its own."""
    tools: Tools
    """The resources of its environment, from before `reset`; to be called in `step` only."""

    @abstractmethod
    async def reset(self, task: bytes, seed: int) -> Sequence[Message]:
        """Begin; the messages of the first prompt."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """The world's answer to one turn. An episode that calls resources may be asked again for the same action, in
        the state before it: it must make the same calls then."""

    def export_state(self) -> bytes:
        """The whole state after a turn. Only for EXPORT_RESTORE."""
        raise NotImplementedError

    def restore_state(self, data: bytes) -> None:
        """Go on from `export_state`. Called instead of `reset`'s effects, after `reset` with the same arguments."""
        raise NotImplementedError


class Environment(ABC):
    """A task set with its episodes. `max_new_tokens` bounds one turn, `max_turns` one episode over all its contexts."""

    max_new_tokens: int
    max_turns = 1
    recovery: str | None = None
    """"sibling" or "prompt_group": how a group is recovered that loses an attempt, whatever the run says. Siblings that
    share something (an opponent, a budget) must be redone together."""

    @property
    def resources(self) -> Mapping[str, ResourceHost]:
        """What its episodes call, by name; asked for once in each process that runs episodes."""
        return {}

    @property
    def recipe(self) -> Sequence[type]:
        """Classes whose modules decide, besides its own, what a result means: a group that was unfinished when their
        code changed is redone."""
        return ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def task(self, index: int) -> bytes:
        """Task `index` as JSON, the same for ever."""

    @abstractmethod
    def episode(self) -> Episode: ...
