"""One attempt of a flow run, as a process: what Prefect would start, without Prefect. Prints a JSON line for each thing
that happens.

Exit codes: 0 the run is finished, 3 a process of the run was lost (retry), 4 fenced, 5 the store did not answer
(retry), 1 or 2 any other typed error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from typing import Any

import msgspec

from flows.config import RunConfig
from flows.settings import apply
from storage.errors import ActorLost, DeadlineExceeded, RunFenced, StoreError, TidegateError

FINISHED, LOST, FENCED, STORE = 0, 3, 4, 5


def main() -> int:
    config = RunConfig.model_validate(json.loads(sys.argv[1]))
    apply()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        return asyncio.run(_drive(config))
    except TidegateError as error:
        say(error=str(error), kind=type(error).__name__)
        return _code(error)


def say(**values: Any) -> None:
    """One line for whoever started this process."""
    print(msgspec.json.encode(values).decode(), flush=True)


def _code(error: TidegateError) -> int:
    if isinstance(error, RunFenced):
        return FENCED
    if isinstance(error, ActorLost | DeadlineExceeded):
        return LOST
    return STORE if isinstance(error, StoreError) else error.exit_code


async def _drive(config: RunConfig) -> int:
    from gpu.cluster import RayCluster, connect
    from gpu.prepare import preflight
    from tasks.run import open_session
    from tasks.session import begin, session
    from tasks.watch import watched
    from tests.faults.house import drive

    spec = config.spec(config.run)
    await asyncio.to_thread(preflight, spec)
    connect(spec.ray_address, spec.namespace)
    begin()
    opened = await open_session(spec, RayCluster(spec), "flow-run")
    say(opened=opened.token, incarnation=opened.incarnation)
    if not opened.finished:
        await watched(session(), drive(spec, lambda resumed: say(resumed=resumed), lambda step: say(step=step)))
    with contextlib.suppress(ActorLost):
        await RayCluster(spec).close()
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
