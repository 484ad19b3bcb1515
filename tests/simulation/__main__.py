"""Play many seeded worlds: `python -m tests.simulation --seeds 0:1000000 --world tiny --jobs 2 --json FILE`.

Prints progress and a table of what happened. A seed that breaks something is printed with the command that plays it
alone, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from rich.console import Console
from rich.table import Table

from tests.simulation.campaign import FAULTS, NEVER, WORK, Failure, missing, play_all
from tests.simulation.shapes import SHAPES

PROGRESS_S = 10.0
MOST_FAILURES = 5


def parse_seeds(text: str) -> range:
    """ "first:end", or one seed."""
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=parse_seeds, default=range(2000), help="first:end (2000 by default)")
    parser.add_argument("--world", choices=sorted(SHAPES), default="small")
    parser.add_argument("--jobs", type=int, default=None, help="processes, one for each core by default")
    parser.add_argument("--json", metavar="FILE", default="", help="write the sum as JSON")
    return parser.parse_args(arguments)


def say_progress(done: int, total: int, seconds: float) -> None:
    rate = done / max(seconds, 1e-9)
    left = (total - done) / rate
    print(
        f"op=simulate seeds={done}/{total} rate={rate:.0f}/s remaining={left / 60:.1f}min", file=sys.stderr, flush=True
    )


def show(size: str, totals: Counter[str], seconds: float, cpu_s: float) -> None:
    worlds = max(1, totals["worlds"])
    cost = f"{1000 * cpu_s / worlds:.1f} ms of processor time each"
    table = Table(title=f"{totals['worlds']:,} {size} worlds in {seconds:.0f} s, {cost}")
    table.add_column("what")
    for column in ("count", "per world"):
        table.add_column(column, justify="right")
    for names in (WORK, FAULTS, NEVER):
        for name in names:
            table.add_row(name.replace("_", " "), f"{totals[name]:,}", f"{totals[name] / worlds:.4f}")
        table.add_section()
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    totals: Counter[str] = Counter()
    failures: list[Failure] = []
    began = said = time.monotonic()
    done, cpu_s = 0, 0.0
    for part in play_all(options.world, options.seeds, options.jobs):
        done, cpu_s = done + part.seeds, cpu_s + part.cpu_s
        totals += part.totals
        failures += part.failures
        for failure in part.failures[: max(0, MOST_FAILURES - len(failures) + len(part.failures))]:
            print(failure, flush=True)
        if len(failures) >= MOST_FAILURES:
            break
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            say_progress(done, len(options.seeds), said - began)
    seconds = time.monotonic() - began
    show(options.world, totals, seconds, cpu_s)
    wrong = missing(options.world, totals)
    for line in wrong:
        print(line)
    if options.json:
        result = {
            "world": options.world,
            "seeds": [options.seeds.start, options.seeds.stop],
            "seconds": seconds,
            "cpu_seconds": cpu_s,
            "sound": not failures and not wrong,
            "failed": [failure.seed for failure in failures],
            "counts": {name: totals[name] for name in ("worlds", *WORK, *FAULTS, *NEVER)},
        }
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    return 1 if failures or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
