"""Mean and variance on the Vector Engine. Source: nki/api/nki/isa/__init__.py, bn_stats, bn_aggr."""

from __future__ import annotations

import torch

from ..enums import engine
from ..instruction import Call, instruction
from ..operand_checks import require_same_partitions
from ..tensor import NkiTensor
from .alu import flat

BN_STATS_FMAX = 512


@instruction(engine=engine.vector, reads=("data",), writes=("dst",))
def bn_stats(call: Call, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst = count, mean and variance * count of the even elements of each partition, then of the odd ones; float32."""
    require_same_partitions(call, data=data, dst=dst)
    count = data.free_size
    if dst.free_size != 6:
        call.fail("bn-stats-size", f"dst has {dst.free_size} elements per partition, expected 6")
    call.require(count <= BN_STATS_FMAX, "bn-stats-size", f"data has {count} elements per partition, at most 512")
    if not call.core.computes:
        return
    values = flat(data)
    result = torch.zeros(values.shape[0], 6)
    for start, half in ((0, values[:, 0::2]), (3, values[:, 1::2])):
        if half.shape[1]:
            mean = half.mean(1, keepdim=True)
            result[:, start] = half.shape[1]
            result[:, start + 1] = mean[:, 0]
            result[:, start + 2] = (half - mean).square_().sum(1)
    dst.put(result)


@instruction(engine=engine.vector, reads=("data",), writes=("dst",))
def bn_aggr(call: Call, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """dst = mean and population variance of what (count, mean, variance * count) triples of data describe; float32."""
    require_same_partitions(call, data=data, dst=dst)
    if dst.free_size != 2:
        call.fail("bn-stats-size", f"dst has {dst.free_size} elements per partition, expected 2")
    if data.free_size % 3:
        call.fail("bn-stats-size", f"data has {data.free_size} elements per partition, expected a multiple of 3")
    if not call.core.computes:
        return
    count, mean, spread = flat(data).reshape(data.shape[0], -1, 3).unbind(-1)
    total = count.sum(1, keepdim=True)
    average = (count * mean).sum(1, keepdim=True) / total
    variance = (spread + count * (mean - average).square()).sum(1, keepdim=True) / total
    dst.put(torch.cat((average, variance), 1))
