"""A request whose reply never came: the attempt that goes on changes nothing before its intent is durable."""

from __future__ import annotations

from typing import Any

import pytest

from gpu.environments.resources import Claim, Reply, canonical, request_digest
from gpu.environments.sessions import Session, SessionHost
from gpu.environments.tools import NotContinuable, Sessions, Tools
from storage.ledger import Boundary, Export, Requested


class Counted(Session):
    def __init__(self, said: list[str]) -> None:
        self._said = said

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        self._said.append("called")
        return len(self._said)


class Journal:
    """Writes down in which order things happen."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def answered(self) -> int:
        raise AssertionError("it is a boundary already")

    async def intent(self, boundary: int, cursor: int, resource: str, revision: int, digest: str) -> None:
        self._said.append(f"durable {boundary}.{cursor}")

    def result(self, boundary: int, cursor: int, resource: str, digest: str, reply: Reply) -> None:
        self._said.append(f"result {boundary}.{cursor}")


async def test_the_attempt_that_takes_over_waits_for_the_intent_before_it_makes_the_call() -> None:
    """The one that intended it may have died before its record was durable; with the manager, it may be gone."""
    said: list[str] = []
    host = SessionHost(lambda task, seed: Counted(said))
    asked = Requested("box", request_digest("put", canonical({})), 0, 0, None)
    at = Boundary(3, 0, 0, b"", 0, 0, 2, True, (asked,))
    tools = Tools({"box": host}, Sessions("run", 1, 0, 0), Claim(1, 1), b"{}", 0, Journal(said))
    await tools.begin(at)
    tools.turn_begins(at)
    await tools.call("box", "put")
    assert said == ["durable 3.0", "called", "result 3.0"]


@pytest.mark.parametrize("revision", [0, 2])
async def test_a_request_is_not_sent_again_when_the_session_that_knew_of_it_is_gone(revision: int) -> None:
    """It ended with a seal that was lost, or died with its process: its effect may be outside."""
    said: list[str] = []
    host = SessionHost(lambda task, seed: Counted(said), replayable=False)
    asked = Requested("box", request_digest("put", canonical({})), revision, revision, None)
    exports = {"box": Export(revision, b"")} if revision else {}
    at = Boundary(3, 0, 0, b"", 0, 0, 2, True, (asked,), {"box": revision} if revision else {}, exports)
    tools = Tools({"box": host}, Sessions("run", 1, 0, 0), Claim(1, 1), b"{}", 0, Journal(said))
    with pytest.raises(NotContinuable, match="not there any more"):
        await tools.begin(at)
    assert said == []
