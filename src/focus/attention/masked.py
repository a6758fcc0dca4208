"""Focus attention as full attention under a mask, some queries at a time.

Exact for every argument. It does not use the sparsity, so it serves where splitting would not pay: short sequences,
few queries, and memberships that keep nearly all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from focus.attention.dense import MASKED
from focus.attention.flash import Pieces
from focus.attention.plan import MAX_GROUPS_IN_BITS, group_bits
from focus.attention.reference import same_group, sink_keys

ROWS = 64


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    pieces: Pieces,
    *,
    window: int,
    sinks: int | Tensor = 0,
    sliding_window: int | None = None,
    padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Out [B, H, Tq, D], differentiable, and lse [B, H, Tq], which is not (-inf for padding).

    Arguments as in `focus_attention`.
    """
    sinks = sink_keys(key.shape[2], sinks, padding_mask, key.device).expand(groups.shape[:2])
    mask = {"window": window, "sinks": sinks, "sliding_window": sliding_window, "padding_mask": padding_mask}
    return _Masked.apply(query, key, value, groups, mask, pieces)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, groups: Tensor, mask: dict, pieces: Pieces):
        out = query.new_empty(query.shape)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for rows, keys, added in _tiles(query.shape[2], groups, mask):
            out[:, :, rows], lse[:, :, rows] = pieces.forward(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], added
            )
        padding = _padded(query, mask)
        if padding is not None:
            out.masked_fill_(padding.unsqueeze(-1), 0.0)
            lse.masked_fill_(padding, float("-inf"))
        ctx.save_for_backward(query, key, value, groups, out, lse)
        ctx.mask, ctx.pieces = mask, pieces
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        query, key, value, groups, out, lse = ctx.saved_tensors
        padding = _padded(query, ctx.mask)
        if padding is not None:
            grad, lse = grad.masked_fill(padding.unsqueeze(-1), 0.0), lse.masked_fill(padding, 0.0)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
        for rows, keys, added in _tiles(query.shape[2], groups, ctx.mask):
            parts = ctx.pieces.backward(
                grad[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                added,
            )
            grad_query[:, :, rows] = parts[0]
            grad_key[:, :, keys] += parts[1]
            grad_value[:, :, keys] += parts[2]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _tiles(queries: int, groups: Tensor, mask: dict) -> Iterator[tuple[slice, slice, Tensor]]:
    """Some queries, the keys up to the last of them, and the mask [B, 1, rows, keys] added to the scores."""
    offset, device = groups.shape[1] - queries, groups.device
    window, sliding_window, real = mask["window"], mask["sliding_window"], mask["padding_mask"]
    columns = mask["sinks"].any(dim=0).nonzero()
    sinks = mask["sinks"][:, None, : int(columns[-1]) + 1] if len(columns) else None
    labels = group_bits(groups) if groups.dim() == 3 and groups.shape[-1] <= MAX_GROUPS_IN_BITS else groups
    for start in range(0, queries, ROWS):
        stop = min(start + ROWS, queries)
        rows, keys = slice(offset + start, offset + stop), slice(0, offset + stop)
        if groups.dim() == 2:
            masked = labels[:, rows, None] != labels[:, None, keys]
        elif labels.dim() == 2:
            masked = (labels[:, rows, None] & labels[:, None, keys]) == 0
        else:
            masked = ~same_group(groups[:, keys], stop - start)
        distance = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1) - torch.arange(
            keys.stop, device=device
        )
        first = max(0, rows.start - window)
        masked[:, :, first:] &= distance[:, first:] > window
        if sinks is not None:
            masked[:, :, : sinks.shape[2]] &= ~sinks[:, :, : keys.stop]
        masked[:, :, rows.start :] |= distance[:, rows.start :] < 0
        if sliding_window is not None:
            outside = max(0, rows.stop - sliding_window)
            masked[:, :, :outside] |= distance[:, :outside] >= sliding_window
        if real is not None:
            masked |= ~real[:, None, keys]
        yield slice(start, stop), keys, torch.mul(masked, MASKED).unsqueeze(1)


def _padded(query: Tensor, mask: dict) -> Tensor | None:
    if mask["padding_mask"] is None:
        return None
    return ~mask["padding_mask"][:, None, mask["padding_mask"].shape[1] - query.shape[2] :]
