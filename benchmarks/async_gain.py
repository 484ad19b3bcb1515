"""What asynchrony gains: trained groups per hour against a synchronous loop and against draining at each update.

    python benchmarks/async_gain.py [--json] [--groups 2560] [--tails 4.3] [--seed 0] [--submission sample]

Virtual time around the real rollout control (see `pipeline.py`); no model runs, so the figures are ratios of schedules
and do not depend on the machine. Lengths of rollouts are log-normal, mean 3,000 tokens at 50 tokens/s. All systems of a
tail train the same groups of the same lengths to the last one, start and end included, on an equal budget:

    synchronous  2 x slots generate a batch, then all devices train it (T / 2), then the weights move (W)
    drain        slots generate beside the trainer (T); each update waits for everything that executes, then takes W
    in flight    the same, but the weights change under the generation, which stalls for W (the product's default)

T is the time in which the busy slots generate a batch, W = T / 50. E fills the slots; P and R are B (S + 1) + backoff.

A tail is p99 / median of the time of a *group*, that is of the slowest of its 8 rollouts: sigma 0.3, 0.6, 0.9, 1.2 give
1.6, 2.7, 4.3, 7.0 (a drawn sample differs a little: see `measured_tail`). By tail and by staleness bound:

    gain, gain_over_drain   groups per hour in flight, over those of the synchronous loop and of the draining one
    max_, mean_staleness    versions between a trained group's oldest token and its lease, as the engines saw it
    wasted_share            generated tokens that were never trained
    longest_share_trained   share of the longest 5 % of prompts among the first 60 % of the groups trained
    longest_share_source    their share among the first 60 % of the source's prompts
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: a script of it has the name of a package

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.machine import machine
from benchmarks.pipeline import Pipeline, Ran, Speeds, generation_s, limits_for, longest_shares
from gpu.rollout.limits import Submission

TAILS = {"1.6": 0.3, "2.7": 0.6, "4.3": 0.9, "7.0": 1.2}
BOUNDS = (0, 1, 2, 4)
SIBLINGS, BATCH = 8, 64
MEAN_TOKENS, TOKENS_PER_S = 3000, 50.0

Tokens = list[list[int]]


def draw(seed: int, sigma: float, groups: int) -> Tokens:
    """Generated tokens by group and sibling; the mean does not depend on sigma."""
    drawn = np.random.default_rng(seed).lognormal(-sigma * sigma / 2, sigma, (groups, SIBLINGS))
    return np.maximum(1, np.rint(drawn * MEAN_TOKENS)).astype(int).tolist()


def balanced(tokens: Tokens, slots: int, submission: Submission) -> Speeds:
    """A trainer exactly as fast as generation."""
    train_s = BATCH * generation_s(tokens, submission, TOKENS_PER_S, slots)
    return Speeds(train_s, train_s / 50, TOKENS_PER_S, slots)


def synchronous_s(tokens: Tokens, speeds: Speeds) -> float:
    """Seconds of a loop that generates a batch with twice the slots, trains it in half the time, and updates."""
    batches = [tokens[start : start + BATCH] for start in range(0, len(tokens), BATCH)]
    generation = sum(_makespan([n for group in batch for n in group], 2 * speeds.slots) for batch in batches)
    return generation / speeds.tokens_per_s + len(batches) * (speeds.train_s / 2 + speeds.update_s)


def _makespan(lengths: Sequence[int], slots: int) -> int:
    """When the last of `lengths` ends, each started in turn by the first slot that is free."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def compare(tokens: Tokens, staleness: int, speeds: Speeds, submission: Submission) -> dict[str, float]:
    """The three systems at one staleness bound."""
    limits = limits_for(staleness, batch=BATCH, siblings=SIBLINGS, slots=speeds.slots, submission=submission)
    in_flight = Pipeline(tokens, limits, speeds).run()
    drained = Pipeline(tokens, limits, speeds, drain=True).run()
    source, trained = longest_shares(tokens, in_flight.trained)
    return {
        "gain": synchronous_s(tokens, speeds) / in_flight.seconds,
        "gain_over_drain": drained.seconds / in_flight.seconds,
        "max_staleness": max(in_flight.staleness),
        "mean_staleness": statistics.fmean(in_flight.staleness),
        "wasted_share": wasted_share(tokens, in_flight),
        "longest_share_source": source,
        "longest_share_trained": trained,
    }


