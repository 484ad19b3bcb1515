"""An external host without its HTTP: sessions behind a gate that checkpoints close, and results until acknowledged.

Requests to sessions wait while the gate is closed; a checkpoint waits until none is under way. What the phases allow is
decided by `protocol.Control`.

| waits                     | for                                              | at most until                   |
| request to a session      | the gate                                         | the end of the lease            |
| prepare                   | requests under way, and results not acknowledged | its deadline                    |
| a repeated operation      | the first one                                    | the first one's deadline        |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from gpu.environments.participants.capabilities import CONTROL, RECEIPTS, Capabilities, Component
from gpu.environments.participants.completions import Completions
from gpu.environments.participants.errors import CheckpointBlocked, HostReplaced, MessageInvalid, StaleCheckpoint
from gpu.environments.participants.kept import KeptSessions
from gpu.environments.participants.manifest import check_export, check_manifest, entry, sealed
from gpu.environments.participants.protocol import Begun, Control, Ended, Operation, Recorded
from gpu.environments.participants.wire import Instance, Load, Manifest, Receipt, Result
from gpu.environments.resources import Claim
from storage.clock import Clock
from storage.errors import ArtifactCorrupt, DeadlineExceeded

POLL_S = 0.05
"""How late a waiter may notice that time ended its wait; everything else wakes it at once."""


class ParticipantHost:
    """One process of a participant. `boot` differs between processes."""

    def __init__(
        self, name: str, boot: str, sessions: KeptSessions, clock: Clock, component: Component = Component.RESOURCE
    ) -> None:
        self.instance = Instance(name=name, boot=boot)
        self.sessions, self.completions = sessions, Completions()
        self._component, self._clock = component, clock
        self.control = Control(clock, self._ended)
        self._running: dict[object, str] = {}
        self._changed = asyncio.Event()
        self._work: asyncio.Task[bytes] | None = None
        self._exports: tuple[str, dict[str, bytes]] | None = None
        self._loaded: list[str] = []

    def capabilities(self) -> Capabilities:
        return Capabilities(
            instance=self.instance,
            component=self._component,
            name=self.instance.name,
            checkpoint_mode=self.sessions.checkpoint_mode,
            features=(CONTROL, RECEIPTS),
            replayable=self.sessions.replayable,
        )

    # ------------------------------------------------------------------ sessions

    @asynccontextmanager
    async def admitted(self, what: str) -> AsyncGenerator[None]:
        """A request to a session, from when the gate is open."""
        while not self.control.admits():
            await self._wait()
        this = object()
        self._running[this] = what
        try:
            yield
        finally:
            del self._running[this]
            self._notify()

    async def finish(self, session: str, claim: Claim | None, result: Result | None) -> Receipt | None:
        """End a session. With a result it stays until that is acknowledged, so that a newer attempt, whose run has not
        got the result, finds it."""
        if result is not None and claim is not None:
            return self.completions.complete(session, claim, result)
        if result is not None:
            raise MessageInvalid(
                f"a result of {session} without a claim", expected="whose result it is", action="send the claim"
            )
        self.completions.ended(session)
        await self.sessions.end(session)
        return None

    async def acknowledge(self, to: Instance, receipts: Sequence[Receipt]) -> tuple[str, ...]:
        """Raises `HostReplaced` when another process issued them."""
        if to != self.instance:
            raise HostReplaced(
                f"{self.instance}",
                expected=f"{to}",
                action="let what that process owed expire, with a record",
            )
        outcomes = self.completions.acknowledge(receipts)
        for receipt, outcome in zip(receipts, outcomes, strict=True):
            if outcome == "new":
                await self.sessions.end(receipt.session)
        self._notify()
        return outcomes

    async def forget(self, sessions: Sequence[str]) -> None:
        """Nothing is owed of these sessions, and nothing can come of them any more."""
        self.completions.forget(sessions)
        for session in sessions:
            await self.sessions.end(session)
        self._notify()

    # ------------------------------------------------------------------ checkpoints

    async def prepare(self, checkpoint: str, deadline: float) -> None:
        """Close the gate, and wait until nothing is under way. Raises `CheckpointBlocked`, `DeadlineExceeded`."""

        async def work(begun: Begun) -> bytes:
            until = self._clock.monotonic() + deadline - self._clock.wall()
            while blockers := self._blockers():
                if self._clock.monotonic() >= until:
                    raise DeadlineExceeded(
                        f"{len(blockers)} not ended: {', '.join(blockers[:10])}",
                        expected=f"nothing under way at the deadline of checkpoint {checkpoint}",
                        action="resume it; prepare again later, with more time",
                    )
                self.control.check(begun)
                await self._wait()
            if self.sessions.uncertain:
                raise CheckpointBlocked(
                    f"sessions {', '.join(self.sessions.uncertain[:10])} ended in the middle of a request",
                    expected="sessions of which every effect is known",
                    action="end them, then prepare again",
                    code="uncertain",
                )
            return b""

        await self._operate(Operation.PREPARE, checkpoint, deadline, "", work)

    async def commit(self, checkpoint: str, deadline: float) -> Manifest:
        """Save every session. The exports are served until the checkpoint ends."""

        async def work(begun: Begun) -> bytes:
            whole = self.sessions.whole()
            self._exports = checkpoint, {name: data for name, (_, data) in whole.items()}
            entries = [entry(name, revision, data) for name, (revision, data) in whole.items()]
            return msgspec.json.encode(sealed(checkpoint, self._component.value, self.instance.name, entries))

        answer = await self._operate(Operation.COMMIT, checkpoint, deadline, "", work)
        return msgspec.json.decode(answer, type=Manifest)

    def fetch(self, checkpoint: str, session: str) -> bytes:
        """One export of a committed checkpoint."""
        self.control.status()  # a lease that is over takes its exports with it
        if self._exports is None or self._exports[0] != checkpoint:
            raise StaleCheckpoint(
                f"an export of checkpoint {checkpoint}",
                expected=f"of {self._exports[0]}" if self._exports else "a checkpoint that is committed",
                action="fetch exports between commit and resume",
            )
        if session not in self._exports[1]:
            raise ArtifactCorrupt(f"no export of {session}", expected="a session of the manifest", action="check it")
        return self._exports[1][session]

    async def restore(self, load: Load) -> None:
        """Load every session of a checkpoint, or none. Raises `ArtifactCorrupt`, `FingerprintMismatch`,
        `RestoreNotFresh`."""
        manifest, checkpoint = load.manifest, load.checkpoint

        async def work(begun: Begun) -> bytes:
            check_manifest(manifest, manifest.checkpoint, self._component.value, self.instance.name)
            if len(manifest.entries) != len(load.exports) or manifest.checkpoint == checkpoint:
                raise ArtifactCorrupt(
                    f"{len(load.exports)} exports of checkpoint {manifest.checkpoint} under the id {checkpoint}",
                    expected=f"{len(manifest.entries)}, under an id of its own",
                    action="send every export of the manifest, under a new id",
                )
            for stated, data in zip(manifest.entries, load.exports, strict=True):
                check_export(stated, data)
            await self._drained(begun)
            pairs = zip(manifest.entries, load.exports, strict=True)
            staged = await self.sessions.staged({stated.session: (stated, data) for stated, data in pairs})
            self.control.check(begun)
            self.sessions.install(staged)
            self._loaded = [stated.session for stated in manifest.entries]
            return b""

        await self._operate(Operation.RESTORE, checkpoint, load.deadline, manifest.digest, work)

    # ------------------------------------------------------------------ inner

    async def _operate(
        self,
        operation: Operation,
        checkpoint: str,
        deadline: float,
        digest: str,
        work: Callable[[Begun], Awaitable[bytes]],
    ) -> bytes:
        found = self.control.begin(operation, checkpoint, deadline, digest)
        if isinstance(found, Recorded) and found.answer is not None:
            return found.answer
        if isinstance(found, Begun):
            self._work = asyncio.create_task(self._do(found, work))
            self._work.add_done_callback(_seen)
        assert self._work is not None, "a repeated operation joins its work"
        return await asyncio.shield(self._work)  # it goes on when whoever asked has gone

    async def _do(self, begun: Begun, work: Callable[[Begun], Awaitable[bytes]]) -> bytes:
        try:
            answer = await work(begun)
            self.control.done(begun, answer)
        except BaseException:
            self.control.failed(begun)
            self._notify()
            raise
        return answer

    def _ended(self, ended: Ended) -> None:
        if ended.stays is False:
            self.sessions.unload(self._loaded)
        self._exports, self._loaded = None, []
        self._notify()

    def _blockers(self) -> list[str]:
        owed = [f"the acknowledgement of {one.receipt.session}" for one in self.completions.retained()]
        return [*self._running.values(), *owed]

    async def _drained(self, begun: Begun) -> None:
        while self._running:
            self.control.check(begun)
            await self._wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        """Until something changed, or a moment."""
        try:
            await asyncio.wait_for(self._changed.wait(), POLL_S)
        except TimeoutError:
            return


def _seen(task: asyncio.Task[bytes]) -> None:
    if not task.cancelled():
        task.exception()
