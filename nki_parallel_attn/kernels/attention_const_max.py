"""attention_const_max on a NeuronCore: exp(scale * Q K^T - softmax_max) V, divided once by the exponentials' own sum.

The maximum is known beforehand, so nothing is ever rescaled, and the Tensor Engine does two matmuls per tile and no
more:

* scores are computed transposed, [keys, queries], so that the Scalar Engine's exp writes them to SBUF as they are
  wanted next: as the stationary operand of the product with V;
* V has a column of ones appended, so that the same product gives the sums. It comes out with queries on partitions,
  where the one division is by a scalar per partition.

exp takes the Scalar Engine about as long as both matmuls take the Tensor Engine. To keep both busy, three steps
interleave: the scores of one, the exp of the one before, the product with V of the one before that.
"""

from __future__ import annotations

import math
from typing import Any

from nki_parallel_attn.kernels.tiling import PARTITIONS, interleaved_tiles, share_of_core
from nki_parallel_attn.nki import nisa, nki, nl
from nki_parallel_attn.topology.types import AttentionLayout

QUERIES = 512  # of one pass: their scores against one tile of keys fill a PSUM bank
TILES_PER_STEP = 2  # tiles of keys that one exp handles
TILES_PER_LOAD = 8  # 2 KiB contiguous per partition, where DMA is near its peak
KEYS_PER_SECTION = 8192  # keys that stay in SBUF while a block of queries passes over them
QUERIES_PER_BLOCK = 8192  # queries whose sums stay in SBUF from one section of keys to the next

Tensor = Any
Tile = dict[str, Any]


@nki.jit  # type: ignore[untyped-decorator]
def attention_const_max(
    q_hbm: Tensor,
    k_hbm: Tensor,
    v_hbm: Tensor,
    softmax_max: Any,
    softmax_scale: float | None = None,
    q_layout: AttentionLayout = AttentionLayout.HEAD_MAJOR,
    k_layout: AttentionLayout = AttentionLayout.HEAD_MAJOR,
) -> Tensor:
    """softmax(Q K^T * softmax_scale) V, with exp(score - softmax_max) and no running maximum.

    Rounded to bfloat16: the exponentials, before they meet V and before they are summed, and the result. A row whose
    exponentials overflow, or are so small that bfloat16 may hold none of them as a normal number, comes out NaN.

    Args:
        q_hbm: [N, 128, Sq] (HEAD_MAJOR) or [N, Sq, 128] (SEQ_MAJOR), bfloat16.
        k_hbm: [N, 128, Sk] or [N, Sk, 128], bfloat16.
        v_hbm: [N, Sk, 128], bfloat16.
        softmax_max: a number, or a float32 [128, 1] tensor of one repeated value.
        softmax_scale: multiplies the scores; 1 / sqrt(128) when None.

    Returns:
        [N, Sq, 128] bfloat16. Of two cores each computes half of the heads, or of each head's queries when the number
        of heads is odd.

    Source: API reference page attention_const_max.
    """
    heads, num_keys, d = v_hbm.shape
    num_queries = q_hbm.shape[2] if q_layout == AttentionLayout.HEAD_MAJOR else q_hbm.shape[1]
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    out = nl.ndarray((heads, num_queries, d), dtype=q_hbm.dtype, buffer=nl.shared_hbm)
    bias = _negated(softmax_max)
    scores, weights, sums = _buffers(q_hbm.dtype)
    my_heads, my_queries = share_of_core(heads, num_queries, nl.program_id(0), nl.num_programs())
    passes = _passes(my_heads, my_queries, num_keys)

    hbm = (q_hbm, k_hbm, v_hbm, q_layout, k_layout)
    steps = 0
    issued: list[Tile] = []  # steps whose scores are on the way and whose product with V is not
    for number in range(len(passes)):
        this = passes[number]
        if number == 0:
            _load(this, None, hbm)
        if number + 1 < len(passes):
            _load(passes[number + 1], this, hbm)
        this["sums"] = sums[number % len(sums)]
        for step in _steps(this):
            step["scores"] = scores[steps % len(scores)]
            step["weights"] = weights[steps % len(weights)]
            steps += 1
            _multiply_keys(step)
            if issued:
                _exponentiate(issued[-1], bias, scale)
            issued.append(step)
            if len(issued) > 2:
                _multiply_values(issued.pop(0), out, num_keys)
    if issued:
        _exponentiate(issued[-1], bias, scale)
    for step in issued:
        _multiply_values(step, out, num_keys)
    return out


