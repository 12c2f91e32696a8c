"""Each constraint of the page violated once: one clear error on every rank, before any data moves."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nki_parallel_attn import (
    CPCollectiveMode,
    DtypeMode,
    KVDPCollectiveMode,
    QuantizationType,
    ReplicaGroup,
    attention_block_tkg,
)
from nki_parallel_attn.errors import (
    ArgumentError,
    ArgumentTypeError,
    PeerError,
    RankMismatchError,
    UnsupportedFeatureError,
)
from tests.patience import SOON
from tests.tkg.case import Case

BAD = 2  # the rank with the bad argument
RANKS = {"kvdp": 2, "cp": 2, "batch": 4, "tokens": 2, "kv_heads": 2, "dtype": torch.float32, "seed": 1}
FLAT = Case(**RANKS, out="bias", rope="contiguous", pre="gamma", post="gamma", rmsnorm_x="gamma", sink=True)
BLOCK = Case(**RANKS, cache="block4", window=9, max_context_len=True)
FULL = Case(**RANKS, mask="full")
SWAPPED = Case(**RANKS, cache="block4", mask="swapped")
FP8 = Case(**RANKS, cache="packed4", fp8="fp8")
TRANSPOSED = Case(**RANKS, transposed_in=True, cache="flat_t")
BY_4 = Case(**RANKS, by_4=True, hidden=512)

STATIC = Case(**RANKS, qkv_type="STATIC", out_type="ROW", out="plain", head_dim=6)
MX = Case(**{**RANKS, "dtype": torch.bfloat16}, qkv_type="MX", out_type="MX", out="plain", by_4=True, hidden=512)
STATIC_MX = Case(**RANKS, qkv_type="STATIC_MX", out_type="ROW_MX", out="plain", by_4=True, hidden=512)


def edit(name: str, value: Any, *index: int) -> Any:
    """One element of a tensor."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        dtype = arguments[name].dtype
        tensor = arguments[name].to(torch.int64) if dtype == torch.uint32 else arguments[name].clone()
        tensor[index] = value
        return {name: tensor.to(dtype)}

    return change


def cut(name: str, dim: int) -> Any:
    return lambda arguments: {name: arguments[name].narrow(dim, 0, arguments[name].shape[dim] - 1)}


def cast(name: str, dtype: torch.dtype) -> Any:
    return lambda arguments: {name: arguments[name].to(dtype)}


def whole(name: str, value: float) -> Any:
    return lambda arguments: {name: torch.full(arguments[name].shape, value).to(arguments[name].dtype)}


def same_slot(arguments: dict[str, Any]) -> dict[str, Any]:
    index = arguments["kv_cache_update_idx"].to(torch.int64)
    index[:] = 5
    return {"kv_cache_update_idx": index}


ONE = torch.ones(1, 1)
FLOAT8 = torch.float8_e4m3fn

