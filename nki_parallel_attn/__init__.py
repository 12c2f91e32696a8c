"""nki-parallel-attn: KV-sharded attention for AWS Trainium."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nki_parallel_attn.ops.attention_block_tkg import attention_block_tkg
    from nki_parallel_attn.ops.attention_const_max import attention_const_max, softmax_max_from_qk_norm
    from nki_parallel_attn.ops.attention_kv_parallel_segmented_cte import attention_kv_parallel_segmented_cte
    from nki_parallel_attn.ops.output_projection_cte import output_projection_cte
    from nki_parallel_attn.plan import ShardingPlan
    from nki_parallel_attn.sim.replica_group import ReplicaGroup
    from nki_parallel_attn.topology.gen_mask_tkg import gen_mask_tkg, is_qk_swapped
    from nki_parallel_attn.topology.kv_layout import Contiguous, Interleaved, RoundRobin
    from nki_parallel_attn.topology.types import (
        AttentionLayout,
        AttentionShape,
        CPCollectiveMode,
        DtypeMode,
        KVDPCollectiveMode,
        OProjAttentionLayout,
        QuantizationType,
    )

__all__ = [
    "AttentionLayout",
    "AttentionShape",
    "CPCollectiveMode",
    "Contiguous",
    "DtypeMode",
    "Interleaved",
    "KVDPCollectiveMode",
    "OProjAttentionLayout",
    "QuantizationType",
    "ReplicaGroup",
    "RoundRobin",
    "ShardingPlan",
    "attention_block_tkg",
    "attention_const_max",
    "attention_kv_parallel_segmented_cte",
    "gen_mask_tkg",
    "is_qk_swapped",
    "output_projection_cte",
    "softmax_max_from_qk_norm",
]

# Names are imported when they are first used: the simulator and the pytest plugin live in this package too, and whoever
# imports only those should not wait for the rest.
_HOMES = {
    "ops.attention_block_tkg": ("attention_block_tkg",),
    "ops.attention_const_max": ("attention_const_max", "softmax_max_from_qk_norm"),
    "ops.attention_kv_parallel_segmented_cte": ("attention_kv_parallel_segmented_cte",),
    "ops.output_projection_cte": ("output_projection_cte",),
    "plan": ("ShardingPlan",),
    "sim.replica_group": ("ReplicaGroup",),
    "topology.gen_mask_tkg": ("gen_mask_tkg", "is_qk_swapped"),
    "topology.kv_layout": ("Contiguous", "Interleaved", "RoundRobin"),
    "topology.types": (
        "AttentionLayout",
        "AttentionShape",
        "CPCollectiveMode",
        "DtypeMode",
        "KVDPCollectiveMode",
        "OProjAttentionLayout",
        "QuantizationType",
    ),
}
_HOME_OF = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
