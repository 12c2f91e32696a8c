"""Replica groups, KV layouts and the shapes they apply to. Pure functions: no process group, no I/O.

mesh.py              ranks as a grid with named axes; replica groups of any product of axes
platforms.py         trn2 and trn3 machines: ranks, memory, links, what their collectives allow
kv_layout.py         which rank holds a position and in which slot, and back
block_tables.py      blocks of a paged cache and the tables that name them
slot_mapping.py      physical slot of each position
paged_cache.py       reading and writing a paged cache
rank_tensors_cte.py  the tensors that attention_kv_parallel_segmented_cte asks a rank for
rank_tensors_tkg.py  those of attention_block_tkg; decode_rank.py and masks.py belong to them
projection_shards.py the columns and rows of projections that belong to a rank's heads
types.py             enums, and the attention's shape
"""

from nki_parallel_attn.sim.replica_group import ReplicaGroup, rg_partition_op
from nki_parallel_attn.topology.block_tables import BlockPool
from nki_parallel_attn.topology.kv_layout import Contiguous, Interleaved, KVLayout, RoundRobin
from nki_parallel_attn.topology.mesh import RankMesh
from nki_parallel_attn.topology.platforms import PLATFORMS, Platform, platform_for
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
    "PLATFORMS",
    "AttentionLayout",
    "AttentionShape",
    "BlockPool",
    "CPCollectiveMode",
    "Contiguous",
    "DtypeMode",
    "Interleaved",
    "KVDPCollectiveMode",
    "KVLayout",
    "OProjAttentionLayout",
    "Platform",
    "QuantizationType",
    "RankMesh",
    "ReplicaGroup",
    "RoundRobin",
    "platform_for",
    "rg_partition_op",
]
