"""attention_kv_parallel_segmented_cte: one sequence's KV dealt over ranks by a ShardingPlan, in a paged cache.

Caches start as NaN, and only tokens that exist are written; the physical blocks are shuffled, with unused ones between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nki_parallel_attn.ops.attention_kv_parallel_segmented_cte import attention_kv_parallel_segmented_cte
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.plan_rank import RankView
from nki_parallel_attn.topology.kv_layout import Contiguous, RoundRobin
from nki_parallel_attn.topology.paged_cache import pack_fp8_k, write_kv_cache
from nki_parallel_attn.topology.types import AttentionShape
from nki_parallel_attn.validation.case import Case, Deviation, Place, compare
from nki_parallel_attn.validation.oracle import dense_attention
from nki_parallel_attn.validation.tolerance import attention_tolerance

FP8 = torch.float8_e4m3fn
KERNEL = "attention_kv_parallel_segmented_cte"
DTYPES = ("bfloat16", "float16", "float32", "float8", "float8_packed")


@dataclass(frozen=True)
class Inputs:
    """What a scenario changes.

    Attributes:
        rows: queries, padding included, at least; a multiple of the ranks' blocks is taken.
        prior: tokens in the cache before the call's own.
        block_size: tokens of a block.
        head_dim, heads_per_rank, kv_heads: the model's; kv_heads of each group.
        window: sliding window in tokens, 0 for none.
        padding: queries at the end that are no tokens.
        apc: the length of the prefix is known at run time only.
        absent: global blocks of the prefix that have no physical block.
        shared: the group's first rank has one physical block for two local blocks, as a shared prefix has.
        tp_out: the transposed output.
        groups: groups of ranks, interleaved.
    """

    rows: int = 256
    prior: int = 177
    block_size: int = 32
    head_dim: int = 64
    heads_per_rank: int = 2
    kv_heads: int = 1
    window: int = 0
    padding: int = 0
    apc: bool = False
    absent: tuple[int, ...] = ()
    shared: bool = False
    tp_out: bool = False
    groups: int = 1


SCENARIOS = {
    "prefix": Inputs(),
    "causal": Inputs(prior=0),
    "window": Inputs(prior=250, window=90),
    "padding": Inputs(padding=37),
    "run_time_prefix": Inputs(prior=192, apc=True),
    "absent_blocks": Inputs(prior=256, absent=(0, 3, 4)),
    "shared_blocks": Inputs(shared=True),
    "transposed_output": Inputs(tp_out=True),
    "head_dim_128": Inputs(head_dim=128, block_size=128),
    "head_dim_32": Inputs(head_dim=32, block_size=16),
    "one_head": Inputs(heads_per_rank=1),
    "two_kv_heads": Inputs(heads_per_rank=4, kv_heads=2),
    "two_groups": Inputs(rows=128, groups=2),
}


@dataclass(frozen=True)
class PrefillCase(Case):
    """A prefix in the cache and the call's queries after it."""

    @property
    def inputs(self) -> Inputs:
        """The scenario, with rows in whole segments of any number of ranks."""
        inputs = SCENARIOS[self.scenario]
        segment = self.ranks * inputs.block_size
        return replace(inputs, rows=-(-inputs.rows // segment) * segment)

    @property
    def world(self) -> int:
        return self.ranks * self.inputs.groups

    def plan(self, place: Place) -> ShardingPlan:
        """One model copy for each run side by side."""
        inputs = self.inputs
        return ShardingPlan(
            AttentionShape(inputs.heads_per_rank * self.world, inputs.kv_heads * inputs.groups, inputs.head_dim),
            world_size=place.world_size,
            tp=self.world,
            kvp=self.ranks,
            kv_layout=Contiguous() if self.layout == "contiguous" else RoundRobin(),
            block_size=inputs.block_size,
            lnc=self.lnc,
            target=place.target,
            rank_order="strided",
            max_seq_len=inputs.prior + inputs.rows,
        )

    def run(self, place: Place) -> Deviation:
        inputs, view = self.inputs, self.plan(place).rank(place.rank)
        q, k, v, scales = self._tensors(place.generator(self))
        if inputs.shared:
            _repeat_block(view.plan.rank(view.group_ranks()[0]), k, v)
        arguments = {
            **view.kvp_arguments(inputs.prior, apc_mode=inputs.apc),
            **self._caches(view, k, v, scales),
            **scales,
            "q": view.shard_q(q).contiguous(),
            "scale": inputs.head_dim**-0.5,
            "sliding_window": inputs.window,
            "tp_out": inputs.tp_out,
            "fp8_packed": self.dtype == "float8_packed",
        }
        out = attention_kv_parallel_segmented_cte(
            **place.to_device(arguments),  # type: ignore[arg-type]
            backend=place.backend,
            lnc=self.lnc,
            target=place.target,
        )
        rows = inputs.rows - inputs.padding
        out = out.transpose(1, 2) if inputs.tp_out else out
        tolerance = attention_tolerance(self.torch_dtype, v, inputs.head_dim)
        return compare(out[:, :rows], self._expected(view, q, k, v)[:, :rows], self.torch_dtype, tolerance)

    def _tensors(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """The model copy's Q, K and V, and the scales of a float8 cache, of which K and V are what it stands for."""
        inputs = self.inputs
        total = inputs.prior + inputs.rows
        q, k, v = (
            torch.randn(heads, rows, inputs.head_dim, generator=generator).to(self.torch_dtype)
            for heads, rows in (
                (inputs.heads_per_rank * self.world, inputs.rows),
                (inputs.kv_heads * inputs.groups, total),
                (inputs.kv_heads * inputs.groups, total),
            )
        )
        if not self.dtype.startswith("float8"):
            return q, k, v, {}
        # Powers of two: then quantising and dequantising round once, the same way everywhere.
        exponents = torch.randint(-3, 3, (128, 1), generator=generator)
        scales = {"k_scale": 2.0 ** exponents.float(), "v_scale": torch.full((128, 1), 0.25)}
        for values, name in ((k, "k_scale"), (v, "v_scale")):
            factor = scales[name][: inputs.head_dim, 0]
            values.copy_((values.float() / factor).to(FP8).float() * factor)
        return q, k, v, scales

    def _caches(self, view: RankView, k: Tensor, v: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rank's caches and block table."""
        inputs, head_dim = self.inputs, self.inputs.head_dim
        written = inputs.prior + inputs.rows - inputs.padding
        held = view.blocks_held(inputs.prior + inputs.rows)
        blocks = torch.randperm(held + 3, generator=torch.Generator().manual_seed(view.rank))[:held].tolist()
        if inputs.shared and view.index == 0:
            blocks[1] = blocks[0]
        table = view.block_table(inputs.prior + inputs.rows, blocks, num_blocks=held + 3)
        owned = view.owned_positions(0, written)
        if inputs.shared and view.index == 0:
            owned = torch.cat([owned[: inputs.block_size], owned[2 * inputs.block_size :]])
        slots = view.slot_mapping(owned, table)
        for block in inputs.absent:
            position = block * inputs.block_size
            if int(view.plan.layout.owner(position)) == view.sequence_index:
                table[0, int(view.plan.layout.slot(position)) // inputs.block_size] = -1
        made: dict[str, Tensor] = {"block_tables": table}
        for name, values in (("k", k), ("v", v)):
            stored = values[view.kv_heads.start : view.kv_heads.stop, owned]
            dtype = FP8 if scales else self.torch_dtype
            if scales:
                stored = stored.float() / scales[f"{name}_scale"][:head_dim, 0]
            cache = torch.full(view.cache_shape(held + 3), torch.nan).to(dtype)
            made[f"{name}_cache"] = write_kv_cache(cache, stored.to(dtype), slots)
        if self.dtype == "float8_packed":
            made["k_cache"] = pack_fp8_k(made["k_cache"].view(torch.uint8)).view(FP8)
        return made

    def _expected(self, view: RankView, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """float64 [heads of the rank, rows, head_dim]."""
        inputs = self.inputs
        total = inputs.prior + inputs.rows
        absent = torch.tensor(inputs.absent, dtype=torch.int64)
        expected = dense_attention(
            q,
            k,
            v,
            torch.arange(inputs.prior, total),
            scale=inputs.head_dim**-0.5,
            window=inputs.window,
            present=~torch.isin(torch.arange(total) // inputs.block_size, absent),
        )
        return expected[view.q_heads.start : view.q_heads.stop]


def _repeat_block(first: RankView, k: Tensor, v: Tensor) -> None:
    """Give the second block of the group's first rank the tokens of its first."""
    size = first.plan.block_size
    owned = first.owned_positions(0, k.shape[1])
    for values in (k, v):
        values[:, owned[size : 2 * size]] = values[:, owned[:size]]


def prefill_cases(ranks: tuple[int, ...]) -> Iterator[Case]:
    """Layouts x ranks x LNC x dtypes with a prefix; the other scenarios with two ranks, or the nearest there is."""
    few = min(ranks, key=lambda count: abs(count - 2), default=0)
    for layout in ("round_robin", "contiguous"):
        for count in ranks:
            for lnc in (1, 2):
                for dtype in DTYPES:
                    yield PrefillCase(KERNEL, layout, "prefix", dtype, count, lnc)
        for scenario, inputs in SCENARIOS.items():
            if scenario != "prefix" and few and not (inputs.apc and layout == "contiguous"):
                for lnc in (1, 2):
                    yield PrefillCase(KERNEL, layout, scenario, "bfloat16", few, lnc)
