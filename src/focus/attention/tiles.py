"""The pieces a plan is made of: segments cut into tiles, blocks of the band, blocks of sinks, and their masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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

    With `blocks` the same is done in each of that many blocks of `size` tokens, from `first` on; rows and keys then
    count inside a block. `groups` are how many groups of the segment, from the first on, have such queries; None means
    all. `more` says that an earlier tile has the same queries, with other keys.
    """

    rows: slice
    keys: slice
    mask: Tensor | None = None
    causal: bool = False
    more: bool = False
    first: int = 0
    size: int = 0
    blocks: int = 0
    groups: int | None = None

    def rows_of(self, x: Tensor) -> Tensor:
        """[N, H, n, ...] of a segment -> [groups or blocks, H, rows, ...], a view; N = 1 with blocks."""
        return self._part(x, self.rows)

    def keys_of(self, x: Tensor) -> Tensor:
        """[N, Hkv, n, ...] of a segment -> [groups or blocks, Hkv, keys, ...], a view; N = 1 with blocks."""
        return self._part(x, self.keys)

    def _part(self, x: Tensor, tokens: slice) -> Tensor:
        if not self.blocks:
            return x[: self.groups, :, tokens]
        blocks = x[0, :, self.first : self.first + self.blocks * self.size].unflatten(1, (self.blocks, self.size))
        return blocks[:, :, tokens].transpose(0, 1)


@dataclass(frozen=True)
class Segment:
    """Positions of the queries and of the keys they see, both increasing; `whole` when they are the same.

    Several whole groups of about one length may share a segment. They lie one after the other, each followed by copies
    of its last token up to the length of the longest; `lengths` are their real ones, the longest first.
    """

    batch: int
    rows: Tensor
    keys: Tensor
    whole: bool
    sliding_window: int | None
    lengths: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        """How many groups lie side by side."""
        return max(1, len(self.lengths))

    @property
    def queries(self) -> int:
        """How many queries there are, copies not counted."""
        return sum(self.lengths) if self.lengths else len(self.rows)

    def apart(self, x: Tensor) -> Tensor:
        """[1, H, n, ...] -> [groups, H, n / groups, ...], a view."""
        return x if self.groups == 1 else x[0].unflatten(1, (self.groups, -1)).transpose(0, 1)

    def real(self, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """For each group its positions [m] and, of each part [groups, H, n / groups, ...], its rows [H, m, ...]."""
        if self.groups == 1:
            yield self.rows, *(x[0] for x in parts)
            return
        positions = self.rows.view(self.groups, -1)
        for index, length in enumerate(self.lengths):
            yield positions[index, :length], *(x[index, :, :length] for x in parts)

    def clear_copies(self, x: Tensor) -> None:
        """Zero the rows of x [groups, H, n / groups, D] that stand for copies."""
        if self.groups > 1:
            for index, length in enumerate(self.lengths):
                x[index, :, length:] = 0

    def tiles(self, together: bool = True) -> Iterator[Tile]:
        """The segment's causal pairs; `together` allows tiles with blocks."""
        length = len(self.rows) // self.groups
        if not self.whole or self.sliding_window is not None:
            yield from self._ragged_tiles()
        elif length <= TILE or length > CAUSAL_KERNEL or self.rows.is_cuda:
            yield Tile(slice(0, length), slice(0, length), causal=True)
        else:
            tiles = _causal_tiles(length, _triangle(self.rows.device), together and self.groups == 1)
            for tile in tiles:
                yield tile if self.groups == 1 else replace(tile, groups=sum(n > tile.rows.start for n in self.lengths))

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


def _causal_tiles(length: int, triangle: Tensor, together: bool) -> Iterator[Tile]:
    """For groups of a few thousand tokens at most: the kernel's causal call skips keys in blocks of 512 only."""
    for first, size, blocks in _blocks(length, RECTANGLE, together):
        for start in range(0, size, TILE):
            stop, left = min(start + TILE, size), RECTANGLE - TILE - start
            mask = triangle[:, :, : stop - start, left : left + stop]
            yield _tile(first, size, blocks, slice(start, stop), slice(0, stop), mask)
    for first, size, blocks in _blocks(length, LARGE_RECTANGLE, together):
        for start in range(RECTANGLE, size, RECTANGLE):
            yield _tile(first, size, blocks, slice(start, min(start + RECTANGLE, size)), slice(0, start), more=True)
    for start in range(LARGE_RECTANGLE, length, LARGE_RECTANGLE):
        yield Tile(slice(start, min(start + LARGE_RECTANGLE, length)), slice(0, start), more=True)


def _blocks(length: int, size: int, together: bool) -> Iterator[tuple[int, int, int]]:
    """The first token, the size and the number of equal blocks; the last one may be shorter."""
    full = length // size
    if together and full > 1:
        yield 0, size, full
    else:
        yield from ((index * size, size, 1) for index in range(full))
    if length % size:
        yield full * size, length % size, 1


def _tile(
    first: int, size: int, blocks: int, rows: slice, keys: slice, mask: Tensor | None = None, more: bool = False
) -> Tile:
    """The tile of `rows` and `keys` counted inside each block."""
    if blocks > 1:
        return Tile(rows, keys, mask, more=more, first=first, size=size, blocks=blocks)
    rows, keys = (slice(first + x.start, first + x.stop) for x in (rows, keys))
    return Tile(rows, keys, mask, more=more)


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
