"""Elements moved to where an index or a mask says, within SBUF and PSUM.

Source: nki/api/nki/isa/__init__.py, nc_stream_shuffle (Vector Engine), nc_n_gather and local_gather (GpSimd Engine).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..dtypes import uint16, uint32
from ..enums import engine
from ..instruction import Call, instruction
from ..operand_checks import require_same_partitions
from ..tensor import NkiTensor
from .alu import flat_bits, unsigned
from .gpsimd import PARTITIONS_PER_CORE

QUADRANT = 32
_KEEP = 255


@instruction(engine=engine.vector, reads=("src",), writes=("dst",), any_partition=("src", "dst"))
def nc_stream_shuffle(
    call: Call, dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None
) -> None:
    """Partition i of each quadrant of 32 of dst = partition shuffle_mask[i] of that quadrant of src, bit for bit.

    Args:
        shuffle_mask: 32 entries, 0 to 31, or 255 for a partition of dst that stays as it is.
    """
    if dst.dtype != src.dtype:
        call.fail("matching-dtype", f"src is {src.dtype}, dst {dst.dtype}")
    if dst.free_size != src.free_size:
        call.fail("same-elements", f"dst has {dst.free_size} elements per partition, src has {src.free_size}")
    mask = list(shuffle_mask)
    if len(mask) != QUADRANT or any(not 0 <= entry < QUADRANT and entry != _KEEP for entry in mask):
        call.fail("shuffle-mask", f"shuffle_mask is {mask}, expected 32 entries of 0 to 31 or 255")
    _check_start_partitions(call, dst, src)
    chosen = [mask[p % QUADRANT] for p in range(dst.shape[0])]
    moved = [p for p, entry in enumerate(chosen) if entry != _KEEP]
    sources = [p // QUADRANT * QUADRANT + chosen[p] for p in moved]
    if sources and max(sources) >= src.shape[0]:
        call.fail("shuffle-mask", f"shuffle_mask names partition {max(sources)} of a src of {src.shape[0]} partitions")
    if not call.core.computes or not moved:
        call.marked = not moved
        return
    rows = flat_bits(src).index_select(0, torch.tensor(sources))
    if len(moved) == dst.shape[0]:
        dst.put_raw(rows.view(dst.format.torch))
        return
    result = flat_bits(dst).index_copy(0, torch.tensor(moved), rows)
    dst.put_raw(result.view(dst.format.torch))
    written = torch.zeros(dst.shape, dtype=torch.bool)
    written[moved] = True
    call.mark_written_where(dst, written)


def _check_start_partitions(call: Call, dst: NkiTensor, src: NkiTensor) -> None:
    if not call.core.checking:
        return
    active = -(-max(dst.shape[0], src.shape[0]) // QUADRANT) * QUADRANT
    step = {32: 32, 64: 64}.get(active, 128)
    for operand, tensor in (("dst", dst), ("src", src)):
        if tensor.partition % step:
            call.fail(
                "shuffle-start-partition", f"{operand} starts at partition {tensor.partition}, {active} are active"
            )


@instruction(
    engine=engine.gpsimd,
    reads=("data", "indices"),
    writes=("dst",),
    elementwise=("indices", "dst"),
    dtypes={"indices": (uint32,)},
    deferred_read=True,
)
def nc_n_gather(call: Call, dst: NkiTensor, data: NkiTensor, indices: NkiTensor, name: str | None = None) -> None:
    """dst[p, i] = data[p, indices[p, i]], the free dimensions of data flattened; bit for bit.

    Args:
        indices: uint32, each below data's elements per partition.
    """
    require_same_partitions(call, data=data, indices=indices)
    if dst.dtype != data.dtype:
        call.fail("matching-dtype", f"data is {data.dtype}, dst {dst.dtype}")
    if call.core.checks.uninitialised:
        call.check_written("indices", indices)
    if call.core.computes:
        _gather(call, dst, data, unsigned(indices).reshape(indices.shape[0], -1), "data")


@instruction(
    engine=engine.gpsimd,
    reads=("src_buffer", "index"),
    writes=("dst",),
    dtypes={"index": (uint16,)},
    deferred_read=True,
)
def local_gather(
    call: Call,
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    name: str | None = None,
) -> None:
    """Each 16 partitions gather, in all of them, the elements at the offsets that these partitions of `index` hold.

    dst's partitions hold, for each index, `num_elem_per_idx` successive elements from it on; bit for bit.

    Args:
        index: uint16 [P, ...]; the indices of 16 partitions are read with the partition running fastest.
        num_elem_per_idx: 1, 2, 4, 8, 16 or 32.
        num_valid_indices: how many of the indices of 16 partitions are used; all when None. At most 4096.
    """
    require_same_partitions(call, src_buffer=src_buffer, index=index, dst=dst)
    if dst.dtype != src_buffer.dtype:
        call.fail("matching-dtype", f"src_buffer is {src_buffer.dtype}, dst {dst.dtype}")
    partitions, available = index.shape[0], PARTITIONS_PER_CORE * index.free_size
    count = available if num_valid_indices is None else num_valid_indices
    if partitions % PARTITIONS_PER_CORE:
        call.fail("gather-size", f"{partitions} partitions, expected a multiple of 16")
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        call.fail("gather-size", f"num_elem_per_idx is {num_elem_per_idx!r}, expected 1, 2, 4, 8, 16 or 32")
    if not 1 <= count <= min(available, 4096):
        call.fail("gather-size", f"{count} valid indices per core, of {available}, at most 4096")
    if dst.free_size != count * num_elem_per_idx:
        call.fail(
            "same-elements",
            f"dst has {dst.free_size} elements per partition, expected {count} x {num_elem_per_idx}",
        )
    if call.core.checks.uninitialised:
        call.check_written("index", index)
    if not call.core.computes:
        return
    cores = unsigned(index).reshape(-1, PARTITIONS_PER_CORE, index.free_size)
    first = cores.transpose(1, 2).reshape(-1, available)[:, :count]
    places = (first[:, :, None] + torch.arange(num_elem_per_idx)).reshape(first.shape[0], -1)
    _gather(call, dst, src_buffer, places.repeat_interleave(PARTITIONS_PER_CORE, 0), "src_buffer")


def _gather(call: Call, dst: NkiTensor, data: NkiTensor, places: torch.Tensor, operand: str) -> None:
    """dst[p, i] = data[p, places[p, i]], places int64 [P, N]."""
    try:
        gathered = torch.gather(flat_bits(data), 1, places)
    except RuntimeError:
        outside = (places < 0) | (places >= data.free_size)
        if not bool(outside.any()):
            raise
        where = outside.nonzero()[0].tolist()
        call.fail(
            "dynamic-bounds",
            f"index {int(places[tuple(where)])} at {where} is outside the {data.free_size} elements of a partition of "
            f"{operand}",
        )
    _check_gathered(call, data, places, operand)
    dst.put_raw(gathered.view(dst.format.torch))


def _check_gathered(call: Call, data: NkiTensor, places: torch.Tensor, operand: str) -> None:
    """Refuse to gather what was never written."""
    storage = data.storage
    if storage.full or not call.core.checks.uninitialised:
        return
    flags = data.flag_view(storage.flags(data.dtype.itemsize), storage.grain)
    written = flags.reshape(data.shape[0], data.free_size, -1).all(-1)
    if not np.take_along_axis(written, places.numpy(), 1).all():
        call.check_written(operand, data)
