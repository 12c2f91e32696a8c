"""The decode block in float64, stage by stage over the whole model; it knows nothing of ranks, blocks or layouts.

Values are rounded to X's dtype and to float8 where docs/decode_block.md says so, and nowhere else; `bounded.py` keeps
count of what float32 sums (float64 ones for float64 inputs) may change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.tkg.bounded import Bounded, concatenate, sum_error

# torch's fused CPU attention takes a cheaper exponential for 16-bit inputs, see tests/tolerance.py.
from tests.tolerance import FUSED_EXP_ERROR

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Arithmetic:
    """X's dtype, and what is computed in: float64 for float64, else float32."""

    dtype: torch.dtype

    @property
    def unit(self) -> float:
        """Unit roundoff of what is between two roundings to the dtype."""
        return torch.finfo(self.wide).eps / 2

    @property
    def wide(self) -> torch.dtype:
        """What is computed in between."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def rounding(self) -> float:
        """Unit roundoff of the dtype."""
        return torch.finfo(self.dtype).eps / 2


@dataclass(frozen=True, kw_only=True)
class Norm:
    eps: float
    gamma: Tensor | None = None

    def __call__(self, x: Bounded, unit: float, width: int | None = None) -> Bounded:
        n = width or x.value.shape[-1]
        squares = x.value.pow(2).sum(-1, keepdim=True) + n * self.eps
        factor = (squares / n).rsqrt()
        if self.gamma is not None:
            factor = factor * self.gamma.double()
        # What the radii do to the sum of squares, relatively; half of it goes to the root.
        wobble = (x.value.abs() * x.radius + x.radius.pow(2)).sum(-1, keepdim=True) / squares
        scaled = x.times(factor)
        radius = scaled.radius + scaled.largest * (wobble + (x.value.shape[-1] ** 0.5 + 8) * unit)
        return Bounded(scaled.value, radius)


def rope(x: Bounded, cos: Tensor, sin: Tensor, contiguous: bool, unit: float) -> Bounded:
    """x [B, heads, S, d]; cos, sin [r, B, S]. One channel pair at a time."""
    value, radius = x.value.clone(), x.radius.clone()
    pairs = len(cos)
    for pair in range(pairs):
        a, b = (pair, pairs + pair) if contiguous else (2 * pair, 2 * pair + 1)
        c, s = (t[pair].double()[:, None] for t in (cos, sin))
        first, second = x[..., a], x[..., b]
        value[..., a] = first.value * c - second.value * s
        value[..., b] = second.value * c + first.value * s
        for channel, (p, q) in ((a, (first, second)), (b, (second, first))):
            radius[..., channel] = p.radius * c.abs() + q.radius * s.abs()
            radius[..., channel] += 4 * unit * (p.largest * c.abs() + q.largest * s.abs())
    return Bounded(value, radius)


def to_float8(x: Tensor, maximum: float) -> Tensor:
    return x.clamp(-maximum, maximum).to(FP8).double()


def scaled_to_float8(x: Bounded, scale: float, maximum: float, wide: torch.dtype) -> Bounded:
    """As a cache holds tokens: the product with `scale`, rounded to `wide` and then to float8."""
    return x.through(lambda t: to_float8(t.to(wide) * torch.tensor(scale, dtype=wide), maximum))


def static_input(x: Bounded, scale: float, maximum: float, wide: torch.dtype) -> Bounded:
    """What STATIC makes of activations, dequantised: the quotient is rounded to `wide`, as is documented."""
    elements = x.through(lambda t: to_float8(t.to(wide) / torch.tensor(scale, dtype=wide), maximum))
    return elements.times(scale)


def row_input(x: Bounded, maximum: float, wide: torch.dtype) -> Bounded:
    """What ROW_MX makes of activations [T, K], each row by its own largest magnitude, dequantised."""

    def step(largest: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        scale = (largest.amax(-1, keepdim=True).to(wide) / maximum).clamp(min=2.0**-126)
        return scale, lambda t: to_float8(t.to(wide) / scale, maximum) * scale.double()

    magnitude = x.value.abs()
    ends = [step(m) for m in (magnitude, (magnitude - x.radius).clamp(min=0), magnitude + x.radius)]
    between = (ends[2][0] - ends[1][0]).double() / ends[0][0].double()
    found = x.through(*(change for _, change in ends))
    return Bounded(found.value, found.radius + between * found.largest)


def mx_input(x: Bounded) -> Bounded:
    """What MX makes of activations [T, K], dequantised: a block of 32 has the exponent of its largest, minus 7."""
    blocks = x.on_both(lambda t: t.unflatten(-1, (-1, 32)))

    def step(largest: Tensor) -> Callable[[Tensor], Tensor]:
        exponent = (torch.frexp(largest.amax(-1, keepdim=True)).exponent - 1 - 7).clamp(min=-127).double()
        scale = torch.where(largest.amax(-1, keepdim=True) > 0, exponent, -127.0).exp2()
        return lambda t: (t / scale).to(FP8).double() * scale

    magnitude = blocks.value.abs()
    steps = [step(m) for m in (magnitude, (magnitude - blocks.radius).clamp(min=0), magnitude + blocks.radius)]
    return blocks.through(*steps).on_both(lambda t: t.flatten(-2))


def new_tokens(
    x: Tensor,
    project: Callable[[Bounded], Bounded],
    *,
    arithmetic: Arithmetic,
    q_heads: int,
    kv_heads: int,
    norm_x: Norm | None,
    hidden_actual: int,
    norms_pre: tuple[Norm, Norm] | None,
    norms_post: tuple[Norm, Norm] | None,
    rotary: tuple[Tensor, Tensor, bool] | None,
) -> tuple[Bounded, Bounded, Bounded]:
    """Q [B, q_heads, S, d], K and V [B, kv_heads, S, d] of x [B, S, H]."""
    batch, tokens = x.shape[:2]
    unit, dtype = arithmetic.unit, arithmetic.dtype
    hidden = Bounded.exact(x)
    if norm_x:
        hidden = norm_x(hidden, unit, hidden_actual).rounded(dtype)
    qkv = project(hidden).rounded(dtype)
    qkv = qkv.on_both(lambda t: t.view(batch, tokens, q_heads + 2 * kv_heads, -1).transpose(1, 2))
    q, k, v = qkv[:, :q_heads], qkv[:, q_heads : q_heads + kv_heads], qkv[:, q_heads + kv_heads :]
    pair = [q, k]
    for index in range(2):
        if norms_pre:
            pair[index] = norms_pre[index](pair[index], unit)
        if rotary:
            pair[index] = rope(pair[index], *rotary, unit)
        if norms_post:
            pair[index] = norms_post[index](pair[index], unit)
    return pair[0].rounded(dtype), pair[1].rounded(dtype), v


def attention(
    q: Bounded,
    prior: list[tuple[Tensor, Tensor]],
    k: Bounded,
    v: Bounded,
    seen_prior: list[Tensor],
    seen_active: Tensor,
    *,
    arithmetic: Arithmetic,
    scale: float,
    sink: Tensor | None,
) -> Bounded:
    """[B, H, S, d], one sequence, head and token at a time.

    Args:
        prior: for each sequence K and V [KV, length, d].
        seen_prior: for each sequence [H, S, length] bool.
        seen_active: [S (key), B, H, S (query)] bool.
    """
    out, radius = torch.zeros_like(q.value), torch.zeros_like(q.value)
    heads, tokens = q.value.shape[1:3]
    for row in range(len(out)):
        for head in range(heads):
            kv = head // (heads // k.value.shape[1])
            keys = concatenate([Bounded.exact(prior[row][0][kv]), k[row, kv]], 0)
            values = concatenate([Bounded.exact(prior[row][1][kv]), v[row, kv]], 0)
            for token in range(tokens):
                seen = torch.cat([seen_prior[row][head, token], seen_active[:, row, head, token]])
                if bool(seen.any()):
                    result = _row(
                        q[row, head, token],
                        keys[seen],
                        values[seen],
                        arithmetic,
                        scale,
                        None if sink is None else sink[head].double(),
                    )
                    out[row, head, token], radius[row, head, token] = result.value, result.radius
    return Bounded(out, radius).rounded(arithmetic.dtype)


def _row(
    q: Bounded, keys: Bounded, values: Bounded, arithmetic: Arithmetic, scale: float, sink: Tensor | None
) -> Bounded:
    """One query's attention to the keys it sees, before the last rounding.

    Rounded to the dtype on the way: the exponentials of 16-bit inputs, a fused call's partial, and what CP exchanges.
    """
    unit, rounding = arithmetic.unit, arithmetic.rounding
    scores = keys.value @ q.value * scale
    total = torch.logsumexp(scores if sink is None else torch.cat([scores, sink]), 0)
    weights = (scores - total).exp()
    products = (keys.largest * q.largest).norm(dim=-1) * scale
    wobble = (keys.largest @ q.radius + keys.radius @ q.value.abs()) * scale
    wobble = wobble + sum_error(len(q.value), unit) * products + 8 * unit * (scores.abs() + total.abs() + 1)
    # All weights share a denominator that the wobble of their scores moves as well.
    shared = (1 + (weights * wobble.expm1()).sum()).log()
    relative = (wobble + shared).expm1()
    if arithmetic.dtype.itemsize == 2:
        relative = relative + rounding + FUSED_EXP_ERROR
    magnitude = weights @ values.value.abs()
    radius = (weights * (1 + relative)) @ values.radius + (weights * relative) @ values.value.abs()
    radius += (2 * rounding + (2 * len(weights) ** 0.5 + 32) * unit) * magnitude
    return Bounded(weights @ values.value, radius)
