"""Integers of kernels: floats are not truncated, bools are no numbers, NumPy's integers are as good as Python's."""

from __future__ import annotations

import numpy as np
import pytest

from nki_parallel_attn.sim import NkiValidationError, ReplicaGroupError, simulate
from nki_parallel_attn.sim import collectives as ncc
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl


def tile(*shape):
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)


def hbm(*shape):
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.private_hbm)


# Each takes the place of a 2 with what it is given.
TAKES_AN_INTEGER = {
    "index": lambda n: hbm(4, 4)[n],
    "slice stop": lambda n: hbm(4, 4)[0:n],
    "slice start": lambda n: hbm(4, 4)[n:4],
    "slice step": lambda n: hbm(4, 4)[::n],
    "ds start": lambda n: hbm(4, 4)[nl.ds(n, 1)],
    "ds size": lambda n: hbm(4, 4)[nl.ds(0, n)],
    "slice() end": lambda n: hbm(4, 4).slice(0, 0, n),
    "slice() dim": lambda n: hbm(4, 4, 4).slice(n, 0, 1),
    "select index": lambda n: hbm(4, 4).select(0, n),
    "permute": lambda n: hbm(4, 4, 4).permute((0, 1, n)),
    "broadcast size": lambda n: tile(4, 1).broadcast(1, n),
    "expand_dim": lambda n: tile(4, 1).expand_dim(n),
    "squeeze_dim": lambda n: hbm(4, 4, 1).squeeze_dim(n),
    "reshape_dim": lambda n: tile(4, 4).reshape_dim(1, (2, n)),
    "flatten_dims": lambda n: hbm(4, 4, 4).flatten_dims(1, n),
    "reshape": lambda n: hbm(4, 4).reshape((8, n)),
    "rearrange": lambda n: hbm(4, 4).rearrange(("a", ("b", "c")), ("a", "b", "c"), {"b": n}),
    "ap count": lambda n: hbm(4, 4).ap([[4, n], [1, 4]]),
    "ap stride": lambda n: hbm(4, 4).ap([[4, 4], [n, 2]]),
    "ap offset": lambda n: hbm(4, 4).ap([[1, 4]], offset=n),
    "ndarray": lambda n: tile(n, 4),
    "zeros": lambda n: nl.zeros((2, n), nl.float32),
    "shared_identity_matrix": lambda n: nl.shared_identity_matrix(n),
    "address": lambda n: nl.ndarray((1, 4), nl.float32, nl.sbuf, address=(n, 0)),
    "static_range": lambda n: nl.static_range(n),
    "affine_range": lambda n: nl.affine_range(0, 4, n),
    "dynamic_range": lambda n: next(nl.dynamic_range(n)),
    "dynamic_range step": lambda n: next(nl.dynamic_range(0, 4, n)),
    "expand_dims": lambda n: nl.expand_dims(tile(4, 4), n),
    "sum": lambda n: nl.sum(nl.zeros((4, 4, 4), nl.float32), axis=n),
    "tensor_reduce": lambda n: nisa.tensor_reduce(tile(4, 4), nl.add, nl.zeros((4, 4, 4), nl.float32), axis=(n,)),
    "iota pattern": lambda n: nisa.iota(tile(4, 4), [[1, 2], [1, n]], offset=0),
    "iota offset": lambda n: nisa.iota(tile(4, 4), [[1, 4]], offset=n),
    "shuffle mask": lambda n: nisa.nc_stream_shuffle(tile(32, 4), nl.zeros((32, 4), nl.float32), [n] * 32),
    "dma priority": lambda n: nisa.dma_copy(hbm(4, 4), nl.zeros((4, 4), nl.float32), priority=n),
    "partition op": lambda n: ncc.ReplicaGroup.from_partition_op(4, ncc.rg_partition_op.div, n),
    "replica group": lambda n: ncc.ReplicaGroup([[0, n]]),
}


def run(body, value):
    simulate(lambda: body(value) and None, target="trn3")()


@pytest.mark.parametrize("wrong", [2.7, 2.0, True, np.float32(2), np.bool_(True), "2"], ids=repr)
@pytest.mark.parametrize("name", TAKES_AN_INTEGER)
def test_what_is_no_integer_is_refused_at_its_line(name, wrong):
    with pytest.raises(ValueError) as caught:  # NkiValidationError and ReplicaGroupError
        run(TAKES_AN_INTEGER[name], wrong)
    assert f"{__file__}:" in str(caught.value), caught.value
    if isinstance(caught.value, NkiValidationError):
        assert caught.value.rule in ("integer", "index-bounds", "tensor-shape", "loop-step"), caught.value


@pytest.mark.parametrize("right", [2, np.int64(2), np.uint8(2)], ids=repr)
@pytest.mark.parametrize("name", TAKES_AN_INTEGER)
def test_integers_are_taken(name, right):
    run(TAKES_AN_INTEGER[name], right)


def test_launches():
    def kernel():
        pass

    for wrong in (2.0, True, "2"):
        with pytest.raises(NkiValidationError, match=r"\[lnc\]"):
            simulate(kernel, lnc=wrong)
        with pytest.raises(TypeError, match="world_size"):
            simulate(kernel, world_size=wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ncc.ReplicaGroup([[0, 1], [1, 2]]),
        lambda: ncc.ReplicaGroup([[0], [1, 2]]),
        lambda: ncc.ReplicaGroup(3),
        lambda: ncc.ReplicaGroup.from_partition_op(4, "div", 2),
        lambda: ncc.ReplicaGroup.from_partition_op(4, ncc.rg_partition_op.div, 3),
        lambda: ncc.ReplicaGroup([[0]]).group_of(1),
    ],
)
def test_a_wrong_replica_group_has_its_line_within_a_kernel(make):
    with pytest.raises(ReplicaGroupError) as caught:
        simulate(lambda: make())()
    assert str(caught.value).startswith(f"{__file__}:")
    with pytest.raises(ReplicaGroupError) as caught:
        make()
    assert not str(caught.value).startswith(__file__)
