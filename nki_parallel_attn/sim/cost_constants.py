"""Every constant of the cost model, with its unit and the page of the public documentation it comes from.

A source that begins with "chosen" is not documented; docs/cost_model.md says why the value was taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .targets import Target

_V2 = "nki/guides/architecture/trainium_inferentia2_arch.rst"
_V3 = "nki/guides/architecture/trainium2_arch.rst"
_V4 = "nki/guides/architecture/trainium3_arch.rst"
_SHARED = "nki/api/nki.api.shared.rst"
_ISA = "nki/api/nki/isa/__init__.py"
_DMA_GUIDE = "nki/deep-dives/nki-dma-bandwidth-guide.rst"
_DMA_INTRO = "nki/get-started/about/nki-dma-overview.rst"
_DGE = "nki/deep-dives/nki-dge.rst"
_INTRA = "neuron-runtime/explore/intranode-collective-comm.rst"
_COLLECTIVES = "neuron-runtime/about/collectives.rst"
_HARDWARE = "about-neuron/arch/neuron-hardware"


def _constant(unit: str, source: str) -> Any:
    return field(metadata={"unit": unit, "source": source})


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The constants of one target. Unit and source of each are in its field's metadata; `table()` prints them."""

    # Engines
    tensor_ghz: float = _constant("GHz", f"{_V3}, {_V4}, Compute Engine Specifications")
    vector_ghz: float = _constant("GHz", f"{_V3}, {_V4}, Compute Engine Specifications")
    scalar_ghz: float = _constant("GHz", f"{_V3}, {_V4}, Compute Engine Specifications")
    gpsimd_ghz: float = _constant("GHz", f"{_V3}, {_V4}, Compute Engine Specifications")
    array_size: int = _constant("rows, columns", f"{_V2}, Tensor Engine")
    matmul_min_cycles: int = _constant("cycles", f"{_V2}, Tensor Engine, Cost Model")
    float32_passes: int = _constant("x", f"{_V2}, Tensor Engine, Cost Model")
    float32_move_passes: int = _constant("x", f"{_V3}, Built-in Transpose Support; {_ISA}, nc_matmul onezero flags")
    load_speedup: int = _constant("x", f"{_V2}, Fast LoadStationary")
    min_cycles: int = _constant("cycles", f"{_SHARED}, NKI Engine Selection, MIN_II")
    wait_cycles: int = _constant("cycles", f"{_V2}, Vector Engine, Cost Model")
    short_elements: int = _constant("elements", f"chosen: {_V2} says N much below 128")
    wide_stride_bytes: int = _constant("B", f"{_V2}, Access pattern")
    vector_copy_speedup: int = _constant("x", f"{_V3}, Vector Engine Performance Mode")
    fast_itemsizes: tuple[int, ...] = _constant("B", f"{_V3}, Vector Engine Performance Mode; {_V4}, table")
    scalar_copy_speedup: int = _constant("x", f"{_V4}, Scalar Engine, Performance mode")
    reciprocal_factor: int = _constant("x", f"{_SHARED}, NKI Engine Selection")
    rsqrt_factor: int = _constant("x", f"{_SHARED}, NKI Engine Selection")
    accumulator_cycles: int = _constant("cycles", f"{_V2}, Pipelined Reduction")
    exponential_speedup: int = _constant("x", f"{_V4}, Fast Exponential Evaluation")
    quantize_speedup: int = _constant("x", f"{_V4}, MX data-type Quantization")
    random_speedup: int = _constant("x", f"{_V4}, XORWOW-based PRNG")
    topk_factor: int = _constant("x", f"{_ISA}, topk")
    # DMA and HBM
    dma_engines: int = _constant("per core", _DMA_GUIDE)
    dma_bytes_per_ns: float = _constant("B/ns per engine", f"{_DMA_GUIDE}; {_DMA_INTRO}")
    dma_start_ns: float = _constant("ns", f"{_DMA_GUIDE}, semaphore-to-start latency")
    dma_partitions: int = _constant("per engine", _DMA_INTRO)
    dma_queues: int = _constant("in flight per core", f"{_DMA_INTRO}, DMA Queues; chosen: one transfer each")
    dma_packet_bytes: int = _constant("B", "neuron-runtime/explore/compute-comm-overlap.rst, Static DMA Priority")
    dma_efficiency: tuple[tuple[int, float], ...] = _constant(
        "(B contiguous, share of the rate)", f"{_DMA_INTRO}, figure 1, read off relative to 32768 B"
    )
    dma_transpose_hbm: float = _constant("share of the rate", f"{_V3}, HBM2SBUF DMA transpose")
    dma_transpose_sbuf: float = _constant("share of the rate", f"{_V3}, SBUF2SBUF DMA transpose")
    dma_compute: float = _constant("share of the rate", f"{_V4}, SBUF Read-Add-Write")
    hwdge_ns: float = _constant("ns", f"{_DGE}; {_V3}, DGE")
    hwdge_units: int = _constant("per core", f"{_V3}, DGE")
    swdge_cycles: float = _constant("GpSimd cycles per descriptor", f"chosen: {_DGE} gives no number")
    gpsimd_dma_bytes_per_ns: float = _constant("B/ns per direction", f"{_V3}, Gpsimd Engine")
    hbm_bytes_per_ns: float = _constant("B/ns per chip", f"{_HARDWARE}/trainium2.rst, trainium3.rst")
    cores_per_chip: int = _constant("cores", f"{_V3}; {_V4}")
    # Communication
    barrier_ns: float = _constant("ns", f"chosen: {_ISA}, core_barrier gives no number")
    hop_ns: float = _constant("ns", f"{_INTRA}: 1 to 2 us; chosen: the middle")
    node_hop_ns: float = _constant("ns", _COLLECTIVES)
    mesh_bytes: int = _constant("B, below", f"{_INTRA}, Algorithm Summary")
    halving_bytes: int = _constant("B, up to", f"{_INTRA}, Algorithm Summary")
    chips_per_node: int = _constant("chips", f"{_HARDWARE}/trn2-arch.rst, trn3-arch.rst")
    links: tuple[tuple[int, float], ...] = _constant(
        "(chips spanned, B/ns per chip and direction)",
        f"{_HARDWARE}/trn2-arch.rst (half of both directions), trn3-arch.rst, Bandwidth summary",
    )
    network_bytes_per_ns: float = _constant("B/ns per chip", f"{_COLLECTIVES}, System Connectivity")

    @property
    def dma_peak(self) -> float:
        """B/ns of all DMA engines of a core."""
        return self.dma_engines * self.dma_bytes_per_ns

    @property
    def hbm_share(self) -> float:
        """B/ns of HBM for one core while all cores of the chip stream."""
        return self.hbm_bytes_per_ns / self.cores_per_chip

    @property
    def peak_flops_per_ns(self) -> float:
        """Multiplications and additions of the Tensor Engine in bfloat16."""
        return 2 * self.array_size**2 * self.tensor_ghz


