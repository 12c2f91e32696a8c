"""A rank's three results against what the float64 oracle says of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.tkg.case import FP8, PAD, Case
from tests.tolerance import attention_tolerance


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
    pairs = list(zip(case.projected[1:], (case.k_scale, case.v_scale), strict=True))
    error = projection_error(case)

    def shifted(sign: int) -> tuple[Tensor, Tensor]:
        k, v = (case.quantised(value + sign * error * value.abs().max(), scale) for value, scale in pairs)
        return k, v

    return shifted(-1), shifted(1)


def check_output(case: Case, index: int, out: Any) -> None:
    attention = case.attention[:, case.heads_of(index)]
    allowed = output_tolerance(case)
    if not case.out:
        shape = (case.batch, case.q_heads, case.head_dim, case.tokens)
        if case.in_sb:
            assert tuple(out.shape) == (case.head_dim, case.batch * case.q_heads * case.tokens)
            out = out.view(case.head_dim, case.batch, case.q_heads, case.tokens).permute(1, 2, 0, 3)
        assert tuple(out.shape) == shape and out.dtype == case.dtype
        deviation = (out.double() - attention.transpose(2, 3)).abs().amax((1, 2))
    else:
        weight = case.out_weight(index)
        flat = attention.transpose(1, 2).flatten(0, 1).flatten(1)
        expected = (case.static_input(flat) if case.out_type == "STATIC" else flat) @ weight
        if case.out == "bias":
            expected = expected + case.tensors["bias_out"].double()
        out = natural_order(case, out)
        assert out.shape == expected.shape and out.dtype == case.dtype
        deviation = (out.double() - expected).abs().amax(1).view(case.batch, case.tokens)
        unit = torch.finfo(case.dtype).eps / 2
        # Rounding of attention and result, float32 accumulation over the rows of W_out.
        allowed = allowed * float(weight.abs().sum(0).max()) + 2 * unit * float(expected.abs().max())
        allowed += len(weight) * accumulation_unit(case) * float(weight.abs().max() * attention.abs().max())
    real = case.positions != PAD
    worst = float(deviation[real].max())
    assert worst <= allowed, (worst, allowed)


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


def accumulation_unit(case: Case) -> float:
    return torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps / 2


def projection_error(case: Case) -> float:
    """Relative error of new Q, K and V: one flipped rounding to the dtype, and the accumulation over H.

    A dot product of length H is off by about sqrt(H)*u*|x||w| (Higham and Mary 2019), here relative to a typical value.
    """
    x, w = case.tensors["x"].double().nan_to_num(0.0), case.tensors["w"].double()
    if case.rmsnorm_x:
        x = x / x.pow(2).mean(-1, keepdim=True).sqrt() * (case.tensors["gamma_x"].double().abs().max())
    product = float(x.norm(dim=-1).max() * w.norm(dim=0).max())
    typical = float((x @ w).pow(2).mean().sqrt())
    return 2 * torch.finfo(case.dtype).eps + case.hidden**0.5 * accumulation_unit(case) * product / typical


def output_tolerance(case: Case) -> float:
    """The attention's own tolerance, and what one flipped rounding of Q, K and V does to it.

    A relative error e of Q and of K moves a score by up to 2*e*scale*|q||k|, a weight by twice that, relatively. Where
    that error may tip a new token's float8 rounding, e is a step of float8.
    """
    q, k, v = case.new_tokens
    if case.skip_attention:
        return projection_error(case) * float(q.abs().max())
    values = torch.cat([v.flatten(), *(prior[1].double().flatten() for prior in case.tensors["prior"])])
    keys = torch.cat([k.flatten(0, 2), *(prior[0].double().flatten(0, 1) for prior in case.tensors["prior"])])
    flip = projection_error(case)
    if case.fp8 and not all(torch.equal(*pair) for pair in zip(*bounds(case), strict=True)):
        flip = 2.0**-3
    score = case.softmax_scale * float(q.norm(dim=-1).max() * keys.norm(dim=-1).max())
    largest = float(values.abs().max())
    return attention_tolerance(case.dtype, values, case.head_dim) + largest * flip * (1 + 4 * score)
