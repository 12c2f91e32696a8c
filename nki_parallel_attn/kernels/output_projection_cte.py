"""output_projection_cte on a NeuronCore: attention @ weight + bias for the many rows of a prefill.

The contraction runs over all heads at once: (N, D) is one dim of N * D rows, cut into full tiles of 128 partitions
whatever D is. Tokens are the stationary operand and the weight the moving one, so that results come out with tokens on
partitions, as the output's rows lie in HBM, and [B, N, D, S] needs no transposes.

A block of the weight's columns stays in SBUF while all tokens pass over it; if the whole weight fits, that is the only
block. Tokens come in chunks, the next of which loads meanwhile, and so does the next block. Two cores have half of the
columns each and never meet.

Results leave PSUM by the Vector and the Scalar Engine in turns, dequantised and with the bias added on the way. How
operands reach SBUF is in projection_tokens.py and projection_weights.py, quantisation in quantized_tiles.py.
"""

from __future__ import annotations

from typing import Any

from nki_parallel_attn.kernels.projection_tokens import Activations, Chunk
from nki_parallel_attn.kernels.projection_weights import Block, Weights, multiply, part_of
from nki_parallel_attn.kernels.quantized_tiles import float8_of
from nki_parallel_attn.kernels.tiling import PARTITIONS, sequence_pieces, tiles_of
from nki_parallel_attn.nki import nisa, nki, nl
from nki_parallel_attn.topology.types import DtypeMode, OProjAttentionLayout, QuantizationType

BANK_COLUMNS = 512  # of float32, which fill a PSUM bank
STORED_COLUMNS = 2048  # 4 KiB of 16-bit results per row and transfer, where DMA is near its peak
ACCUMULATORS = 6  # of PSUM's 8 banks; transposes need the others
ROWS_PER_CHUNK = 1024
# Bytes per partition of SBUF: a block of weights, of which there are two if one does not do; and these with two chunks
# of tokens, out of the 224 KiB of trn2. Results on their way out take the rest.
BLOCK_BYTES = 72 * 1024
OPERAND_BYTES = 200 * 1024

Tensor = Any


