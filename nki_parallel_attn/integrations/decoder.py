"""A Llama-family decoder whose attention and feed-forward can be run in more than one way.

`Decoder` holds the weights (under Hugging Face's parameter names) and the order of the steps. How a layer's two blocks
are computed is a `Blocks`: `Dense`, in this file, is the plain model on one process and the reference for everything
else; `kv_parallel_prefill.KVParallelPrefill` deals the KV cache over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.integrations.kv_caches import to_fp8
from nki_parallel_attn.integrations.rope import Rope
from nki_parallel_attn.topology.types import AttentionShape


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder computes.

    Args:
        vocab_size, hidden, layers: sizes of the model.
        q_heads, kv_heads, head_dim: attention heads; q head h reads KV head h // (q_heads // kv_heads).
        intermediate: width of the SwiGLU feed-forward; 0 leaves the block out (attention shapes without weights).
        max_positions: longest context the model was made for.
        rope: rotary embedding.
        rms_norm_eps: added to the mean square.
        sliding_window: per layer, tokens a query sees, its own included; 0 sees the whole prefix.
        tied_embeddings: the output projection is the embedding.
        qkv_bias, output_bias, mlp_bias: which projections carry a bias.
        qk_norm: RMSNorm over each head of Q and K before the rotation (Qwen3).
    """

    vocab_size: int
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    rope: Rope
    sliding_window: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if len(self.sliding_window) != self.layers:
            raise ArgumentError("sliding_window", self.sliding_window, f"one window for each of {self.layers} layers")

    def attention_shape(self) -> AttentionShape:
        """The dimensions a ShardingPlan is made of."""
        return AttentionShape(self.q_heads, self.kv_heads, self.head_dim, layers=self.layers, hidden=self.hidden)


