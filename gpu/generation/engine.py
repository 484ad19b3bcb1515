"""The contract of a generation engine.

An engine promises, for every request: exactly one finish, also on abort; as many logprobs as tokens, each the log
probability under the distribution that was sampled from; a policy version for every token, never decreasing within a
request; nothing lost over a weight update. `update` is all-or-nothing: when it raises, the old version still answers.
Requests with the same id, seed and versions give the same tokens whatever else is in the batch (`determinism`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from storage.buffers import NamedBuffer
from storage.payload import VersionSpan


class Finish(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Cached(Enum):
    """What happens to cached keys and values at a weight update: kept as the old version computed them (fast; no
    single version reproduces the later logprobs, which are still the true behaviour), or recomputed (exact)."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


class Version(msgspec.Struct, frozen=True, order=True):
    """A policy version, ordered by incarnation, then number. `digest` is that of its weights."""

    incarnation: int
    number: int
    digest: str = ""


class Partial(msgspec.Struct, frozen=True):
    """Generated tokens so far: what another engine needs to go on as if nothing had happened."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()


class Sampling(msgspec.Struct, frozen=True):
    """`temperature` 0 is greedy. `seed` and the token's index decide each draw."""

    max_tokens: int
    temperature: float
    seed: int
    stop_ids: frozenset[int]


class GenRequest(msgspec.Struct, frozen=True):
    """`prompt` are the context's token ids; `partial` was generated before and counts towards `max_tokens`."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    partial: Partial = Partial()


class Generated(msgspec.Struct, frozen=True):
    """The finish of a request: all generated tokens (int32), logprobs (float32), version spans over them."""

    id: str
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish: Finish


class EngineStats(msgspec.Struct, frozen=True):
    """`tokens` generated since the start, `paused` seconds spent in weight updates."""

    version: Version | None
    running: int
    waiting: int
    free_slots: int
    tokens: int
    updates: int
    paused: float


class Engine(Protocol):
    """Synchronous core; `gpu.generation.server` drives it and answers calls. Not thread-safe.

    Raises `ConfigurationRefused` for requests that cannot fit.
    """

    capabilities: frozenset[str]
    """Of: in_flight_swap, kv_recompute, score, checksum, determinism."""

    def add(self, request: GenRequest) -> None:
        """Queue a request; refused when no version is installed or the context is too long."""
        ...

    def step(self) -> list[Generated]:
        """Advance every running request by one token; returns those that finished."""
        ...

    def abort(self, ids: Collection[str] | None) -> list[Generated]:
        """End requests (None: all) with what they have."""
        ...

    def update(
        self, version: Version, weights: Mapping[str, NamedBuffer], cached: Cached, *, verified: bool = False
    ) -> None:
        """Install a version between two steps; running requests go on with it. The same version twice is a no-op.
        `verified`: the caller has compared the weights with the version's digest.

        Raises `LineageInvalid` for an older version, `ArtifactCorrupt` for weights that do not fit or whose digest
        differs; the old version then still answers.
        """
        ...

    def score(self, sequences: list[list[int]]) -> list[npt.NDArray[np.float32]]:
        """Log probability of each token but the first, under the installed version at temperature 1."""
        ...

    def checksum(self) -> str:
        """Digest of the installed weights, computed from what would generate the next token."""
        ...

    def stats(self) -> EngineStats: ...
