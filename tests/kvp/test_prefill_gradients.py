"""Gradients in q, k_cache and v_cache across ranks: gradcheck in float64, and the dense oracle's own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn import attention_kv_parallel_segmented_cte
from nki_parallel_attn.errors import ArgumentError
from tests.kvp.case import Case
from tests.oracle import dense_attention


class Replicate(torch.autograd.Function):
    """The same input on every rank; its gradient is the sum of what the ranks do with it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class GatherHeads(torch.autograd.Function):
    """All ranks' heads on every rank. All compute the same loss from them, so a rank's gradient is its slice."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        parts = [torch.empty_like(out) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, out.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def scatter_to_cache(case: Case, rank: int, values: Tensor) -> Tensor:
    """A rank's paged cache as a differentiable function of the global keys or values; unused slots are 0."""
    shards, (table, num_blocks) = case.shards(), case.block_table(rank)
    positions = torch.arange(case.written)
    mine = positions[shards.owner(positions) == rank]
    slots = shards.slot(mine)
    blocks = table[0, slots // case.block_size].to(torch.int64)
    cache = torch.zeros(num_blocks, case.block_size, case.kv_heads, case.head_dim, dtype=values.dtype)
    cache = cache.index_put((blocks, slots % case.block_size), values[:, mine].transpose(0, 1))
    return cache.transpose(1, 2)


GRADCHECK_CASES = {
    "round_robin": Case(ranks=2, rows=4, block_size=2, prior=3, heads=4, kv_heads=2, head_dim=2, dtype=torch.float64),
    "window": Case(ranks=2, rows=8, block_size=2, heads=2, head_dim=2, dtype=torch.float64, window=3, tp_out=True),
    "contiguous": Case(
        ranks=2, rows=8, block_size=2, prior=1, heads=2, head_dim=2, dtype=torch.float64, layout="contiguous"
    ),
}


@pytest.mark.parametrize("name", list(GRADCHECK_CASES))
@pytest.mark.multirank(world_size=2)
def test_gradcheck(rank, name):
    """All ranks perturb the same element of the same global tensors, in step."""
    case = GRADCHECK_CASES[name]

    def global_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (Replicate.apply(t) for t in (q, k, v))
        arguments = case.arguments(rank) | {
            "q": q[case.heads_of(rank)],
            "k_cache": scatter_to_cache(case, rank, k),
            "v_cache": scatter_to_cache(case, rank, v),
        }
        return GatherHeads.apply(attention_kv_parallel_segmented_cte(**arguments))

    inputs = tuple(t.clone().requires_grad_() for t in (case.q, case.k, case.v))
    assert torch.autograd.gradcheck(global_attention, inputs)


def oracle_gradients(case: Case, grad_out: Tensor) -> list[Tensor]:
    inputs = [t.double().requires_grad_() for t in (case.q, case.k, case.v)]
    count, written = case.rows - case.padding, case.written
    out = dense_attention(
        inputs[0][:, :count],
        inputs[1][:, :written],
        inputs[2][:, :written],
        torch.arange(case.prior, case.prior + count),
        scale=case.softmax_scale,
        window=case.window,
    )
    return list(torch.autograd.grad(out, inputs, grad_out[:, :count].double()))


def gradient_tolerance(dtype: torch.dtype, expected: Tensor) -> float:
    """Three roundings to the dtype (saved output, each call's result, the sum), and 1e-5 for float32 accumulation."""
    return float(expected.abs().max()) * (4 * torch.finfo(dtype).eps + 1e-5)


ORACLE_CASES = {
    "gqa_prefix_padding": Case(ranks=4, rows=128, block_size=16, prior=21, heads=16, kv_heads=2, padding=7),
    "window": Case(ranks=4, rows=128, block_size=8, prior=21, heads=8, window=30),
    "bf16": Case(ranks=4, rows=256, block_size=16, heads=8, dtype=torch.bfloat16),
    "contiguous": Case(ranks=4, rows=128, block_size=16, prior=40, heads=8, kv_heads=2, layout="contiguous"),
    "tp_out": Case(ranks=4, rows=64, block_size=16, heads=8, kv_heads=2, tp_out=True),
}


@pytest.mark.parametrize("name", list(ORACLE_CASES))
@pytest.mark.multirank(world_size=4)
def test_against_the_oracle(rank, name):
    """Unused slots hold NaN, padded queries see them; with zero gradient there they spoil nothing."""
    case = ORACLE_CASES[name]
    arguments = case.arguments(rank)
    for argument in ("q", "k_cache", "v_cache"):
        arguments[argument].requires_grad_()
    out = attention_kv_parallel_segmented_cte(**arguments)
    grad_out = torch.randn(case.heads, case.rows, case.head_dim, generator=torch.Generator().manual_seed(9))
    grad_out = grad_out.to(case.dtype)
    grad_out[:, case.rows - case.padding :] = 0
    mine = grad_out[case.heads_of(rank)]
    grads = torch.autograd.grad(
        out,
        [arguments[argument] for argument in ("q", "k_cache", "v_cache")],
        mine.transpose(1, 2) if case.tp_out else mine,
    )
    expected_q, expected_k, expected_v = oracle_gradients(case, grad_out)
    count = case.rows - case.padding
    deviation = (grads[0].double() - expected_q[case.heads_of(rank)]).abs()[:, :count].max()
    assert deviation <= gradient_tolerance(case.dtype, expected_q)
    for grad, expected in zip(grads[1:], (expected_k, expected_v), strict=True):
        in_cache = scatter_to_cache(case, rank, expected)
        assert (grad.double() - in_cache).abs().max() <= gradient_tolerance(case.dtype, expected)


def test_shared_blocks_accumulate():
    """Two logical blocks in one physical block: their gradients add up."""
    case = Case(ranks=1, rows=32, block_size=8, heads=2, dtype=torch.float64)
    for values in (case.k, case.v):
        values[:, 16:24] = values[:, :8]
    arguments = case.arguments(0)
    table = arguments["block_tables"]
    table[0, 2] = table[0, 0]
    for argument in ("k_cache", "v_cache"):
        arguments[argument].requires_grad_()
    grad_out = torch.randn(2, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    out = attention_kv_parallel_segmented_cte(**arguments)
    grads = torch.autograd.grad(out, [arguments["k_cache"], arguments["v_cache"]], grad_out)
    for grad, expected in zip(grads, oracle_gradients(case, grad_out)[1:], strict=True):
        shared = expected[:, :8] + expected[:, 16:24]
        assert torch.allclose(grad[table[0, 0]], shared, atol=1e-12)
        assert torch.allclose(grad[table[0, 1]], expected[:, 8:16], atol=1e-12)


def test_scales_have_no_gradient_and_scaled_caches_do():
    case = Case(ranks=1, rows=8, block_size=4, heads=2, head_dim=3, dtype=torch.float64)
    arguments = case.arguments(0)
    scale = torch.linspace(0.5, 2, 128, dtype=torch.float64)[:, None]
    with pytest.raises(ArgumentError, match="k_scale"):
        attention_kv_parallel_segmented_cte(**arguments, k_scale=scale.clone().requires_grad_())

    def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        changed = arguments | {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        return attention_kv_parallel_segmented_cte(
            **changed, k_scale=scale, v_scale=torch.full((128, 1), 0.7, dtype=torch.float64)
        )

    inputs = tuple(arguments[name].nan_to_num(0.5).requires_grad_() for name in ("q", "k_cache", "v_cache"))
    assert torch.autograd.gradcheck(attention, inputs)


@pytest.mark.multirank(world_size=2)
def test_backward_twice_is_an_error(rank):
    case = Case(ranks=2, rows=16, block_size=8, heads=2, dtype=torch.float64)
    arguments = case.arguments(rank)
    arguments["q"].requires_grad_()
    out = attention_kv_parallel_segmented_cte(**arguments)
    (grad,) = torch.autograd.grad(out.nan_to_num(0).pow(2).sum(), arguments["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("changed", ["block_tables", "k_scale"])
def test_buffers_that_the_caller_reuses_before_backward(changed):
    """The gradient is that of the call as it was made."""
    grads = []
    for reuse in (False, True):
        case = Case(ranks=1, rows=32, block_size=8, heads=2)
        arguments = case.arguments(0) | {"k_scale": torch.full((128, 1), 0.5)}
        arguments["q"].requires_grad_()
        out = attention_kv_parallel_segmented_cte(**arguments)
        if reuse:
            arguments[changed].fill_(0)
        grads.append(torch.autograd.grad(out.sum(), arguments["q"])[0])
    assert torch.equal(*grads)
