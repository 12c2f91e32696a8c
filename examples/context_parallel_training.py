"""Training in small: one step of a Llama whose attention is context-parallel, with the gradients of the unsharded step.

    torchrun --nproc-per-node 4 examples/context_parallel_training.py

Every rank holds the whole model and a part of the sequence: embedding, norms, feed-forward and loss see only the rank's
own tokens, so activations shrink with the number of ranks. Only attention has to look across; `ContextParallel` is all
the code that this takes. As in data parallelism, gradients are summed over the ranks at the end; the exit status is 1
if they are not those of the unsharded step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nki_parallel_attn import AttentionShape, ShardingPlan, attention_kv_parallel_segmented_cte

SHAPE = AttentionShape(q_heads=8, kv_heads=2, head_dim=32, layers=2, hidden=256)
HIDDEN, VOCAB, LENGTH, BLOCK = 256, 1000, 256, 16
TOLERANCE = 1e-5  # of a parameter's largest gradient: float32 sums over LENGTH tokens, in another order
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class ContextParallel:
    """Causal attention where this rank has the positions `self.positions` of a sequence of `length` tokens."""

    def __init__(self, length: int) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.plan = ShardingPlan(SHAPE, world_size=ranks, kvp=ranks, block_size=BLOCK, max_seq_len=length)
        self.view = self.plan.rank(rank)
        # Blocks in turn, not one long piece each: under a causal mask all ranks then have equally much to do.
        self.positions = self.view.owned_positions(0, length)
        by_rank = torch.cat([self.plan.rank(peer).owned_positions(0, length) for peer in range(ranks)])
        self.by_rank, self.by_position = by_rank, by_rank.argsort()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [q_heads, tokens, d], k and v [kv_heads, tokens, d] of this rank's tokens; the output is like q."""
        # The operation wants a rank's share of the heads at all positions: trade positions for heads, and back.
        ranks, heads = self.plan.group_size, self.plan.q_heads_per_rank
        q = all_to_all(torch.unflatten(q, 0, (ranks, heads))).transpose(0, 1).flatten(1, 2)[:, self.by_position]
        # K and V stay where they are: a rank's tokens are its blocks of the KV cache.
        k_cache, v_cache = (torch.unflatten(t, 1, (-1, BLOCK)).transpose(0, 1) for t in (k, v))
        table, arguments = self.view.block_table(q.shape[1]), self.view.kvp_arguments(q_pos=0)
        out = attention_kv_parallel_segmented_cte(q, k_cache, v_cache, table, scale=SHAPE.head_dim**-0.5, **arguments)
        return all_to_all(torch.unflatten(out[:, self.by_rank], 1, (ranks, -1)).transpose(0, 1)).flatten(0, 1)


class AllToAll(torch.autograd.Function):
    """Entry r of x goes to rank r; so do, on the way back, the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return all_to_all(grads[0])


def all_to_all(x: Tensor) -> Tensor:
    received: Tensor = AllToAll.apply(x)  # type: ignore[no-untyped-call]
    return received


def whole_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention where one process has all positions."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]


class Llama(nn.Module):
    """A decoder that leaves attention to `attend`."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(SHAPE.layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [tokens, VOCAB] of some tokens of a sequence."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Layer(nn.Module):
    """Attention and SwiGLU, each with its norm and a residual."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        q_width, kv_width = SHAPE.q_heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = (
            nn.Linear(HIDDEN, q_width + 2 * kv_width, bias=False),
            nn.Linear(q_width, HIDDEN, bias=False),
        )
        self.gate_up, self.down = nn.Linear(HIDDEN, 8 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(1, (-1, SHAPE.head_dim)).transpose(0, 1)
        q, k, v = heads.split([SHAPE.q_heads, SHAPE.kv_heads, SHAPE.kv_heads])
        attended = self.attend(rotate(q, positions), rotate(k, positions), v)
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, 1)
        down: Tensor = self.down(F.silu(gate) * up)
        return x + down


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [heads, tokens, head_dim]."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, SHAPE.head_dim, 2) / SHAPE.head_dim)
    first, second = heads.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def train_step(model: Llama, text: Tensor, positions: Tensor) -> Tensor:
    """The loss's share of these positions; gradients are left in the model."""
    logits = model(text[positions], positions)
    loss = F.cross_entropy(logits, text[positions + 1], reduction="sum") / LENGTH
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def main() -> int:
    torch.manual_seed(0)  # the same text and weights on every rank
    text, attend = torch.randint(VOCAB, (LENGTH + 1,)), ContextParallel(LENGTH)
    whole, sharded = Llama(whole_sequence), Llama(attend)
    sharded.load_state_dict(whole.state_dict())

    loss = train_step(sharded, text, attend.positions)
    for summed in (loss, *(p.grad for p in sharded.parameters())):
        dist.all_reduce(summed)
    expected = train_step(whole, text, torch.arange(LENGTH))

    deviations = {
        name: float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max())
        for (name, ours), theirs in zip(sharded.named_parameters(), whole.parameters(), strict=True)
        if ours.grad is not None and theirs.grad is not None
    }
    worst = max(deviations, key=lambda name: deviations[name])
    passed = deviations[worst] <= TOLERANCE and abs(float(loss - expected)) <= TOLERANCE * float(expected)
    torch.optim.AdamW(sharded.parameters(), lr=1e-3).step()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: loss {float(loss):.6f}, unsharded {float(expected):.6f}")
        print(f"{len(deviations)} gradients within {deviations[worst]:.1e} of their largest entry, the worst {worst}")
        print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    dist.init_process_group("gloo")
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
