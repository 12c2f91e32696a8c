"""Backend "neuron": the NKI kernels in kernels/, compiled and run on device by the nki package."""

from __future__ import annotations

from torch import Tensor

from nki_parallel_attn.errors import UnsupportedFeatureError
from nki_parallel_attn.nki import require_nki


def attention_kv_parallel_segmented_cte(*_: object, **__: object) -> Tensor:
    require_nki()
    raise UnsupportedFeatureError("attention_kv_parallel_segmented_cte has no NKI kernel yet; use backend='torch'")
