"""The rules of attention_block_tkg's arguments: sizes from the tensors, then every constraint of the page in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.kernels.attention_block_tkg_arguments import BlockArguments, BlockSizes
from nki_parallel_attn.ops.decode_quantization_checks import (
    check_out_quantization,
    check_qkv_quantization,
    check_weight_shape,
)
from nki_parallel_attn.ops.validation import (
    check_apart,
    check_bool,
    check_device,
    check_finite,
    check_int,
    check_multiple,
    check_one_of,
    check_repeated_scalar,
    check_tensor,
)
from nki_parallel_attn.topology.block_tables import check_block_table
from nki_parallel_attn.topology.slot_mapping import check_slots
from nki_parallel_attn.topology.types import CPCollectiveMode, DtypeMode, KVDPCollectiveMode, QuantizationType

PARTITIONS = 128
X_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *X_DTYPES)
FP8_DTYPES = (torch.float8_e4m3fn, torch.uint8)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.uint32)
SKIP_UPDATE = torch.iinfo(torch.uint32).max
BOOLS = (
    "rmsnorm_X_enabled rmsnorm_QK_pre_rope_enabled rope_contiguous_layout rmsnorm_QK_post_rope_enabled update_cache "
    "transposed_out out_in_sb enable_fa_s_prior_tiling skip_attention is_h_transposed_by_4 is_qk_swapped"
)


def block_sizes(args: BlockArguments) -> BlockSizes:
    """The page's dimensions, from X, the caches and W_qkv; checks those tensors' shapes.

    Raises:
        ArgumentTypeError, ArgumentError: a tensor of another type, dtype or shape.
    """
    for name in ("transposed_in", "fp8_packed", "K_cache_transposed"):
        check_bool(name, getattr(args, name))
    check_one_of("lnc", args.lnc, (1, 2))
    check_one_of("target", args.target, ("trn2", "trn3"))
    if not isinstance(args.quantization_type_qkv, QuantizationType):
        raise ArgumentTypeError("quantization_type_qkv", repr(args.quantization_type_qkv), "a QuantizationType")
    if not isinstance(args.X, Tensor) or args.X.dtype not in X_DTYPES:
        got = args.X.dtype if isinstance(args.X, Tensor) else type(args.X).__name__
        raise ArgumentTypeError("X", got, "a tensor of " + " or ".join(map(str, X_DTYPES)))
    _check_devices(args)
    batch_attn, kv_heads, head_dim, block_len = _cache_sizes(args)
    batch = batch_attn * args.KVDP
    if args.transposed_in:
        shape = check_tensor("X", args.X, "128, lnc, H/lnc/128, B*S_tkg", X_DTYPES, lnc=args.lnc)
        hidden, all_tokens = PARTITIONS * shape[1] * shape[2], shape[3]
        if all_tokens > PARTITIONS:
            raise ArgumentError("X", f"{all_tokens} tokens", f"at most {PARTITIONS} with transposed_in")
        check_multiple("X: B*S_tkg", all_tokens, "B", batch)
        tokens = all_tokens // batch
    else:
        _, tokens, hidden = check_tensor("X", args.X, "B, S_tkg, H", X_DTYPES, B=batch)
    check_multiple("X: H", hidden, "the partitions", PARTITIONS)
    if head_dim % 2:
        raise ArgumentError("K_cache", f"d_head {head_dim}", "an even d_head")
    columns = check_weight_shape(
        "W_qkv", args.W_qkv, args.quantization_type_qkv, hidden, "H", "d_head*(q_heads + 2*kv_heads)"
    )
    q_heads = columns // head_dim - 2 * kv_heads
    if columns % head_dim or q_heads < 1:
        raise ArgumentError(
            "W_qkv",
            f"{columns} columns",
            f"d_head*(q_heads + 2*kv_heads) with d_head={head_dim}, kv_heads={kv_heads} and at least one Q head",
        )
    sizes = BlockSizes(
        batch=batch,
        tokens=tokens,
        hidden=hidden,
        head_dim=head_dim,
        q_heads=q_heads,
        kv_heads=kv_heads,
        kvdp=args.KVDP,
        cp=args.CP,
        block_len=block_len,
    )
    if sizes.q_heads_attn % kv_heads:
        raise ArgumentError("K_cache", f"{kv_heads} KV heads", f"a divisor of q_heads_attn={sizes.q_heads_attn}")
    return sizes


def check_arguments(args: BlockArguments, sizes: BlockSizes, kvdp_rank: int) -> None:
    """Raise on the first argument of this rank that is wrong."""
    _check_flags(args)
    _check_projections(args, sizes)
    _check_norms_and_rope(args, sizes)
    _check_fp8(args)
    _check_groups(args, kvdp_rank)
    _check_visibility(args, sizes)
    _check_update(args, sizes)


def shared_fields(args: BlockArguments, sizes: BlockSizes) -> dict[str, object]:
    """What must be equal on all ranks that share KV, by argument name."""
    names = (
        "X_hidden_dim_actual rmsnorm_X_enabled rmsnorm_X_eps quantization_type_qkv rmsnorm_QK_pre_rope_enabled "
        "rmsnorm_QK_pre_rope_eps rope_contiguous_layout rmsnorm_QK_post_rope_enabled rmsnorm_QK_post_rope_eps "
        "update_cache quantization_type_out transposed_out out_in_sb transposed_in softmax_scale skip_attention "
        "is_h_transposed_by_4 KVDP KVDP_collective_mode dtype_mode CP CP_collective_mode is_qk_swapped lnc target"
    )
    values: dict[str, object] = {name: getattr(args, name) for name in names.split()}
    values["X"] = (list(args.X.shape), args.X.dtype)
    values["W_qkv"] = (list(args.W_qkv.shape), args.W_qkv.dtype)
    values["K_cache"] = (sizes.batch_attn, sizes.kv_heads, sizes.head_dim, sizes.block_len is None, args.K_cache.dtype)
    for name in ("k_scale", "v_scale"):
        scale: Tensor | None = getattr(args, name)
        values[name] = None if scale is None else float(scale.flatten()[0])
    # One rank without them would be merged with those that have them.
    gammas = [f"rmsnorm_QK_{stage}_rope_W_{which}" for stage in ("pre", "post") for which in "QK"]
    for name in ("rmsnorm_X_gamma", "bias_qkv", *gammas, "sink", "W_out", "pos_ids", "swa_start_pos_ids"):
        values[name] = "missing" if getattr(args, name) is None else "given"
    values["cos"] = None if args.cos is None else list(args.cos.shape)
    if args.sink is not None:
        values["sink"] = args.sink.flatten().tolist()
    return values


def _cache_sizes(args: BlockArguments) -> tuple[int, int, int, int | None]:
    """B_attn, kv_heads, d_head, block_len; K and V against each other."""
    dtypes = (args.X.dtype, *FP8_DTYPES)
    if args.active_blocks_table is None:
        if args.fp8_packed:
            raise ArgumentError("fp8_packed", True, "False for a flat cache", "block KV needs active_blocks_table")
        order = "B_attn, kv_heads, " + ("d_head, S_max_ctx" if args.K_cache_transposed else "S_max_ctx, d_head")
        shape = check_tensor("K_cache", args.K_cache, order, dtypes)
        dim, slots = (shape[2], shape[3]) if args.K_cache_transposed else (shape[3], shape[2])
        sizes = {"B_attn": shape[0], "kv_heads": shape[1], "S_max_ctx": slots, "d_head": dim}
        check_tensor("V_cache", args.V_cache, "B_attn, kv_heads, S_max_ctx, d_head", dtypes, **sizes)
        return shape[0], shape[1], dim, None
    if args.K_cache_transposed:
        raise ArgumentError("K_cache_transposed", True, "False for block KV")
    check_tensor(
        "V_cache",
        args.V_cache,
        "num_blocks, block_len, d_head" if _dims(args.V_cache) == 3 else "num_blocks, kv_heads, block_len, d_head",
        dtypes,
    )
    shape = tuple(args.V_cache.shape)
    num_blocks, block_len, dim = shape[0], shape[-2], shape[-1]
    kv_heads = shape[1] if len(shape) == 4 else 1
    sizes = {"num_blocks": num_blocks, "kv_heads": kv_heads, "block_len": block_len, "d_head": dim}
    heads = "kv_heads, " if len(shape) == 4 else ""
    if args.fp8_packed:
        check_multiple("V_cache: block_len", block_len, "the 2 positions of a packed pair", 2)
        order = f"num_blocks, {heads}block_len // 2, d_head, 2"
        sizes["block_len // 2"] = block_len // 2
    else:
        order = f"num_blocks, {heads}block_len, d_head"
    check_tensor("K_cache", args.K_cache, order, FP8_DTYPES if args.fp8_packed else dtypes, **sizes)
    for name in ("K_cache", "V_cache"):
        if not getattr(args, name).is_contiguous():
            raise ArgumentError(name, f"strides {getattr(args, name).stride()}", "a contiguous block cache")
    order = "B_attn, max_blocks" if kv_heads == 1 else "B_attn, kv_heads, max_blocks"
    batch = check_tensor("active_blocks_table", args.active_blocks_table, order, INTEGERS[:2], kv_heads=kv_heads)[0]
    check_block_table(args.active_blocks_table, num_blocks, kv_heads, "active_blocks_table")
    return batch, kv_heads, dim, block_len


def _dims(tensor: object) -> int:
    return tensor.ndim if isinstance(tensor, Tensor) else 0


def _check_flags(args: BlockArguments) -> None:
    for name in BOOLS.split():
        check_bool(name, getattr(args, name))
    kinds: dict[str, type] = {
        "quantization_type_out": QuantizationType,
        "dtype_mode": DtypeMode,
        "KVDP_collective_mode": KVDPCollectiveMode,
        "CP_collective_mode": CPCollectiveMode,
    }
    for name, kind in kinds.items():
        value = getattr(args, name)
        if not isinstance(value, kind) and not (value is None and name.endswith("collective_mode")):
            raise ArgumentTypeError(name, repr(value), f"a {kind.__name__}")
    if args.dtype_mode is DtypeMode.OCP and args.target != "trn3":
        raise ArgumentError("dtype_mode", "OCP", "NON_OCP or AUTO on trn2", "float8_e4m3fn exists on trn3 only")
    if args.softmax_scale is not None:
        check_finite("softmax_scale", args.softmax_scale)


def _check_devices(args: BlockArguments) -> None:
    tensors = {name: value for name, value in vars(args).items() if isinstance(value, Tensor) and name != "X"}
    check_device(args.X, "X", **tensors)


def _check_projections(args: BlockArguments, sizes: BlockSizes) -> None:
    if args.X_hidden_dim_actual is not None:
        check_int("X_hidden_dim_actual", args.X_hidden_dim_actual, minimum=1)
        if args.X_hidden_dim_actual > sizes.hidden:
            raise ArgumentError("X_hidden_dim_actual", args.X_hidden_dim_actual, f"at most H={sizes.hidden}")
    if args.is_h_transposed_by_4:
        check_multiple("X: H", sizes.hidden, "512 with is_h_transposed_by_4", 512)
    _check_optional(args, "rmsnorm_X_gamma", "1, H", SCALE_DTYPES, H=sizes.hidden)
    if args.rmsnorm_X_gamma is not None and not args.rmsnorm_X_enabled:
        raise ArgumentError("rmsnorm_X_gamma", "a tensor", "None with rmsnorm_X_enabled=False")
    if args.rmsnorm_X_eps is not None:
        _check_eps("rmsnorm_X_eps", args.rmsnorm_X_eps)
    check_qkv_quantization(args, sizes.hidden)
    columns = args.W_qkv.shape[1]
    _check_optional(
        args, "bias_qkv", "1, d_head*(q_heads + 2*kv_heads)", SCALE_DTYPES, **{"d_head*(q_heads + 2*kv_heads)": columns}
    )
    if args.W_out is None:
        for name in ("bias_out", "weight_dequant_scale_out", "input_dequant_scale_out"):
            if getattr(args, name) is not None:
                raise ArgumentError(name, "a tensor", "None without W_out")
        if args.transposed_out:
            raise ArgumentError("transposed_out", True, "False without W_out")
        if args.quantization_type_out is not QuantizationType.NONE:
            raise ArgumentError("quantization_type_out", args.quantization_type_out, "NONE without W_out")
        return
    rows = sizes.q_heads * sizes.head_dim
    hidden = check_weight_shape("W_out", args.W_out, args.quantization_type_out, rows, "q_heads*d_head", "H")
    check_out_quantization(args, rows, hidden)
    _check_optional(args, "bias_out", "1, H", SCALE_DTYPES, H=hidden)
    if args.transposed_out:
        check_multiple("W_out: H", hidden, "128*lnc", PARTITIONS * args.lnc)
    elif args.out_in_sb:
        check_multiple("W_out: H", hidden, "lnc", args.lnc)


def _check_norms_and_rope(args: BlockArguments, sizes: BlockSizes) -> None:
    for stage in ("pre", "post"):
        prefix = f"rmsnorm_QK_{stage}_rope"
        enabled = getattr(args, f"{prefix}_enabled")
        if enabled:
            _check_eps(f"{prefix}_eps", getattr(args, f"{prefix}_eps"))
        for name in (f"{prefix}_W_Q", f"{prefix}_W_K"):
            _check_optional(args, name, "1, d_head", SCALE_DTYPES, d_head=sizes.head_dim)
            if getattr(args, name) is not None and not enabled:
                raise ArgumentError(name, "a tensor", f"None with {prefix}_enabled=False")
    if (args.cos is None) != (args.sin is None):
        missing, given = ("cos", "sin") if args.cos is None else ("sin", "cos")
        raise ArgumentError(missing, None, f"a tensor, for {given} is given")
    if args.cos is None or args.sin is None:
        return
    order = {"B": sizes.batch, "S_tkg": sizes.tokens}
    pairs = check_tensor("cos", args.cos, "rotary_dim/2, B, S_tkg", SCALE_DTYPES, **order)[0]
    check_tensor("sin", args.sin, "rotary_dim/2, B, S_tkg", SCALE_DTYPES, **order, **{"rotary_dim/2": pairs})
    if 2 * pairs > sizes.head_dim:
        raise ArgumentError("cos", f"{pairs} pairs of channels", f"at most d_head/2={sizes.head_dim // 2}")


def _check_fp8(args: BlockArguments) -> None:
    fp8 = args.K_cache.dtype in FP8_DTYPES
    if (args.V_cache.dtype in FP8_DTYPES) != fp8:
        raise ArgumentTypeError("V_cache", args.V_cache.dtype, f"float8 like K_cache, or both {args.X.dtype}")
    for name in ("k_scale", "v_scale"):
        scale = getattr(args, name)
        if (scale is not None) != fp8:
            expected = "a [128, 1] or [1, 1] tensor for a float8 cache" if fp8 else "None: the cache is not float8"
            raise ArgumentError(name, "None" if scale is None else "a tensor", expected)
        if scale is None:
            continue
        if _dims(scale) == 2 and scale.shape[0] == 1:
            check_tensor(name, scale, "1, 1", SCALE_DTYPES)
        else:
            check_tensor(name, scale, "128, 1", SCALE_DTYPES)
        check_repeated_scalar(name, scale)
        if float(scale.flatten()[0]) <= 0:
            raise ArgumentError(name, float(scale.flatten()[0]), "a positive scale")


def _check_groups(args: BlockArguments, kvdp_rank: int) -> None:
    if args.KVDP_rank is None:
        if args.KVDP > 1:
            raise ArgumentError("KVDP_rank", None, f"a [1] uint32 tensor with KVDP={args.KVDP}")
        return
    check_tensor("KVDP_rank", args.KVDP_rank, "1", INTEGERS)
    if int(args.KVDP_rank) != kvdp_rank:
        raise ArgumentError("KVDP_rank", int(args.KVDP_rank), f"{kvdp_rank}, this rank's place in its KVDP list")


def _check_visibility(args: BlockArguments, sizes: BlockSizes) -> None:
    """Mask, positions and context against the cache."""
    _check_optional(args, "sink", "q_heads_attn, 1", SCALE_DTYPES, q_heads_attn=sizes.q_heads_attn)
    if args.active_blocks_table is None:
        slots = args.V_cache.shape[2]
    else:
        assert sizes.block_len is not None
        slots = args.active_blocks_table.shape[-1] * sizes.block_len
    needs_s_ctx = args.pos_ids is not None and sizes.block_len is None
    if (args.S_ctx is not None) != needs_s_ctx:
        expected = "the local context length" if needs_s_ctx else "None: it goes with pos_ids over a flat cache"
        raise ArgumentError("S_ctx", args.S_ctx, expected)
    if args.S_ctx is not None:
        check_int("S_ctx", args.S_ctx, minimum=1)
        if args.S_ctx > slots:
            raise ArgumentError("S_ctx", args.S_ctx, f"at most S_max_ctx={slots}")
        slots = args.S_ctx
    order = {"B_attn": sizes.batch_attn, "S_tkg": sizes.tokens, "q_heads_attn": sizes.q_heads_attn}
    if args.pos_ids is None:
        for name in ("swa_start_pos_ids", "max_context_len"):
            if getattr(args, name) is not None:
                raise ArgumentError(name, "a tensor", "None without pos_ids")
    else:
        _check_positions(args, sizes, slots)
    if args.attention_mask is None:
        if not args.skip_attention:
            raise ArgumentError("attention_mask", None, "a tensor", "sequence-packed attention is not supported")
        return
    if args.pos_ids is not None:
        check_tensor("attention_mask", args.attention_mask, "S_tkg, B_attn, q_heads_attn, S_tkg", MASK_DTYPES, **order)
    else:
        swapped = args.is_qk_swapped
        layout = "B_attn, q_heads_attn, S_tkg, S_ctx" if swapped else "S_ctx, B_attn, q_heads_attn, S_tkg"
        shape = check_tensor("attention_mask", args.attention_mask, layout, MASK_DTYPES, **order)
        keys = shape[-1 if swapped else 0]
        if not sizes.tokens <= keys <= max(slots, sizes.tokens):
            what = "S_max_ctx" if sizes.block_len is None else "max_blocks*block_len"
            raise ArgumentError("attention_mask", f"S_ctx={keys}", f"between S_tkg={sizes.tokens} and {what}={slots}")
    mask = args.attention_mask
    if mask.dtype != torch.bool:
        low, high = (float(value) for value in mask.aminmax())
        if not ({low, high} <= {0.0, 1.0}) or (mask.is_floating_point() and bool(((mask != 0) & (mask != 1)).any())):
            raise ArgumentError("attention_mask", f"values from {low} to {high}", "0 (hidden) and 1 (visible)")


def _check_positions(args: BlockArguments, sizes: BlockSizes, slots: int) -> None:
    order = {"B_attn": sizes.batch_attn, "S_tkg": sizes.tokens}
    for name in ("pos_ids", "swa_start_pos_ids"):
        value: Tensor | None = getattr(args, name)
        if value is None:
            continue
        check_tensor(name, value, "B_attn, S_tkg", INTEGERS, **order)
        low = int(value.to(torch.int64).min())
        if low < 0:
            raise ArgumentError(name, low, "at least 0")
    assert args.pos_ids is not None
    longest = int(args.pos_ids[:, 0].to(torch.int64).max())
    if longest > slots:
        what = "S_ctx" if sizes.block_len is None else "max_blocks*block_len"
        raise ArgumentError("pos_ids", longest, f"at most {what}={slots}, the slots that there are")
    if args.max_context_len is None:
        return
    if sizes.block_len is None:
        raise ArgumentError("max_context_len", "a tensor", "None for a flat cache")
    check_tensor("max_context_len", args.max_context_len, "1", INTEGERS)
    if int(args.max_context_len) < longest:
        raise ArgumentError("max_context_len", int(args.max_context_len), f"at least {longest}, the longest prior")


def _check_update(args: BlockArguments, sizes: BlockSizes) -> None:
    index = args.kv_cache_update_idx
    if args.update_cache:
        check_apart("K_cache", args.K_cache, V_cache=args.V_cache)
        check_apart("V_cache", args.V_cache)
    if index is None:
        if args.update_cache:
            raise ArgumentError("kv_cache_update_idx", None, "a tensor with update_cache=True")
        return
    order = {"B_attn": sizes.batch_attn, "S_tkg": sizes.tokens, "kv_heads": sizes.kv_heads}
    if sizes.block_len is None:
        shape = "B_attn, 1"
    else:
        shape = "B_attn, S_tkg" if sizes.kv_heads == 1 else "B_attn, kv_heads, S_tkg"
    check_tensor("kv_cache_update_idx", index, shape, (torch.uint32, torch.int64), **order)
    slots = index.to(torch.int64)
    slots = torch.where(slots == SKIP_UPDATE, -1, slots)
    if bool((index.to(torch.int64) < 0).any()):
        raise ArgumentError("kv_cache_update_idx", int(slots.min()), f"a slot, or {SKIP_UPDATE} to skip")
    if sizes.block_len is None:
        check_slots(slots, args.V_cache.shape[2] - sizes.tokens + 1, distinct=False, argument="kv_cache_update_idx")
    else:
        limit = args.V_cache.shape[0] * sizes.kv_heads * sizes.block_len
        check_slots(slots, limit, argument="kv_cache_update_idx")


def _check_eps(name: str, eps: object) -> None:
    if check_finite(name, eps) < 0:
        raise ArgumentError(name, eps, "at least 0")


def _check_optional(args: BlockArguments, name: str, shape: str, dtypes: tuple[torch.dtype, ...], **sizes: int) -> None:
    if getattr(args, name) is not None:
        check_tensor(name, getattr(args, name), shape, dtypes, **sizes)
