"""A rank's three results against what the float64 oracle says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.tkg.case import FP8, PAD, Case


def check_rank(case: Case, index: int, arguments: dict[str, Any], results: tuple[Any, Tensor, Tensor]) -> None:
    """Output, and the caches after the update or the new tokens; everything else in a cache bit by bit."""
    out, k, v = results
    check_output(case, index, out)
    low, high = bounds(case)
    if not case.update:
        check_new_tokens(case, index, k, v)
        low = high = None
    else:
        assert k.data_ptr() == arguments["K_cache"].data_ptr() and v.data_ptr() == arguments["V_cache"].data_ptr()
    between = zip(case.caches(index, low), case.caches(index, high), strict=True)
    for name, (least, most) in zip(("K_cache", "V_cache"), between, strict=True):
        assert_between(arguments[name], least, most)


def bounds(case: Case) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The least and the most that the new K and V [B, kv_heads, S, d] may be, as the cache holds them."""
    k, v = case.new_tokens[1:]
    return (k.value - k.radius, v.value - v.radius), (k.value + k.radius, v.value + v.radius)


def check_output(case: Case, index: int, out: Any) -> None:
    expected = case.attention[:, case.heads_of(index)]
    if not case.out:
        shape = (case.batch, case.q_heads, case.head_dim, case.tokens)
        if case.in_sb:
            assert tuple(out.shape) == (case.head_dim, case.batch * case.q_heads * case.tokens)
            out = out.view(case.head_dim, case.batch, case.q_heads, case.tokens).permute(1, 2, 0, 3)
        assert tuple(out.shape) == shape
        out = out.permute(0, 3, 1, 2)
        expected = expected.on_both(lambda t: t.transpose(1, 2))
    else:
        expected = expected.on_both(lambda t: t.transpose(1, 2).flatten(2).flatten(0, 1))
        expected = case.projection(expected, index)
        out = natural_order(case, out)
        assert out.shape == expected.value.shape
        out = out.view(case.batch, case.tokens, -1)
        expected = expected.on_both(lambda t: t.view(case.batch, case.tokens, -1))
    assert out.dtype == case.dtype
    real = case.positions != PAD
    excess = (out.double() - expected.value).abs() - expected.radius
    worst = float(excess[real].max())
    assert worst <= 0, (worst, float(expected.radius[real].max()), float(expected.value[real].abs().max()))


def natural_order(case: Case, out: Any) -> Tensor:
    """[B*S, H] of any of the output layouts."""
    hidden, tokens, lnc = 256, case.batch * case.tokens, case.lnc
    if case.out == "transposed":
        if case.in_sb:
            cores = (out,) if lnc == 1 else out
            assert len(cores) == lnc and all(core.shape == (128, hidden // lnc // 128, tokens) for core in cores)
            out = torch.stack(cores, 1)
        assert out.shape == (128, lnc, hidden // lnc // 128, tokens)
        result = out.new_empty(tokens, hidden)
        for c in range(lnc):
            for p in range(128):
                for j in range(hidden // lnc // 128):
                    result[:, c * (hidden // lnc) + p * (hidden // lnc // 128) + j] = out[p, c, j]
        return result
    if case.in_sb and lnc == 2:
        assert all(core.shape == (tokens, hidden // 2) for core in out)
        return torch.cat(out, 1)
    assert isinstance(out, Tensor)
    return out


def check_new_tokens(case: Case, index: int, k: Tensor, v: Tensor) -> None:
    rows = case.place(index).batch_rows(case.batch)
    tokens, batch = case.tokens, rows.stop - rows.start
    if case.kv_heads == 1:
        assert tuple(k.shape) == (case.head_dim, batch, tokens)
        k = k.unsqueeze(2)
    assert tuple(k.shape) == (case.head_dim, batch, case.kv_heads, tokens)
    stored = torch.uint8 if case.fp8 == "opaque" else case.stored
    assert k.dtype == stored and v.dtype == stored
    k, v = (t.view(FP8) if case.fp8 == "opaque" else t for t in (k, v))
    for actual, least, most in zip((k.permute(1, 2, 3, 0), v), *bounds(case), strict=True):
        assert_between(actual, least[rows].to(case.stored), most[rows].to(case.stored))


def assert_between(actual: Tensor, least: Tensor, most: Tensor) -> None:
    """least <= actual <= most, NaN where NaN is expected."""
    assert actual.shape == least.shape and actual.dtype == least.dtype
    if actual.dtype == torch.uint8:
        actual, least, most = (t.contiguous().view(FP8) for t in (actual, least, most))
    actual, least, most = (t.double() for t in (actual, least, most))
    assert torch.equal(actual.isnan(), least.isnan())
    assert bool(((least <= actual) & (actual <= most) | least.isnan()).all())
