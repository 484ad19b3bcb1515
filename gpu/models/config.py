"""What a model is, without torch: its sizes, where its files are, its tokenizer.

A name is `tiny` (28,832 parameters from random weights), `smollm2-135m` (converted once from its data package), a
folder with config.json and safetensors, or a hub name, for which the optional package `huggingface_hub` is used.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from gpu.models import smollm2
from gpu.models.tokenizer import CharTokenizer, ChatTokenizer, Tokenizer
from storage.errors import ConfigurationRefused, ResourceUnavailable


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes, with the names of a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """`seed` draws the weights of models that start from random ones; `cache` is where conversions are kept."""

    name: str
    seed: int
    cache: str


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def find(spec: ModelSpec) -> Path | None:
    """The model's folder, converting or downloading if need be; None for `tiny`. Raises what the user can mend."""
    if spec.name == "tiny":
        return None
    if spec.name == "smollm2-135m":
        return smollm2.convert(Path(spec.cache).expanduser() / "smollm2-135m")
    folder = Path(spec.name).expanduser()
    if (folder / "config.json").exists():
        return folder
    if _HUB_NAME.fullmatch(spec.name):
        return _download(spec.name)
    raise ResourceUnavailable(
        f"no model {spec.name!r}",
        expected="tiny, smollm2-135m, a folder with config.json, or a hub name org/name",
        action="check model.name",
    )


def _download(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ResourceUnavailable(
            f"model {name!r} is a hub name and huggingface_hub is not installed",
            expected="the extra `hub`",
            action="pip install 'tidegate[hub]', or give a local folder",
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except OSError as error:  # the hub's errors for absent models and absent networks
        raise ResourceUnavailable(
            f"model {name!r} could not be downloaded: {error}",
            expected="a reachable hub and an existing model",
            action="check the name and the network, or give a local folder",
        ) from error


def load_config(folder: Path | None) -> LlamaConfig:
    """Sizes of a model. Raises `ConfigurationRefused` for architectures that are not Llama's."""
    if folder is None:
        return TINY
    stated = json.loads((folder / "config.json").read_text())
    kind = stated.get("model_type")
    if kind != "llama" or stated.get("attention_bias") or stated.get("rope_scaling"):
        raise ConfigurationRefused(
            f"{folder.name} is a {kind!r} model",
            expected="a Llama-family model without attention bias or rope scaling",
            action="choose a supported model",
        )
    heads = stated["num_attention_heads"]
    head_dim = stated.get("head_dim") or stated["hidden_size"] // heads
    if head_dim * heads != stated["hidden_size"]:
        raise ConfigurationRefused(
            f"{folder.name} has heads of size {head_dim}",
            expected=f"{stated['hidden_size']} / {heads}",
            action="choose a supported model",
        )
    return LlamaConfig(
        vocab_size=stated["vocab_size"],
        hidden_size=stated["hidden_size"],
        intermediate_size=stated["intermediate_size"],
        num_hidden_layers=stated["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=stated.get("num_key_value_heads", heads),
        rope_theta=float(stated.get("rope_theta") or stated.get("rope_parameters", {}).get("rope_theta", 10_000.0)),
        rms_norm_eps=stated["rms_norm_eps"],
        tie_word_embeddings=bool(stated.get("tie_word_embeddings", False)),
        max_position_embeddings=stated["max_position_embeddings"],
    )


def load_tokenizer(spec: ModelSpec) -> Tokenizer:
    folder = find(spec)
    return CharTokenizer() if folder is None else ChatTokenizer(folder)