def _negated(softmax_max: Any) -> Tensor:
    """-softmax_max in every partition, the bias of exp."""
    bias = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    if isinstance(softmax_max, (int, float)):
        nisa.memset(dst=bias, value=-float(softmax_max))
        return bias
    given = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=given, src=softmax_max)
    nisa.tensor_scalar(dst=bias, data=given, op0=nl.multiply, operand0=-1.0)
    return bias


def _buffers(dtype: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tiles that steps take in turns: scores and sums, which together fill PSUM, and exponentials."""
    scores = []
    sums = []
    weights = []
    for _ in range(2):
        scores.append(nl.ndarray((PARTITIONS, TILES_PER_STEP, QUERIES), dtype=nl.float32, buffer=nl.psum))
        # [queries, tile, d + 1 of 256]: two tiles of queries in a bank, none across two.
        sums.append(nl.ndarray((PARTITIONS, QUERIES // PARTITIONS, 256), dtype=nl.float32, buffer=nl.psum))
    for _ in range(4):
        weights.append(nl.ndarray((PARTITIONS, TILES_PER_STEP, QUERIES), dtype=dtype, buffer=nl.sbuf))
    return scores, weights, sums


def _passes(heads: tuple[int, int], queries: tuple[int, int], num_keys: int) -> list[Tile]:
    """What this core does: groups of queries against sections of keys, all groups of a block for each section."""
    passes = []
    for head in range(heads[0], heads[1]):
        for block in range(queries[0], queries[1], QUERIES_PER_BLOCK):
            block_stop = min(block + QUERIES_PER_BLOCK, queries[1])
            groups = []
            for start in range(block, block_stop, QUERIES):
                groups.append({"start": start, "count": min(QUERIES, block_stop - start)})
            for first_key in range(0, num_keys, KEYS_PER_SECTION):
                count = min(KEYS_PER_SECTION, num_keys - first_key)
                for group in groups:
                    passes.append({"head": head, "group": group, "first_key": first_key, "key_count": count})
    return passes


def _load(this: Tile, before: Tile | None, hbm: tuple[Any, ...]) -> None:
    """Start to load a pass's queries, and its keys and values unless the pass before has them."""
    q_hbm, k_hbm, v_hbm, q_layout, k_layout = hbm
    group, head = this["group"], this["head"]
    if before is not None and before["head"] == head and before["first_key"] == this["first_key"]:
        this["loads"] = before["loads"]
        this["queries"] = _transposed(q_hbm, head, group["start"], group["count"], q_layout)
        return
    this["loads"] = []
    for start, tiles, rows in interleaved_tiles(this["first_key"], this["key_count"], TILES_PER_LOAD):
        keys = _transposed(k_hbm, head, start, tiles * rows, k_layout)
        if not this["loads"]:
            this["queries"] = _transposed(q_hbm, head, group["start"], group["count"], q_layout)
        values = _with_ones(v_hbm, head, start, tiles, rows)
        this["loads"].append({"keys": keys, "values": values, "tiles": tiles, "rows": rows})


def _transposed(source: Tensor, head: int, start: int, count: int, layout: AttentionLayout) -> Tensor:
    """[d, count] in SBUF from either layout."""
    d = source.shape[1] if layout == AttentionLayout.HEAD_MAJOR else source.shape[2]
    tile = nl.ndarray((d, count), dtype=source.dtype, buffer=nl.sbuf)
    if layout == AttentionLayout.HEAD_MAJOR:
        nisa.dma_copy(dst=tile, src=source[head, :, nl.ds(start, count)])
    else:
        nisa.dma_transpose(dst=tile, src=source[head, nl.ds(start, count), :])
    return tile


def _with_ones(v_hbm: Tensor, head: int, start: int, tiles: int, rows: int) -> Tensor:
    """[rows, tiles, d + 1] in SBUF: values of keys start + row * tiles + tile, then a one."""
    d = v_hbm.shape[2]
    # Loaded without the gap for the ones, which would cut the transfer into runs of one row.
    loaded = nl.ndarray((rows, tiles, d), dtype=v_hbm.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=v_hbm[head, nl.ds(start, rows * tiles), :].reshape_dim(0, (rows, tiles)))
    values = nl.ndarray((rows, tiles, d + 1), dtype=v_hbm.dtype, buffer=nl.sbuf)
    nisa.memset(dst=values[:, :, d : d + 1], value=1.0, engine=nisa.engine.gpsimd)
    nisa.tensor_copy(dst=values[:, :, 0:d], src=loaded, engine=nisa.engine.vector)
    return values


def _steps(this: Tile) -> list[Tile]:
    """The steps of a pass: up to TILES_PER_STEP tiles of keys each."""
    steps: list[Tile] = []
    for load in this["loads"]:
        for tile in range(0, load["tiles"], TILES_PER_STEP):
            count = min(TILES_PER_STEP, load["tiles"] - tile)
            steps.append(
                {"pass": this, "load": load, "first_tile": tile, "count": count, "first": not steps, "last": False}
            )
    steps[-1]["last"] = True
    return steps


def _multiply_keys(step: Tile) -> None:
    """scores[keys, tile, queries] = K Q^T."""
    load, queries = step["load"], step["pass"]["queries"]
    tiles, rows = load["tiles"], load["rows"]
    for i in range(step["count"]):
        tile = step["first_tile"] + i
        nisa.nc_matmul(
            dst=step["scores"][0:rows, i, 0 : queries.shape[1]],
            stationary=load["keys"][:, tile : tiles * rows : tiles],
            moving=queries,
            accumulate=False,
        )


def _exponentiate(step: Tile, bias: Tensor, scale: float) -> None:
    """weights = exp(scale * scores - softmax_max), for the step's tiles at once."""
    rows, count, queries = step["load"]["rows"], step["count"], step["pass"]["group"]["count"]
    nisa.activation(
        dst=step["weights"][0:rows, 0:count, 0:queries],
        op=nl.exp,
        data=step["scores"][0:rows, 0:count, 0:queries],
        bias=bias[0:rows, :],
        scale=scale,
    )


def _multiply_values(step: Tile, out: Tensor, num_keys: int) -> None:
    """sums[queries, tile, :] += weights^T [V, 1]; after the pass's last step, deal with its sums."""
    this, load = step["pass"], step["load"]
    rows, queries, width = load["rows"], this["group"]["count"], load["values"].shape[2]
    batches = interleaved_tiles(0, queries, QUERIES // PARTITIONS)
    for i in range(step["count"]):
        for start, tiles, size in batches:
            for j in range(tiles):
                nisa.nc_matmul(
                    dst=this["sums"][0:size, start // PARTITIONS + j, 0:width],
                    stationary=step["weights"][0:rows, i, start + j : start + tiles * size : tiles],
                    moving=load["values"][:, step["first_tile"] + i, :],
                    accumulate=not (step["first"] and i == 0),
                )
    if step["last"]:
        for start, tiles, size in batches:
            _finish_section(this, out, num_keys, start, tiles, size)


def _finish_section(this: Tile, out: Tensor, num_keys: int, start: int, tiles: int, rows: int) -> None:
    """Add the pass's sums for a batch of queries to those of earlier sections; after the last, divide and store."""
    group, width = this["group"], out.shape[2] + 1
    first = start // PARTITIONS
    sums = this["sums"][0:rows, first : first + tiles, 0:width]
    if num_keys > KEYS_PER_SECTION:
        name = f"totals{first}"
        if this["first_key"] == 0:
            group[name] = nl.ndarray((rows, tiles, width), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=group[name], src=sums, engine=nisa.engine.vector)
        else:
            nisa.tensor_tensor(dst=group[name], data1=group[name], data2=sums, op=nl.add)
        sums = group[name]
    if this["first_key"] + this["key_count"] == num_keys:
        rows_of_out = out[this["head"], nl.ds(group["start"] + start, rows * tiles), :]
        _divide(rows_of_out.reshape_dim(0, (rows, tiles)), sums, num_keys)


def _divide(out: Tensor, sums: Tensor, num_keys: int) -> None:
    """out[row, tile, :] = sums[:, :, :d] / sums[:, :, d], NaN where that sum is infinite or too small to be precise."""
    rows, tiles, d = out.shape
    total = sums[:, :, d]
    inverse = nl.ndarray((rows, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    # 4 * num_keys / sum overflows just when the sum is at most num_keys * 2**-126: then every exponential may be below
    # bfloat16's normal numbers. Infinity times 0 is NaN.
    guard = nl.ndarray((rows, tiles), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=guard, data=inverse, op0=nl.multiply, operand0=4.0 * num_keys, op1=nl.multiply, operand1=0.0)
    nisa.tensor_tensor(dst=inverse, data1=inverse, data2=guard, op=nl.add)
    nisa.scalar_tensor_tensor(dst=inverse, data=total, op0=nl.multiply, operand0=0.0, op1=nl.add, operand1=inverse)
    result = nl.ndarray((rows, tiles, d), dtype=out.dtype, buffer=nl.sbuf)
    for tile in range(tiles):
        nisa.tensor_scalar(
            dst=result[:, tile, :],
            data=sums[:, tile, 0:d],
            op0=nl.multiply,
            operand0=inverse[:, tile : tile + 1],
            engine=nisa.engine.vector,
        )
    nisa.dma_copy(dst=out, src=result)
