"""What attention_kv_parallel_segmented_cte asks of its arguments, on each rank and between ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nki_parallel_attn.errors import ArgumentError, ArgumentTypeError, PeerError
from nki_parallel_attn.ops.rank_agreement import check_in_world
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
TABLE_LIMITS = "local_kv_len for which rank 0's table is right"


@dataclass(frozen=True, kw_only=True)
class PrefillArguments:
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
        index = ranks.index(world_rank())
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

    def partly_known(self, index: int) -> dict[str, object]:
        """What a contiguous shard's rank knows of local_kv_len: the number, or on rank 0 what its table allows."""
        if self.kvp_group_size:
            return {}
        length = (self.global_q_offset - int(self.kvp_q_offset)) // index if index else None
        limits = None if index else self._local_kv_len_limits()
        return {"local_kv_len": length, TABLE_LIMITS: limits}

    def _local_kv_len_limits(self) -> str:
        """Least and largest local_kv_len for which rank 0's table is right, as JSON; null for no largest."""
        visible = self._visible_blocks()
        present = (self.block_tables[0, :visible] != ABSENT).nonzero()
        least = int(present[-1]) + 1 if len(present) else 0
        entries = self.block_tables.shape[1]
        most = None if entries >= visible else entries * self.block_size
        return json.dumps([least * self.block_size, most])

    def _visible_blocks(self) -> int:
        """Blocks of a contiguous shard without end that the queries see."""
        return max(0, -(-(int(self.kvp_q_offset) + self.q.shape[1]) // self.block_size))

    def _check_group(self, ranks: tuple[int, ...]) -> None:
        check_int("group_size", self.group_size, minimum=1)
        if self.group_size != len(ranks):
            raise ArgumentError(
                "group_size", self.group_size, f"{len(ranks)}, the length of {list(ranks)}, this rank's list"
            )
        given = self.replica_groups.group_of(world_rank())
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
            return  # the offset does not tell local_kv_len here: see check_first_shard
        local_blocks = before // index // self.block_size
        visible = self._visible_blocks()
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


def check_first_shard(known: Mapping[int, Mapping[str, str]]) -> None:
    """The table of a contiguous group's rank 0 against the local_kv_len that the other ranks know.

    All ranks have the same facts, so all raise or none does.

    Args:
        known: of each world rank of the group, what it has posted of `PrefillArguments.partly_known`.

    Raises:
        ArgumentError: on rank 0, its table is too short, or holds blocks beyond its shard.
        PeerError: the same on the other ranks.
    """
    first = min(known)
    lengths = [int(facts["local_kv_len"]) for facts in known.values() if "local_kv_len" in facts]
    limits = known[first].get(TABLE_LIMITS)
    if not lengths or limits is None:
        return
    least, most = json.loads(limits)
    length = lengths[0]
    if least <= length and (most is None or length <= most):
        return
    if most is not None and length > most:
        error = ArgumentError(
            "block_tables",
            f"entries for {most} tokens",
            f"what the queries see of local_kv_len={length}",
            "write -1 for blocks that hold no token",
        )
    else:
        error = ArgumentError("block_tables", f"a block that ends at token {least}", f"-1 beyond local_kv_len={length}")
    if world_rank() == first:
        raise error
    raise PeerError(f"attention_kv_parallel_segmented_cte: rank {first} refused its arguments: {error}")


def world_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks_of_list(replica_groups: ReplicaGroup) -> tuple[int, ...]:
    if not isinstance(replica_groups, ReplicaGroup):
        raise ArgumentTypeError("replica_groups", type(replica_groups).__name__, "a ReplicaGroup")
    try:
        ranks = tuple(sorted(replica_groups.group_of(world_rank())))
    except ValueError as error:
        raise ArgumentError(
            "replica_groups", replica_groups.groups, f"a list that holds rank {world_rank()}"
        ) from error
    check_in_world("replica_groups", replica_groups)
    return ranks


def _fingerprint(tensor: Tensor) -> str:
    data = tensor.detach().to("cpu", torch.float64).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
