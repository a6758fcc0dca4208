"""Masks that are computed without an n x n array: a few queries against a few keys at a time, gathered into tiles.

Two makers of tiles serve the methods: `band_tiles` for the window, and `block_tiles` for queries that each choose some
blocks of the keys, in an order of the keys that the method gives (by time, or by cluster). The tiles of one query may
be many, but no pair may be in two of them: one softmax goes over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from focus.methods.structural import Call, Masked

SHORTEST_TILED = 2048
ROWS = 4096
BAND_TILE = 64
LARGEST_TILE, SMALLEST_TILE = 64, 8


@dataclass(frozen=True)
class Tiles:
    """N tiles of t queries by b keys.

    queries int64 [N, t]: rows of the flattened [B, H, n] queries, the row after the last one for an empty place;
    keys int64 [N, b]: rows of the flattened [B, Hkv, Tk] keys; allowed bool [N, t, b].
    """

    queries: Tensor
    keys: Tensor
    allowed: Tensor


class Tiled(Masked):
    """A mask with a second way of computing it, for long inputs: through tiles, in O(n) memory."""

    def plan(self, call: Call):
        """What is computed once for all queries of a call."""

    def tiles(self, call: Call, plan, rows: slice) -> list[Tiles]:
        """Tiles that together hold the allowed pairs of the queries `rows`, each once."""
        raise NotImplementedError

    def attend(self, call: Call) -> Tensor:
        """Through tiles from SHORTEST_TILED queries on, unless pairs are to be counted."""
        length = call.query.shape[2]
        if length < SHORTEST_TILED or call.state.observed is not None:
            return super().attend(call)
        call.state.backend = "tiles"
        plan = self.plan(call)
        blocks = [slice(start, min(start + ROWS, length)) for start in range(0, length, ROWS)]
        return torch.cat([attend_tiles(call, rows, self.tiles(call, plan, rows)) for rows in blocks], dim=2)


def attend_tiles(call: Call, rows: slice, tiles: Sequence[Tiles]) -> Tensor:
    """Attention of the queries `rows` over the pairs of `tiles`: [B, H, n, D], zero for a query without any pair.

    Scores and softmax at least in float32; differentiable.
    """
    query = call.query[:, :, rows]
    shape, width = query.shape, call.value.shape[3]
    query = torch.cat([query.reshape(-1, shape[3]), query.new_zeros(1, shape[3])])
    key, value = call.key.reshape(-1, shape[3]), call.value.reshape(-1, width)
    high = torch.promote_types(query.dtype, torch.float32)
    scores = [_scores(call, query, key, tile).to(high) for tile in tiles]
    with torch.no_grad():
        peak = torch.full((len(query),), torch.finfo(high).min, dtype=high, device=query.device)
        for tile, score in zip(tiles, scores, strict=True):
            peak.scatter_reduce_(0, tile.queries.flatten(), score.amax(dim=-1).flatten(), "amax")
    total, out = query.new_zeros(len(query), dtype=high), query.new_zeros(len(query), width, dtype=high)
    for tile, score in zip(tiles, scores, strict=True):
        index = tile.queries.flatten()
        weights = torch.exp(score - peak[tile.queries].unsqueeze(-1))
        total = total.index_add(0, index, weights.sum(dim=-1).flatten())
        part = torch.bmm(weights.to(value.dtype), value[tile.keys])
        out = out.index_add(0, index, part.to(high).flatten(0, 1))
    out = out[:-1] / total[:-1].unsqueeze(-1).clamp(min=torch.finfo(high).tiny)
    return out.reshape(*shape[:3], width).to(query.dtype)


def _scores(call: Call, query: Tensor, key: Tensor, tile: Tiles) -> Tensor:
    scores = torch.bmm(query[tile.queries], key[tile.keys].transpose(1, 2)) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores.masked_fill(~tile.allowed, -torch.inf)


def band_tiles(call: Call, rows: slice, window: int) -> Tiles:
    """The visible keys at a distance of at most `window` of the queries `rows`."""
    device, count = call.key.device, rows.stop - rows.start
    batch, heads, key_heads, keys = *call.query.shape[:2], *call.key.shape[1:3]
    blocks = -(-count // BAND_TILE)
    local = torch.arange(blocks * BAND_TILE, device=device).view(blocks, BAND_TILE)
    places = local[:, :1] + (call.offset + rows.start - window) + torch.arange(window + BAND_TILE, device=device)
    inside = (places >= 0) & (places < keys)
    distance = local.unsqueeze(2) + (call.offset + rows.start) - places.unsqueeze(1)
    allowed = (distance >= 0) & (distance <= window) & inside.unsqueeze(1) & (local < count).unsqueeze(2)
    if call.sliding_window is not None:
        allowed = allowed & (distance < call.sliding_window)
    places = places.clamp(0, keys - 1)
    allowed = allowed.expand(batch, *allowed.shape)
    if call.padding_mask is not None:
        allowed = allowed & call.padding_mask[:, places].unsqueeze(2)
    of_head = torch.arange(batch * heads, device=device)
    queries = torch.where(local < count, of_head.view(-1, 1, 1) * count + local, batch * heads * count)
    of_key_head = torch.arange(batch * key_heads, device=device).repeat_interleave(heads // key_heads)
    return Tiles(
        queries.flatten(0, 1),
        (of_key_head.view(-1, 1, 1) * keys + places).flatten(0, 1),
        allowed.unsqueeze(1).expand(-1, heads, -1, -1, -1).reshape(-1, *allowed.shape[2:]),
    )


@dataclass(frozen=True)
class Choice:
    """Which keys some queries read: those of the chosen blocks, farther away than `beyond` and within bounds.

    blocks int64 [B, H, n, k]: numbers of different blocks, -1 for none; first, last int64 [B, H, n]: a key at the place
    p of the method's order is read when first <= p < last; None for all.
    """

    blocks: Tensor
    beyond: int = -1
    first: Tensor | None = None
    last: Tensor | None = None


def block_tiles(call: Call, rows: slice, choice: Choice, order: Tensor, size: int) -> Tiles:
    """Tiles for queries that choose blocks of `size` keys.

    order int64 [B, Hkv or H, Tk]: positions of the keys, for every key head or every query head; blocks are cut from it.
    Each tile has keys of one block, and queries that chose it.
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

    members = torch.bincount(block, minlength=batch * orders * blocks)
    average = len(block) // max(int((members > 0).sum()), 1)
    tile = min(max(SMALLEST_TILE, 1 << average.bit_length() >> 1), LARGEST_TILE)
    tiles = (members + tile - 1) // tile
    of_block = torch.arange(len(members), device=device).repeat_interleave(tiles)
    rank = (torch.arange(len(of_block), device=device) - (tiles.cumsum(0) - tiles)[of_block]) * tile
    places = rank.unsqueeze(1) + torch.arange(tile, device=device)
    taken = places < members[of_block].unsqueeze(1)
    start = (members.cumsum(0) - members)[of_block].unsqueeze(1)
    of_tile = queries[torch.where(taken, start + places, len(block))]

    at = (of_block % blocks).unsqueeze(1) * size + torch.arange(size, device=device)
    key = order.reshape(batch * orders, keys)[(of_block // blocks).unsqueeze(1), at.clamp(max=keys - 1)]
    of_sequence = of_block // (blocks * orders)
    key_head = of_block // blocks % orders * key_heads // orders
    query_place = of_tile % count + rows.start + call.offset
    distance = query_place.unsqueeze(2) - key.unsqueeze(1)
    allowed = (distance > choice.beyond) & (at < keys).unsqueeze(1) & taken.unsqueeze(2)
    if call.sliding_window is not None:
        allowed &= distance < call.sliding_window
    if call.padding_mask is not None:
        allowed &= call.padding_mask[of_sequence.unsqueeze(1), key].unsqueeze(1)
    if choice.first is not None:
        first, last = (torch.cat([x.flatten(), x.new_zeros(1)])[of_tile] for x in (choice.first, choice.last))
        allowed &= (at.unsqueeze(1) >= first.unsqueeze(2)) & (at.unsqueeze(1) < last.unsqueeze(2))
    key_row = (of_sequence * key_heads + key_head).unsqueeze(1) * keys + key
    return Tiles(of_tile, key_row, allowed)


def real_first(call: Call) -> Tensor:
    """int64 [B, Hkv, Tk]: positions of the real tokens in order of time, then those of padding."""
    batch, key_heads, keys = call.key.shape[:3]
    if call.padding_mask is None:
        order = torch.arange(keys, device=call.key.device).expand(batch, -1)
    else:
        order = (~call.padding_mask).int().sort(dim=1, stable=True).indices
    return order.unsqueeze(1).expand(-1, key_heads, -1)


def holds(blocks: Tensor, of_key: Tensor, count: int) -> Tensor:
    """Whether each query's blocks (int64 [B, H, n, k], -1 for none) hold each key, whose block is of_key [B, Tk].

    bool [B, H, n, Tk]; `count` is the number of blocks that there are.
    """
    chosen = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=blocks.device)
    chosen = chosen.scatter(3, blocks % (count + 1), True)[..., :count]
    return chosen.gather(3, of_key[:, None, None].expand(-1, *blocks.shape[1:3], -1))
