"""The embedded engine: any Llama-family model on torch, with a slot KV cache and continuous batching.

Requests enter free slots between two decode steps. Weights change between two steps, so a request may span versions;
its spans say which token came from which. Identical contexts that enter together are computed once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu.generation.engine import Cached, EngineStats, Finish, Generated, GenRequest, Version
from gpu.generation.sampling import sample, uniforms
from gpu.generation.weights import check_weights, install, weight_buffers
from gpu.models.config import LlamaConfig
from gpu.models.llama import KVCache, LlamaModel, cached_forward
from gpu.models.loading import empty_model
from storage.buffers import NamedBuffer, buffers_digest
from storage.errors import ConfigurationRefused, LineageInvalid
from storage.payload import VersionSpan


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request in a slot. `cached` tokens of `tokens` have keys and values; the last one is the next input."""

    request: GenRequest
    slot: int
    tokens: list[int]
    cached: int = 0
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def finished(self) -> Finish | None:
        if self.generated and self.generated[-1] in self.request.sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.generated) >= self.request.sampling.max_tokens else None

    def result(self, finish: Finish) -> Generated:
        return Generated(
            self.request.id,
            np.array(self.generated, np.int32),
            np.array(self.logprobs, np.float32),
            tuple(self.spans),
            finish,
        )


