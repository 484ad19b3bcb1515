"""The rows that every system of `storage_peers.py` holds, and the changes it publishes.

A row is one rollout: group, sibling, attempt, state, versions, tokens, reward, failures. Its place in a column is
group * SIBLINGS + sibling. Groups lie in the order: sealed ones, failing ones, executing ones, reserved ones. A change
dispatches some reserved groups, gives up and repeats every attempt of the failing ones, and seals some executing ones
with their tokens: 160 + 64 + 32 = 256 rows as sized by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SIBLINGS = 8
RESERVED, EXECUTING, SEALED = 0, 1, 2
COLUMNS = {
    "group": np.int64, "sibling": np.int32, "attempt": np.int32, "state": np.int8, "version": np.int64,
    "oldest": np.int64, "samples": np.int32, "tokens": np.int32, "reward": np.float64, "failures": np.int32,
}  # fmt: skip
Columns = dict[str, npt.NDArray[Any]]


class Payload(NamedTuple):
    """What rollouts generated; tokens and logprobs have one row for each."""

    group: npt.NDArray[np.int64]
    sibling: npt.NDArray[np.int32]
    attempt: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


class Change(NamedTuple):
    """`columns` are the changed rows; the ranges say which groups changed how. `attempt` is the failing groups' new
    one."""

    number: int
    dispatched: range
    failing: range
    attempt: int
    sealed: range
    columns: Columns
    payload: Payload


class Base(NamedTuple):
    """The state before the first change: every row, and the tokens of the sealed ones."""

    columns: Columns
    payload: Payload


@dataclass(frozen=True)
class Plan:
    """Groups of each kind per change, tokens of a rollout, and how many changes are published on so many rows."""

    rows: int
    publications: int
    dispatched: int = 20
    failing: int = 8
    sealed: int = 4
    tokens: int = 512
    base_tokens: int = 8

    @property
    def first(self) -> dict[str, int]:
        """The first group of each kind; "end" is behind the last."""
        end = self.rows // SIBLINGS
        reserved = end - self.dispatched * self.publications
        executing = reserved - self.sealed * self.publications
        return {"failing": executing - self.failing, "executing": executing, "reserved": reserved, "end": end}

    def base(self) -> Base:
        first = self.first
        parts = [
            _rows(range(first["failing"]), SEALED, tokens=self.base_tokens),
            _rows(range(first["failing"], first["reserved"]), EXECUTING),
            _rows(range(first["reserved"], first["end"]), RESERVED),
        ]
        sealed = parts[0]
        return Base(_joined(parts), _payload(sealed, self.base_tokens, seed=0))

    def changes(self) -> Iterator[Change]:
        first = self.first
        for number in range(self.publications):
            start = first["reserved"] + number * self.dispatched
            dispatched = range(start, start + self.dispatched)
            failing = range(first["failing"], first["executing"])
            start = first["executing"] + number * self.sealed
            sealed = range(start, start + self.sealed)
            finished = _rows(sealed, SEALED, tokens=self.tokens)
            again = _rows(failing, EXECUTING, attempt=number + 1)
            columns = _joined([_rows(dispatched, EXECUTING), again, finished])
            payload = _payload(finished, self.tokens, seed=number + 1)
            yield Change(number, dispatched, failing, number + 1, sealed, columns, payload)


def _rows(groups: range, state: int, attempt: int = 0, tokens: int = 0) -> Columns:
    """All siblings of `groups` in one state."""
    count = len(groups) * SIBLINGS
    group = np.repeat(np.arange(groups.start, groups.stop), SIBLINGS)
    sibling = np.tile(np.arange(SIBLINGS), len(groups))
    done = state == SEALED
    values: dict[str, Any] = {
        "group": group, "sibling": sibling, "attempt": -1 if state == RESERVED else attempt, "state": state,
        "version": -1 if state == RESERVED else 0, "oldest": 0 if done else -1, "samples": int(done),
        "tokens": tokens, "reward": (group * 7 + sibling) % 11 / 10 if done else 0.0, "failures": attempt,
    }  # fmt: skip
    return {name: np.array(np.broadcast_to(values[name], count), kind) for name, kind in COLUMNS.items()}


def _joined(parts: list[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def _payload(sealed: Columns, tokens: int, seed: int) -> Payload:
    dice = np.random.default_rng(seed)
    shape = (len(sealed["group"]), tokens)
    logprobs = -dice.exponential(size=shape).astype(np.float32)
    return Payload(sealed["group"], sealed["sibling"], sealed["attempt"], dice.integers(0, 1 << 17, shape, np.int32),
                   logprobs)  # fmt: skip


def place(columns: Columns) -> npt.NDArray[np.int64]:
    """Where these rows stand in a whole column."""
    return columns["group"] * SIBLINGS + columns["sibling"]


def newest(columns: Columns, order: npt.NDArray[Any]) -> Columns:
    """Whole columns from rows of which later ones, by `order`, replace earlier ones of the same place."""
    by_age = np.argsort(order, kind="stable")
    places = place(columns)[by_age]
    last = np.empty(places.max() + 1, np.int64)
    last[places] = by_age  # of equal places the last assignment stays
    return {name: values[last] for name, values in columns.items()}
