"""The model module: its two forward paths against each other, and what loads into it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.generation.weights import to_buffer, weight_buffers
from gpu.models.config import TINY, LlamaConfig, ModelSpec, find, load_config
from gpu.models.llama import KVCache, LlamaModel, cached_forward
from gpu.models.loading import load_model
from gpu.models.tokenizer import CharTokenizer, ChatTokenizer, Message
from storage.buffers import to_safetensors
from storage.errors import ConfigurationRefused, ResourceUnavailable

CPU = torch.device("cpu")
GROUPED = LlamaConfig(100, 48, 64, 3, 6, 2, 10_000.0, 1e-5, False, 64)


def model(config: LlamaConfig = GROUPED) -> LlamaModel:
    made = LlamaModel(config)
    made.init_weights(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0)
    return made


def test_the_tiny_model_has_the_size_it_is_named_for() -> None:
    assert sum(p.numel() for p in load_model(ModelSpec("tiny", 0, ""), torch.float32, CPU).parameters()) == 28_832


@pytest.mark.parametrize("config", [GROUPED, TINY])
def test_cached_generation_sees_what_the_full_forward_sees(config: LlamaConfig) -> None:
    made, dice = model(config), np.random.default_rng(0)
    lengths = [5, 9, 3]
    rows = [dice.integers(0, config.vocab_size, n).tolist() for n in lengths]
    with torch.no_grad():
        full = [made(torch.tensor([row]))[0] for row in rows]
        cache = KVCache(config, 5, 16, torch.float32, CPU)
        slots = torch.tensor([0, 2, 4])
        first = [2, 4, 1]
        padded = torch.tensor([row[:n] + [0] * (4 - n) for row, n in zip(rows, first, strict=True)])
        hidden = cached_forward(made, cache, padded, torch.tensor(first), torch.zeros(3, dtype=torch.long), slots)
        for i, n in enumerate(first):
            torch.testing.assert_close(hidden[i], full[i][n - 1], atol=1e-5, rtol=1e-4)
        rest = [n - k for n, k in zip(lengths, first, strict=True)]
        width = max(rest)
        padded = torch.tensor([row[k:] + [0] * (width - len(row[k:])) for row, k in zip(rows, first, strict=True)])
        hidden = cached_forward(made, cache, padded, torch.tensor(rest), torch.tensor(first), slots)
        for i, n in enumerate(lengths):
            torch.testing.assert_close(hidden[i], full[i][n - 1], atol=1e-5, rtol=1e-4)


def test_padding_changes_nothing() -> None:
    made = model()
    with torch.no_grad():
        short = made(torch.tensor([[1, 2, 3]]))
        padded = made(torch.tensor([[1, 2, 3, 9, 9]]))
    torch.testing.assert_close(short[0], padded[0, :3])


def test_a_checkpoint_folder_in_hugging_face_layout_loads(tmp_path: Path) -> None:
    made = model()
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(to_safetensors(weight_buffers(made)))
    loaded = load_model(ModelSpec(str(tmp_path), 0, ""), torch.float32, CPU)
    assert loaded.config == GROUPED
    for (name, a), (_, b) in zip(made.named_parameters(), loaded.named_parameters(), strict=True):
        assert (to_buffer(a).data == to_buffer(b).data).all(), name


@pytest.mark.parametrize("change", [{"model_type": "gpt2"}, {"rope_scaling": {"type": "linear"}}, {"head_dim": 3}])
def test_other_architectures_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    config = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationRefused):
        load_config(tmp_path)


def test_files_that_lack_a_tensor_are_refused_by_name(tmp_path: Path) -> None:
    weights = weight_buffers(model())
    del weights["model.norm.weight"]
    (tmp_path / "model.safetensors").write_bytes(to_safetensors(weights))
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationRefused, match=r"model\.norm\.weight"):
        load_model(ModelSpec(str(tmp_path), 0, ""), torch.float32, CPU)


def test_an_unknown_model_is_the_users_error() -> None:
    with pytest.raises(ResourceUnavailable, match="no model 'llama9'") as caught:
        find(ModelSpec("llama9", 0, ""))
    assert caught.value.exit_code == 2


def test_characters_round_trip_and_unknown_ones_are_refused() -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.prompt([Message("user", "bac>")])
    assert tokenizer.decode(ids) == "bac>"
    assert tokenizer.stop_ids == {tokenizer.prompt([Message("user", "\n")])[0]}
    assert max(tokenizer.prompt([Message("user", CharTokenizer.ALPHABET)])) < tokenizer.vocab_size
    with pytest.raises(ConfigurationRefused, match="ü"):
        tokenizer.prompt([Message("user", "ü")])


def test_a_chat_template_renders_prompts_and_what_follows_a_turn(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers

    vocabulary = {char: i for i, char in enumerate(sorted({*map(chr, range(32, 127)), "\n"}))}
    vocabulary["<end>"] = len(vocabulary)
    fast = Fast(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast.add_special_tokens(["<end>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    settings = {"chat_template": template, "eos_token": {"content": "<end>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = ChatTokenizer(tmp_path)

    def text(ids: list[int]) -> str:
        return "".join(tokenizer._fast.id_to_token(i) for i in ids)

    assert text(tokenizer.prompt([Message("user", "hi")])) == "[user]hi<end>\n[assistant]"
    assert text(tokenizer.extend([Message("user", "more")], stopped=True)) == "\n[user]more<end>\n[assistant]"
    assert text(tokenizer.extend([Message("user", "more")], stopped=False)) == "<end>\n[user]more<end>\n[assistant]"
    assert tokenizer.stop_ids == {vocabulary["<end>"]}
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigurationRefused, match="no chat template"):
        ChatTokenizer(tmp_path)
