"""Platforms: what a Trainium machine offers a sharding plan, one table row each, every figure with its source.

Ranks are logical cores in world order: a chip's ranks are consecutive, and so are a node's chips. LNC (logical
NeuronCore configuration) is the number of physical cores fused into one rank, 1 or 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.sim.replica_group import ReplicaGroup

from .types import KVDPCollectiveMode

Target = Literal["trn2", "trn3"]
TARGETS: tuple[str, ...] = get_args(Target)
LNC_VALUES = (1, 2)

GIB = 2**30
GB = 10**9


@dataclass(frozen=True)
class Platform:
    """One machine: an instance or an UltraServer. Bandwidths in bytes per second, memory in bytes.

    Args:
        name: as AWS spells it.
        target: the chip generation that kernels are compiled for.
        nodes: servers (instances) joined by chip-to-chip links.
        chips_per_node: chips in one server.
        cores_per_chip: physical NeuronCores in one chip.
        hbm_bytes_per_chip: device memory of one chip.
        hbm_bandwidth_per_chip: device memory bandwidth of one chip.
        link_bandwidth_within_node: chip-to-chip bandwidth per chip inside a server.
        link_bandwidth_across_nodes: the same between servers of the machine; 0 where there is none.
        efa_bandwidth_per_chip: network bandwidth to other machines per chip.
        neuron_switch: chips are joined by switches (all to all) rather than a torus.
    """

    name: str
    target: Target
    nodes: int
    chips_per_node: int
    cores_per_chip: int
    hbm_bytes_per_chip: int
    hbm_bandwidth_per_chip: int
    link_bandwidth_within_node: int
    link_bandwidth_across_nodes: int
    efa_bandwidth_per_chip: int
    neuron_switch: bool

    @property
    def chips(self) -> int:
        """Chips in the whole machine."""
        return self.nodes * self.chips_per_node

    def ranks_per_chip(self, lnc: int) -> int:
        """Logical cores of one chip."""
        return self.cores_per_chip // checked_lnc(lnc)

    def ranks_per_node(self, lnc: int) -> int:
        """Logical cores of one server."""
        return self.ranks_per_chip(lnc) * self.chips_per_node

    def ranks(self, lnc: int) -> int:
        """Logical cores of the whole machine."""
        return self.ranks_per_chip(lnc) * self.chips

    def hbm_bytes_per_rank(self, lnc: int) -> int:
        """Device memory that one rank can count on: the chip's, split evenly."""
        return self.hbm_bytes_per_chip // self.ranks_per_chip(lnc)

    def hbm_bandwidth_per_rank(self, lnc: int) -> int:
        """Device memory bandwidth of one rank, the chip's split evenly."""
        return self.hbm_bandwidth_per_chip // self.ranks_per_chip(lnc)

    def kvdp_collective_modes(self, group_size: int, lnc: int) -> tuple[KVDPCollectiveMode, ...]:
        """KVDP modes of attention_block_tkg for groups of `group_size` ranks, the preferred one first.

        ALL_TO_ALL needs a chip's worth of ranks (4 at LNC2, 8 at LNC1); ALL_GATHER_SLICE takes any number.
        """
        if group_size >= self.ranks_per_chip(lnc):
            return (KVDPCollectiveMode.ALL_TO_ALL, KVDPCollectiveMode.ALL_GATHER_SLICE)
        return (KVDPCollectiveMode.ALL_GATHER_SLICE,)

    def permute_channels(self, group: ReplicaGroup, lnc: int) -> int:
        """Channels that collective_permute_implicit may use: 4 if each list holds every rank of its nodes, else 2."""
        return 4 if all(_whole(ranks, self.ranks_per_node(lnc)) for ranks in group.groups) else 2

    def all_gather_v_refusal(self, group: ReplicaGroup, lnc: int) -> str | None:
        """Why nki.collectives.all_gather_v would not run over `group`; None when it would."""
        if checked_lnc(lnc) != 2:
            return f"all_gather_v needs LNC=2, got LNC={lnc}"
        if group.group_size != 4:
            return f"all_gather_v needs exactly 4 ranks per list, got {group.group_size}"
        if any(len({rank // self.ranks_per_chip(lnc) for rank in ranks}) > 1 for ranks in group.groups):
            return "all_gather_v needs each list inside one chip"
        return None

    def all_to_all_v_refusal(self, group: ReplicaGroup, lnc: int) -> str | None:
        """Why nki.collectives.all_to_all_v would not run over `group`; None when it would."""
        if not self.neuron_switch:
            per_node = self.ranks_per_node(lnc)
            for ranks in group.groups:
                if len({rank % per_node for rank in ranks}) > 1 or len({rank // per_node for rank in ranks}) < len(
                    ranks
                ):
                    return f"all_to_all_v on {self.name} needs lists of same-indexed ranks of different nodes"
            return None
        if checked_lnc(lnc) != 2:
            return f"all_to_all_v on {self.name} needs LNC=2, got LNC={lnc}"
        per_chip = self.ranks_per_chip(lnc)
        for ranks in group.groups:
            if not _whole(ranks, per_chip) or len(ranks) == per_chip or ranks != tuple(range(ranks[0], ranks[-1] + 1)):
                return f"all_to_all_v on {self.name} needs lists of consecutive ranks that fill two or more chips"
        return None


SOURCES: dict[str, str] = {
    "nodes": "trn2-arch.rst (UltraServer: four trn2u.48xlarge); trn3-arch.rst (Gen1: 4 servers, Gen2: 36 servers)",
    "chips_per_node": "trn2-arch.rst, trn3-arch.rst",
    "cores_per_chip": "trainium2.rst, trainium3.rst",
    "hbm_bytes_per_chip": "trainium2.rst, trainium3.rst",
    "hbm_bandwidth_per_chip": "trainium2.rst, trainium3.rst",
    "link_bandwidth_within_node": "trn2-arch.rst; trainium3.rst (2.56 TB/s; trn3-arch.rst gives 2,048 GiB/s)",
    "link_bandwidth_across_nodes": "trn2-arch.rst; trainium3.rst (one switched domain, so the same figure)",
    "efa_bandwidth_per_chip": "collectives.rst (200 Gbit/s per chip); trn3-arch.rst (12,800/64 and 28,800/144 Gbit/s)",
    "neuron_switch": "trn3-arch.rst",
    "kvdp_collective_modes": "field reports for attention_block_tkg; no page states it",
    "permute_channels": "nki/api/nki/collectives: collective_permute_implicit",
    "all_gather_v_refusal": "nki/api/nki/collectives: all_gather_v, current limitations",
    "all_to_all_v_refusal": "nki/api/nki/collectives: all_to_all_v, current restrictions",
}
"""Where each figure and rule stands in the public Neuron documentation (about-neuron/arch/neuron-hardware/*.rst,
neuron-runtime/about/collectives.rst, nki/api/)."""

_TRN2: dict[str, Any] = {
    "cores_per_chip": 8,
    "hbm_bytes_per_chip": 96 * GIB,
    "hbm_bandwidth_per_chip": 2_900 * GB,
    "link_bandwidth_within_node": 1_024 * GB,
    "efa_bandwidth_per_chip": 25 * GB,
    "neuron_switch": False,
}
_TRN3: dict[str, Any] = {
    "cores_per_chip": 8,
    "hbm_bytes_per_chip": 144 * GIB,
    "hbm_bandwidth_per_chip": 4_900 * GB,
    "link_bandwidth_within_node": 2_560 * GB,
    "link_bandwidth_across_nodes": 2_560 * GB,
    "efa_bandwidth_per_chip": 25 * GB,
    "neuron_switch": True,
}

PLATFORMS: dict[str, Platform] = {
    platform.name: platform
    for platform in (
        Platform("trn2.48xlarge", "trn2", nodes=1, chips_per_node=16, link_bandwidth_across_nodes=0, **_TRN2),
        Platform("trn2-ultraserver", "trn2", nodes=4, chips_per_node=16, link_bandwidth_across_nodes=256 * GB, **_TRN2),
        Platform("trn3-ultraserver-gen1", "trn3", nodes=4, chips_per_node=16, **_TRN3),
        Platform("trn3-ultraserver-gen2", "trn3", nodes=36, chips_per_node=4, **_TRN3),
    )
}
"""Every known machine by name, smallest first for each target."""


def platform_for(target: str, world_size: int, lnc: int) -> Platform:
    """The smallest machine of `target` that holds `world_size` ranks, or the largest one when several are needed.

    Raises:
        ArgumentError: an unknown target or LNC.
    """
    rows = [platform for platform in PLATFORMS.values() if platform.target == target]
    if not rows:
        raise ArgumentError("target", repr(target), f"one of {', '.join(TARGETS)}")
    return next((platform for platform in rows if platform.ranks(lnc) >= world_size), rows[-1])


def checked_lnc(lnc: int) -> int:
    """`lnc` when it is 1 or 2.

    Raises:
        ArgumentError: any other value.
    """
    if lnc not in LNC_VALUES:
        raise ArgumentError("lnc", repr(lnc), "1 or 2")
    return lnc


def _whole(ranks: tuple[int, ...], unit: int) -> bool:
    """Whether `ranks` are all the ranks of one or more units (chips or nodes) of `unit` consecutive ranks."""
    return set(ranks) == {first * unit + i for first in {rank // unit for rank in ranks} for i in range(unit)}
