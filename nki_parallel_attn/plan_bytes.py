"""Bytes: what a plan's KV cache takes per rank, and what its collectives send per rank.

Memory, for each rank (K and V, all layers, whole blocks):
    2 * layers * batch/kvdp * kv_heads_per_rank * slots * head_dim * itemsize,   slots = ceil(length / (R*b)) * b
with R = kvp or cp ranks that share a sequence and b = block_size (Contiguous: max_seq_len in place of length).

Traffic, for each rank and layer, with h = q_heads_per_rank, T = tokens of a sequence, B = batch, d = head_dim:
    KV-parallel prefill (G = kvp)
        all-gather of Q                          (G-1) * B*h*T*d * itemsize
        all-to-all of partial outputs            (G-1) * B*h*T*d * itemsize of the partials
        all-to-all of log-sum-exps               (G-1) * B*h*T * 4
    decoding, KVDP (D = kvdp; K and V need no exchange, every rank projects them)
        ALL_TO_ALL of Q, and of the output       (D-1)/D * B*h*T*d * itemsize each
        ALL_GATHER_SLICE of Q, and of the output (D-1) * B*h*T*d * itemsize each
    decoding, CP (C = cp; h*D heads, B/D sequences)
        all-gather of Q                          (C-1) * B/D*h*D*T*d * itemsize
        all-gather of statistics                 (C-1) * B/D*h*D*C*T * s * 4
        ALL_TO_ALL or REDUCE_SCATTER of partials (C-1) * B/D*h*D*T*d * itemsize of the partials
The reference page gathers s = 2 statistics of each row, its maximum and its sum. The torch backend's partials are
normalised already, so that s = 1, the log-sum-exp, says as much.
Sent to each peer once: a ring or a mesh without multicast sends as much. The least leaves out what no one needs: the
parts that ALL_GATHER_SLICE slices off, and in prefill the Q rows that see nothing on the receiving rank, with their
empty partials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.topology.types import CPCollectiveMode, KVDPCollectiveMode

if TYPE_CHECKING:
    from nki_parallel_attn.plan import ShardingPlan

STATISTIC_BYTES = 4
"""One float32: a log-sum-exp, a maximum or a sum."""


@dataclass(frozen=True)
class Memory:
    """KV cache bytes, K and V of all layers.

    Attributes:
        per_rank: what each rank sets aside.
        unsharded: the same cache on one rank that holds everything.
        tensor_parallel: one of tp ranks that split KV heads but share none: where tp exceeds kv_heads, heads repeat.
        hbm_per_rank: device memory of a rank of the plan's platform.
    """

    per_rank: int
    unsharded: int
    tensor_parallel: int
    hbm_per_rank: int

    @property
    def fits(self) -> bool:
        """Whether the cache alone fits in a rank's device memory."""
        return self.per_rank <= self.hbm_per_rank


