"""The torch twin against the float64 sums: layouts, dtypes, ragged sizes, quantisation, `out`, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nki_parallel_attn import DtypeMode, output_projection_cte
from nki_parallel_attn.kernels import output_projection_cte_torch as twin

from .case import E2M1, E4M3FN, E5M2, MX, NONE, ROW, STATIC, BNdS, BNSd, BSNd, Case, close

LAYOUTS = (None, BNdS, BSNd, BNSd)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_layouts(layout, dtype, bias):
    case = Case(layout=layout, dtype=dtype, bias=bias)
    close(output_projection_cte(**case.arguments()), case)


sizes = st.integers(1, 5)


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(1, 20), st.integers(1, 128), st.integers(1, 40), st.integers(1, 70), st.data())
def test_ragged_sizes(batch, heads, head_dim, length, hidden, data):
    case = Case(
        batch,
        heads,
        head_dim,
        length,
        hidden,
        data.draw(st.sampled_from(FLOATS)),
        data.draw(st.sampled_from(LAYOUTS)),
        data.draw(st.booleans()),
        output_dtype=data.draw(st.sampled_from((None, *FLOATS))),
    )
    close(output_projection_cte(**case.arguments()), case)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from((STATIC, ROW)),
    st.sampled_from(((DtypeMode.NON_OCP, "trn2"), (DtypeMode.OCP, "trn3"), (DtypeMode.AUTO, "trn3"))),
    sizes,
    st.integers(1, 17),
    st.integers(1, 128),
    st.integers(1, 20),
    st.data(),
)
def test_float8(kind, mode, batch, heads, head_dim, length, data):
    case = Case(
        batch,
        heads,
        head_dim,
        length,
        data.draw(st.integers(1, 40)),
        data.draw(st.sampled_from(FLOATS)),
        bias=data.draw(st.booleans()),
        kind=kind,
        mode=mode[0],
        target=mode[1],
        output_dtype=data.draw(st.sampled_from((None, *FLOATS))),
    )
    close(output_projection_cte(**case.arguments()), case)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from((E4M3FN, E5M2, E2M1)), sizes, st.integers(1, 6), st.sampled_from((32, 64, 96, 128)), st.data())
def test_microscaling(element, batch, heads, head_dim, data):
    case = Case(
        batch,
        heads,
        head_dim,
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(1, 40)),
        data.draw(st.sampled_from((torch.bfloat16, torch.float16))),
        bias=data.draw(st.booleans()),
        kind=MX,
        target="trn3",
        element=element,
        output_dtype=data.draw(st.sampled_from((None, *FLOATS))),
    )
    close(output_projection_cte(**case.arguments()), case)


@pytest.mark.parametrize("element", [E4M3FN, E2M1])
def test_compact_scales(element):
    case = Case(1, 3, 128, 9, 256, torch.bfloat16, kind=MX, target="trn3", element=element, compact=True)
    close(output_projection_cte(**case.arguments()), case)


def test_scales_repeated_over_partitions():
    case = Case(kind=ROW)
    arguments = case.arguments()
    arguments["weight_scales"] = arguments["weight_scales"].expand(128, -1)
    close(output_projection_cte(**arguments), case)


@pytest.mark.parametrize(
    ("magnitude", "column_magnitude"), [(1e-38, 1e-2), (1e-36, 1e-4), (1e-36, 1e35), (1e37, 1e-40), (1e37, 1e-2)]
)
def test_row_scales_of_any_size(magnitude, column_magnitude):
    """Neither scale's product with the sum, nor with the other, need be a normal float32 for the result to be right."""
    case = Case(kind=ROW, bias=False, magnitude=magnitude, column_magnitude=column_magnitude)
    close(output_projection_cte(**case.arguments()), case)


