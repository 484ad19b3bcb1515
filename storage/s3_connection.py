"""The connection of a process to S3: an s3fs file system that neither retries nor caches, opened at first use."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# (s3fs and fsspec have no stubs)

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from fsspec.asyn import sync

from storage.credentials import resolve
from storage.s3_location import S3Location

SEND_AT_ONCE_BYTES = 1 << 20

T = TypeVar("T")
Request = Callable[[Any], Awaitable[T]]
"""A request on an s3fs file system, on its event loop."""


@dataclass(frozen=True, slots=True)
class S3Limits:
    """Seconds: `deadline_s` bounds a whole call, `request_s` one request of it (plus its bytes at `slowest_bytes_s`, by
    which both grow), `connect_s` its connection. Between tries lie up to `backoff_s`. `page`: keys per list or delete
    request."""

    deadline_s: float = 60.0
    request_s: float = 15.0
    connect_s: float = 5.0
    backoff_s: float = 5.0
    slowest_bytes_s: float = 1 << 20
    connections: int = 16
    page: int = 1000


class S3Connection:
    """Thread-safe; after a fork it connects anew."""

    def __init__(self, location: S3Location, limits: S3Limits) -> None:
        self._location, self._limits = location, limits
        self._fs: Any = None
        self._pid = 0
        self._lock = threading.Lock()

    def run(self, request: Request[T], seconds: float) -> T:
        """One request, cut off after `seconds`. A PUT that is cut off may still be applied."""
        filesystem = self._connect()

        async def bounded() -> T:
            async with asyncio.timeout(seconds):
                return await request(filesystem)

        return cast("T", sync(filesystem.loop, bounded))

    def drop(self) -> None:
        """The next request asks for credentials anew."""
        with self._lock:
            self._fs = None

    def _connect(self) -> Any:
        with self._lock:
            if self._fs is None or self._pid != os.getpid():
                self._fs, self._pid = self._open(), os.getpid()
            return self._fs

    def _open(self) -> Any:
        import s3fs  # takes a second, and a run on a file system needs none of it
        from aiobotocore.session import get_session

        session = get_session()
        session.register_component("data_loader", _service_model())
        where, limits = self._location, self._limits
        keys: dict[str, Any] = {}
        if where.credentials:
            found = resolve(where.credentials)
            keys = {"key": found.key, "secret": found.secret, "token": found.token}
        filesystem = s3fs.S3FileSystem(
            endpoint_url=where.endpoint or None,
            client_kwargs={"region_name": where.region} if where.region else {},
            config_kwargs={
                "connect_timeout": limits.connect_s,
                "read_timeout": limits.request_s,
                "max_pool_connections": limits.connections,
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                # The sha256 that each PUT carries protects it; signing hashes the body a second time on the event loop.
                "s3": {"payload_signing_enabled": False},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_supported",
            },
            use_listings_cache=False,  # it never expires, and hides what other processes write
            skip_instance_cache=True,
            session=session,
            **keys,
        )
        filesystem.retries = 1
        client: Any = filesystem.s3
        client.meta.events.register_last("before-call.s3.PutObject", _send_at_once)
        return filesystem


@cache
def _service_model() -> Any:
    """The description of the S3 API, which takes longer to read than most requests; it holds no state of a store."""
    from botocore.loaders import create_loader

    return create_loader()


def _send_at_once(params: dict[str, Any], **_: object) -> None:
    """A small body is sent with its header: waiting for `100 Continue` first would double each commit's latency."""
    if len(params["body"].getbuffer()) <= SEND_AT_ONCE_BYTES:
        params["headers"].pop("Expect", None)
