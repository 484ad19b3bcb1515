"""Resources: what an episode's actions read and change outside the episode, and how each change is made once.

A rollout has one session with each resource that it uses. A host keeps the sessions: in the worker's process, in a
file, behind HTTP. It promises for every session: one request at a time; a revision that grows by one with each change;
the stored reply for a request id that it has seen with the same input, and a refusal for the same id with another one;
no request of an attempt that a later one has claimed the session from. When it cannot say whether a request took effect
it says so (`Standing.UNKNOWN`), and the rollout starts over: nothing is ever sent twice blindly.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from gpu.environments.base import CheckpointMode
from storage.errors import ResourceInvalid
from storage.ledger import Export, Obligation
from storage.schema import Receipt


class ToolError(Exception):
    """A request that a resource refuses, having changed nothing; its text is the reply. The episode decides what the
    policy is told."""


class Claim(NamedTuple):
    """Who may use a session: the newest one that claimed it. Ordered."""

    incarnation: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a session. `id` is the same for the same action of the same answer, however often it is sent, and
    begins with the run's name. `arguments` is canonical JSON, `revision` the session's before it; `reads`: it changes
    nothing."""

    id: str
    operation: str
    arguments: bytes
    revision: int
    reads: bool = False

    @property
    def digest(self) -> str:
        """Of what is asked, whoever asks."""
        return request_digest(self.operation, self.arguments)


@dataclass(frozen=True, slots=True)
class Reply:
    """`content` is JSON: what the operation returned, or a refusal. `revision` is the session's after it."""

    content: bytes
    revision: int


class Standing(Enum):
    """What became of a request.

    APPLIED      the reply is the stored one
    NOT_APPLIED  and it never will be, unless it is sent again
    UNKNOWN      it may have taken effect
    """

    APPLIED = "applied"
    NOT_APPLIED = "not_applied"
    UNKNOWN = "unknown"


class ResourceHost(ABC):
    """Keeps the sessions of one resource. Session names are unique over runs; calls for different sessions may overlap.

    `checkpoint_mode`: EXPORT_RESTORE sessions go on after a crash, from their host or from an export; a rollout that
    has changed a RESTART_ONLY one starts over; STATELESS has nothing to keep. `replayable`: its effects stay inside
    the session, so that requests since an export may be made again on it. `survives`: sessions outlive the process that
    uses them.
    """

    checkpoint_mode = CheckpointMode.RESTART_ONLY
    replayable = False
    survives = False
    schema = 1
    """Of what it exports. Another one in a run's journal is refused."""

    @abstractmethod
    async def start(self, session: str, claim: Claim, task: bytes, seed: int) -> None:
        """Begin a session at revision 0, or find it at its beginning. `task` and `seed` are the episode's."""

    @abstractmethod
    async def claim(self, session: str, claim: Claim) -> int | None:
        """Bar every older claim; the session's revision, None when there is no such session here."""

    @abstractmethod
    async def call(self, session: str, claim: Claim, request: Request) -> Reply:
        """Raises `ResourceInvalid`: `claimed`, `revision`, `receipt` (the id was used for something else), `uncertain`
        (an earlier request ended in the middle), `missing`."""

    @abstractmethod
    async def standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        """What became of a request, whose reply never came. Raises as `call`."""

    async def export(self, session: str, claim: Claim) -> Export:
        """The whole session. Only of EXPORT_RESTORE hosts."""
        raise NotImplementedError

    async def restore(self, session: str, claim: Claim, task: bytes, seed: int, export: Export) -> None:
        """Put a session where an export says it was, whatever is here of it."""
        raise NotImplementedError

    async def complete(self, session: str, claim: Claim, result: bytes, capture: str, call: str) -> Receipt | None:
        """End a session with the rollout's result (canonical JSON), which a host of another process keeps until it is
        acknowledged; None: nothing is kept. The same result again gets the same receipt. `capture` and `call` name the
        key of the rollout's tokens and its last model call."""
        return None

    async def acknowledge(self, boot: str, owed: Sequence[Obligation]) -> bool:
        """The results are durable: process `boot` of the host may release them, all or none. False: another process
        has taken its place. Raises when neither is sure."""
        raise NotImplementedError

    @abstractmethod
    async def end(self, session: str) -> None:
        """Forget a session; one that is not there is no error."""

    async def close(self) -> None:
        """The process ends. Sessions that survive stay."""
        return


def canonical(arguments: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no spaces. Raises `TypeError` for what JSON cannot say."""
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def request_digest(operation: str, arguments: bytes) -> str:
    return hashlib.sha256(operation.encode() + b"\0" + arguments).hexdigest()


def success(value: Any) -> bytes:
    """The content of a reply that answers."""
    return json.dumps({"value": value}, separators=(",", ":"), allow_nan=False).encode()


def refusal(error: ToolError) -> bytes:
    """The content of a reply that refuses."""
    return json.dumps({"error": str(error)}).encode()


def opened(content: bytes) -> Any:
    """What a reply says. Raises `ToolError` for a refusal."""
    found = json.loads(content)
    if "error" in found:
        raise ToolError(found["error"])
    return found["value"]


def refused(session: str, found: str, expected: str, code: str) -> ResourceInvalid:
    return ResourceInvalid(
        f"session {session}: {found}",
        expected=expected,
        action="nothing: the rollout goes on from its last boundary, or starts over",
        code=code,
    )
