"""Every rule the simulator enforces: its stable name, what it says, where that is documented, and what turns it off.

Paths are relative to the public documentation repository (aws-neuron-sdk). `kind` is the field of `core.Checks` that
switches the rule; rules of kind "always" cannot be switched off, because without them an instruction has no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import (
    CapacityError,
    NkiValidationError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
)

ISA = "nki/api/nki/isa/__init__.py"
NCC = "nki/api/nki/collectives/__init__.py"
CC = "neuron-runtime/about/collectives.rst"
LANGUAGE = "nki/api/nki/language/__init__.py"
ARCH = "nki/guides/architecture/trainium_inferentia2_arch.rst"
GUIDE = "nki/get-started/nki-language-guide.rst"
TILING = "nki/get-started/about/tiling-overview.rst"
APS = "nki/deep-dives/nki-aps.rst"
MIGRATION = "nki/migration/index.rst"
MX = "nki/deep-dives/mxfp-matmul.rst"
DGE = "nki/deep-dives/nki-dge.rst"
DMA = "nki/get-started/about/nki-dma-overview.rst"
SHARED = "nki/api/nki.api.shared.rst"


@dataclass(frozen=True)
class Rule:
    """One documented rule of the hardware or the language."""

    name: str
    statement: str
    source: str
    kind: str = "hardware"
    error: type[NkiValidationError] = NkiValidationError


_TABLE = [
    # Shape of what one instruction may touch.
    Rule("partition-limit", "a tile spans at most 128 partitions", TILING),
    Rule(
        "start-partition",
        "a tile of more than 64 partitions starts at partition 0, of more than 32 at 0 or 64, "
        "and a smaller one at 0, 32, 64 or 96",
        ARCH,
    ),
    Rule("partition-stride", "a tile's partitions are adjacent", APS),
    Rule("access-pattern-dims", "an access pattern has at most 5 dimensions, the partition dimension included", GUIDE),
    Rule("write-overlap", "a destination addresses each element once", APS),
    Rule(
        "same-partitions", "operands of an element-wise instruction have the same number of partitions", ISA, "always"
    ),
    Rule(
        "same-elements",
        "operands of an element-wise instruction have the same number of elements per partition",
        ISA,
        "always",
    ),
    Rule("vector-operand", "a per-partition operand has one element in each partition of the data", ISA, "always"),
    Rule("element-count", "source and destination of a transfer have the same number of elements", ISA, "always"),
    Rule(
        "reduce-axis",
        "a reduction covers the last free dimensions, contiguously, and never the partition dimension",
        ISA,
        "always",
    ),
    Rule(
        "matmul-shape",
        "dst is [stationary free size, moving free size] and both inputs have the same partitions",
        ISA,
        "always",
    ),
    Rule("stationary-limit", "the stationary tile is at most 128 wide", ISA),
    Rule("moving-limit", "the moving tile is at most 512 wide (trn3: 4096 into float32, 8192 into bfloat16)", ISA),
    Rule("transpose-limit", "a transpose is at most 128 x 128 on the Tensor Engine, 32 x 32 on the Vector Engine", ISA),
    Rule(
        "tile-position",
        "tile_position and tile_size come together; sizes are 32, 64 or 128 and positions multiples of "
        "them inside the 128 x 128 array",
        ISA,
    ),
    Rule("psum-bank", "before trn3 the output of one matmul lies in one PSUM bank", ARCH),
    Rule("mx-partition", "MX operands have 32, 64, 96 or 128 partitions", ISA, "always"),
    Rule(
        "mx-free",
        "quantize_mx reads a multiple of 4 elements per partition and writes a quarter as many packed ones",
        ISA,
        "always",
    ),
    Rule(
        "mx-scale-layout",
        "MX scales are as wide as the packed data and lie in 4 partitions of the data's quadrants, from 0, 4, 8 or 12: "
        "[P / 8, F] for 32 partitions of data, [P, F] for more",
        MX,
        "always",
    ),
    Rule(
        "iota-pattern",
        "the pattern has 1 to 4 [step, num] pairs whose product is dst's elements per partition",
        ISA,
        "always",
    ),
    Rule(
        "bn-stats-size",
        "bn_stats reads at most 512 elements per partition and writes 6, bn_aggr reads a multiple of 3 and writes 2",
        ISA,
        "always",
    ),
    Rule(
        "max8-size",
        "8 to 16384 elements per partition are searched, in at most 3 dimensions; values and results are 8 each",
        ISA,
        "always",
    ),
    Rule("shuffle-mask", "the mask has 32 entries, each a partition of the source's quadrant or 255", ISA, "always"),
    Rule(
        "shuffle-start-partition",
        "source and destination start at 0 when 96 or 128 partitions are active, at 0 or 64 when 64 are, "
        "and at 0, 32, 64 or 96 when 32 are",
        ISA,
    ),
    Rule(
        "gather-size",
        "local_gather takes a multiple of 16 partitions, reads 1, 2, 4, 8, 16 or 32 elements per index, "
        "and has at most 4096 indices per GpSimd core",
        ISA,
        "always",
    ),
    Rule("range-select-false-value", "on_false_value is the smallest float32, -3.4028235e+38", ISA),
    Rule("range-select-index", "range_start plus the index stays within 2**24, where float32 counts exactly", ISA),
    Rule(
        "topk-size",
        "8 <= n < 65536, 1 <= K < 32768, K <= n, src has ceil(n / 16) columns and a multiple of 16 partitions",
        ISA,
        "always",
    ),
    Rule("nonzero-size", "the destination has one more element per partition than the source", ISA, "always"),
    Rule("sequence-bounds-shape", "segment_ids is [1, n] and dst [1, 2, n]", ISA, "always"),
    Rule(
        "rng-state-size",
        "a random state has 6 words per partition on GpSimd and 24 on Vector, a seed is one",
        ISA,
        "always",
    ),
    Rule("random-range", "min is less than max", ISA),
    # Which engine may do what.
    Rule(
        "memory-access",
        "Tensor Engine reads SBUF and writes PSUM; Vector and Scalar Engine use SBUF and PSUM; GpSimd "
        "uses SBUF only; DMA uses HBM and SBUF",
        ISA,
    ),
    Rule("engine-choice", "the instruction runs on the engines its page lists", ISA),
    Rule("both-in-psum", "the two tensor inputs are not both in PSUM", ISA),
    Rule("target", "the instruction or option exists on the target's NeuronCore generation", ISA),
    Rule("operand-dtype", "each operand has a dtype that the instruction takes", ISA),
    Rule("matching-dtype", "operands that are copied or transposed bit for bit have the same dtype", ISA),
    Rule("operator", "the operator is one that the instruction takes", SHARED, "always"),
    Rule("operator-kind", "two operators of one instruction are both bitvec or both arithmetic", ISA),
    Rule("bitvec-integer", "bitvec operators take integer tensors", SHARED),
    Rule("tensor-operand", "an operand is a tensor, or a list of tensors, as its page says", ISA, "always"),
    Rule("scalar-operand", "a constant operand is a number that the operator can use", ISA, "always"),
    Rule(
        "reduce-register", "reduce_op, reduce_cmd and reduce_res are a combination that the instruction documents", ISA
    ),
    Rule(
        "activation-range",
        "the input of sin, arctan, log, sqrt, rsqrt and reciprocal on the Scalar Engine lies in the "
        "function's valid range",
        SHARED,
        "activation_range",
    ),
    Rule("memset-value", "memset's value matches dst's dtype; packed x4 dtypes take only 0", MIGRATION),
    Rule(
        "psum-accumulate",
        "accumulate=True needs a location that a matmul has initialised; before trn3 a location set "
        "by another instruction cannot be accumulated onto",
        ISA,
    ),
    Rule("dma-psum", "DMA does not access PSUM", MIGRATION),
    Rule("dma-cast", "DMA does not cast packed x4 and scale dtypes", DMA, "always"),
    Rule("dma-mode", "dge_mode, engine, priority and oob_mode are a combination that the DMA documents", DGE),
    Rule("dma-transpose-axes", "a DMA transposes by (1, 0), (2, 1, 0) or (3, 1, 2, 0)", ISA, "always"),
    Rule(
        "transpose-shape", "the destination of a DMA transpose has the transposed shape, rank included", ISA, "always"
    ),
    Rule(
        "dma-transpose-hwdge",
        "hwdge transposes 2-byte elements, the last dimension at most 128, the first one 16 for 2 dimensions and else "
        "1, 2, 4, 8 or 16, with first x next to last a multiple of 16",
        ISA,
    ),
    Rule(
        "dma-transpose-indirect",
        "an indirect transpose takes 2-byte rows, the last dimension at most 128, a multiple of 16 of them, one of 4 "
        "dimensions' middle ones of size 1, and indices [16 to 128 by 16, 1] or [128, n]",
        ISA,
    ),
    Rule(
        "dma-compute",
        "dma_compute adds 1 to 16 sources with scales of 1.0 at fixed addresses, or with a vector offset two of them, "
        "one the destination, with unique indices",
        ISA,
    ),
    Rule("enum-argument", "options are members of the documented enums, not integers or strings", MIGRATION, "always"),
    # Memory.
    Rule("sbuf-capacity", "live tensors fit an SBUF partition", ARCH, "capacity", CapacityError),
    Rule("psum-capacity", "live tensors fit the 8 PSUM banks of a partition", ARCH, "capacity", CapacityError),
    Rule("hbm-capacity", "live tensors fit the HBM of the logical core", ARCH, "capacity", CapacityError),
    Rule(
        "address",
        "a manual address lies inside the memory, and in PSUM at the start of a bank",
        MIGRATION,
        "always",
        OutOfBoundsError,
    ),
    Rule("tensor-shape", "a tensor has positive integer dimensions, at least 2 on chip", LANGUAGE, "always"),
    Rule("tensor-dtype", "a dtype is one of nki.language's", SHARED, "always"),
    Rule("buffer", "a buffer is nl.sbuf, nl.psum, nl.hbm, nl.private_hbm or nl.shared_hbm", MIGRATION, "always"),
    Rule(
        "uninitialised-read",
        "an instruction reads only what has been written",
        GUIDE,
        "uninitialised",
        UninitializedReadError,
    ),
    Rule(
        "uninitialised-output",
        "every element of a returned tensor has been written",
        GUIDE,
        "outputs",
        UninitializedReadError,
    ),
    Rule(
        "shared-allocation", "program instances allocate the same shared HBM tensors in the same order", GUIDE, "always"
    ),
    # Views.
    Rule("integer", "indices, sizes, strides, dimensions, counts and ranks are integers", LANGUAGE, "always"),
    Rule("index-bounds", "an index lies inside its dimension", LANGUAGE, "always", OutOfBoundsError),
    Rule(
        "access-bounds",
        "an access pattern stays inside its tensor, and on chip inside a partition",
        APS,
        "always",
        OutOfBoundsError,
    ),
    Rule(
        "dynamic-bounds",
        "a runtime index or offset stays inside its tensor unless oob_mode is skip",
        ISA,
        "always",
        OutOfBoundsError,
    ),
    Rule("view", "a view operation meets its documented constraints", LANGUAGE, "always"),
    Rule(
        "indirect-view",
        "an indirect view is not indirected again, and its indirect dimension not sliced",
        LANGUAGE,
        "always",
    ),
    Rule(
        "tensor-indirection-partition",
        "with manual addresses, index and operand of tensor indirection start at the partitions that the page states",
        ISA,
    ),
    Rule(
        "precise-view",
        "reinterpreting a low-precision tensor needs NKI_PRECISE_FP=1",
        "nki/guides/nki_simulator.rst",
        "always",
    ),
    # Kernels and control flow.
    Rule("outside-kernel", "instructions and allocations happen inside a kernel", GUIDE, "always"),
    Rule(
        "kernel-argument",
        "arguments are arrays of NKI dtypes, numbers, strings, and containers of them",
        GUIDE,
        "always",
    ),
    Rule("argument-overlap", "a kernel writes to no argument that shares memory with another", GUIDE, "always"),
    Rule("kernel-output", "returned tensors are in shared HBM, the same on every core", MIGRATION, "outputs"),
    Rule("jit-option", "nki.jit takes no platform_target", MIGRATION, "always"),
    Rule("lnc", "a kernel is launched on as many cores as the target's logical core joins", GUIDE, "always"),
    Rule(
        "register",
        "a register is read after it is written, loop registers are read-only, and a load or store names one element",
        ISA,
        "always",
    ),
    Rule(
        "loop-step",
        "the step of a dynamic loop is a positive compile-time integer",
        "nki/deep-dives/nki-dynamic-loops.rst",
        "always",
    ),
    Rule("loop-scope", "a tensor declared in a dynamic loop is not used after it", MIGRATION, "always"),
    Rule("dependency-loop", "a dependency does not cross into or out of a dynamic loop", ISA, "always"),
    Rule(
        "loop-body",
        "fori_loop's body returns nothing and while_loop's body the next condition register",
        MIGRATION,
        "always",
    ),
    Rule("loop-no-reorder", "dynamic loops stay outside no_reorder blocks", "nki/deep-dives/nki-dynamic-loops.rst"),
    # LNC cores and collectives.
    Rule(
        "race",
        "two cores, or a core and a collective, that touch the same bytes, one writing, are ordered by a barrier, an "
        "exchange or a collective",
        ISA,
        "races",
        RaceError,
    ),
    Rule("core-barrier-cores", "cores is (0, 1)", ISA, "always"),
    Rule("core-barrier-data", "the data of a barrier is in shared HBM, one tensor for both cores", ISA),
    Rule("sendrecv-rank", "send_to_rank and recv_from_rank are 0 or 1", ISA, "always"),
    Rule(
        "sendrecv-size", "gpsimd_dma moves at most 1024, 512 or 256 bytes per partition of 32-, 16- or 8-bit types", ISA
    ),
    Rule("collective-list", "a collective has as many destinations as sources, at least one", NCC, "always"),
    Rule(
        "collective-shape", "shapes of sources and destinations fit the operation and the group's size", NCC, "always"
    ),
    Rule("collective-dtype", "a collective does not change the dtype", NCC, "always"),
    Rule("collective-dim", "collective_dim is 0, or for all_gather in SBUF 0 or 1", NCC, "always"),
    Rule("collective-op", "a collective reduces with add, minimum or maximum", NCC, "always"),
    Rule("collective-single", "permutes and v forms take one tensor, per channel", NCC, "always"),
    Rule(
        "collective-channels",
        "channel ids are 0, 1, ...; at most 4 for groups of a whole node, else 2; one list per channel",
        NCC,
        "always",
    ),
    Rule("collective-permute-pattern", "source-target pairs form circles", CC, "always"),
    Rule("collective-memory-mix", "all tensors of a collective are in HBM or all in SBUF", NCC, "collectives"),
    Rule("collective-hbm-only", "all_to_all, the v forms and the permutes take HBM tensors", NCC, "collectives"),
    Rule("collective-sbuf-coalesced", "several tensors per collective only in HBM", NCC, "collectives"),
    Rule("collective-sbuf-rank", "SBUF tensors of a collective have 2 dimensions", NCC, "collectives"),
    Rule(
        "collective-hbm-kind",
        "the tensors of one collective are all private or all shared HBM, private at LNC 1",
        "practice; on no page",
        "collectives",
    ),
    Rule(
        "collective-kernel-io",
        "arguments and results of the kernel do not take part in collectives",
        "practice; on no page",
        "collectives",
    ),
    Rule("collective-v-metadata", "metadata is a contiguous uint32 tensor of the documented shape", NCC, "always"),
    Rule(
        "collective-v-bounds",
        "counts and displacements stay inside source, destination and slot",
        NCC,
        "always",
        OutOfBoundsError,
    ),
    Rule("all-gather-v", "all_gather_v needs LNC 2, rank lists of 4 and no has_rdispls", NCC),
    Rule(
        "all-to-all-v",
        "all_to_all_v takes, on trn3, LNC 2 and consecutive ranks of several whole chips; before, same-indexed "
        "ranks of different nodes and no has_rdispls",
        NCC,
        "collectives",
    ),
]

RULES: dict[str, Rule] = {rule.name: rule for rule in _TABLE}
