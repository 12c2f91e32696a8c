"""float8 caches, plain and packed, with scales, against the oracle on the dequantised values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nki_parallel_attn import attention_kv_parallel_segmented_cte
from nki_parallel_attn.topology.paged_cache import pack_fp8_k
from tests.kvp.case import Case
from tests.tolerance import attention_tolerance

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Quantised:
    """A case whose keys and values are what its float8 caches stand for."""

    case: Case
    k_scale: Tensor | None
    v_scale: Tensor | None

    def __post_init__(self) -> None:
        for values, scale in ((self.case.k, self.k_scale), (self.case.v, self.v_scale)):
            factor = 1.0 if scale is None else scale[: values.shape[-1], 0].double()
            stored = (values.double() / factor).to(FP8)
            values.copy_((stored.double() * factor).to(values.dtype))

    def arguments(self, rank: int, packed: bool) -> dict:
        arguments = self.case.arguments(rank)
        for name, scale in (("k", self.k_scale), ("v", self.v_scale)):
            cache = arguments[f"{name}_cache"].double()
            if scale is not None:
                cache = cache / scale[: cache.shape[-1], 0].double()
                arguments[f"{name}_scale"] = scale
            arguments[f"{name}_cache"] = cache.to(FP8)
        if packed:
            packed_k = pack_fp8_k(arguments["k_cache"].view(torch.uint8)).view(FP8)
            arguments |= {"k_cache": packed_k, "fp8_packed": True}
        return arguments


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("scales", ["none", "scalars", "per_dim"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.multirank(world_size=2)
def test_fp8(rank, packed, scales, dtype):
    # Powers of two, so that quantising, dequantising and the case's own values round once, the same way.
    generator = torch.Generator().manual_seed(5)
    k_scale = v_scale = None
    if scales != "none":
        v_scale = torch.full((128, 1), 0.25)
        k_scale = torch.full((128, 1), 0.5)
    if scales == "per_dim":
        k_scale = 2.0 ** torch.randint(-3, 3, (128, 1), generator=generator).float()
    case = Case(ranks=2, rows=96, block_size=16, prior=11, kv_heads=2, head_dim=48, dtype=dtype, padding=2)
    quantised = Quantised(case, k_scale, v_scale)
    out = attention_kv_parallel_segmented_cte(**quantised.arguments(rank, packed))
    deviation = (out[:, :-2].double() - case.expected()[case.heads_of(rank)]).abs().max()
    assert deviation <= attention_tolerance(dtype, case.v, case.head_dim)


def test_dequantisation_with_any_scale_rounds_once():
    """Scales that are no powers of two: K and V are rounded to the query's dtype once, after scaling in float32."""
    case = Case(ranks=1, rows=32, block_size=16, head_dim=16, dtype=torch.bfloat16)
    stored_k, stored_v = case.k.to(FP8), case.v.to(FP8)
    k_scale = torch.linspace(0.3, 1.7, 128)[:, None]
    v_scale = torch.full((128, 1), 0.37)
    case.k.copy_((stored_k.float() * k_scale[:16, 0]).bfloat16())
    case.v.copy_((stored_v.float() * 0.37).bfloat16())
    arguments = case.arguments(0)
    for name, stored in (("k_cache", stored_k), ("v_cache", stored_v)):
        cache = torch.zeros(arguments[name].shape, dtype=FP8)
        for block in range(2):
            physical = int(arguments["block_tables"][0, block])
            cache.view(torch.uint8)[physical] = stored.view(torch.uint8)[:, block * 16 : block * 16 + 16]
        arguments[name] = cache
    out = attention_kv_parallel_segmented_cte(**arguments, k_scale=k_scale, v_scale=v_scale)
    assert (out.double() - case.expected()).abs().max() <= attention_tolerance(case.dtype, case.v, 16)
