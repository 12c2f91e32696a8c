"""How kernels cut their work: between the cores of a rank, and keys into tiles that load in long runs."""

from __future__ import annotations

PARTITIONS = 128


def share_of_core(heads: int, rows: int, core: int, cores: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Heads and query rows of one core, (first, stop) each.

    Some of the heads when they divide, else some of every head's rows, dealt in whole tiles of 128. Together the cores
    have every (head, row) once; a core may have none.
    """
    if heads % cores == 0:
        count = heads // cores
        return (core * count, (core + 1) * count), (0, rows)
    tiles = -(-rows // (PARTITIONS * cores)) * PARTITIONS
    return (0, heads), (min(core * tiles, rows), min((core + 1) * tiles, rows))


def interleaved_tiles(start: int, count: int, tiles: int) -> list[tuple[int, int, int]]:
    """Cut rows start .. start+count-1 into batches of at most `tiles` tiles: (first row, tiles, rows per tile).

    Tile t of a batch has its rows t, t + tiles, t + 2 * tiles, ..., one on each partition. So a partition holds `tiles`
    adjacent rows, and a transfer of [rows, d] has runs of tiles * d elements. All tiles are full, but for one last,
    partial one.
    """
    batches = []
    stop = start + count
    while stop - start >= PARTITIONS:
        whole = min(tiles, (stop - start) // PARTITIONS)
        batches.append((start, whole, PARTITIONS))
        start += whole * PARTITIONS
    if stop > start:
        batches.append((start, 1, stop - start))
    return batches


def tiles_of(start: int, count: int, size: int) -> list[tuple[int, int]]:
    """Cut start .. start+count-1 into (first, count) of `size` each, the last one what remains."""
    return [(first, min(size, start + count - first)) for first in range(start, start + count, size)]


def sequence_pieces(start: int, count: int, length: int) -> list[tuple[int, int, int, int]]:
    """Rows start .. start+count-1 of a flattened [B, S], S = length, by batch: (batch, position, rows, offset).

    offset counts from `start`.
    """
    pieces = []
    row = start
    while row < start + count:
        batch, position = row // length, row % length
        rows = min(length - position, start + count - row)
        pieces.append((batch, position, rows, row - start))
        row += rows
    return pieces
