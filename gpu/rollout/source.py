"""The prompt stream: a group is a pure function of (dataset, seed, ordinal). Only ordinals are persisted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.rollout.capabilities import Capabilities
from storage.errors import ConfigurationRefused


class Position(NamedTuple):
    """Where an ordinal lies: which pass over the dataset, and which row of it."""

    epoch: int
    row: int


class PromptStream:
    """`size` rows, seen `epochs` times (None: endlessly), each epoch in its own seeded order."""

    def __init__(self, size: int, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        if size < 1 or (epochs is not None and epochs < 1):
            raise ConfigurationRefused(
                f"a dataset of {size} rows, {epochs} epochs",
                expected="at least one row and one epoch",
                action="check the environment's options",
            )
        self.size, self.epochs = size, epochs
        self._seed, self._shuffle = seed, shuffle
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    @property
    def capabilities(self) -> Capabilities:
        """Any ordinal can be handed out again, and the next one is all there is to remember."""
        return Capabilities(finite=self.epochs is not None, reservable=True, resumable=True)

    @property
    def length(self) -> int | None:
        """Number of ordinals, None when endless."""
        return None if self.epochs is None else self.size * self.epochs

    def position(self, ordinal: int) -> Position:
        """Epochs are not barriers: any ordinal can be asked for at any time."""
        epoch, offset = divmod(ordinal, self.size)
        if not self._shuffle:
            return Position(epoch, offset)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self.size))
        return Position(epoch, int(self._order[1][offset]))

    def fingerprint(self, rows: Iterable[bytes]) -> str:
        """Digest of everything that decides what an ordinal means: content, order, seed, length."""
        digest = hashlib.sha256(f"{self.size}:{self.epochs}:{self._seed}:{self._shuffle}".encode())
        for row in rows:
            digest.update(len(row).to_bytes(8, "little"))
            digest.update(row)
        return digest.hexdigest()


def rollout_seed(run_seed: int, ordinal: int, sibling: int, attempt: int) -> int:
    """The 63-bit seed of one attempt's randomness (sampling, environment), independent of where it runs."""
    text = f"{run_seed}:{ordinal}:{sibling}:{attempt}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def suite_seed(run_seed: int, suite: str) -> int:
    """The seed of an evaluation suite: not that of training, and the same at every step, so that steps compare."""
    text = f"{run_seed}:evaluation:{suite}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
