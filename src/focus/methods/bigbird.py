"""Window, global and random blocks (BigBird, arXiv 2007.14062, section 2), in a causal decoder.

Every query sees the keys within the window, the first `global_blocks` blocks, and for its block of queries
`random_blocks` blocks drawn among the past ones that lie beyond the window and are not global: other ones for each
layer, head and block of queries. The draw depends on these and the seed alone, so a longer text only adds rows.

Simplified: the paper uses the pattern in an encoder. Of its two global blocks, the first and the last one, causality
leaves the first, and what a global token reads is its past, which lies in the global blocks. The window is the model's
w, in tokens, instead of one and a half blocks on each side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.method_config import Method
from focus.methods.hashing import BITS, mixed
from focus.methods.structural import Call, LayerState
from focus.methods.tiled import Choice, Tiled, Tiles, band_tiles, block_tiles, holds, real_first


class Drawn(LayerState):
    """The buffer `seed` int64 [1] decides all of a layer's random blocks."""

    def __init__(self, settings: Method, window: int, generator: torch.Generator):
        super().__init__(settings, window)
        self.register_buffer("seed", torch.randint(BITS, (1,), generator=generator))


class BigBird(Tiled):
    """Near keys, global blocks, random blocks."""

    name = "bigbird"

    def layer_state(self, settings: Method, *, window: int, heads: int, head_dim: int, generator) -> Drawn:
        """A seed for each layer."""
        return Drawn(settings, window, generator)

    def allowed(self, call: Call, rows: slice) -> Tensor:
        """bool [B, H, n, Tk]."""
        queries = torch.arange(call.query.shape[2], device=call.key.device)[rows, None] + call.offset
        near = queries - torch.arange(call.key.shape[2], device=call.key.device) <= call.state.window
        block = call.state.settings.block
        return near | holds(_blocks(call, rows), call.positions() // block)

    def plan(self, call: Call) -> Tensor:
        """The order of the keys."""
        return real_first(call)

    def tiles(self, call: Call, plan: Tensor, rows: slice) -> list[Tiles]:
        """The window, and the blocks beyond it."""
        window, settings = call.state.window, call.state.settings
        shared, drawn = _blocks(call, rows).tensor_split([settings.global_blocks], dim=-1)
        choices = Choice(shared, beyond=window), Choice(drawn)
        blocks = [block_tiles(call, rows, choice, plan, settings.block) for choice in choices]
        return [band_tiles(call, rows, window), *blocks]

    def pairs_kept(self, settings: Method, window: int, length: int) -> tuple[float, float]:
        """By counting, position by position: how many blocks are drawn does not depend on the draw."""
        near = far = far_kept = 0
        for position in range(length):
            beyond = max(position - window, 0)
            near += position + 1 - beyond
            far += beyond
            far_kept += min(beyond, settings.global_blocks * settings.block)
            far_kept += min(_candidates(position // settings.block, settings, window), settings.random_blocks) * (
                settings.block
            )
        return (near + far_kept) / (near + far), far_kept / far if far else 1.0


def _candidates(row, settings: Method, window: int):
    """How many blocks the block `row` of queries may draw from: those beyond every query's window, not global."""
    count = (row * settings.block - window) // settings.block - settings.global_blocks
    return count.clamp(min=0) if isinstance(count, Tensor) else max(count, 0)


def _blocks(call: Call, rows: slice) -> Tensor:
    """Global and random blocks of the queries `rows`: int64 [B, H, n, global_blocks + random_blocks], -1 for none."""
    settings, device = call.state.settings, call.key.device
    row = call.positions()[:, call.offset :][:, rows] // settings.block
    drawn = draw(call.state.seed, row, _candidates(row, settings, call.state.window), call.query.shape[1], settings)
    shared = torch.arange(settings.global_blocks, device=device)
    shared = torch.where(shared <= row.unsqueeze(-1), shared, -1).unsqueeze(1)
    return torch.cat([shared.expand(*drawn.shape[:3], -1), drawn], dim=-1)


def draw(seed: Tensor, row: Tensor, candidates: Tensor, heads: int, settings: Method) -> Tensor:
    """`random_blocks` different ones of the `candidates` blocks after the global ones; as many as there are.

    row, candidates: int64 [B, n]. Returns int64 [B, heads, n, random_blocks], -1 for none. Floyd's algorithm, with a
    hash of seed, head, row and turn for a random number.
    """
    head = torch.arange(heads, device=row.device).view(1, heads, 1)
    state = mixed(mixed(mixed(seed) ^ head) ^ row.unsqueeze(1))
    limit, drawn = candidates.unsqueeze(1), []
    for turn in range(settings.random_blocks):
        last = limit - settings.random_blocks + turn
        pick = mixed(state ^ turn) % (last + 1).clamp(min=1)
        for earlier in drawn:
            pick = torch.where(earlier == pick, last, pick)
        drawn.append(torch.where(last >= 0, pick, -1))
    picks = torch.stack(drawn, dim=-1) if drawn else state.new_zeros(*state.shape, 0)
    return torch.where(picks >= 0, picks + settings.global_blocks, -1)
