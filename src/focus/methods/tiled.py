"""Masks that are computed without an n x n array: a few queries against a few keys at a time, gathered into tiles.

Two makers of tiles serve the methods: `band_tiles` for the window, and `block_tiles` for queries that each choose some
blocks of the keys, in an order of the keys that the method gives (by time, or by cluster). A query may be in many
tiles, but no pair in two: the tiles' results are merged by log-sum-exp, forward and backward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from focus.attention.dense import MASKED
from focus.attention.flash import Pieces, choose_pieces
from focus.methods.structural import Call, Masked

SHORTEST_TILED = 2048
ROWS = 8192
BAND_TILE = 64
LARGEST_TILE, SMALLEST_TILE = 256, 4
PLACES, MASK_SIZE = 1 << 16, 1 << 23
NOTHING = -1e35


@dataclass(frozen=True)
class Tiles:
    """N tiles of t queries by b keys, of h query heads that share hk key heads.

    queries int64 [N, h, t]: rows of the flattened [B, H, n] queries, the row after the last one for an empty place;
    keys int64 [N, hk, b]: rows of the flattened [B, Hkv, Tk] keys; allowed bool [N, 1, t, b], or None for all pairs.
    """

    queries: Tensor
    keys: Tensor
    allowed: Tensor | None = None

    def parts(self) -> Iterator[Tiles]:
        """The same, some tiles at a time."""
        places = self.queries[:1].numel()
        size = PLACES // max(places, 1)
        if self.allowed is not None:
            size = min(size, MASK_SIZE // max(self.allowed[:1].numel(), 1))
        size = max(size, 1)
        for start in range(0, len(self.queries), size):
            part = slice(start, start + size)
            yield Tiles(self.queries[part], self.keys[part], None if self.allowed is None else self.allowed[part])

    def mask(self) -> Tensor | None:
        """float32 [N, 1, t, b], added to the scores."""
        if self.allowed is None:
            return None
        return torch.zeros(self.allowed.shape, device=self.allowed.device).masked_fill_(~self.allowed, MASKED)


class Tiled(Masked):
    """A mask with a second way of computing it, for long inputs: through tiles, in O(n) memory."""

    def plan(self, call: Call):
        """What is computed once for all queries of a call."""

    @abstractmethod
    def tiles(self, call: Call, plan, rows: slice) -> list[Tiles]:
        """Tiles that together hold the allowed pairs of the queries `rows`, each once."""

    def attend(self, call: Call) -> Tensor:
        """Through tiles from SHORTEST_TILED queries on, unless a cache has dropped keys, which moves blocks."""
        if call.query.shape[2] < SHORTEST_TILED or call.forgotten is not None:
            return super().attend(call)
        self.count_pairs(call)
        plan, pieces = self.plan(call), choose_pieces(call.query, call.value, scale=call.scale, softcap=call.softcap)
        call.state.backend = f"tiles/{pieces.name}"
        rest = replace(call, query=None, key=None, value=None)
        return _Attention.apply(call.query, call.key, call.value, rest, partial(self.tiles, plan=plan), pieces)


class _Attention(torch.autograd.Function):
    """Attention over the pairs of the tiles that `tiles` makes for some queries of a call: [B, H, Tq, D].

    `rest` is the call without its tensors, which are saved for the backward pass, where the tiles are made again. Zero
    for a query without any pair. Pieces are computed in float32 at least.
    """

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rest: Call,
        tiles: Callable[..., list[Tiles]],
        pieces: Pieces,
    ) -> Tensor:
        high, work = torch.promote_types(query.dtype, torch.float32), pieces.working_dtype(query.dtype)
        call = replace(rest, query=query, key=key, value=value)
        keys, values = (x.reshape(-1, x.shape[3]) for x in (key, value))
        outputs, norms = [], []
        for rows in _blocks_of(query.shape[2]):
            queries = _with_spare(query[:, :, rows])
            total = queries.new_zeros(len(queries), value.shape[3], dtype=high)
            lse = queries.new_full((len(queries),), NOTHING, dtype=high)
            for tile in (part for whole in tiles(call, rows=rows) for part in whole.parts()):
                out, out_lse = pieces.forward(
                    *(
                        _taken(x, index).to(work)
                        for x, index in ((queries, tile.queries), (keys, tile.keys), (values, tile.keys))
                    ),
                    tile.mask(),
                )
                lse = _merge(total, lse, tile.queries.flatten(), out.to(high).flatten(0, 2), out_lse.to(high).flatten())
            empty = lse < MASKED / 2
            shape = query[:, :, rows].shape[:3]
            outputs.append(total.masked_fill_(empty.unsqueeze(1), 0.0)[:-1].reshape(*shape, -1))
            norms.append(lse.masked_fill(empty, 0.0)[:-1].reshape(shape))
        out, lse = torch.cat(outputs, dim=2).to(query.dtype), torch.cat(norms, dim=2)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest, ctx.tiles, ctx.pieces = rest, tiles, pieces
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        query, key, value, out, lse = ctx.saved_tensors
        call = replace(ctx.rest, query=query, key=key, value=value)
        work, high = ctx.pieces.working_dtype(query.dtype), lse.dtype
        keys, values = (x.reshape(-1, x.shape[3]) for x in (key, value))
        grad_keys, grad_values = (torch.zeros_like(x, dtype=high) for x in (keys, values))
        grad_query = []
        for rows in _blocks_of(query.shape[2]):
            queries, grads, outs = (_with_spare(x[:, :, rows]) for x in (query, grad, out))
            norms = _with_spare(lse[:, :, rows].unsqueeze(3)).squeeze(1)
            grad_queries = torch.zeros_like(queries, dtype=high)
            for tile in (part for whole in ctx.tiles(call, rows=rows) for part in whole.parts()):
                index, of_keys = tile.queries, tile.keys.flatten()
                q, g, o = (_taken(x, index).to(work) for x in (queries, grads, outs))
                k, v = (_taken(x, tile.keys).to(work) for x in (keys, values))
                parts = ctx.pieces.backward(g, q, k, v, o, norms[index], tile.mask())
                grad_queries.index_add_(0, index.flatten(), parts[0].to(high).flatten(0, 2))
                grad_keys.index_add_(0, of_keys, parts[1].to(high).flatten(0, 2))
                grad_values.index_add_(0, of_keys, parts[2].to(high).flatten(0, 2))
            grad_query.append(grad_queries[:-1].reshape(query[:, :, rows].shape))
        grad_key, grad_value = (g.reshape(x.shape).to(x.dtype) for g, x in ((grad_keys, key), (grad_values, value)))
        return torch.cat(grad_query, dim=2).to(query.dtype), grad_key, grad_value, None, None, None


def _blocks_of(length: int) -> list[slice]:
    return [slice(start, min(start + ROWS, length)) for start in range(0, length, ROWS)]


def _with_spare(x: Tensor) -> Tensor:
    """[B, H, n, D] -> [B * H * n + 1, D], the last row zero."""
    return torch.cat([x.reshape(-1, x.shape[3]), x.new_zeros(1, x.shape[3])])


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for rows x [R, D]: faster than by indexing."""
    return x.index_select(0, index.flatten()).view(*index.shape, x.shape[1])


