"""A resource behind HTTP, as an environment uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpu.environments.base import CheckpointMode
from gpu.environments.participants import wire
from gpu.environments.participants.capabilities import Capabilities
from gpu.environments.participants.errors import HostFailed, HostUnreachable
from gpu.environments.participants.transport import Transport
from gpu.environments.resources import Claim, Reply, Request, ResourceHost, Standing, canonical
from storage.errors import ConfigurationRefused, ResourceInvalid
from storage.ledger import Export


class Owed(NamedTuple):
    """The acknowledgement of a completed result, and the process that waits for it."""

    to: wire.Instance
    receipt: wire.Receipt


class HttpHost(ResourceHost):
    """The host that calls itself `name`. Its sessions outlive the process that uses them, and come back from their
    exports when its own process died. Changes raise `OutcomeUnknown` when their answer is lost, all else
    `HostUnreachable` after a while; a wrong kind of host is `ConfigurationRefused` at the first request."""

    checkpoint_mode = CheckpointMode.EXPORT_RESTORE
    survives = True

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._capabilities: Capabilities | None = None
        self._boots: dict[str, str] = {}
        """Which process has a session, as it said when it was begun or claimed from here."""

    # ------------------------------------------------------------------ `ResourceHost`

    async def start(self, session: str, claim: Claim, task: bytes, seed: int) -> None:
        await self._ready()
        message = wire.Start(session=session, claim=_held(claim), task=task, seed=seed, first=_first(session, claim))
        answer = await self._transport.ask("sessions/start", message, wire.Answer)
        self._boots[session] = answer.instance.boot

    async def claim(self, session: str, claim: Claim) -> int | None:
        await self._ready()
        message = wire.Claim(session=session, claim=_held(claim))
        answer = await self._transport.ask("sessions/claim", message, wire.Claimed)
        self._boots[session] = answer.instance.boot
        return answer.revision

    async def call(self, session: str, claim: Claim, request: Request) -> Reply:
        await self._ready()
        message = wire.Call(session=session, claim=_held(claim), request=_asked(request))
        send = self._transport.ask if request.reads else self._transport.change
        answer = await send("sessions/call", message, wire.Replied)
        return Reply(answer.content, answer.revision)

    async def standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        """UNKNOWN also when the host does not answer, has no such session, or is another process than had it."""
        message = wire.Call(session=session, claim=_held(claim), request=_asked(request))
        try:
            await self._ready()
            answer = await self._transport.ask("sessions/standing", message, wire.Stood)
        except (HostUnreachable, HostFailed):
            return Standing.UNKNOWN, None
        except ResourceInvalid as error:
            if error.code == "missing":
                return Standing.UNKNOWN, None
            raise
        if self._boots.get(session, answer.instance.boot) != answer.instance.boot:
            return Standing.UNKNOWN, None
        if answer.content is None or answer.revision is None:
            return Standing(answer.standing), None
        return Standing(answer.standing), Reply(answer.content, answer.revision)

    async def export(self, session: str, claim: Claim) -> Export:
        await self._ready()
        message = wire.Claim(session=session, claim=_held(claim))
        answer = await self._transport.ask("sessions/export", message, wire.Exported)
        return Export(answer.revision, answer.state)

    async def restore(self, session: str, claim: Claim, task: bytes, seed: int, export: Export) -> None:
        await self._ready()
        message = wire.Restore(
            session=session, claim=_held(claim), task=task, seed=seed, revision=export.revision, state=export.state
        )
        answer = await self._transport.ask("sessions/restore", message, wire.Answer)
        self._boots[session] = answer.instance.boot

    async def end(self, session: str) -> None:
        await self._transport.ask("sessions/end", wire.End(session=session), wire.Completed)
        self._boots.pop(session, None)

    async def close(self) -> None:
        await self._transport.close()

    # ------------------------------------------------------------------ completed results

    async def finish(
        self,
        session: str,
        claim: Claim,
        result: Mapping[str, Any],
        *,
        capture: str | None = None,
        call: str | None = None,
    ) -> Owed:
        """End a session with a result, which the host keeps until it is acknowledged. The same result again gets the
        same receipt; another one raises `CompletionRefused`."""
        stated = wire.Result(content=canonical(result), capture=capture, call=call)
        message = wire.End(session=session, claim=_held(claim), result=stated)
        answer = await self._transport.ask("sessions/end", message, wire.Completed)
        self._boots.pop(session, None)
        if answer.receipt is None:
            raise HostFailed(
                f"{answer.instance} gave no receipt for {session}", expected="one", action="correct the host"
            )
        return Owed(answer.instance, answer.receipt)

    async def acknowledge(self, to: wire.Instance, receipts: Sequence[wire.Receipt]) -> tuple[str, ...]:
        """`new` or `duplicate` for each. Raises `CompletionRefused` for a batch of which one does not fit, then none
        is released; `HostReplaced` when that process is gone, then they may expire; `HostUnreachable`, then they may
        not."""
        message = wire.Acknowledge(to=to, receipts=tuple(receipts))
        answer = await self._transport.ask("completions/acknowledge", message, wire.Acknowledged)
        if len(answer.outcomes) != len(receipts) or not {"new", "duplicate"}.issuperset(answer.outcomes):
            raise HostFailed(
                f"{answer.instance} answered {', '.join(answer.outcomes) or 'nothing'}",
                expected=f"new or duplicate for each of {len(receipts)} receipts",
                action="keep the obligations; correct the host",
            )
        return answer.outcomes

    async def unacknowledged(self) -> tuple[wire.Instance, tuple[wire.Retained, ...]]:
        """What the host keeps, and which process it is."""
        answer = await self._transport.ask("completions/list", wire.Message(), wire.Unacknowledged)
        return answer.instance, answer.results

    async def forget(self, sessions: Sequence[str]) -> None:
        """Sessions of which nothing is owed and nothing can come any more."""
        await self._transport.ask("completions/forget", wire.Forget(sessions=tuple(sessions)), wire.Answer)

    # ------------------------------------------------------------------ inner

    async def capabilities(self) -> Capabilities:
        return await self._transport.ask("capabilities", None, Capabilities)

    async def _ready(self) -> None:
        if self._capabilities is not None:
            return
        found = await self.capabilities()
        if not found.saves:
            raise ConfigurationRefused(
                f"host {found.name} is {found.checkpoint_mode.value}",
                expected="export_restore, as the run takes it to be",
                action="start it in that mode, or use another adapter",
                code="mode",
            )
        self.replayable = found.replayable
        self._capabilities = found


def _first(session: str, claim: Claim) -> bool:
    """Whether nobody has used a session of this name before: it ends with the attempt that its lineage began with."""
    return session.rpartition("~")[2] == str(claim.attempt)


def _held(claim: Claim) -> wire.Held:
    return wire.Held(incarnation=claim.incarnation, attempt=claim.attempt)


def _asked(request: Request) -> wire.Asked:
    return wire.Asked(
        id=request.id,
        operation=request.operation,
        arguments=request.arguments,
        revision=request.revision,
        reads=request.reads,
    )
