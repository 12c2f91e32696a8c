"""The platform table against the totals that the vendor's pages print, and the collective rules at their edges."""

import dataclasses

import pytest

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology.mesh import RankMesh
from nki_parallel_attn.topology.platforms import GB, GIB, PLATFORMS, SOURCES, TARGETS, Platform, platform_for
from nki_parallel_attn.topology.types import KVDPCollectiveMode

TRN2, ULTRA2 = PLATFORMS["trn2.48xlarge"], PLATFORMS["trn2-ultraserver"]
GEN1, GEN2 = PLATFORMS["trn3-ultraserver-gen1"], PLATFORMS["trn3-ultraserver-gen2"]


@pytest.mark.parametrize(
    # Totals as trn2-arch.rst and trn3-arch.rst print them: chips, device memory GiB, its bandwidth TB/s, EFA Gbit/s.
    ("platform", "chips", "memory", "bandwidth", "efa"),
    [
        (TRN2, 16, 1_536, 46.4, 3_200),
        (ULTRA2, 64, 6_144, 185.6, 4 * 3_200),
        (GEN1, 64, 9_216, 313.6, 12_800),
        (GEN2, 144, 20_736, 705.6, 28_800),
    ],
)
def test_rows_add_up_to_the_published_totals(platform, chips, memory, bandwidth, efa):
    assert platform.chips == chips
    assert platform.chips * platform.hbm_bytes_per_chip == memory * GIB
    assert platform.chips * platform.hbm_bandwidth_per_chip == round(bandwidth * 1000) * GB
    assert platform.chips * platform.efa_bandwidth_per_chip * 8 == efa * GB
    for lnc in (1, 2):
        assert platform.ranks(lnc) == chips * 8 // lnc
        assert platform.ranks(lnc) * platform.hbm_bytes_per_rank(lnc) == memory * GIB
    assert platform.target in TARGETS


def test_figures_of_one_rank():
    assert TRN2.ranks(2) == TRN2.ranks_per_node(2) == 64
    assert TRN2.hbm_bytes_per_rank(2) == 24 * GIB
    assert GEN1.hbm_bytes_per_rank(2) == 36 * GIB
    assert GEN1.hbm_bandwidth_per_rank(1) == 4_900 * GB // 8


def test_every_figure_and_rule_has_a_source():
    figures = {field.name for field in dataclasses.fields(Platform)} - {"name", "target"}
    rules = {"kvdp_collective_modes", "permute_channels", "all_gather_v_refusal", "all_to_all_v_refusal"}
    assert set(SOURCES) == figures | rules
    assert all(hasattr(Platform, rule) for rule in rules)


def test_platform_for_takes_the_smallest_that_fits():
    assert platform_for("trn2", 64, 2) is TRN2
    assert platform_for("trn2", 65, 2) is ULTRA2
    assert platform_for("trn2", 4096, 2) is ULTRA2
    assert platform_for("trn2", 128, 1) is TRN2
    assert platform_for("trn3", 1, 2) is GEN1
    assert platform_for("trn3", 257, 2) is GEN2
    for target, lnc, argument in (("trn1", 2, "target"), ("trn2", 3, "lnc")):
        with pytest.raises(ArgumentError) as error:
            platform_for(target, 4, lnc)
        assert error.value.argument == argument


@pytest.mark.parametrize(("lnc", "smallest"), [(2, 4), (1, 8)])
@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=lambda platform: platform.name)
def test_kvdp_all_to_all_needs_a_chip_of_ranks(platform, lnc, smallest):
    gather = KVDPCollectiveMode.ALL_GATHER_SLICE
    assert platform.kvdp_collective_modes(smallest - 1, lnc) == (gather,)
    assert platform.kvdp_collective_modes(smallest, lnc) == (KVDPCollectiveMode.ALL_TO_ALL, gather)


def test_permute_channels():
    assert TRN2.permute_channels(ReplicaGroup([range(64)]), 2) == 4
    assert TRN2.permute_channels(ReplicaGroup([range(64)]), 1) == 2
    assert TRN2.permute_channels(ReplicaGroup([range(32), range(32, 64)]), 2) == 2
    assert GEN2.permute_channels(ReplicaGroup([range(16)]), 2) == 4


def test_all_gather_v():
    assert TRN2.all_gather_v_refusal(ReplicaGroup([range(4), range(4, 8)]), 2) is None
    assert "LNC" in TRN2.all_gather_v_refusal(ReplicaGroup([range(4)]), 1)
    assert "4 ranks" in TRN2.all_gather_v_refusal(ReplicaGroup([range(8)]), 2)
    assert "one chip" in TRN2.all_gather_v_refusal(ReplicaGroup([range(2, 6)]), 2)


def test_all_to_all_v():
    across = RankMesh({"node": 4, "place": 64}).groups("node")
    assert ULTRA2.all_to_all_v_refusal(across, 2) is None
    assert "same-indexed" in ULTRA2.all_to_all_v_refusal(ReplicaGroup([range(8)]), 2)
    assert "same-indexed" in ULTRA2.all_to_all_v_refusal(ReplicaGroup([[0, 65]]), 2)
    assert GEN1.all_to_all_v_refusal(ReplicaGroup([range(8), range(8, 16)]), 2) is None
    assert "LNC" in GEN1.all_to_all_v_refusal(ReplicaGroup([range(16)]), 1)
    for group in ([range(4)], [range(2, 10)], [[0, 1, 2, 3, 8, 9, 10, 11]], [range(6)]):
        assert "two or more chips" in GEN1.all_to_all_v_refusal(ReplicaGroup(group), 2)