class TorchEngine:
    """See `gpu.generation.engine.Engine`. `slots` sequences of at most `max_length` tokens run at once."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        in_flight_swap: bool = True,
    ) -> None:
        supported = {"kv_recompute", "score", "checksum", "determinism"}
        self.capabilities = frozenset(supported | ({"in_flight_swap"} if in_flight_swap else set()))
        self._config, self._max_length = config, min(max_length, config.max_position_embeddings)
        self._device, self._dtype = device, dtype
        self._model: LlamaModel = empty_model(config, dtype, device).requires_grad_(False)
        self._cache = KVCache(config, slots, self._max_length, dtype, device)
        self._free = list(range(slots))
        self._waiting: deque[GenRequest] = deque()
        self._running: dict[int, _Sequence] = {}
        self._version: Version | None = None
        self._tokens = self._updates = 0
        self._paused = 0.0

    # ------------------------------------------------------------------ requests

    def add(self, request: GenRequest) -> None:
        length = len(request.prompt) + request.sampling.max_tokens
        if not request.prompt or length > self._max_length or request.sampling.max_tokens < 1:
            raise ConfigurationRefused(
                f"request {request.id}: {len(request.prompt)} prompt tokens + {request.sampling.max_tokens} new ones",
                expected=f"at least one of each, at most {self._max_length} together",
                action="raise generation.max_length, or shorten the environment's prompts",
            )
        self._waiting.append(request)

    def abort(self, ids: Collection[str] | None) -> list[Generated]:
        ended: list[Generated] = []
        for sequence in list(self._running.values()):
            if ids is None or sequence.request.id in ids:
                ended.append(sequence.result(Finish.ABORT))
                self._release(sequence)
        kept: deque[GenRequest] = deque()
        for request in self._waiting:
            if ids is None or request.id in ids:
                ended.append(_start(request, -1).result(Finish.ABORT))
            else:
                kept.append(request)
        self._waiting = kept
        return ended

    def _release(self, sequence: _Sequence) -> None:
        del self._running[sequence.slot]
        self._free.append(sequence.slot)
        self._free.sort(reverse=True)

    # ------------------------------------------------------------------ generation

    @torch.inference_mode()
    def step(self) -> list[Generated]:
        if self._version is None:
            return []
        entering = self._admit()
        ended: list[Generated] = []
        if entering:
            ended += self._append_tokens(entering, self._prefill(entering))
        old = [sequence for sequence in self._running.values() if sequence not in entering]
        if old:
            ended += self._append_tokens(old, self._forward(old))
        return ended

    def _admit(self) -> list[_Sequence]:
        entering: list[_Sequence] = []
        while self._waiting and self._free:
            sequence = _start(self._waiting.popleft(), self._free.pop())
            self._running[sequence.slot] = sequence
            entering.append(sequence)
        return entering

    def _prefill(self, sequences: list[_Sequence]) -> Tensor:
        """Compute each distinct context once and copy it to the slots that share it; logits in the given order."""
        leaders: dict[tuple[int, ...], _Sequence] = {}
        for sequence in sequences:
            leaders.setdefault(tuple(sequence.tokens), sequence)
        computed = list(leaders.values())
        logits = self._forward(computed)
        row = {sequence.slot: index for index, sequence in enumerate(computed)}
        followers = [s for s in sequences if leaders[tuple(s.tokens)] is not s]
        if followers:
            source = torch.tensor([leaders[tuple(s.tokens)].slot for s in followers], device=self._device)
            target = torch.tensor([s.slot for s in followers], device=self._device)
            self._cache.copy_slots(source, target, max(len(s.tokens) for s in followers))
            for sequence in followers:
                sequence.cached = len(sequence.tokens)
        return logits[[row[leaders[tuple(s.tokens)].slot] for s in sequences]]

    def _forward(self, sequences: list[_Sequence]) -> Tensor:
        """Feed what is not cached yet; logits [B, V] of the next token. Sorts `sequences` by slot, in place."""
        sequences.sort(key=lambda sequence: sequence.slot)
        new = [sequence.tokens[sequence.cached :] for sequence in sequences]
        width = max(len(tokens) for tokens in new)
        padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in new], device=self._device)
        lengths = torch.tensor([len(tokens) for tokens in new], device=self._device)
        starts = torch.tensor([sequence.cached for sequence in sequences], device=self._device)
        slots = torch.tensor([sequence.slot for sequence in sequences], device=self._device)
        hidden = cached_forward(self._model, self._cache, padded, lengths, starts, slots)
        for sequence in sequences:
            sequence.cached = len(sequence.tokens)
        return self._model.logits(hidden)

    def _append_tokens(self, sequences: list[_Sequence], logits: Tensor) -> list[Generated]:
        assert self._version is not None
        seeds = np.array([sequence.request.sampling.seed for sequence in sequences], np.uint64)
        indices = np.array([len(sequence.generated) for sequence in sequences], np.uint64)
        temperatures = np.array([sequence.request.sampling.temperature for sequence in sequences], np.float64)
        tokens, logprobs = sample(logits, temperatures, uniforms(seeds, indices))
        self._tokens += len(sequences)
        ended: list[Generated] = []
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.generated.append(token)
            sequence.logprobs.append(logprob)
            _extend_spans(sequence.spans, self._version, len(sequence.generated))
            finish = sequence.finished()
            if finish is not None:
                ended.append(sequence.result(finish))
                self._release(sequence)
        return ended

    # ------------------------------------------------------------------ weights

    @torch.inference_mode()
    def update(
        self, version: Version, weights: Mapping[str, NamedBuffer], cached: Cached, *, verified: bool = False
    ) -> None:
        if self._version is not None and version == self._version:
            return
        if self._version is not None and version < self._version:
            raise LineageInvalid(
                f"update to version ({version.incarnation}, {version.number})",
                expected=f"one after ({self._version.incarnation}, {self._version.number})",
                action="ask the manager for the current version",
                code="version_order",
            )
        check_weights(self._model, weights, "" if verified else version.digest)
        started = time.monotonic()
        install(self._model, weights)
        self._version = version
        if cached is Cached.RECOMPUTE and self._running:
            self._recompute()
        self._updates += 1
        self._paused += time.monotonic() - started

    def _recompute(self) -> None:
        """Compute keys and values of all running sequences anew, up to but not including their next input."""
        sequences = [sequence for sequence in self._running.values() if len(sequence.tokens) > 1]
        for sequence in sequences:
            sequence.cached = 0
        if not sequences:
            return
        last = [sequence.tokens.pop() for sequence in sequences]
        self._forward(list(sequences))
        for sequence, token in zip(sequences, last, strict=True):
            sequence.tokens.append(token)

    @torch.inference_mode()
    def score(self, sequences: list[list[int]]) -> list[npt.NDArray[np.float32]]:
        scores: list[npt.NDArray[np.float32]] = []
        for tokens in sequences:
            ids = torch.tensor([tokens], device=self._device)
            logprobs = torch.log_softmax(self._model.logits(self._model(ids)[0, :-1]).float(), -1)
            scores.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy())
        return scores

    def checksum(self) -> str:
        return buffers_digest(weight_buffers(self._model))

    def stats(self) -> EngineStats:
        return EngineStats(
            self._version,
            len(self._running),
            len(self._waiting),
            len(self._free),
            self._tokens,
            self._updates,
            self._paused,
        )


def _start(request: GenRequest, slot: int) -> _Sequence:
    before = request.partial
    return _Sequence(
        request,
        slot,
        [*request.prompt, *before.tokens],
        0,
        list(before.tokens),
        list(before.logprobs),
        list(before.spans),
    )


def _extend_spans(spans: list[VersionSpan], version: Version, end: int) -> None:
    if spans and (spans[-1].incarnation, spans[-1].number) == (version.incarnation, version.number):
        spans[-1] = spans[-1]._replace(end=end)
    else:
        spans.append(VersionSpan(version.incarnation, version.number, end))
