"""What rollout control costs: reserve, dispatch, seal, complete, lease, commit, with the journal on a local disk.

    python benchmarks/rollout.py [--json] [--groups 50000] [--siblings 8] [--batch 64] [--tokens 0] [--folder DIR]

Everything runs in one process: the real manager with its committer thread, a worker loop that takes attempts and
reports them finished at once (generation does nothing), and a driver loop that leases, commits and publishes a version
each step. The journal is durable: each slot is written, synced and linked. With `--tokens N` each rollout also carries
N generated tokens, which are encoded and travel to storage inside the journal, as those of short rollouts do.

    cpu_us_per_group   CPU time of the whole process (all threads) per group trained, in microseconds
    groups_per_s       groups trained per second of wall time
    peak_rss_mb        largest resident size of the process, MiB; `rss_growth_mb` is its growth over the measured part
    raw_cpu_us         the raw limit beside it: CPU of encoding and storing the same journal bytes again, per group
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gpu.rollout.committer import FlushSettings
from gpu.rollout.engine_control import EngineControl
from gpu.rollout.limits import Limits, Order, Submission
from gpu.rollout.manager import ManagerSettings, RolloutManager, open_manager
from gpu.rollout.messages import Caller, Dispatch, Ended, Outcome, Report
from gpu.rollout.results import keep_all
from storage.clock import SystemClock
from storage.journal import read_journal
from storage.ledger import Policy
from storage.local import LocalStore
from storage.payload import TurnRow, VersionSpan, encode_block
from storage.runs import create_run, make_run
from storage.segment import encode_segment

RUN = "bench"
WORKER = "w"
PROMPT = 8


class InstantEngines(EngineControl):
    """Serves a published version at once."""

    names = ("e",)

    def __init__(self) -> None:
        self.manager: RolloutManager | None = None

    async def activate(self, policy: Policy) -> None:
        assert self.manager is not None
        self.manager.serve(policy.number)


def make_limits(siblings: int, batch: int) -> Limits:
    groups = 4 * batch
    return Limits(
        num_siblings=siblings,
        batch=batch,
        staleness=2,
        submission=Submission.SAMPLE,
        order=Order.FIFO,
        max_executing=groups * siblings,
        max_retained=groups,
        max_completed=groups,
        max_hot_bytes=64 << 20,
        eviction_cap=None,
        prefetch=0,
        max_backoff=batch,
        max_attempts=5,
        max_losses=20,
        backoff_base_s=0.5,
        backoff_max_s=60.0,
        undurable_age_s=10.0,
        undurable_bytes=64 << 20,
        discard_end_of_source=False,
    )


class Bench:
    def __init__(self, folder: Path, siblings: int, batch: int, tokens: int) -> None:
        self.batch, self.tokens = batch, tokens
        self.store = LocalStore(folder)
        info = make_run(run=RUN, created=0.0, num_siblings=siblings, staleness=2, fingerprints={}, settings={})
        create_run(self.store, info)
        self.manager = open_manager(
            self.store,
            info,
            make_limits(siblings, batch),
            SystemClock(),
            ManagerSettings(FlushSettings(0.25, 4 << 20, 5.0), 60.0, 300.0),
            owner="bench",
            reason="start",
            length=None,
            group_filter=keep_all,
        )
        engines = InstantEngines()
        engines.manager, self.manager.engines = self.manager, engines
        self.blocks = 0

    # ------------------------------------------------------------------ the parts around the manager

    async def work(self) -> None:
        """A worker whose rollouts end at once."""
        incarnation = self.manager.incarnation
        while True:
            work = await self.manager.take(incarnation, WORKER, 1 << 20, 5.0)
            for start in range(0, len(work.dispatches), 128):
                await self.manager.report(incarnation, self.finished(work.dispatches[start : start + 128]))

    def finished(self, dispatches: list[Dispatch]) -> Report:
        self.blocks += 1
        ended = tuple(
            Ended(dispatch.identity, Outcome.SEALED, row, max(1, self.tokens), dispatch.version, 1.0)
            for row, dispatch in enumerate(dispatches)
        )
        name = f"{self.manager.incarnation:06d}-{WORKER}-{self.blocks:08d}"
        if not self.tokens:
            return Report(WORKER, name, "0" * 64, 0, None, (), ended)
        block = encode_block(name, [self.row(dispatch) for dispatch in dispatches])
        return Report(WORKER, block.name, block.digest, len(block.data), block.data, (), ended)

    def row(self, dispatch: Dispatch) -> TurnRow:
        one, size = dispatch.identity, PROMPT + self.tokens
        mask = np.zeros(size, np.int8)
        mask[PROMPT:] = 1
        span = VersionSpan(one.incarnation, dispatch.version, self.tokens)
        return TurnRow(one.group, one.sibling, one.attempt, 0, 0, np.arange(size, dtype=np.int32),
                       np.zeros(size, np.float32), mask, (span,), True, 1.0, "")  # fmt: skip

    async def train(self, caller: Caller, groups: int) -> None:
        """A driver that trains in no time."""
        done = 0
        while done < groups:
            grant = await self.manager.lease(caller, 60.0)
            assert grant is not None
            step = self.manager.control.ledger.step + 1
            await self.manager.commit(caller, grant.lease.lease, step, f"state-{step}", f"weights-{step}", {})
            await self.update(caller, f"weights-{step}")
            done += len(grant.lease.groups)

    async def update(self, caller: Caller, digest: str) -> None:
        hold = await self.manager.acquire(caller, "update", 60.0)
        await self.manager.publish_policy(caller, digest)
        await self.manager.activate(caller, hold)
        await self.manager.release(caller, hold.hold)

    # ------------------------------------------------------------------ measuring

    async def measure(self, groups: int) -> dict[str, float]:
        self.manager.start()
        worker = asyncio.create_task(self.work())
        try:
            caller = (await self.manager.attach("bench", False, f"here:{os.getpid()}")).caller
            await self.update(caller, "weights-0")
            await self.train(caller, max(self.batch, groups // 10))
            rss, cpu, wall = resident_mb(), time.process_time(), time.perf_counter()
            before = len(self.manager.control.ledger.consumed)
            await self.train(caller, groups)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            trained = len(self.manager.control.ledger.consumed) - before
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
            await self.manager.stop()
        return {
            "cpu_us_per_group": cpu / trained * 1e6,
            "groups_per_s": trained / wall,
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "rss_growth_mb": resident_mb() - rss,
            "groups": trained,
        }

    def raw(self, folder: Path) -> dict[str, float]:
        """Encode and store the same slots again, without any control around it."""
        other = LocalStore(folder)
        segments = list(read_journal(self.store, RUN))
        groups = len(self.manager.control.ledger.consumed)
        cpu, size = time.process_time(), 0
        for segment in segments:
            data, _ = encode_segment(segment.header, segment.rows)
            other.create(f"{RUN}/{segment.header.slot:08d}", data)
            size += len(data)
        cpu = time.process_time() - cpu
        return {
            "raw_cpu_us": cpu / groups * 1e6,
            "journal_bytes_per_group": size / groups,
            "records_per_group": sum(len(segment.rows) for segment in segments) / groups,
            "slots": len(segments),
        }


def resident_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def machine() -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--groups", type=int, default=50_000)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="groups per step")
    parser.add_argument("--tokens", type=int, default=0, help="generated tokens of a rollout")
    parser.add_argument("--folder", type=Path, help="where the journal is written; a temporary folder otherwise")
    parsed = parser.parse_args()
    for name in ("groups", "siblings", "batch"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} must be at least 1")
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-", dir=parsed.folder))
    try:
        bench = Bench(folder / "a", parsed.siblings, parsed.batch, parsed.tokens)
        found: dict[str, object] = {**asyncio.run(bench.measure(parsed.groups)), **bench.raw(folder / "b")}
    finally:
        shutil.rmtree(folder)
    rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}
    result = {**rounded, "siblings": parsed.siblings, "batch": parsed.batch, "tokens": parsed.tokens,
              "machine": machine()}  # fmt: skip
    if parsed.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:26} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