class Blocks(Protocol):
    """How the two blocks of a layer are run; both take and return [S, hidden]."""

    def attention(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """Self-attention of the normed `hidden`, output projection included."""
        ...

    def feed_forward(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """Feed-forward of the normed `hidden`."""
        ...


class Decoder(nn.Module):
    """Embedding, layers, final norm and output projection, for one sequence at a time; weights are to be loaded."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_norm_eps)
        self.lm_head = None if config.tied_embeddings else Projection(config.hidden, config.vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits [S, vocab_size] of `token_ids` [S] int64, on one process."""
        return self.logits(self.run_layers(token_ids, Dense(self.config, len(token_ids), token_ids.device)))

    def run_layers(self, token_ids: Tensor, blocks: Blocks, after_layer: Callable[[], object] | None = None) -> Tensor:
        """Hidden states [S, hidden] after the last layer, each block run by `blocks`.

        Args:
            token_ids: [S] int64.
            blocks: how attention and feed-forward are run.
            after_layer: called when a layer is done, to show progress.

        Raises:
            ArgumentError: token ids that are not one sequence of integers in [0, vocab_size).
        """
        self.check_tokens(token_ids)
        hidden: Tensor = self.embed_tokens(token_ids)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            hidden = hidden + blocks.attention(layer, layer.input_layernorm(hidden))
            if layer.post_attention_layernorm is not None:
                hidden = hidden + blocks.feed_forward(layer, layer.post_attention_layernorm(hidden))
            if after_layer is not None:
                after_layer()
        return hidden

    def logits(self, hidden: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Final norm and output projection: [S, hidden] to [S, vocab_size], or to some `tokens` of the vocabulary."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(self.norm(hidden), weight[tokens])

    def check_tokens(self, token_ids: Tensor) -> None:
        """Raise ArgumentError unless `token_ids` is a non-empty int64 [S] of ids in [0, vocab_size)."""
        if not isinstance(token_ids, Tensor):
            raise ArgumentError("token_ids", type(token_ids).__name__, "a non-empty int64 tensor [S]")
        if token_ids.ndim != 1 or not len(token_ids) or token_ids.dtype != torch.int64:
            got = f"{token_ids.dtype} {list(token_ids.shape)}"
            raise ArgumentError("token_ids", got, "a non-empty int64 tensor [S]")
        low, high = (int(value) for value in token_ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ArgumentError("token_ids", low if low < 0 else high, f"ids in [0, {self.config.vocab_size})")


class DecoderLayer(nn.Module):
    """The weights of one layer."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(config.hidden, config.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_norm_eps) if config.intermediate else None
        self.mlp = SwiGLU(config) if config.intermediate else None


class SelfAttention(nn.Module):
    """Projections of one attention block, and what lies between them and the attention itself."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        q_width, kv_width = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Projection(config.hidden, q_width, bias=config.qkv_bias)
        self.k_proj = Projection(config.hidden, kv_width, bias=config.qkv_bias)
        self.v_proj = Projection(config.hidden, kv_width, bias=config.qkv_bias)
        self.o_proj = Projection(q_width, config.hidden, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project_q(self, hidden: Tensor, cos: Tensor, sin: Tensor, heads: range) -> Tensor:
        """Rotated queries [len(heads), S, head_dim] of some heads at the positions of hidden [S, hidden]."""
        q = self._heads(self.q_proj, hidden, heads)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return self.config.rope.rotate(q, cos, sin)

    def project_kv(self, hidden: Tensor, cos: Tensor, sin: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [len(heads), S, head_dim], at the positions of hidden [S, hidden]."""
        k = self._heads(self.k_proj, hidden, heads)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return self.config.rope.rotate(k, cos, sin), self._heads(self.v_proj, hidden, heads)

    def project_output(self, attention: Tensor, heads: range) -> Tensor:
        """Share [S, hidden] of the output that attention [len(heads), S, head_dim] of `heads` gives, without bias."""
        columns = self.o_proj.weight[:, self._channels(heads)]
        return F.linear(attention.transpose(0, 1).flatten(1), columns)

    def _heads(self, projection: Projection, hidden: Tensor, heads: range) -> Tensor:
        channels = self._channels(heads)
        bias = None if projection.bias is None else projection.bias[channels]
        flat = F.linear(hidden, projection.weight[channels], bias)
        return flat.view(len(hidden), len(heads), self.config.head_dim).transpose(0, 1)

    def _channels(self, heads: range) -> slice:
        return slice(heads.start * self.config.head_dim, heads.stop * self.config.head_dim)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.up_proj = Projection(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.down_proj = Projection(config.intermediate, config.hidden, bias=config.mlp_bias)

    def project(self, hidden: Tensor, channels: slice) -> Tensor:
        """Share [S, hidden] of the output that the intermediate `channels` give, without down_proj's bias."""
        gate, up = (
            F.linear(hidden, p.weight[channels], None if p.bias is None else p.bias[channels])
            for p in (self.gate_proj, self.up_proj)
        )
        return F.linear(F.silu(gate) * up, self.down_proj.weight[:, channels])


class Projection(nn.Linear):
    """A linear layer that leaves its weights as they are: they are loaded, never drawn."""

    def reset_parameters(self) -> None:
        """Draw nothing: on the meta device, drawing costs seconds of imports."""


class Embedding(nn.Embedding):
    """An embedding table that leaves its weights as they are."""

    def reset_parameters(self) -> None:
        """Draw nothing."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, the mean in float32 (float64 for float64 input)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normed x, same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Dense:
    """Both blocks on one process: every head, every position, the whole feed-forward.

    `fp8_kv` rounds K and V to float8 and back, as a float8 cache does.
    """

    def __init__(self, config: DecoderConfig, length: int, device: torch.device, *, fp8_kv: bool = False) -> None:
        self.config = config
        self.fp8_kv = fp8_kv
        self.positions = torch.arange(length, device=device)
        self.cos_sin = config.rope.cos_sin(self.positions, length, torch.float64)

    def attention(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """Causal attention [S, hidden], within the layer's sliding window if it has one."""
        block = layer.self_attn
        cos, sin = (table.to(hidden.dtype) for table in self.cos_sin)
        q = block.project_q(hidden, cos, sin, range(self.config.q_heads))
        k, v = block.project_kv(hidden, cos, sin, range(self.config.kv_heads))
        if self.fp8_kv:
            k, v = (to_fp8(t).to(t.dtype) for t in (k, v))
        window = self.config.sliding_window[layer.index]
        visible = self._within(window) if window else None
        attended = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, is_causal=visible is None, enable_gqa=True
        )[0]
        return add_bias(block.project_output(attended, range(self.config.q_heads)), block.o_proj)

    def _within(self, window: int) -> Tensor:
        """[S, S] bool: key position in (query - window, query]."""
        distance = self.positions[:, None] - self.positions
        return (distance >= 0) & (distance < window)

    def feed_forward(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """SwiGLU [S, hidden]."""
        assert layer.mlp is not None
        return add_bias(layer.mlp.project(hidden, slice(None)), layer.mlp.down_proj)


def add_bias(output: Tensor, projection: Projection) -> Tensor:
    """`output` with the projection's bias, where it has one: added once, after partial outputs are summed."""
    return output if projection.bias is None else output + projection.bias


def share_of(width: int, index: int, count: int) -> slice:
    """Which of `width` channels the rank `index` of `count` takes; shares differ by one at most."""
    return slice(width * index // count, width * (index + 1) // count)
