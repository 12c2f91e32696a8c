"""attention_kv_parallel_segmented_cte: prefill attention over a KV cache that is dealt over the ranks of a group.

The signature and shapes are the reference page's. This module checks the arguments, makes sure that all ranks go on or
none does, and hands over to a backend.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn.backends import Backend, backend_name, load_backend
from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError
from nki_parallel_attn.ops.rank_agreement import CheckRanks, agree, check_check_ranks
from nki_parallel_attn.ops.validation import (
    check_bool,
    check_device,
    check_finite,
    check_int,
    check_multiple,
    check_one_of,
    check_repeated_scalar,
    check_tensor,
)
from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology.block_tables import ABSENT, check_block_table
from nki_parallel_attn.topology.kv_layout import RoundRobin

MAX_HEAD_DIM = 128
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8 = torch.float8_e4m3fn
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def attention_kv_parallel_segmented_cte(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kvp_q_offset: Tensor,
    replica_groups: ReplicaGroup,
    group_size: int,
    block_size: int,
    seg_size: int,
    scale: float = 1.0,
    global_q_offset: int = 0,
    tp_out: bool = False,
    sliding_window: int = 0,
    kvp_rank_id: Tensor | None = None,
    kvp_group_size: int = 0,
    apc_mode: bool = False,
    valid_num_prior_tokens: Tensor | None = None,
    fp8_packed: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    backend: Backend = "auto",
    lnc: int = 1,
    target: str = "trn2",
    group: dist.ProcessGroup | None = None,
    check_ranks: CheckRanks | None = None,
) -> Tensor:
    """Causal attention of this rank's Q heads over a sequence whose KV cache is shared by a group of G ranks.

    Q is gathered over the group, each rank attends all heads to its own KV, and the partial outputs are exchanged and
    merged by log-sum-exp. A key is visible when its position is at or before the query's and, with a sliding window W,
    among the last W (the query's own included). A query that sees nothing at all gives 0. Differentiable in q, k_cache
    and v_cache (torch backend); all ranks of the group then call backward together.

    Args:
        q: [q_heads_per_rank, S, D] bfloat16, float16, float32 or float64; S a multiple of seg_size (pad it: padding
            writes no KV), D at most 128.
        k_cache: [num_blocks, num_kv_heads, block_size, D] of q's dtype or float8_e4m3fn, or with fp8_packed
            [num_blocks, num_kv_heads, block_size // 2, D, 2] float8_e4m3fn, whose last dim holds positions 2s and 2s+1.
            Head h of the gathered Q reads KV head h // (total_heads // num_kv_heads).
        v_cache: [num_blocks, num_kv_heads, block_size, D] of q's dtype or float8_e4m3fn.
        block_tables: [1, max_blocks] int32. Entry j is the physical block of local block j; -1 means absent. Longer
            than what is visible is fine, shorter is an error in round-robin mode.
        kvp_q_offset: [1, 1] int32. Contiguous: -rank_id * local_kv_len + global_q_offset, so that local slot j is
            visible to Q token t iff j <= kvp_q_offset + t. Round-robin: the position of Q token 0.
        replica_groups: one list of it holds this rank (ascending world ranks).
        group_size: G, the length of that list.
        block_size: tokens of a block.
        seg_size: tokens of a segment, a multiple of block_size. Never changes the result.
        scale: multiplies Q.K^T.
        global_q_offset: position of Q token 0 as a compile-time value; 0 in apc_mode.
        tp_out: return [q_heads_per_rank, D, S].
        sliding_window: W in tokens; 0 for none.
        kvp_rank_id: [1, 1] int32, this rank's index in its list; required in round-robin mode.
        kvp_group_size: R > 0 turns on round-robin mode, where rank r holds global blocks r, r+R, r+2R, ...; R == G.
        apc_mode: the prior length is known at run time only: valid_num_prior_tokens is required, round-robin only.
        valid_num_prior_tokens: [1, 1] int32, local tokens in blocks that lie wholly at or before Q token 0, whatever
            the window; a multiple of block_size.
        fp8_packed: k_cache has the packed layout.
        k_scale: [128, 1], K[..., d] = k_cache[..., d] * k_scale[d, 0]. Rounded to q's dtype afterwards.
        v_scale: [128, 1], one repeated value that multiplies v_cache. Rounded to q's dtype afterwards.
        backend: "auto" is "neuron" on a Neuron device, else "torch"; NKI_PARALLEL_ATTN_BACKEND overrides "auto".
        lnc: logical core size, 1 or 2; of no effect on torch.
        target: "trn2" or "trn3"; of no effect on torch.
        group: a torch process group of exactly this rank's list, instead of one made from replica_groups.
        check_ranks: "always" (default for CPU tensors) has the ranks of the group compare notes before the first
            collective, so that a bad argument on one raises on all; "first" (default elsewhere) does so once for each
            set of arguments; "never" leaves peers of a failing rank waiting for their timeout.

    Returns:
        [q_heads_per_rank, S, D], or [q_heads_per_rank, D, S] with tp_out, q's dtype. A query that sees a slot holding a
        NaN or an infinity gives NaN; slots that no query sees have no effect.

    Raises:
        ArgumentError, ArgumentTypeError: a bad argument on this rank.
        PeerError: a bad argument on another rank, or a rank that did not arrive in time.
        RankMismatchError: arguments that must be equal on all ranks are not.
        UnsupportedFeatureError, BackendUnavailableError: the backend cannot do this, or is not installed.

    Source: API reference page attention_kv_parallel_segmented_cte; docs/kv_parallel_prefill.md has what it leaves open.
    """
    call = _Arguments(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        kvp_q_offset=kvp_q_offset,
        replica_groups=replica_groups,
        group_size=group_size,
        block_size=block_size,
        seg_size=seg_size,
        scale=scale,
        global_q_offset=global_q_offset,
        tp_out=tp_out,
        sliding_window=sliding_window,
        kvp_rank_id=kvp_rank_id,
        kvp_group_size=kvp_group_size,
        apc_mode=apc_mode,
        valid_num_prior_tokens=valid_num_prior_tokens,
        fp8_packed=fp8_packed,
        k_scale=k_scale,
        v_scale=v_scale,
        lnc=lnc,
        target=target,
        group=group,
    )
    ranks: tuple[int, ...] | None = None
    shared: dict[str, object] = {}
    partly_known: dict[str, object] = {}
    error: Exception | None = None
    module: Any = None
    if check_ranks is None:
        check_ranks = "always" if not isinstance(q, Tensor) or q.device.type == "cpu" else "first"
    # Whatever is wrong here, the peers must hear of it.
    try:
        ranks = _ranks_of_list(replica_groups)
        check_check_ranks(check_ranks)
        call.check(ranks)
        name = backend_name(backend, q)
        module = load_backend(name)
        shared = {**call.shared(ranks), "backend": name, "check_ranks": check_ranks}
        partly_known = {"local_kv_len": call.local_kv_len(ranks.index(_rank()))}
    except Exception as problem:
        error = problem
    agree("attention_kv_parallel_segmented_cte", ranks, shared, error, check_ranks, partly_known)
    assert ranks is not None
    arguments = {field.name: getattr(call, field.name) for field in fields(call)}
    out: Tensor = module.attention_kv_parallel_segmented_cte(**arguments, ranks=ranks, index=ranks.index(_rank()))
    return out


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """The arguments of one call, as given."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    kvp_q_offset: Tensor
    replica_groups: ReplicaGroup
    group_size: int
    block_size: int
    seg_size: int
    scale: float
    global_q_offset: int
    tp_out: bool
    sliding_window: int
    kvp_rank_id: Tensor | None
    kvp_group_size: int
    apc_mode: bool
    valid_num_prior_tokens: Tensor | None
    fp8_packed: bool
    k_scale: Tensor | None
    v_scale: Tensor | None
    lnc: int
    target: str
    group: dist.ProcessGroup | None

    def check(self, ranks: tuple[int, ...]) -> None:
        """Raise on the first argument of this rank that is wrong."""
        index = ranks.index(_rank())
        self._check_group(ranks)
        self._check_scalars()
        self._check_tensors()
        self._check_positions(index, len(ranks))
        check_block_table(self.block_tables, self.k_cache.shape[0])

    def shared(self, ranks: tuple[int, ...]) -> dict[str, object]:
        """What must be equal on all ranks of the group, by argument name."""
        names = (
            "group_size block_size seg_size scale global_q_offset tp_out sliding_window "
            "kvp_group_size apc_mode fp8_packed lnc target"
        )
        values: dict[str, object] = {name: getattr(self, name) for name in names.split()}
        values["replica_groups"] = ranks
        values["q"] = (list(self.q.shape), self.q.dtype)
        for name in ("k_cache", "v_cache"):
            cache: Tensor = getattr(self, name)
            # Ranks may hold caches of different lengths.
            values[name] = (["num_blocks", *cache.shape[1:]], cache.dtype)
        for name in ("k_scale", "v_scale"):
            scale: Tensor | None = getattr(self, name)
            values[name] = None if scale is None else _fingerprint(scale)
        if self.kvp_group_size:
            values["kvp_q_offset"] = int(self.kvp_q_offset)
        # Backward has collectives: either all ranks record a graph or none.
        tensors = (self.q, self.k_cache, self.v_cache)
        values["requires_grad"] = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return values

    def local_kv_len(self, index: int) -> int | None:
        """Tokens of a contiguous shard as this rank's offset tells it; rank 0's does not."""
        return None if self.kvp_group_size or not index else (self.global_q_offset - int(self.kvp_q_offset)) // index

    def _check_group(self, ranks: tuple[int, ...]) -> None:
        check_int("group_size", self.group_size, minimum=1)
        if self.group_size != len(ranks):
            raise ArgumentError(
                "group_size", self.group_size, f"{len(ranks)}, the length of {list(ranks)}, this rank's list"
            )
        given = self.replica_groups.group_of(_rank())
        if given != ranks:
            raise ArgumentError("replica_groups", f"the list {list(given)}", "ranks in ascending order")
        if self.group is not None:
            if not isinstance(self.group, dist.ProcessGroup):
                raise ArgumentTypeError("group", type(self.group).__name__, "a torch process group with this rank")
            members = tuple(dist.get_process_group_ranks(self.group))
            if members != ranks:
                raise ArgumentError(
                    "group", f"ranks {list(members)}", f"{list(ranks)}, this rank's list in replica_groups"
                )
        elif len(ranks) > 1 and not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "replica_groups", f"ranks {list(ranks)}", "one rank", "torch.distributed is not initialised"
            )

    def _check_scalars(self) -> None:
        check_int("block_size", self.block_size, minimum=1)
        check_int("seg_size", self.seg_size, minimum=1)
        check_multiple("seg_size", self.seg_size, "block_size", self.block_size)
        check_finite("scale", self.scale)
        check_int("global_q_offset", self.global_q_offset, minimum=0)
        check_int("sliding_window", self.sliding_window, minimum=0)
        check_int("kvp_group_size", self.kvp_group_size, minimum=0)
        for name in ("tp_out", "apc_mode", "fp8_packed"):
            check_bool(name, getattr(self, name))
        check_one_of("lnc", self.lnc, (1, 2))
        check_one_of("target", self.target, ("trn2", "trn3"))

    def _check_tensors(self) -> None:
        heads, rows, dim = check_tensor("q", self.q, "q_heads_per_rank, S, D", Q_DTYPES)
        if dim > MAX_HEAD_DIM:
            raise ArgumentError("q", f"head_dim {dim}", f"at most {MAX_HEAD_DIM}")
        check_multiple("q: S", rows, "seg_size", self.seg_size)
        cache = "num_blocks, num_kv_heads, block_size, D"
        dtypes = (self.q.dtype, FP8)
        if self.fp8_packed:
            check_multiple("block_size", self.block_size, "the 2 positions of a packed pair", 2)
            packed = "num_blocks, num_kv_heads, block_size // 2, D, 2"
            sizes = {"block_size // 2": self.block_size // 2, "D": dim}
            k_shape = check_tensor("k_cache", self.k_cache, packed, (FP8,), **sizes)
        else:
            k_shape = check_tensor("k_cache", self.k_cache, cache, dtypes, block_size=self.block_size, D=dim)
        num_blocks, kv_heads = k_shape[:2]
        check_tensor(
            "v_cache",
            self.v_cache,
            cache,
            dtypes,
            num_blocks=num_blocks,
            num_kv_heads=kv_heads,
            block_size=self.block_size,
            D=dim,
        )
        if heads * self.group_size % kv_heads:
            raise ArgumentError(
                "k_cache", f"{kv_heads} KV heads", f"a divisor of the group's {heads * self.group_size} Q heads"
            )
        check_tensor("block_tables", self.block_tables, "1, max_blocks", (torch.int32,))
        for name in ("kvp_q_offset", "kvp_rank_id", "valid_num_prior_tokens"):
            if name == "kvp_q_offset" or getattr(self, name) is not None:
                check_tensor(name, getattr(self, name), "1, 1", (torch.int32,))
        for name in ("k_scale", "v_scale"):
            if getattr(self, name) is not None:
                check_tensor(name, getattr(self, name), "128, 1", SCALE_DTYPES)
        check_device(
            self.q,
            "q",
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            block_tables=self.block_tables,
            kvp_q_offset=self.kvp_q_offset,
            kvp_rank_id=self.kvp_rank_id,
            valid_num_prior_tokens=self.valid_num_prior_tokens,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )
        if self.v_scale is not None:
            check_repeated_scalar("v_scale", self.v_scale)
        if self.k_scale is not None and not bool(self.k_scale[:dim].isfinite().all()):
            raise ArgumentError("k_scale", "a value that is not finite", "finite numbers")
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.requires_grad and (tensor.dtype == FP8 or name.endswith("scale")):
                raise ArgumentError(
                    name, "requires_grad=True", "no gradient: it exists for q and unquantised caches only"
                )

    def _check_positions(self, index: int, size: int) -> None:
        """Offsets, rank id and prior length against each other and against the layout."""
        offset = int(self.kvp_q_offset)
        if self.kvp_rank_id is not None and int(self.kvp_rank_id) != index:
            raise ArgumentError(
                "kvp_rank_id", int(self.kvp_rank_id), f"{index}, this rank's place in its replica group"
            )
        if not self.kvp_group_size:
            if self.apc_mode:
                raise ArgumentError(
                    "apc_mode", True, "False with kvp_group_size=0", "it exists in round-robin mode only"
                )
            if self.valid_num_prior_tokens is not None:
                raise ArgumentError("valid_num_prior_tokens", "a tensor", "None without apc_mode")
            self._check_contiguous_offset(offset, index)
            return
        if self.kvp_group_size != size:
            raise ArgumentError("kvp_group_size", self.kvp_group_size, f"0 or group_size={size}")
        if self.kvp_rank_id is None:
            raise ArgumentError("kvp_rank_id", None, "a [1, 1] int32 tensor with kvp_group_size > 0")
        if offset < 0:
            raise ArgumentError("kvp_q_offset", offset, "the position of Q token 0, at least 0, in round-robin mode")
        layout = RoundRobin().bind(ranks=size, block_size=self.block_size)
        if self.apc_mode:
            if self.global_q_offset:
                raise ArgumentError("global_q_offset", self.global_q_offset, "0 in apc_mode")
            self._check_prior_tokens(layout.visible_blocks(index, offset) * self.block_size, offset)
        elif self.valid_num_prior_tokens is not None:
            raise ArgumentError("valid_num_prior_tokens", "a tensor", "None without apc_mode")
        elif self.global_q_offset != offset:
            raise ArgumentError("global_q_offset", self.global_q_offset, f"kvp_q_offset={offset} in round-robin mode")
        needed = -(-layout.filled_slots(index, offset + self.q.shape[1]) // self.block_size)
        if self.block_tables.shape[1] < needed:
            raise ArgumentError(
                "block_tables",
                f"{self.block_tables.shape[1]} blocks",
                f"at least {needed}, for queries up to position {offset + self.q.shape[1] - 1}",
                "write -1 for blocks that hold no token",
            )

    def _check_contiguous_offset(self, offset: int, index: int) -> None:
        """global_q_offset - kvp_q_offset is rank_id * local_kv_len."""
        before = self.global_q_offset - offset
        if before < 0 or (index == 0) != (before == 0) or (index and before % (index * self.block_size)):
            raise ArgumentError(
                "kvp_q_offset",
                offset,
                f"-rank_id * local_kv_len + global_q_offset, with rank_id={index}, a local_kv_len > 0 in whole blocks "
                f"and global_q_offset={self.global_q_offset}",
            )
        if not index:
            return  # the offset does not tell local_kv_len here
        local_blocks = before // index // self.block_size
        visible = -(-(offset + self.q.shape[1]) // self.block_size)
        if self.block_tables.shape[1] < min(visible, local_blocks):
            raise ArgumentError(
                "block_tables",
                f"{self.block_tables.shape[1]} blocks",
                f"at least {min(visible, local_blocks)}, what the queries see of local_kv_len={before // index}",
                "write -1 for blocks that hold no token",
            )
        beyond = self.block_tables[0, local_blocks : max(visible, local_blocks)]
        if bool((beyond != ABSENT).any()):
            raise ArgumentError(
                "block_tables", f"a block at or after entry {local_blocks}", f"-1 beyond local_kv_len={before // index}"
            )

    def _check_prior_tokens(self, expected: int, offset: int) -> None:
        if self.valid_num_prior_tokens is None:
            raise ArgumentError("valid_num_prior_tokens", None, "a [1, 1] int32 tensor in apc_mode")
        given = int(self.valid_num_prior_tokens)
        if given != expected:
            raise ArgumentError(
                "valid_num_prior_tokens",
                given,
                f"{expected}, the local tokens in blocks wholly at or before kvp_q_offset={offset}",
            )


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _ranks_of_list(replica_groups: ReplicaGroup) -> tuple[int, ...]:
    if not isinstance(replica_groups, ReplicaGroup):
        raise ArgumentTypeError("replica_groups", type(replica_groups).__name__, "a ReplicaGroup")
    try:
        return tuple(sorted(replica_groups.group_of(_rank())))
    except ValueError as error:
        raise ArgumentError("replica_groups", replica_groups.groups, f"a list that holds rank {_rank()}") from error


def _fingerprint(tensor: Tensor) -> str:
    data = tensor.detach().to("cpu", torch.float64).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
