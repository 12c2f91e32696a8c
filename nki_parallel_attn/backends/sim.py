"""Backend "sim": the NKI kernels in kernels/, run by the interpreter in sim/."""

from __future__ import annotations

from torch import Tensor

from nki_parallel_attn.errors import UnsupportedFeatureError
from nki_parallel_attn.kernels.attention_const_max import attention_const_max as const_max
from nki_parallel_attn.sim import simulate
from nki_parallel_attn.topology.types import AttentionLayout


def attention_kv_parallel_segmented_cte(*_: object, **__: object) -> Tensor:
    raise UnsupportedFeatureError("attention_kv_parallel_segmented_cte has no NKI kernel yet; use backend='torch'")


def attention_const_max(
    q_hbm: Tensor,
    k_hbm: Tensor,
    v_hbm: Tensor,
    softmax_max: float | Tensor,
    softmax_scale: float,
    q_layout: AttentionLayout,
    k_layout: AttentionLayout,
    *,
    lnc: int,
    target: str,
) -> Tensor:
    """Checked arguments, the scale resolved. Without collectives, so each rank runs it for itself."""
    arguments = (q_hbm, k_hbm, v_hbm, softmax_max, softmax_scale, q_layout, k_layout)
    out: Tensor = simulate(const_max, world_size=1, lnc=lnc, target=target)([arguments])[0]
    return out
