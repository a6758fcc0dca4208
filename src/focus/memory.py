"""What Focus must remember while generating: the assignment of past tokens, kept inside the cache layer of their keys.

A cache layer gets a second class mixed in, so that whatever happens to its keys (beams reordered, tokens cropped, rows
repeated or selected) happens to the memory too, and the memory dies with the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from focus.errors import UserError


class Memory(CacheLayerMixin):
    """Mixed into a cache layer; assignments [B, n, K] and ordinals [B, n] of the n tokens whose keys it holds.

    The ordinal of a token is how many real tokens its sequence has up to it, so that the first real tokens are known
    even after a sliding layer has dropped them.
    """

    _layer_type = None  # a cache layer class with a type would register itself with transformers
    assignments: Tensor | None = None
    ordinals: Tensor | None = None

    def remember(self, assignment: Tensor, padding_mask: Tensor | None, keys: int) -> tuple[Tensor, Tensor]:
        """Append new tokens (assignment [B, Tq, K], mask [B, Tq]) and return what belongs to the last `keys` tokens.

        Call it after the layer took the new keys. Raises UserError when past tokens were never seen by Focus.
        """
        new = assignment.shape[:2]
        real = assignment.new_ones(new, dtype=torch.long) if padding_mask is None else padding_mask.long()
        ordinals = real.cumsum(dim=1)
        if self.assignments is not None:
            assignment = torch.cat([self.assignments, assignment], dim=1)
            ordinals = torch.cat([self.ordinals, self.ordinals[:, -1:] + ordinals], dim=1)
        if assignment.shape[1] < keys:
            raise UserError(
                f"cache: expected the groups of all {keys} tokens, got {assignment.shape[1]}; "
                "the others were cached without Focus (attention full, or before compose): start a new cache"
            )
        self.assignments, self.ordinals = assignment.detach(), ordinals
        self._trim()
        return assignment[:, -keys:], ordinals[:, -keys:]

    def reset(self) -> None:
        super().reset()
        self.assignments = self.ordinals = None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._change(lambda tensor: tensor[:, : tensor.shape[1] - abs(tokens_to_remove)])
        self._trim()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change(lambda tensor: tensor[indices])

    def _trim(self) -> None:
        if getattr(self, "is_sliding", False):
            held = self.keys.shape[-2]
            self._change(lambda tensor: tensor[:, max(tensor.shape[1] - held, 0) :])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.assignments is not None:
            self.assignments, self.ordinals = change(self.assignments), change(self.ordinals)


def memory_of(cache: Cache, layer_idx: int) -> Memory:
    """The memory inside the cache's layer, mixed in at the first call."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if not isinstance(layer, CacheLayerMixin):
        raise UserError(f"cache: expected layer {layer_idx} to hold keys of its own, got {type(layer).__name__}")
    if not isinstance(layer, Memory):
        layer.__class__ = _remembering(type(layer))
    return layer


@cache
def _remembering(layer_class: type) -> type:
    return type(f"Remembering{layer_class.__name__}", (Memory, layer_class), {})
