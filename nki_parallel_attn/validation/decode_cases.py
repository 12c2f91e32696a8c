"""attention_block_tkg: one decoding step, its KV dealt by batch (KVDP), by sequence (CP) or both by a ShardingPlan.

X -> Q, K, V -> RoPE -> attention over the prior cache and the step's own tokens -> cache update; no output projection,
so that what comes out is the attention. Flat caches, or block caches whose blocks are shuffled; both start as NaN.

X and the weights are -1, 0 and 1 (times a power of two) and RoPE turns by quarters: new Q, K and V are then exact in
every dtype and every order of summation, so that the attention's rounding is all there is, and cached tokens are equal
to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nki_parallel_attn.ops.attention_block_tkg import attention_block_tkg
from nki_parallel_attn.plan import ShardingPlan
from nki_parallel_attn.plan_rank import RankView
from nki_parallel_attn.topology.kv_layout import Interleaved
from nki_parallel_attn.topology.paged_cache import read_kv_cache, write_kv_cache
from nki_parallel_attn.topology.types import AttentionShape, QuantizationType
from nki_parallel_attn.validation.case import Case, Deviation, Place, compare
from nki_parallel_attn.validation.oracle import dense_attention
from nki_parallel_attn.validation.tolerance import attention_tolerance

KERNEL = "attention_block_tkg"
DTYPES = ("bfloat16", "float16", "float32")
HIDDEN, HEAD_DIM, BLOCK_SIZE, MAX_TOKENS = 256, 64, 16, 192
BATCH_PER_RANK, TOKENS = 2, 2


def degrees(scenario: str, ranks: int) -> tuple[int, int]:
    """KVDP and CP of a scenario: all ranks by batch, all by sequence, or two by batch and the rest by sequence."""
    return {"kvdp": (ranks, 1), "cp": (1, ranks), "kvdp_and_cp": (2, ranks // 2)}[scenario]


@dataclass(frozen=True)
class Step:
    """The global step, before it is sharded.

    Attributes:
        positions: [B, S_tkg] of the new tokens.
        x: [B, S_tkg, H]; w: [H, d*(q_heads + 2)]; cos, sin: [d/2, B, S_tkg].
        k, v: of each sequence [1, MAX_TOKENS, d], of which those before positions[b, 0] are cached.
    """

    positions: Tensor
    x: Tensor
    w: Tensor
    cos: Tensor
    sin: Tensor
    k: Tensor
    v: Tensor

    def new_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q [B, q_heads, S, d], K and V [B, 1, S, d] in float64."""
        heads = (self.x.double() @ self.w.double()).view(*self.x.shape[:2], -1, HEAD_DIM).transpose(1, 2)
        cos, sin = (t.double().permute(1, 2, 0)[:, None] for t in (self.cos, self.sin))
        first, second = heads[:, :-1].chunk(2, -1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return rotated[:, :-1], rotated[:, -1:], heads[:, -1:]


@dataclass(frozen=True)
class DecodeCase(Case):
    """Sequences of unlike lengths, two new tokens each."""

    def may_be_unavailable(self, backend: str) -> bool:
        return backend != "torch"

    def plan(self, place: Place) -> ShardingPlan:
        """One model copy for each run side by side, with one KV head."""
        kvdp, cp = degrees(self.scenario, self.ranks)
        return ShardingPlan(
            AttentionShape(2 * self.ranks, 1, HEAD_DIM),
            world_size=place.world_size,
            tp=self.ranks,
            kvdp=kvdp,
            cp=cp,
            # A flat cache takes several new tokens of one owner only.
            kv_layout=Interleaved(TOKENS if self.layout == "flat" else 1),
            block_size=BLOCK_SIZE,
            lnc=self.lnc,
            target=place.target,
            max_seq_len=MAX_TOKENS,
        )

    def step(self, generator: torch.Generator) -> Step:
        """Random inputs; scores have a standard deviation of about 2."""
        batch = BATCH_PER_RANK * self.ranks
        starts = TOKENS * torch.randint(MAX_TOKENS // TOKENS - 1, (batch, 1), generator=generator)
        starts[0] = 0  # nothing in the cache
        quarters = torch.randint(4, (HEAD_DIM // 2, batch, TOKENS), generator=generator)
        made = (
            torch.randint(-1, 2, (batch, TOKENS, HIDDEN), generator=generator),
            torch.randint(-1, 2, (HIDDEN, HEAD_DIM * (2 * self.ranks + 2)), generator=generator) / 8,
            torch.tensor([1, 0, -1, 0])[quarters],
            torch.tensor([0, 1, 0, -1])[quarters],
            torch.randn(batch, 1, MAX_TOKENS, HEAD_DIM, generator=generator),
            torch.randn(batch, 1, MAX_TOKENS, HEAD_DIM, generator=generator),
        )
        return Step(starts + torch.arange(TOKENS), *(t.to(self.torch_dtype) for t in made))

    def run(self, place: Place) -> Deviation:
        view, step = self.plan(place).rank(place.rank), self.step(place.generator(self))
        caches, slots = self._caches(view, step)
        first = view.q_heads.start * HEAD_DIM
        last = view.q_heads.stop * HEAD_DIM
        arguments: dict[str, object] = {
            **_switched_off(),
            **view.decode_arguments(),
            **caches,
            "X": step.x,
            "W_qkv": torch.cat([step.w[:, first:last], step.w[:, -2 * HEAD_DIM :]], 1),
            "cos": step.cos,
            "sin": step.sin,
            "rope_contiguous_layout": True,
            "attention_mask": view.attention_mask(step.positions),
            "pos_ids": view.pos_ids(step.positions),
            "S_ctx": view.S_ctx(step.positions) if self.layout == "flat" else None,
        }
        out, k_cache, v_cache = attention_block_tkg(
            **place.to_device(arguments),  # type: ignore[arg-type]
            backend=place.backend,
            lnc=self.lnc,
            target=place.target,
        )
        assert isinstance(out, Tensor)  # a tuple only for out_in_sb
        q, k, v = step.new_tokens()
        expected = _attention(step, q, k, v)[:, view.q_heads.start : view.q_heads.stop].transpose(2, 3)
        values = torch.cat([v.flatten(), step.v.double().flatten()])
        found = [compare(out, expected, self.torch_dtype, attention_tolerance(self.torch_dtype, values, HEAD_DIM))]
        written = slots >= 0
        for name, cache, new in (("K_cache", k_cache, k), ("V_cache", v_cache, v)):
            blocks = cache.reshape(-1, 1, BLOCK_SIZE, HEAD_DIM)
            stored = read_kv_cache(blocks.cpu(), slots[written])
            own = new[view.batch_slice(len(new))].transpose(0, 1).flatten(1, 2)[:, written]
            found.append(compare(stored, own, self.torch_dtype, 0.0, name))
        return max(found, key=lambda deviation: deviation.excess)

    def _caches(self, view: RankView, step: Step) -> tuple[dict[str, object], Tensor]:
        """The rank's caches with what goes with them, and the slot of each new token of its sequences, -1 elsewhere."""
        rows = range(len(step.positions))[view.batch_slice(len(step.positions))]
        width = view.plan.blocks_per_sequence()
        count = len(rows) * width + (0 if self.layout == "flat" else 3)
        order = torch.arange(count)
        if self.layout != "flat":
            order = torch.randperm(count, generator=torch.Generator().manual_seed(view.rank))
        table = order[: len(rows) * width].view(len(rows), width).to(torch.int32)
        made: dict[str, object] = {}
        for name, values in (("K_cache", step.k), ("V_cache", step.v)):
            cache = torch.full(view.cache_shape(count), torch.nan, dtype=self.torch_dtype)
            for local, row in enumerate(rows):
                length = int(step.positions[row, 0])
                slots = view.slot_mapping(torch.arange(length), table[local : local + 1])
                write_kv_cache(cache, values[row, :, :length], slots)
            made[name] = cache.view(len(rows), 1, -1, HEAD_DIM) if self.layout == "flat" else cache
        if self.layout == "flat":
            made["kv_cache_update_idx"] = view.kv_cache_update_idx(step.positions)
        else:
            lists = [blocks.tolist() for blocks in table]
            made["active_blocks_table"] = view.active_blocks_table(lists, width, count)
            made["kv_cache_update_idx"] = view.kv_cache_update_idx(step.positions, table)
        own = step.positions[view.batch_slice(len(step.positions))]
        return made, view.slot_mapping(own, table).flatten()


def _attention(step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, q_heads, S, d] float64: each sequence's prior and new tokens, dense."""
    rows = []
    for row, start in enumerate(step.positions[:, 0].tolist()):
        keys = torch.cat([step.k[row, :, :start].double(), k[row]], 1)
        values = torch.cat([step.v[row, :, :start].double(), v[row]], 1)
        rows.append(dense_attention(q[row], keys, values, step.positions[row], scale=HEAD_DIM**-0.5))
    return torch.stack(rows)


def _switched_off() -> dict[str, object]:
    """The required arguments that the cases leave out."""
    absent = (
        "X_hidden_dim_actual rmsnorm_X_eps rmsnorm_X_gamma bias_qkv weight_dequant_scale_qkv input_dequant_scale_qkv "
        "rmsnorm_QK_pre_rope_W_Q rmsnorm_QK_pre_rope_W_K rmsnorm_QK_post_rope_W_Q rmsnorm_QK_post_rope_W_K "
        "active_blocks_table sink W_out bias_out weight_dequant_scale_out input_dequant_scale_out"
    )
    no = "rmsnorm_X_enabled rmsnorm_QK_pre_rope_enabled rmsnorm_QK_post_rope_enabled K_cache_transposed "
    no += "transposed_out out_in_sb"
    return {
        **dict.fromkeys(absent.split()),
        **dict.fromkeys(no.split(), False),
        "rmsnorm_QK_pre_rope_eps": 1e-6,
        "rmsnorm_QK_post_rope_eps": 1e-6,
        "quantization_type_qkv": QuantizationType.NONE,
        "quantization_type_out": QuantizationType.NONE,
        "update_cache": True,
    }


def decode_cases(ranks: tuple[int, ...]) -> Iterator[Case]:
    """Cache forms x ways to share x ranks x LNC, in bfloat16; other dtypes with block caches and both ways at once."""
    for count in ranks:
        for lnc in (1, 2):
            for layout in ("flat", "block"):
                for scenario in ("kvdp", "cp", "kvdp_and_cp"):
                    if scenario == "kvdp_and_cp" and (count < 4 or count % 2):
                        continue
                    if count == 1 and scenario != "cp":
                        continue
                    yield DecodeCase(KERNEL, layout, scenario, "bfloat16", count, lnc)
            for dtype in DTYPES[1:]:
                yield DecodeCase(KERNEL, "block", "kvdp" if count == 2 else "cp", dtype, count, lnc)