@nki.jit  # type: ignore[untyped-decorator]
def output_projection_cte(
    attention: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    quantization_type: QuantizationType = QuantizationType.NONE,
    input_scales: Tensor | None = None,
    weight_scales: Tensor | None = None,
    output_dtype: Any = None,
    dtype_mode: DtypeMode = DtypeMode.NON_OCP,
    compact_weight_scales: bool = False,
    attention_layout: OProjAttentionLayout | None = None,
    out: Tensor | None = None,
    out_s_offset: int = 0,
) -> Tensor:
    """attention @ weight + bias, contracted over heads and head dim.

    Sums are float32; the result is rounded once, to output_dtype. Quantised activations are values times the float32
    reciprocal of their scale, rounded to the nearest float8.

    Args:
        attention: [B, N, D, S] (BNdS), [B, S, N, D] (BSNd) or [B, N, S, D] (BNSd); float32, float16 or bfloat16, with
            MX not float32.
        weight: [N * D, H] of attention's dtype; float8 e4m3 for STATIC and ROW. For MX packed, [N * D / 4, H] of a
            packed dtype, or its bytes [N * D / 4, H, 4] float8_e4m3fn or float8_e5m2, or [N * D / 4, H, 2] uint8 for
            float4; N * D is then a multiple of 128.
        bias: [1, H], any float dtype.
        input_scales: STATIC: [128, 1] float32, one repeated value.
        weight_scales: STATIC: [128, 1] float32, one repeated value. ROW: [1 or 128, H] float32, one per column. MX:
            [N * D / 32, H] uint8 or float8_e8m0fnu.
        output_dtype: attention's if None, with MX bfloat16.
        dtype_mode: which float8 e4m3 STATIC and ROW mean: that of 240, or that of 448 on trn3.
        compact_weight_scales: MX scales are [N * D / 128, H / 128], one for 128 x 128 weights.
        attention_layout: BSNd for ROW and BNdS otherwise, if None.
        out: [B, S_total, H]: rows out_s_offset .. out_s_offset+S-1 are written, and `out` is returned.

    Returns:
        [B, S, H], or `out`.

    Source: API reference page output_projection_cte.
    """
    activations = Activations(attention, quantization_type, input_scales, float8_of(dtype_mode), attention_layout)
    columns = weight.shape[1] // nl.num_programs()
    weights = Weights(weight, bias, weight_scales, input_scales, activations, compact_weight_scales)
    if out is None:
        dtype = output_dtype
        if dtype is None:
            dtype = nl.bfloat16 if quantization_type == QuantizationType.MX else attention.dtype
        shape = (activations.batch, activations.length, weight.shape[1])
        out = nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)

    results = Results(out, out_s_offset, weights.scale)
    blocks = _blocks(nl.program_id(0) * columns, columns, weights.bytes_per_column)
    block_bytes = blocks[0][1] * weights.bytes_per_column * min(len(blocks), 2)
    fitting = (OPERAND_BYTES - block_bytes) // 2 // activations.bytes_per_row // PARTITIONS * PARTITIONS
    chunks = tiles_of(0, activations.batch * activations.length, max(min(ROWS_PER_CHUNK, fitting), PARTITIONS))

    chunk = activations.load(chunks[0][0], chunks[0][1])
    block = weights.load(blocks[0][0], blocks[0][1])
    while chunk.steps_left():
        activations.advance(chunk)
    for i in range(len(blocks)):
        next_block = block
        for j in range(len(chunks)):
            last = j + 1 == len(chunks)
            next_chunk = chunk
            if len(chunks) > 1 and not (last and i + 1 == len(blocks)):
                first, count = chunks[0 if last else j + 1]
                next_chunk = activations.load(first, count)
            if last and i + 1 < len(blocks):
                next_block = weights.load(blocks[i + 1][0], blocks[i + 1][1])
            units = _units(chunk, block, STORED_COLUMNS if i + j else weights.loaded_columns)
            steps, done = next_chunk.steps_left(), 0
            for u in range(len(units)):
                results.write(chunk, block, units[u])
                while done < steps * (u + 1) // len(units):
                    activations.advance(next_chunk)
                    done += 1
            chunk = next_chunk
        block = next_block
    return out


