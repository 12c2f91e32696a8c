"""A decoding case: one global step, what each rank of a KV group is given of it, and what each rank must return.

Caches start as NaN; only the tokens that exist are written, each by looking up its owner. Physical blocks are shuffled,
with unused ones between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nki_parallel_attn import (
    CPCollectiveMode,
    DtypeMode,
    Interleaved,
    KVDPCollectiveMode,
    QuantizationType,
    ReplicaGroup,
)
from nki_parallel_attn.topology import block_tables, masks, rank_tensors_tkg
from nki_parallel_attn.topology.decode_rank import DecodeRank
from nki_parallel_attn.topology.kv_layout import Contiguous
from nki_parallel_attn.topology.paged_cache import pack_fp8_k
from tests.tkg import oracle, weights
from tests.tkg.bounded import Bounded

FP8 = torch.float8_e4m3fn
PAD = -1
QKV_SCALES = torch.tensor([0.02, 0.03, 0.01], dtype=torch.float64)
INPUT_SCALE, OUT_SCALE = 0.02, 0.05


@dataclass(frozen=True)
class Case:
    """Sizes and switches; a switch's first value is the plainest."""

    kvdp: int = 1
    cp: int = 1
    batch: int = 2
    tokens: int = 1
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    hidden: int = 128
    dtype: torch.dtype = torch.float64
    cache: str = "flat"  # flat, flat_t, block3, block4, packed3, packed4
    fp8: str = ""  # "", fp8, opaque
    dtype_mode: str = "NON_OCP"
    layout: str = "round_robin"  # round_robin, contiguous, interleaved 1 or 2
    mask: str = "pos_ids"  # pos_ids, full, swapped
    window: int = 0
    tree: bool = False
    sink: bool = False
    padding: str = ""  # "", row, tail
    rmsnorm_x: str = ""  # "", plain, gamma
    x_padding: int = 0
    transposed_in: bool = False
    by_4: bool = False
    bias: bool = False
    pre: str = ""  # "", plain, gamma
    post: str = ""
    rope: str = ""  # "", contiguous, interleaved, each also with " partial"
    out: str = ""  # "", plain, bias, transposed
    in_sb: bool = False
    lnc: int = 1
    update: bool = True
    skip_some: bool = False
    skip_attention: bool = False
    scale: bool = False
    max_context_len: bool = False
    kvdp_mode: str | None = None
    cp_mode: str | None = None
    qkv_type: str = "NONE"
    out_type: str = "NONE"
    longest: int = 0  # positions go up to it; 0 for a few blocks
    seed: int = 0

    block_len = 4

    # The global step

    @property
    def ranks(self) -> int:
        return self.kvdp * self.cp

    @property
    def all_q_heads(self) -> int:
        return self.q_heads * self.ranks

    @property
    def target(self) -> str:
        return "trn3" if self.dtype_mode == "OCP" or "MX" in self.qkv_type + self.out_type else "trn2"

    @property
    def top(self) -> float:
        """The largest float8, but for the MX types."""
        return 448.0 if self.dtype_mode == "OCP" or (self.dtype_mode, self.target) == ("AUTO", "trn3") else 240.0

    @property
    def arithmetic(self) -> oracle.Arithmetic:
        return oracle.Arithmetic(self.dtype)

    @property
    def block(self) -> bool:
        return not self.cache.startswith("flat")

    def layout_of(self) -> Any:
        bound = {"ranks": self.cp, "block_size": self.block_len, "local_length": 16}
        if self.layout == "contiguous":
            return Contiguous().bind(**bound)
        return Interleaved({"round_robin": 4, "interleaved 2": 2, "interleaved 1": 1}[self.layout]).bind(**bound)

    @cached_property
    def positions(self) -> Tensor:
        """[B, S_tkg]; flat caches get tokens of one owner."""
        generator = torch.Generator().manual_seed(self.seed)
        layout, rows = self.layout_of(), []
        top = (self.longest or min(16 * self.cp, 45)) - self.tokens
        for _ in range(self.batch):
            for _ in range(1000):
                start = int(torch.randint(0, top + 1, (1,), generator=generator))
                row = start + torch.arange(self.tokens)
                if self.block or self.cp == 1 or len(layout.owner(row).unique()) == 1:
                    break
            rows.append(row)
        positions = torch.stack(rows)
        if self.seed % 3 == 0:
            positions[0] = torch.arange(self.tokens)  # no prior at all
        if self.padding == "row":
            positions[-1] = PAD
        if self.padding == "tail":
            positions[0, -1] = PAD
        return positions

    @property
    def lengths(self) -> list[int]:
        return self.positions[:, 0].clamp(min=0).tolist()

    @property
    def stored(self) -> torch.dtype:
        return FP8 if self.fp8 else self.dtype

    @property
    def k_scale(self) -> float:
        return 30.0

    @property
    def v_scale(self) -> float:
        return 50.0

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """Every global tensor, of its dtype."""
        generator = torch.Generator().manual_seed(self.seed + 1)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * std).to(self.dtype)

        columns = self.head_dim * (self.all_q_heads + 2 * self.kv_heads)
        made: dict[str, Any] = {
            "x": normal(self.batch, self.tokens, self.hidden),
            "gamma_x": normal(1, self.hidden),
            "w": normal(self.hidden, columns, std=self.hidden**-0.5),
            "bias": normal(1, columns),
            "w_out": normal(self.all_q_heads * self.head_dim, 256, std=self.head_dim**-0.5),
            "bias_out": normal(1, 256),
            "sink": normal(self.all_q_heads, 1),
        }
        if self.x_padding:
            made["x"][..., -self.x_padding :] = torch.nan  # never read
        for name in ("pre_q", "pre_k", "post_q", "post_k"):
            made[name] = normal(1, self.head_dim)
        pairs = self.head_dim // (4 if "partial" in self.rope else 2)
        angle = normal(pairs, self.batch, self.tokens)
        made["cos"], made["sin"] = angle.cos(), angle.sin()
        size = (self.kv_heads, self.head_dim)
        std = 20.0 if self.fp8 else 1.0
        made["qkv_weight"] = weights.make(made["w"].double() * 50, self.qkv_type, self.seed, 1)
        made["out_weight"] = weights.make(made["w_out"].double() * 20, self.out_type, self.seed, 2)
        made["prior"] = [
            tuple(normal(size[0], length, size[1], std=std).to(self.stored) for _ in range(2))
            for length in self.lengths
        ]
        tree = torch.rand(self.tokens, self.batch, self.all_q_heads, self.tokens, generator=generator) < 0.5
        made["tree"] = tree | torch.eye(self.tokens, dtype=torch.bool)[:, None, None]
        return made

    @cached_property
    def new_tokens(self) -> tuple[Bounded, Bounded, Bounded]:
        """Q, K and V of the whole model, K and V as the cache holds them."""
        q, k, v = self.projected
        return q, self.quantised(k, self.k_scale), self.quantised(v, self.v_scale)

    def quantised(self, tokens: Bounded, scale: float) -> Bounded:
        """As the cache holds it."""
        if not self.fp8:
            return tokens
        return oracle.scaled_to_float8(tokens, scale, self.top, self.arithmetic.wide)

    def product(self, x: Bounded, weight: Tensor, kind: str, columns: Tensor | float) -> Bounded:
        """x [T, K] times a weight [K, N] of float64 values, as its quantisation type does it."""
        unit, wide = self.arithmetic.unit, self.arithmetic.wide
        if kind in ("STATIC", "STATIC_MX"):
            x = oracle.static_input(x, INPUT_SCALE, self.top if kind == "STATIC" else 448.0, wide)
        elif kind == "ROW_MX":
            x = oracle.row_input(x, 448.0, wide)
        elif kind == "MX":
            x = oracle.mx_input(x)
        return x.matmul(weight, unit).times(columns).widened(4 * unit)

    @staticmethod
    def column_scales(count: int) -> Tensor:
        return 0.015 + 0.01 * torch.arange(count, dtype=torch.float64).cos()

    def projection(self, attention: Bounded, index: int) -> Bounded:
        """A rank's output projection of its heads' attention [T, heads*d]."""
        t, heads = self.tensors, self.heads_of(index)
        rows = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        weight = (t["w_out"].double() if self.out_type == "NONE" else t["out_weight"].values)[rows]
        columns: Tensor | float = 1.0
        if self.out_type.startswith("STATIC"):
            columns = OUT_SCALE
        elif self.out_type.startswith("ROW"):
            columns = self.column_scales(weight.shape[1])
        out = self.product(attention, weight, self.out_type, columns)
        out = out.plus(t["bias_out"]).widened(self.arithmetic.unit) if self.out == "bias" else out
        return out.rounded(self.dtype)

    def scale_arguments(self, columns: Tensor, rows: slice) -> dict[str, Tensor | None]:
        """The four scale tensors of a rank with these columns of W_qkv and these rows of W_out."""
        repeat = 128 if self.seed % 2 else 1
        made: dict[str, Tensor | None] = {}
        count = self.head_dim * (self.all_q_heads + 2 * self.kv_heads)
        static = {"qkv": QKV_SCALES, "out": torch.tensor([OUT_SCALE], dtype=torch.float64)}
        by_row = {"qkv": self.column_scales(count)[columns], "out": self.column_scales(256)}
        for which, kind in (("qkv", self.qkv_type), ("out", self.out_type)):
            scale = None
            if kind == "MX":
                scales = self.tensors[f"{which}_weight"].scales
                scale = scales[:, columns] if which == "qkv" else scales[rows.start // 32 : rows.stop // 32]
            elif kind != "NONE":
                scale = (static if kind.startswith("STATIC") else by_row)[which].repeat(repeat, 1)
            made[f"weight_dequant_scale_{which}"] = scale
            given = torch.full((repeat, 1), INPUT_SCALE, dtype=torch.float64)
            made[f"input_dequant_scale_{which}"] = given if kind.startswith("STATIC") else None
        return made

    @cached_property
    def projected(self) -> tuple[Bounded, Bounded, Bounded]:
        """Q, K and V of the whole model, before quantisation."""
        t = self.tensors
        actual = self.hidden - self.x_padding
        x = t["x"].nan_to_num(0.0) if self.x_padding else t["x"]

        def norms(kind: str, stage: str) -> tuple[oracle.Norm, oracle.Norm] | None:
            if not kind:
                return None
            gammas = [t[f"{stage}_{name}"] if kind == "gamma" else None for name in "qk"]
            return oracle.Norm(eps=1e-5, gamma=gammas[0]), oracle.Norm(eps=1e-5, gamma=gammas[1])

        def project(hidden: Bounded) -> Bounded:
            widths = torch.tensor([self.all_q_heads, self.kv_heads, self.kv_heads]) * self.head_dim
            columns: Tensor | float = 1.0
            if self.qkv_type.startswith("STATIC"):
                columns = QKV_SCALES.repeat_interleave(widths)
            elif self.qkv_type.startswith("ROW"):
                columns = self.column_scales(int(widths.sum()))
            weight = t["w"].double() if self.qkv_type == "NONE" else t["qkv_weight"].values
            flat = hidden.on_both(lambda x: torch.cat([x[..., :actual], torch.zeros_like(x[..., actual:])], -1))
            product = self.product(flat.on_both(lambda x: x.flatten(0, 1)), weight, self.qkv_type, columns)
            return product.plus(t["bias"]).widened(self.arithmetic.unit) if self.bias else product

        return oracle.new_tokens(
            x,
            project,
            arithmetic=self.arithmetic,
            q_heads=self.all_q_heads,
            kv_heads=self.kv_heads,
            norm_x=oracle.Norm(eps=1e-3, gamma=t["gamma_x"] if self.rmsnorm_x == "gamma" else None)
            if self.rmsnorm_x
            else None,
            hidden_actual=actual,
            norms_pre=norms(self.pre, "pre"),
            norms_post=norms(self.post, "post"),
            rotary=(t["cos"], t["sin"], "contiguous" in self.rope) if self.rope else None,
        )

    @property
    def softmax_scale(self) -> float:
        if self.scale:
            return 0.2 / (self.k_scale if self.fp8 else 1)
        return self.head_dim**-0.5 / (self.k_scale if self.fp8 else 1)

    @cached_property
    def attention(self) -> Bounded:
        """[B, heads, S, d]."""
        q, k, v = self.new_tokens
        if self.skip_attention:
            return q
        tokens = torch.arange(self.tokens)
        seen_prior = []
        for row, length in enumerate(self.lengths):
            seen = torch.ones(self.all_q_heads, self.tokens, length, dtype=torch.bool)
            if self.window:
                seen &= torch.arange(length) > self.positions[row][:, None] - self.window
            seen_prior.append(seen)
        if self.tree:
            active = self.tensors["tree"]
        else:
            active = tokens[:, None] <= tokens
            if self.window:
                active = active & (tokens - tokens[:, None] < self.window)
            active = active[:, None, None].expand(-1, self.batch, self.all_q_heads, -1)
        real = (self.positions != PAD).T[:, :, None, None]
        return oracle.attention(
            q,
            self.tensors["prior"],
            k,
            v,
            seen_prior,
            active & real,
            arithmetic=self.arithmetic,
            scale=self.softmax_scale,
            sink=self.tensors["sink"] if self.sink else None,
        )

    # A rank's part

    def place(self, index: int) -> DecodeRank:
        return DecodeRank.from_index(self.layout_of(), index, self.kvdp)

    def heads_of(self, index: int) -> slice:
        return slice(index * self.q_heads, (index + 1) * self.q_heads)

    def columns_of(self, index: int) -> Tensor:
        """Of W_qkv and its bias: the rank's Q heads, all K and V heads."""
        all_q = self.all_q_heads
        kv_heads = list(range(all_q, all_q + 2 * self.kv_heads))
        heads = torch.tensor([*range(all_q)[self.heads_of(index)], *kv_heads])
        return (heads[:, None] * self.head_dim + torch.arange(self.head_dim)).reshape(-1)

    @property
    def slots(self) -> int:
        """Local slots of each sequence's cache, with room for a full mask's active tokens."""
        top = min(int(self.positions.max()) + 1, 16 * self.cp) if self.layout == "contiguous" else max(48, self.longest)
        held = self.layout_of().local_slots(top)
        return held + (8 if self.mask != "pos_ids" else 0)

    def block_lists(self, index: int) -> tuple[list[list[int]], int]:
        """Physical blocks of each local sequence, and how many there are."""
        rows = self.batch // self.kvdp
        per_row = -(-self.slots // self.block_len)
        count = rows * per_row + 3
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + index)).tolist()
        if self.seed % 4 == 1:
            order = list(range(count))
        return [order[row * per_row : (row + 1) * per_row] for row in range(rows)], count

    def caches(self, index: int, new_tokens: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """K and V of a rank before the step, or with these new K and V [B, kv_heads, S, d], in the layout asked for."""
        place = self.place(index)
        batch = place.batch_rows(self.batch)
        lists, count = self.block_lists(index)
        if self.block:
            shape = (count, self.kv_heads, self.block_len, self.head_dim)
        else:
            shape = (self.batch // self.kvdp, self.kv_heads, self.slots, self.head_dim)
        made = []
        for which in range(2):
            cache = torch.full(shape, torch.nan, dtype=torch.float64)
            for local, row in enumerate(range(self.batch)[batch]):
                prior = self.tensors["prior"][row][which].double()
                stored = [(p, prior[:, p]) for p in range(self.lengths[row])]
                skipped = (self.skip_some and local == 0) or (self.padding == "tail" and not self.block and row == 0)
                if new_tokens and not skipped:
                    new = new_tokens[which][row]
                    real = [s for s in range(self.tokens) if self.positions[row, s] != PAD]
                    stored += [(int(self.positions[row, s]), new[:, s]) for s in real]
                for position, value in stored:
                    if int(place.layout.owner(position)) != place.cp_rank:
                        continue
                    slot = int(place.layout.slot(position))
                    if self.block:
                        cache[lists[local][slot // self.block_len], :, slot % self.block_len] = value
                    else:
                        cache[local, :, slot] = value
            made.append(cache.to(self.stored))
        k, v = made
        if self.cache.startswith("packed"):
            k = pack_fp8_k(k)
        if self.cache == "flat_t":
            k = k.transpose(2, 3).contiguous()
        if self.cache.endswith("3"):
            k, v = k.squeeze(1), v.squeeze(1)
        return (k.view(torch.uint8), v.view(torch.uint8)) if self.fp8 == "opaque" else (k, v)

    def arguments(self, index: int, ranks: list[int] | None = None) -> dict[str, Any]:
        """The operation's arguments for the rank at `index` of the group of world ranks (0, 1, ... by default)."""
        t, place = self.tensors, self.place(index)
        world = ranks or list(range(self.ranks))
        columns, heads = self.columns_of(index), self.heads_of(index)
        rows = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        k_cache, v_cache = self.caches(index)
        lists, count = self.block_lists(index)
        x, gamma = t["x"], t["gamma_x"]
        if self.by_4:
            x, gamma = (value.unflatten(-1, (-1, 128, 4)).movedim(-1, -3).flatten(-3) for value in (x, gamma))
        if self.transposed_in:
            part = self.hidden // self.lnc
            channel = [
                [[c * part + p * (part // 128) + j for j in range(part // 128)] for c in range(self.lnc)]
                for p in range(128)
            ]
            x = x.flatten(0, 1)[:, torch.tensor(channel)].permute(1, 2, 3, 0).contiguous()
        table = update_table = None
        if self.block:
            table = block_tables.active_blocks_table(lists, len(lists[0]) + 1, count, self.kv_heads)
            update_table = block_tables.active_blocks_table(lists, len(lists[0]), count)
            update = rank_tensors_tkg.block_kv_cache_update_idx(place, self.positions, update_table, self.kv_heads)
        else:
            whole = self.positions.clone()
            if self.padding == "tail":  # a flat cache takes whole rows
                whole[0] = PAD
            update = rank_tensors_tkg.flat_kv_cache_update_idx(place, whole, self.slots)
        if self.skip_some:
            update = update.to(torch.int64)
            update[0] = rank_tensors_tkg.SKIP_UPDATE_IDX
            update = update.to(torch.uint32)
        visible = {"tree": t["tree"] if self.tree else None, "sliding_window": self.window}
        pos = swa = s_ctx = longest = None
        if self.mask == "pos_ids":
            mask = masks.active_mask(place, self.positions, self.all_q_heads, **visible)
            pos = rank_tensors_tkg.pos_ids(place, self.positions)
            swa = rank_tensors_tkg.swa_start_pos_ids(place, self.positions, self.window) if self.window else None
            s_ctx = None if self.block else max(rank_tensors_tkg.s_ctx(place.layout, self.positions), 1)
            longest = rank_tensors_tkg.max_context_len(place, self.positions) if self.max_context_len else None
        else:
            mask = masks.full_mask(
                place,
                self.positions,
                self.all_q_heads,
                self.slots,
                is_qk_swapped=self.mask == "swapped",
                **visible,
            )
        fp8_scale = (lambda s: torch.full((128, 1), s)) if self.seed % 2 else (lambda s: torch.tensor([[s]]))
        groups = [[world[c * self.kvdp + k] for k in range(self.kvdp)] for c in range(self.cp)]
        across = [[world[c * self.kvdp + k] for c in range(self.cp)] for k in range(self.kvdp)]
        projected = bool(self.out)
        return {
            "X": x,
            "X_hidden_dim_actual": self.hidden - self.x_padding if self.x_padding else None,
            "rmsnorm_X_enabled": bool(self.rmsnorm_x),
            "rmsnorm_X_eps": None,
            "rmsnorm_X_gamma": gamma if self.rmsnorm_x == "gamma" else None,
            "W_qkv": t["w"][:, columns] if self.qkv_type == "NONE" else t["qkv_weight"].columns(columns),
            **self.scale_arguments(columns, rows),
            "bias_qkv": t["bias"][:, columns] if self.bias else None,
            "quantization_type_qkv": QuantizationType[self.qkv_type],
            "rmsnorm_QK_pre_rope_enabled": bool(self.pre),
            "rmsnorm_QK_pre_rope_eps": 1e-5,
            "rmsnorm_QK_pre_rope_W_Q": t["pre_q"] if self.pre == "gamma" else None,
            "rmsnorm_QK_pre_rope_W_K": t["pre_k"] if self.pre == "gamma" else None,
            "cos": t["cos"] if self.rope else None,
            "sin": t["sin"] if self.rope else None,
            "rope_contiguous_layout": "contiguous" in self.rope,
            "rmsnorm_QK_post_rope_enabled": bool(self.post),
            "rmsnorm_QK_post_rope_eps": 1e-5,
            "rmsnorm_QK_post_rope_W_Q": t["post_q"] if self.post == "gamma" else None,
            "rmsnorm_QK_post_rope_W_K": t["post_k"] if self.post == "gamma" else None,
            "K_cache_transposed": self.cache == "flat_t",
            "active_blocks_table": table,
            "K_cache": k_cache,
            "V_cache": v_cache,
            "attention_mask": mask,
            "sink": t["sink"] if self.sink else None,
            "update_cache": self.update,
            "kv_cache_update_idx": update if self.update or self.seed % 2 else None,
            "W_out": (t["w_out"][rows] if self.out_type == "NONE" else t["out_weight"].rows(rows))
            if projected
            else None,
            "bias_out": t["bias_out"] if self.out == "bias" else None,
            "quantization_type_out": QuantizationType[self.out_type],
            "transposed_out": self.out == "transposed",
            "out_in_sb": self.in_sb,
            "transposed_in": self.transposed_in,
            "softmax_scale": self.softmax_scale if self.scale else None,
            "fp8_packed": self.cache.startswith("packed"),
            "k_scale": fp8_scale(self.k_scale) if self.fp8 else None,
            "v_scale": fp8_scale(self.v_scale) if self.fp8 else None,
            "skip_attention": self.skip_attention,
            "is_h_transposed_by_4": self.by_4,
            "KVDP": self.kvdp,
            "KVDP_replica_group": ReplicaGroup(groups) if self.kvdp > 1 else None,
            "KVDP_collective_mode": KVDPCollectiveMode[self.kvdp_mode] if self.kvdp_mode else None,
            "KVDP_rank": rank_tensors_tkg.kvdp_rank(place) if self.kvdp > 1 else None,
            "pos_ids": pos,
            "swa_start_pos_ids": swa,
            "S_ctx": s_ctx,
            "max_context_len": longest,
            "dtype_mode": DtypeMode[self.dtype_mode],
            "CP": self.cp,
            "CP_replica_group": ReplicaGroup(across) if self.cp > 1 else None,
            "CP_collective_mode": CPCollectiveMode[self.cp_mode] if self.cp_mode else None,
            "is_qk_swapped": self.mask == "swapped",
            "lnc": self.lnc,
            "target": self.target,
        }
