"""What an episode calls resources through: every change once, whatever dies in between.

Within a step the calls are numbered (the cursor). A change is made like this: the model's answer is durable
(`model_answered`), then the intent, then the resource is called, then its reply is recorded. An attempt that goes on
from such an answer runs the step again: calls that have a recorded reply get it and are not made again, the one whose
reply never came is asked for by its id. A step must therefore make the same calls for the same answer and replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import msgspec.structs

from gpu.environments.base import CheckpointMode
from gpu.environments.resources import (
    Claim,
    Reply,
    Request,
    ResourceHost,
    Standing,
    canonical,
    opened,
)
from storage.errors import ContinuationInvalid, ResourceInvalid, TidegateError
from storage.ledger import Boundary, Export, Requested
from storage.schema import Receipt


class NotContinuable(TidegateError):
    """The rollout cannot go on from its last boundary and starts over. No failure of anybody."""

    default_code = "not_continuable"


class Exported(NamedTuple):
    resource: str
    export: Export


class Journal(Protocol):
    """Where an attempt's actions are recorded. Each raises `AttemptOver` when the attempt is not live any more."""

    def answered(self) -> int:
        """The answer that is being acted on is a boundary from now on, whose index is returned. Once per turn."""
        ...

    async def intent(self, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        """Returns when the intent is durable, and everything before it."""
        ...

    def result(self, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None: ...


@dataclass(frozen=True, slots=True)
class Sessions:
    """The names of a rollout's sessions: those of one lineage, which began with attempt `root`."""

    run: str
    group: int
    sibling: int
    root: int

    @property
    def name(self) -> str:
        return f"{self.run}/g{self.group}/{self.sibling}~{self.root}"

    def request(self, boundary: int, cursor: int) -> str:
        return f"{self.name}.{boundary}.{cursor}"


class Tools:
    """An episode's access to its resources, from `begin` to `end`; calls are made only inside `Episode.step`."""

    def __init__(
        self,
        hosts: Mapping[str, ResourceHost],
        sessions: Sessions,
        claim: Claim,
        task: bytes,
        seed: int,
        journal: Journal,
    ) -> None:
        self._hosts, self._sessions, self._claim, self._journal = hosts, sessions, claim, journal
        self._task, self._seed = task, seed
        self._used: dict[str, int] = {}
        """Revisions of the sessions that were begun or found."""
        self._lasting: dict[str, int] = {}
        """Revisions as the boundaries have them."""
        self._exported: dict[str, int] = {}
        self._kept: set[str] = set()
        self._one = asyncio.Lock()
        self._open = False
        self._cursor = 0
        self._boundary: int | None = None
        self._known: tuple[Requested, ...] = ()
        self._reads: list[tuple[int, str, str, Reply]] = []

    # ------------------------------------------------------------------ for episodes

    async def call(self, resource: str, operation: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Change something, once; returns what the resource says. Raises `ToolError` when it refuses. Calls at the same
        time are made one after another, in the order in which they were begun."""
        return opened((await self._request(resource, operation, canonical(arguments or {}), reads=False)).content)

    async def read(self, resource: str, operation: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Ask for something without changing it. Raises `ToolError`."""
        return opened((await self._request(resource, operation, canonical(arguments or {}), reads=True)).content)

    # ------------------------------------------------------------------ for the agent

    async def begin(self, at: Boundary | None) -> None:
        """Of an attempt: claim what the rollout has, and bring it to the boundary. Raises `NotContinuable`."""
        if at is None:
            for root in range(self._claim.attempt):
                for host in self._hosts.values():
                    if host.survives:  # an attempt that went down with its worker may have left sessions
                        await host.end(replace(self._sessions, root=root).name)
            return
        if at.revisions is None:
            raise _lost("it is not known which resources it depends on")
        for resource in {**at.revisions, **{request.resource: 0 for request in at.requests}}:
            await self._bring_back(resource, at)
        self._lasting = dict(at.revisions)
        self._exported = {name: export.revision for name, export in at.exports.items()}

    def turn_begins(self, at: Boundary | None) -> None:
        """A step may call now; `at` when its answer is a boundary already."""
        self._open, self._cursor, self._reads = True, 0, []
        self._boundary, self._known = (at.index, at.requests) if at is not None else (None, ())

    async def turn_ended(self, *, last: bool) -> tuple[bool, dict[str, int], list[Exported]]:
        """Whether the answer was acted on, the revisions after it, and the exports that a boundary needs; the `last`
        turn of a rollout needs none."""
        self._open = False
        if self._cursor < len(self._known):
            raise _other_calls(f"{self._cursor} calls in this step", f"{len(self._known)} calls, as before")
        acted = self._boundary is not None
        if acted:
            self._lasting = {name: revision for name, revision in self._used.items() if revision}
        return acted, dict(self._lasting), [] if last else await self._exports()

    async def complete(self, result: Mapping[str, Any], call_attempt: int, turn: int) -> tuple[Receipt, ...]:
        """The receipts of hosts that keep the rollout's result. `call_attempt` made its last model call, in `turn`."""
        capture = f"g{self._sessions.group}/{self._sessions.sibling}~{call_attempt}"
        content, found = canonical(result), list[Receipt]()
        for resource in self._used:
            host = self._hosts[resource]
            receipt = await host.complete(self._sessions.name, self._claim, content, capture, f"{capture}.{turn}")
            if receipt is not None:
                found.append(msgspec.structs.replace(receipt, host=resource))
        self._kept = {receipt.host for receipt in found}
        return tuple(found)

    @property
    def used(self) -> bool:
        """Whether the rollout has sessions."""
        return bool(self._used)

    async def end(self) -> None:
        """The rollout is over: its sessions too, but for those whose host keeps its result."""
        for resource in self._used.keys() - self._kept:
            await self._hosts[resource].end(self._sessions.name)

    # ------------------------------------------------------------------ one request

    async def _request(self, resource: str, operation: str, arguments: bytes, *, reads: bool) -> Reply:
        async with self._one:
            return await self._one_request(resource, operation, arguments, reads=reads)

    async def _one_request(self, resource: str, operation: str, arguments: bytes, *, reads: bool) -> Reply:
        if not self._open:
            raise RuntimeError("resources are called in `Episode.step` only: `reset` is repeated after a crash")
        host = self._hosts.get(resource)
        if host is None:
            raise RuntimeError(f"no resource {resource!r}; the environment has {', '.join(self._hosts) or 'none'}")
        cursor = self._cursor
        self._cursor += 1
        await self._start(resource, host)
        boundary = self._boundary if self._boundary is not None else -1
        revision = self._used[resource]
        request = Request(self._sessions.request(boundary, cursor), operation, arguments, revision, reads)
        known = self._known[cursor] if cursor < len(self._known) else None
        if known is not None:
            return await self._again(resource, host, request, known, cursor)
        if reads:
            reply = await host.call(self._sessions.name, self._claim, request)
            self._note(cursor, resource, request.digest, reply)
            return reply
        if self._boundary is None:
            boundary = self._act()
            request = Request(self._sessions.request(boundary, cursor), operation, arguments, revision)
        await self._journal.intent(boundary, cursor, resource, revision, request.digest)
        return await self._make(resource, host, request, boundary, cursor)

    def _act(self) -> int:
        """The first change of a step makes its answer a boundary; what was read before belongs to it."""
        self._boundary = self._journal.answered()
        for cursor, resource, digest, reply in self._reads:
            self._journal.result(self._boundary, cursor, resource, digest, reply)
        self._reads = []
        return self._boundary

    def _note(self, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        if self._boundary is None:
            self._reads.append((cursor, resource, digest, reply))
        else:
            self._journal.result(self._boundary, cursor, resource, digest, reply)

    async def _make(self, resource: str, host: ResourceHost, request: Request, boundary: int, cursor: int) -> Reply:
        reply = await host.call(self._sessions.name, self._claim, request)
        self._journal.result(boundary, cursor, resource, request.digest, reply)
        self._used[resource] = reply.revision
        return reply

    async def _again(self, resource: str, host: ResourceHost, request: Request, known: Requested, cursor: int) -> Reply:
        """A request that an older attempt made, or was about to make."""
        if (known.resource, known.digest) != (resource, request.digest):
            found = f"call {cursor} of this step asks {resource!r} for {request.digest[:12]}"
            raise _other_calls(found, f"{known.resource!r} and {known.digest[:12]}, as before")
        if known.reply is None:
            return await self._resolve(resource, host, request, cursor)
        stored = Reply(known.reply, known.after)
        if self._used[resource] >= known.after:
            return stored
        if not host.replayable:
            raise _lost(f"{resource!r} is at revision {self._used[resource]}, its requests at {known.after}")
        made = await host.call(self._sessions.name, self._claim, request)
        if made != stored:
            raise _lost(f"{resource!r} replied something else to the same request")
        self._used[resource] = made.revision
        return stored

    async def _resolve(self, resource: str, host: ResourceHost, request: Request, cursor: int) -> Reply:
        """The request whose reply never came."""
        assert self._boundary is not None, "an intent belongs to a boundary"
        standing, reply = await host.standing(self._sessions.name, self._claim, request)
        if standing is Standing.UNKNOWN:
            raise _lost(f"it is not known whether {resource!r} has done {request.operation!r}")
        if reply is None:
            # The attempt that meant to do it may have gone before its intent was durable; said again, it changes
            # nothing but that this waits for it.
            await self._journal.intent(self._boundary, cursor, resource, request.revision, request.digest)
            return await self._make(resource, host, request, self._boundary, cursor)
        self._journal.result(self._boundary, cursor, resource, request.digest, reply)
        self._used[resource] = reply.revision
        return reply

    # ------------------------------------------------------------------ sessions

    async def _start(self, resource: str, host: ResourceHost) -> None:
        if resource not in self._used:
            await host.start(self._sessions.name, self._claim, self._task, self._seed)
            self._used[resource] = 0

    async def _bring_back(self, resource: str, at: Boundary) -> None:
        host = self._hosts.get(resource)
        if host is None:
            raise _lost(f"its resource {resource!r} is not there any more")
        if host.checkpoint_mode is CheckpointMode.RESTART_ONLY and at.revision(resource):
            raise _lost(f"it has changed {resource!r}, which can only start over")
        assert at.revisions is not None
        name, before, after = self._sessions.name, at.revisions.get(resource, 0), at.revision(resource)
        begun = any(one.resource == resource and one.reply is None for one in at.requests)
        revision = await host.claim(name, self._claim)
        export = at.exports.get(resource)
        if revision is not None and before <= revision <= after + begun:
            self._used[resource] = min(revision, after)
        elif begun and not host.replayable:
            raise _lost(f"of {resource!r} the session is gone that knew whether its last request was done")
        elif export is not None and export.revision == before:
            await host.restore(name, self._claim, self._task, self._seed, export)
            self._used[resource] = before
        elif before == 0:
            await host.end(name)
            await host.start(name, self._claim, self._task, self._seed)
            self._used[resource] = 0
        else:
            there = "no session" if revision is None else f"a session at revision {revision}"
            saved = "no export" if export is None else f"an export of revision {export.revision}"
            raise _lost(f"of {resource!r} there is {there} and {saved}, and its boundary is at {before}")

    async def _exports(self) -> list[Exported]:
        """Of every session that has changed since its last export."""
        found: list[Exported] = []
        for resource, revision in self._lasting.items():
            host = self._hosts[resource]
            if host.checkpoint_mode is CheckpointMode.EXPORT_RESTORE and self._exported.get(resource) != revision:
                export = await host.export(self._sessions.name, self._claim)
                if export.revision != revision:
                    raise ResourceInvalid(
                        f"the export of {resource!r} is of revision {export.revision}",
                        expected=f"revision {revision}, after its last request",
                        action="nothing else may change a session; correct the host",
                        code="revision",
                    )
                found.append(Exported(resource, export))
                self._exported[resource] = revision
        return found


def _lost(why: str) -> NotContinuable:
    return NotContinuable(
        why, expected="every session at the revision of the boundary", action="nothing: it starts over"
    )


def _other_calls(found: str, expected: str) -> ContinuationInvalid:
    return ContinuationInvalid(
        found,
        expected=expected,
        action="let `Episode.step` depend on nothing but the action, the replies and the episode's state",
        code="replay",
    )