def _blocks(start: int, columns: int, bytes_per_column: int) -> list[tuple[int, int]]:
    """Blocks of columns, of about equal size: one if twice BLOCK_BYTES hold them all."""
    if columns * bytes_per_column <= 2 * BLOCK_BYTES:
        return [(start, columns)]
    most = BLOCK_BYTES // bytes_per_column
    unit = BANK_COLUMNS if most >= BANK_COLUMNS else PARTITIONS
    most = max(most // unit, 1) * unit
    even = -(-columns // -(-columns // most))
    return tiles_of(start, columns, -(-even // unit) * unit)


def _units(chunk: Chunk, block: Block, width: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """What is stored at once: ((first row, rows), (first column, columns)), `width` columns in the order of loading.

    While the first weights arrive, they are as many as one load brings, so that none of the later ones is waited for.
    """
    units = []
    for columns in tiles_of(0, block.count, width):
        for rows in tiles_of(0, chunk.count, PARTITIONS):
            units.append((rows, columns))
    return units


class Results(nl.NKIObject):  # type: ignore[misc]
    """The output, and the PSUM banks that products take in turns on their way there; `scale` is STATIC's."""

    def __init__(self, out: Tensor, out_s_offset: int, scale: Tensor | None) -> None:
        self.out = out
        self.out_s_offset = out_s_offset
        self.scale = scale
        self.banks = []
        for _ in range(ACCUMULATORS):
            self.banks.append(nl.ndarray((PARTITIONS, BANK_COLUMNS), dtype=nl.float32, buffer=nl.psum))
        self.turn = 0

    def write(self, chunk: Chunk, block: Block, unit: tuple[tuple[int, int], tuple[int, int]]) -> None:
        """Multiply, evacuate and store one unit of the chunk's tokens and the block's columns."""
        first_row, rows = unit[0]
        first_column, columns = unit[1]
        scale = None
        if chunk.row_scales:
            scale = chunk.row_scales[first_row // PARTITIONS]
        elif self.scale is not None:
            scale = self.scale[0:rows, :]
        result = nl.ndarray((rows, columns), dtype=self.out.dtype, buffer=nl.sbuf)
        for at, count in tiles_of(0, columns, BANK_COLUMNS):
            column = first_column + at
            product = self.banks[self.turn % ACCUMULATORS]
            multiply(product, chunk, (first_row, rows), block, (column, count))
            factors = part_of(block.factors, rows, column, count)
            bias = part_of(block.bias, rows, column, count)
            _evacuate(self.turn, result[:, at : at + count], product[0:rows, 0:count], scale, factors, bias)
            self.turn += 1
        column = block.first + first_column
        for batch, position, tokens, at in sequence_pieces(chunk.first + first_row, rows, chunk.length):
            start = self.out_s_offset + position
            nisa.dma_copy(
                dst=self.out[batch, start : start + tokens, column : column + columns],
                src=result[at : at + tokens, :],
            )


def _evacuate(
    turn: int, dst: Tensor, product: Tensor, scale: Tensor | None, factors: Tensor | None, bias: Tensor | None
) -> None:
    """dst = product * (scale * factors) + bias, of which product may be alone; scale [rows, 1], the others like dst.

    The scales are multiplied first, for a large one times a product may not fit float32. Scalar takes no second tensor:
    on its turn GpSimd, which cannot read PSUM, goes on with what Scalar has copied.
    """
    by_vector = turn % 2 == 0
    engine = nisa.engine.vector if by_vector else nisa.engine.scalar
    if factors is None and bias is None:
        _copy(dst, product, scale, engine)
        return
    if factors is not None:
        scaled = dst if bias is None else nl.ndarray(dst.shape, dtype=nl.float32, buffer=nl.sbuf)
        if by_vector:
            nisa.scalar_tensor_tensor(
                dst=scaled, data=factors, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=product
            )
        else:
            copied = nl.ndarray(dst.shape, dtype=nl.float32, buffer=nl.sbuf)
            scales = nl.ndarray(dst.shape, dtype=nl.float32, buffer=nl.sbuf)
            _copy(copied, product, None, engine)
            _copy(scales, factors, scale, engine)
            # With a bias GpSimd has all results to add to, and time to multiply one of four.
            engine = nisa.engine.gpsimd if bias is None or turn % 4 == 3 else nisa.engine.vector
            nisa.tensor_tensor(dst=scaled, data1=copied, data2=scales, op=nl.multiply, engine=engine)
        if bias is not None:
            nisa.tensor_tensor(dst=dst, data1=scaled, data2=bias, op=nl.add, engine=nisa.engine.gpsimd)
    elif not by_vector:
        copied = nl.ndarray(dst.shape, dtype=nl.float32, buffer=nl.sbuf)
        _copy(copied, product, scale, engine)
        nisa.tensor_tensor(dst=dst, data1=copied, data2=bias, op=nl.add, engine=nisa.engine.gpsimd)
    elif scale is None:
        nisa.tensor_tensor(dst=dst, data1=product, data2=bias, op=nl.add, engine=engine)
    else:
        nisa.scalar_tensor_tensor(dst=dst, data=product, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias)


def _copy(dst: Tensor, src: Tensor, scale: Tensor | None, engine: Any) -> None:
    if scale is None:
        nisa.tensor_copy(dst=dst, src=src, engine=engine)
    else:
        nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=scale, engine=engine)
