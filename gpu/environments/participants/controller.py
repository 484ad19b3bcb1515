"""Checkpoints over several external hosts: all of them saved at one moment, and all open again whatever happens.

Prepare, commit and restore go model, agents, resources; resume goes resources, model, agents last, because an agent
that runs calls the others. Within a stage hosts are asked at once. A host is noted before it is asked: a request whose
answer was lost is taken as applied and gets its resume. While one host is not known to be open no other checkpoint may
begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from gpu.environments.participants import wire
from gpu.environments.participants.capabilities import Capabilities, Component, check_same, check_topology
from gpu.environments.participants.errors import HostUnreachable, ResumeOwed, StaleCheckpoint
from gpu.environments.participants.manifest import Checkpoint, check_export, check_manifest, check_participants
from gpu.environments.participants.protocol import Operation, Outcome, Phase
from gpu.environments.participants.transport import Transport
from storage.clock import Clock
from storage.errors import ArtifactCorrupt, DeadlineExceeded, RestoreRefused, TidegateError

_PREPARING = (Component.MODEL, Component.AGENT, Component.RESOURCE)
_RESUMING = (Component.RESOURCE, Component.MODEL, Component.AGENT)
RELEASE_S = 10.0
"""How long one call tries to open a host again."""
GRACE_S = 1.0
"""How long after a deadline an answer is waited for."""


class _Participant:
    """A host with what it said of itself; `touched` is the checkpoint that it may be closed for."""

    def __init__(self, transport: Transport, record: Capabilities) -> None:
        self.transport, self.record = transport, record
        self.touched: str | None = None


class Controller:
    """One checkpoint at a time. `discover` first. Deadlines are Unix seconds.

    What raises in `prepare` and `commit` has already been followed by a resume of everything touched, in `restore` by
    an abort; hosts that could not be opened stay owed, and `resume` or `abort` with the same id is to be repeated.
    """

    def __init__(self, transports: Sequence[Transport], clock: Clock, *, release_s: float = RELEASE_S) -> None:
        self._transports, self._clock, self._release_s = transports, clock, release_s
        self._participants: list[_Participant] = []
        self._restored: str | None = None
        self.fingerprint = ""

    async def discover(self) -> str:
        """Ask every host what it can do. Returns the topology's fingerprint; raises as `check_topology`, and
        `ResumeOwed`."""
        self._refuse_owed("")
        records = await self._ask_all()
        self.fingerprint = check_topology(records)
        self._participants = [
            _Participant(transport, record)
            for transport, record in zip(self._transports, records, strict=True)
            if record.saves
        ]
        return self.fingerprint

    @property
    def owed(self) -> dict[str, str]:
        """Hosts that may be closed, and for which checkpoint."""
        return {one.record.name: one.touched for one in self._participants if one.touched is not None}

    async def prepare(self, checkpoint: str, deadline: float) -> None:
        self._refuse_owed(checkpoint)

        async def ask(one: _Participant) -> None:
            one.touched = checkpoint
            await self._control(one, "prepare", checkpoint, deadline)

        await self._guarded(checkpoint, Operation.RESUME, self._stages(_PREPARING, ask))

    async def commit(self, checkpoint: str, deadline: float) -> Checkpoint:
        """What all of them saved, checked. They stay closed until `resume`."""
        self._refuse_owed(checkpoint)
        saved: dict[str, tuple[wire.Manifest, tuple[bytes, ...]]] = {}

        async def ask(one: _Participant) -> None:
            one.touched = checkpoint
            answer = await self._control(one, "commit", checkpoint, deadline)
            manifest = answer.manifest
            if manifest is None:
                raise ArtifactCorrupt(
                    f"{answer.instance} committed without a manifest", expected="one", action="correct the host"
                )
            check_manifest(manifest, checkpoint, one.record.component.value, one.record.name)
            saved[one.record.name] = manifest, await self._fetch(one, manifest, deadline)

        async def all_of_them() -> None:
            await self._stages(_PREPARING, ask)
            check_participants([manifest for manifest, _ in saved.values()], self._expected())

        await self._guarded(checkpoint, Operation.RESUME, all_of_them())
        ordered = [saved[name] for name in sorted(saved)]
        return Checkpoint(
            checkpoint,
            self.fingerprint,
            tuple(manifest for manifest, _ in ordered),
            tuple(exports for _, exports in ordered),
        )

    async def restore(self, checkpoint: str, saved: Checkpoint, deadline: float) -> None:
        """Load a saved checkpoint into fresh hosts, under an id of its own. Everything is checked before any host is
        asked. They stay closed until `resume`."""
        self._refuse_owed(checkpoint)
        check_same(saved.fingerprint, await self._ask_all())
        check_participants(saved.manifests, self._expected())
        pairs = zip(saved.manifests, saved.exports, strict=True)
        given = {manifest.name: (manifest, exports) for manifest, exports in pairs}
        for one in self._participants:
            manifest, exports = given[one.record.name]
            check_manifest(manifest, saved.checkpoint, one.record.component.value, one.record.name)
            for stated, data in zip(manifest.entries, exports, strict=True):
                check_export(stated, data)

        async def ask(one: _Participant) -> None:
            manifest, exports = given[one.record.name]
            one.touched = checkpoint
            load = wire.Load(checkpoint=checkpoint, deadline=deadline, manifest=manifest, exports=exports)
            await one.transport.ask("control/restore", load, wire.Controlled, patience_s=self._left(deadline))

        await self._guarded(checkpoint, Operation.ABORT, self._stages(_PREPARING, ask))
        self._restored = checkpoint

    async def resume(self, checkpoint: str) -> None:
        """Open what was closed. Raises `ResumeOwed` when a host did not answer: repeat with the same id. After a
        restore also `RestoreRefused`, when a host has lost what it had loaded."""
        if self._restored == checkpoint:
            await self._check_restored(checkpoint)
        await self._release(Operation.RESUME, checkpoint)

    async def abort(self, checkpoint: str) -> None:
        """Open what was closed, and drop what was restored. Raises `ResumeOwed`."""
        await self._release(Operation.ABORT, checkpoint)

    # ------------------------------------------------------------------ many hosts

    async def _stages(self, order: Sequence[Component], ask: Callable[[_Participant], Awaitable[None]]) -> None:
        """All of a stage end before the first error is raised: none is under way when hosts are opened again."""
        for component in order:
            stage = [one for one in self._participants if one.record.component is component]
            found = await asyncio.gather(*(ask(one) for one in stage), return_exceptions=True)
            for error in found:
                if error is not None:
                    raise error

    async def _guarded(self, checkpoint: str, operation: Operation, work: Awaitable[None]) -> None:
        try:
            await work
        except BaseException as error:
            try:
                await self._release(operation, checkpoint)
            except TidegateError as owed:
                error.add_note(f"and then: {owed}")
            raise

    async def _release(self, operation: Operation, checkpoint: str) -> None:
        """Every host is tried, and what failed is collected."""
        errors: list[TidegateError] = []

        async def ask(one: _Participant) -> None:
            if one.touched != checkpoint:
                return
            try:
                message = wire.Release(checkpoint=checkpoint)
                path = f"control/{operation.value}"
                answer = await one.transport.ask(path, message, wire.Controlled, patience_s=self._release_s)
                one.touched = None
                if self._restored == checkpoint and operation is Operation.RESUME:
                    _check_outcome(one, answer)
            except StaleCheckpoint as error:  # it is open, without what it had loaded
                one.touched = None
                errors.append(error)
            except TidegateError as error:
                errors.append(error)

        await self._stages(_RESUMING, ask)
        owed = [name for name, one in self.owed.items() if one == checkpoint]
        if owed:
            raise ResumeOwed(
                f"{', '.join(sorted(owed))} after checkpoint {checkpoint}: {errors[0].found}",
                expected="every host open again",
                action=f"repeat the {operation.value} with the same id; its lease ends by itself too",
            )
        if self._restored == checkpoint:
            self._restored = None
        if errors and operation is Operation.RESUME:
            raise RestoreRefused(
                errors[0].found, expected="every host with what it loaded", action="restart the hosts, restore again"
            )

    # ------------------------------------------------------------------ one host

    async def _control(self, one: _Participant, operation: str, checkpoint: str, deadline: float) -> wire.Controlled:
        message = wire.Control(checkpoint=checkpoint, deadline=deadline)
        left = self._left(deadline)
        return await one.transport.ask(f"control/{operation}", message, wire.Controlled, patience_s=left)

    async def _fetch(self, one: _Participant, manifest: wire.Manifest, deadline: float) -> tuple[bytes, ...]:
        found: list[bytes] = []
        for stated in manifest.entries:
            message = wire.Fetch(checkpoint=manifest.checkpoint, session=stated.session)
            answer = await one.transport.ask("control/export", message, wire.Saved, patience_s=self._left(deadline))
            check_export(stated, answer.data)
            found.append(answer.data)
        return tuple(found)

    async def _check_restored(self, checkpoint: str) -> None:
        """Before any host opens: all of those that are still closed have what they loaded."""
        for one in self._participants:
            if one.touched != checkpoint:
                continue
            answer = await self._status(one)
            if (answer.phase, answer.checkpoint) != (Phase.RESTORED.value, checkpoint):
                await self._release(Operation.ABORT, checkpoint)
                raise RestoreRefused(
                    f"{answer.instance} is {answer.phase}",
                    expected=f"restored, with checkpoint {checkpoint}",
                    action="restore again, into fresh hosts",
                )

    async def _status(self, one: _Participant) -> wire.Controlled:
        message = wire.Message()
        try:
            return await one.transport.ask("control/status", message, wire.Controlled, patience_s=self._release_s)
        except HostUnreachable as error:
            raise ResumeOwed(
                error.found, expected="every host restored before one opens", action="repeat with the same id"
            ) from error

    async def _ask_all(self) -> list[Capabilities]:
        return list(await asyncio.gather(*(one.ask("capabilities", None, Capabilities) for one in self._transports)))

    def _expected(self) -> dict[str, str]:
        return {one.record.name: one.record.component.value for one in self._participants}

    def _left(self, deadline: float) -> float:
        """How long to wait for an answer: a host that finds the deadline past says so itself."""
        left = deadline - self._clock.wall()
        if left <= 0:
            raise DeadlineExceeded(
                f"the deadline passed {-left:.1f} s ago", expected="time left", action="try again, with more time"
            )
        return left + GRACE_S

    def _refuse_owed(self, checkpoint: str) -> None:
        others = {name: one for name, one in self.owed.items() if one != checkpoint}
        if others:
            raise ResumeOwed(
                ", ".join(f"{name} may be closed for {one}" for name, one in sorted(others.items())),
                expected="every host open before another checkpoint begins",
                action="resume with those ids first",
            )


def _check_outcome(one: _Participant, answer: wire.Controlled) -> None:
    if answer.outcome != Outcome.RESUMED.value:
        raise StaleCheckpoint(
            f"{one.record.name}: {answer.outcome}", expected="resumed with what it loaded", action="restore again"
        )
