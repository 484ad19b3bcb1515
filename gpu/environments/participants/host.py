"""The conformance host: an HTTP server that speaks the participant protocol, for tests and as a pattern for one's own.

    python -m gpu.environments.participants.host --port 0 --ledger effects.jsonl

prints its url and serves until SIGTERM. All routes but `/v1/capabilities` are POST, with a message of `wire` in JSON.
Sessions live in memory: a new process has another boot id and none of them. What a session does is a `Session` class
given by import path; without one it keeps a counter and notes (`notes.Notes`).
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import importlib
import logging
import signal
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from gpu.environments.base import CheckpointMode
from gpu.environments.participants import wire
from gpu.environments.participants.address import token_from
from gpu.environments.participants.capabilities import Component
from gpu.environments.participants.core import ParticipantHost
from gpu.environments.participants.errors import STATUS, AccessRefused, HostFailed, MessageInvalid
from gpu.environments.participants.kept import KeptSessions
from gpu.environments.participants.notes import EffectLedger
from gpu.environments.participants.protocol import Operation
from gpu.environments.participants.routes import SessionRoutes
from gpu.environments.sessions import Session
from storage.clock import SystemClock
from storage.errors import ConfigurationRefused, TidegateError, UserError

LARGEST_BODY = 256 << 20
"""Bytes of one message; a restore carries every session of its host."""
log = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=wire.Message)
Serve = Callable[[web.Request], Awaitable[web.Response]]


class HttpServer:
    """The routes of one host. `token`: what every request must bring."""

    def __init__(self, host: ParticipantHost, token: str = "") -> None:
        self._host, self._token = host, token.encode()
        self._sessions = SessionRoutes(host)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_get("/v1/capabilities", self._guarded(self._capabilities))
        sessions = self._sessions
        for path, route in {
            "sessions/start": self._route(wire.Start, sessions.start),
            "sessions/claim": self._route(wire.Claim, sessions.claim),
            "sessions/call": self._route(wire.Call, sessions.call),
            "sessions/standing": self._route(wire.Call, sessions.standing),
            "sessions/export": self._route(wire.Claim, sessions.export),
            "sessions/restore": self._route(wire.Restore, sessions.restore),
            "sessions/end": self._route(wire.End, sessions.end),
            "completions/list": self._route(wire.Message, self._list),
            "completions/acknowledge": self._route(wire.Acknowledge, self._acknowledge),
            "completions/forget": self._route(wire.Forget, self._forget),
            "control/prepare": self._route(wire.Control, self._prepare),
            "control/commit": self._route(wire.Control, self._commit),
            "control/export": self._route(wire.Fetch, self._fetch),
            "control/restore": self._route(wire.Load, self._restore),
            "control/resume": self._route(wire.Release, self._resume),
            "control/abort": self._route(wire.Release, self._abort),
            "control/status": self._route(wire.Message, self._status),
        }.items():
            app.router.add_post(f"/v1/{path}", self._guarded(route))
        return app

    # ------------------------------------------------------------------ completed results

    async def _list(self, message: wire.Message) -> wire.Answer:
        return wire.Unacknowledged(instance=self._host.instance, results=self._host.completions.retained())

    async def _acknowledge(self, message: wire.Acknowledge) -> wire.Answer:
        outcomes = await self._host.acknowledge(message.to, message.receipts)
        return wire.Acknowledged(instance=self._host.instance, outcomes=outcomes)

    async def _forget(self, message: wire.Forget) -> wire.Answer:
        await self._host.forget(message.sessions)
        return wire.Answer(instance=self._host.instance)

    # ------------------------------------------------------------------ checkpoints

    async def _prepare(self, message: wire.Control) -> wire.Answer:
        await self._host.prepare(message.checkpoint, message.deadline)
        return self._controlled()

    async def _commit(self, message: wire.Control) -> wire.Answer:
        return self._controlled(manifest=await self._host.commit(message.checkpoint, message.deadline))

    async def _fetch(self, message: wire.Fetch) -> wire.Answer:
        data = self._host.fetch(message.checkpoint, message.session)
        return wire.Saved(instance=self._host.instance, data=data)

    async def _restore(self, message: wire.Load) -> wire.Answer:
        await self._host.restore(message)
        return self._controlled()

    async def _resume(self, message: wire.Release) -> wire.Answer:
        return self._release(Operation.RESUME, message.checkpoint)

    async def _abort(self, message: wire.Release) -> wire.Answer:
        return self._release(Operation.ABORT, message.checkpoint)

    async def _status(self, message: wire.Message) -> wire.Answer:
        return self._controlled()

    def _release(self, operation: Operation, checkpoint: str) -> wire.Answer:
        return self._controlled(outcome=self._host.control.end(operation, checkpoint).outcome.value)

    def _controlled(self, outcome: str | None = None, manifest: wire.Manifest | None = None) -> wire.Controlled:
        status = self._host.control.status()
        return wire.Controlled(
            instance=self._host.instance,
            phase=status.phase.value,
            checkpoint=status.checkpoint,
            lease_s=status.lease_s,
            outcome=outcome,
            manifest=manifest,
        )

    # ------------------------------------------------------------------ HTTP

    def _route(self, kind: type[Kind], act: Callable[[Kind], Awaitable[wire.Answer]]) -> Callable[[bytes], Any]:
        async def serve(body: bytes) -> wire.Answer:
            return await act(wire.decode(body, kind))

        return serve

    async def _capabilities(self, body: bytes) -> wire.Answer:
        return self._host.capabilities()

    def _guarded(self, serve: Callable[[bytes], Awaitable[wire.Answer]]) -> Serve:
        async def handle(request: web.Request) -> web.Response:
            try:
                self._authorize(request)
                answer = await serve(await _body(request))
                return _response(200, answer)
            except TidegateError as error:
                return _response(STATUS.get(type(error), 500), wire.failure(self._host.instance, error))
            except Exception as error:  # noqa: BLE001 - the edge of the process: a session's code may raise anything
                log.warning("op=serve path=%s decision=failed reason=%r", request.path, error)
                return _response(500, wire.failure(self._host.instance, _failed(error)))

        return handle

    def _authorize(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").encode()
        if self._token and not hmac.compare_digest(given, b"Bearer " + self._token):
            raise AccessRefused(
                "a wrong bearer token" if given else "no bearer token",
                expected="the one that the host was started with",
                action="name the environment variable that holds it",
            )


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise MessageInvalid(
            f"more than {LARGEST_BODY} bytes", expected=f"at most {LARGEST_BODY}", action="send smaller sessions"
        ) from error


def _response(status: int, answer: wire.Answer) -> web.Response:
    return web.Response(status=status, body=wire.encode(answer), content_type="application/json")


def _failed(error: Exception) -> HostFailed:
    return HostFailed(repr(error), expected="an answer or a refusal", action="see the log of the host")


# ---------------------------------------------------------------------- the process


def load_session(path: str) -> Callable[[bytes, int], Session]:
    """A `Session` class by `module:Class`. Raises `ConfigurationRefused`."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationRefused(
            f"--session {path}: {error}", expected="module:Class of a Session", action="correct the path"
        ) from error


