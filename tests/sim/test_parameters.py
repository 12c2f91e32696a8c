"""Arguments of the wrong kind: the error names argument and line, for every instruction and function.

NumPy's numbers are as good as Python's.
"""

from __future__ import annotations

import numpy as np
import pytest

from nki_parallel_attn.sim import NkiValidationError, ReplicaGroup, ReplicaGroupError, simulate
from nki_parallel_attn.sim import collectives as ncc
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim.instruction import INSTRUCTIONS
from nki_parallel_attn.sim.parameters import Number, Tensors

from .corpus.kernel_helpers import tile

PUBLIC = [d for d in INSTRUCTIONS.values() if hasattr(nisa, d.name) or hasattr(ncc, d.name)]


def hbm(*shape):
    return nl.ndarray(shape, nl.float32, nl.private_hbm)


def nested(value, depth):
    return [nested(value, depth - 1)] if depth else value


def arguments_with(declaration, wrong, value):
    """Arguments of the right kinds, but `value` for the parameter `wrong`."""
    arguments = {declaration.parameters[i]: None for i in declaration._required}
    for parameter in declaration._checked:
        inner = hbm(4, 4) if isinstance(parameter, Tensors) else 0
        arguments[parameter.name] = nested(inner, max(parameter.depths))
    return {**arguments, wrong: value}


def check_kinds(declaration, kind, values, rule):
    """Every parameter of `kind` refuses each of `values`."""

    def kernel():
        for parameter in declaration._checked:
            for value in values if isinstance(parameter, kind) else ():
                with pytest.raises(NkiValidationError) as caught:
                    declaration.issue(**arguments_with(declaration, parameter.name, value))
                assert caught.value.rule == rule and f"{__file__}:" in str(caught.value)
                assert f"{parameter.name} is " in str(caught.value)

    simulate(kernel)()


def refused(body, rule, error=NkiValidationError):
    """`body` raises the error of `rule` at a line of this file."""
    with pytest.raises(error) as caught:
        simulate(body)()
    assert getattr(caught.value, "rule", rule) == rule, caught.value
    assert f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize("declaration", PUBLIC, ids=lambda d: d.name)
def test_what_is_no_tensor_and_no_number_is_named(declaration):
    check_kinds(declaration, Tensors, (3, np.ones((4, 4), np.float32), [None], "x"), "tensor-operand")
    check_kinds(declaration, Number, ((1.0,), "x", nl.add, np.ones(4, np.float32)), "scalar-operand")


@pytest.mark.parametrize("number", [np.float32(2), np.float64(2), np.int64(2), True + 1])
def test_numpy_numbers_are_numbers(number):
    def kernel():
        out = nl.ndarray((4, 4), nl.float32, nl.shared_hbm)
        x, y = nl.full((4, 4), number, nl.float32), nl.ndarray((4, 4), nl.float32)
        nisa.tensor_scalar(y, x, nl.multiply, number, op1=nl.add, operand1=number)
        nisa.activation(y, nl.copy, y, bias=number, scale=number)
        nisa.affine_select(y, [[1, 4]], 0, y, on_false_value=number, cmp_op=nl.greater)
        nisa.dma_copy(out, y)
        return out

    np.testing.assert_array_equal(simulate(kernel)()[0], [2, 14, 14, 14])


def group():
    return ReplicaGroup([[0]])


WRONG = {
    "pattern of one pair": ("integer", lambda: nisa.iota(tile((4, 8)), pattern=[1, 8])),
    "axis of nothing": ("integer", lambda: nisa.tensor_reduce(tile((4, 1)), nl.add, tile((4, 8)), axis=None)),
    "tile size of a number": (
        "integer",
        lambda: nisa.nc_matmul(tile((4, 8), buffer=nl.psum), tile((4, 4)), tile((4, 8)), tile_size=64),
    ),
    "one tensor for a list": (
        "tensor-operand", lambda: ncc.all_reduce(hbm(4, 8), [hbm(4, 8)], group(), op=nl.add)),
    "list for a tensor": ("tensor-operand", lambda: nisa.tensor_copy(tile((4, 8)), [tile((4, 8))])),
    "one list per call for one per channel": (
        "tensor-operand", lambda: ncc.collective_permute_implicit([hbm(4, 8)], [hbm(4, 8)], group())),
    "three ranks for a pair": (
        "collective-permute-pattern", lambda: ncc.collective_permute([hbm(4, 8)], [hbm(4, 8)], [(0, 0, 0)])),
    "channel that a ring does not have": (
        "collective-channels",
        lambda: ncc.collective_permute_implicit_current_processing_rank_id(0, group(), channel_id=4),
    ),
    "list for a ReplicaGroup": (
        None, lambda: ncc.all_gather([hbm(4, 8)], [hbm(4, 8)], [[0]], collective_dim=0)),
    "ap of two lists": ("access-bounds", lambda: tile((16, 32)).ap([32, 16], [1, 32])),
    "ap dtype": ("tensor-dtype", lambda: tile((16, 32)).ap([[32, 16], [1, 32]], dtype="float")),
    "view dtype": ("tensor-dtype", lambda: tile((16, 32)).view(np.zeros(4))),
    "indirect without a tensor": ("view", lambda: tile((16, 32)).indirect([0, 1])),
    "rearrange of a string": ("view", lambda: tile((16, 32)).rearrange("p f", ("p", "f"))),
    "shape of a number": ("tensor-shape", lambda: nl.ndarray(128, nl.float32)),
    "address of one number": ("address", lambda: nl.ndarray((4, 8), nl.float32, address=(0,))),
    "load of an array": ("tensor-operand", lambda: nl.load(np.ones((4, 8), np.float32))),
    "mean over the partitions": ("reduce-axis", lambda: nl.mean(tile((4, 8)), axis=0)),
    "var over an axis beyond": ("reduce-axis", lambda: nl.var(tile((4, 8)), axis=2)),
    "where with a string": ("scalar-operand", lambda: nl.where(tile((4, 8)), "x", 1.0)),
    "division by a list": ("scalar-operand", lambda: nl.divide(tile((4, 8)), [2.0])),
    "memset beyond the dtype": ("memset-value", lambda: nisa.memset(tile((4, 8), nl.uint8), 256)),
    "memset below the dtype": ("memset-value", lambda: nisa.memset(tile((4, 8), nl.uint32), -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    rule, body = WRONG[name]
    refused(body, rule, NkiValidationError if rule else ReplicaGroupError)


def test_operators_take_their_documented_keywords():
    def kernel():
        outs = [nl.ndarray((4, 4), dtype, nl.shared_hbm) for dtype in (nl.float32, nl.float16, nl.float32, nl.int32)]
        x = nl.full((4, 4), 3.0, nl.float32)
        n = nl.full((4, 4), 6, nl.int32)
        results = (nl.add(x=x, y=2.0), nl.subtract(5.0, y=x, dtype=nl.float16), nl.exp(x=x), nl.bitwise_and(n, y=3))
        for out, result in zip(outs, results, strict=True):
            nl.store(dst=out, value=result)
        return tuple(outs)

    got = [float(result[0, 0]) for result in simulate(kernel)()]
    assert got == [5.0, 2.0, pytest.approx(np.exp(3.0), rel=1e-6), 2]