# name: case, what to change on one rank, the argument that the error must name
BAD_ARGUMENTS: dict[str, tuple[Case, Any, str]] = {
    "X type": (FLAT, {"X": None}, "X"),
    "X dtype": (FLAT, {"X": torch.zeros(4, 2, 128, dtype=torch.int32)}, "X"),
    "X dims": (FLAT, lambda a: {"X": a["X"].flatten(0, 1)}, "X"),
    "X batch": (FLAT, cut("X", 0), "X"),
    "X hidden not 128": (FLAT, lambda a: {"X": a["X"][..., :100], "W_qkv": a["W_qkv"][:100]}, "X: H"),
    "X_hidden_dim_actual": (FLAT, {"X_hidden_dim_actual": 129}, "X_hidden_dim_actual"),
    "rmsnorm eps": (FLAT, {"rmsnorm_X_eps": -1.0}, "rmsnorm_X_eps"),
    "gamma shape": (FLAT, {"rmsnorm_X_gamma": torch.ones(128)}, "rmsnorm_X_gamma"),
    "gamma without norm": (FLAT, {"rmsnorm_X_enabled": False}, "rmsnorm_X_gamma"),
    "flag": (FLAT, {"rmsnorm_X_enabled": 1}, "rmsnorm_X_enabled"),
    "W_qkv rows": (FLAT, cut("W_qkv", 0), "W_qkv"),
    "W_qkv columns": (FLAT, cut("W_qkv", 1), "W_qkv"),
    "W_qkv without Q": (FLAT, lambda a: {"W_qkv": a["W_qkv"][:, -64:]}, "W_qkv"),
    "W_qkv dtype": (FLAT, cast("W_qkv", torch.bfloat16), "W_qkv"),
    "bias_qkv": (FLAT, {"bias_qkv": torch.ones(1, 3)}, "bias_qkv"),
    "quantization type": (FLAT, {"quantization_type_qkv": "NONE"}, "quantization_type_qkv"),
    "scale without quantization": (FLAT, {"weight_dequant_scale_qkv": ONE}, "weight_dequant_scale_qkv"),
    "input scale without quantization": (FLAT, {"input_dequant_scale_out": ONE}, "input_dequant_scale_out"),
    "head norm gamma": (FLAT, cut("rmsnorm_QK_pre_rope_W_Q", 1), "rmsnorm_QK_pre_rope_W_Q"),
    "head norm gamma unused": (FLAT, {"rmsnorm_QK_post_rope_enabled": False}, "rmsnorm_QK_post_rope_W_Q"),
    "head norm eps": (FLAT, {"rmsnorm_QK_pre_rope_eps": float("nan")}, "rmsnorm_QK_pre_rope_eps"),
    "cos alone": (FLAT, {"sin": None}, "sin"),
    "cos shape": (FLAT, cut("cos", 1), "cos"),
    "sin shape": (FLAT, cut("sin", 0), "sin"),
    "cos too wide": (FLAT, {"cos": torch.ones(9, 4, 2), "sin": torch.ones(9, 4, 2)}, "cos"),
    "K_cache dims": (FLAT, lambda a: {"K_cache": a["K_cache"][0]}, "K_cache"),
    "K_cache dtype": (FLAT, cast("K_cache", torch.bfloat16), "K_cache"),
    "V_cache shape": (FLAT, cut("V_cache", 2), "V_cache"),
    "K_cache expanded": (FLAT, lambda a: {"K_cache": a["K_cache"][:1].expand(2, -1, -1, -1)}, "K_cache"),
    "V_cache in K_cache": (FLAT, lambda a: {"V_cache": a["K_cache"]}, "K_cache"),
    "V_cache beside K_cache, overlapping": (
        FLAT,
        lambda a: dict(zip(("K_cache", "V_cache"), two_of(torch.zeros(2, 2, 48 + 47, 16)), strict=True)),
        "K_cache",
    ),
    "odd d_head": (
        Case(**RANKS, head_dim=16),
        lambda a: {n: a[n][..., :15] for n in ("K_cache", "V_cache")},
        "K_cache",
    ),
    "kv_heads": (
        Case(**{**RANKS, "kv_heads": 1}, head_dim=4),
        lambda a: {
            **{n: a[n].repeat(1, 3, 1, 1) for n in ("K_cache", "V_cache")},
            "W_qkv": torch.zeros(128, 32),
        },
        "K_cache",
    ),
    "transposed block cache": (BLOCK, {"K_cache_transposed": True}, "K_cache_transposed"),
    "block cache strides": (
        BLOCK,
        lambda a: {"V_cache": a["V_cache"].transpose(0, 1).contiguous().transpose(0, 1)},
        "V_cache",
    ),
    "table shape": (BLOCK, lambda a: {"active_blocks_table": a["active_blocks_table"][:, 0]}, "active_blocks_table"),
    "table dtype": (BLOCK, cast("active_blocks_table", torch.float32), "active_blocks_table"),
    "table entry too large": (BLOCK, edit("active_blocks_table", 10**6, 0, 1, 2), "active_blocks_table[0, 1, 2]"),
    "table entry below -1": (BLOCK, edit("active_blocks_table", -2, 1, 0, 0), "active_blocks_table[1, 0, 0]"),
    "table too short": (BLOCK, lambda a: {"active_blocks_table": a["active_blocks_table"][..., :1]}, "pos_ids"),
    "mask missing": (FLAT, {"attention_mask": None}, "attention_mask"),
    "mask shape": (FLAT, cut("attention_mask", 2), "attention_mask"),
    "mask values": (FLAT, edit("attention_mask", 2, 0, 0, 0, 0), "attention_mask"),
    "mask dtype": (FLAT, lambda a: {"attention_mask": a["attention_mask"].float().to(FLOAT8)}, "attention_mask"),
    "additive mask": (FULL, lambda a: {"attention_mask": (a["attention_mask"] - 1.0) * 9}, "attention_mask"),
    "full mask in the other layout": (FULL, {"is_qk_swapped": True}, "attention_mask"),
    "swapped mask too long": (
        SWAPPED,
        lambda a: {"attention_mask": a["attention_mask"].repeat(1, 1, 1, 3)},
        "attention_mask",
    ),
    "sink shape": (FLAT, cut("sink", 0), "sink"),
    "no update index": (FLAT, {"kv_cache_update_idx": None}, "kv_cache_update_idx"),
    "update index shape": (BLOCK, lambda a: {"kv_cache_update_idx": a["kv_cache_update_idx"][:, 0]}, "kv_cache_up"),
    "update index dtype": (FLAT, cast("kv_cache_update_idx", torch.int32), "kv_cache_update_idx"),
    "update beyond a flat cache": (FLAT, edit("kv_cache_update_idx", 47, 0, 0), "kv_cache_update_idx[0, 0]"),
    "update beyond a block cache": (BLOCK, edit("kv_cache_update_idx", 10**6, 0, 1, 1), "kv_cache_update_idx[0, 1, 1]"),
    "two tokens in one slot": (BLOCK, same_slot, "kv_cache_update_idx"),
    "negative update": (
        FLAT,
        lambda a: {"kv_cache_update_idx": torch.full((2, 1), -1)},
        "kv_cache_update_idx",
    ),
    "W_out rows": (FLAT, cut("W_out", 0), "W_out"),
    "W_out dtype": (FLAT, cast("W_out", torch.float16), "W_out"),
    "bias_out": (FLAT, cut("bias_out", 1), "bias_out"),
    "bias without W_out": (FLAT, {"W_out": None}, "bias_out"),
    "transposed_out without W_out": (FULL, {"transposed_out": True}, "transposed_out"),
    "quantised without W_out": (FULL, {"quantization_type_out": QuantizationType.ROW}, "quantization_type_out"),
    "quantization type of W_out": (FLAT, {"quantization_type_out": None}, "quantization_type_out"),
    "STATIC without scale": (STATIC, {"weight_dequant_scale_qkv": None}, "weight_dequant_scale_qkv"),
    "STATIC without input scale": (STATIC, {"input_dequant_scale_qkv": None}, "input_dequant_scale_qkv"),
    "STATIC scale shape": (STATIC, cut("weight_dequant_scale_qkv", 1), "weight_dequant_scale_qkv"),
    "STATIC input scale 0": (STATIC, {"input_dequant_scale_qkv": 0 * ONE}, "input_dequant_scale_qkv"),
    "STATIC weight dtype": (STATIC, cast("W_qkv", torch.float32), "W_qkv"),
    "STATIC weight beyond 240": (STATIC, whole("W_qkv", 256.0), "W_qkv"),
    "STATIC weight packed": (STATIC_MX, {"quantization_type_qkv": QuantizationType.STATIC}, "W_qkv"),
    "ROW scale rows differ": (STATIC, edit("weight_dequant_scale_out", 9.0, 1, 2), "weight_dequant_scale_out"),
    "ROW with input scale": (STATIC, {"input_dequant_scale_out": ONE}, "input_dequant_scale_out"),
    "MX on trn2": (MX, {"target": "trn2"}, "quantization_type_qkv"),
    "MX without is_h_transposed_by_4": (MX, {"is_h_transposed_by_4": False}, "is_h_transposed_by_4"),
    "MX of float32": (MX, lambda a: {n: a[n].float() for n in ("X", "K_cache", "V_cache")}, "X"),
    "MX weight not packed": (MX, lambda a: {"W_qkv": a["W_qkv"][..., 0]}, "W_qkv"),
    "MX weight dtype": (MX, lambda a: {"W_out": a["W_out"].float()}, "W_out"),
    "MX weight lanes": (MX, lambda a: {"W_out": torch.zeros(8, 256, 3, dtype=FLOAT8)}, "W_out"),
    "MX scales dtype": (MX, cast("weight_dequant_scale_qkv", torch.float32), "weight_dequant_scale_qkv"),
    "MX scales shape": (MX, cut("weight_dequant_scale_out", 1), "weight_dequant_scale_out"),
    "STATIC_MX of float4": (
        STATIC_MX,
        lambda a: {"W_qkv": torch.zeros(*a["W_qkv"].shape[:2], 2, dtype=torch.uint8)},
        "W_qkv",
    ),
    "MX rows not whole blocks": (
        STATIC,
        {"quantization_type_out": QuantizationType.ROW_MX, "target": "trn3"},
        "W_out",
    ),
    "transposed_out of an odd H": (FLAT, lambda a: {"transposed_out": True, **halve_out(a)}, "W_out"),
    "transposed_in lnc": (TRANSPOSED, {"lnc": 2}, "X"),
    "transposed_in tokens": (TRANSPOSED, lambda a: {"X": a["X"].repeat(1, 1, 1, 17)}, "X"),
    "transposed_in ragged": (TRANSPOSED, cut("X", 3), "X: B*S_tkg"),
    "softmax_scale": (FLAT, {"softmax_scale": float("inf")}, "softmax_scale"),
    "packed without float8": (BLOCK, {"fp8_packed": True}, "K_cache"),
    "packed flat cache": (FLAT, {"fp8_packed": True}, "fp8_packed"),
    "packed shape": (FP8, lambda a: {"K_cache": a["K_cache"].transpose(2, 3).contiguous()}, "K_cache"),
    "one float8 cache": (FP8, cast("V_cache", torch.float32), "V_cache"),
    "float8 without k_scale": (FP8, {"k_scale": None}, "k_scale"),
    "float8 without v_scale": (FP8, {"v_scale": None}, "v_scale"),
    "scale without float8": (FLAT, {"k_scale": ONE}, "k_scale"),
    "k_scale shape": (FP8, {"k_scale": torch.ones(16, 1)}, "k_scale"),
    "k_scale not one value": (FP8, {"k_scale": torch.arange(1.0, 129)[:, None]}, "k_scale"),
    "v_scale zero": (FP8, {"v_scale": torch.zeros(1, 1)}, "v_scale"),
    "by_4 of an H below 512": (FLAT, {"is_h_transposed_by_4": True}, "X: H"),
    "OCP on trn2": (FP8, {"dtype_mode": DtypeMode.OCP}, "dtype_mode"),
    "dtype_mode": (FP8, {"dtype_mode": "OCP"}, "dtype_mode"),
    "pos_ids shape": (FLAT, cut("pos_ids", 1), "pos_ids"),
    "pos_ids dtype": (FLAT, cast("pos_ids", torch.float32), "pos_ids"),
    "pos_ids negative": (FLAT, edit("pos_ids", -1, 0, 0), "pos_ids"),
    "pos_ids beyond S_ctx": (FLAT, edit("pos_ids", 1000, 1, 0), "pos_ids"),
    "window without pos_ids": (FULL, {"swa_start_pos_ids": torch.zeros(2, 2, dtype=torch.int32)}, "swa_start_pos_ids"),
    "window negative": (BLOCK, edit("swa_start_pos_ids", -3, 0, 0), "swa_start_pos_ids"),
    "S_ctx missing": (FLAT, {"S_ctx": None}, "S_ctx"),
    "S_ctx beyond the cache": (FLAT, {"S_ctx": 1000}, "S_ctx"),
    "S_ctx for a block cache": (BLOCK, {"S_ctx": 16}, "S_ctx"),
    "S_ctx without pos_ids": (FULL, {"S_ctx": 16}, "S_ctx"),
    "max_context_len too short": (BLOCK, {"max_context_len": torch.zeros(1, dtype=torch.int32)}, "max_context_len"),
    "max_context_len of a flat cache": (FLAT, {"max_context_len": torch.ones(1).int()}, "max_context_len"),
    "max_context_len without pos_ids": (SWAPPED, {"max_context_len": torch.ones(1).int()}, "max_context_len"),
    "max_context_len shape": (BLOCK, {"max_context_len": torch.ones(1, 1).int()}, "max_context_len"),
    "KVDP": (FLAT, {"KVDP": 0}, "KVDP"),
    "KVDP degree": (FLAT, {"KVDP": 4}, "KVDP"),
    "KVDP group missing": (FLAT, {"KVDP_replica_group": None}, "KVDP_replica_group"),
    "KVDP group type": (FLAT, {"KVDP_replica_group": [[0, 1], [2, 3]]}, "KVDP_replica_group"),
    "KVDP group without this rank": (FLAT, {"KVDP_replica_group": ReplicaGroup([[0, 1]])}, "KVDP_replica_group"),
    "KVDP ranks out of order": (FLAT, {"KVDP_replica_group": ReplicaGroup([[1, 0], [3, 2]])}, "KVDP_replica_group"),
    "KVDP ranks beyond the world": (FLAT, {"KVDP_replica_group": ReplicaGroup([[0, 1], [2, 9]])}, "KVDP_replica_group"),
    "KVDP_group type": (FLAT, {"KVDP_group": "gloo"}, "KVDP_group"),
    "CP_group type": (FLAT, {"CP_group": 0}, "CP_group"),
    "KVDP rank missing": (FLAT, {"KVDP_rank": None}, "KVDP_rank"),
    "KVDP rank": (FLAT, lambda a: {"KVDP_rank": torch.tensor([1], dtype=torch.uint32)}, "KVDP_rank"),
    "KVDP mode": (FLAT, {"KVDP_collective_mode": CPCollectiveMode.ALL_TO_ALL}, "KVDP_collective_mode"),
    "CP degree": (FLAT, {"CP": 3}, "CP"),
    "CP group missing": (FLAT, {"CP_replica_group": None}, "CP_replica_group"),
    "CP group crosses badly": (FLAT, {"CP_replica_group": ReplicaGroup([[0, 1], [2, 3]])}, "CP_replica_group"),
    "CP mode": (FLAT, {"CP_collective_mode": KVDPCollectiveMode.ALL_TO_ALL}, "CP_collective_mode"),
    "device": (FLAT, lambda a: {"K_cache": a["K_cache"].to("meta")}, "K_cache"),
    "device of all": (FLAT, lambda a: {n: t.to("meta") for n, t in a.items() if isinstance(t, torch.Tensor)}, "X"),
    "device of a table": (
        BLOCK,
        lambda a: {"active_blocks_table": a["active_blocks_table"].to("meta")},
        "active_blocks_table",
    ),
    "lnc": (FLAT, {"lnc": 3}, "lnc"),
    "lnc type": (FLAT, {"lnc": torch.zeros(3)}, "lnc"),
    "target": (FLAT, {"target": "trn1"}, "target"),
    "backend": (FLAT, {"backend": "tpu"}, "backend"),
    "check_ranks": (FLAT, {"check_ranks": "sometimes"}, "check_ranks"),
}


