"""nl.tile_size: sizes of the target's memories and tiles (nki/api/nki.language.tile_size.rst)."""

from __future__ import annotations

import os

from ..core import running_core
from ..targets import Target, get_target
from ..tensor import NKIObject


def _target() -> Target:
    core = running_core()
    return core.target if core else get_target()


class _TileSize(NKIObject):
    """Constants of the kernel's target, or of the default target outside a kernel. Sizes in elements are of float32."""

    pmax = 128
    psum_fmax = psum_bank_fmax = 512
    psum_bank_fmax_bytes = 2048
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_min_align = 4
    sbuf_min_align = 1

    @property
    def psum_num_banks(self) -> int:
        """Usable PSUM banks: 8, or 7 when DMA transposes are lowered to the Tensor Engine, which takes the last."""
        lowered = os.environ.get("NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE", "").lower() == "true"
        return 7 if lowered and _target().name != "trn1" else 8

    @property
    def sbuf_size_bytes(self) -> int:
        """Bytes of SBUF."""
        return _target().partition_bytes * self.pmax

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Bytes of an SBUF partition."""
        return _target().partition_bytes

    @property
    def sbuf_fmax(self) -> int:
        """float32 elements of an SBUF partition."""
        return _target().partition_bytes // 4

    @property
    def total_available_sbuf_size(self) -> int:
        """Bytes of an SBUF partition (deprecated name)."""
        return _target().partition_bytes


tile_size = _TileSize()
