"""Backend "neuron": the NKI kernels in kernels/, compiled and run on device by the nki package."""

from __future__ import annotations

from torch import Tensor

from nki_parallel_attn.errors import UnsupportedFeatureError
from nki_parallel_attn.nki import require_nki
from nki_parallel_attn.topology.types import AttentionLayout


def attention_kv_parallel_segmented_cte(*_: object, **__: object) -> Tensor:
    require_nki()
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
    **_: object,
) -> Tensor:
    """Checked arguments, the scale resolved; the target is the device."""
    require_nki()
    from nki_parallel_attn.kernels.attention_const_max import attention_const_max as const_max

    out: Tensor = const_max[lnc](q_hbm, k_hbm, v_hbm, softmax_max, softmax_scale, q_layout, k_layout)
    return out


def attention_block_tkg(*_: object, **__: object) -> tuple[Tensor, Tensor, Tensor]:
    require_nki()
    raise UnsupportedFeatureError("attention_block_tkg has no NKI kernel yet; use backend='torch'")
