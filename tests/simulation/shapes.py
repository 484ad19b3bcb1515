"""How large a world is, and the numbers its run has. Tiny ones are cheap enough for a million."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from gpu.rollout.limits import Limits, Order, Submission


@dataclass(frozen=True)
class Shape:
    """Tuples are what a number is drawn from, probabilities are per occasion.

    `lengths` of the source in groups; `chaos` steps with faults, of which `fault_rate` are one, `late_faults` times as
    many after the first trained step; `flush_s` virtual seconds until a segment is cut without a waiter; `checkpoints`
    after a step; `files`: a token block is an object of its own; `races` at a claim; `alterations` before one;
    `exams`: a run is evaluated; `acting`: its attempts
    of several turns act on what the model says; `snapshot_every` segments a ledger snapshot is due, 0: never.
    """

    name: str
    lengths: tuple[int, ...]
    multi_turn: float
    chaos: tuple[int, ...]
    fault_rate: float
    late_faults: int
    siblings: tuple[int, ...]
    batches: tuple[int, ...]
    flush_s: float
    checkpoints: float
    files: float
    races: float
    alterations: float
    exams: float = 0.5
    acting: float = 0.5
    snapshot_every: tuple[int, ...] = (0, 1, 3, 10)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "tiny",
            lengths=(1, 1, 1, 2),
            multi_turn=0.3,
            chaos=(6, 12, 24),
            fault_rate=0.1,
            late_faults=3,
            siblings=(1, 1, 1, 2),
            batches=(1, 1, 1, 2),
            flush_s=0.75,
            checkpoints=0.3,
            files=0.3,
            races=0.2,
            alterations=0.15,
        ),
        Shape(
            "small",
            lengths=(1, 1, 1, 1, 2, 2, 3),
            multi_turn=0.5,
            chaos=(20, 40, 80),
            fault_rate=0.07,
            late_faults=3,
            siblings=(1, 1, 2),
            batches=(1, 2),
            flush_s=0.5,
            checkpoints=0.5,
            files=0.4,
            races=0.3,
            alterations=0.2,
        ),
        Shape(
            "large",
            lengths=(5, 10, 14),
            multi_turn=0.7,
            chaos=(60, 150, 300),
            fault_rate=0.08,
            late_faults=1,
            siblings=(1, 2, 3),
            batches=(1, 2, 3),
            flush_s=0.4,
            checkpoints=0.3,
            files=0.2,
            races=0.3,
            alterations=0.2,
        ),
    )
}

PLAIN = replace(SHAPES["large"], files=0.0, exams=0.0, acting=0.0, snapshot_every=(0,))
"""For tests that edit a finished run: all token blocks travel in the journal, no evaluation, no action, no snapshot."""


def draw_limits(rng: random.Random, shape: Shape) -> Limits:
    n, batch = rng.choice(shape.siblings), rng.choice(shape.batches)
    staleness = rng.choice([None, 0, 1, 2, 3])
    submission = rng.choice(list(Submission))
    backoff = rng.choice([0, 1, 2])
    completed = batch + backoff + rng.choice([0, 1, 4])
    return Limits(
        num_siblings=n,
        batch=batch,
        staleness=staleness,
        submission=submission,
        order=rng.choice(list(Order)) if staleness is not None else Order.FIFO,
        max_executing=(n if submission is Submission.SAMPLE else 1) * rng.choice([1, 2, 4]) + rng.choice([0, 1]),
        max_retained=completed + rng.choice([0, 2]),
        max_completed=completed,
        max_hot_bytes=rng.choice([4096, 1 << 20]),
        eviction_cap=rng.choice([None, None, batch + 1]),
        prefetch=0,
        max_backoff=backoff,
        max_postprocessing=8,
        max_attempts=rng.choice([2, 3, 6]),
        max_losses=50,
        backoff_base_s=0.5,
        backoff_max_s=4.0,
        undurable_age_s=5.0,
        undurable_bytes=1 << 20,
        discard_end_of_source=rng.random() < 0.2,
    )