@pytest.mark.parametrize("kind", [NONE, STATIC, ROW])
def test_more_rows_than_are_widened_at_once(kind, monkeypatch):
    monkeypatch.setattr(twin, "WIDE_ROWS", 5)
    case = Case(length=17, dtype=torch.bfloat16, kind=kind, output_dtype=torch.float32)
    close(output_projection_cte(**case.arguments()), case)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ways_to_multiply_16_bits(layout, native, monkeypatch):
    """Which one is taken depends on the CPU."""
    monkeypatch.setattr(twin, "_multiplies", lambda args: native)
    case = Case(dtype=torch.bfloat16, layout=layout)
    close(output_projection_cte(**case.arguments()), case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_and_one_sequence(layout):
    for case in (Case(1, length=1, layout=layout), Case(1, length=5, layout=layout), Case(4, length=1, layout=layout)):
        close(output_projection_cte(**case.arguments()), case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_operands(layout):
    case = Case(layout=layout)
    arguments = case.arguments()
    for name in ("attention", "weight", "bias"):
        value = arguments[name]
        arguments[name] = torch.stack((value, torch.full_like(value, torch.nan)), -1)[..., 0]
    close(output_projection_cte(**arguments), case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("at_once", [1, 1024])
def test_out_is_written_in_its_rows_and_nowhere_else(layout, dtype, strided, at_once, monkeypatch):
    monkeypatch.setattr(twin, "WIDE_ROWS", at_once)
    case = Case(layout=layout, dtype=dtype)
    arguments = case.arguments()
    memory = torch.full((case.batch, 12, case.hidden + 4), 7.0, dtype=dtype)
    out = memory[..., : case.hidden] if strided else memory[..., : case.hidden].contiguous()
    before = out.clone()
    got = output_projection_cte(**arguments, out=out, out_s_offset=3)
    assert got is out
    close(got[:, 3:10], case)
    assert torch.equal(got[:, :3], before[:, :3]) and torch.equal(got[:, 10:], before[:, 10:])
    assert bool((memory[..., case.hidden :] == 7).all())


def test_chunks_of_a_sequence_make_one_result():
    whole = Case(length=11)
    arguments = whole.arguments()
    out = torch.full((whole.batch, 11, whole.hidden), torch.nan)
    for start, stop in ((0, 4), (4, 5), (5, 11)):
        chunk = {**arguments, "attention": arguments["attention"][..., start:stop]}
        output_projection_cte(**chunk, out=out, out_s_offset=start)
    close(out, whole)


def test_a_wrong_argument_leaves_out_untouched():
    arguments = Case().arguments()
    out = torch.full((2, 7, 20), 7.0)
    with pytest.raises(ValueError, match="out_s_offset"):
        output_projection_cte(**arguments, out=out, out_s_offset=1)
    assert bool((out == 7).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("at_once", [1, 1024])
def test_gradients(layout, bias, at_once, monkeypatch):
    monkeypatch.setattr(twin, "WIDE_ROWS", at_once)
    arguments = Case(dtype=torch.float64, layout=layout, length=3, hidden=4, head_dim=2, bias=bias).arguments()
    names = ["attention", "weight", *(["bias"] if bias else [])]

    def run(*tensors):
        return output_projection_cte(**{**arguments, **dict(zip(names, tensors, strict=True))})

    assert torch.autograd.gradcheck(run, [arguments[name].requires_grad_() for name in names])


@pytest.mark.parametrize("native", [False, True])
def test_gradients_of_16_bits_are_those_of_float64(native, monkeypatch):
    monkeypatch.setattr(twin, "_multiplies", lambda args: native)
    case = Case(dtype=torch.bfloat16)
    arguments = case.arguments()
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        operands = {
            name: arguments[name].detach().to(dtype).requires_grad_() for name in ("attention", "weight", "bias")
        }
        out = output_projection_cte(**{**arguments, **operands})
        out.square().sum().backward()
        grads.append([t.grad.double() for t in operands.values()])
    for got, expected in zip(*grads, strict=True):
        # Roundings of the result, of its gradient, and of the gradient's own.
        assert bool(((got - expected).abs() <= 4 * torch.finfo(torch.bfloat16).eps * expected.abs().max()).all())


def test_gradients_through_out():
    arguments = Case(dtype=torch.float64).arguments()
    arguments["weight"].requires_grad_()
    out = torch.zeros(2, 9, 20, dtype=torch.float64)
    got = output_projection_cte(**arguments, out=out, out_s_offset=1)
    assert got is out
    got.sum().backward()
    rows = arguments["attention"].permute(0, 3, 1, 2).reshape(-1, 48)
    assert torch.allclose(arguments["weight"].grad, rows.sum(0)[:, None].expand(-1, 20))


@pytest.mark.parametrize("kind", ["gradient", NONE, STATIC, ROW, MX])
def test_autocast_takes_no_precision(kind):
    gradient, kind = kind == "gradient", NONE if kind == "gradient" else kind
    target = "trn3" if kind is MX else "trn2"
    dtype = torch.bfloat16 if kind is MX else torch.float32
    case = Case(heads=4, dtype=dtype, kind=kind, target=target, output_dtype=torch.float32)
    arguments = case.arguments()
    if gradient:
        arguments["weight"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = output_projection_cte(**arguments)
    close(got, case)


@pytest.mark.parametrize(("length", "products"), [(2, 1), (300, 22), (512, 32), (513, 64)])
@pytest.mark.parametrize("gradient", [False, True])
def test_short_sequences_share_a_product(length, products, gradient, monkeypatch):
    """[B, N, D, S] has no rows of tokens over several sequences; one product for each is slow if they are short."""
    calls = []
    product = twin._product
    monkeypatch.setattr(twin, "_product", lambda *operands: calls.append(operands) or product(*operands))
    case = Case(64, 1, 4, length, 5, layout=BNdS)
    arguments = case.arguments()
    arguments["weight"].requires_grad_(gradient)
    close(output_projection_cte(**arguments), case)
    assert len(calls) == products


def test_attention_is_not_copied(monkeypatch):
    """The fold of all layouts but BNSd shares attention's memory."""
    for layout in (BNdS, BSNd, BNSd):
        attention = Case(layout=layout).arguments()["attention"]
        shared = twin.fold(attention, layout).data_ptr() == attention.data_ptr()
        assert shared == (layout is not BNSd)


def test_the_largest_hidden_size():
    case = replace(Case(), hidden=32768, batch=1, length=2)
    close(output_projection_cte(**case.arguments()), case)


@pytest.mark.long
@pytest.mark.parametrize("kind", [NONE, ROW, MX])
def test_the_largest_sizes_that_the_page_calls_validated(kind):
    target = "trn3" if kind is MX else "trn2"
    case = Case(1, 17, 128, 9, 20705, torch.bfloat16, kind=kind, target=target)
    close(output_projection_cte(**case.arguments()), case)


@pytest.mark.long
def test_more_heads_than_validated_and_many_tokens():
    case = Case(2, 40, 128, 1100, 24, torch.bfloat16, bias=False)
    close(output_projection_cte(**case.arguments()), case)
