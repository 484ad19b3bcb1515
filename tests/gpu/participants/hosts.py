"""Hosts for tests: in this process or in one that can be killed, and a proxy that loses replies."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from gpu.environments.base import CheckpointMode
from gpu.environments.participants.capabilities import Component
from gpu.environments.participants.core import ParticipantHost
from gpu.environments.participants.host import HttpServer
from gpu.environments.participants.kept import KeptSessions
from gpu.environments.participants.notes import EffectLedger, Notes
from gpu.environments.participants.protocol import Phase
from gpu.environments.participants.transport import Transport
from gpu.environments.resources import Claim, Request, canonical, opened
from storage.clock import Clock, SystemClock
from storage.ledger import Obligation
from storage.schema import Receipt

SESSION = "run/g0/0~0"
ONE = Claim(1, 0)


def request(cursor: int, revision: int, operation: str = "add", reads: bool = False, **arguments: Any) -> Request:
    given = arguments or ({"by": 1} if operation == "add" else {})
    return Request(f"{SESSION}.0.{cursor}", operation, canonical(given), revision, reads)


def effects(ledger: Path) -> Counter[str]:
    """How often each request was executed."""
    return Counter(json.loads(line)["request"] for line in ledger.read_text().splitlines())


def owed(receipt: Receipt | None, claim: Claim = ONE) -> Obligation:
    """As the ledger has it from the seal on."""
    assert receipt is not None
    return Obligation(0, 0, claim.attempt, claim.incarnation, receipt)


class Running:
    """A host in this process. `core` is what is behind its routes."""

    def __init__(self, core: ParticipantHost, url: str, runner: web.AppRunner) -> None:
        self.core, self.url, self.runner = core, url, runner

    @property
    def phase(self) -> Phase:
        return self.core.control.status().phase

    async def count(self, session: str = SESSION, claim: Claim = ONE) -> int:
        """The counter of a session of `Notes`."""
        asked = Request("count", "count", b"{}", (await self.core.sessions.claim(session, claim)) or 0, True)
        return opened((await self.core.sessions.call(session, claim, asked)).content)

    def transport(self, url: str = "", **more: Any) -> Transport:
        return Transport(url or self.url, self.core.instance.name, **{"timeout_s": 5.0, "patience_s": 5.0, **more})


@asynccontextmanager
async def served(app: web.Application) -> AsyncGenerator[tuple[str, web.AppRunner]]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", runner
    finally:
        await runner.cleanup()


@asynccontextmanager
async def host(
    name: str = "notes",
    *,
    boot: str = "b1",
    component: Component = Component.RESOURCE,
    clock: Clock | None = None,
    mode: CheckpointMode = CheckpointMode.EXPORT_RESTORE,
    replayable: bool = True,
    ledger: Path | None = None,
    token: str = "",
    make: Any = Notes,
) -> AsyncGenerator[Running]:
    effects = EffectLedger(ledger) if ledger is not None else None
    sessions = KeptSessions(make, mode=mode, replayable=replayable, ledger=effects)
    core = ParticipantHost(name, boot, sessions, clock or SystemClock(), component)
    async with served(HttpServer(core, token).app()) as (url, runner):
        yield Running(core, url, runner)
    if effects is not None:
        effects.close()


class Proxy:
    """Forwards requests; of those to a path in `lost` (how many of them) the reply is lost, of those in `kept` the
    request is. `seen` counts what came."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.lost: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.answers: dict[str, web.Response] = {}
        self.seen: Counter[str] = Counter()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/v1/")
        self.seen[path] += 1
        if self.kept[path] > 0:
            self.kept[path] -= 1
            return _cut(request)
        async with (
            ClientSession() as session,
            session.request(
                request.method, self.target + request.path, data=await request.read(), headers=request.headers
            ) as response,
        ):
            body = await response.read()
        if self.lost[path] > 0:
            self.lost[path] -= 1
            return _cut(request)
        answer = self.answers.get(path)
        if answer is not None:
            return web.Response(status=answer.status, body=answer.body)
        return web.Response(status=response.status, body=body, content_type=response.content_type)


def _cut(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@asynccontextmanager
async def proxied(running: Running) -> AsyncGenerator[Proxy]:
    proxy = Proxy(running.url)
    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{path:.*}", proxy.forward)
    async with served(app) as (url, _):
        proxy.url = url
        yield proxy


class HostProcess:
    """A host in a process of its own, which is killed at the end at the latest."""

    def __init__(self, *arguments: str) -> None:
        self._arguments: Sequence[str] = arguments
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self, port: int = 0) -> str:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpu.environments.participants.host", "--port", str(port), *self._arguments),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.url = (await asyncio.wait_for(self._process.stdout.readline(), 50)).decode().strip()
        assert self.url, "the host printed no url"
        return self.url

    def transport(self) -> Transport:
        return Transport(self.url, "notes", timeout_s=5.0, patience_s=20.0)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def again(self) -> None:
        """Killed, and started at the same address."""
        await self.kill()
        await self.start(int(self.url.rpartition(":")[2]))

    async def __aenter__(self) -> HostProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
