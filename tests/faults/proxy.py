"""A proxy in front of an S3 server that does to chosen requests what networks and stores do.

Requests are forwarded unchanged, with their Host header, so that signatures stay valid. A rule names a fault, the
requests it meets and how often; `hits` says what was met. Everything happens on loopback, in a thread of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from yarl import URL


class Fault(Enum):
    """`LOST_REPLY`: applied, no reply. `DELAYED`: no reply, applied `delay_s` later. `REFUSED`: reset before the body
    was read. `DROPPED`: reset before anything happened. `HALF_SENT`: the store gets half of the body. `TIMEOUT`: no
    reply and never applied. `ALTERED`: a bit flips on the way to the store. The others answer in the store's place, or
    alter its answer."""

    LOST_REPLY = "lost reply"
    DELAYED = "delayed first attempt"
    REFUSED = "reset at the header"
    DROPPED = "reset"
    HALF_SENT = "reset in the body"
    TIMEOUT = "timeout"
    SLOW_DOWN = "503 SlowDown"
    ERROR = "500 InternalError"
    CONFLICT = "409 conflict"
    EXPIRED = "expired credentials"
    FULL = "disk full"
    SKEWED = "clock skew"
    REGION = "wrong region"
    BIT_FLIP = "bit flip in transit"
    TRUNCATED = "truncated reply"
    ALTERED = "bit flip of a body that is sent"
    EMPTY = "200 that says nothing"


_ANSWERS = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.ERROR: (500, "InternalError"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
    Fault.EXPIRED: (400, "ExpiredToken"),
    Fault.FULL: (507, "InsufficientStorage"),
    Fault.SKEWED: (403, "RequestTimeTooSkewed"),
    Fault.REGION: (400, "AuthorizationHeaderMalformed"),
}
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "expect"}


def flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 4]) + body[middle + 1 :] if body else body


def _error(status: int, code: str) -> web.Response:
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")


def _access_key(request: web.BaseRequest) -> str:
    found = re.search(r"Credential=([^/]+)/", request.headers.get("Authorization", ""))
    return found[1] if found else ""


@dataclass
class Rule:
    """`skip` matching requests pass first; `hold_s` is how long a request without reply stays open."""

    fault: Fault
    method: str = ".*"
    path: str = ".*"
    times: int = 1
    skip: int = 0
    delay_s: float = 0.3
    hold_s: float = 30.0

    def meets(self, method: str, path: str) -> bool:
        return bool(self.times and re.fullmatch(self.method, method) and re.search(self.path, path))


@dataclass
class Proxy:
    upstream: str
    endpoint: str = ""
    rules: list[Rule] = field(default_factory=list)
    hits: Counter[Fault] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    late: list[asyncio.Task[None]] = field(default_factory=list)
    landed: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: Counter[str] = field(default_factory=Counter)
    refuse: Callable[[str], str] = lambda key: ""
    """For an access key: the error code that requests signed with it are answered with."""

    def add(self, fault: Fault, method: str = ".*", path: str = ".*", **more: float) -> Rule:
        rule = Rule(fault, method, path, **more)  # type: ignore[arg-type]
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        self.rules.clear()

    def _chosen(self, method: str, path: str) -> Rule | None:
        for rule in list(self.rules):
            if rule.meets(method, path):
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times -= 1
                self.hits[rule.fault] += 1
                return rule
        return None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handle(request)
        except (ClientError, ConnectionError):  # either side is gone
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        rule = self._chosen(request.method, request.path_qs)
        if rule is not None and rule.fault is Fault.REFUSED:
            return self._reset(request)
        if "Expect" in request.headers and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.read()
        self.requests[request.method] += 1
        self.paths.append(f"{request.method} {request.path_qs}")
        key = _access_key(request)
        self.keys[key] += 1
        if code := self.refuse(key):
            return _error(403, code)
        if rule is None:
            return await self._forward(request, body)
        fault = rule.fault
        if fault in _ANSWERS:
            return _error(*_ANSWERS[fault])
        if fault is Fault.EMPTY:
            return web.Response()
        if fault is Fault.ALTERED:
            return await self._forward(request, flipped(body))
        if fault is Fault.BIT_FLIP:
            return self._flipped(await self._forward(request, body))
        if fault is Fault.TRUNCATED:
            return await self._cut(request, await self._forward(request, body))
        if fault is Fault.LOST_REPLY:
            await self._forward(request, body)
        elif fault is Fault.HALF_SENT:
            await self._send_half(request, body)
        elif fault is Fault.DELAYED:
            self.late.append(asyncio.ensure_future(self._later(request, body, rule.delay_s, self._landing)))
        if fault in (Fault.DELAYED, Fault.TIMEOUT):
            await asyncio.sleep(rule.hold_s)
        return self._reset(request)

    def _request(self, *args: Any) -> web.BaseRequest:
        """By default a request may have one megabyte."""
        return web.BaseRequest(*args, self._loop, client_max_size=0)

    @staticmethod
    def _reset(request: web.BaseRequest) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    async def _send_half(self, request: web.BaseRequest, body: bytes) -> None:
        """What a client does that is killed while it sends."""
        url = URL(self.upstream)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        kept = [f"{name}: {value}" for name, value in request.headers.items() if name.lower() != "expect"]
        writer.write("\r\n".join([f"{request.method} {request.raw_path} HTTP/1.1", *kept, "", ""]).encode())
        writer.write(body[: len(body) // 2])
        await writer.drain()
        await asyncio.sleep(0.05)  # so that the store begins with it
        writer.transport.abort()
        del reader

    async def _later(self, request: web.BaseRequest, body: bytes, delay_s: float, landing: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await landing.wait()
        self.landed.append((await self._forward(request, body)).status)

    def land(self) -> None:
        """Let every delayed request arrive now."""
        self._loop.call_soon_threadsafe(self._landing.set)

    @staticmethod
    def _flipped(answer: web.Response) -> web.Response:
        answer.body = flipped(bytes(answer.body or b""))  # type: ignore[arg-type]
        return answer

    @staticmethod
    async def _cut(request: web.BaseRequest, whole: web.Response) -> web.StreamResponse:
        """Half of the body under the length of the whole, then the connection ends."""
        body = bytes(whole.body or b"")  # type: ignore[arg-type]
        answer = web.StreamResponse(status=whole.status, headers=whole.headers)
        answer.content_length = len(body)
        await answer.prepare(request)
        await answer.write(body[: len(body) // 2])
        if request.transport is not None:
            request.transport.abort()
        return answer

    async def _forward(self, request: web.BaseRequest, body: bytes) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            data = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            if request.method != "HEAD":
                kept.pop("Content-Length", None)
            return web.Response(status=answer.status, headers=kept, body=data)

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        timeout = ClientTimeout(total=120)
        self._loop, self._landing = asyncio.get_running_loop(), asyncio.Event()
        async with ClientSession(auto_decompress=False, timeout=timeout) as self._session:
            runner = web.ServerRunner(
                web.Server(self.handle, request_factory=self._request),  # type: ignore[arg-type]
                shutdown_timeout=0.1,
            )
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
            ready.set()
            await stop.wait()
            for task in self.late:
                task.cancel()
            await runner.cleanup()


@contextlib.contextmanager
def proxied(upstream: str) -> Generator[Proxy]:
    """A proxy in front of `upstream` (http://host:port)."""
    proxy, ready = Proxy(upstream), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(proxy.serve(ready, stop),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
