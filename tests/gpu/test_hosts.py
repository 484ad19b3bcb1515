"""The hosts of resources keep their contract."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpu.environments import sqlite_host
from gpu.environments.http_tool import HttpTool
from gpu.environments.resources import Request, ResourceHost, ToolError
from gpu.environments.sessions import Session, SessionHost
from gpu.environments.slow_tool import SlowTool, executed, serve
from gpu.environments.sqlite_host import SqliteHost
from tests.gpu.hosts import CLAIM, SESSION, Asked, ExportContract, HostContract, refused_with


class _Notes(Session):
    def __init__(self) -> None:
        self.items: list[int] = []
        self.breaks = False

    async def handle(self, operation: str, arguments: dict[str, Any]) -> int:
        if operation == "refuse":
            raise ToolError("no")
        await asyncio.sleep(0)
        self.items.append(arguments["item"])
        if self.breaks:
            raise RuntimeError("broken in the middle")
        return len(self.items)

    def export_state(self) -> bytes:
        return json.dumps(self.items).encode()

    def restore_state(self, data: bytes) -> None:
        self.items = json.loads(data)


class TestSessionHost(ExportContract):
    refused = ("refuse", {})

    def make(self) -> ResourceHost:
        self.made: list[_Notes] = []
        return SessionHost(self._session)

    def _session(self, task: bytes, seed: int) -> Session:
        assert (task, seed) == (b"{}", 7)
        self.made.append(_Notes())
        return self.made[-1]

    def change(self, number: int) -> Asked:
        return "add", {"item": number}

    async def changes(self, host: ResourceHost) -> list[int]:
        return self.made[-1].items

    async def break_off(self, host: ResourceHost, request: Request) -> None:
        self.made[-1].breaks = True
        with pytest.raises(RuntimeError, match="broken"):
            await host.call(SESSION, CLAIM, request)


class TestSqliteHost(ExportContract):
    in_doubt = False
    refused = ("execute", {"sql": "create tabel t(a)"})

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = tmp_path, monkeypatch

    def make(self) -> ResourceHost:
        return SqliteHost(str(self.folder))

    def change(self, number: int) -> Asked:
        return "execute", {"sql": f"create table t{number}(a)"}

    async def changes(self, host: ResourceHost) -> list[int]:
        with sqlite3.connect(SqliteHost(str(self.folder)).path(SESSION)) as connection:
            found = connection.execute("select name from sqlite_master where name like 't_' order by rowid")
            return [int(name[1:]) for (name,) in found]

    async def break_off(self, host: ResourceHost, request: Request) -> None:
        run = sqlite_host.run_statement

        def breaking(connection: sqlite3.Connection, *arguments: Any, **options: Any) -> Any:
            run(connection, *arguments, **options)
            raise OSError("the disk is gone")

        with self.monkeypatch.context() as patch:
            patch.setattr(sqlite_host, "run_statement", breaking)
            with pytest.raises(OSError, match="gone"):
                await host.call(SESSION, CLAIM, request)


class _Breaking(SlowTool):
    """Makes the change, and hangs up."""

    breaks = False

    async def _open(self, request: web.Request) -> web.Response:
        answer = await super()._open(request)
        if self.breaks:
            request.transport.abort()
        return answer


class TestHttpTool(HostContract):
    refused = ("open", {"topic": "nothing", "priority": 1})

    @pytest.fixture
    async def host(self, tmp_path: Path):
        self.ledger = tmp_path / "ledger"
        self.tool = _Breaking(self.ledger, 0.0)
        runner = await serve(self.tool, 0)
        address, port = runner.addresses[0][:2]
        host = HttpTool(f"http://{address}:{port}", timeout_s=10)
        await host.start(SESSION, CLAIM, b"{}", 7)
        yield host
        await host.close()
        await runner.cleanup()

    def change(self, number: int) -> Asked:
        return "open", {"topic": "printer", "priority": number}

    async def changes(self, host: ResourceHost) -> list[int]:
        return [change["priority"] for change in executed(self.ledger)]

    async def break_off(self, host: ResourceHost, request: Request) -> None:
        self.tool.breaks = True
        await refused_with("unanswered", host.call(SESSION, CLAIM, request))
        assert await self.changes(host) == [1, 2], "made, and sent once"
