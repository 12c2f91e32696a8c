"""Enumerations of nki.isa and nki.language (nki/api/nki/isa/__init__.py, nki/api/nki/language/__init__.py)."""

from __future__ import annotations

from enum import Enum


class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    def __repr__(self) -> str:
        return f"nl.{self.value}"


class engine(Enum):
    """Engines of a NeuronCore."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    """What an instruction does to its engine's accumulator registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who generates DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a DMA does with a dynamic address outside its tensor."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Throughput mode of nc_matmul."""

    none = "none"
    double_row = "double_row"


class nc_version(Enum):
    """Generation of the NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """Transfer engine of sendrecv."""

    dma = 1
    gpsimd_dma = 2


HBM_REGIONS = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)
ON_CHIP_REGIONS = (MemoryRegion.sbuf, MemoryRegion.psum)
