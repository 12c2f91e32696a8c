"""attention_block_tkg: the fused attention block of decoding, over KV sharded by batch (KVDP) and by sequence (CP).

The signature and shapes are the reference page's. This module checks the arguments, makes sure that all ranks go on or
none does, and hands over to a backend. The checks are in attention_block_tkg_checks.py.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn.backends import Backend, backend_name, load_backend
from nki_parallel_attn.errors import UnsupportedFeatureError
from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments
from nki_parallel_attn.ops.attention_block_tkg_checks import block_sizes, check_arguments, shared_fields
from nki_parallel_attn.ops.decode_groups import DecodeGroups, check_process_group, decode_groups
from nki_parallel_attn.ops.rank_agreement import CheckRanks, agree, check_check_ranks
from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology.types import CPCollectiveMode, DtypeMode, KVDPCollectiveMode, QuantizationType

PACKED = "seq_packed_"


def attention_block_tkg(
    X: Tensor,
    X_hidden_dim_actual: int | None,
    rmsnorm_X_enabled: bool,
    rmsnorm_X_eps: float | None,
    rmsnorm_X_gamma: Tensor | None,
    W_qkv: Tensor,
    bias_qkv: Tensor | None,
    quantization_type_qkv: QuantizationType,
    weight_dequant_scale_qkv: Tensor | None,
    input_dequant_scale_qkv: Tensor | None,
    rmsnorm_QK_pre_rope_enabled: bool,
    rmsnorm_QK_pre_rope_eps: float,
    rmsnorm_QK_pre_rope_W_Q: Tensor | None,
    rmsnorm_QK_pre_rope_W_K: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rope_contiguous_layout: bool,
    rmsnorm_QK_post_rope_enabled: bool,
    rmsnorm_QK_post_rope_eps: float,
    rmsnorm_QK_post_rope_W_Q: Tensor | None,
    rmsnorm_QK_post_rope_W_K: Tensor | None,
    K_cache_transposed: bool,
    active_blocks_table: Tensor | None,
    K_cache: Tensor,
    V_cache: Tensor,
    attention_mask: Tensor | None,
    sink: Tensor | None,
    update_cache: bool,
    kv_cache_update_idx: Tensor | None,
    W_out: Tensor | None,
    bias_out: Tensor | None,
    quantization_type_out: QuantizationType,
    weight_dequant_scale_out: Tensor | None,
    input_dequant_scale_out: Tensor | None,
    transposed_out: bool,
    out_in_sb: bool,
    transposed_in: bool = False,
    softmax_scale: float | None = None,
    enable_fa_s_prior_tiling: bool = True,
    fp8_packed: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sbm: object = None,
    skip_attention: bool = False,
    is_h_transposed_by_4: bool = False,
    KVDP: int = 1,
    KVDP_replica_group: ReplicaGroup | None = None,
    KVDP_collective_mode: KVDPCollectiveMode | None = None,
    KVDP_rank: Tensor | None = None,
    pos_ids: Tensor | None = None,
    swa_start_pos_ids: Tensor | None = None,
    S_ctx: int | None = None,
    max_context_len: Tensor | None = None,
    dtype_mode: DtypeMode = DtypeMode.NON_OCP,
    CP: int = 1,
    CP_replica_group: ReplicaGroup | None = None,
    CP_collective_mode: CPCollectiveMode | None = None,
    seq_packed_attention_mask: Tensor | None = None,
    seq_packed_active_blocks_table: Tensor | None = None,
    seq_packed_q_index_table: Tensor | None = None,
    seq_packed_seq_id_table: Tensor | None = None,
    seq_packed_accumulator_partial_route_table: Tensor | None = None,
    seq_packed_accumulator_group_state_route_table: Tensor | None = None,
    *,
    is_qk_swapped: bool = False,
    backend: Backend = "auto",
    lnc: int = 1,
    target: str = "trn2",
    KVDP_group: dist.ProcessGroup | None = None,
    CP_group: dist.ProcessGroup | None = None,
    check_ranks: CheckRanks | None = None,
) -> tuple[Tensor | tuple[Tensor, ...], Tensor, Tensor]:
    """One decoding step of an attention block: X -> [RMSNorm] -> QKV -> [RMSNorm Q, K] -> [RoPE] -> [RMSNorm Q, K] ->
    attention over the prior cache and the active tokens -> cache update -> [output projection].

    B sequences have S_tkg active tokens each. Under KVDP a rank holds the KV of B_attn = B/KVDP sequences, under CP a
    part of each sequence's prior; under both KVDP cuts the batch first. A rank projects q_heads = W_qkv.shape[1]/d -
    2*kv_heads heads and gets their output; it attends with q_heads_attn = q_heads*KVDP*CP heads in the order
    cp*(q_heads*KVDP) + kvdp*q_heads + h, of which head g reads KV head g // (q_heads_attn // kv_heads). No gradient is
    recorded. `ShardingPlan` makes every tensor that differs between ranks (docs/rank_tensors.md).

    Args:
        X: [B, S_tkg, H] bfloat16, float16, float32 or float64, H a multiple of 128, or as `transposed_in` says.
        X_hidden_dim_actual: channels from this one on are padding: read as zeros, and left out of RMSNorm's mean.
        rmsnorm_X_enabled, rmsnorm_X_eps, rmsnorm_X_gamma: RMSNorm of X; eps None is 1e-3; gamma [1, H].
        W_qkv: [H, I], I = d*(q_heads + 2*kv_heads), columns Q heads, K heads, V heads; used as given, X @ W_qkv. X's
            dtype; STATIC and ROW: float8_e4m3fn, within dtype_mode's maximum; the MX types: packed [H/4, I, 4]
            float8_e4m3fn, for MX also float8_e5m2, or [H/4, I, 2] uint8 for float4 (`microscaling_torch` packs).
        bias_qkv: [1, d*(q_heads + 2*kv_heads)].
        quantization_type_qkv: NONE; or what becomes of activations, the MX types with target="trn3" only:
            STATIC, STATIC_MX  float8, clamp(x / input scale), up to dtype_mode's maximum, for STATIC_MX 448.
            ROW                as they are.
            ROW_MX             float8, each token by its own absmax / 448.
            MX                 float8_e4m3fn in blocks of 32, as nki.isa.quantize_mx; X bfloat16 or float16.
        weight_dequant_scale_qkv: STATIC, STATIC_MX: [1 or 128, 3], for Q, K and V. ROW, ROW_MX: [1 or 128, I]. MX:
            [H/32, I] uint8 or float8_e8m0fnu.
        input_dequant_scale_qkv: STATIC, STATIC_MX: [1 or 128, 1].
        rmsnorm_QK_pre_rope_*, rmsnorm_QK_post_rope_*: RMSNorm of each head of Q and K before and after RoPE; gammas
            [1, d], None for ones.
        cos, sin: [r, B, S_tkg]; 2*r <= d channels are rotated, the rest pass through; None for no RoPE.
        rope_contiguous_layout: pairs are (i, r + i), else (2*i, 2*i + 1).
        K_cache_transposed: K_cache is [B_attn, kv_heads, d, S_max_ctx]; flat caches only.
        active_blocks_table: [B_attn, max_blocks] int32, or [B_attn, kv_heads, max_blocks] of block*kv_heads + head for
            several KV heads; -1 is absent and contributes nothing. It makes the cache a block cache.
        K_cache: flat [B_attn, kv_heads, S_max_ctx, d]; block [num_blocks, block_len, d] or [num_blocks, kv_heads,
            block_len, d]; with fp8_packed [..., block_len // 2, d, 2]. X's dtype, or float8_e4m3fn, or uint8 for the
            opaque "float8e4".
        V_cache: as K_cache, neither transposed nor packed.
        attention_mask: 1 = visible, 0 = hidden; bool, integer or float. With pos_ids the active part [S_tkg, B_attn,
            q_heads_attn, S_tkg] (key, sequence, head, query), taken exactly as given. Without pos_ids all keys: [S_ctx,
            B_attn, q_heads_attn, S_tkg], or with is_qk_swapped [B_attn, q_heads_attn, S_tkg, S_ctx]; the last S_tkg
            keys are the active tokens, those before them cache slots in sequence order, for block caches as well
            (the reference kernel wants them permuted there). `gen_mask_tkg` builds it.
        sink: [q_heads_attn, 1], a logit for each head that joins the denominator, once over a CP group.
        update_cache: write the new K and V, in place, after everything that can fail.
        kv_cache_update_idx: uint32 (or int64), 4294967295 = skip. Flat: [B_attn, 1], start slot. Block: the slot
            entry*block_len + offset of each token, [B_attn, S_tkg] or [B_attn, kv_heads, S_tkg].
        W_out: [q_heads*d, H] or None for no projection; absorbs v_scale.
        bias_out: [1, H].
        quantization_type_out: as quantization_type_qkv, W_out packed along q_heads*d, a multiple of 32.
        weight_dequant_scale_out, input_dequant_scale_out: as W_qkv's, but [1 or 128, 1] for STATIC and STATIC_MX, and
            [1 or 128, H] for ROW and ROW_MX; MX [q_heads*d/32, H].
        transposed_out, out_in_sb: see Returns.
        transposed_in: X is [128, lnc, H/lnc/128, B*S_tkg], at most 128 tokens: element [p, c, j, t] is channel
            c*(H/lnc) + p*(H/lnc/128) + j of token t.
        softmax_scale: multiplies Q.K^T; None is 1/sqrt(d), divided by k_scale for a float8 cache.
        fp8_packed: K_cache has the packed layout; float8 block caches only.
        k_scale, v_scale: [128, 1] or [1, 1], one repeated value each: the cache holds clamp(K*k_scale) and
            clamp(V*v_scale) as float8. The output keeps v_scale.
        skip_attention: pass Q, after norms and RoPE, on as the attention output.
        is_h_transposed_by_4: channels of X and gamma stand in the order [4, H//512, 128] instead of [H//512, 128, 4];
            required by the MX types. Never changes the result.
        KVDP, KVDP_replica_group, KVDP_rank: degree, rank lists (ascending), and [1] uint32, the place in the list.
        KVDP_collective_mode: None is ALL_TO_ALL where the platform allows it for KVDP ranks, else ALL_GATHER_SLICE.
        pos_ids: [B_attn, S_tkg] integers: the prior of sequence b is local slots [0, pos_ids[b, 0]).
        swa_start_pos_ids: [B_attn, S_tkg]: first local slot that each query sees.
        S_ctx: local context of a flat cache with pos_ids, required there and None elsewhere.
        max_context_len: [1] int32, at least the longest local prior; a hint; block caches with pos_ids only.
        dtype_mode: float8 is clamped to 240 (NON_OCP) or 448 (OCP, trn3 only); AUTO follows `target`.
        CP, CP_replica_group: degree and rank lists. A token that several ranks count as active counts several times:
            only its owner's attention_mask has ones for it, and only the owner's update index is not skip.
        CP_collective_mode: ALL_TO_ALL (None) or REDUCE_SCATTER; on torch the same movement.
        enable_fa_s_prior_tiling, sbm: of the device; no effect on the result.
        seq_packed_*: not supported yet.
        is_qk_swapped: the layout of a full mask. The reference decides it by a rule that is not public.
        backend: "auto" is "neuron" on a Neuron device, else "torch"; NKI_PARALLEL_ATTN_BACKEND overrides "auto".
        lnc: logical core size, 1 or 2: the shapes above depend on it.
        target: "trn2" or "trn3".
        KVDP_group, CP_group: torch process groups of exactly this rank's lists, instead of ones made from them.
        check_ranks: "always" (default for CPU tensors), "first" or "never"; see attention_kv_parallel_segmented_cte.

    Returns:
        1. Without W_out [B, q_heads, d, S_tkg], with out_in_sb [d, B*q_heads*S_tkg]. With W_out [B*S_tkg, H],
           transposed_out [128, lnc, H/lnc/128, B*S_tkg] (elements as transposed_in); with out_in_sb one core's part,
           [B*S_tkg, H/lnc] or [128, H/lnc/128, B*S_tkg], for lnc=2 a tuple of both cores', each with its part of H.
           X's dtype.
        2. K_cache; with update_cache=False the new K, [d, B_attn, S_tkg], for several KV heads [d, B_attn, kv_heads,
           S_tkg], of the cache's dtype.
        3. V_cache; with update_cache=False the new V, [B_attn, kv_heads, S_tkg, d].

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument on this rank.
        PeerError: a bad argument on another rank, or a rank that did not arrive in time.
        RankMismatchError: arguments that must be equal on all ranks are not.
        UnsupportedFeatureError, BackendUnavailableError: the backend cannot do this, or is not installed.

    Source: API reference page attention_block_tkg; what it leaves open is in docs/decode_block.md.
    """
    given = dict(locals())
    groups: DecodeGroups | None = None
    shared: dict[str, object] = {}
    error: Exception | None = None
    args, sizes = None, None
    module: Any = None
    # Whatever is wrong here, the peers must hear of it.
    try:
        groups = decode_groups(KVDP, KVDP_replica_group, CP, CP_replica_group)
        check_check_ranks(check_ranks)
        _refuse_packed(given)
        check_process_group("KVDP_group", KVDP_group, groups.kvdp, "KVDP_replica_group")
        check_process_group("CP_group", CP_group, groups.cp, "CP_replica_group")
        args = BlockArguments(**{field.name: given[field.name] for field in fields(BlockArguments)})
        sizes = block_sizes(args)
        check_arguments(args, sizes, groups.kvdp_rank)
        name = backend_name(backend, X)
        module = load_backend(name)
        shared = {**shared_fields(args, sizes), "backend": name, "groups": groups.all}
    except Exception as problem:
        error = problem
    if check_ranks is None:
        check_ranks = "always" if not isinstance(X, Tensor) or X.device.type == "cpu" else "first"
    agree("attention_block_tkg", groups.all if groups else None, shared, error, check_ranks)
    assert module is not None and groups is not None
    result: tuple[Tensor | tuple[Tensor, ...], Tensor, Tensor] = module.attention_block_tkg(
        args, sizes, kvdp_ranks=groups.kvdp, cp_ranks=groups.cp, KVDP_group=KVDP_group, CP_group=CP_group
    )
    return result


def _refuse_packed(given: dict[str, Any]) -> None:
    packed = [name for name, value in given.items() if name.startswith(PACKED) and value is not None]
    if packed:
        raise UnsupportedFeatureError(f"{packed[0]}: sequence-packed attention is not supported; pass attention_mask")
