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
from .dma import dma_copy
from .gpsimd import affine_select, iota
from .registers import register_alloc, register_load, register_move, register_store
from .scalar import activation, activation_reduce
from .target import get_nc_sub_version, get_nc_version
from .tensor import nc_matmul, nc_transpose
from .vector import memset, tensor_copy, tensor_reduce, tensor_scalar, tensor_tensor

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
    "activation",
    "activation_reduce",
    "affine_select",
    "core_barrier",
    "dge_mode",
    "dma_copy",
    "dma_engine",
    "engine",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "matmul_perf_mode",
    "memset",
    "nc_matmul",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "sendrecv",
    "tensor_copy",
    "tensor_engine",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_tensor",
    "unknown_engine",
    "vector_engine",
]