def _merge(total: Tensor, lse: Tensor, index: Tensor, out: Tensor, out_lse: Tensor) -> Tensor:
    """Merge out [m, D], out_lse [m] of the rows `index` into total [R, D], in place; returns lse [R] with them."""
    peak = lse.scatter_reduce(0, index, out_lse, "amax")
    before, part = torch.exp(lse - peak), torch.exp(out_lse - peak[index])
    mass = before.index_add(0, index, part)
    total.mul_((before / mass).unsqueeze(1))
    total.index_add_(0, index, out.mul_((part / mass[index]).unsqueeze(1)))
    return peak + mass.log()


def band_tiles(call: Call, rows: slice, window: int) -> Tiles:
    """The visible keys at a distance of at most `window` of the queries `rows`."""
    device, count = call.key.device, rows.stop - rows.start
    batch, heads, key_heads, keys = *call.query.shape[:2], *call.key.shape[1:3]
    blocks = -(-count // BAND_TILE)
    local = torch.arange(blocks * BAND_TILE, device=device).view(blocks, BAND_TILE)
    places = local[:, :1] + (call.offset + rows.start - window) + torch.arange(window + BAND_TILE, device=device)
    distance = local.unsqueeze(2) + (call.offset + rows.start) - places.unsqueeze(1)
    reach = window if call.sliding_window is None else min(window, call.sliding_window - 1)
    allowed = (distance >= 0) & (distance <= reach) & ((places >= 0) & (places < keys)).unsqueeze(1)
    places = places.clamp(0, keys - 1)
    allowed = allowed.expand(batch, *allowed.shape)
    if call.padding_mask is not None:
        allowed = allowed & call.padding_mask[:, places].unsqueeze(2)
    of_head = torch.arange(batch * heads, device=device).view(batch, 1, heads, 1)
    of_key_head = torch.arange(batch * key_heads, device=device).view(batch, 1, key_heads, 1)
    queries = torch.where((local < count).unsqueeze(1), of_head * count + local.unsqueeze(1), batch * heads * count)
    return Tiles(
        queries.flatten(0, 1),
        (of_key_head * keys + places.unsqueeze(1)).flatten(0, 1),
        allowed.flatten(0, 1).unsqueeze(1),
    )


@dataclass(frozen=True)
class Choice:
    """Which keys some queries read: of the chosen blocks all, or those farther than `beyond`, or within `bounds`.

    blocks int64 [B, H, n, k]: numbers of different blocks, -1 for none. bounds, two int64 [B, H, n]: a key at the place
    p of the method's order is read when first <= p < last; they leave out padding and later keys themselves, as must
    blocks that are read whole.
    """

    blocks: Tensor
    beyond: int | None = None
    bounds: tuple[Tensor, Tensor] | None = None


def block_tiles(call: Call, rows: slice, choice: Choice, order: Tensor, size: int) -> Tiles:
    """Tiles for queries that choose blocks of `size` keys.

    order int64 [B, Hkv or H, Tk]: positions of the keys, for every key head or every query head, that are cut into
    blocks. Each tile has keys of one block, and queries that chose it.
    """
    device, count = call.key.device, rows.stop - rows.start
    batch, heads, key_heads, keys = *call.query.shape[:2], *call.key.shape[1:3]
    orders, blocks = order.shape[1], -(-keys // size)
    of_order = torch.arange(batch * orders, device=device).view(batch, orders, 1).expand(-1, -1, heads // orders)
    block = of_order.reshape(batch, heads, 1, 1) * blocks + choice.blocks
    chosen = (choice.blocks >= 0).flatten()
    queries = torch.arange(batch * heads * count, device=device).view(batch, heads, count, 1)
    queries = queries.expand_as(choice.blocks).flatten()[chosen]
    block, ranking = block.flatten()[chosen].sort(stable=True)
    queries = torch.cat([queries[ranking], queries.new_full((1,), batch * heads * count)])
    of_block, of_tile = _packed(block, queries, batch * orders * blocks)
    at = (of_block % blocks).unsqueeze(1) * size + torch.arange(size, device=device)
    key = order.reshape(batch * orders, keys)[(of_block // blocks).unsqueeze(1), at.clamp(max=keys - 1)]
    of_sequence = of_block // (blocks * orders)
    key_head = of_block // blocks % orders * key_heads // orders
    key_row = (of_sequence * key_heads + key_head).unsqueeze(1) * keys + key
    outside = at >= keys
    if call.padding_mask is not None:
        outside |= ~call.padding_mask[of_sequence.unsqueeze(1), key]
    allowed = _read(call, choice, of_tile, of_tile % count + rows.start + call.offset, at, key, outside)
    return Tiles(of_tile.unsqueeze(1), key_row.unsqueeze(1), None if allowed is None else allowed.unsqueeze(1))


def _packed(block: Tensor, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Pairs of a block and a query, sorted by block, in tiles of one block: the blocks [N], and the queries [N, t].

    `queries` has one more entry than `block`, the row for empty places; `count` is the number of blocks.
    """
    members = torch.bincount(block, minlength=count)
    average = len(block) // max(int((members > 0).sum()), 1)
    tile = min(max(SMALLEST_TILE, 1 << average.bit_length() >> 1), LARGEST_TILE)
    tiles = (members + tile - 1) // tile
    of_block = torch.arange(count, device=block.device).repeat_interleave(tiles)
    rank = (torch.arange(len(of_block), device=block.device) - (tiles.cumsum(0) - tiles)[of_block]) * tile
    places = rank.unsqueeze(1) + torch.arange(tile, device=block.device)
    start = (members.cumsum(0) - members)[of_block].unsqueeze(1)
    taken = places < members[of_block].unsqueeze(1)
    return of_block, queries[torch.where(taken, start + places, len(block))]


def _read(
    call: Call, choice: Choice, of_tile: Tensor, query: Tensor, at: Tensor, key: Tensor, outside: Tensor
) -> Tensor | None:
    """bool [N, t, b], or None for all pairs.

    of_tile, query [N, t]: row and position of a query; at, key [N, b]: place and position of a key.
    """
    allowed = None
    if choice.beyond is not None:
        late = key.masked_fill(outside, call.key.shape[2])
        allowed = late.unsqueeze(1) < (query - choice.beyond).unsqueeze(2)
    if choice.bounds is not None:
        first, last = (torch.cat([x.flatten(), x.new_zeros(1)])[of_tile].unsqueeze(2) for x in choice.bounds)
        allowed = (at.unsqueeze(1) >= first) & (at.unsqueeze(1) < last)
    if call.sliding_window is not None and call.sliding_window < call.key.shape[2]:
        near = key.unsqueeze(1) > (query - call.sliding_window).unsqueeze(2)
        allowed = near if allowed is None else allowed & near
    return allowed


def real_first(call: Call) -> Tensor:
    """int64 [B, Hkv, Tk]: positions of the real tokens in order of time, then those of padding."""
    batch, key_heads, keys = call.key.shape[:3]
    if call.padding_mask is None:
        order = torch.arange(keys, device=call.key.device).expand(batch, -1)
    else:
        order = (~call.padding_mask).int().sort(dim=1, stable=True).indices
    return order.unsqueeze(1).expand(-1, key_heads, -1)


def holds(blocks: Tensor, of_key: Tensor) -> Tensor:
    """Whether each query's blocks (int64 [B, H, n, k], -1 for none) hold each key, whose block is of_key [B, Tk].

    bool [B, H, n, Tk]; no block lies after the last key's.
    """
    count = int(of_key.max()) + 1
    chosen = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=blocks.device)
    chosen = chosen.scatter(3, blocks % (count + 1), True)[..., :count]
    return chosen.gather(3, of_key[:, None, None].expand(-1, *blocks.shape[1:3], -1))
