"""The trainer: a deterministic state machine over optimizer steps.

`train(step, lease, ...)` is a compare-and-set on the state's digest: it runs only from exactly the expected state,
repeats its answer for the step and lease it did last, and refuses everything else. Its whole state (weights, optimizer,
random state, counters) has one digest, is captured between two steps, and is restored from verified buffers only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from gpu.generation.weights import DTYPES, copy_bytes, install, to_buffer, weight_buffers
from gpu.models.config import ModelSpec
from gpu.models.llama import LlamaModel
from gpu.models.loading import load_model
from gpu.training.advantage import group_normalized, has_signal
from gpu.training.loss import Clip, clip_fraction, clipped_token_loss
from gpu.training.messages import Trained
from gpu.training.optimizer import Optimizer
from gpu.training.packing import Pack, PackedBatch, collate, micro_batches, pack_group
from gpu.training.settings import TrainingSettings
from storage.buffers import NamedBuffer, buffers_digest, tensor_digests
from storage.capture import Capture, CaptureBuffers
from storage.errors import ArtifactCorrupt, LeaseRefused
from storage.host_memory import HostMemory
from storage.layout import Layout, TensorKind
from storage.samples import Sample

_WEIGHTS, _RNG = "weights/", "rng/torch"

Slots = Sequence[Sequence[Sample]]
"""A group as `storage.samples.assemble` returns it: the samples of each sibling slot, in slot order."""


class Trainer:
    """See the module. `step` counts the optimizer steps in the state, 0 for initial weights."""

    def __init__(self, spec: ModelSpec, settings: TrainingSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        # Its own generator: the process's global one may be moved by anybody between a step and its checkpoint.
        self._random = torch.Generator().manual_seed(spec.seed)
        self._model: LlamaModel = load_model(spec, torch.float32, device)
        self._optimizer = Optimizer(self._model, settings.optimizer)
        self._engine_dtype = next(dtype for dtype, name in DTYPES.items() if name == settings.engine_dtype)
        self.step = 0
        self.state_digest = self.weights_digest = ""
        self._tensor_digests: dict[str, str] = {}
        self._take_digests()
        self._last: Trained | None = None
        self.ahead_of = ""
        """The state that the last step was trained from, as long as that step may be asked for again."""
        self.clean = True
        """False from the first in-place change of a step until its digests are known: the state is then nobody's."""

    # ------------------------------------------------------------------ the step

    def train(self, step: int, lease: int, expected: str, groups: Sequence[Slots], versions: int) -> Trained:
        """One optimizer step on the groups, in order. `expected` is the digest of the state to start from, empty for
        initial weights; `versions` the version being trained, for staleness metrics. Raises `LeaseRefused`."""
        if self._last is not None and (self._last.step, self._last.lease) == (step, lease):
            return self._last
        if not self.clean or step != self.step + 1 or (expected and expected != self.state_digest):
            raise LeaseRefused(
                f"step {step} from state {expected[:12]} while the trainer is at step {self.step}, "
                f"state {self.state_digest[:12]}{'' if self.clean else ', half changed'}",
                expected="the next step from exactly the trainer's state",
                action="restore the trainer from the journal, then train again",
                code="state",
            )
        started = time.monotonic()
        before = self.state_digest
        metrics = self._optimize(groups)
        self._take_digests()
        self.step, self.clean = step, True
        metrics |= _sample_metrics(groups, versions) | {"seconds": time.monotonic() - started}
        self._last, self.ahead_of = Trained(step, lease, self.state_digest, self.weights_digest, metrics), before
        return self._last

    def forget_last(self) -> None:
        """Do not answer for the last step again: whoever may have leased it is gone."""
        self._last, self.ahead_of = None, ""

    def _optimize(self, groups: Sequence[Slots]) -> dict[str, float]:
        """Every sample of a slot is trained with the slot's advantage; the baseline is over slots."""
        kept = self._kept(groups)
        packs = [pack for group in kept for pack in pack_group(group, group_normalized(_rewards(group)))]
        tokens = sum(len(pack.targets) for pack in packs)
        sums = {"loss": 0.0, "clip_fraction": 0.0, "logprob_gap": 0.0}
        if not tokens:
            return {**sums, "grad_norm": 0.0, "trained_groups": 0.0, "trained_tokens": 0.0}
        try:
            for micro in micro_batches(packs, self._settings.micro_positions):
                for name, value in self._accumulate(micro, tokens).items():
                    sums[name] += value
            norm = self._optimizer.clip()
        except BaseException:
            self._optimizer.drop_gradients()  # nothing was changed: the step may be tried again or rolled back
            raise
        self.clean = False
        self._optimizer.update()
        return {**sums, "grad_norm": norm, "trained_groups": float(len(kept)), "trained_tokens": float(tokens)}

    def _kept(self, groups: Sequence[Slots]) -> list[Slots]:
        if not self._settings.drop_zero_variance:
            return list(groups)
        return [group for group in groups if has_signal(_rewards(group))]

    def _accumulate(self, micro: list[Pack], tokens: int) -> dict[str, float]:
        """Gradients of one micro batch, normalised by the token count of the whole batch."""
        batch = collate(micro, self._device)
        logprobs = self._logprobs(batch)
        clip = Clip(self._settings.clip_low, self._settings.clip_high)
        loss = clipped_token_loss(logprobs, batch.behaviour_P, batch.advantages_P, clip) / tokens
        loss.backward()
        with torch.no_grad():
            return {
                "loss": float(loss),
                "clip_fraction": float(clip_fraction(logprobs, batch.behaviour_P, batch.advantages_P, clip)) / tokens,
                "logprob_gap": float((logprobs - batch.behaviour_P).abs().sum()) / tokens,
            }

    def _logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log probability of each generated token [P]; the head runs on those positions only."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.autocast):
            hidden = self._model(batch.tokens_BT, batch.positions_BT, batch.mask_BTT)
            logits = self._model.logits(hidden[batch.rows_P, batch.predictors_P])
        return torch.log_softmax(logits.float(), -1).gather(-1, batch.targets_P[:, None])[:, 0]

    # ------------------------------------------------------------------ state

    def weights(self) -> dict[str, NamedBuffer]:
        """The weights as engines receive them, in memory of their own unless the dtypes agree on the CPU."""
        if self._engine_dtype is torch.float32:
            return weight_buffers(self._model)
        return {name: to_buffer(p.detach().to(self._engine_dtype)) for name, p in self._model.named_parameters()}

    def _state(self) -> dict[str, torch.Tensor]:
        """All tensors of the state, where they are."""
        weights = {f"{_WEIGHTS}{name}": parameter.detach() for name, parameter in self._model.named_parameters()}
        return weights | self._optimizer.tensors() | {_RNG: self._random.get_state()}

    def _take_digests(self) -> None:
        state = {name: to_buffer(tensor) for name, tensor in self._state().items()}
        self._tensor_digests = tensor_digests(state)
        self.state_digest = buffers_digest(state, self._optimizer.meta(), self._tensor_digests)
        self.weights_digest = buffers_digest(self.weights())

    def prepare(self, buffers: CaptureBuffers) -> tuple[Layout, HostMemory]:
        """Make room for a capture."""
        return buffers.prepare({n: TensorKind(DTYPES[t.dtype], tuple(t.shape)) for n, t in self._state().items()})

    def capture(self, buffers: CaptureBuffers) -> Capture:
        """Copy the state to where later steps do not touch it."""
        layout, memory = self.prepare(buffers)
        state = self._state()
        for place in buffers.places():
            copy_bytes(state[place.tensor], place.start, place.data)
        meta = self._optimizer.meta()
        return Capture(self.step, self.state_digest, self.weights_digest, meta, self._tensor_digests, layout, memory)

    def load(self, step: int, buffers: Mapping[str, NamedBuffer], meta: str, state_digest: str) -> None:
        """Install a verified checkpoint. Raises `ArtifactCorrupt` when it does not fit or is another state."""
        weights = {name.removeprefix(_WEIGHTS): b for name, b in buffers.items() if name.startswith(_WEIGHTS)}
        actual = buffers_digest(buffers, meta)
        if actual != state_digest or {f"{_WEIGHTS}{name}" for name in weight_buffers(self._model)} - buffers.keys():
            raise ArtifactCorrupt(
                f"checkpoint of step {step} holds state {actual[:12]} with {len(weights)} weights",
                expected=f"state {state_digest[:12]} of this model",
                action="resume with the run's own model",
            )
        self.clean = False
        install(self._model, weights)
        self._optimizer.load(buffers, meta)
        self._random.set_state(torch.from_numpy(np.array(buffers[_RNG].data)))
        self._take_digests()
        self.step, self.clean = step, True
        self.forget_last()


def _rewards(group: Slots) -> list[float]:
    """One for each slot: its samples share it."""
    return [slot[0].reward for slot in group]


def _sample_metrics(groups: Sequence[Slots], version: int) -> dict[str, float]:
    """Rewards and generated tokens are per rollout, ages per group."""
    slots = [slot for group in groups for slot in group]
    rewards = np.array([slot[0].reward for slot in slots])
    oldest = [min(span.number for sample in chain(*group) for span in sample.spans) for group in groups]
    ages = version - np.array(oldest)
    lengths = np.array([sum(int(sample.mask.sum()) for sample in slot) for slot in slots])
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
        "tokens_mean": float(lengths.mean()),
        "groups": float(len(groups)),
        "samples": float(sum(len(slot) for slot in slots)),
    }