async def serve(server: HttpServer, address: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT; prints the url once requests are accepted."""
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        await web.TCPSite(runner, address, port).start()
        print(f"http://{address}:{runner.addresses[0][1]}", flush=True)
        await over.wait()
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--name", default="notes")
    parser.add_argument("--component", type=Component, default=Component.RESOURCE)
    parser.add_argument("--mode", type=CheckpointMode, default=CheckpointMode.EXPORT_RESTORE)
    parser.add_argument("--replayable", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--session", default="gpu.environments.participants.notes:Notes", help="module:Class")
    parser.add_argument("--ledger", type=Path, help="gets one JSON line for each executed change")
    parser.add_argument("--token-env", default="", help="environment variable with the bearer token")
    given = parser.parse_args()
    try:
        server = _made(given)
    except UserError as error:
        parser.exit(error.exit_code, f"{error}\n")
    asyncio.run(serve(server, given.address, given.port))


def _made(given: argparse.Namespace) -> HttpServer:
    sessions = KeptSessions(
        load_session(given.session),
        mode=given.mode,
        replayable=given.replayable,
        ledger=EffectLedger(given.ledger) if given.ledger else None,
    )
    host = ParticipantHost(given.name, uuid.uuid4().hex, sessions, SystemClock(), given.component)
    return HttpServer(host, token_from(given.token_env))


if __name__ == "__main__":
    main()
