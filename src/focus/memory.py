"""What Focus must remember while generating: the assignment of past tokens, kept inside the cache layer of their keys.

A cache layer gets a second class mixed in, so that whatever happens to its keys (beams reordered, tokens cropped, rows
repeated or selected) happens to the memory too, and the memory dies with the cache. A layer that grows without bound
also hands its keys and values over to a `GroupedCache` while hard attention decodes, and takes them back when anything
else wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from focus.attention import GroupedCache
from focus.errors import UserError


class Memory(CacheLayerMixin):
    """Mixed into a cache layer; assignments [B, n, K] and ordinals [B, n] of the n tokens whose keys it holds.

    The ordinal of a token is how many real tokens its sequence has up to it, so that the first real tokens are known
    even after a sliding layer has dropped them.
    """

    _layer_type = None  # a cache layer class with a type would register itself with transformers
    _noted: list[tuple[Tensor, Tensor]] | None = None
    apart = False  # whether the keys of the last update are only the new ones

    @property
    def assignments(self) -> Tensor | None:
        return self._joined()[0]

    @property
    def ordinals(self) -> Tensor | None:
        return self._joined()[1]

    def note(self, assignment: Tensor, padding_mask: Tensor | None) -> None:
        """Append new tokens: assignment [B, Tq, K], mask [B, Tq]."""
        new = assignment.shape[:2]
        real = assignment.new_ones(new, dtype=torch.long) if padding_mask is None else padding_mask.long()
        ordinals = real.cumsum(dim=1)
        if self._noted:
            ordinals += self._noted[-1][1][:, -1:]
        else:
            self._noted = []
        self._noted.append((assignment.detach(), ordinals))

    def remember(self, assignment: Tensor, padding_mask: Tensor | None, keys: int) -> tuple[Tensor, Tensor]:
        """Append new tokens (assignment [B, Tq, K], mask [B, Tq]) and return what belongs to the last `keys` tokens.

        Call it after the layer took the new keys. Raises UserError when past tokens were never seen by Focus.
        """
        past = self.assignments
        self._check(assignment.shape[1] + (0 if past is None else past.shape[1]), keys)
        self.note(assignment, padding_mask)
        assignment = assignment if past is None else torch.cat([past, assignment], dim=1)
        ordinals = self.ordinals
        self._trim()
        return assignment[:, -keys:], ordinals[:, -keys:]

    def reset(self) -> None:
        super().reset()
        self._noted = None

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

    def _joined(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if not self._noted:
            return None, None
        if len(self._noted) > 1:
            self._noted = [tuple(torch.cat(parts, dim=1) for parts in zip(*self._noted, strict=True))]
        return self._noted[0]

    def _check(self, noted: int, keys: int) -> None:
        if noted < keys:
            raise UserError(
                f"cache: expected the groups of all {keys} tokens, got {noted}; "
                "the others were cached without Focus (attention full, or before compose): start a new cache"
            )

    def _trim(self) -> None:
        if getattr(self, "is_sliding", False):
            held = self.keys.shape[-2]
            self._change(lambda tensor: tensor[:, max(tensor.shape[1] - held, 0) :])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._noted:
            self._noted = [tuple(map(change, self._joined()))]


class GroupedMemory(Memory):
    """Mixed into transformers' DynamicLayer: while hard attention decodes, its keys and values lie in a GroupedCache.

    They are held once. A forward with hard attention that continues the cache, without recording gradients, moves them
    there; transformers then neither copies them for each token nor sees them. Whoever reads `keys` or `values`
    (another attention, an operation of transformers that is not overridden here) moves them back first, padding as
    zeros. Sliding layers stay as they are: their own window bounds them.
    """

    _grouped: GroupedCache | None = None
    _form: dict | None = None
    _expected = False

    @property
    def keys(self) -> Tensor | None:
        self._ungroup()
        return self.__dict__.get("keys")

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self.__dict__["keys"] = keys

    @property
    def values(self) -> Tensor | None:
        self._ungroup()
        return self.__dict__.get("values")

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self.__dict__["values"] = values

    def expect(self, hard: bool) -> None:
        """Say for which attention the next update of the keys comes."""
        self._expected = hard and not torch.is_grad_enabled() and self.get_seq_length() > 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """New tokens as they are when hard attention will add them itself (`attend`), else as transformers does."""
        self.apart, self._expected = self._expected, False
        return (key_states, value_states) if self.apart else super().update(key_states, value_states, *args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        assignment: Tensor,
        padding_mask: Tensor | None,
        *,
        group: Callable[[Tensor], Tensor],
        top_k: int,
        **settings,
    ) -> Tensor:
        """Append n new tokens and return their hard attention [B, H, n, D].

        assignment: [B, n, K], which `group` turns into groups, `top_k` a token; padding_mask: bool [B, all tokens];
        `settings` are those of GroupedCache. Raises UserError, and appends nothing, when past tokens were never seen by
        Focus or their mask has changed.
        """
        new, past = query.shape[2], self.get_seq_length()
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        form = {"top_k": top_k, "dtype": dtype} | settings
        stale = self._grouped is None or form != self._form
        if stale:
            self._check(self.assignments.shape[1] + new, past + new)
        before = self._noted[-1][1][:, -1]
        now = torch.full_like(before, past) if padding_mask is None else padding_mask[:, :past].sum(dim=1)
        if not torch.equal(before, now):
            raise UserError(
                f"attention_mask: expected the {before.tolist()} past tokens that were real when cached, "
                f"got {now.tolist()}: start a new cache"
            )
        if stale:
            keys, values, grouped = self.keys, self.values, GroupedCache(**settings)
            real = None if padding_mask is None else padding_mask[:, :past]
            grouped.fill(keys.to(dtype), values.to(dtype), group(self.assignments), real)
            self.keys = self.values = None
            self._grouped, self._form, self._given = grouped, form, keys.dtype
        real = None if padding_mask is None else padding_mask[:, past:]
        self.note(assignment, real)
        out = self._grouped.attend(query.to(dtype), key.to(dtype), value.to(dtype), group(assignment), real)
        return out.to(query.dtype)

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._grouped is None else self._grouped.length

    def reset(self) -> None:
        self._grouped = None
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        if self._grouped is None or tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        else:
            self._grouped.crop(self._grouped.length + tokens_to_remove)
            self._change(lambda tensor: tensor[:, : tensor.shape[1] + tokens_to_remove])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._grouped is None:
            super().reorder_cache(beam_idx)
        else:
            self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._grouped is None:
            super().batch_repeat_interleave(repeats)
        else:
            self._select(torch.arange(self._grouped.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._grouped is None:
            super().batch_select_indices(indices)
        else:
            self._select(torch.arange(self._grouped.batch)[indices.cpu()])

    def _select(self, rows: Tensor) -> None:
        self._grouped.reorder(rows)
        self._change(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def _ungroup(self) -> None:
        if self._grouped is not None:
            grouped, self._grouped = self._grouped, None
            self.keys, self.values = (x.to(self._given) for x in grouped.plain())


def announce(cache: Cache, layer_idx: int, hard: bool) -> None:
    """Tell a layer that remembers for which attention the next update of its keys comes."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if isinstance(layer, GroupedMemory):
        layer.expect(hard)


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
    memory = GroupedMemory if layer_class is DynamicLayer else Memory
    return type(f"Remembering{layer_class.__name__}", (memory, layer_class), {})
