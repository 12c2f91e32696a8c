"""Pseudo-instructions for what nki.language documents as a result without naming the instructions behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..enums import engine
from ..instruction import Call, instruction
from ..tensor import NkiTensor


@instruction(engine=engine.dma, writes=("dst",))
def fill(call: Call, dst: NkiTensor, values: torch.Tensor) -> None:
    """dst = host-side float32 `values`, rounded."""
    if call.core.computes:
        dst.put(values)


@instruction(engine=engine.vector, reads=("inputs",), writes=("dst",), any_partition=("inputs", "dst"))
def composite(
    call: Call, dst: NkiTensor, inputs: list[NkiTensor], function: Callable[..., torch.Tensor], name: str | None = None
) -> None:
    """dst = function(*inputs) in float32, rounded to dst's dtype."""
    if call.core.computes:
        dst.put(function(*(tensor.f32() for tensor in inputs)))


@instruction(engine=engine.vector, reads=("data", "indices"), writes=("dst",), elementwise=("indices", "dst"))
def gather(call: Call, dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> None:
    """dst[p, i] = data[p, indices[p, i]] over flattened free dimensions."""
    if not call.core.computes:
        return
    flat = data.f32().reshape(data.shape[0], -1)
    index = indices.raw.to(torch.int64).reshape(indices.shape[0], -1)
    if bool(((index < 0) | (index >= flat.shape[1])).any()):
        call.fail("dynamic-bounds", f"an index is outside the {flat.shape[1]} elements of a partition of data")
    dst.put(torch.gather(flat, 1, index))


__all__: list[Any] = ["composite", "fill", "gather"]
