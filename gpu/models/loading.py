"""From a model's name to its parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gpu.models.config import LlamaConfig, ModelSpec, find, load_config
from gpu.models.llama import LlamaModel
from storage.errors import ConfigurationRefused


def empty_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """A model whose parameters are allocated, not set."""
    with torch.device("meta"):
        model = LlamaModel(config)
    return model.to(dtype).to_empty(device=device)


def load_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """The model with its initial weights. Raises `ConfigurationRefused` for files that do not fit the architecture."""
    folder = find(spec)
    config = load_config(folder)
    if folder is None:
        model = LlamaModel(config)
        model.init_weights(spec.seed)
        return model.to(device=device, dtype=dtype)
    model = empty_model(config, dtype, device)
    _fill(model, folder)
    return model


def _fill(model: LlamaModel, folder: Path) -> None:
    from safetensors import safe_open

    missing = dict(model.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard, torch.no_grad():
            for name in shard.keys():  # noqa: SIM118 - not a dict
                if name in missing:
                    _copy(missing.pop(name), shard.get_tensor(name), name, folder)
    if missing:
        raise ConfigurationRefused(
            f"{folder.name} lacks {len(missing)} tensors, the first is {next(iter(missing))}",
            expected="all parameters of its config.json",
            action="complete the model's folder",
        )


def _copy(parameter: Tensor, value: Tensor, name: str, folder: Path) -> None:
    if parameter.shape != value.shape:
        raise ConfigurationRefused(
            f"{folder.name}: {name} has shape {tuple(value.shape)}",
            expected=f"{tuple(parameter.shape)}",
            action="complete the model's folder",
        )
    parameter.copy_(value)
