"""A resource behind HTTP, as an environment uses it."""

from __future__ import annotations

from collections.abc import Sequence

from gpu.environments.base import CheckpointMode
from gpu.environments.participants import wire
from gpu.environments.participants.capabilities import RECEIPTS, Capabilities
from gpu.environments.participants.errors import HostFailed, HostReplaced, HostUnreachable
from gpu.environments.participants.transport import Transport
from gpu.environments.resources import Claim, Reply, Request, ResourceHost, Standing
from storage.errors import ConfigurationRefused, ResourceInvalid
from storage.ledger import Export, Obligation
from storage.schema import Receipt


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
        if answer.revision is not None:
            self._boots[session] = answer.instance.boot
        return answer.revision

    async def call(self, session: str, claim: Claim, request: Request) -> Reply:
        await self._ready()
        message = wire.Call(session=session, claim=_held(claim), request=_asked(request))
        send = self._transport.ask if request.reads else self._transport.change
        answer = await send("sessions/call", message, wire.Replied)
        return Reply(answer.content, answer.revision)

    async def standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        """UNKNOWN also when the host does not answer, has lost the session, or is another process than had it."""
        message = wire.Call(session=session, claim=_held(claim), request=_asked(request))
        try:
            await self._ready()
            answer = await self._transport.ask("sessions/standing", message, wire.Stood)
        except (HostUnreachable, HostFailed):
            return Standing.UNKNOWN, None
        except ResourceInvalid as error:
            if error.code == "missing" and session in self._boots:
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

    async def complete(self, session: str, claim: Claim, result: bytes, capture: str, call: str) -> Receipt | None:
        """The same result again gets the same receipt; another one raises `CompletionRefused`."""
        await self._ready()
        if self._capabilities is None or RECEIPTS not in self._capabilities.features:
            return None
        stated = wire.Result(content=result, capture=capture, call=call)
        message = wire.End(session=session, claim=_held(claim), result=stated)
        answer = await self._transport.ask("sessions/end", message, wire.Completed)
        found = answer.receipt
        if found is None:
            raise HostFailed(
                f"{answer.instance} gave no receipt for {session}", expected="one", action="correct the host"
            )
        self._boots.pop(session, None)
        return Receipt(
            place=0,
            host=answer.instance.name,
            boot=answer.instance.boot,
            session=found.session,
            generation=found.generation,
            result=found.result,
            digest=found.digest,
            capture=found.capture,
            call=found.call,
        )

    async def acknowledge(self, boot: str, owed: Sequence[Obligation]) -> bool:
        """Raises `CompletionRefused` for a batch of which one does not fit, then none is released, and
        `HostUnreachable`: not answering is not gone."""
        to = wire.Instance(name=self._transport.name, boot=boot)
        message = wire.Acknowledge(to=to, receipts=tuple(_receipt(one) for one in owed))
        try:
            answer = await self._transport.ask("completions/acknowledge", message, wire.Acknowledged)
        except HostReplaced:
            return False
        if len(answer.outcomes) != len(owed) or not {"new", "duplicate"}.issuperset(answer.outcomes):
            raise HostFailed(
                f"{answer.instance} answered {', '.join(answer.outcomes) or 'nothing'}",
                expected=f"new or duplicate for each of {len(owed)} receipts",
                action="keep the obligations; correct the host",
            )
        return True

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


def _receipt(owed: Obligation) -> wire.Receipt:
    stated = owed.receipt
    return wire.Receipt(
        session=stated.session,
        incarnation=owed.incarnation,
        attempt=owed.attempt,
        generation=stated.generation,
        result=stated.result,
        digest=stated.digest,
        capture=stated.capture,
        call=stated.call,
    )


def _asked(request: Request) -> wire.Asked:
    return wire.Asked(
        id=request.id,
        operation=request.operation,
        arguments=request.arguments,
        revision=request.revision,
        reads=request.reads,
    )