TRN2_COSTS = Costs(
    tensor_ghz=2.4,
    vector_ghz=0.96,
    scalar_ghz=1.2,
    gpsimd_ghz=1.2,
    array_size=128,
    matmul_min_cycles=64,
    float32_passes=4,
    float32_move_passes=2,
    load_speedup=4,
    min_cycles=64,
    wait_cycles=100,
    short_elements=64,
    wide_stride_bytes=16,
    vector_copy_speedup=4,
    fast_itemsizes=(2,),
    scalar_copy_speedup=1,
    reciprocal_factor=8,
    rsqrt_factor=4,
    accumulator_cycles=64,
    exponential_speedup=4,
    quantize_speedup=4,
    random_speedup=1,
    topk_factor=4,
    dma_engines=16,
    dma_bytes_per_ns=23.0,
    dma_start_ns=1300.0,
    dma_partitions=8,
    dma_queues=16,
    dma_packet_bytes=4096,
    dma_efficiency=(
        (32, 0.014),
        (64, 0.026),
        (128, 0.050),
        (256, 0.103),
        (512, 0.206),
        (1024, 0.422),
        (2048, 0.813),
        (4096, 0.966),
        (8192, 0.983),
        (16384, 0.990),
        (32768, 1.0),
    ),
    dma_transpose_hbm=0.9,
    dma_transpose_sbuf=0.5,
    dma_compute=0.5,
    hwdge_ns=600.0,
    hwdge_units=2,
    swdge_cycles=1.0,
    gpsimd_dma_bytes_per_ns=153.0,
    hbm_bytes_per_ns=2900.0,
    cores_per_chip=8,
    barrier_ns=1000.0,
    hop_ns=1500.0,
    node_hop_ns=15000.0,
    mesh_bytes=10**6,
    halving_bytes=56 * 10**6,
    chips_per_node=16,
    links=((16, 512.0),),
    network_bytes_per_ns=25.0,
)

_TRN3_CHANGES: dict[str, Any] = {
    "vector_ghz": 1.2,
    "fast_itemsizes": (1, 2),
    "scalar_copy_speedup": 2,
    "random_speedup": 4,
    "dma_bytes_per_ns": 33.0,
    "hbm_bytes_per_ns": 4900.0,
    "chips_per_node": 64,
    "links": ((4, 256.0), (64, 320.0)),
}
TRN3_COSTS = Costs(**{f.name: getattr(TRN2_COSTS, f.name) for f in fields(Costs)} | _TRN3_CHANGES)

_BY_TARGET = {"trn2": TRN2_COSTS, "trn3": TRN3_COSTS}


def costs_of(target: Target) -> Costs:
    """The constants of `target`.

    Raises:
        ValueError: the model does not cover it.
    """
    if target.name not in _BY_TARGET:
        raise ValueError(f"the cost model covers {' and '.join(_BY_TARGET)}, not {target.name}")
    return _BY_TARGET[target.name]


def table() -> str:
    """The constants as a Markdown table."""
    lines = ["| constant | unit | trn2 | trn3 | source |", "|---|---|---|---|---|"]
    for f in fields(Costs):
        trn2, trn3 = (getattr(costs, f.name) for costs in (TRN2_COSTS, TRN3_COSTS))
        both = (_show(trn2), "same" if trn2 == trn3 else _show(trn3))
        lines.append(f"| `{f.name}` | {f.metadata['unit']} | {both[0]} | {both[1]} | {f.metadata['source']} |")
    return "\n".join(lines)


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{a}:{b:g}" for a, b in value) if isinstance(value[0], tuple) else " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
