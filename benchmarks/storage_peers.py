"""What it costs to make a change of a run's state durable, beside what others would use for it; and what each notices.

    pip install -c benchmarks/constraints-peers.txt -e '.[bench-peers]'         (an environment of its own)
    python benchmarks/storage_peers.py [--json] [--rows 10000 100000] [--systems tidegate pickle ...] [--flips 400]

Every system holds the same rows (`peer_rows.py`), on the same local disk, and a publication ends when it would survive
a loss of power: files and folders are synced, by us where the system does not do it. A publication is a change of 256
rows and 32 finished rollouts of 512 tokens with their logprobs. What each system is and does is said in `peer_*.py`:

    publish_s           seconds of a publication, p50 and p99 over all publications of `--repeats` fresh folders
    publish_cpu_s       CPU time of this process in a publication, median; other load on the machine changes it least.
                        TransferQueue works in other processes, which it does not count
    bytes_written       bytes of the files a publication wrote anew or added, median
    read_s              seconds to read rows and payload back from the files (in the page cache), median; `restart_s`
                        without the payload, where that is possible
    flips               of single flipped bits in small files: how many raised an error, aborted the process, hung, left
                        the content equal, or changed it silently

Before anything is measured, each system's rows and payload are compared with what was published.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: a script of it has the name of a package

import numpy as np

from benchmarks.machine import machine
from benchmarks.peer_files import JsonLines, Pickle, Plain, System, TorchSave
from benchmarks.peer_flips import flip_bits
from benchmarks.peer_queue import SavedQueue, TransferQueue
from benchmarks.peer_rows import Base, Change, Payload, Plan, place
from benchmarks.peer_tables import Delta, Lance
from benchmarks.peer_tidegate import RUN, Description, Tidegate
from storage.runs import RunPaths

READS = 5
LEAST = 5
"""Publications of a system that is out of time."""
SMALL = {"rows": 256, "publications": 2, "dispatched": 2, "failing": 1, "sealed": 1, "tokens": 64}
"""The state whose bits are flipped."""


class Peer(NamedTuple):
    """How to make the system; what reads its files where a bit was flipped; the packages it needs."""

    make: Callable[[Path], Any]
    reader: Callable[[Path], Any]
    packages: list[str]


SYSTEMS = {
    "tidegate": Peer(Tidegate, Tidegate, []),
    "transfer_queue": Peer(TransferQueue, SavedQueue, ["transfer_queue"]),
    "torch_save": Peer(TorchSave, TorchSave, ["torch"]),
    "pickle": Peer(Pickle, Pickle, []),
    "json_lines": Peer(JsonLines, JsonLines, []),
    "lance": Peer(Lance, Lance, ["lance"]),
    "delta": Peer(Delta, Delta, ["deltalake"]),
}


# ---------------------------------------------------------------------- publishing and reading


def sizes_of(folder: Path) -> dict[tuple[str, int], int]:
    """Size of each file by path and inode: a file that was replaced is another one."""
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return {(str(path), path.stat().st_ino): path.stat().st_size for path in paths}


def measure(peer: Peer, plan: Plan, folder: Path, repeats: int, budget_s: float) -> dict[str, Any]:
    """After a small state as warm-up: imports, connections and threads are paid once."""
    taken: list[float] = []
    cpu: list[float] = []
    written: list[int] = []
    reads: list[float] = []
    restarts: list[float] = []
    publish_all(peer, Plan(**SMALL), folder / "warm-up").close()
    for repeat in range(repeats):
        here, begun = folder / str(repeat), len(taken)
        here.mkdir()
        system = peer.make(here)
        base, changes = plan.base(), list(plan.changes())
        system.create(base)
        for change in changes:
            if sum(taken) > budget_s and len(taken) >= LEAST:
                break
            before, busy = sizes_of(here), time.process_time()
            taken.append(seconds(lambda: system.publish(change)))  # noqa: B023 - called at once
            cpu.append(time.process_time() - busy)
            written.append(sum(size - before.get(key, 0) for key, size in sizes_of(here).items()))
        check_same(system.plain(system.read()), base, changes[: len(taken) - begun])
        reads += timed_reads(system.read, budget_s)
        if isinstance(system, Tidegate):
            restarts += timed_reads(system.restart, budget_s)
        total = sum(sizes_of(here).values())
        system.close()
        shutil.rmtree(here)
        if sum(taken) > budget_s:
            break
    found = {
        "publish_s": {"p50": statistics.median(taken), "p99": float(np.percentile(taken, 99)), "count": len(taken)},
        "publish_cpu_s": statistics.median(cpu),
        "bytes_written": int(statistics.median(written)),
        "read_s": statistics.median(reads),
        "bytes_stored": total,
    }
    return found | ({"restart_s": statistics.median(restarts)} if restarts else {})


def timed_reads(read: Callable[[], object], budget_s: float) -> list[float]:
    taken: list[float] = []
    while len(taken) < READS and sum(taken) <= budget_s / READS:
        taken.append(seconds(read))
    return taken


def publish_all(peer: Peer, plan: Plan, folder: Path) -> System:
    folder.mkdir(exist_ok=True)
    system = peer.make(folder)
    system.create(plan.base())
    for change in plan.changes():
        system.publish(change)
    return system


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    kept = act()
    taken = time.perf_counter() - started
    del kept  # its destruction is not part of the reading
    return taken


def check_same(found: Plain, base: Base, changes: list[Change]) -> None:
    """The rows and payload that were read are those that were published."""
    expected = {name: values.copy() for name, values in base.columns.items()}
    for change in changes:
        for name, values in change.columns.items():
            expected[name][place(change.columns)] = values
    columns, payload = found
    for name, values in expected.items():
        if not np.array_equal(columns[name], values):
            raise RuntimeError(f"column {name} is not what was published")
    if _by_rollout(payload) != _by_rollout([base.payload, *(change.payload for change in changes)]):
        raise RuntimeError("the payload is not what was published")


def _by_rollout(payload: list[Payload]) -> dict[tuple[int, int, int], tuple[bytes, bytes]]:
    return {
        (int(g), int(s), int(a)): (t.astype(np.int32).tobytes(), p.astype(np.float32).tobytes())
        for one in payload
        for g, s, a, t, p in zip(*one, strict=True)
    }


# ---------------------------------------------------------------------- flips


def flips(name: str, folder: Path, trials: int, seed: int) -> dict[str, Any]:
    """A small state of the system, and what its reader notices. Tidegate's run.json, which no digest covers, is counted
    apart: the others hold nothing like it."""
    peer, plan = SYSTEMS[name], Plan(**SMALL)
    publish_all(peer, plan, folder).close()
    info = folder / RunPaths(RUN).info
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != info)
    preload = [*peer.packages, Path(__file__).stem]
    found = flip_bits(peer.reader, folder, trials, seed, preload, files)
    if name == "tidegate":
        found["run_json"] = flip_bits(Description, folder, trials, seed, preload, [info])
    return found


# ---------------------------------------------------------------------- the command


def part(parsed: argparse.Namespace) -> dict[str, Any]:
    """One system, one number of rows, or its flips, in this process."""
    (name,), folder = parsed.systems, Path(tempfile.mkdtemp(prefix="tidegate-bench-", dir=parsed.folder))
    try:
        if parsed.part == "flips":
            return flips(name, folder, parsed.flips, parsed.seed)
        plan = Plan(rows=int(parsed.part), publications=parsed.publications)
        return measure(SYSTEMS[name], plan, folder, parsed.repeats, parsed.budget)
    finally:
        shutil.rmtree(folder)


def whole(parsed: argparse.Namespace) -> dict[str, Any]:
    """Each part in a process of its own, one after the other."""
    found: dict[str, Any] = {}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}  # a fork server finds modules only there
    parts = [*map(str, parsed.rows), *(["flips"] if parsed.flips else [])]
    for name in parsed.systems:
        for one in parts:
            command = [sys.executable, __file__, "--systems", name, "--part", one, *_options(parsed)]
            said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment).stdout
            found.setdefault(name, {})[one] = json.loads(said.strip().splitlines()[-1])
            sys.stderr.write(f"op=bench system={name} part={one} {json.dumps(found[name][one])}\n")
    return found


def _options(parsed: argparse.Namespace) -> list[str]:
    given = [f"--{name}={getattr(parsed, name)}" for name in ("publications", "repeats", "budget", "flips", "seed")]
    return given + ([f"--folder={parsed.folder}"] if parsed.folder else [])


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME")
    parser.add_argument(
        "--rows", nargs="*", type=int, default=[10_000, 100_000], help="of the state; none for flips only"
    )
    parser.add_argument("--publications", type=int, default=30, help="in each folder")
    parser.add_argument("--repeats", type=int, default=3, help="fresh folders")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of publishing after which a system stops")
    parser.add_argument("--flips", type=int, default=400, help="trials; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where everything is written; a temporary folder otherwise")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    for rows in parsed.rows:
        if rows % 8 or Plan(rows, parsed.publications).first["failing"] < 1:
            parser.error(f"--rows {rows} must be a multiple of 8 with room for {parsed.publications} publications")
    missing = [name for name in parsed.systems for package in SYSTEMS[name].packages if find_spec(package) is None]
    if missing:
        parser.error(f"{', '.join(missing)}: not installed; see the first lines of {Path(__file__).name}")
    return parsed


def main() -> int:
    parsed = arguments()
    if parsed.part:
        print(json.dumps(rounded(part(parsed))))
        return 0
    found = {"systems": whole(parsed), "publications": parsed.publications, "repeats": parsed.repeats,
             "machine": machine()}  # fmt: skip
    if parsed.json:
        print(json.dumps(found))
        return 0
    for name, parts in found["systems"].items():
        print(name)
        for one, figures in parts.items():
            print(f"    {one:8} {json.dumps(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
