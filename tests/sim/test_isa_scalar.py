"""Scalar Engine instructions against their float64 evaluation, over shapes, dtypes and views in SBUF and PSUM."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nki_parallel_attn.sim import NkiValidationError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl

from .oracle import scalar
from .tiles import any_dtype, cases, close, empty, host, load, on_chip, read_on_chip, run, sample, seeds, shapes

command = nisa.reduce_cmd
FUNCTIONS = st.sampled_from((*sorted(scalar.ACTIVATIONS), "prelu"))
# A function of one rounded float32, of a few operations itself: a few roundings, amplified by what cancels inside.
STEPS = 16


def op(name):
    return getattr(nl, name)


def inputs(seed, shape, dtype, place):
    """Values from which data * scale + bias below stays in the valid range of every function."""
    if dtype.startswith(("int", "uint")):
        return sample(seed, shape, dtype, 0.6, 1.4, place)
    return sample(seed, shape, dtype, 0.25, 1.0, place)


def column(seed, partitions, vectors):
    values = sample(seed, (partitions, 1) if vectors else (), low=0.125, high=0.5)
    return values if vectors else float(values)


def columns(values):
    return [host(value, "float32") for value in values if isinstance(value, np.ndarray)]


def operands(values, loaded):
    loaded = list(loaded)
    return [load(loaded.pop(0), "float32") if isinstance(v, np.ndarray) else v for v in values]


@given(FUNCTIONS, st.booleans(), st.booleans(), any_dtype, any_dtype, shapes, read_on_chip, on_chip, seeds)
@cases
def test_activation(name, vectors, shifted, dtype, result, shape, source, target, seed):
    x = inputs(seed, shape, dtype, source)
    values = [column(seed + 1, shape[0], vectors) if shifted else None, column(seed + 2, shape[0], vectors)]

    def body(a, *loaded):
        bias, scale = operands(values, loaded)
        dst, totals = empty(shape, result, target), [empty((shape[0], 1), "float32", target) for _ in range(3)]
        data = load(a, dtype, source)
        nisa.activation(dst, op(name), data, bias, scale, nl.add, totals[0], command.reset_reduce)
        nisa.activation(dst, nl.copy, data)
        nisa.activation(dst, op(name), data, bias, scale, nl.add, totals[1], command.reduce)
        nisa.activation(dst, op(name), data, bias, scale, reduce_res=totals[2], reduce_cmd=command.reset)
        return [dst, *totals]

    got, *totals = run(body, host(x, dtype), *columns(values))
    expected, first = scalar.activation(name, x, 0.0 if values[0] is None else values[0], values[1], "reset_reduce") \
        if name != "prelu" else _prelu(x, *values)  # fmt: skip
    close(got, expected, result, steps=STEPS, magnitude=4)
    elements = expected[0].size
    for total, exact in zip(totals, (first, 2 * first, 0 * first), strict=True):
        close(total, exact, "float32", steps=STEPS + elements, magnitude=8 * elements)


def _prelu(x, bias, scale):
    flat = x.reshape(x.shape[0], -1) * scale + (0.0 if bias is None else bias)
    result = scalar.apply("prelu", flat)
    return result.reshape(x.shape), result.sum(1, keepdims=True)


@given(FUNCTIONS, st.sampled_from(("add", "maximum")), st.booleans(), any_dtype, shapes, read_on_chip, on_chip, seeds)
@cases
def test_activation_reduce(name, reducer, vectors, dtype, shape, source, target, seed):
    assume(name != "prelu")
    x = inputs(seed, shape, dtype, source)
    values = [column(seed + 1, shape[0], vectors), column(seed + 2, shape[0], vectors)]

    def body(a, *loaded):
        bias, scale = operands(values, loaded)
        dst, total = empty(shape, "float32", target), empty((shape[0], 1), "float32", target)
        nisa.activation_reduce(dst, op(name), load(a, dtype, source), op(reducer), total, bias, scale)
        return [dst, total]

    got, total = run(body, host(x, dtype), *columns(values))
    expected, _ = scalar.activation(name, x, *values)
    close(got, expected, "float32", steps=STEPS, magnitude=8)
    flat = expected.reshape(shape[0], -1)
    exact = flat.sum(1, keepdims=True) if reducer == "add" else flat.max(1, keepdims=True)
    close(total, exact, "float32", steps=STEPS + flat.shape[1], magnitude=8 * flat.shape[1])


PAIRS = (("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
         ("subtract", "bypass"), ("bypass", "bypass"))  # fmt: skip
# Everywhere valid: activate2 may subtract, which leaves the range of the others.
EVERYWHERE = tuple(name for name in scalar.ACTIVATIONS if name not in scalar.VALID_RANGE)


@given(
    st.sampled_from((*EVERYWHERE, "prelu")), st.sampled_from(PAIRS), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(("add", "maximum", "minimum", "abs_max", "abs_min")), any_dtype, any_dtype, shapes, read_on_chip,
    on_chip, seeds,
)  # fmt: skip
@cases
def test_activate2(name, pair, vectors, reverse0, reverse1, reducer, dtype, result, shape, source, target, seed):
    # The sign of a difference that nearly cancels is not determined.
    assume(name != "sign" or pair in (("multiply", "bypass"), ("bypass", "bypass")))
    x = sample(seed, shape, dtype, -2.0, 2.0, source)
    values = [column(seed + i, shape[0], vectors) for i in (1, 2, 3)]
    reverse0, reverse1 = reverse0 and pair[0] != "bypass", reverse1 and pair[1] != "bypass"

    def body(a, *loaded):
        imm0, imm1, slope = operands(values, loaded)
        dst, total = empty(shape, result, target), empty((shape[0], 1), "float32", target)
        data = load(a, dtype, source)
        more = (slope, reverse0, reverse1, op(reducer))
        pre = (imm0, imm1, op(pair[0]), op(pair[1]))
        nisa.activate2(dst, op(name), data, *pre, *more, None, command.reset_reduce)
        nisa.activate2(dst, op(name), data, *pre, slope)
        nisa.activate2(dst, op(name), data, *pre, *more, total, command.reduce)
        return [dst, total]

    got, total = run(body, host(x, dtype), *columns(values))
    arguments = (x, values[0], values[1], *pair, values[2], reverse0, reverse1, reducer)
    expected, first = scalar.activate2(name, *arguments, "reset_reduce")
    close(got, expected, result, steps=STEPS, magnitude=8)
    elements = expected[0].size
    exact = scalar.activate2(name, *arguments, "reduce", first)[1]
    close(np.abs(total) if "abs" in reducer else total, np.abs(exact) if "abs" in reducer else exact, "float32",
          steps=STEPS + 2 * elements, magnitude=16 * elements)  # fmt: skip


def run_one(value, function, checks=True):
    def kernel(a):
        tile, out = load(a, "float32"), nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
        nisa.activation(tile, function, tile)
        nl.store(out, tile)
        return out

    return simulate(kernel, checks=checks)(np.full((1, 1), value, np.float32))


@pytest.mark.parametrize("name", sorted(scalar.VALID_RANGE))
def test_the_valid_range_of_a_function_is_closed_and_enforced(name):
    low, high = scalar.VALID_RANGE[name]
    for value in (low, high):
        inside = np.nextafter(np.float32(value), np.float32(0)) if name in ("sin", "arctan") else np.float32(value)
        run_one(inside, op(name))
    for value in (np.float32(low) - abs(np.float32(low)), np.float32(high) * np.float32(1.01)):
        with pytest.raises(NkiValidationError) as caught:
            run_one(value, op(name))
        assert caught.value.rule == "activation-range"


def test_the_range_of_the_reciprocal_holds_for_both_signs():
    assert run_one(-2.0, nl.reciprocal) == -0.5
