"""One attempt of a flow run, as a process: what Prefect would start, without Prefect. Says each thing that happens.

Exit codes: 0 the run is finished, 3 a process of the run was lost (retry), 4 fenced, 5 the store did not answer
(retry), 1 or 2 any other typed error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from flows.config import RunConfig
from gpu.cluster import RayCluster, connect
from gpu.prepare import preflight
from storage.errors import ActorLost, DeadlineExceeded, RunFenced, StoreError, TidegateError
from tasks.run import open_session
from tasks.session import begin, session
from tasks.watch import watched
from tests.faults.house import drive

FINISHED, LOST, FENCED, STORE = 0, 3, 4, 5
Say = Callable[..., None]


def main(config: RunConfig, attempt: int, log: str, sink: Connection) -> None:
    """The body of the process; its standard error goes to `log`, what it says to `sink`."""
    with open(log, "ab") as err:
        os.dup2(err.fileno(), sys.stderr.fileno())
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    def say(**values: Any) -> None:
        sink.send_bytes(msgspec.json.encode(values))

    try:
        code = asyncio.run(_drive(config, attempt, say))
    except TidegateError as error:
        say(error=str(error), kind=type(error).__name__)
        code = _code(error)
    sys.exit(code)


def _code(error: TidegateError) -> int:
    if isinstance(error, RunFenced):
        return FENCED
    if isinstance(error, ActorLost | DeadlineExceeded):
        return LOST
    return STORE if isinstance(error, StoreError) else error.exit_code


async def _drive(config: RunConfig, attempt: int, say: Say) -> int:
    spec = config.spec(config.run)
    await asyncio.to_thread(preflight, spec)
    connect(spec.ray_address, spec.namespace)
    begin()
    opened = await open_session(spec, RayCluster(spec), "flow-run", attempt=attempt)
    say(opened=opened.token, incarnation=opened.incarnation)
    if not opened.finished:
        await watched(session(), drive(spec, lambda resumed: say(resumed=resumed), lambda step: say(step=step)))
    with contextlib.suppress(ActorLost):
        await RayCluster(spec).close()
    return FINISHED
