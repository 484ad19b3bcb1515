"""A host behind HTTP keeps the contract of all hosts."""

from __future__ import annotations

from typing import Any

import pytest

from gpu.environments.participants.client import HttpHost
from gpu.environments.participants.errors import HostFailed
from gpu.environments.participants.notes import Notes
from gpu.environments.resources import Request, ResourceHost
from tests.gpu.hosts import CLAIM, SESSION, Asked, ExportContract
from tests.gpu.participants.hosts import host as serving


class _Numbers(Notes):
    """Breaks in the middle when it is told to."""

    breaks = False

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        done = super().handle(operation, arguments)
        if self.breaks:
            raise RuntimeError("broken in the middle")
        return done


class TestHttpHost(ExportContract):
    refused = ("fly", {})

    @pytest.fixture
    async def host(self):
        self.made: list[_Numbers] = []
        async with serving(make=self._session) as running:
            host = HttpHost(running.transport())
            await host.start(SESSION, CLAIM, b"{}", 7)
            yield host
            await host.close()

    def _session(self, task: bytes, seed: int) -> _Numbers:
        assert (task, seed) == (b"{}", 7)
        self.made.append(_Numbers(task, seed))
        return self.made[-1]

    def change(self, number: int) -> Asked:
        return "note", {"text": str(number)}

    async def changes(self, host: ResourceHost) -> list[int]:
        return [int(text) for text in self.made[-1].handle("notes", {})]

    async def break_off(self, host: ResourceHost, request: Request) -> None:
        self.made[-1].breaks = True
        with pytest.raises(HostFailed, match="broken"):
            await host.call(SESSION, CLAIM, request)
