"""Serving in small: a prompt is read KV-parallel, then tokens are decoded context-parallel, over one KV cache.

    torchrun --nproc-per-node 4 examples/sharded_decode.py

`ShardedAttention` is all that a user writes. Every rank runs it with the same tokens; outputs and tokens are compared
with the unsharded module's, and the exit status is 1 if they differ.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nki_parallel_attn import (
    AttentionShape,
    QuantizationType,
    ShardingPlan,
    attention_block_tkg,
    attention_kv_parallel_segmented_cte,
)

SHAPE = AttentionShape(q_heads=8, kv_heads=2, head_dim=32, hidden=256)
VOCAB, PROMPT, STEPS, BLOCK = 1000, 64, 32, 16
TOLERANCE = 1e-5  # sums of 256 float32 products of order 1, in another order


class Attention(nn.Module):
    """The unsharded module: causal attention of x [S, hidden], without a cache."""

    def __init__(self) -> None:
        super().__init__()
        q_width, kv_width = SHAPE.q_heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
        self.w_qkv = nn.Parameter(torch.randn(256, q_width + 2 * kv_width) / 16)
        self.w_out = nn.Parameter(torch.randn(q_width, 256) / 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(x @ self.w_qkv, SHAPE.q_heads)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return out.transpose(0, 1).flatten(1) @ self.w_out


class ShardedAttention(nn.Module):
    """This rank's share of an `Attention`: some of its Q heads, and a part of every sequence's KV."""

    def __init__(self, whole: Attention, max_seq_len: int) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        sizes: dict[str, Any] = {"world_size": ranks, "block_size": BLOCK, "max_seq_len": max_seq_len}
        prefill, decode = ShardingPlan(SHAPE, kvp=ranks, **sizes), ShardingPlan(SHAPE, cp=ranks, **sizes)
        # Two plans for one cache: what prefill has written decoding reads where it lies, and no KV moves.
        decode.check_same_cache(prefill)
        self.prefill_view, self.view = prefill.rank(rank), decode.rank(rank)
        self.w_qkv = nn.Parameter(whole.w_qkv[:, self.view.qkv_columns()])
        self.w_out = nn.Parameter(whole.w_out[self.view.out_rows()])
        self.k_cache, self.v_cache = torch.zeros(2, *self.view.cache_shape())
        # From logical to physical blocks: 0, 1, 2 ... here, what an allocator gave out in a server.
        self.table, blocks = self.view.block_table(max_seq_len), len(self.k_cache)
        self.active_blocks = self.view.active_blocks_table(self.table.tolist(), blocks, blocks)
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        """The next tokens, [S, hidden] in and out: the prompt first, then one at a time."""
        share = self.decode(x) if self.length else self.prefill(x)
        self.length += len(x)
        dist.all_reduce(share)  # a rank has the part of the output that comes from its heads
        return share

    def prefill(self, x: Tensor) -> Tensor:
        view = self.prefill_view
        q, k, v = split_heads(x @ self.w_qkv, len(view.q_heads))
        # Of all positions a rank keeps its own: blocks rank, rank + ranks, ... of the sequence.
        for cache, new in ((self.k_cache, view.shard_kv(k)), (self.v_cache, view.shard_kv(v))):
            cache[: len(new)] = new
        scale, arguments = SHAPE.head_dim**-0.5, view.kvp_arguments(q_pos=0)
        out = attention_kv_parallel_segmented_cte(q, self.k_cache, self.v_cache, self.table, scale=scale, **arguments)
        return out.transpose(0, 1).flatten(1) @ self.w_out

    def decode(self, x: Tensor) -> Tensor:
        view, position = self.view, torch.tensor([[self.length]])
        # The operation projects, attends, updates the cache of the rank that owns the position, and projects back.
        out, _, _ = attention_block_tkg(
            X=x[None],
            W_qkv=self.w_qkv,
            W_out=self.w_out,
            K_cache=self.k_cache,
            V_cache=self.v_cache,
            active_blocks_table=self.active_blocks,
            pos_ids=view.pos_ids(position),
            attention_mask=view.attention_mask(position),
            kv_cache_update_idx=view.kv_cache_update_idx(position, self.table),
            update_cache=True,
            **view.decode_arguments(),
            **NOT_USED,
        )
        assert isinstance(out, Tensor)  # it is a tuple for the two halves of a device's SBUF only
        return out


# The reference page gives most parameters no default; these are what this model does without.
NOT_USED: dict[str, Any] = {
    **dict.fromkeys(["X_hidden_dim_actual", "rmsnorm_X_eps", "rmsnorm_X_gamma", "bias_qkv", "bias_out", "sink"]),
    **dict.fromkeys(["weight_dequant_scale_qkv", "input_dequant_scale_qkv"]),
    **dict.fromkeys(["weight_dequant_scale_out", "input_dequant_scale_out"]),
    **dict.fromkeys(["quantization_type_qkv", "quantization_type_out"], QuantizationType.NONE),
    **dict.fromkeys(["rmsnorm_X_enabled", "K_cache_transposed", "transposed_out", "out_in_sb"], False),
    **dict.fromkeys(["cos", "sin"]),  # rotary embedding: [head_dim/2, B, 1], of the position
    "rope_contiguous_layout": True,
}
for _stage in ("pre", "post"):
    NOT_USED |= {f"rmsnorm_QK_{_stage}_rope_enabled": False, f"rmsnorm_QK_{_stage}_rope_eps": 0.0}
    NOT_USED |= {f"rmsnorm_QK_{_stage}_rope_W_Q": None, f"rmsnorm_QK_{_stage}_rope_W_K": None}


def split_heads(qkv: Tensor, q_heads: int) -> tuple[Tensor, ...]:
    """[S, heads*head_dim] to Q, K and V, each [heads, S, head_dim]."""
    heads = torch.unflatten(qkv, 1, (-1, SHAPE.head_dim)).transpose(0, 1)
    return torch.split(heads, [q_heads, SHAPE.kv_heads, SHAPE.kv_heads])


@torch.no_grad()
def main() -> int:
    torch.manual_seed(0)  # the same weights and prompt on every rank
    embedding, head, whole = torch.randn(VOCAB, 256), torch.randn(256, VOCAB), Attention()
    tokens = torch.randint(VOCAB, (PROMPT,))
    sharded = ShardedAttention(whole, max_seq_len=PROMPT + STEPS)
    out, deviation, same = sharded(embedding[tokens]), 0.0, True
    for _ in range(STEPS):
        expected = whole(embedding[tokens])[-1]
        deviation = max(deviation, float((out[-1] - expected).abs().max()))
        token = ((embedding[tokens[-1]] + out[-1]) @ head).argmax()
        same = same and bool(token == ((embedding[tokens[-1]] + expected) @ head).argmax())
        tokens = torch.cat([tokens, token[None]])
        out = sharded(embedding[token[None]])
    passed = same and deviation <= TOLERANCE
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: {PROMPT} tokens read, then {tokens[PROMPT:].tolist()}")
        print(f"{'PASS' if passed else 'FAIL'}: tokens {'equal' if same else 'differ'}, outputs within {deviation:.1e}")
    return 0 if passed else 1


if __name__ == "__main__":
    dist.init_process_group("gloo")
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
