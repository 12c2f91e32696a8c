"""nki.isa: one function per hardware instruction, grouped by the engine that runs it."""

from __future__ import annotations

from ..enums import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from ..errors import NkiValidationError
from ..instruction import NkiInstruction
from ..registers import VirtualRegister
from .cores import core_barrier, sendrecv
from .dma import dma_compute, dma_copy, dma_transpose
from .gather import local_gather, nc_n_gather, nc_stream_shuffle
from .gpsimd import affine_select, iota, nonzero_with_count, sequence_bounds, tensor_partition_reduce
from .mx import nc_matmul_mx, quantize_mx
from .random import dropout, rand2, rand_get_state, rand_set_state, rng, set_rng_seed
from .registers import register_alloc, register_load, register_move, register_store
from .scalar import activate2, activation, activation_reduce
from .scan import tensor_scalar_cumulative, tensor_tensor_scan
from .search import max8, nc_find_index8, nc_match_replace8, topk
from .select import range_select, select_reduce, tensor_copy_predicated
from .statistics import bn_aggr, bn_stats
from .target import get_nc_sub_version, get_nc_version
from .tensor import nc_matmul, nc_transpose
from .vector import memset, reciprocal, scalar_tensor_tensor, tensor_copy, tensor_reduce, tensor_scalar, tensor_tensor
from .vector_reduce import exponential, tensor_scalar_reduce

# Deprecated names of the engines.
tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown

__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "dropout",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "local_gather",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "rand_get_state",
    "rand_set_state",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "rng",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "sequence_bounds",
    "set_rng_seed",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "topk",
    "unknown_engine",
    "vector_engine",
]
