"""What the methods share whose queries pick whole blocks of keys by a score of the block."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from focus.errors import UserError
from focus.method_config import Method
from focus.methods.structural import Call
from focus.methods.tiled import Choice, Tiled, Tiles, block_tiles, holds, real_first

SCORES = 1 << 23


class BestBlocks(Tiled):
    """A query sees its own block, and of the complete blocks before it those that score best.

    Blocks are cut from the real tokens, so padding moves none. A block's score is the product of what `probe` makes of
    the query and `summarise` of the keys; each query head chooses for itself. Only whole past blocks are scored: what
    comes later changes no choice. Which past blocks score best cannot be told once a cache has dropped their keys.
    """

    @abstractmethod
    def size(self, settings: Method) -> int:
        """Tokens in a block."""

    @abstractmethod
    def count(self, settings: Method) -> int:
        """Blocks a query sees, its own among them."""

    @abstractmethod
    def summarise(self, blocks: Tensor) -> Tensor:
        """Keys in blocks [B, Hkv, N, size, D] -> [B, Hkv, N, E]."""

    @abstractmethod
    def probe(self, query: Tensor) -> Tensor:
        """Queries [B, H, n, D] -> [B, H, n, E]."""

    def allowed(self, call: Call, rows: slice) -> Tensor:
        """bool [B, H, n, Tk]."""
        size = self.size(call.state.settings)
        chosen = self._choose(call, self._summaries(call, real_first(call)), rows)
        return holds(chosen, call.positions() // size)

    def plan(self, call: Call) -> tuple[Tensor, Tensor]:
        """The order of the keys, and the blocks' summaries."""
        order = real_first(call)
        return order, self._summaries(call, order)

    def tiles(self, call: Call, plan: tuple[Tensor, Tensor], rows: slice) -> list[Tiles]:
        """The chosen blocks."""
        order, summaries = plan
        own, past = self._choose(call, summaries, rows).tensor_split([1], dim=-1)
        size = self.size(call.state.settings)
        return [block_tiles(call, rows, choice, order, size) for choice in (Choice(own, beyond=-1), Choice(past))]

    @torch.no_grad()
    def _summaries(self, call: Call, order: Tensor) -> Tensor:
        """[B, Hkv, N, E] of the N blocks that Tk tokens could fill; those that hold padding are never chosen."""
        if call.forgotten is not None:
            raise UserError(
                f"kind {self.name}: expected a cache that holds the keys of all tokens, got one that has dropped some, "
                f"for a layer with a sliding window of {call.sliding_window}; generate with use_cache=False"
            )
        size = self.size(call.state.settings)
        whole = call.key.shape[2] // size * size
        keys = call.key[:, :, :whole]
        if call.padding_mask is not None:
            keys = call.key.gather(2, order[:, :, :whole, None].expand(-1, -1, -1, call.key.shape[3]))
        return self.summarise(keys.unflatten(2, (-1, size))) if whole else keys

    @torch.no_grad()
    def _choose(self, call: Call, summaries: Tensor, rows: slice) -> Tensor:
        """int64 [B, H, n, k]: the own block, then the best ones, -1 where there are fewer."""
        settings, query = call.state.settings, call.query[:, :, rows]
        own = call.positions()[:, call.offset :][:, rows] // self.size(settings)
        chosen = own[:, None, :, None].expand(*query.shape[:3], 1)
        past = int(own.max())
        wanted = min(self.count(settings) - 1, past)
        if not wanted:
            return chosen
        summaries = summaries[:, :, :past].to(torch.promote_types(query.dtype, torch.float32))
        size = max(SCORES // (past * query.shape[0] * query.shape[1]), 1)
        best = [
            self._best(part, summaries, mine, wanted)
            for part, mine in zip(query.split(size, dim=2), own.split(size, dim=1), strict=True)
        ]
        return torch.cat([chosen, torch.cat(best, dim=2)], dim=-1)

    def _best(self, query: Tensor, summaries: Tensor, own: Tensor, count: int) -> Tensor:
        """int64 [B, H, n, count]: of the blocks before the own ones [B, n] those that score best, -1 for none."""
        grouped = self.probe(query).to(summaries.dtype).unflatten(1, (summaries.shape[1], -1))
        scores = (grouped @ summaries.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
        later = torch.arange(summaries.shape[2], device=query.device) >= own.unsqueeze(-1)
        best = scores.masked_fill_(later.unsqueeze(1), -torch.inf).topk(count, dim=-1)
        return torch.where(best.values > -torch.inf, best.indices, -1)
