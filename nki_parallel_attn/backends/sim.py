"""Backend "sim": the NKI kernels in kernels/, run by the interpreter in sim/."""

from __future__ import annotations

from torch import Tensor

from nki_parallel_attn.errors import UnsupportedFeatureError


def attention_kv_parallel_segmented_cte(*_: object, **__: object) -> Tensor:
    raise UnsupportedFeatureError("attention_kv_parallel_segmented_cte has no NKI kernel yet; use backend='torch'")
