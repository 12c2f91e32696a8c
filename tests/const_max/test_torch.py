"""The torch twin against the float64 oracle, and its gradients."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn import attention_const_max
from nki_parallel_attn.kernels.attention_const_max_torch import attention_const_max as twin
from tests.const_max.case import HEAD, HEAD_DIM, SEQ, Case, as_tensor
from tests.oracle import dense_attention
from tests.tolerance import attention_tolerance

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_layout", [HEAD, SEQ])
@pytest.mark.parametrize("k_layout", [HEAD, SEQ])
def test_against_the_oracle(dtype, q_layout, k_layout):
    case = Case(3, 70, 333, dtype, q_layout, k_layout)
    for softmax_max in (4.0, 5, as_tensor(4.5)):
        got = attention_const_max(softmax_max=softmax_max, **case.arguments())
        assert got.dtype is dtype
        torch.testing.assert_close(
            got.double(), case.expected(), rtol=0, atol=attention_tolerance(dtype, case.tensors()[2], HEAD_DIM)
        )


@pytest.mark.parametrize("scale", [0.03, -0.1, 0.0, 0.3])
def test_scale_is_honoured(scale):
    case = Case(1, 33, 65, torch.float32, scale=scale)
    got = attention_const_max(softmax_max=3.0, **case.arguments())
    tolerance = attention_tolerance(torch.float32, case.tensors()[2], HEAD_DIM)
    torch.testing.assert_close(got.double(), case.expected(), rtol=0, atol=tolerance)


def test_result_does_not_depend_on_the_maximum():
    arguments = Case(2, 40, 200, torch.float32).arguments()
    results = [attention_const_max(softmax_max=top, **arguments) for top in (-40.0, 0.0, 4.0, 60.0)]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_without_the_fused_op():
    """What devices other than the CPU run: the same log-sum-exp, hence the same rows given up."""
    from nki_parallel_attn.kernels import online_softmax_torch

    q, k, v = Case(2, 40, 200, torch.float32).tensors()
    _, fused = online_softmax_torch.attend(q, k, v, 0.1)
    _, unfused = online_softmax_torch._attend_unfused(q, k, v, 0.1, False, None)
    torch.testing.assert_close(fused, unfused, rtol=0, atol=2.0**-18)


def test_gradients_numerically():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    assert torch.autograd.gradcheck(lambda q, k, v: twin(q, k, v, 2.0, 0.4), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_through_the_operation_against_the_oracle(dtype):
    case = Case(2, 30, 90, dtype, HEAD, SEQ)
    arguments = case.arguments()
    leaves = [arguments[name].requires_grad_() for name in ("q_hbm", "k_hbm", "v_hbm")]
    weight = torch.randn(2, 30, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    top = as_tensor(4.0).requires_grad_()
    (attention_const_max(softmax_max=top, **arguments).double() * weight).sum().backward()
    assert top.grad is None, "the maximum cancels"
    reference = [t.double().requires_grad_() for t in case.tensors()]
    out = dense_attention(*reference, torch.full((30,), 89), scale=HEAD_DIM**-0.5)
    (out * weight).sum().backward()
    tolerance = 1e-12 if dtype is torch.float64 else 1e-4
    for got, wanted in zip(leaves, reference, strict=True):
        grad = got.grad.transpose(1, 2) if got.grad.shape != wanted.grad.shape else got.grad
        torch.testing.assert_close(grad.double(), wanted.grad, rtol=0, atol=tolerance * float(wanted.grad.abs().max()))
