"""How long a collective takes: latency of its steps plus bytes over bandwidth, by algorithm and span of the group.

Within a node, a mesh serves messages below 1 MB, recursive doubling and halving those up to 56 MB, rings the rest;
groups over several nodes run a stage within the node and a stage between nodes. Sources: neuron-runtime/explore/
intranode-collective-comm.rst and internode-collective-comm.rst.

N ranks, message B = the whole buffer (input of a reduce-scatter, output of an all-gather), chunk C = B / N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .cost_constants import Costs
from .errors import UnsupportedInstructionError


class Exchange(NamedTuple):
    """One collective, for one rank.

    Attributes:
        ns: from the arrival of the last rank to the end.
        latency_ns: the part that does not depend on the bytes.
        sent: bytes that one rank sends to the others.
        algorithm: mesh, one-step mesh, halving, ring or permute.
    """

    ns: float
    latency_ns: float
    sent: int
    algorithm: str


GATHERS = ("all_gather", "all_gather_v")
SCATTERS = ("reduce_scatter",)
TRANSPOSES = ("all_to_all", "all_to_all_v")
PERMUTES = ("collective_permute", "collective_permute_implicit", "collective_permute_implicit_reduce")
COLLECTIVE_RULES = (*GATHERS, *SCATTERS, *TRANSPOSES, *PERMUTES, "all_reduce")


class _Span(NamedTuple):
    """Where a group's ranks are: nodes, chips in each, ranks on each chip, and whether they fill their chips."""

    nodes: int
    chips: int
    per_chip: int
    whole_chips: bool


def exchange_of(
    name: str, ranks: Sequence[int], sources: Sequence[int], destinations: Sequence[int], lnc: int, costs: Costs
) -> Exchange:
    """Cost of collective `name` among `ranks`, with the bytes of each source and destination of one rank.

    Raises:
        UnsupportedInstructionError: it has no rule.
    """
    if name not in COLLECTIVE_RULES:
        raise UnsupportedInstructionError(f"the cost model has no rule for {name}")
    size = len(ranks)
    span = _span(ranks, lnc, costs)
    if name in PERMUTES:
        found = _permute(sum(destinations), size, span, lnc, costs)
        if name == "collective_permute_implicit_reduce":
            return found._replace(ns=found.ns + sum(sources) / (lnc * costs.dma_peak * costs.dma_compute))
        return found
    message = sum(destinations) if name in GATHERS else sum(sources)
    phases = 2 if name == "all_reduce" else 1
    sent = phases * message * (size - 1) // size
    if size == 1:
        return Exchange(message / (lnc * costs.dma_peak), 0.0, 0, "mesh")
    algorithm = "mesh"
    if name not in TRANSPOSES and message >= costs.mesh_bytes:
        algorithm = "halving" if message <= costs.halving_bytes else "ring"
    latency = phases * _latency(algorithm, span, costs)
    moved = phases * _moving(message, size, span, lnc, costs, pairwise=name in TRANSPOSES)
    found = Exchange(latency + moved, latency, sent, algorithm)
    if name == "all_reduce" and span.nodes == 1:
        # Every rank sends its whole buffer to every other: one step less, N/2 times the bytes.
        latency = costs.hop_ns
        moved = _moving(message * size, size, span, lnc, costs, pairwise=True)
        if latency + moved < found.ns:
            return Exchange(latency + moved, latency, message * (size - 1), "one-step mesh")
    return found


def _span(ranks: Sequence[int], lnc: int, costs: Costs) -> _Span:
    per_chip = costs.cores_per_chip // lnc
    chips = {rank // per_chip for rank in ranks}
    nodes = {chip // costs.chips_per_node for chip in chips}
    on_each = -(-len(ranks) // len(chips))
    return _Span(len(nodes), -(-len(chips) // len(nodes)), on_each, on_each == per_chip)


def _latency(algorithm: str, span: _Span, costs: Costs) -> float:
    """Steps within a node, and between nodes, times the time of one."""
    within = 1 if span.per_chip > 1 else 0
    if algorithm == "mesh":
        steps = within + (1 if span.chips > 1 else 0)
        node_steps = 1
    elif algorithm == "halving":
        steps = within + math.ceil(math.log2(span.chips))
        node_steps = math.ceil(math.log2(span.nodes))
    else:
        local = span.chips * span.per_chip
        steps = local // 2 if span.whole_chips and span.per_chip > 1 else local - 1
        node_steps = span.nodes - 1
    return steps * costs.hop_ns + (node_steps * costs.node_hop_ns if span.nodes > 1 else 0.0)


def _moving(message: float, size: int, span: _Span, lnc: int, costs: Costs, pairwise: bool) -> float:
    """Time to move one phase's bytes. `pairwise`: each pair of ranks has bytes of its own (all-to-all)."""
    chunk = message / size
    local = span.chips * span.per_chip
    gathered = chunk if pairwise else chunk * span.nodes
    entering = (local - span.per_chip) * gathered * (span.per_chip if pairwise else 1)
    total = (local - 1) * gathered / (lnc * costs.dma_peak)
    if span.chips > 1:
        total += entering / _link(span.chips, costs)
    if span.nodes > 1:
        foreign = (size - local) * chunk if pairwise else (span.nodes - 1) * chunk
        total += foreign * span.per_chip / costs.network_bytes_per_ns
    return total


def _permute(bytes_received: int, size: int, span: _Span, lnc: int, costs: Costs) -> Exchange:
    """One hop to the neighbour in the circle, over the slowest thing between neighbours."""
    sent = bytes_received if size > 1 else 0
    if span.nodes > 1:
        rate, latency = costs.network_bytes_per_ns, costs.node_hop_ns
    elif span.chips > 1:
        rate, latency = _link(span.chips, costs), costs.hop_ns
    else:
        rate, latency = lnc * costs.dma_peak, costs.hop_ns
    return Exchange(latency + bytes_received / min(rate, lnc * costs.dma_peak), latency, sent, "permute")


def _link(chips: int, costs: Costs) -> float:
    """B/ns into one chip from the others of a group over `chips` chips."""
    for spanned, rate in costs.links:
        if chips <= spanned:
            return rate
    return costs.links[-1][1]
