"""Looks at all runs of a Ray cluster for a test, in a process of its own: one that has imported Ray before its settings
were made cannot connect. Prints one line of JSON after another: what each named process is, and what managers say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ray

from gpu.actors import Remote, find_actor
from gpu.cluster import connect
from storage.errors import ActorLost

EVERY_S = 0.05


async def look() -> list[dict[str, Any]]:
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return [await about(one["namespace"], *one["name"].rsplit("/", 1)) for one in named]


async def about(namespace: str, run: str, process: str) -> dict[str, Any]:
    found: dict[str, Any] = {"namespace": namespace, "run": run, "process": process}
    if process == "manager":
        try:
            async with asyncio.timeout(1.0):
                found.update(await Remote(process, find_actor(namespace, run, process)).status())
        except (ActorLost, TimeoutError):
            pass
    return found


async def main() -> None:
    connect("auto", "observer")
    while True:
        print(json.dumps(await look(), default=str), flush=True)
        await asyncio.sleep(EVERY_S)


if __name__ == "__main__":
    asyncio.run(main())
