"""The sessions of an external host: those of `SessionHost`, which can also be saved and loaded all together.

What is saved of a session is all of it, receipts and claim included: a request that was applied before is known after.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gpu.environments.base import CheckpointMode
from gpu.environments.participants.notes import EffectLedger
from gpu.environments.participants.wire import Entry
from gpu.environments.resources import Claim, Reply, Request, Standing
from gpu.environments.sessions import Session, SessionHost
from storage.errors import ArtifactCorrupt, RestoreNotFresh
from storage.ledger import Export

REMEMBERED = 100_000
"""Names of sessions that a process remembers having served; with more, nothing can be loaded into it."""


class _Receipt(msgspec.Struct, frozen=True, array_like=True):
    request: str
    digest: str
    content: bytes
    revision: int


class _Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One session, whole. Schema 1 of what hosts save."""

    claim: Claim
    task: bytes
    seed: int
    revision: int
    state: bytes
    receipts: tuple[_Receipt, ...]


class KeptSessions(SessionHost):
    """`ledger` gets every executed change. Where effects leave the session (`replayable` False), a session that was
    not here from its first attempt on cannot say of a request that it was not applied: an older process may have done
    it."""

    def __init__(
        self,
        make: Callable[[bytes, int], Session],
        *,
        mode: CheckpointMode,
        replayable: bool,
        ledger: EffectLedger | None = None,
    ) -> None:
        super().__init__(make, mode=mode, replayable=replayable)
        self._ledger = ledger
        self._from: dict[str, tuple[bytes, int]] = {}
        self._brought: dict[str, tuple[Claim, int, str] | None] = {}
        """Sessions that were not here from their beginning; with the restore that put them here, if one did."""
        self._served: set[str] = set()

    # ------------------------------------------------------------------ one session

    async def begin(self, session: str, claim: Claim, task: bytes, seed: int, *, first: bool) -> None:
        """`start`; `first`: no attempt has used this name before."""
        before = self._held.get(session)
        await super().start(session, claim, task, seed)
        if self._held[session] is not before:
            self._keep(session, task, seed)
            if not first:
                self._brought[session] = None

    async def claim(self, session: str, claim: Claim) -> int | None:
        self._serve(session)
        return await super().claim(session, claim)

    async def standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        found, reply = await super().standing(session, claim, request)
        if found is Standing.NOT_APPLIED and session in self._brought and not self.replayable:
            return Standing.UNKNOWN, None
        return found, reply

    async def restore(self, session: str, claim: Claim, task: bytes, seed: int, export: Export) -> None:
        """The same restore again changes nothing: the first one may be in use already."""
        this = claim, export.revision, hashlib.sha256(export.state).hexdigest()
        if session in self._held and self._brought.get(session) == this:
            return
        await super().restore(session, claim, task, seed, export)
        self._keep(session, task, seed)
        self._brought[session] = this

    async def end(self, session: str) -> None:
        self._serve(session)
        self._drop(session)

    # ------------------------------------------------------------------ all of them

    @property
    def uncertain(self) -> list[str]:
        return sorted(name for name, held in self._held.items() if held.uncertain)

    def whole(self) -> dict[str, tuple[int, bytes]]:
        """Revision and bytes of every session. Only while no request is under way."""
        found: dict[str, tuple[int, bytes]] = {}
        for name, held in self._held.items():
            task, seed = self._from[name]
            receipts = tuple(
                _Receipt(request, digest, reply.content, reply.revision)
                for request, (digest, reply) in held.receipts.items()
            )
            made = _Whole(held.claim, task, seed, held.revision, held.session.export_state(), receipts)
            found[name] = held.revision, msgspec.json.encode(made)
        return found

    async def staged(self, exports: Mapping[str, tuple[Entry, bytes]]) -> KeptSessions:
        """Every session, built, and nothing changed here.

        Raises `RestoreNotFresh` when this process has served one of them, `ArtifactCorrupt` for an export that is no
        session at that revision.
        """
        served = sorted(name for name in exports if name in self._served)
        if served or (exports and len(self._served) >= REMEMBERED):
            raise RestoreNotFresh(
                f"sessions {', '.join(served[:5])} were served here" if served else f"{REMEMBERED} sessions served",
                expected="a process that has served none of the sessions that it loads",
                action="restart the host, then restore",
            )
        made = KeptSessions(self._make, mode=self.checkpoint_mode, replayable=self.replayable)
        for name, (stated, data) in exports.items():
            await made.put(name, stated, data)
        return made

    async def put(self, name: str, stated: Entry, data: bytes) -> None:
        try:
            whole = msgspec.json.decode(data, type=_Whole)
            await self.restore(name, whole.claim, whole.task, whole.seed, Export(whole.revision, whole.state))
        except (ValueError, LookupError, TypeError) as error:
            raise _no_session(name, repr(error), "a session of schema 1") from error
        if whole.revision != stated.revision:
            raise _no_session(name, f"revision {whole.revision}", f"revision {stated.revision}")
        for one in whole.receipts:
            self._held[name].receipts[one.request] = one.digest, Reply(one.content, one.revision)

    def install(self, staged: KeptSessions) -> None:
        for name in staged._held:
            self._keep(name, *staged._from[name])
            self._held[name] = staged._held[name]
            self._brought[name] = None

    def unload(self, names: list[str]) -> None:
        """What was loaded and never used."""
        for name in names:
            self._drop(name)
            self._served.discard(name)

    # ------------------------------------------------------------------ inner

    async def _handle(self, held: Any, request: Request) -> Reply:
        reply = await super()._handle(held, request)
        if self._ledger is not None and reply.revision > held.revision:
            try:
                self._ledger.append(request, reply.revision)
            except OSError as error:
                held.uncertain = f"the effect of {request.id} could not be recorded: {error}"
                raise
        return reply

    def _keep(self, session: str, task: bytes, seed: int) -> None:
        self._serve(session)
        self._from[session] = task, seed
        self._brought.pop(session, None)

    def _drop(self, session: str) -> None:
        for known in (self._held, self._from, self._brought):
            known.pop(session, None)

    def _serve(self, session: str) -> None:
        if len(self._served) < REMEMBERED:
            self._served.add(session)


def _no_session(name: str, found: str, expected: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"the export of {name} has {found}", expected=expected, action="restore with the version that saved it"
    )
