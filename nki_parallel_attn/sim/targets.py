"""Hardware limits of each target, in one table.

Sources: nki/guides/architecture/trainium_inferentia2_arch.rst, trainium2_arch.rst and trainium3_arch.rst (SBUF, PSUM,
HBM); nki/api/nki.language.tile_size.rst (names); nki/api/nki/isa/__init__.py, nc_matmul and bn_stats (tile limits);
nki/library/kernel-utils/allocator.rst (on trn3 the whole 256 KiB of an SBUF partition can be addressed);
nki/guides/nki_simulator.rst (target names, and trn3 when none is given).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from .enums import nc_version

KIB = 1024
GIB = 1024**3


@dataclass(frozen=True)
class Target:
    """One NeuronCore generation.

    Attributes:
        partition_bytes: bytes of one SBUF partition.
        hbm_bytes: HBM of one logical core at LNC 2, in bytes.
        moving_limit: largest free size of nc_matmul's moving tile into float32.
        max_lnc: physical cores that one logical core may join.
    """

    name: str
    version: nc_version
    partition_bytes: int
    hbm_bytes: int
    moving_limit: int
    max_lnc: int
    partitions: int = 128
    psum_banks: int = 8
    psum_bank_bytes: int = 2 * KIB
    gemm_stationary_fmax: int = 128
    gemm_moving_fmax: int = 512
    bn_stats_fmax: int = 512
    cores_per_chip: int = 8
    chips_per_node: int = 16

    @property
    def psum_partition_bytes(self) -> int:
        """Bytes of one PSUM partition."""
        return self.psum_banks * self.psum_bank_bytes

    def ranks_per_node(self, lnc: int) -> int:
        """Logical cores of one instance."""
        return self.cores_per_chip // lnc * self.chips_per_node

    def at_least(self, version: nc_version) -> bool:
        """Whether this target is of generation `version` or newer."""
        return self.version.value >= version.value


TRN1 = Target("trn1", nc_version.gen2, 192 * KIB, 16 * GIB, 512, 1, cores_per_chip=2)
TRN2 = Target("trn2", nc_version.gen3, 224 * KIB, 24 * GIB, 512, 2)
TRN3 = Target("trn3", nc_version.gen4, 256 * KIB, 36 * GIB, 4096, 2)

_BY_NAME = {"trn1": TRN1, "gen2": TRN1, "trn2": TRN2, "gen3": TRN2, "trn3": TRN3, "gen4": TRN3}
ENVIRONMENT_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"


def get_target(name: str | Target | None = None) -> Target:
    """The target called `name`; without a name, the one the environment asks for, else trn3.

    Raises:
        ValueError: no target has that name.
    """
    if isinstance(name, Target):
        return name
    asked = name or os.environ.get(ENVIRONMENT_VARIABLE) or "trn3"
    if asked.lower() not in _BY_NAME:
        origin = "target" if name else ENVIRONMENT_VARIABLE
        raise ValueError(f"{origin} is {asked!r}, expected one of {sorted(_BY_NAME)}")
    return _BY_NAME[asked.lower()]
