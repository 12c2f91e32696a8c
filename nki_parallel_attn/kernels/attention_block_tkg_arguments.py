"""What one call of attention_block_tkg was given, under the reference page's names, and the sizes it implies.

The operation fills both and checks them; a backend reads them and checks nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology.types import CPCollectiveMode, DtypeMode, KVDPCollectiveMode, QuantizationType


@dataclass(frozen=True, kw_only=True)
class BlockArguments:
    """The reference page's parameters that bear on the result; shapes are in the operation's docstring."""

    X: Tensor
    X_hidden_dim_actual: int | None
    rmsnorm_X_enabled: bool
    rmsnorm_X_eps: float | None
    rmsnorm_X_gamma: Tensor | None
    W_qkv: Tensor
    bias_qkv: Tensor | None
    quantization_type_qkv: QuantizationType
    weight_dequant_scale_qkv: Tensor | None
    input_dequant_scale_qkv: Tensor | None
    rmsnorm_QK_pre_rope_enabled: bool
    rmsnorm_QK_pre_rope_eps: float
    rmsnorm_QK_pre_rope_W_Q: Tensor | None
    rmsnorm_QK_pre_rope_W_K: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    rope_contiguous_layout: bool
    rmsnorm_QK_post_rope_enabled: bool
    rmsnorm_QK_post_rope_eps: float
    rmsnorm_QK_post_rope_W_Q: Tensor | None
    rmsnorm_QK_post_rope_W_K: Tensor | None
    K_cache_transposed: bool
    active_blocks_table: Tensor | None
    K_cache: Tensor
    V_cache: Tensor
    attention_mask: Tensor | None
    sink: Tensor | None
    update_cache: bool
    kv_cache_update_idx: Tensor | None
    W_out: Tensor | None
    bias_out: Tensor | None
    quantization_type_out: QuantizationType
    weight_dequant_scale_out: Tensor | None
    input_dequant_scale_out: Tensor | None
    transposed_out: bool
    out_in_sb: bool
    transposed_in: bool
    softmax_scale: float | None
    enable_fa_s_prior_tiling: bool
    fp8_packed: bool
    k_scale: Tensor | None
    v_scale: Tensor | None
    skip_attention: bool
    is_h_transposed_by_4: bool
    KVDP: int
    KVDP_replica_group: ReplicaGroup | None
    KVDP_collective_mode: KVDPCollectiveMode | None
    KVDP_rank: Tensor | None
    pos_ids: Tensor | None
    swa_start_pos_ids: Tensor | None
    S_ctx: int | None
    max_context_len: Tensor | None
    dtype_mode: DtypeMode
    CP: int
    CP_replica_group: ReplicaGroup | None
    CP_collective_mode: CPCollectiveMode | None
    is_qk_swapped: bool
    lnc: int
    target: str


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The page's dimensions.

    Attributes:
        batch: B, sequences of X.
        tokens: S_tkg, active tokens of each sequence.
        hidden: H.
        head_dim: d_head.
        q_heads: Q heads that this rank projects.
        kv_heads: KV heads in the cache.
        kvdp, cp: degrees.
        block_len: tokens of a cache block; None for a flat cache.
    """

    batch: int
    tokens: int
    hidden: int
    head_dim: int
    q_heads: int
    kv_heads: int
    kvdp: int
    cp: int
    block_len: int | None

    @property
    def batch_attn(self) -> int:
        """B_attn: sequences whose KV this rank holds."""
        return self.batch // self.kvdp

    @property
    def q_heads_attn(self) -> int:
        """Q heads that a rank attends with after the gathers, in the order cp*(q_heads*KVDP) + kvdp*q_heads + h."""
        return self.q_heads * self.kvdp * self.cp