def halve_out(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"W_out": arguments["W_out"][:, :100], "bias_out": None}


def two_of(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two caches of 48 slots that have one in common."""
    return slots[:, :, :48], slots[:, :, 47:]


def call(case: Case, rank: int, change: Any = None) -> Exception | None:
    """The error of one call, None when it succeeds; after an error the caches must be untouched."""
    arguments = case.arguments(rank)
    given = {name: arguments[name].clone() for name in ("K_cache", "V_cache")}
    if change is not None:
        arguments |= change(arguments) if callable(change) else change
    before = {n: arguments[n].clone() for n in given if isinstance(arguments[n], torch.Tensor)}
    try:
        attention_block_tkg(**arguments)
    except Exception as error:
        for name, cache in before.items():
            if cache.device.type == "cpu":
                stored, was = (t.contiguous().view(torch.uint8) for t in (arguments[name], cache))
                assert torch.equal(stored, was), name
        return error
    return None


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.multirank(world_size=4, timeout=120)
def test_one_bad_rank(rank, half):
    """Each bad argument raises itself on the bad rank, and a PeerError naming rank and argument on the others."""
    wrong = []
    for name, (case, change, argument) in list(BAD_ARGUMENTS.items())[half::2]:
        start = time.monotonic()
        error = call(case, rank, change if rank == BAD else None)
        if rank == BAD:
            right = isinstance(error, ArgumentError) and str(error).startswith(argument)
        else:
            right = isinstance(error, PeerError) and f"rank {BAD}" in str(error) and argument in str(error)
        if not right or time.monotonic() - start > SOON:
            wrong.append((name, error))
    assert not wrong
    # The group still works.
    for case in (FLAT, BLOCK, FULL, SWAPPED, FP8, TRANSPOSED, BY_4, STATIC, MX, STATIC_MX):
        assert call(case, rank) is None


DIFFERENT: dict[str, tuple[Case, Any, str]] = {
    "softmax_scale": (FLAT, {"softmax_scale": 0.5}, "softmax_scale: "),
    "mode": (FLAT, {"KVDP_collective_mode": KVDPCollectiveMode.ALL_TO_ALL}, "KVDP_collective_mode: "),
    "sink": (FLAT, edit("sink", 9.0, 0, 0), "sink: "),
    "norm": (FLAT, {"rmsnorm_QK_post_rope_eps": 0.1}, "rmsnorm_QK_post_rope_eps: "),
    "cache": (FLAT, lambda a: FP8.arguments(BAD), "K_cache: "),
    "k_scale": (FP8, {"k_scale": ONE}, "k_scale: "),
    "rope": (FLAT, {"cos": None, "sin": None}, "cos: "),
    "partial rope": (FLAT, lambda a: {"cos": a["cos"][:4], "sin": a["sin"][:4]}, "cos: "),
    "gamma": (FLAT, {"rmsnorm_X_gamma": None}, "rmsnorm_X_gamma: "),
    "head gamma": (FLAT, {"rmsnorm_QK_pre_rope_W_K": None}, "rmsnorm_QK_pre_rope_W_K: "),
    "bias": (FLAT, lambda a: {"bias_qkv": torch.ones(1, a["W_qkv"].shape[1])}, "bias_qkv: "),
    "skip": (FULL, {"skip_attention": True}, "skip_attention: "),
    "update": (FULL, {"update_cache": False}, "update_cache: "),
}


@pytest.mark.multirank(world_size=4)
def test_ranks_that_disagree(rank):
    for name, (case, change, field) in DIFFERENT.items():
        error = call(case, rank, change if rank == BAD else None)
        assert isinstance(error, RankMismatchError), (name, error)
        assert field in str(error) and f"rank {BAD}" in str(error), (name, error)
    assert call(FLAT, rank) is None


@pytest.mark.multirank(world_size=4)
def test_what_is_not_there_yet(rank):
    """Sequence packing, and the backends without a kernel, say so on every rank."""
    packed = [name for name in attention_block_tkg.__annotations__ if name.startswith("seq_packed_")]
    assert len(packed) == 6
    for name in packed:
        error = call(FLAT, rank, {name: torch.zeros(1)} if rank == BAD else None)
        assert isinstance(error, UnsupportedFeatureError if rank == BAD else PeerError), error
        assert name in str(error)
    error = call(FLAT, rank, {"backend": "sim"})
    assert isinstance(error, UnsupportedFeatureError) and "no NKI kernel yet" in str(error)


@pytest.mark.multirank(world_size=2)
def test_given_groups_of_other_ranks(rank):
    single = dist.new_group([rank], use_local_synchronization=True)
    for name, case in (("CP_group", Case(cp=2)), ("KVDP_group", Case(kvdp=2))):
        error = call(case, rank, {name: single})
        assert isinstance(error, ArgumentError) and error.argument == name
        assert call(case, rank, {name: dist.group.WORLD}) is None


def test_groups_without_torch_distributed():
    error = call(Case(cp=2), 0)
    assert isinstance(error, ArgumentError) and "not initialised" in str(error)


def test_type_errors_are_type_errors():
    assert isinstance(call(Case(), 0, {"X": [1.0]}), ArgumentTypeError)
    assert isinstance(call(Case(), 0, {"K_cache": None}), TypeError)
