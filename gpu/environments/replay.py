"""The checkpoint of an episode that is deterministic: what was done since its beginning.

A restore begins the episode again, does the same, and compares a digest of everything that the world answered. A world
that answers otherwise is not the one that the rollout knows: it starts over.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from gpu.environments.tools import NotContinuable


class Script:
    """The actions of an episode, as JSON values, and a digest of the answers to them."""

    def __init__(self) -> None:
        self.actions: list[Any] = []
        self._answers = hashlib.sha256()

    def answered(self, *answer: object) -> None:
        """Something that the world said, as JSON values."""
        self._answers.update(json.dumps(answer).encode() + b"\n")

    def export(self) -> bytes:
        return json.dumps({"actions": self.actions, "answers": self._answers.hexdigest()}).encode()

    def check(self, exported: bytes) -> None:
        """After the actions of an export were done again. Raises `NotContinuable`."""
        if json.loads(exported)["answers"] != self._answers.hexdigest():
            raise diverged(f"other answers to the same {len(self.actions)} actions")


def actions(exported: bytes) -> list[Any]:
    return json.loads(exported)["actions"]


def diverged(found: str) -> NotContinuable:
    return NotContinuable(
        f"the environment gave {found}",
        expected="the same answers to the same actions after a reset with the same seed",
        action="nothing: the rollout starts over; set the option `restore` to restart if it happens often",
    )
