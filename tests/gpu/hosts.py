"""The contract every host of resources keeps; a new host subclasses `HostContract`, or `ExportContract` when its
sessions come back from exports, and says how to make one and what a change is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpu.environments import sessions, sqlite_host
from gpu.environments.resources import (
    Claim,
    Reply,
    Request,
    ResourceHost,
    Standing,
    ToolError,
    canonical,
    opened,
)
from storage.errors import ResourceInvalid

SESSION = "run/g42/3~1"
CLAIM, NEWER = Claim(1, 1), Claim(1, 2)
Asked = tuple[str, dict[str, Any]]


async def refused_with(code: str, call: Any) -> None:
    with pytest.raises(ResourceInvalid) as caught:
        await call
    assert caught.value.code == code


class HostContract:
    in_doubt = True
    """Whether a request may end without its host knowing what became of it."""
    refused: Asked

    def make(self) -> ResourceHost:
        """A host with nothing in it."""
        raise NotImplementedError

    def change(self, number: int) -> Asked:
        """A change that can be told from the others."""
        raise NotImplementedError

    async def changes(self, host: ResourceHost) -> list[int]:
        """The numbers of the changes that were made, in order."""
        raise NotImplementedError

    async def break_off(self, host: ResourceHost, request: Request) -> None:
        """Make a call that ends in the middle."""
        raise NotImplementedError

    def request(self, number: int, revision: int, *, name: str = "") -> Request:
        operation, arguments = self.change(number)
        return Request(f"{SESSION}.{name or number}", operation, canonical(arguments), revision)

    async def call(self, host: ResourceHost, number: int, revision: int, claim: Claim = CLAIM) -> Reply:
        return await host.call(SESSION, claim, self.request(number, revision))

    @pytest.fixture
    async def host(self):
        host = self.make()
        await host.start(SESSION, CLAIM, b"{}", 7)
        yield host
        await host.close()

    async def test_a_session_starts_once_and_a_newer_claim_finds_it_at_its_beginning(self, host: ResourceHost) -> None:
        await self.call(host, 1, 0)
        await host.start(SESSION, CLAIM, b"{}", 7)
        assert await host.claim(SESSION, CLAIM) == 1
        await host.start(SESSION, NEWER, b"{}", 7)
        assert await host.claim(SESSION, NEWER) == 0
        await refused_with("claimed", host.start(SESSION, CLAIM, b"{}", 7))

    async def test_each_change_adds_one_to_the_revision(self, host: ResourceHost) -> None:
        for number in range(3):
            reply = await self.call(host, number, number)
            opened(reply.content)
            assert reply.revision == number + 1
        assert await self.changes(host) == [0, 1, 2]
        assert await host.claim(SESSION, CLAIM) == 3

    async def test_a_request_that_comes_again_gets_the_stored_reply(self, host: ResourceHost) -> None:
        first = await self.call(host, 1, 0)
        await self.call(host, 2, 1)
        assert await self.call(host, 1, 0) == first
        assert await self.changes(host) == [1, 2]
        assert await host.standing(SESSION, CLAIM, self.request(1, 0)) == (Standing.APPLIED, first)

    async def test_a_request_id_with_other_input_is_refused(self, host: ResourceHost) -> None:
        await self.call(host, 1, 0)
        other = self.request(2, 0, name="1")
        await refused_with("receipt", host.call(SESSION, CLAIM, other))
        await refused_with("receipt", host.standing(SESSION, CLAIM, other))
        assert await self.changes(host) == [1]

    async def test_a_request_at_another_revision_is_refused(self, host: ResourceHost) -> None:
        await self.call(host, 1, 0)
        for revision in (0, 2):
            await refused_with("revision", self.call(host, 2, revision))
        assert await self.changes(host) == [1]

    async def test_an_older_claim_is_barred_from_everything(self, host: ResourceHost) -> None:
        await self.call(host, 1, 0)
        assert await host.claim(SESSION, NEWER) == 1
        await refused_with("claimed", self.call(host, 2, 1))
        await refused_with("claimed", self.call(host, 1, 0))
        await refused_with("claimed", host.standing(SESSION, CLAIM, self.request(1, 0)))
        await refused_with("claimed", host.claim(SESSION, CLAIM))
        assert (await self.call(host, 2, 1, NEWER)).revision == 2
        assert await self.changes(host) == [1, 2]

    async def test_what_a_tool_refuses_changes_nothing_and_is_a_reply_like_others(self, host: ResourceHost) -> None:
        operation, arguments = self.refused
        request = Request(f"{SESSION}.r", operation, canonical(arguments), 0)
        reply = await host.call(SESSION, CLAIM, request)
        with pytest.raises(ToolError):
            opened(reply.content)
        assert reply.revision == 0
        assert await host.call(SESSION, CLAIM, request) == reply
        assert await host.standing(SESSION, CLAIM, request) == (Standing.APPLIED, reply)
        assert (await self.call(host, 1, 0)).revision == 1
        assert await self.changes(host) == [1]

    async def test_after_a_request_that_broke_off_nobody_has_to_guess(self, host: ResourceHost) -> None:
        await self.call(host, 1, 0)
        broken = self.request(2, 1)
        await self.break_off(host, broken)
        standing, reply = await host.standing(SESSION, CLAIM, broken)
        assert reply is None
        if self.in_doubt:
            assert standing is Standing.UNKNOWN
            await refused_with("uncertain", host.call(SESSION, CLAIM, broken))
            await refused_with("uncertain", self.call(host, 3, 1))
        else:
            assert standing is Standing.NOT_APPLIED
            await host.call(SESSION, CLAIM, broken)
            assert await self.changes(host) == [1, 2]

    async def test_the_1025th_change_is_refused(self, host: ResourceHost, monkeypatch: pytest.MonkeyPatch) -> None:
        assert sessions.RECEIPTS == sqlite_host.RECEIPTS == 1024
        for module in (sessions, sqlite_host):
            monkeypatch.setattr(module, "RECEIPTS", 4)
        for number in range(4):
            await self.call(host, number, number)
        await refused_with("receipts", self.call(host, 4, 4))
        assert (await self.call(host, 3, 3)).revision == 4, "what it knows it still says"
        assert await self.changes(host) == [0, 1, 2, 3]

    async def test_a_session_ends_once_or_twice_and_is_missing_then(self, host: ResourceHost) -> None:
        await self.call(host, 1, 0)
        for _ in range(2):
            await host.end(SESSION)
        assert await host.claim(SESSION, NEWER) is None
        await refused_with("missing", self.call(host, 2, 1))
        await refused_with("missing", host.standing(SESSION, CLAIM, self.request(1, 0)))

    async def test_calls_at_the_same_time_are_made_one_after_another(self, host: ResourceHost) -> None:
        same = await asyncio.gather(*(self.call(host, 1, 0) for _ in range(4)))
        assert len(set(same)) == 1
        ended = await asyncio.gather(*(self.call(host, number, 1) for number in (2, 3, 4)), return_exceptions=True)
        made = [reply for reply in ended if isinstance(reply, Reply)]
        barred = [error.code for error in ended if isinstance(error, ResourceInvalid)]
        assert ([reply.revision for reply in made], barred) == ([2], ["revision"] * 2)
        assert len(await self.changes(host)) == 2


class ExportContract(HostContract):
    async def test_an_export_brings_state_and_revision_back(self, host: ResourceHost) -> None:
        for number in range(2):
            await self.call(host, number, number)
        export = await host.export(SESSION, CLAIM)
        assert export.revision == 2
        await self.call(host, 2, 2)
        await host.restore(SESSION, NEWER, b"{}", 7, export)
        assert await self.changes(host) == [0, 1]
        assert await host.claim(SESSION, NEWER) == 2
        await refused_with("claimed", self.call(host, 2, 2))
        assert (await self.call(host, 2, 2, NEWER)).revision == 3

    async def test_an_export_makes_a_session_where_none_is(self, host: ResourceHost) -> None:
        await self.call(host, 1, 0)
        export = await host.export(SESSION, CLAIM)
        await host.end(SESSION)
        await host.restore(SESSION, NEWER, b"{}", 7, export)
        assert await self.changes(host) == [1]
        assert (await host.export(SESSION, NEWER)).revision == 1
        await refused_with("claimed", host.restore(SESSION, CLAIM, b"{}", 7, export))
        await refused_with("claimed", host.export(SESSION, CLAIM))
