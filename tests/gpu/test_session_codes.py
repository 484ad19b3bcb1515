"""What a session host refuses, by code, and that nothing changed; and a step that is not the one it was."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest

from gpu.environments import sessions
from gpu.environments.resources import Claim, Reply, Request, Standing, canonical, request_digest, success
from gpu.environments.sessions import Session, SessionHost
from gpu.environments.tools import Sessions, Tools
from storage.errors import ContinuationInvalid, ResourceInvalid
from storage.ledger import Boundary, Requested

NAME = "run/g0/0~0"
OLD, NEW = Claim(1, 0), Claim(1, 1)


class Count(Session):
    def __init__(self) -> None:
        self.count = 0

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        self.count += 1
        if operation == "break":
            raise OSError("in the middle")
        return self.count


async def started(claim: Claim = OLD) -> SessionHost:
    host = SessionHost(lambda task, seed: Count())
    await host.start(NAME, claim, b"{}", 0)
    return host


def request(number: int, operation: str = "add", revision: int = 0, **arguments: object) -> Request:
    return Request(f"{NAME}.0.{number}", operation, canonical(arguments), revision)


async def refused(call: Awaitable[object], code: str) -> None:
    with pytest.raises(ResourceInvalid) as caught:
        await call
    assert caught.value.code == code


async def test_an_attempt_is_barred_by_a_later_one() -> None:
    host = await started()
    assert await host.claim(NAME, NEW) == 0
    await refused(host.call(NAME, OLD, request(0)), "claimed")
    await refused(host.standing(NAME, OLD, request(0)), "claimed")
    await refused(host.start(NAME, OLD, b"{}", 0), "claimed")
    await refused(host.claim(NAME, OLD), "claimed")
    assert await host.claim(NAME, NEW) == 0


async def test_a_session_that_was_never_started_or_has_ended_is_missing() -> None:
    host = await started()
    await refused(host.call("run/g0/1~0", OLD, request(0)), "missing")
    await host.end(NAME)
    await refused(host.call(NAME, OLD, request(0)), "missing")
    assert await host.claim(NAME, OLD) is None


async def test_a_session_keeps_so_many_receipts_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RECEIPTS", 2)
    host = await started()
    for number in range(2):
        await host.call(NAME, OLD, request(number, revision=number))
    await refused(host.call(NAME, OLD, request(2, revision=2)), "receipts")
    assert await host.call(NAME, OLD, request(1, revision=1)) == Reply(success(2), 2)


async def test_a_session_whose_change_ended_in_the_middle_is_uncertain() -> None:
    host = await started()
    with pytest.raises(OSError, match="in the middle"):
        await host.call(NAME, OLD, request(0, "break"))
    await refused(host.call(NAME, OLD, request(1)), "uncertain")
    await refused(host.export(NAME, OLD), "uncertain")
    assert await host.standing(NAME, OLD, request(0, "break")) == (Standing.UNKNOWN, None)


async def test_a_request_that_is_not_the_next_or_not_what_it_was_is_refused() -> None:
    host = await started()
    await refused(host.call(NAME, OLD, request(0, revision=1)), "revision")
    await host.call(NAME, OLD, request(0))
    await refused(host.call(NAME, OLD, request(0, more=1)), "receipt")
    assert await host.call(NAME, OLD, request(0)) == Reply(success(1), 1)


class Nothing:
    """A journal in which nothing is to be written."""

    def answered(self) -> int:
        raise AssertionError

    async def intent(self, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        raise AssertionError

    def result(self, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        raise AssertionError


async def step(tools: Tools, operations: list[str]) -> None:
    for operation in operations:
        await tools.call("box", operation)
    await tools.turn_ended(last=True)


@pytest.mark.parametrize("operations", [[], ["take"]])
async def test_a_step_that_makes_other_calls_than_before_is_refused(operations: list[str]) -> None:
    done = Requested("box", request_digest("add", canonical({})), 0, 1, success(1))
    host = SessionHost(lambda task, seed: Count())
    tools = Tools({"box": host}, Sessions("run", 0, 0, 0), NEW, b"{}", 0, Nothing())
    at = Boundary(0, 0, 0, b"", 0, 0, 2, True, (done,))
    await tools.begin(at)
    tools.turn_begins(at)
    with pytest.raises(ContinuationInvalid) as caught:
        await step(tools, operations)
    assert caught.value.code == "replay"
