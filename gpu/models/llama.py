"""A Llama-family decoder in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The same parameters serve the trainer (`LlamaModel.forward`, with gradients) and the engine (`cached_forward`, with a
slot KV cache and no gradients). Parameter names are those of Hugging Face checkpoints.

Shape suffixes: B sequences, T tokens, S cached positions, D hidden, H query heads, K key/value heads, E head size,
V vocabulary, N cache slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name the field uses

from gpu.models.config import LlamaConfig


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections of one layer; how keys and values are kept is the caller's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, head = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv, self.head_dim = config.num_attention_heads, config.num_key_value_heads, head
        self.q_proj = nn.Linear(size, self.num_heads * head, bias=False)
        self.k_proj = nn.Linear(size, self.num_kv * head, bias=False)
        self.v_proj = nn.Linear(size, self.num_kv * head, bias=False)
        self.o_proj = nn.Linear(self.num_heads * head, size, bias=False)

    def project(self, x_BTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, E], keys and values [B, T, K, E], rotated."""
        batch, length, _ = x_BTD.shape
        q = self.q_proj(x_BTD).view(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(x_BTD).view(batch, length, self.num_kv, self.head_dim)
        v = self.v_proj(x_BTD).view(batch, length, self.num_kv, self.head_dim)
        return rotate(q, cos_BTE, sin_BTE), rotate(k, cos_BTE, sin_BTE), v


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # Not drawn here: `init_weights` or a file sets it, and a draw on the meta device imports a compiler first.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def each(self) -> Iterator[Layer]:
        return iter(cast("list[Layer]", self.layers))


class LlamaModel(nn.Module):
    """Causal language model. `forward` gives hidden states; `logits` applies the head where it is needed."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def init_weights(self, seed: int) -> None:
        """Normal(0, 0.02) weights, ones in norms; residual projections scaled by depth (GPT-2's rule)."""
        generator = torch.Generator().manual_seed(seed)
        scale = 1 / math.sqrt(2 * self.config.num_hidden_layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                    parameter.normal_(0.0, 0.02 * scale if residual else 0.02, generator=generator)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None, mask_BTT: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, D]. Without a mask, plain causal attention over right-padded sequences (padding comes
        last, so causality hides it); `mask_BTT` is True where the first position may see the second."""
        batch, length = tokens_BT.shape
        if positions_BT is None:
            positions_BT = torch.arange(length, device=tokens_BT.device).expand(batch, length)
        x = self.model.embed_tokens(tokens_BT)
        cos, sin = rotation(positions_BT, self.config, x.dtype)
        mask = None if mask_BTT is None else mask_BTT[:, None]
        for layer in self.model.each():
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            attended = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, is_causal=mask is None, enable_gqa=True
            )
            x = x + layer.self_attn.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]"""
        head = self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(hidden, head)


def rotation(positions_BT: Tensor, config: LlamaConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, E] of rotary position embedding (arXiv 2104.09864), half-split layout."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = positions_BT[..., None].float() * (1.0 / config.rope_theta**half)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BTHE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    first, second = x_BTHE.chunk(2, -1)
    return x_BTHE * cos_BTE[:, :, None] + torch.cat([-second, first], -1) * sin_BTE[:, :, None]


class KVCache:
    """Keys and values of `slots` sequences of at most `length` tokens: two tensors [layers, N, K, S, E]."""

    def __init__(self, config: LlamaConfig, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def copy_slots(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `source` [n] to slots `target` [n]."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


def cached_forward(
    model: LlamaModel,
    cache: KVCache,
    tokens_BT: Tensor,
    lengths_B: Tensor,
    starts_B: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """Append right-padded tokens to their slots; hidden state [B, D] of each sequence's last token.

    Sequence b holds `lengths[b]` new tokens at positions starts[b].. of slot slots[b].
    """
    batch, length = tokens_BT.shape
    device = tokens_BT.device
    offsets_T = torch.arange(length, device=device)
    positions_BT = starts_B[:, None] + offsets_T
    valid_BT = offsets_T < lengths_B[:, None]
    total = int((starts_B + lengths_B).max())
    hidden_BTS = torch.arange(total, device=device) > positions_BT[..., None]
    bias = torch.zeros(hidden_BTS.shape, dtype=cache.keys.dtype, device=device).masked_fill(hidden_BTS, float("-inf"))
    where = (slots_B[:, None].expand(batch, length)[valid_BT], positions_BT[valid_BT])
    dense = bool((slots_B == torch.arange(batch, device=device)).all())
    x = model.model.embed_tokens(tokens_BT)
    cos, sin = rotation(positions_BT, model.config, x.dtype)
    for index, layer in enumerate(model.model.each()):
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
        keys, values = cache.keys[index], cache.values[index]
        keys[where[0], :, where[1]] = k[valid_BT]
        values[where[0], :, where[1]] = v[valid_BT]
        seen_k = keys[:batch, :, :total] if dense else keys[slots_B, :, :total]
        seen_v = values[:batch, :, :total] if dense else values[slots_B, :, :total]
        attended = _grouped_attention(q, seen_k, seen_v, bias)
        x = x + layer.self_attn.o_proj(attended)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    last = x[torch.arange(batch, device=device), lengths_B - 1]
    return model.model.norm(last)


def _grouped_attention(q_BTHE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, bias_BTS: Tensor) -> Tensor:
    """Plain matmuls: for one query per sequence they beat the fused kernel on CPUs by 1.5 to 2 times. [B, T, H*E]"""
    batch, length, heads, size = q_BTHE.shape
    groups = k_BKSE.shape[1]
    q = q_BTHE.view(batch, length, groups, heads // groups, size).permute(0, 2, 3, 1, 4)
    scores = torch.matmul(q.reshape(batch, groups, -1, size), k_BKSE.transpose(2, 3)) / math.sqrt(size)
    scores = scores.view(batch, groups, heads // groups, length, -1) + bias_BTS[:, None, None]
    weights = scores.float().softmax(-1).to(v_BKSE.dtype)
    mixed = torch.matmul(weights.view(batch, groups, -1, weights.shape[-1]), v_BKSE)
    mixed = mixed.view(batch, groups, heads // groups, length, size)
    return mixed.permute(0, 3, 1, 2, 4).reshape(batch, length, heads * size)
