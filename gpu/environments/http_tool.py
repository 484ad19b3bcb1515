"""A tool behind HTTP that changes the world outside: each request is sent once, and who cannot know says so.

The protocol: a change is `POST <url>/<operation>` with the arguments as a JSON object and the request id as
`Idempotency-Key`, a read is `GET <url>/<operation>?arguments=<JSON>`. 200 answers with a JSON value; a 4xx status with
{"error": text} has changed nothing, and the text is the reply. Everything else, and no answer, is ambiguous.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from gpu.environments.base import CheckpointMode
from gpu.environments.resources import Claim, Reply, Request, Standing, ToolError
from gpu.environments.sessions import Session, SessionHost
from storage.errors import ResourceInvalid

REPLY_BYTES = 65_536
"""Of one answer: it goes into the journal."""


class HttpTool(SessionHost):
    """The service at `url`. What has not answered within `timeout_s` seconds is ambiguous: it raises
    `ResourceInvalid` (`unanswered`), after a change the session is uncertain, and the change is never sent again.

    The service is not asked about old requests: without a receipt of this process their standing is unknown.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        super().__init__(lambda task, seed: _Caller(self), mode=CheckpointMode.RESTART_ONLY, replayable=False)
        self._url, self._timeout = url.rstrip("/"), aiohttp.ClientTimeout(total=timeout_s)
        self._client: aiohttp.ClientSession | None = None

    async def _handle(self, held: Any, request: Request) -> Reply:
        held.session.request = request
        return await super()._handle(held, request)

    async def standing(self, session: str, claim: Claim, request: Request) -> tuple[Standing, Reply | None]:
        standing, reply = await super().standing(session, claim, request)
        return (Standing.UNKNOWN, None) if standing is Standing.NOT_APPLIED else (standing, reply)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def send(self, request: Request) -> Any:
        """What the service answers. Raises `ToolError` and `ResourceInvalid`."""
        try:
            status, body = await self._exchange(request)
            said = json.loads(body)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unanswered(request, repr(error)) from error
        if status == 200:
            return said
        if 400 <= status < 500 and isinstance(said, dict) and "error" in said:
            raise ToolError(str(said["error"]))
        raise self._unanswered(request, f"status {status}")

    async def _exchange(self, request: Request) -> tuple[int, bytes]:
        """A POST is sent once: the client repeats only what reads, and follows no redirection."""
        if self._client is None:
            self._client = aiohttp.ClientSession(timeout=self._timeout)
        url, arguments = f"{self._url}/{request.operation}", request.arguments.decode()
        headers = {"Idempotency-Key": request.id}
        asked = (
            self._client.get(url, params={"arguments": arguments}, headers=headers, allow_redirects=False)
            if request.reads
            else self._client.post(
                url, data=arguments, headers=headers | {"Content-Type": "application/json"}, allow_redirects=False
            )
        )
        async with asked as answer:
            body = bytearray()
            async for chunk in answer.content.iter_chunked(REPLY_BYTES):
                body += chunk
                if len(body) > REPLY_BYTES:
                    raise ValueError(f"an answer of more than {REPLY_BYTES} bytes")
            return answer.status, bytes(body)

    def _unanswered(self, request: Request, how: str) -> ResourceInvalid:
        return ResourceInvalid(
            f"request {request.id} to {self._url}/{request.operation} ended with {how}",
            expected=f"an answer within {self._timeout.total} s",
            action="nothing: the rollout starts over; see whether the service is well",
            code="unanswered",
        )


class _Caller(Session):
    """A rollout's conversation with the service, which keeps nothing of it."""

    request: Request

    def __init__(self, tool: HttpTool) -> None:
        self._tool = tool

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        return self._tool.send(self.request)
