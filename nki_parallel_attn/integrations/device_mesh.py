"""torch DeviceMesh from a RankMesh, and NKI replica groups from a DeviceMesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from nki_parallel_attn.errors import ArgumentError
from nki_parallel_attn.sim.replica_group import ReplicaGroup
from nki_parallel_attn.topology.mesh import RankMesh


def device_mesh(mesh: RankMesh, device_type: str = "cpu") -> DeviceMesh:
    """A DeviceMesh over the axes of `mesh` that have more than one rank, under the same names; collective.

    A mesh of a single rank keeps its outermost axis, for a DeviceMesh has at least one dim.

    Raises:
        RuntimeError: torch's own, where the running world is smaller than the mesh.
    """
    from torch.distributed.device_mesh import init_device_mesh

    axes = [(name, size) for name, size in mesh.axes if size > 1] or [mesh.axes[0]]
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def replica_group(mesh: DeviceMesh, *dims: str) -> ReplicaGroup:
    """The rank lists that vary over `dims` of somebody's DeviceMesh, as NKI's collectives take them.

    Raises:
        ArgumentError: a dim that the mesh does not have.
    """
    names = mesh.mesh_dim_names or ()
    for dim in dims:
        if dim not in names:
            raise ArgumentError("dims", repr(dim), f"one of {', '.join(names) or 'none: the mesh has no dim names'}")
    varying = [names.index(dim) for dim in dims]
    fixed = [dim for dim in range(mesh.mesh.ndim) if dim not in varying]
    ranks = mesh.mesh.permute(fixed + varying).flatten(len(fixed)) if varying else mesh.mesh.unsqueeze(-1)
    return ReplicaGroup(ranks.reshape(-1, ranks.shape[-1]).tolist())
