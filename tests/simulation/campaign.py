"""Many seeds on all cores: the sum of what happened, or the first seeds that broke something."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pyarrow as pa

from tests.simulation.shapes import SHAPES
from tests.simulation.world import play

PART = {"tiny": 200, "small": 100, "large": 10}
"""Seeds that a process takes at once."""

INSIDE = (
    "attempts_stopped", "attempts_not_continuable", "rollouts_discarded", "requests_left_behind", "requests_late",
    "requests_barred_claimed", "requests_barred_missing", "ghosts_acted",
)  # fmt: skip
"""What happens to attempts that act."""
FAULTS = (
    "kills", "managers_stopped", "zombies_refused", "replies_found",
    "claims_raced", "claimants_died", "flushed_during_claim", "delayed_landed", "delayed_refused",
    "drivers_replaced", "drivers_refused", "attempts_refused", "workers_lost", "late_reports_refused",
    "reports_repeated", "owners_fenced", "filters_raised", "judged_outside", "recipes_changed", "evaluations_cut",
    "leases_rolled_back", "altered_segment", "altered_payload", "altered_manifest", "altered_shard",
    "altered_snapshot", "altered_history", "delayed_landed_retired",
    "effects_of_lost_work", *INSIDE,
)  # fmt: skip
WORK = ("steps", "incarnations", "segments", "consumed", "discarded", "quarantined", "rollouts_sealed",
        "rollouts_reused", "rollouts_regenerated", "rollouts_continued", "steps_redone", "checkpoints",
        "evaluations", "snapshots_written", "segments_retired", "retired_deleted", "changes_kept")  # fmt: skip
NEVER = ("lost", "trained_twice")
ENOUGH = {"tiny": 50_000, "small": 5000, "large": 300}
"""Worlds after which each kind has certainly happened."""
TOO_RARE = {"tiny": {"altered_manifest", "altered_shard", *INSIDE}, "small": {"ghosts_acted"}}
"""A tiny run ends before a claim follows its first checkpoint, and hardly has a second attempt of a rollout; the larger
worlds have these. An attempt of a stopped manager that finds its intent durable all the same is rare in any."""


class Failure(NamedTuple):
    """A seed that broke something, and how to see it again."""

    seed: int
    size: str
    trace: str

    @property
    def command(self) -> str:
        return f"python -m tests.simulation --seeds {self.seed}:{self.seed + 1} --world {self.size}"

    def __str__(self) -> str:
        return f"{self.trace}\nreproduce with: {self.command}"


class Part(NamedTuple):
    """Some seeds, played in `cpu_s` seconds of processor time."""

    seeds: int
    cpu_s: float
    totals: Counter[str]
    failures: list[Failure]


def play_seeds(size: str, seeds: range) -> Part:
    """Play worlds to their end; a process edge, so whatever one breaks is a failure with its cause."""
    totals: Counter[str] = Counter()
    failures: list[Failure] = []
    began = time.process_time()
    log = logging.getLogger("storage.journal")
    level = log.level
    log.setLevel(logging.CRITICAL)  # snapshots are damaged on purpose
    gc.disable()  # a tenth of a world's time; what it would find is collected after each part
    for seed in seeds:
        try:
            totals.update(play(seed, SHAPES[size])[0].tally)
        except Exception:  # noqa: BLE001
            failures.append(Failure(seed, size, traceback.format_exc()))
    gc.enable()
    log.setLevel(level)
    gc.collect()
    return Part(len(seeds), time.process_time() - began, totals, failures)


def play_all(size: str, seeds: range, jobs: int | None) -> Iterator[Part]:
    """Parts as they are done, in the order of their seeds; `jobs` processes, one for each core when None."""
    step = PART[size]
    parts = [seeds[start : start + step] for start in range(0, len(seeds), step)]
    if jobs == 1 or len(parts) == 1:
        yield from (play_seeds(size, part) for part in parts)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=pa.set_cpu_count, initargs=(1,)) as pool:
        try:
            yield from pool.map(play_seeds, [size] * len(parts), parts)
        finally:
            pool.shutdown(cancel_futures=True)


def missing(size: str, totals: Counter[str]) -> list[str]:
    """What the sum lacks: kinds that should have happened, or things that must never happen."""
    wrong = [f"{name} = {totals[name]}, expected 0" for name in NEVER if totals[name]]
    if totals["worlds"] >= ENOUGH[size]:
        expected = {*FAULTS, *WORK} - TOO_RARE.get(size, set())
        wrong += [f"{name} never happened" for name in sorted(expected) if not totals[name]]
    return wrong