def wasted_share(tokens: Tokens, ran: Ran) -> float:
    return 1 - sum(sum(tokens[ordinal]) for ordinal in ran.trained) / ran.generated_tokens


def about_tail(tokens: Tokens, speeds: Speeds) -> dict[str, float]:
    """`ceiling` is the gain of a trainer that never waits."""
    slowest = [max(group) for group in tokens]
    synchronous = synchronous_s(tokens, speeds)
    return {
        "measured_tail": float(np.quantile(slowest, 0.99) / np.median(slowest)),
        "synchronous_groups_per_hour": len(tokens) / synchronous * 3600,
        "train_s": speeds.train_s,
        "ceiling": synchronous / (len(tokens) // BATCH * (speeds.train_s + speeds.update_s)),
    }


def measure(parsed: argparse.Namespace) -> dict[str, Any]:
    submission = Submission(parsed.submission)
    settings = {"groups": parsed.groups, "seed": parsed.seed, "submission": parsed.submission, "slots": parsed.slots,
                "siblings": SIBLINGS, "batch": BATCH}  # fmt: skip
    result: dict[str, Any] = {tail: {} for tail in parsed.tails}
    tails: dict[str, dict[str, float]] = {}
    for tail, staleness in _progress([(tail, staleness) for tail in parsed.tails for staleness in BOUNDS]):
        tokens = draw(parsed.seed, TAILS[tail], parsed.groups)
        speeds = balanced(tokens, parsed.slots, submission)
        tails[tail] = _rounded(about_tail(tokens, speeds))
        result[tail][str(staleness)] = _rounded(compare(tokens, staleness, speeds, submission))
    return {**result, "about": {"settings": settings, "machine": machine(), "tails": tails}}


def _progress(cases: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    console = Console(stderr=True)
    yield from track(cases, "tails x bounds", console=console, disable=not console.is_terminal, transient=True)


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def table(result: dict[str, Any]) -> Iterator[str]:
    head = f"{'tail':>5} {'bound':>5} {'gain':>6} {'ceiling':>7} {'over drain':>10} {'staleness max':>13} {'mean':>5}"
    yield f"{head} {'wasted':>7} {'longest 5 %: source':>19} {'trained':>8}"
    for tail, about in result["about"]["tails"].items():
        for staleness, row in result[tail].items():
            yield (
                f"{tail:>5} {staleness:>5} {row['gain']:6.2f} {about['ceiling']:7.2f} {row['gain_over_drain']:10.2f}"
                f" {row['max_staleness']:13} {row['mean_staleness']:5.2f} {row['wasted_share']:7.1%}"
                f" {row['longest_share_source']:19.2%} {row['longest_share_trained']:8.2%}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.add_argument("--groups", type=int, default=2560, help=f"trained by each system; a multiple of {BATCH}")
    parser.add_argument("--tails", nargs="+", choices=list(TAILS), default=list(TAILS))
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--submission", choices=[policy.value for policy in Submission], default="sample")
    parser.add_argument("--slots", type=int, default=256, help="rollouts that the asynchronous engines run at once")
    parsed = parser.parse_args()
    if parsed.groups < BATCH or parsed.groups % BATCH:
        parser.error(f"--groups must be a multiple of {BATCH}")
    if parsed.slots < SIBLINGS:
        parser.error(f"--slots must be at least {SIBLINGS}")
    result = measure(parsed)
    print(json.dumps(result) if parsed.json else "\n".join(table(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
