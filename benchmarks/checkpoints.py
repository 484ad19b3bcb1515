"""What a checkpoint costs: the capture under the hold, the upload beside training, and what is not uploaded again.

    python benchmarks/checkpoints.py [--json] [--pairs 5] [--scale 1.0] [--folder DIR]

A state of 566 MB in 217 bfloat16 tensors of random bytes, captured into shards of 32 MB and published by the product's
own process. Stores: `local`, files with fsync; `s3`, a SeaweedFS server on this machine. Each part runs in a process of
its own.

    capture_s          copying the state into the buffers of the last capture, median; memcpy_s beside it copies as many
                       bytes into memory that was touched before; first_capture_s also makes the buffers
    upload_ratio       rate of a full publication / rate of the raw limit, median of interleaved pairs; raw is a process
                       that creates the same shards with the same client, as many at once; full_s, raw_s: their medians
    dedup_ratio        seconds of a full publication / seconds when a tenth of the shards has changed (changed_s),
                       median of interleaved pairs
    unchanged_bytes    written when nothing has changed, and unchanged_s
    peak_extra_mb      what trainer and publishing process hold at most above the state, in MB; process_mb of it is the
                       idle process; state_mb the state
    lag_ms             the longest that an asyncio loop of the trainer's process woke up late: idle, during captures,
                       during an upload; step_ms the longest step of a thread that multiplies matrices there (and p99)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: a script of it has the name of a package

import numpy as np

from benchmarks.checkpoints_parts import Peak, RawClient, State, change, lags, make_state, memory_mb, training
from benchmarks.machine import machine
from flows.seaweed import exported, running_seaweed
from storage.buffers import tensor_digests
from storage.capture import Capture, CaptureBuffers, capture_of
from storage.checkpoint import Written
from storage.opening import open_store
from storage.publisher import Newest
from storage.publisher_process import PublisherProcess

CHANGED = 0.1
CAPTURES = 7
IDLE_S = 2.0


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def take(state: State, buffers: CaptureBuffers, step: int = 1, digests: dict[str, str] | None = None) -> Capture:
    """As the trainer does it, which knows the digests of its tensors from the step before. Without them every shard is
    hashed, as one that has changed."""
    return capture_of(step, "state", "weights", "{}", state, digests or {}, buffers)


@contextlib.contextmanager
def store_url(kind: str, folder: Path) -> Generator[str]:
    if kind == "local":
        yield str(folder / "store")
        return
    with running_seaweed(folder) as (server, _), exported(server):
        yield server.url("bench")


def capture_cost(parsed: argparse.Namespace) -> dict[str, float]:
    """`capture_s` and its raw limit, one after the other."""
    state, buffers = make_state(parsed.scale), CaptureBuffers()
    source = np.concatenate([buffer.data for buffer in state.values()])
    target = np.ones(len(source), np.uint8)
    first = timed(lambda: take(state, buffers))
    captures, copies = [], []
    for _ in range(CAPTURES):
        captures.append(timed(lambda: take(state, buffers)))
        copies.append(timed(lambda: np.copyto(target, source)))
    return {
        "capture_s": statistics.median(captures),
        "memcpy_s": statistics.median(copies),
        "first_capture_s": first,
        "state_mb": len(source) / 1e6,
    }


def upload_rate(url: str, state: State, parsed: argparse.Namespace) -> dict[str, float]:
    """Full publications and raw puts in turn."""
    capture = take(state, CaptureBuffers())
    publisher, raw = PublisherProcess(url), RawClient(url, capture)
    ours: list[float] = []
    limits: list[float] = []
    try:
        publish(publisher, "warm", capture)
        raw.put("raw/warm")
        for pair in range(parsed.pairs):
            forget(url, "runs/warm", "raw/warm", f"runs/{pair - 1}", f"raw/{pair - 1}")
            ours.append(timed(lambda run=str(pair): publish(publisher, run, capture)))
            limits.append(timed(lambda prefix=f"raw/{pair}": raw.put(prefix)))
    finally:
        publisher.close()
        raw.close()
    return {
        "upload_ratio": statistics.median(limit / our for our, limit in zip(ours, limits, strict=True)),
        "full_s": statistics.median(ours),
        "raw_s": statistics.median(limits),
        "shards": len(capture.layout.shards),
    }


def publish(publisher: PublisherProcess, run: str, capture: Capture, newest: Newest | None = None) -> Written:
    return publisher.publish(run, 1, capture, newest)


def timed_publish(
    publisher: PublisherProcess, run: str, capture: Capture, newest: Newest | None = None
) -> tuple[float, Written]:
    started = time.perf_counter()
    written = publish(publisher, run, capture, newest)
    return time.perf_counter() - started, written


def forget(url: str, *prefixes: str) -> None:
    """What was measured leaves the disk."""
    store = open_store(url)
    for prefix in prefixes:
        store.delete(store.list(prefix))


def dedup(url: str, state: State, rounds: int) -> dict[str, float]:
    """Full publications, in turn with those after a tenth of the shards changed and those after nothing did."""
    buffers, publisher = CaptureBuffers(), PublisherProcess(url)
    digests = tensor_digests(state)
    capture = take(state, buffers, 0, digests)
    count = max(1, round(CHANGED * len(capture.layout.shards)))
    full: list[float] = []
    changed: list[float] = []
    unchanged: list[float] = []
    try:
        written = publish(publisher, "dedup", capture)
        for step in range(1, 2 * rounds, 2):
            full.append(timed_publish(publisher, f"full-{step}", capture._replace(digests={}))[0])
            forget(url, f"runs/full-{step}")
            names = change(state, capture, count, step)
            digests = digests | tensor_digests({name: state[name] for name in names})
            capture = take(state, buffers, step, digests)
            seconds, written = timed_publish(publisher, "dedup", capture, Newest(written.name, written.digest))
            changed.append(seconds)
            changed_mb = written.written / 1e6
            capture = take(state, buffers, step + 1, digests)
            seconds, written = timed_publish(publisher, "dedup", capture, Newest(written.name, written.digest))
            unchanged.append(seconds)
    finally:
        publisher.close()
    return {
        "dedup_ratio": statistics.median(whole / part for whole, part in zip(full, changed, strict=True)),
        "changed_s": statistics.median(changed),
        "changed_mb": changed_mb,
        "unchanged_bytes": written.written,
        "unchanged_s": statistics.median(unchanged),
    }


def memory(url: str, state: State) -> dict[str, float]:
    """Above what the trainer holds before its first checkpoint, with the publishing process."""
    publisher = PublisherProcess(url)
    small = {"small": next(buffer for buffer in state.values() if buffer.num_bytes < 1 << 16)}
    try:
        publish(publisher, "small", take(small, CaptureBuffers()))
        assert publisher.pid is not None
        before, process = memory_mb("self", "Anon", "Shmem"), memory_mb(publisher.pid, "Anon")
        with Peak(publisher.pid) as peak:
            buffers = CaptureBuffers()
            for step in range(2):
                publish(publisher, f"memory-{step}", take(state, buffers, step))
    finally:
        publisher.close()
    return {"peak_extra_mb": peak.mb - before, "process_mb": process}


async def lag(url: str, state: State) -> dict[str, Any]:
    """Of a loop and a thread beside the captures and the upload."""
    buffers, publisher = CaptureBuffers(), PublisherProcess(url)
    try:
        capture = take(state, buffers)
        publish(publisher, "lag-warm", capture)
        works: dict[str, Callable[[], object]] = {
            "idle": lambda: time.sleep(IDLE_S),
            "capture": lambda: [take(state, buffers) for _ in range(CAPTURES)],
            "upload": lambda: publish(publisher, "lag", capture),
        }
        found: dict[str, Any] = {"lag_ms": {}, "step_ms": {}, "step_p99_ms": {}}
        with training() as steps:
            for name, work in works.items():
                steps.clear()
                late = await lags(asyncio.ensure_future(asyncio.to_thread(work)))
                found["lag_ms"][name] = round(max(late) * 1e3, 1)
                found["step_ms"][name] = round(max(steps) * 1e3, 1)
                found["step_p99_ms"][name] = round(sorted(steps)[int(len(steps) * 0.99)] * 1e3, 2)
        return found
    finally:
        publisher.close()


def one_store(kind: str, parsed: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-", dir=parsed.folder))
    try:
        with store_url(kind, folder) as url:
            state = make_state(parsed.scale)
            found: dict[str, Any] = memory(url, state)
            forget(url, "runs/memory-0", "runs/memory-1")
            found |= upload_rate(url, state, parsed)
            found |= dedup(url, state, parsed.pairs)
            return found | asyncio.run(lag(url, state))
    finally:
        shutil.rmtree(folder)


def whole(arguments: list[str]) -> dict[str, Any]:
    """Each part in a process of its own, so that none sees the memory of another."""
    found: dict[str, Any] = {}
    for part in ("capture", "local", "s3"):
        command = [sys.executable, __file__, "--part", part, *arguments]
        said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        result = json.loads(said.strip().splitlines()[-1])
        found |= result if part == "capture" else {part: result}
    return found


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--part", choices=("capture", "local", "s3"), help="only this part, in this process")
    parser.add_argument("--pairs", type=int, default=5, help="full publications, each beside its raw limit")
    parser.add_argument("--scale", type=float, default=1.0, help="of every tensor")
    parser.add_argument("--folder", type=Path, help="where stores lie; a temporary folder otherwise")
    parsed = parser.parse_args()
    if parsed.pairs < 1 or not 0 < parsed.scale <= 1:
        parser.error("--pairs must be at least 1, --scale above 0 and at most 1")
    if parsed.part:
        print(json.dumps(rounded(capture_cost(parsed) if parsed.part == "capture" else one_store(parsed.part, parsed))))
        return 0
    given = [argument for argument in sys.argv[1:] if argument != "--json"]
    result = {**whole(given), "cores": os.cpu_count(), "machine": machine()}
    if parsed.json:
        print(json.dumps(result))
        return 0
    for key, value in result.items():
        print(key if isinstance(value, dict) else f"{key:20} {value}")
        for name, one in value.items() if isinstance(value, dict) else ():
            print(f"    {name:16} {one}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
