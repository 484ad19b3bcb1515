"""AdamW over named parameters, with its whole state as named buffers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch
from torch import nn

from gpu.generation.weights import to_tensor
from gpu.training.settings import OptimizerSettings
from storage.buffers import NamedBuffer
from storage.errors import ArtifactCorrupt, TrainingDiverged


class Optimizer:
    """`updates` counts optimizer updates; it drives warm-up and Adam's bias correction, and is part of the state."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._named = dict(model.named_parameters())
        self.updates = 0
        self._adam = torch.optim.AdamW(
            self._named.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
        for parameter in self._named.values():
            self._adam.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def clip(self) -> float:
        """Bound the accumulated gradient; returns its norm before. Raises `TrainingDiverged` when it is not finite."""
        norm = float(nn.utils.clip_grad_norm_(self._named.values(), self._settings.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainingDiverged(
                f"gradient norm {norm} at update {self.updates + 1}", expected="a finite gradient",
                action="lower the learning rate, or inspect the step's groups with `tidegate inspect`",
            )  # fmt: skip
        return norm

    def drop_gradients(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def update(self) -> None:
        """Apply the accumulated gradients and clear them."""
        for group in self._adam.param_groups:
            group["lr"] = self._settings.learning_rate * min(1.0, (self.updates + 1) / max(1, self._settings.warmup))
        self._adam.step()
        self.drop_gradients()
        self.updates += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """First and second moments by parameter name, not copied."""
        return {
            f"optimizer/{part}/{name}": self._adam.state[parameter][part]
            for name, parameter in self._named.items()
            for part in ("exp_avg", "exp_avg_sq")
        }

    def meta(self) -> str:
        return json.dumps({"updates": self.updates}, sort_keys=True)

    def load(self, buffers: Mapping[str, NamedBuffer], meta: str) -> None:
        """Take over a saved state. Raises `ArtifactCorrupt` when it is not this optimizer's."""
        try:
            self.updates = int(json.loads(meta)["updates"])
            for name, parameter in self._named.items():
                state = self._adam.state[parameter]
                for part in ("exp_avg", "exp_avg_sq"):
                    state[part].copy_(to_tensor(buffers[f"optimizer/{part}/{name}"]))
                state["step"].fill_(float(self.updates))
        except (KeyError, ValueError, RuntimeError) as error:
            raise ArtifactCorrupt(
                f"optimizer state does not fit the model: {error}",
                expected="the state of this model's optimizer",
                action="resume with the model the run was started with",
            ) from error
