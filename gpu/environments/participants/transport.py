"""One connection of a run to an external host: messages there, answers or the refusals as errors back.

What may be repeated is repeated with backoff while no answer comes. A change is sent once: without its answer it is
`OutcomeUnknown`, whatever the transport said.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout

from gpu.environments.participants import wire
from gpu.environments.participants.address import checked_url, token_from
from gpu.environments.participants.errors import HostUnreachable, MessageInvalid, OutcomeUnknown
from storage.errors import ConfigurationRefused, SchemaUnsupported

log = logging.getLogger(__name__)
BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 1.0

Kind = TypeVar("Kind", bound=wire.Answer)


class Transport:
    """To the host that calls itself `name`. `token_env` names the environment variable with its bearer token;
    `timeout_s` is for one try, `patience_s` for all tries of what may be repeated."""

    def __init__(
        self, url: str, name: str, *, token_env: str = "", timeout_s: float = 60.0, patience_s: float = 120.0
    ) -> None:
        self.name, self.url = name, checked_url(url, f"host {name}")
        self._token_env, self._timeout_s, self._patience_s = token_env, timeout_s, patience_s
        self._session: ClientSession | None = None

    async def change(self, path: str, message: wire.Message, kind: type[Kind]) -> Kind:
        """Once. Raises `OutcomeUnknown` when no answer comes, and what the host refuses with."""
        try:
            return await self._once(path, message, kind, self._timeout_s)
        except HostUnreachable as error:
            raise OutcomeUnknown(
                f"{path} was sent to {self.name}, and then: {error.found}",
                expected="an answer",
                action="ask for the standing of the request; do not send it again",
            ) from error

    async def ask(
        self, path: str, message: wire.Message | None, kind: type[Kind], *, patience_s: float | None = None
    ) -> Kind:
        """What changes nothing, or nothing more when it is repeated. Raises `HostUnreachable`."""
        patience = self._patience_s if patience_s is None else patience_s
        until = time.monotonic() + patience
        tries = 0
        while True:
            left = max(0.001, until - time.monotonic())
            try:
                return await self._once(path, message, kind, min(self._timeout_s, left))
            except HostUnreachable as error:
                wait = min(LONGEST_BACKOFF_S, BACKOFF_S * 2.0**tries)
                tries += 1
                if time.monotonic() + wait >= until:
                    raise
                log.info("op=ask host=%s path=%s decision=again_in_%.2fs reason=%s", self.name, path, wait, error.found)
                await asyncio.sleep(wait)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _once(self, path: str, message: wire.Message | None, kind: type[Kind], timeout_s: float) -> Kind:
        session = self._session = self._session or ClientSession()
        token = token_from(self._token_env)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with session.request(
                "GET" if message is None else "POST",
                f"{self.url}/v1/{path}",
                data=wire.encode(message) if message is not None else None,
                headers=headers,
                timeout=ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                status, body = response.status, await response.read()
        except (ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(path, repr(error)) from error
        try:
            answer = wire.decode(body, kind if status == 200 else wire.Failure)
        except (MessageInvalid, SchemaUnsupported) as error:
            if status == 200 and isinstance(error, SchemaUnsupported):
                raise
            raise self._unreachable(path, f"status {status}, {error.found}") from error  # somebody in between
        if answer.instance.name != self.name:
            raise ConfigurationRefused(
                f"{self.url} is {answer.instance}",
                expected=self.name,
                action="correct the url or the name of the host",
                code="host_name",
            )
        if isinstance(answer, wire.Failure):
            raise wire.raised(answer)
        assert isinstance(answer, kind), "decoded as such"
        return answer

    def _unreachable(self, path: str, why: str) -> HostUnreachable:
        return HostUnreachable(
            f"{self.name} at {self.url}, {path}: {why}",
            expected="an answer of that host",
            action="see whether it runs, and what is between",
        )
