"""The sessions of a NeMo Gym resources server: its cookies per rollout, and its routes as operations.

`verify` asks for the reward, every other operation is the tool of that name. What the server does cannot be asked for
afterwards, so nothing is sent twice: a lost answer leaves the session uncertain, and its rollout starts over.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar

from gpu.environments.base import CheckpointMode
from gpu.environments.participants.address import checked_url, token_from
from gpu.environments.participants.errors import HostFailed, OutcomeUnknown
from gpu.environments.resources import ToolError
from gpu.environments.sessions import Session, SessionHost

RESERVED = frozenset({
    "seed_session", "verify", "close_session", "sandbox_access", "aggregate_metrics", "reverify_mode", "mcp",
})  # fmt: skip
"""Routes of every server, never tools."""
_TOOL = re.compile(r"[A-Za-z0-9_-]{1,128}")


class NemoGymServer(SessionHost):
    """RESTART_ONLY. The server's own session is begun with the first request."""

    def __init__(self, url: str, *, timeout_s: float, token_env: str = "") -> None:
        super().__init__(self._session, mode=CheckpointMode.RESTART_ONLY, replayable=False)
        self._url = checked_url(url, "a NeMo Gym server")
        self._timeout_s, self._token_env = timeout_s, token_env
        self._client: ClientSession | None = None

    def _session(self, task: bytes, seed: int) -> Session:
        return _Seeded(self, json.loads(task))

    async def post(self, route: str, body: object, cookies: dict[str, str]) -> tuple[int, str]:
        """Status and text; `cookies` are sent and brought up to date. Raises `OutcomeUnknown`, and `HostFailed` for an
        error of the server."""
        client = self._client = self._client or ClientSession(cookie_jar=DummyCookieJar())
        token = token_from(self._token_env)
        try:
            async with client.post(
                f"{self._url}/{route}",
                json=body,
                cookies=cookies,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=ClientTimeout(total=self._timeout_s),
                allow_redirects=False,
            ) as answer:
                text = await answer.text()
                cookies.update({name: morsel.value for name, morsel in answer.cookies.items()})
                status = answer.status
        except (ClientError, TimeoutError, OSError) as error:
            raise OutcomeUnknown(
                f"{route} at {self._url}: {error!r}", expected="an answer", action="nothing: the rollout starts over"
            ) from error
        if status >= 500 or 300 <= status < 400:
            raise _failed(f"{route} at {self._url} answered {status}: {text[:200]}", "an answer or a refusal")
        return status, text

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class _Seeded(Session):
    def __init__(self, server: NemoGymServer, task: dict[str, Any]) -> None:
        self._server, self._task = server, task
        self._cookies: dict[str, str] = {}
        self._seeded = False
        tools: list[dict[str, Any]] = task["responses_create_params"].get("tools") or []
        self._tools = {name for tool in tools if _TOOL.fullmatch(name := str(tool.get("name")))} - RESERVED

    async def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        if operation != "verify" and operation not in self._tools:
            raise ToolError(f"no tool {operation!r}; there are {', '.join(sorted(self._tools)) or 'none'}")
        if not self._seeded:
            await self._sure("seed_session", self._task)
            self._seeded = True
        if operation == "verify":
            return _reward(await self._sure("verify", {**self._task, "response": self._response(arguments["output"])}))
        _, text = await self._server.post(operation, arguments, self._cookies)
        return text

    async def _sure(self, route: str, body: dict[str, Any]) -> str:
        """Of routes that no answer of the policy may make fail."""
        status, text = await self._server.post(route, body, self._cookies)
        if status >= 400:
            raise _failed(f"{route} answered {status}: {text[:200]}", "a task that the server takes")
        return text

    def _response(self, output: list[Any]) -> dict[str, Any]:
        """The rollout as the answer of a model to the task."""
        return {
            "id": "resp_0",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._task["responses_create_params"].get("tools") or [],
        }


def _reward(text: str) -> dict[str, Any]:
    """What is kept of a verification. One that measured nothing is no reward: raises `HostFailed`."""
    try:
        said: dict[str, Any] = json.loads(text)
        reward, masked = said["reward"], said.get("mask_sample", False)
        if isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward) and not masked:
            return {"reward": float(reward)}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _failed(f"verify answered {text[:200]}", "an object with a reward") from error
    raise _failed(f"verify answered the reward {reward}, masked {masked}", "a finite reward that counts")


def _failed(found: str, expected: str) -> HostFailed:
    return HostFailed(found, expected=expected, action="see the log of the server; the attempt is tried again")
