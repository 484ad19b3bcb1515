"""The session routes of an external host: one method for each message, behind the gate."""

from __future__ import annotations

from gpu.environments.participants import wire
from gpu.environments.participants.core import ParticipantHost
from gpu.environments.resources import Claim, Request
from storage.ledger import Export


class SessionRoutes:
    def __init__(self, host: ParticipantHost) -> None:
        self._host, self._sessions = host, host.sessions

    async def start(self, message: wire.Start) -> wire.Answer:
        claim = _claim(message.claim)
        async with self._host.admitted(f"start of {message.session}"):
            self._host.completions.check_use(message.session, claim)
            await self._sessions.begin(message.session, claim, message.task, message.seed, first=message.first)
            self._host.completions.begins(message.session, claim)
            return wire.Answer(instance=self._host.instance)

    async def claim(self, message: wire.Claim) -> wire.Answer:
        claim = _claim(message.claim)
        async with self._host.admitted(f"claim of {message.session}"):
            self._host.completions.check_use(message.session, claim)
            revision = await self._sessions.claim(message.session, claim)
            if revision is not None:
                self._host.completions.begins(message.session, claim)
            return wire.Claimed(instance=self._host.instance, revision=revision)

    async def call(self, message: wire.Call) -> wire.Answer:
        request = _request(message.request)
        claim = _claim(message.claim)
        async with self._host.admitted(f"request {request.id}"):
            self._host.completions.check_use(message.session, claim)
            reply = await self._sessions.call(message.session, claim, request)
            return wire.Replied(instance=self._host.instance, content=reply.content, revision=reply.revision)

    async def standing(self, message: wire.Call) -> wire.Answer:
        async with self._host.admitted(f"standing of {message.request.id}"):
            found, reply = await self._sessions.standing(
                message.session, _claim(message.claim), _request(message.request)
            )
            return wire.Stood(
                instance=self._host.instance,
                standing=found.value,
                content=reply.content if reply is not None else None,
                revision=reply.revision if reply is not None else None,
            )

    async def export(self, message: wire.Claim) -> wire.Answer:
        async with self._host.admitted(f"export of {message.session}"):
            export = await self._sessions.export(message.session, _claim(message.claim))
            return wire.Exported(instance=self._host.instance, revision=export.revision, state=export.state)

    async def restore(self, message: wire.Restore) -> wire.Answer:
        claim = _claim(message.claim)
        async with self._host.admitted(f"restore of {message.session}"):
            self._host.completions.check_use(message.session, claim)
            export = Export(message.revision, message.state)
            await self._sessions.restore(message.session, claim, message.task, message.seed, export)
            self._host.completions.begins(message.session, claim)
            return wire.Answer(instance=self._host.instance)

    async def end(self, message: wire.End) -> wire.Answer:
        async with self._host.admitted(f"end of {message.session}"):
            claim = _claim(message.claim) if message.claim is not None else None
            receipt = await self._host.finish(message.session, claim, message.result)
            return wire.Completed(instance=self._host.instance, receipt=receipt)


def _claim(held: wire.Held) -> Claim:
    return Claim(held.incarnation, held.attempt)


def _request(asked: wire.Asked) -> Request:
    return Request(asked.id, asked.operation, asked.arguments, asked.revision, asked.reads)
