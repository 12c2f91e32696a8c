"""Parts of an attention and their merge, fused and unfused, against dense float64; and their gradients."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn.kernels import online_softmax_torch
from nki_parallel_attn.kernels.online_softmax_torch import attend, attend_backward, merge
from tests.tolerance import attention_tolerance, log_sum_exp_tolerance

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=["fused", "unfused"])
def ops(request):
    """attend and attend_backward: as dispatched for CPU tensors, and the form for other devices."""
    if request.param == "fused":
        return attend, attend_backward

    def plain(q, k, v, scale, causal=False, mask=None):
        return online_softmax_torch._attend_unfused(q, k, v, scale, causal, mask)

    def plain_backward(grad, q, k, v, out, lse, scale, causal=False, mask=None):
        lse = lse.masked_fill(lse == -torch.inf, 0)
        return online_softmax_torch._attend_backward_unfused(grad, q, k, v, out, lse, scale, causal, mask)

    return plain, plain_backward


def inputs(dtype, heads=6, kv_heads=2, rows=40, keys=70, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim)]
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def reference(q, k, v, scale, mask):
    """out and lse in float64; a row that sees nothing has 0 and -inf."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    weights = torch.where(mask.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    return weights @ v, scores.logsumexp(-1)


def random_mask(rows, keys):
    mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[3] = False
    return mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_attend(ops, dtype, kind):
    rows = 70 if kind == "causal" else 40
    q, k, v = inputs(dtype, rows=rows)
    mask = {
        "full": torch.ones(rows, 70, dtype=torch.bool),
        "causal": torch.ones(70, 70, dtype=torch.bool).tril(),
        "masked": random_mask(rows, 70),
    }[kind]
    out, lse = ops[0](q, k, v, 0.3, causal=kind == "causal", mask=mask if kind == "masked" else None)
    expected, expected_lse = reference(q, k, v, 0.3, mask)
    assert out.dtype == dtype and out.shape == q.shape and lse.shape == q.shape[:2]
    assert (out.double() - expected).abs().max() <= attention_tolerance(dtype, v, q.shape[2])
    hidden = ~mask.any(1)
    assert (lse[:, hidden] == -torch.inf).all() and (out[:, hidden] == 0).all()
    assert torch.allclose(lse[:, ~hidden].double(), expected_lse[:, ~hidden], rtol=0, atol=log_sum_exp_tolerance(dtype))


def test_no_keys():
    q, k, v = inputs(torch.bfloat16)
    out, lse = attend(q, k[:, :0], v[:, :0], 1.0)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_of_parts_is_the_whole(dtype):
    q, k, v = inputs(dtype, rows=3000, keys=60)
    mask = torch.ones(3000, 60, dtype=torch.bool).tril(-5)
    mask[100:200] = False
    parts = [attend(q, k[:, s], v[:, s], 0.3, mask=mask[:, s]) for s in (slice(0, 7), slice(7, 40), slice(40, 60))]
    merged = torch.full_like(q.transpose(1, 2), torch.nan).transpose(1, 2)  # any strides
    lse = merge([out for out, _ in parts], [part_lse for _, part_lse in parts], merged)
    expected, expected_lse = reference(q, k, v, 0.3, mask)
    assert (merged.double() - expected).abs().max() <= attention_tolerance(dtype, v, q.shape[2])
    hidden = ~mask.any(1)
    assert (merged[:, hidden] == 0).all() and (lse[:, hidden] == -torch.inf).all()
    assert torch.allclose(lse[:, ~hidden].double(), expected_lse[:, ~hidden], rtol=0, atol=log_sum_exp_tolerance(dtype))


def test_merge_keeps_small_weights():
    """A part 100 below the largest log-sum-exp, and statistics near the ends of float32."""
    outs = [torch.full((1, 3, 4), float(value)) for value in (1, 2)]
    lses = [torch.tensor([[0.0, 3e38, -3e38]]), torch.tensor([[-100.0, -3e38, -3e38]])]
    merged = torch.empty(1, 3, 4)
    merge(outs, lses, merged)
    assert merged[0, :, 0].tolist() == [1.0, 1.0, 1.5]


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_backward_with_merged_statistics_is_exact(ops, kind):
    rows = 30 if kind == "causal" else 40
    q, k, v = inputs(torch.float64, rows=rows)
    last = torch.ones(rows, 30, dtype=torch.bool)
    last = {"full": last, "causal": last.tril(), "masked": random_mask(rows, 30)}[kind]
    first = random_mask(rows, 40).roll(1, 0)
    first[3] = False
    mask = torch.cat([first, last], 1)
    dense = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = reference(*dense, 0.3, mask)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(out, dense, grad)
    parts = [
        ops[1](grad, q, k[:, :40], v[:, :40], out.detach(), lse.detach(), 0.3, mask=first),
        ops[1](
            grad,
            q,
            k[:, 40:],
            v[:, 40:],
            out.detach(),
            lse.detach(),
            0.3,
            causal=kind == "causal",
            mask=last if kind == "masked" else None,
        ),
    ]
    assert torch.allclose(parts[0][0] + parts[1][0], expected[0], atol=1e-12)
    assert torch.allclose(torch.cat([parts[0][1], parts[1][1]], 1), expected[1], atol=1e-12)
    assert torch.allclose(torch.cat([parts[0][2], parts[1][2]], 1), expected[2], atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-300])
def test_scales_that_are_not_positive(ops, kind, scale):
    """Hidden keys stay hidden, and the gradient is the oracle's; a scale below float32 is 0 to the fused op."""
    rows = 70 if kind == "causal" else 40
    q, k, v = (t.requires_grad_() for t in inputs(torch.float32, rows=rows))
    mask = {
        "full": torch.ones(rows, 70, dtype=torch.bool),
        "causal": torch.ones(70, 70, dtype=torch.bool).tril(),
        "masked": random_mask(rows, 70),
    }[kind]
    arguments = {"causal": kind == "causal", "mask": mask if kind == "masked" else None}
    grad = inputs(torch.float32, rows=rows, seed=5)[0]
    out, lse = ops[0](q.detach(), k.detach(), v.detach(), scale, **arguments)
    expected, _ = reference(q, k, v, scale, mask)
    assert (out.double() - expected).abs().max() <= attention_tolerance(torch.float32, v.detach(), q.shape[2])
    grads = ops[1](grad, q.detach(), k.detach(), v.detach(), out, lse, scale, **arguments)
    for found, wanted in zip(grads, torch.autograd.grad(expected, (q, k, v), grad.double()), strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_inputs_of_any_strides(ops, kind):
    q, k, v = inputs(torch.float32, rows=70)
    mask = random_mask(70, 70) if kind == "masked" else None
    arguments = {"causal": kind == "causal", "mask": mask}
    strided = [torch.stack([t, t + 1], -1)[..., 0] for t in (q, k, v)]
    out, lse = ops[0](q, k, v, 0.3, **arguments)
    assert torch.equal(ops[0](*strided, 0.3, **arguments)[0], out)
    grads = ops[1](out, q, k, v, out, lse, 0.3, **arguments)
    found = ops[1](strided[0] * 0 + out, *strided, out, lse, 0.3, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))
