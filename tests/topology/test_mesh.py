"""RankMesh against a brute-force enumeration that knows only "row-major, last axis fastest"."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.sim.replica_group import ReplicaGroup, rg_partition_op
from nki_parallel_attn.topology.mesh import RankMesh

NAMES = ("a", "b", "c", "d", "e")


@st.composite
def meshes(draw, largest=4096):
    sizes = []
    for _ in range(draw(st.integers(1, 5))):
        sizes.append(draw(st.integers(1, max(1, min(64, largest // math.prod(sizes))))))
    return RankMesh(dict(zip(NAMES, draw(st.permutations(sizes)), strict=False)))


@settings(deadline=None, max_examples=60)
@given(meshes(), st.data())
def test_groups_against_brute_force(mesh, data):
    cells = list(itertools.product(*(range(size) for size in mesh.sizes)))
    assert mesh.world_size == len(cells) <= 4096
    axes = tuple(data.draw(st.lists(st.sampled_from(mesh.names), unique=True)))
    places = [mesh.names.index(name) for name in axes]
    lists = {}
    for rank, cell in enumerate(cells):
        key = tuple(c for place, c in enumerate(cell) if place not in places)
        lists.setdefault(key, []).append((tuple(cell[place] for place in places), rank))
    expected = tuple(tuple(rank for _, rank in sorted(members)) for members in lists.values())
    group = mesh.groups(*axes)
    assert group.groups == expected
    assert group.group_size == mesh.size(*axes)
    for rank in data.draw(st.lists(st.integers(0, mesh.world_size - 1), min_size=1, max_size=20)):
        members = mesh.group_of(rank, *axes)
        assert members in expected and rank in members
        assert members[mesh.index(rank, *axes)] == rank


@settings(deadline=None, max_examples=60)
@given(meshes(512))
def test_coordinates_and_rank_are_inverse(mesh):
    for rank, cell in enumerate(itertools.product(*(range(size) for size in mesh.sizes))):
        coordinates = mesh.coordinates(rank)
        assert coordinates == dict(zip(mesh.names, cell, strict=True))
        assert list(coordinates) == list(mesh.names)
        assert mesh.rank(**coordinates) == rank
        assert mesh.index(rank, *mesh.names) == rank


@given(st.integers(1, 16), st.integers(1, 16))
def test_innermost_and_outermost_axes_are_nki_partition_ops(outer, inner):
    mesh = RankMesh({"outer": outer, "inner": inner})
    assert mesh.groups("inner") == ReplicaGroup.from_partition_op(outer * inner, rg_partition_op.div, inner)
    assert mesh.groups("outer") == ReplicaGroup.from_partition_op(outer * inner, rg_partition_op.mod, inner)


def test_axis_order_within_a_group_is_the_order_asked_for():
    mesh = RankMesh({"replica": 2, "x": 2, "y": 2})
    assert mesh.groups("x", "y").groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("y", "x").groups == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert mesh.index(1, "y", "x") == 2


def test_no_axis_puts_each_rank_alone():
    assert RankMesh({"x": 3}).groups().groups == ((0,), (1,), (2,))


def test_equal_meshes_are_equal_and_order_matters():
    assert RankMesh({"x": 2, "y": 3}) == RankMesh({"x": 2, "y": 3})
    assert hash(RankMesh({"x": 2, "y": 3})) == hash(RankMesh({"x": 2, "y": 3}))
    assert RankMesh({"x": 2, "y": 3}) != RankMesh({"y": 3, "x": 2})
    assert str(RankMesh({"x": 2, "y": 3})) == "x=2 x y=3"


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: RankMesh({}), "axes"),
        (lambda: RankMesh({"": 2}), "axes"),
        (lambda: RankMesh({"x": 0}), "axes['x']"),
        (lambda: RankMesh({"x": True}), "axes['x']"),
        (lambda: RankMesh({"x": 2.0}), "axes['x']"),
        (lambda: RankMesh({"x": 2}).groups("y"), "axis"),
        (lambda: RankMesh({"x": 2}).groups("x", "x"), "axes"),
        (lambda: RankMesh({"x": 2}).coordinates(2), "rank"),
        (lambda: RankMesh({"x": 2}).coordinates(-1), "rank"),
        (lambda: RankMesh({"x": 2}).rank(x=2), "x"),
        (lambda: RankMesh({"x": 2}).rank(x=0.5), "x"),
        (lambda: RankMesh({"x": 2, "y": 2}).rank(x=1), "coordinates"),
        (lambda: RankMesh({"x": 2}).rank(x=1, z=0), "axis"),
        (lambda: RankMesh({"x": 2}).index(2, "x"), "rank"),
        (lambda: RankMesh({"x": 2}).group_of(2, "x"), "rank"),
    ],
)
def test_bad_arguments(call, argument):
    with pytest.raises(ArgumentError) as error:
        call()
    assert error.value.argument == argument
