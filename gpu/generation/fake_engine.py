"""A deterministic engine without a model: the documented fake for tests, simulations and benchmarks.

It keeps the whole engine contract that does not need a model. A token is a hash of (seed, index, version number), so
what it generates depends on nothing else; a request stops after `tokens` steps or is cut at its limit. With
`by_rollout` a token is a hash of (rollout, turn, index): every attempt of a rollout gives the same tokens, under any
version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import numpy as np

from gpu.generation.engine import Cached, EngineStats, Finish, Generated, GenRequest, Version
from storage.buffers import NamedBuffer, buffers_digest
from storage.errors import ArtifactCorrupt, LineageInvalid
from storage.payload import VersionSpan


class FakeEngine:
    """`tokens` per request, ids below `vocabulary`; the last one is a stop token of the request if it has any and was
    not cut."""

    capabilities = frozenset({"in_flight_swap", "checksum", "determinism"})

    def __init__(self, *, slots: int = 64, tokens: int = 3, vocabulary: int = 64, by_rollout: bool = False) -> None:
        self._slots, self._length, self._vocabulary, self._by_rollout = slots, tokens, vocabulary, by_rollout
        self._requests: dict[str, tuple[GenRequest, list[int], list[VersionSpan]]] = {}
        self._version: Version | None = None
        self._tokens = self._updates = 0

    def add(self, request: GenRequest) -> None:
        before = request.partial
        self._requests[request.id] = (request, list(before.tokens), list(before.spans))

    def step(self) -> list[Generated]:
        if self._version is None:
            return []
        running = list(self._requests.values())[: self._slots]
        ended: list[Generated] = []
        for request, tokens, spans in running:
            tokens.append(self._token(request, len(tokens)))
            self._tokens += 1
            version = self._version
            if spans and spans[-1][:2] == (version.incarnation, version.number):
                spans[-1] = spans[-1]._replace(end=len(tokens))
            else:
                spans.append(VersionSpan(version.incarnation, version.number, len(tokens)))
            if len(tokens) >= min(self._length, request.sampling.max_tokens):
                stopped = len(tokens) >= self._length and request.sampling.stop_ids
                ended.append(self._end(request.id, Finish.STOP if stopped else Finish.LENGTH))
        return ended

    def _token(self, request: GenRequest, index: int) -> int:
        assert self._version is not None
        if index + 1 >= self._length and request.sampling.stop_ids:
            return min(request.sampling.stop_ids)
        text = f"{request.sampling.seed}:{index}:{self._version.number}"
        if self._by_rollout:  # a worker's request ids are rollout~attempt@incarnation.turn
            text = f"{request.id.partition('~')[0]}.{request.id.rpartition('.')[2]}:{index}"
        value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % self._vocabulary
        return value if value not in request.sampling.stop_ids else (value + 1) % self._vocabulary

    def _end(self, name: str, finish: Finish) -> Generated:
        request, tokens, spans = self._requests.pop(name)
        logprobs = np.full(len(tokens), -np.log(self._vocabulary), np.float32)
        return Generated(request.id, np.array(tokens, np.int32), logprobs, tuple(spans), finish)

    def abort(self, ids: Collection[str] | None) -> list[Generated]:
        return [self._end(name, Finish.ABORT) for name in list(self._requests) if ids is None or name in ids]

    def update(
        self, version: Version, weights: Mapping[str, NamedBuffer], cached: Cached, *, verified: bool = False
    ) -> None:
        if self._version is not None and version == self._version:
            return
        if self._version is not None and version < self._version:
            raise LineageInvalid(
                f"update to {version}",
                expected=f"one after {self._version}",
                action="ask the manager",
                code="version_order",
            )
        if not verified and version.digest and buffers_digest(weights) != version.digest:
            raise ArtifactCorrupt("weights of another digest", expected=version.digest, action="send them again")
        self._version = version
        self._updates += 1

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return [np.full(len(tokens) - 1, -np.log(self._vocabulary), np.float32) for tokens in sequences]

    def checksum(self) -> str:
        return self._version.digest if self._version else ""

    def stats(self) -> EngineStats:
        running = min(len(self._requests), self._slots)
        return EngineStats(
            self._version,
            running,
            len(self._requests) - running,
            self._slots - running,
            self._tokens,
            self._updates,
            0.0,
        )
