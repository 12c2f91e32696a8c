"""attention_const_max: layouts of Q and K, cores over heads or over queries, sizes that are no multiple of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nki_parallel_attn.ops.attention_const_max import HEAD_DIM, attention_const_max
from nki_parallel_attn.topology.types import AttentionLayout
from nki_parallel_attn.validation.case import Case, Deviation, Place, compare
from nki_parallel_attn.validation.oracle import dense_attention
from nki_parallel_attn.validation.tolerance import attention_tolerance

KERNEL = "attention_const_max"
LAYOUTS = {
    "q_head_k_head": (AttentionLayout.HEAD_MAJOR, AttentionLayout.HEAD_MAJOR),
    "q_head_k_seq": (AttentionLayout.HEAD_MAJOR, AttentionLayout.SEQ_MAJOR),
    "q_seq_k_head": (AttentionLayout.SEQ_MAJOR, AttentionLayout.HEAD_MAJOR),
    "q_seq_k_seq": (AttentionLayout.SEQ_MAJOR, AttentionLayout.SEQ_MAJOR),
}
SIZES = {
    "two_heads": (2, 256, 512),
    "odd_heads": (3, 256, 256),
    "ragged": (1, 601, 1153),
    "tensor_max": (2, 129, 200),
}
"""Heads, queries and keys of each scenario."""
# Of scores with standard deviation 1; the result does not depend on it.
SOFTMAX_MAX = 4.5


@dataclass(frozen=True)
class ConstMaxCase(Case):
    """Random normal Q, K and V: scaled scores have standard deviation 1."""

    def exists_on(self, backend: str, target: str) -> bool:
        return backend == "torch" or self.dtype == "bfloat16"

    def run(self, place: Place) -> Deviation:
        heads, queries, keys = SIZES[self.scenario]
        generator = place.generator(self)
        q, k, v = (
            torch.randn(heads, rows, HEAD_DIM, generator=generator).to(self.torch_dtype)
            for rows in (queries, keys, keys)
        )
        q_layout, k_layout = LAYOUTS[self.layout]
        arguments: dict[str, object] = {"q_hbm": _in_layout(q, q_layout), "k_hbm": _in_layout(k, k_layout), "v_hbm": v}
        softmax_max = torch.full((HEAD_DIM, 1), SOFTMAX_MAX) if self.scenario == "tensor_max" else SOFTMAX_MAX
        out = attention_const_max(
            **place.to_device({**arguments, "softmax_max": softmax_max}),  # type: ignore[arg-type]
            q_layout=q_layout,
            k_layout=k_layout,
            backend=place.backend,
            lnc=self.lnc,
            target=place.target,
        )
        expected = dense_attention(q, k, v, torch.full((queries,), keys - 1), scale=HEAD_DIM**-0.5)
        return compare(out, expected, self.torch_dtype, attention_tolerance(self.torch_dtype, v, HEAD_DIM))


def _in_layout(t: Tensor, layout: AttentionLayout) -> Tensor:
    return t.transpose(1, 2).contiguous() if layout is AttentionLayout.HEAD_MAJOR else t


def const_max_cases() -> Iterator[Case]:
    """All layouts with two heads; the other sizes and dtypes in one layout. Ranks do not work together here."""
    for lnc in (1, 2):
        for layout in LAYOUTS:
            yield ConstMaxCase(KERNEL, layout, "two_heads", "bfloat16", 1, lnc)
        for scenario in SIZES:
            if scenario != "two_heads":
                yield ConstMaxCase(KERNEL, "q_head_k_seq", scenario, "bfloat16", 1, lnc)
        for dtype in ("float16", "float32"):
            yield ConstMaxCase(KERNEL, "q_seq_k_seq", "two_heads", dtype, 1, lnc)
