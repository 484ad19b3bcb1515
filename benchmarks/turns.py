"""What a boundary costs: each finished turn of thousands of live rollouts is durable when it ends.

    python benchmarks/turns.py [--json] [--rollouts 2048] [--turns 20] [--tokens 512] [--folder DIR]

The real worker reports the turns of all rollouts to the real manager, journal on a local disk; a turn is 512 tokens, of
which 64 are the environment's answer to the turn before. Everything is durable before the next turn begins.

    bytes_ratio          bytes written per turn / its payload (512 ids, logprobs and mask bytes: 4,608 bytes)
    cpu_us_per_boundary  CPU of the whole process (all threads) per turn, from the finished turn on: encoding, report,
                         ledger, segment, files
    acting               the same where each turn changes a resource once: the answer, the intent, the reply, the
                         completed turn and an export of 64 bytes are recorded; per turn, which has two boundaries
    max_wait_ms          a whole run in one process, a checkpoint every step, while a tool call of 60 s goes on: how
                         long any other rollout could have waited, from the hold to its release
    rewrite_bytes_ratio  writing all live conversations as JSON at that moment / writing what one new turn each adds
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: a script of it has the name of a package

from benchmarks.machine import machine
from benchmarks.rollout_parts import make_limits, make_manager, stop
from benchmarks.turns_parts import SIBLINGS, Reporting, Talk, measure_waits, rewritten
from gpu.rollout.limits import Submission
from storage.local import LocalStore

BYTES_PER_TOKEN = 9
TOOL_S = 60.0


async def measure_boundaries(folder: Path, rollouts: int, turns: int, tokens: int, *, acting: bool) -> dict[str, float]:
    """Bytes and CPU per turn, and what the conversations come to as JSON after the last one."""
    manager = make_manager(LocalStore(folder), make_limits(SIBLINGS, rollouts // SIBLINGS, Submission.SAMPLE))
    manager.start()
    reporting = Reporting(manager, LocalStore(folder))
    try:
        caller = (await manager.attach("bench", False, "here")).caller
        await manager.publish_policy(caller, "weights-0")
        manager.serve(0)
        talks = [Talk(dispatch, tokens) for dispatch in await reporting.take(rollouts)]
        await reporting.durable(0)
        written, cpu, wall = size_of(folder), 0.0, 0.0
        for number in range(1, turns + 1):
            spoken = [talk.speak() for talk in talks]
            before, started = time.process_time(), time.perf_counter()
            reporting.report(spoken, acting=acting)
            await reporting.durable(number * rollouts)
            cpu, wall = cpu + time.process_time() - before, wall + time.perf_counter() - started
        written = size_of(folder) - written
    finally:
        await stop(manager, reporting.task)
    count = rollouts * turns
    whole, seconds = rewritten(talks)
    return {
        "bytes_ratio": written / (count * tokens * BYTES_PER_TOKEN),
        "cpu_us_per_boundary": cpu / count * 1e6,
        "turns_per_s": count / wall,
        "rewrite_bytes_ratio": whole / (written / turns),
        "rewrite_s": seconds,
    }


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--rollouts", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40, help="checkpoints while the tool call goes on")
    parser.add_argument("--folder", default=None, help="where it writes; a temporary folder otherwise")
    parsed = parser.parse_args()
    if parsed.rollouts < SIBLINGS or parsed.rollouts % SIBLINGS or parsed.turns < 1 or parsed.tokens <= Talk.ANSWER:
        parser.error(f"--rollouts is a multiple of {SIBLINGS}, --turns at least 1, --tokens above {Talk.ANSWER}")
    return parsed


async def measure(folder: Path, parsed: argparse.Namespace) -> dict[str, Any]:
    sizes = (parsed.rollouts, parsed.turns, parsed.tokens)
    found: dict[str, Any] = await measure_boundaries(folder / "turns", *sizes, acting=False)
    acting = await measure_boundaries(folder / "acting", *sizes, acting=True)
    waits, tool_s = await measure_waits(folder / "waits", parsed.steps, TOOL_S)
    return found | {
        "acting": {name: acting[name] for name in ("bytes_ratio", "cpu_us_per_boundary", "turns_per_s")},
        "max_wait_ms": max(waits) * 1e3,
        "median_wait_ms": statistics.median(waits) * 1e3,
        "checkpoints": len(waits),
        "tool_call_s": tool_s,
        "machine": machine(),
    }


def main() -> None:
    parsed = parse_arguments()
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-", dir=parsed.folder))
    try:
        print(json.dumps(asyncio.run(measure(folder, parsed)), indent=None if parsed.json else 2))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