@dataclass(frozen=True)
class Collective:
    """One collective of one layer.

    Attributes:
        name: what is exchanged and how.
        group: the ranks that take part, as `plan.replica_group` names them.
        bytes_sent: what each rank sends.
        least: the least that any exchange of what is needed makes some rank send.
    """

    name: str
    group: str
    bytes_sent: int
    least: int


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one layer.

    Attributes:
        collectives: in the order they run.
        gather_kv: the alternative for prefill: bytes each rank would send to gather K and V instead, keeping nothing
            sharded during the call; 0 when decoding.
    """

    collectives: tuple[Collective, ...]
    gather_kv: int = 0

    @property
    def bytes_sent(self) -> int:
        """What each rank sends in all."""
        return sum(collective.bytes_sent for collective in self.collectives)

    @property
    def least(self) -> int:
        """The sum of the least."""
        return sum(collective.least for collective in self.collectives)


def memory(plan: ShardingPlan, length: int | None, batch: int, dtype: torch.dtype) -> Memory:
    """KV cache bytes of sequences of `length` tokens (by default max_seq_len)."""
    tokens = plan.length(length)
    token = 2 * plan.shape.layers * plan.shape.head_dim * dtype.itemsize
    slots = plan.layout.local_slots(tokens)
    whole = -(-tokens // plan.block_size) * plan.block_size
    return Memory(
        per_rank=token * plan.batch_per_rank(batch) * plan.kv_heads_per_rank * slots,
        unsharded=token * batch * plan.shape.kv_heads * whole,
        tensor_parallel=token * batch * -(-plan.shape.kv_heads // plan.tp) * whole,
        hbm_per_rank=plan.platform.hbm_bytes_per_rank(plan.lnc),
    )


def prefill_traffic(
    plan: ShardingPlan,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    partial_dtype: torch.dtype,
    *,
    q_pos: int,
    sliding_window: int,
) -> Traffic:
    """What attention_kv_parallel_segmented_cte sends for `tokens` Q tokens from position `q_pos` on."""
    _check_counts(tokens=tokens, batch=batch)
    head_dim, ranks = plan.shape.head_dim, plan.kvp
    rows = batch * plan.q_heads_per_rank * tokens
    seeing = [rows_with_keys(plan, index, tokens, q_pos, sliding_window) for index in range(ranks)]
    needed = batch * plan.q_heads_per_rank
    # The rank that sends most: of Q, the one whose own keys the others' rows need least; of partials, the fullest.
    q_rows = needed * (sum(seeing) - min(seeing))
    partial_rows = needed * (ranks - 1) * max(seeing)
    q, partial = head_dim * dtype.itemsize, head_dim * partial_dtype.itemsize
    kv_token = 2 * plan.kv_heads_per_rank * head_dim * dtype.itemsize
    held = max(plan.layout.filled_slots(index, q_pos + tokens) for index in range(ranks))
    return Traffic(
        (
            Collective("all-gather of Q", "kvp", (ranks - 1) * rows * q, q_rows * q),
            Collective("all-to-all of partial outputs", "kvp", (ranks - 1) * rows * partial, partial_rows * partial),
            Collective(
                "all-to-all of log-sum-exps",
                "kvp",
                (ranks - 1) * rows * STATISTIC_BYTES,
                partial_rows * STATISTIC_BYTES,
            ),
        ),
        gather_kv=(ranks - 1) * batch * held * kv_token,
    )


def decode_traffic(
    plan: ShardingPlan,
    tokens: int,
    batch: int,
    dtype: torch.dtype,
    partial_dtype: torch.dtype,
    *,
    kvdp_mode: KVDPCollectiveMode,
    cp_mode: CPCollectiveMode,
    statistics: int,
) -> Traffic:
    """What attention_block_tkg sends for `batch` sequences of `tokens` new tokens each."""
    _check_counts(tokens=tokens, batch=batch)
    plan.batch_per_rank(batch)
    # KVDP trades heads for sequences, so a rank has as many rows after it as before.
    rows = batch * plan.q_heads_per_rank * tokens
    q, partial = rows * plan.shape.head_dim * dtype.itemsize, rows * plan.shape.head_dim * partial_dtype.itemsize
    collectives: list[Collective] = []
    if plan.kvdp > 1:
        least = (plan.kvdp - 1) * q // plan.kvdp
        all_to_all = kvdp_mode is KVDPCollectiveMode.ALL_TO_ALL
        sent, how = (least, "all-to-all") if all_to_all else ((plan.kvdp - 1) * q, "all-gather and slice")
        collectives += [Collective(f"{how} of {what}", "kvdp", sent, least) for what in ("Q", "output")]
    if plan.cp > 1:
        peers = plan.cp - 1
        gathered = peers * rows * plan.cp * statistics * STATISTIC_BYTES
        names = "maxima and sums" if statistics == 2 else "log-sum-exps"
        how = "all-to-all" if cp_mode is CPCollectiveMode.ALL_TO_ALL else "reduce-scatter"
        gather_q = Collective("all-gather of Q", "cp", peers * q, peers * q)
        exchange = [
            Collective(f"all-gather of {names}", "cp", gathered, gathered),
            Collective(f"{how} of partial outputs", "cp", peers * partial, peers * partial),
        ]
        # KVDP's exchange of Q comes first, that of the output last.
        collectives = [*collectives[:1], gather_q, *exchange, *collectives[1:]]
    return Traffic(tuple(collectives))


def rows_with_keys(plan: ShardingPlan, index: int, tokens: int, q_pos: int, sliding_window: int) -> int:
    """How many of `tokens` causal queries from `q_pos` on see at least one key on the group's rank `index`."""
    positions = torch.arange(q_pos, q_pos + tokens)
    seen = plan.layout.filled_slots(index, positions + 1)
    if sliding_window:
        seen = seen - plan.layout.filled_slots(index, (positions + 1 - sliding_window).clamp(min=0))
    return int((seen > 0).sum())


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ArgumentError(name, repr(count), "a positive integer")
