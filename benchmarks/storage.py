"""What durable state costs, however much there is of it: appending to the journal, restoring from it.

    python benchmarks/storage.py --json

An append goes from 32 finished rollouts of 512 tokens, and 320 changed ledger rows, to the moment they are durable; one
follows the other, while an archivist in a process of its own writes ledger snapshots. `append_p50_ms` and
`append_p99_ms` stand beside `bare_p50_ms`: two creates of the same sizes and nothing else, in turns with the appends.
Rows are the rollouts that the ledger holds. `restore_s` is a claim (find the end, read the newest snapshot, fold what
follows, create a slot) over 10,000 unsettled groups after 1,000,000 trained ones; `read_s` reads the same objects and
does nothing with them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: a script of it has the name of a package

from benchmarks.machine import machine
from benchmarks.storage_parts import RUN, SIBLINGS, Append, Far, HandWritten, bare
from flows.seaweed import exported, running_seaweed
from storage.archivist import Archivist
from storage.clock import SystemClock
from storage.filesystem import Store
from storage.journal import claim, recorded_snapshots
from storage.local import LocalStore
from storage.opening import open_store
from storage.runs import RunPaths

BATCH = 256
FAR_S = 0.03
TAIL = 40
"""Segments after the newest snapshot: half of what there are at most, rounded up."""


def measure_append(store: Store, rows: int, appends: int) -> dict[str, float]:
    """Appends and bare creates in turns, after a tenth of them as warm-up."""
    run = HandWritten(store, archived=True)
    try:
        first = run.dispatch(rows // SIBLINGS).start
        run.flush()
        done: list[Append] = []
        raw: list[float] = []
        for number in range(appends + appends // 10):
            found = run.append(first)
            first += 18
            seconds = bare(store, number, (found.payload, found.segment))
            if number >= appends // 10:
                done.append(found)
                raw.append(seconds)
        return figures([one.seconds for one in done], raw) | {
            "payload_bytes": done[0].payload, "segment_bytes": done[0].segment, "snapshots": run.snapshots,
        }  # fmt: skip
    finally:
        run.close()


def figures(seconds: list[float], raw: list[float]) -> dict[str, float]:
    return {
        "append_p50_ms": statistics.median(seconds) * 1e3,
        "append_p99_ms": percentile(seconds, 99),
        "bare_p50_ms": statistics.median(raw) * 1e3,
        "bare_p99_ms": percentile(raw, 99),
        "ratio_p50": statistics.median(seconds) / statistics.median(raw),
    }


def percentile(seconds: list[float], part: int) -> float:
    return statistics.quantiles(seconds, n=100)[part - 1] * 1e3


class Counted:
    """Counts the objects that are asked for, and remembers which were read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked: Counter[str] = Counter()
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("read", "size", "list"):
            return found

        def counted(key: str, *args: Any) -> Any:
            self.asked[name] += 1
            if name == "read":
                self.keys.append(key)
            return found(key, *args)

        return counted


def measure_restore(store: Store, unsettled: int, settled: int, say: Callable[[str], None]) -> dict[str, float]:
    """Write the run, then claim it five times."""
    run = HandWritten(store)
    for number in range(settled // BATCH):
        run.train(BATCH)
        run.flush()
        if number % 500 == 0:
            say(f"op=bench phase=write settled={len(run.ledger.consumed)}")
    run.dispatch(unsettled)
    run.flush()
    run.put(Archivist(store, RUN, SIBLINGS).snapshot(run.journal.slot))
    for _ in range(TAIL):
        run.dispatch(1)
        run.flush()
    taken: list[float] = []
    reading: list[float] = []
    counted = Counted(store)
    for number in range(5):
        counted = Counted(store)
        started = time.perf_counter()
        claimed = claim(counted, RUN, SIBLINGS, owner="o", writer=f"n{number}", reason="resume", clock=SystemClock())  # pyright: ignore[reportArgumentType]
        taken.append(time.perf_counter() - started)
        assert (len(claimed.ledger.groups), claimed.incarnation) == (unsettled + TAIL, number + 2)
        started = time.perf_counter()
        for key in counted.keys:
            if key != RunPaths(RUN).low:
                store.read(key)
        reading.append(time.perf_counter() - started)
    newest = next(recorded_snapshots(store, RUN))
    return {
        "restore_s": statistics.median(taken), "read_s": statistics.median(reading),
        "objects_asked": counted.asked.total(), "snapshot_bytes": newest.size, "slots": run.journal.slot,
        "settled": len(run.ledger.consumed),
    }  # fmt: skip


def measure(store: Callable[[str], Store], parsed: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything for one kind of store; `store` opens an empty one."""
    found: dict[str, Any] = {}
    for rows in parsed.rows:
        say(f"op=bench phase=append rows={rows}")
        found[str(rows)] = measure_append(store(f"a{rows}"), rows, parsed.appends)
        far: Any = Far(store(f"f{rows}"), FAR_S)
        found[str(rows)]["far"] = measure_append(far, rows, max(20, parsed.appends // 10))
    found["restore"] = measure_restore(store("r"), parsed.unsettled, parsed.settled, say)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--stores", nargs="+", choices=["local", "s3"], default=["local", "s3"])
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--appends", type=int, default=600)
    parser.add_argument("--unsettled", type=int, default=10_000)
    parser.add_argument("--settled", type=int, default=1_000_000)
    parser.add_argument("--folder", default=None, help="where it writes; a temporary folder otherwise")
    return parser.parse_args()


def main() -> None:
    parsed = parse_arguments()

    def say(line: str) -> None:
        if not parsed.json:
            print(line, flush=True)

    folder = Path(tempfile.mkdtemp(prefix="tidegate-bench-", dir=parsed.folder))
    found: dict[str, Any] = {}
    try:
        if "local" in parsed.stores:
            found["local"] = measure(lambda name: LocalStore(folder / name), parsed, say)
        if "s3" in parsed.stores:
            with running_seaweed(folder / "s3") as (server, _), exported(server):
                found["s3"] = measure(lambda name: open_store(server.url(name)), parsed, say)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found | {"machine": machine()}, indent=None if parsed.json else 2))


if __name__ == "__main__":
    main()
