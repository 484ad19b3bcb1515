"""A ticket desk that takes its time: the service behind the environment `ticket`, and what its tests ask for the truth.

    python -m gpu.environments.slow_tool --port 0 --delay 1.0 --ledger FILE

It prints its url. `GET /priority?arguments={"topic": ...}` answers with a number; `POST /open` with {"topic",
"priority"} opens a ticket and answers with its number. A request takes `--delay` seconds, a change is made after half
of them. Every change that is made is one line of JSON in FILE before it is answered. A key that comes twice is not
recognised: whoever sends a change twice finds two lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from aiohttp import web

TOPICS = {"printer": 3, "network": 1, "phone": 2, "door": 4, "light": 5, "heating": 2}
"""The priority of each topic."""


class SlowTool:
    """The desk, with its ledger. Tickets are numbered on from those in the ledger."""

    def __init__(self, ledger: Path, delay_s: float) -> None:
        self._ledger, self._delay_s = ledger, delay_s
        self._opened = len(executed(ledger))

    def application(self) -> web.Application:
        application = web.Application()
        application.add_routes([web.get("/priority", self._priority), web.post("/open", self._open)])
        return application

    async def _priority(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self._delay_s)
        topic = json.loads(request.query["arguments"])["topic"]
        return web.json_response(TOPICS[topic]) if topic in TOPICS else _refused("no such topic")

    async def _open(self, request: web.Request) -> web.Response:
        arguments = await request.json()
        await asyncio.sleep(self._delay_s / 2)
        if arguments["topic"] not in TOPICS:
            return _refused("no such topic")
        self._opened += 1
        number = self._opened
        self._write({"key": request.headers.get("Idempotency-Key", ""), "number": number, **arguments})
        await asyncio.sleep(self._delay_s / 2)
        return web.json_response(number)

    def _write(self, change: dict[str, Any]) -> None:
        file = os.open(self._ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, json.dumps(change).encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)


def executed(ledger: Path) -> list[dict[str, Any]]:
    """The changes that were made, in order."""
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def _refused(why: str) -> web.Response:
    return web.json_response({"error": why}, status=422)


async def serve(tool: SlowTool, port: int) -> web.AppRunner:
    """On loopback, until the runner's `cleanup`; its `addresses` say where."""
    runner = web.AppRunner(tool.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


async def _main(port: int, delay_s: float, ledger: Path) -> None:
    runner = await serve(SlowTool(ledger, delay_s), port)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    host, bound = runner.addresses[0][:2]
    print(f"http://{host}:{bound}", flush=True)
    await ended.wait()
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A ticket desk that takes its time")
    parser.add_argument("--port", type=int, default=0, help="0 finds a free one")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds of a request")
    parser.add_argument("--ledger", type=Path, required=True, help="file to which changes are appended")
    asked = parser.parse_args()
    asyncio.run(_main(asked.port, asked.delay, asked.ledger))
