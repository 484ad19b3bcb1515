"""Groups as trees: the prompt that siblings share is computed once, the samples attend to it and to themselves.

A pack is one sequence [prompt, rest of sample 0, rest of sample 1, ...] with restarting positions and a mask. Losses
and gradients are exactly those of separate sequences, for a fraction of the tokens. The first samples of a group's
slots share its prompt, later ones what their contexts have in common: samples with the same index make a pack.

Shape suffixes: B packs, T positions, P generated tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from storage.samples import Sample

_PREFIX, _PADDING = 0, -1


@dataclass(frozen=True, slots=True)
class Pack:
    """Samples of one group. `segments` is 0 for the shared prompt, k for sample k-1. For each generated token:
    `predictors` is the position whose hidden state predicts it; `targets`, `behaviour` and `advantages` are its id, its
    recorded logprob, and its slot's advantage."""

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    predictors: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    behaviour: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Tensors of several packs, padded to one length. `rows` and `predictors` index hidden states [B, T]."""

    tokens_BT: Tensor
    positions_BT: Tensor
    mask_BTT: Tensor
    rows_P: Tensor
    predictors_P: Tensor
    targets_P: Tensor
    behaviour_P: Tensor
    advantages_P: Tensor


def shared_prefix(samples: Sequence[Sample]) -> int:
    """Length of the common prefix of all samples, ending before the first generated token of any."""
    length = min(int(np.argmax(sample.mask)) for sample in samples)
    first = samples[0].tokens[:length]
    for sample in samples[1:]:
        differs = np.nonzero(sample.tokens[:length] != first[:length])[0]
        length = int(differs[0]) if len(differs) else length
    return length


def pack_group(slots: Sequence[Sequence[Sample]], advantages: npt.NDArray[np.float64]) -> list[Pack]:
    """Pack the samples of one group, one pack for each sample index; `advantages` [n], one for each slot, goes to every
    sample of the slot."""
    packs: list[Pack] = []
    for index in range(max(len(slot) for slot in slots)):
        present = [sibling for sibling, slot in enumerate(slots) if index < len(slot)]
        packs.append(pack_samples([slots[sibling][index] for sibling in present], advantages[present]))
    return packs


def pack_samples(samples: Sequence[Sample], advantages: npt.NDArray[np.float64]) -> Pack:
    """One pack; `advantages` has one for each sample."""
    prefix = shared_prefix(samples)
    tokens = [samples[0].tokens[:prefix]]
    positions = [np.arange(prefix)]
    segments = [np.full(prefix, _PREFIX)]
    predictors: list[npt.NDArray[np.int64]] = []
    targets: list[npt.NDArray[np.int32]] = []
    behaviour: list[npt.NDArray[np.float32]] = []
    weights: list[npt.NDArray[np.float64]] = []
    offset = prefix
    for number, sample in enumerate(samples):
        rest = len(sample.tokens) - prefix
        generated = np.nonzero(sample.mask)[0]
        before = generated - 1
        predictors.append(np.where(before < prefix, before, before - prefix + offset))
        targets.append(sample.tokens[generated])
        behaviour.append(sample.logprobs[generated])
        weights.append(np.full(len(generated), advantages[number]))
        tokens.append(sample.tokens[prefix:])
        positions.append(np.arange(prefix, prefix + rest))
        segments.append(np.full(rest, number + 1))
        offset += rest
    return Pack(
        tokens=_joined(tokens),
        positions=_joined(positions),
        segments=_joined(segments),
        predictors=_joined(predictors),
        targets=_joined(targets),
        behaviour=np.concatenate(behaviour).astype(np.float32),
        advantages=np.concatenate(weights).astype(np.float32),
    )


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts).astype(np.int64)


def micro_batches(packs: Sequence[Pack], max_positions: int) -> list[list[Pack]]:
    """Consecutive packs whose padded size stays within `max_positions` (one pack may exceed it alone)."""
    batches: list[list[Pack]] = []
    longest = 0
    for pack in packs:
        longest = max(longest, len(pack))
        if batches and longest * (len(batches[-1]) + 1) <= max_positions:
            batches[-1].append(pack)
        else:
            batches.append([pack])
            longest = len(pack)
    return batches


def collate(packs: Sequence[Pack], device: torch.device) -> PackedBatch:
    """Pad to the longest and build the attention mask."""
    width = max(len(pack) for pack in packs)

    def padded(values: list[npt.NDArray[np.int64]], fill: int) -> Tensor:
        rows = [np.pad(value, (0, width - len(value)), constant_values=fill) for value in values]
        return torch.from_numpy(np.stack(rows)).to(device)

    segments = padded([pack.segments for pack in packs], _PADDING)
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    same = segments[:, :, None] == segments[:, None, :]
    to_prefix = segments[:, None, :] == _PREFIX
    counts = [len(pack.targets) for pack in packs]

    def flat(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(pack, name) for pack in packs])).to(device)

    return PackedBatch(
        tokens_BT=padded([pack.tokens for pack in packs], 0),
        positions_BT=padded([pack.positions for pack in packs], 0),
        mask_BTT=causal & (same | to_prefix),
        rows_P=torch.tensor(list(chain.from_iterable([row] * n for row, n in enumerate(counts))), device=device),
        predictors_P=flat("predictors"),
        targets_P=flat("targets"),
        behaviour_P=flat("behaviour"),
        advantages_P=flat("advantages"),
    )
