"""attention_const_max: attention with a softmax maximum that the caller knows, and how to know it.

The signature and shapes are the reference page's. This module checks the arguments, hands over to a backend, and
reports rows for which the given maximum does not work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nki_parallel_attn.backends import Backend, backend_name, load_backend
from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, SoftmaxRangeError
from nki_parallel_attn.ops.validation import (
    check_bool,
    check_device,
    check_finite,
    check_int,
    check_one_of,
    check_repeated_scalar,
    check_tensor,
)
from nki_parallel_attn.topology.types import AttentionLayout

HEAD_DIM = 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KERNEL_DTYPES = (torch.bfloat16,)
# exp(score - softmax_max) keeps its precision while the difference stays within about this, page attention_const_max.
SAFE_GAP = 80.0
EXPECTED_MAX = 0.88


def attention_const_max(
    q_hbm: Tensor,
    k_hbm: Tensor,
    v_hbm: Tensor,
    softmax_max: float | Tensor,
    softmax_scale: float | None = None,
    q_layout: AttentionLayout = AttentionLayout.HEAD_MAJOR,
    k_layout: AttentionLayout = AttentionLayout.HEAD_MAJOR,
    *,
    raw: bool = False,
    backend: Backend = "auto",
    lnc: int = 1,
    target: str = "trn2",
) -> Tensor:
    """softmax(Q K^T * softmax_scale) V, computed with exp(score - softmax_max) instead of a running maximum.

    Every query sees every key. The result does not depend on softmax_max, as long as exp(score - softmax_max) neither
    overflows nor vanishes: choose it with `softmax_max_from_qk_norm`, or as an upper bound on the scaled scores that is
    not far above them. Differentiable in q_hbm, k_hbm and v_hbm (torch backend).

    Args:
        q_hbm: [N, 128, Sq] (HEAD_MAJOR) or [N, Sq, 128] (SEQ_MAJOR), bfloat16; on torch also float16, float32, float64.
        k_hbm: [N, 128, Sk] or [N, Sk, 128] of q_hbm's dtype.
        v_hbm: [N, Sk, 128] of q_hbm's dtype.
        softmax_max: a number, or a [128, 1] float32 tensor of one repeated value.
        softmax_scale: multiplies the scores; default 1 / sqrt(128).
        q_layout, k_layout: layouts of q_hbm and k_hbm.
        raw: return rows in which softmax_max does not work as the device gives them, without looking for them: NaN.
        backend: "auto" is "neuron" on a Neuron device, else "torch"; NKI_PARALLEL_ATTN_BACKEND overrides "auto".
        lnc: logical core size, 1 or 2: heads are divided over the cores, or each head's queries when the number of
            heads is odd. Of no effect on torch.
        target: "trn2" or "trn3"; of no effect on torch.

    Returns:
        [N, Sq, 128] of q_hbm's dtype.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument.
        SoftmaxRangeError: softmax_max is so low that a row overflows, or so high that a row's exponentials vanish; on
            torch and sim, unless `raw`. The neuron backend gives such rows as they are.
        BackendUnavailableError: the backend is not installed.

    Source: API reference page attention_const_max.
    """
    q, k = _check(q_hbm, k_hbm, v_hbm, softmax_max, softmax_scale, q_layout, k_layout)
    check_bool("raw", raw)
    check_one_of("lnc", lnc, (1, 2))
    check_one_of("target", target, ("trn2", "trn3"))
    name = backend_name(backend, q_hbm)
    module = load_backend(name)
    if name != "torch" and q_hbm.dtype not in KERNEL_DTYPES:
        raise ArgumentTypeError("q_hbm", q_hbm.dtype, f"bfloat16 with backend={name!r}")
    if name != "torch" and torch.is_grad_enabled() and any(t.requires_grad for t in (q_hbm, k_hbm, v_hbm)):
        raise ArgumentError("q_hbm, k_hbm or v_hbm", "requires_grad=True", f"no gradient with backend={name!r}")
    scale = 1 / math.sqrt(HEAD_DIM) if softmax_scale is None else float(softmax_scale)
    out: Tensor = module.attention_const_max(
        q_hbm, k_hbm, v_hbm, softmax_max, scale, q_layout, k_layout, lnc=lnc, target=target
    )
    if not raw and name != "neuron":
        _report_lost_rows(out.detach(), q.detach(), k.detach(), v_hbm.detach(), softmax_max, scale)
    return out


def _check(
    q_hbm: Tensor,
    k_hbm: Tensor,
    v_hbm: Tensor,
    softmax_max: float | Tensor,
    softmax_scale: float | None,
    q_layout: AttentionLayout,
    k_layout: AttentionLayout,
) -> tuple[Tensor, Tensor]:
    """Raise on the first argument that is wrong; Q and K as [N, S, d] views."""
    for name, layout in (("q_layout", q_layout), ("k_layout", k_layout)):
        if not isinstance(layout, AttentionLayout):
            raise ArgumentTypeError(name, repr(layout), "an AttentionLayout")
    spelled = {AttentionLayout.HEAD_MAJOR: "N, d, {}", AttentionLayout.SEQ_MAJOR: "N, {}, d"}
    heads = check_tensor("q_hbm", q_hbm, spelled[q_layout].format("Sq"), DTYPES, d=HEAD_DIM)[0]
    dtypes = (q_hbm.dtype,)
    k_shape = check_tensor("k_hbm", k_hbm, spelled[k_layout].format("Sk"), dtypes, N=heads, d=HEAD_DIM)
    keys = k_shape[2 if k_layout is AttentionLayout.HEAD_MAJOR else 1]
    check_tensor("v_hbm", v_hbm, "N, Sk, d", dtypes, N=heads, Sk=keys, d=HEAD_DIM)
    if isinstance(softmax_max, Tensor):
        check_tensor("softmax_max", softmax_max, f"{HEAD_DIM}, 1", (torch.float32,))
        check_repeated_scalar("softmax_max", softmax_max.detach())
    else:
        check_finite("softmax_max", softmax_max)
    if softmax_scale is not None:
        check_finite("softmax_scale", softmax_scale)
    given = softmax_max if isinstance(softmax_max, Tensor) else None
    check_device(q_hbm, "q_hbm", k_hbm=k_hbm, v_hbm=v_hbm, softmax_max=given)
    return tuple(
        t.transpose(1, 2) if layout is AttentionLayout.HEAD_MAJOR else t
        for t, layout in ((q_hbm, q_layout), (k_hbm, k_layout))
    )  # type: ignore[return-value]


def _report_lost_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, softmax_max: float | Tensor, scale: float) -> None:
    """Raise if a row of `out` is not finite although its inputs are: then softmax_max is the reason."""
    lost = ~out.isfinite().all(-1)
    if not bool(lost.any()):
        return
    lost &= q.isfinite().all(-1) & (k.isfinite().flatten(1).all(1) & v.isfinite().flatten(1).all(1))[:, None]
    rows = lost.nonzero().tolist()
    if not rows:
        return
    head, row = rows[0]
    scores = (k[head].double() @ q[head, row].double()) * scale
    largest = float(scores.max())
    top = float(softmax_max.flatten()[0]) if isinstance(softmax_max, Tensor) else float(softmax_max)
    too_low = float(scores.logsumexp(0)) > top
    what = "overflows" if too_low else "vanishes for every key"
    bound = f"at least about {largest - SAFE_GAP:g}" if too_low else f"at most about {largest + SAFE_GAP:g}"
    raise SoftmaxRangeError(
        "softmax_max",
        f"{top:g}, with which exp(score - softmax_max) {what} in {len(rows)} of {lost.numel()} rows, the first of them "
        f"row {row} of head {head}, whose largest scaled score is {largest:g}",
        f"{bound} for that row",
        "choose it with softmax_max_from_qk_norm; where rows differ by more than "
        f"{SAFE_GAP:g}, use online-softmax attention; raw=True returns the result as it is",
    )


@dataclass(frozen=True)
class SoftmaxMax:
    """A softmax_max derived from QK-RMSNorm weights.

    Attributes:
        softmax_max: the largest scaled score expected in a row.
        hard_bound: a bound that no scaled score exceeds.
        fits: whether the bound is near enough for a constant maximum; if not, use online-softmax attention.
    """

    softmax_max: float
    hard_bound: float

    @property
    def fits(self) -> bool:
        return self.hard_bound - self.softmax_max <= SAFE_GAP


def softmax_max_from_qk_norm(q_norm_weight: Tensor, k_norm_weight: Tensor, num_keys: int) -> SoftmaxMax:
    """The softmax_max for Q and K that come out of RMSNorm with these weights, and whether a constant maximum fits.

        sigma       = sqrt(sum(gamma_q^2 * gamma_k^2) / d)        standard deviation of a scaled score
        softmax_max = 0.88 * sigma * sqrt(2 * ln(Sk))             expected maximum of a row (Gumbel)
        hard_bound  = sqrt(d) * max|gamma_q| * max|gamma_k|       Cauchy-Schwarz

    Scores are taken to be scaled by 1 / sqrt(d).

    Args:
        q_norm_weight, k_norm_weight: gamma_q and gamma_k, [d] each: what the normalised vector is multiplied with (for
            a norm that multiplies with 1 + weight, pass that).
        num_keys: Sk.

    Raises:
        ArgumentError: shapes that differ, a weight that is not finite, num_keys below 1.

    Source: API reference page attention_const_max, notes.
    """
    (d,) = check_tensor("q_norm_weight", q_norm_weight, "d")
    check_tensor("k_norm_weight", k_norm_weight, "d", d=d)
    check_int("num_keys", num_keys, minimum=1)
    weights = []
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if not bool(weight.isfinite().all()):
            raise ArgumentError(name, "a value that is not finite", "finite numbers")
        weights.append(weight.detach().to("cpu", torch.float64))
    gamma_q, gamma_k = weights
    sigma = math.sqrt(float((gamma_q**2 * gamma_k**2).sum()) / d)
    return SoftmaxMax(
        softmax_max=EXPECTED_MAX * sigma * math.sqrt(2 * math.log(num_keys)),
        hard_bound=math.sqrt(d) * float(gamma_q.abs().max()) * float(gamma_k.abs().max()),
    )
