"""A softmax_max that is too low or too high is an error that says what would work; raw=True gives NaN rows."""

from __future__ import annotations

import pytest
import torch

from nki_parallel_attn import attention_const_max
from nki_parallel_attn.errors import ArgumentError, SoftmaxRangeError
from tests.const_max.case import HEAD_DIM, SEQ, Case, as_tensor
from tests.tolerance import attention_tolerance

BACKENDS = pytest.mark.parametrize("backend", ["torch", "sim"])
CASE = Case(2, 140, 300, q_layout=SEQ)


def with_large_row():
    """Arguments in which row 130 of head 1 has scaled scores of up to some 200."""
    arguments = CASE.arguments()
    key = arguments["k_hbm"][1, :, 17].float()
    arguments["q_hbm"][1, 130] = (key * 200 * HEAD_DIM**0.5 / key.square().sum()).bfloat16()
    return arguments


def with_small_row():
    """Arguments in which all scaled scores of row 5 of head 0 are near -150."""
    arguments = CASE.arguments()
    arguments["q_hbm"][0, 5] = 0
    arguments["q_hbm"][0, 5, 0] = -150 * HEAD_DIM**0.5
    arguments["k_hbm"][0, 0] = 1
    return arguments


@BACKENDS
@pytest.mark.parametrize("as_given", [float, as_tensor])
def test_too_low(backend, as_given):
    with pytest.raises(SoftmaxRangeError, match=r"softmax_max: got 4, .* overflows in 1 of 280 rows") as caught:
        attention_const_max(softmax_max=as_given(4.0), backend=backend, **with_large_row())
    message = str(caught.value)
    assert "row 130 of head 1" in message
    assert "at least about 12" in message  # some 200 - 80
    assert "softmax_max_from_qk_norm" in message and "online-softmax" in message and "raw=True" in message


@BACKENDS
def test_too_high(backend):
    with pytest.raises(SoftmaxRangeError, match=r"vanishes for every key in 1 of 280 rows.*row 5 of head 0") as caught:
        attention_const_max(softmax_max=4.0, backend=backend, **with_small_row())
    assert "at most about -69" in str(caught.value)  # -1696 / sqrt(128) + 80


@BACKENDS
@pytest.mark.parametrize("softmax_max", [-100.0, 120.0])
def test_every_row(backend, softmax_max):
    with pytest.raises(SoftmaxRangeError, match="in 280 of 280 rows"):
        attention_const_max(softmax_max=softmax_max, backend=backend, **CASE.arguments())


@BACKENDS
@pytest.mark.parametrize("make", [with_large_row, with_small_row])
def test_raw_result_has_nan_in_that_row_only(backend, make):
    arguments = make()
    got = attention_const_max(softmax_max=4.0, raw=True, backend=backend, **arguments)
    lost = got.isnan().all(-1)
    assert lost.nonzero().tolist() == [[1, 130] if make is with_large_row else [0, 5]]
    q, k, v = (t.double() for t in (arguments["q_hbm"], arguments["k_hbm"], arguments["v_hbm"]))
    wanted = (q @ k * HEAD_DIM**-0.5).softmax(-1) @ v
    tolerance = attention_tolerance(torch.bfloat16, arguments["v_hbm"], HEAD_DIM)
    torch.testing.assert_close(got.double()[~lost], wanted[~lost], rtol=0, atol=tolerance)


@BACKENDS
def test_sum_overflows_although_no_exponential_does(backend):
    """300 exponentials of exp(85): each is a float32, their sum is not, and V / infinity would be 0."""
    arguments = CASE.arguments()
    arguments["q_hbm"].zero_()
    with pytest.raises(SoftmaxRangeError, match="overflows"):
        attention_const_max(softmax_max=-85.0, backend=backend, **arguments)


@BACKENDS
def test_scores_below_the_normal_numbers(backend):
    """exp(-90) is a bfloat16 with 4 bits left: no result rather than that precision."""
    arguments = CASE.arguments()
    arguments["q_hbm"].zero_()
    with pytest.raises(SoftmaxRangeError, match="vanishes"):
        attention_const_max(softmax_max=90.0, backend=backend, **arguments)


@BACKENDS
@pytest.mark.parametrize("name", ["q_hbm", "k_hbm", "v_hbm"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_not_blamed_on_the_maximum(backend, name, value):
    arguments = CASE.arguments()
    arguments[name][0, 3, 7] = value
    got = attention_const_max(softmax_max=4.0, backend=backend, **arguments)
    assert not got[0].isfinite().all()
    assert got[1].isfinite().all()


def test_the_error_is_what_a_python_user_would_catch():
    assert issubclass(SoftmaxRangeError, (ArgumentError,)) and issubclass(SoftmaxRangeError, ArithmeticError)


def test_gradients_of_a_lost_row_are_not_numbers():
    arguments = with_large_row()
    arguments["q_hbm"].requires_grad_()
    attention_const_max(softmax_max=4.0, raw=True, **arguments).float().sum().backward()
    assert arguments["q_hbm"].grad[1, 130].isnan().all()
    assert arguments["q_hbm"].grad[1, 129].isfinite().all()
