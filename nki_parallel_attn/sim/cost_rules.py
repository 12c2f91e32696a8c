"""How long an instruction of a compute engine occupies it, in the engine's cycles, from its operands.

A rule takes the call and the constants and returns Cycles. Rules are found by instruction name; an instruction that has
none raises, so nothing is ever free by omission. DMA is in cost_dma.py, communication in cost_collectives.py.

N is the number of elements per partition that stream through the engine: the largest operand's free size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .cost_constants import Costs
from .dtypes import FLOAT8, bfloat16, float16, float32
from .enums import MemoryRegion, engine
from .errors import UnsupportedInstructionError
from .instruction import Call
from .ops import rsqrt
from .tensor import NkiTensor


class Cycles(NamedTuple):
    """Cost of one instruction.

    Attributes:
        issue: cycles until the engine can start its next instruction.
        elements: N, which decides whether the instruction is too short to hide its fixed cost.
        load: cycles of loading the stationary tile (Tensor Engine).
        flops: useful floating-point operations (matrix multiplications; transposes do none).
    """

    issue: float
    elements: int = 1 << 30
    load: float = 0.0
    flops: int = 0


Rule = Callable[[Call, Costs], Cycles]

_SBUF = MemoryRegion.sbuf
_PSUM = MemoryRegion.psum
_FAST_FLOATS = frozenset((bfloat16, float16, *FLOAT8))


def cycles_of(call: Call, costs: Costs) -> Cycles:
    """Cost of a compute instruction.

    Raises:
        UnsupportedInstructionError: it has no rule.
    """
    rule = RULES.get(call.name)
    if rule is None:
        raise UnsupportedInstructionError(f"the cost model has no rule for {call.name}")
    return rule(call, costs)


# Tensor Engine.


def _multiply(call: Call, costs: Costs) -> Cycles:
    """A matmul issues every max(columns, 64) cycles; float32 takes 4 passes, 2 where it only moves data."""
    work, stationary, moving = call.work, call.argument("stationary"), call.argument("moving")
    passes = 1
    transposes = False
    if call.name == "nc_matmul":
        transposes = call.argument("is_transpose")
        if stationary.dtype == float32 or moving.dtype == float32:
            moves = (
                transposes
                or (call.argument("is_stationary_onezero") and stationary.dtype == float32)
                or (call.argument("is_moving_onezero") and moving.dtype == float32)
            )
            passes = costs.float32_move_passes if moves else costs.float32_passes
    rows, columns = work["rows"], work["columns"]
    flops = 0 if transposes else 2 * rows * columns * work["contraction"]
    return _array_pass(costs, rows, columns, passes, _width(stationary, costs), _width(moving, costs), flops)


def _array_pass(
    costs: Costs, rows: int, columns: int, passes: int, load_width: int, move_width: int, flops: int
) -> Cycles:
    issue = max(columns, costs.matmul_min_cycles) * passes * move_width
    return Cycles(issue, load=rows * passes * load_width / costs.load_speedup, flops=flops)


def _transpose(call: Call, costs: Costs) -> Cycles:
    data = call.argument("data")
    if call.engine is not engine.tensor:
        return _one_input(call, costs)
    passes = costs.float32_move_passes if data.dtype == float32 else 1
    return _array_pass(costs, data.free_size, data.shape[0], passes, _width(data, costs), 1, 0)


# Vector, Scalar and GpSimd Engine.


def _width(tensor: NkiTensor, costs: Costs) -> int:
    """2 when the innermost stride is so wide that memory delivers half its rate, else 1."""
    shape, strides = tensor.shape, tensor.strides
    for dim in range(len(shape) - 1, 0, -1):
        if shape[dim] > 1:
            return 2 if strides[dim] * tensor.dtype.itemsize > costs.wide_stride_bytes else 1
    return 1


def _streamed(call: Call, costs: Costs, cycles_per_element: float, elements: int | None = None) -> Cycles:
    """N elements, or `elements`, at so many cycles each, twice that where an operand is widely strided."""
    count, wide = 1, False
    limit = costs.wide_stride_bytes
    for tensors in (call.reads, call.writes):
        for tensor in tensors:
            shape = tensor.shape
            if len(shape) == 2:
                size = shape[1]
                wide = wide or (size > 1 and tensor.strides[1] * tensor.dtype.itemsize > limit)
            else:
                size = tensor.size // shape[0]
                wide = wide or _width(tensor, costs) == 2
            if size > count:
                count = size
    if elements is not None:
        count = elements
    cycles = count * cycles_per_element * (2 if wide else 1)
    return Cycles(cycles if cycles > costs.min_cycles else costs.min_cycles, count)


def _one_input(call: Call, costs: Costs) -> Cycles:
    return _streamed(call, costs, 1.0)


def _two_inputs(call: Call, costs: Costs) -> Cycles:
    return _streamed(call, costs, 2.0)


def _produced(call: Call, costs: Costs) -> Cycles:
    """What is read is looked up, not streamed: the destination counts."""
    return _streamed(call, costs, 1.0, call.writes[0].free_size)


def _speedup(call: Call, costs: Costs, src: NkiTensor, dst: NkiTensor) -> int:
    """Vector performance mode of tensor_copy and tensor_scalar: 4 contiguous SBUF, 2 strided or one side PSUM."""
    for tensor in (src, dst):
        if tensor.dtype not in _FAST_FLOATS or tensor.dtype.itemsize not in costs.fast_itemsizes:
            return 1
    contiguous = _inner_stride(src) == 1 and _inner_stride(dst) == 1
    in_psum = (src.storage.region is _PSUM) + (dst.storage.region is _PSUM)
    if in_psum == 0:
        return costs.vector_copy_speedup if contiguous else costs.vector_copy_speedup // 2
    return costs.vector_copy_speedup // 2 if in_psum == 1 and contiguous else 1


def _inner_stride(tensor: NkiTensor) -> int:
    for dim in range(len(tensor.shape) - 1, 0, -1):
        if tensor.shape[dim] > 1:
            return tensor.strides[dim]
    return 1


def _copy(call: Call, costs: Costs) -> Cycles:
    return _perhaps_fast(call, costs, call.argument("src"))


def _scalar_operands(call: Call, costs: Costs) -> Cycles:
    if call.engine is engine.gpsimd:
        slow = rsqrt in (call.argument("op0"), call.argument("op1"))
        return _streamed(call, costs, costs.rsqrt_factor if slow else 1.0)
    return _perhaps_fast(call, costs, call.argument("data"))


def _perhaps_fast(call: Call, costs: Costs, src: NkiTensor) -> Cycles:
    if call.engine is engine.gpsimd:
        return _streamed(call, costs, 1.0)
    speedup = _speedup(call, costs, src, call.writes[0])
    if call.engine is engine.scalar:
        speedup = min(speedup, costs.scalar_copy_speedup)
    return _streamed(call, costs, 1.0 / speedup)


def _two_tensors(call: Call, costs: Costs) -> Cycles:
    if call.engine is engine.vector:
        tensors = [call.argument(operand) for operand in ("data1", "data2", "dst")]
        narrow = all(t.dtype in _FAST_FLOATS and t.dtype.itemsize in costs.fast_itemsizes for t in tensors)
        if narrow and all(t.storage.region is _SBUF for t in tensors[:2]):
            return _streamed(call, costs, 1.0)
    return _streamed(call, costs, 2.0)


def _activate(call: Call, costs: Costs) -> Cycles:
    """One pass, whatever it fuses; reading the accumulators out is an instruction of its own."""
    cycles = _streamed(call, costs, 1.0)
    if call.argument("reduce_res") is None:
        return cycles
    return Cycles(cycles.issue + costs.accumulator_cycles, cycles.elements)


def _reciprocal(call: Call, costs: Costs) -> Cycles:
    return _streamed(call, costs, costs.reciprocal_factor)


def _exponential(call: Call, costs: Costs) -> Cycles:
    return _streamed(call, costs, 1.0 / costs.exponential_speedup)


def _quantize(call: Call, costs: Costs) -> Cycles:
    return _streamed(call, costs, 1.0 / costs.quantize_speedup, call.argument("src").free_size)


def _random(call: Call, costs: Costs) -> Cycles:
    return _streamed(call, costs, 1.0 / costs.random_speedup if call.engine is engine.vector else 1.0)


def _topk(call: Call, costs: Costs) -> Cycles:
    chosen = call.argument("val_dst").free_size
    return Cycles(costs.topk_factor * call.argument("n") + chosen, call.argument("n"))


def _several(call: Call, costs: Costs) -> Cycles:
    """A function of nki.language without an instruction of its own: one pass for each input."""
    return _streamed(call, costs, float(len(call.argument("inputs"))))


def _sequencer(call: Call, costs: Costs) -> Cycles:
    return Cycles(0.0)


RULES: dict[str, Rule] = {
    "nc_matmul": _multiply,
    "nc_matmul_mx": _multiply,
    "nc_transpose": _transpose,
    "tensor_copy": _copy,
    "tensor_scalar": _scalar_operands,
    "tensor_tensor": _two_tensors,
    "activation": _activate,
    "activation_reduce": _activate,
    "activate2": _activate,
    "reciprocal": _reciprocal,
    "exponential": _exponential,
    "quantize_mx": _quantize,
    "rng": _random,
    "rand2": _random,
    "topk": _topk,
    "composite": _several,
    **dict.fromkeys(
        (
            "affine_select", "bn_aggr", "bn_stats", "dropout", "iota", "max8", "memset", "nc_find_index8",
            "nc_match_replace8", "nc_stream_shuffle", "nonzero_with_count", "range_select", "sequence_bounds",
            "set_rng_seed", "rand_get_state", "rand_set_state", "tensor_partition_reduce", "tensor_reduce",
            "tensor_scalar_cumulative", "tensor_scalar_reduce",
        ),
        _one_input,
    ),
    **dict.fromkeys(
        ("scalar_tensor_tensor", "select_reduce", "tensor_copy_predicated", "tensor_tensor_scan"), _two_inputs
    ),
    **dict.fromkeys(("gather", "local_gather", "nc_n_gather"), _produced),
    **dict.fromkeys(("_processing_rank", "_rank_id", "register_load", "register_move", "register_store"), _sequencer),
}  # fmt: skip
