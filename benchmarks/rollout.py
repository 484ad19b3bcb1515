"""What rollout control costs: reserve, dispatch, seal, complete, lease, commit, with the journal on a local disk.

    python benchmarks/rollout.py [--json] [--groups 1000000] [--siblings 8] [--batch 256] [--tokens 0] [--folder DIR]

In process: the real manager with its committer thread, a worker loop that takes attempts and reports them finished at
once (generation does nothing), and a driver loop that leases, commits and publishes a version each step and a
checkpoint's record every tenth. The journal is durable: each slot is written, synced and linked. With `--tokens N` each
rollout also carries N generated tokens, which are encoded and travel to storage inside the journal. Each submission
policy runs in a process of its own:

    cpu_us_per_group   CPU time of the whole process (all threads) per group trained, in microseconds
    raw_cpu_us         the raw limit beside it: CPU of encoding and storing the same journal bytes again, per group
    groups_per_s       groups trained per second of wall time
    rss_growth_mb      growth of the resident size from a tenth of the groups to the end, MiB; peak_rss_mb the largest
    hold_ms            acquiring and releasing a hold over 10,000 live executions, median, milliseconds

`actor_groups_per_s`: the same chain through Ray, manager and worker as actors, calls batched as the product's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: a script of it has the name of a package

from benchmarks.machine import machine
from benchmarks.rollout_parts import RUN, NoopDriver, NoopWorker, make_limits, make_manager, resident_mb, stop
from gpu.collector import collect_by_the_clock
from gpu.rollout.limits import Submission
from storage.history import read_all
from storage.local import LocalStore
from storage.segment import encode_segment

HELD = 10_000
RAW_SLOTS = 500


async def measure(folder: Path, parsed: argparse.Namespace) -> dict[str, float]:
    """One policy: the whole chain for so many groups, after a tenth of them as warm-up."""
    manager = make_manager(LocalStore(folder), make_limits(parsed.siblings, parsed.batch, Submission(parsed.policy)))
    manager.start()
    collector = asyncio.create_task(collect_by_the_clock())
    worker = asyncio.create_task(NoopWorker("w", manager, manager.incarnation, parsed.tokens).run())
    try:
        driver = NoopDriver(manager, (await manager.attach("bench", False, f"here:{os.getpid()}")).caller)
        await driver.update()
        await driver.train(max(parsed.batch, parsed.groups // 10))
        rss, cpu, wall = resident_mb(), time.process_time(), time.perf_counter()
        trained = await driver.train(parsed.groups - parsed.groups // 10)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    finally:
        await stop(manager, worker, collector)
    return {
        "cpu_us_per_group": cpu / trained * 1e6,
        "groups_per_s": trained / wall,
        "rss_growth_mb": resident_mb() - rss,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "groups": trained,
    }


def raw(source: Path, folder: Path) -> dict[str, float]:
    """Encode and store slots of that journal again, without any control around it."""
    store, other = LocalStore(source), LocalStore(folder)
    groups = cpu = size = rows = slots = 0
    for segment in read_all(store, RUN):
        started = time.process_time_ns()
        data, _ = encode_segment(segment.header, segment.rows)
        other.create(f"{RUN}/{segment.header.slot:08d}", data)
        cpu += time.process_time_ns() - started
        groups += sum(len(getattr(row.record, "groups", ())) for row in segment.rows if _issued(row.record))
        size, rows, slots = size + len(data), rows + len(segment.rows), slots + 1
        if slots == RAW_SLOTS:
            break
    return {
        "raw_cpu_us": cpu / groups / 1e3,
        "journal_bytes_per_group": size / groups,
        "records_per_group": rows / groups,
        "slots_per_1000_groups": slots / groups * 1000,
    }


def _issued(record: object) -> bool:
    return type(record).__name__ == "LeaseIssued"


async def hold_ms(folder: Path, siblings: int, submission: Submission) -> float:
    """With at least `HELD` live executions; none of them ends while it is measured."""
    batch = -(-HELD // siblings // 3)  # a staleness bound of 2 admits three batches
    manager = make_manager(LocalStore(folder), make_limits(siblings, batch + 1, submission))
    manager.start()
    try:
        caller = (await manager.attach("bench", False, f"here:{os.getpid()}")).caller
        await NoopDriver(manager, caller).update()
        work = await manager.take(manager.incarnation, "w", 1 << 20, 5.0)
        assert len(work.dispatches) >= HELD
        taken: list[float] = []
        for _ in range(101):
            started = time.perf_counter()
            hold = await manager.acquire(caller, "measure", 60.0)
            await manager.release(caller, hold.hold)
            taken.append(time.perf_counter() - started)
            assert hold.frontier >= HELD
        return statistics.median(taken) * 1e3
    finally:
        await stop(manager)


def one_policy(parsed: argparse.Namespace) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-", dir=parsed.folder))
    try:
        found = asyncio.run(measure(folder / "a", parsed))
        found |= raw(folder / "a", folder / "b")
        found["hold_ms"] = asyncio.run(hold_ms(folder / "c", parsed.siblings, Submission(parsed.policy)))
        return found
    finally:
        shutil.rmtree(folder)


def actors(parsed: argparse.Namespace) -> dict[str, float]:
    from benchmarks.rollout_actors import measure_actors

    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-", dir=parsed.folder))
    try:
        return measure_actors(folder, parsed.siblings, parsed.batch, parsed.tokens, min(parsed.groups, 20_000))
    finally:
        shutil.rmtree(folder)


def whole(arguments: list[str]) -> dict[str, Any]:
    """Each part in a process of its own, so that none sees the memory of another."""
    found: dict[str, Any] = {}
    for part in ("sample", "group", "actors"):
        command = [sys.executable, __file__, "--policy", part, "--json", *arguments]
        said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        result = json.loads(said.strip().splitlines()[-1])
        found |= result if part == "actors" else {part: result}
    return found


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--policy", choices=("sample", "group", "actors"), help="only this part, in this process")
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256, help="groups per step")
    parser.add_argument("--tokens", type=int, default=0, help="generated tokens of a rollout")
    parser.add_argument("--folder", type=Path, help="where the journal is written; a temporary folder otherwise")
    parsed = parser.parse_args()
    for name in ("groups", "siblings", "batch"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if parsed.policy:
        print(json.dumps(rounded(actors(parsed) if parsed.policy == "actors" else one_policy(parsed))))
        return 0
    given = [argument for argument in sys.argv[1:] if argument != "--json"]
    result = {**whole(given), "siblings": parsed.siblings, "batch": parsed.batch, "tokens": parsed.tokens,
              "machine": machine()}  # fmt: skip
    if parsed.json:
        print(json.dumps(result))
        return 0
    for key, value in result.items():
        print(key if isinstance(value, dict) else f"{key:26} {value}")
        for name, one in value.items() if isinstance(value, dict) else ():
            print(f"    {name:22} {one}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
