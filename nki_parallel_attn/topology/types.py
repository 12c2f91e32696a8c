"""Enums and small types that topology, plan, ops and kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nki_parallel_attn.errors import ArgumentError


class QuantizationType(Enum):
    """How a projection's weights and activations are quantised (output_projection_cte, attention_block_tkg)."""

    NONE = "none"
    STATIC = "static"
    ROW = "row"
    MX = "mx"
    STATIC_MX = "static_mx"
    ROW_MX = "row_mx"


class DtypeMode(Enum):
    """Which float8 e4m3 is meant: NON_OCP has a maximum of 240, OCP of 448 (trn3 only), AUTO follows the target."""

    NON_OCP = "non_ocp"
    OCP = "ocp"
    AUTO = "auto"


class AttentionLayout(Enum):
    """attention_const_max: SEQ_MAJOR is [N, S, d], HEAD_MAJOR is [N, d, S]."""

    HEAD_MAJOR = "head_major"
    SEQ_MAJOR = "seq_major"


class OProjAttentionLayout(Enum):
    """output_projection_cte: the order of the attention tensor's dimensions."""

    BNdS = "BNdS"
    BSNd = "BSNd"
    BNSd = "BNSd"


class KVDPCollectiveMode(Enum):
    """attention_block_tkg: how Q heads and output batches are exchanged under KVDP."""

    ALL_TO_ALL = "all_to_all"
    ALL_GATHER_SLICE = "all_gather_slice"


class CPCollectiveMode(Enum):
    """attention_block_tkg: how partial outputs are redistributed under CP."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"


@dataclass(frozen=True)
class AttentionShape:
    """Global attention dimensions of one model copy.

    Args:
        q_heads, kv_heads: heads of the whole model copy; kv_heads divides q_heads.
        head_dim: width of one head.
        layers: attention layers, for cache sizes.
        hidden: model width, where a projection needs it.

    Raises:
        ArgumentError: a count below 1, or q_heads that is no multiple of kv_heads.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int = 1
    hidden: int | None = None

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim", "layers", "hidden"):
            value = getattr(self, name)
            if value is None and name == "hidden":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(name, repr(value), "a positive integer")
        if self.q_heads % self.kv_heads:
            raise ArgumentError("kv_heads", self.kv_heads, f"a divisor of q_heads={self.q_heads}")
