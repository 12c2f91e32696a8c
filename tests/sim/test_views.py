"""View operations against the same operations of NumPy, and their documented constraints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn.sim import Checks, NkiValidationError, OutOfBoundsError, simulate
from nki_parallel_attn.sim import isa as nisa
from nki_parallel_attn.sim import language as nl
from nki_parallel_attn.sim.layout import repeats

SHAPES = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple)


def in_kernel(function, *args, **options):
    """Run `function` as a kernel; it may return anything but tensors."""
    return simulate(function, checks=Checks(outputs=False), **options)(*args)


def numbered(shape):
    return torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)


@st.composite
def indexed(draw):
    """A shape and an index into it: integers and slices, with an Ellipsis or not."""
    shape = draw(SHAPES)
    items = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        stop = draw(st.integers(start + 1, size))
        items.append(
            draw(st.one_of(st.integers(-size, size - 1), st.just(slice(start, stop, draw(st.integers(1, 3))))))
        )
    left = draw(st.integers(0, len(shape)))
    right = draw(st.integers(left, len(shape)))
    if draw(st.booleans()):
        return shape, (*items[:left], Ellipsis, *items[right:])
    return shape, tuple(items[: max(1, right)])


@given(indexed())
@settings(max_examples=150, deadline=None)
def test_hbm_indexing_is_numpy_indexing(case):
    shape, key = case
    values = numbered(shape)
    expected = values.numpy()[key]

    def kernel(x):
        view = x[key]
        assert view.storage is x.storage
        return view.raw.clone()

    got = in_kernel(kernel, values)
    assert np.array_equal(got.numpy().reshape(expected.shape), expected)
    assert got.ndim == max(1, expected.ndim)


@given(indexed())
@settings(max_examples=100, deadline=None)
def test_on_chip_indexing_keeps_the_partition_dimension(case):
    shape, key = case
    if len(key) > len(shape):
        key = tuple(item for item in key if item is not Ellipsis)
    first = key[0]
    kept = slice(first, None if first == -1 else first + 1) if isinstance(first, int) else first
    expected = numbered(shape).numpy()[(kept, *key[1:])]

    def kernel(x):
        tile = nl.load(x)
        return tile[key].raw.clone()

    got = in_kernel(kernel, numbered(shape))
    assert got.ndim == max(2, expected.ndim) and got.shape[0] == expected.shape[0]
    assert np.array_equal(got.numpy().reshape(expected.shape), expected)


@given(SHAPES, st.randoms())
@settings(max_examples=100, deadline=None)
def test_chains_of_views_follow_torch(shape, random):
    values = numbered(shape)

    def kernel(x):
        view, expected = x, values
        for _ in range(6):
            dim = random.randrange(view.ndim)
            operation = random.choice(("permute", "expand", "squeeze", "split", "slice", "broadcast", "flatten"))
            size = view.shape[dim]
            if operation == "permute":
                order = random.sample(range(view.ndim), view.ndim)
                view, expected = view.permute(order), expected.permute(order)
            elif operation == "expand" and view.ndim < 6:
                view, expected = view.expand_dim(dim), expected.unsqueeze(dim)
            elif operation == "squeeze" and size == 1 and view.ndim > 1:
                view, expected = view.squeeze_dim(dim), expected.squeeze(dim)
            elif operation == "split" and size % 2 == 0 and view.ndim < 6:
                view, expected = view.reshape_dim(dim, (2, -1)), expected.unflatten(dim, (2, -1))
            elif operation == "slice" and size > 1:
                view, expected = view.slice(dim, 1, size), expected.narrow(dim, 1, size - 1)
            elif operation == "broadcast" and size == 1:
                view, expected = (
                    view.broadcast(dim, 3),
                    expected.expand(*(3 if d == dim else -1 for d in range(view.ndim))),
                )
            elif operation == "flatten" and dim + 1 < view.ndim:
                try:
                    flat = expected.view(*view.shape[:dim], -1, *view.shape[dim + 2 :])
                except RuntimeError:
                    with pytest.raises(NkiValidationError):
                        view.flatten_dims(dim, dim + 1)
                else:
                    view, expected = view.flatten_dims(dim, dim + 1), flat
            assert view.shape == tuple(expected.shape)
            assert torch.equal(view.raw, expected)
            assert view.is_contiguous() == expected.is_contiguous()
        return True

    assert in_kernel(kernel, values)


def test_reshape_rearrange_and_pattern():
    def kernel(x):
        tile = nl.load(x)
        assert tile.strides == (24, 6, 1) and tile.reshape((8, 24)).shape == (8, 24)
        swapped = tile.rearrange(("p", ("h", "w"), "c"), ("p", "w", "h", "c"), {"h": 2})
        assert torch.equal(swapped.raw, x.raw.reshape(8, 2, 2, 6).permute(0, 2, 1, 3))
        assert torch.equal(tile.rearrange(("p", "h", "c"), ("p", ("h", "c"))).raw, x.raw.reshape(8, 24))
        window = tile.slice(2, 1, 4)
        assert window.get_pattern() == [[24, 8], [6, 4], [1, 3]] and window.offset == 1
        assert torch.equal(tile.ap(window.get_pattern(), offset=1).raw, window.raw)
        assert torch.equal(window.ap([[24, 8], [2, 12]]).raw, tile.ap([[24, 8], [2, 12]], offset=1).raw)
        with pytest.raises(NkiValidationError, match="not contiguous"):
            tile.rearrange(("p", ("h", "w"), "c"), ("p", "w", ("h", "c")), {"h": 2})
        return True

    assert in_kernel(kernel, numbered((8, 4, 6)))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "int32", "float32"])
def test_view_reinterprets_bits(dtype):
    values = torch.randn(4, 8)

    def kernel(x):
        tile = nl.load(x).view(getattr(nl, dtype))
        return tile.shape, tile.raw.clone(), tile.view(nl.float32).raw.clone()

    shape, raw, back = in_kernel(kernel, values)
    assert torch.equal(raw.view(torch.uint8), values.view(torch.uint8)) and shape == tuple(raw.shape)
    assert torch.equal(back, values)


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("index-bounds", lambda t: t[:, 8]),
        ("index-bounds", lambda t: t[:, 4:9]),
        ("index-bounds", lambda t: t[:, nl.ds(6, 3)]),
        ("index-bounds", lambda t: t[0, 0, 0]),
        ("view", lambda t: t.permute((1, 0))),
        ("view", lambda t: t.reshape((8, 4))),
        ("view", lambda t: t.broadcast(1, 4)),
        ("view", lambda t: t.expand_dim(0)),
        ("view", lambda t: t.reshape_dim(1, (3, -1))),
        ("view", lambda t: t[:, ::2].view(nl.uint8)),
        ("view", lambda t: t[:, 0:1].view(nl.uint8)[:, 0:3].view(nl.uint16)),
        ("access-bounds", lambda t: t.ap([[8, 4], [1, 9]])),
        ("access-bounds", lambda t: t.ap([[8, 5], [1, 8]])),
        ("partition-stride", lambda t: t.ap([[16, 2], [1, 8]])),
    ],
)
def test_views_refuse_what_is_documented(rule, make):
    with pytest.raises(NkiValidationError) as caught:
        in_kernel(lambda: make(nl.ndarray((4, 8), nl.float32)))
    assert caught.value.rule == rule
    assert caught.value.location is not None and caught.value.location.startswith(__file__)


@pytest.mark.parametrize("register", [True, False])
def test_scalar_indices_are_read_when_the_instruction_runs(register):
    values = numbered((6, 4, 8))

    def kernel(x):
        if register:
            index = nisa.register_alloc(1)
            view = x.select(0, index)
            nisa.register_move(index, 5)
        else:
            index = nl.full((1, 1), 1, nl.int32)
            view = x.select(0, index)
            nisa.memset(index, 5)
        out = nl.ndarray((4, 8), nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=out, src=view)
        return out

    assert torch.equal(simulate(kernel)(values), values[5])


def test_row_offsets_gather_scatter_and_skip():
    values = numbered((16, 4))
    rows = torch.tensor([[3], [40], [0], [15]], dtype=torch.int32)

    def kernel(x, index, mode):
        idx = nl.load(index)
        tile = nl.full((4, 4), -1.0, nl.float32)
        nisa.dma_copy(dst=tile, src=x.ap([[4, 4], [1, 4]], vector_offset=idx), oob_mode=mode)
        out = nl.zeros((16, 4), nl.float32, nl.shared_hbm)
        nisa.dma_copy(dst=out.vector_select(0, idx), src=tile, oob_mode=mode)
        return out

    got = simulate(kernel)(values, rows, nisa.oob_mode.skip)
    expected = torch.zeros(16, 4)
    expected[[3, 0, 15]] = values[[3, 0, 15]]
    assert torch.equal(got, expected)
    with pytest.raises(OutOfBoundsError, match="offset 40 at partition 1"):
        simulate(kernel)(values, rows, nisa.oob_mode.error)


def test_tensor_indirection_gathers_and_scatters_columns():
    values = torch.randn(32, 64)
    offsets = torch.randint(0, 64, (32, 1), dtype=torch.int32)
    places = torch.stack([torch.randperm(16) for _ in range(2)]).reshape(32, 1).to(torch.int32)

    def kernel(x, index, place):
        tile, idx, where = nl.load(x), nl.load(index), nl.load(place)
        gathered = nl.zeros((32, 16), nl.float32)
        nisa.tensor_copy(dst=gathered.indirect(where, 16), src=tile.indirect(idx, 16))
        out = nl.ndarray((32, 16), nl.float32, nl.shared_hbm)
        nl.store(out, gathered)
        return out

    expected = torch.zeros(32, 16)
    for partition in range(32):
        group = partition // 16 * 16
        for j in range(16):
            expected[partition, places[group + j, 0]] = values[partition, offsets[group + j, 0]]
    assert torch.equal(simulate(kernel, target="trn3")(values, offsets, places), expected)
    with pytest.raises(NkiValidationError, match="gen4"):
        simulate(kernel, target="trn2")(values, offsets, places)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_patterns_that_name_an_element_twice_are_found(pattern):
    strides, shape = [stride for stride, _ in pattern], [size for _, size in pattern]
    addresses = [int(np.dot(strides, index)) for index in np.ndindex(*shape)]
    assert repeats(shape, strides) == (len(set(addresses)) < len(addresses))
