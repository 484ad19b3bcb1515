"""A host in the worker's own process: sessions with a lock, a revision and receipts around a user's object."""

from __future__ import annotations

import asyncio
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpu.environments.base import CheckpointMode
from gpu.environments.resources import (
    Claim,
    Reply,
    Request,
    ResourceHost,
    Standing,
    ToolError,
    refusal,
    refused,
    success,
)
from storage.errors import ResourceInvalid
from storage.ledger import Export

RECEIPTS = 1024
"""Changes of one session; after that it refuses."""


class Session(ABC):
    """One rollout's state in a resource. Made with the task and the seed of the episode."""

    @abstractmethod
    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Do it and return JSON values, at once or as an awaitable. Raises `ToolError` for what is refused, having
        changed nothing; anything else that it raises leaves the session uncertain."""

    def export_state(self) -> bytes:
        """Everything. Only for EXPORT_RESTORE."""
        raise NotImplementedError

    def restore_state(self, data: bytes) -> None:
        """Go on from `export_state`, on a new object of the same task and seed."""
        raise NotImplementedError


@dataclass(slots=True)
class _Held:
    session: Session
    claim: Claim
    revision: int = 0
    receipts: dict[str, tuple[str, Reply]] = field(default_factory=lambda: {})
    uncertain: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionHost(ResourceHost):
    """`make(task, seed)` makes a session's object. With EXPORT_RESTORE sessions come back from their exports, in
    whatever process."""

    def __init__(
        self,
        make: Callable[[bytes, int], Session],
        *,
        mode: CheckpointMode = CheckpointMode.EXPORT_RESTORE,
        replayable: bool = True,
    ) -> None:
        self._make, self.checkpoint_mode, self.replayable = make, mode, replayable
        self._held: dict[str, _Held] = {}

    async def start(self, session: str, claim: Claim, task: bytes, seed: int) -> None:
        held = self._held.get(session)
        if held is None or claim > held.claim:
            self._held[session] = _Held(self._make(task, seed), claim)
        elif claim < held.claim:
            raise _claimed(session, claim, held.claim)

    async def claim(self, session: str, claim: Claim) -> int | None:
        held = self._held.get(session)
        if held is None:
            return None
        if claim < held.claim:
            raise _claimed(session, claim, held.claim)
        held.claim = claim
        async with held.lock:  # what an older attempt has under way ends first
            return held.revision

    async def call(self, session: str, claim: Claim, request: Request) -> Reply:
        held = self._find(session, claim)
        async with held.lock:
            self._check(session, held, claim)
            known = self._receipt(session, held, request)
            if known is not None:
                return known
            if request.revision != held.revision:
                raise refused(session, f"revision {held.revision}", f"revision {request.revision}", "revision")
            if len(held.receipts) >= RECEIPTS:
                raise refused(session, f"{RECEIPTS} changes", "fewer", "receipts")
            reply = await self._handle(held, request)
            if not request.reads:
                held.revision = reply.revision
                held.receipts[request.id] = (request.digest, reply)
            return reply

    async def _handle(self, held: _Held, request: Request) -> Reply:
        try:
            value = held.session.handle(request.operation, json.loads(request.arguments))
            content = success(await value if inspect.isawaitable(value) else value)
        except ToolError as error:
            return Reply(refusal(error), held.revision)
        except BaseException as error:
            if not request.reads:
                held.uncertain = f"{request.operation} ended with {error!r}"
            raise
        return Reply(content, held.revision + (not request.reads))

    async def standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        held = self._find(session, claim)
        async with held.lock:
            if held.uncertain:
                return Standing.UNKNOWN, None
            known = self._receipt(session, held, request)
            return (Standing.NOT_APPLIED, None) if known is None else (Standing.APPLIED, known)

    async def export(self, session: str, claim: Claim) -> Export:
        held = self._find(session, claim)
        async with held.lock:
            self._check(session, held, claim)
            return Export(held.revision, held.session.export_state())

    async def restore(self, session: str, claim: Claim, task: bytes, seed: int, export: Export) -> None:
        held = self._held.get(session)
        if held is not None and claim < held.claim:
            raise _claimed(session, claim, held.claim)
        made = self._make(task, seed)
        made.restore_state(export.state)
        self._held[session] = _Held(made, claim, export.revision)

    async def end(self, session: str) -> None:
        self._held.pop(session, None)

    def _find(self, session: str, claim: Claim) -> _Held:
        held = self._held.get(session)
        if held is None:
            raise refused(session, "no such session", "a session that was started", "missing")
        if claim < held.claim:
            raise _claimed(session, claim, held.claim)
        return held

    def _check(self, session: str, held: _Held, claim: Claim) -> None:
        """After a wait for the lock."""
        if claim < held.claim:
            raise _claimed(session, claim, held.claim)
        if held.uncertain:
            raise refused(session, held.uncertain, "a session of which every effect is known", "uncertain")

    def _receipt(self, session: str, held: _Held, request: Request) -> Reply | None:
        found = held.receipts.get(request.id)
        if found is None:
            return None
        digest, reply = found
        if digest != request.digest:
            raise refused(
                session, f"request {request.id} with input {request.digest[:12]}", f"input {digest[:12]}", "receipt"
            )
        return reply


def _claimed(session: str, claim: Claim, by: Claim) -> ResourceInvalid:
    found = f"attempt {claim.attempt} of incarnation {claim.incarnation}"
    return refused(session, found, f"attempt {by.attempt} of incarnation {by.incarnation}, which claimed it", "claimed")
