"""The pieces a plan is made of: segments cut into tiles, blocks of the band, blocks of sinks, and their masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from focus.attention.dense import MASKED

TILE = 64
RECTANGLE = 256
LARGE_RECTANGLE = 1024
CAUSAL_KERNEL = 6144


@dataclass(frozen=True)
class Tile:
    """Queries `rows` of a segment against its `keys`; `mask` [1, 1, rows, keys] or None; `causal` for whole groups.

    `more` says that an earlier tile has the same queries, with other keys.
    """

    rows: slice
    keys: slice
    mask: Tensor | None = None
    causal: bool = False
    more: bool = False


@dataclass(frozen=True)
class Segment:
    """Positions of the queries and of the keys they see, both increasing; `whole` when they are the same."""

    batch: int
    rows: Tensor
    keys: Tensor
    whole: bool
    sliding_window: int | None

    def tiles(self) -> Iterator[Tile]:
        """The segment's causal pairs."""
        length = len(self.rows)
        if not self.whole or self.sliding_window is not None:
            yield from self._ragged_tiles()
        elif length <= TILE or length > CAUSAL_KERNEL or self.rows.is_cuda:
            yield Tile(slice(0, length), slice(0, length), causal=True)
        else:
            yield from self._causal_tiles()

    def _causal_tiles(self) -> Iterator[Tile]:
        """For groups of a few thousand tokens at most: the kernel's causal call skips keys in blocks of 512 only."""
        length, triangle = len(self.rows), _triangle(self.rows.device)
        for block in range(0, length, RECTANGLE):
            end = min(block + RECTANGLE, length)
            if block:
                yield Tile(slice(block, end), slice(0, block))
            for start in range(block, end, TILE):
                stop, left = min(start + TILE, end), RECTANGLE - TILE - (start - block)
                mask = triangle[:, :, : stop - start, left : left + stop - block]
                yield Tile(slice(start, stop), slice(block, stop), mask, more=block > 0)

    def _ragged_tiles(self) -> Iterator[Tile]:
        """For queries that are only some of the keys, or a sliding window."""
        window = self.sliding_window
        reach = torch.searchsorted(self.keys, self.rows, right=True).tolist()
        if window is None:
            yield from self._block(slice(0, len(reach)), 0, False, reach)
            return
        first = torch.searchsorted(self.keys, self.rows - window, right=True).tolist()
        for start in range(0, len(reach), TILE):
            rows = slice(start, min(start + TILE, len(reach)))
            yield self._ragged_tile(rows, slice(first[start], reach[rows.stop - 1]), False)

    def _block(self, rows: slice, left: int, more: bool, reach: list[int]) -> Iterator[Tile]:
        """Keys from `left` on: those that all rows see in one tile, then the rest for ever smaller blocks of rows."""
        shared, length = reach[rows.start], rows.stop - rows.start
        if shared - left >= TILE:
            yield Tile(rows, slice(left, shared), more=more)
            left, more = shared, True
        if length > TILE:
            size = next(size for size in (LARGE_RECTANGLE, RECTANGLE, TILE) if size < length)
            for start in range(rows.start, rows.stop, size):
                yield from self._block(slice(start, min(start + size, rows.stop)), left, more, reach)
        elif reach[rows.stop - 1] > left:
            yield self._ragged_tile(rows, slice(left, reach[rows.stop - 1]), more)

    def _ragged_tile(self, rows: slice, keys: slice, more: bool) -> Tile:
        distance = self.rows[rows].unsqueeze(1) - self.keys[keys]
        outside = distance < 0
        if self.sliding_window is not None:
            outside |= distance >= self.sliding_window
        return Tile(rows, keys, torch.mul(outside, MASKED)[None, None], more=more)


@dataclass(frozen=True)
class Band:
    """`blocks` times `size` queries from position `start` on, each block with its own keys and `back` before them."""

    batch: int
    start: int
    blocks: int
    size: int
    back: int
    offset: int

    @property
    def positions(self) -> slice:
        return slice(self.start, self.start + self.blocks * self.size)

    @property
    def rows(self) -> slice:
        return slice(self.positions.start - self.offset, self.positions.stop - self.offset)

    @property
    def keys(self) -> slice:
        return slice(self.start - self.back, self.start + self.blocks * self.size)

    @property
    def width(self) -> int:
        return self.back + self.size

    def queries_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[H, Tq, ...] -> [blocks, H, size, ...], a view unless the dtype changes."""
        return x[:, self.rows].to(dtype).unflatten(1, (self.blocks, self.size)).transpose(0, 1)

    def keys_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[Hkv, Tk, D] -> overlapping windows [blocks, Hkv, width, D], a view unless the dtype changes."""
        return x[:, self.keys].to(dtype).unfold(1, self.width, self.size).permute(1, 0, 3, 2)

    def add_to_keys(self, total: Tensor, windows: Tensor) -> None:
        """Add [blocks, Hkv, width, D] into [Hkv, Tk, D]: the transpose of `keys_of`."""
        if self.blocks == 1:
            total[:, self.keys] += windows[0]
            return
        first = self.start - self.back
        for shift in range(0, self.width, self.size):
            rows = slice(first + shift, first + shift + self.blocks * self.size)
            part = windows[:, :, shift : shift + self.size].transpose(0, 1)
            total[:, rows].unflatten(1, (self.blocks, self.size)).add_(part)


@dataclass(frozen=True)
class SinkBlock:
    """Queries `rows` against the sink keys at the positions `keys`; mask [1, 1, rows, S]."""

    batch: int
    rows: slice
    keys: Tensor
    mask: Tensor


@lru_cache(maxsize=2)
def _triangle(device: torch.device) -> Tensor:
    """[1, 1, TILE, RECTANGLE], causal for a tile whose own keys are the last ones."""
    mask = torch.zeros(TILE, RECTANGLE, device=device)
    mask[:, -TILE:] = torch.full((TILE, TILE), MASKED, device=device).triu(1)
    return mask[None, None]


@lru_cache(maxsize=16)
def distance_mask(size: int, back: int, window: int, device: torch.device) -> Tensor:
    """[size, back + size], zero for pairs at a distance of 0 ... window."""
    distance = torch.arange(back, back + size).unsqueeze(1) - torch.arange(back + size)
    mask = torch.zeros(distance.shape).masked_fill_((distance < 0) | (distance > window), MASKED)
    return mask.to(device)
