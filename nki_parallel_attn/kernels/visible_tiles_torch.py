"""Which keys each query row sees on one rank, cut into few large attention calls that need no mask or a small one.

In every layout of the prefill page, the keys that row t sees are the local slots first[t] .. stop[t]-1, and both bounds
never decrease. Without a sliding window a row is one of two kinds:

* diagonal: its own key is here, so it sees one slot more than the row before. All diagonal rows taken together, however
  far apart, are exactly causal against the local keys;
* flat: its own key is elsewhere. The rows between two diagonals all see the same prefix: no mask.

With a window, tiles of consecutive rows have an unmasked middle and two masked edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# Rows of one fused call, heads that share a KV head folded in: from 768 on it takes its large tile; more than a few
# thousand gain nothing and make the temporaries grow.
MIN_FUSED_ROWS = 768
MAX_FUSED_ROWS = 4096
# A window narrower than this many tiles is cheaper as one masked call than as a middle and two edges.
WINDOW_ROWS = 256
WINDOW_MIDDLE_TILES = 2


@dataclass(frozen=True)
class VisibleSlots:
    """Local slots that each query row sees.

    Attributes:
        first, stop: [S] int64; row t sees slots first[t] .. stop[t]-1, none when they are equal.
        before: the `stop` of the position before row 0.
    """

    first: Tensor
    stop: Tensor
    before: int


@dataclass(frozen=True)
class RowTile:
    """Query rows and the key ranges that they see; the ranges of one tile are disjoint.

    Attributes:
        rows: a slice, or [n] int64 ascending.
        unmasked: keys that every row sees.
        causal: keys of which row i of the tile sees the first i + 1.
        masked: keys of which row t sees those in first[t] .. stop[t]-1.
    """

    rows: slice | Tensor
    unmasked: slice | None = None
    causal: slice | None = None
    masked: list[slice] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)


def visible_tiles(visible: VisibleSlots, heads: int, kv_heads: int) -> list[RowTile]:
    """Tiles that together hold every row that sees a slot, each once.

    Args:
        heads, kv_heads: of the calls, for their size in rows.
    """
    min_rows = -(-MIN_FUSED_ROWS // (heads // kv_heads))
    max_rows = max(min_rows, MAX_FUSED_ROWS // heads)
    sees_any = visible.stop > visible.first
    if bool(visible.first[-1] > visible.first[0]):
        rows = sees_any.nonzero()[:, 0]
        return [_edged_tile(chunk, visible) for chunk in torch.split(rows, WINDOW_ROWS)] if len(rows) else []
    previous = torch.cat([visible.stop.new_tensor([visible.before]), visible.stop[:-1]])
    diagonal = (visible.stop > previous) & sees_any
    tiles = [_edged_tile(rows, visible) for rows in _flat_runs(visible.stop, sees_any & ~diagonal, min_rows, max_rows)]
    rows = diagonal.nonzero()[:, 0]
    if len(rows):
        start = int(visible.stop[rows[0]]) - 1
        prefix = _slice(int(visible.first[0]), start)
        tiles.append(RowTile(_as_slice(rows), unmasked=prefix, causal=slice(start, start + len(rows))))
    return tiles


def tile_mask(tile: RowTile, keys: slice, visible: VisibleSlots) -> Tensor:
    """[n, m] bool, True where the tile's rows see `keys`."""
    slots = torch.arange(keys.start, keys.stop, device=visible.stop.device)
    return (slots >= visible.first[tile.rows][:, None]) & (slots < visible.stop[tile.rows][:, None])


def _flat_runs(stop: Tensor, flat: Tensor, min_rows: int, max_rows: int) -> list[Tensor]:
    """Rows that see the same prefix, short runs joined up to `min_rows`, long ones cut at `max_rows`."""
    rows = flat.nonzero()[:, 0]
    if not len(rows):
        return []
    _, lengths = torch.unique_consecutive(stop[rows], return_counts=True)
    joined: list[int] = []
    for length in lengths.tolist():
        if joined and joined[-1] < min_rows and joined[-1] + length <= max_rows:
            joined[-1] += length
        else:
            joined.append(length)
    return [piece for run in torch.split(rows, joined) for piece in torch.split(run, max_rows)]


def _edged_tile(rows: Tensor, visible: VisibleSlots) -> RowTile:
    """Consecutive or flat rows: the keys that all of them see unmasked, the keys at both edges masked."""
    first, last = (int(visible.first[row]) for row in (rows[0], rows[-1]))
    begin, end = (int(visible.stop[row]) for row in (rows[0], rows[-1]))
    edges = (last - first) + (end - begin)
    if edges and begin - last < WINDOW_MIDDLE_TILES * edges:
        return RowTile(_as_slice(rows), masked=[slice(first, end)])
    masked = [keys for keys in (_slice(first, last), _slice(begin, end)) if keys]
    return RowTile(_as_slice(rows), unmasked=_slice(last, begin), masked=masked)


def _slice(start: int, stop: int) -> slice | None:
    return slice(start, stop) if stop > start else None


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Consecutive rows as a slice, which copies nothing."""
    start, stop = int(rows[0]), int(rows[-1]) + 1
    return slice(start, stop) if stop - start == len(rows) else rows
