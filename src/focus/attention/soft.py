"""Soft Focus attention under the exponential gate, exact, in memory that grows with T.

Far pairs get score + lam * (g_i . g_j - 1). That is a dot product, so it rides in the head dimension: one flash call on
queries [scale * q, sqrt(lam) g, 1] and keys [k, sqrt(lam) g, -lam] computes it. The far pairs alone, j < i - w,
are a causal call on shifted slices; near pairs are the band, sinks a few keys more; all merge by log-sum-exp. Keys that
are no far keys (sinks, padding) have MASKED in place of -lam.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from focus.attention.decomposed import join_blocks, merge
from focus.attention.dense import MASKED, Dense
from focus.attention.flash import Pieces, check_shapes, choose_pieces
from focus.attention.plan import Plan, sink_positions
from focus.attention.reference import sink_keys
from focus.attention.tiles import Segment, Tile
from focus.errors import UserError

ALIGNMENT = 8


def soft_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    assignment: Tensor,
    *,
    steepness: float,
    window: int,
    sinks: int | Tensor = 0,
    scale: float | None = None,
    sliding_window: int | None = None,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """The gate "exponential" of `focus.gates`, differentiable in query, key, value and assignment.

    query: [B, H, T, D]; key, value: [B, Hkv, T, D]; assignment: [B, T, K]; sinks: how many first real tokens are never
    gated, or bool [B, T]; padding_mask: bool [B, T], True = real. Returns [B, H, T, D] in query's dtype, zero for
    padding. Raises UserError for shapes that do not fit. There is no softcap: it would have to be applied before the
    gate.
    """
    check_shapes(query, key, value)
    batch, length = assignment.shape[:2]
    if query.shape[2] != key.shape[2] or (batch, length) != (key.shape[0], key.shape[2]):
        raise UserError(
            f"assignment: expected [{key.shape[0]}, {key.shape[2]}, K] and as many queries as keys, "
            f"got {list(assignment.shape)} and {query.shape[2]} queries"
        )
    high = torch.promote_types(query.dtype, torch.float32)
    if sliding_window is not None and sliding_window >= length:
        sliding_window = None
    window = min(window, (length if sliding_window is None else sliding_window) - 1)
    positions = sink_positions(sinks, padding_mask, batch, length, key.device)
    padding = None if padding_mask is None else ~padding_mask
    plan = Plan(
        device=query.device,
        offset=0,
        keys=length,
        window=window,
        sliding_window=sliding_window,
        segments=[],
        banded=[True] * batch,
        labels=None,
        sinks=positions,
        blocked=padding,
        padding=padding,
    )
    ungated = sink_keys(length, sinks, padding_mask, key.device).expand(batch, length)
    if padding is not None:
        ungated = ungated | padding
    affine = (assignment.to(high) * steepness**0.5).unsqueeze(1)
    constant = torch.where(ungated, MASKED, -steepness).to(high)[:, None, :, None]
    extra = -(query.shape[3] + assignment.shape[2] + 1) % ALIGNMENT
    scaled = query.to(high) * (query.shape[3] ** -0.5 if scale is None else scale)
    key, value = key.to(high), value.to(high)
    queries = torch.cat([scaled, affine.expand(-1, query.shape[1], -1, -1), torch.ones_like(scaled[..., :1])], dim=-1)
    keys = torch.cat([key, affine.expand(-1, key.shape[1], -1, -1), constant.expand(-1, key.shape[1], -1, -1)], dim=-1)
    pieces = choose_pieces(scaled, value, scale=1.0, softcap=None)
    out = _Soft.apply(scaled, key, value, pad(queries, (0, extra)), pad(keys, (0, extra)), plan, pieces)
    return out.to(query.dtype)


class _Soft(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, plan: Plan, pieces: Pieces
    ):
        width = value.shape[3]
        total = torch.zeros_like(query)
        lse = torch.full(query.shape[:3], float("-inf"), dtype=query.dtype, device=query.device)
        shift, tiles = _far(plan)
        values = _widened(value, queries)
        for tile in tiles:
            r, c = _moved(tile.rows, shift), tile.keys
            part = pieces.forward(queries[:, :, r], keys[:, :, c], values[:, :, c], tile.mask, tile.causal)
            merge(total[:, :, r], lse[:, :, r], part[0][..., :width], part[1])
        for sinks in plan.sink_blocks(beyond=plan.window):
            b, r, c = slice(sinks.batch, sinks.batch + 1), sinks.rows, sinks.keys
            part = Dense(1.0).forward(query[b, :, r], key[b, :, c], value[b, :, c], sinks.mask)
            merge(total[b, :, r], lse[b, :, r], *part)
        for band in plan.bands():
            b, r = band.batch, band.rows
            parts = (band.queries_of(query[b], query.dtype), *(band.keys_of(x[b], x.dtype) for x in (key, value)))
            out, out_lse = pieces.forward(*parts, plan.band_mask(band))
            merge(total[b, :, r], lse[b, :, r], join_blocks(out), join_blocks(out_lse))
        if plan.padding is not None:
            total.masked_fill_(plan.padding[:, None, :, None], 0.0)
            lse.masked_fill_(plan.padding[:, None], 0.0)
        ctx.save_for_backward(query, key, value, queries, keys, total, lse)
        ctx.plan, ctx.pieces = plan, pieces
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        query, key, value, queries, keys, out, lse = ctx.saved_tensors
        plan, pieces, width = ctx.plan, ctx.pieces, value.shape[3]
        grad = grad.contiguous()
        if plan.padding is not None:
            grad = grad.masked_fill(plan.padding[:, None, :, None], 0.0)
        grads = [torch.zeros_like(x) for x in (query, key, value, queries, keys)]
        grad_query, grad_key, grad_value, grad_queries, grad_keys = grads
        shift, tiles = _far(plan)
        values, wide_grad, wide_out = (_widened(x, queries) for x in (value, grad, out))
        for tile in tiles:
            r, c = _moved(tile.rows, shift), tile.keys
            parts = pieces.backward(
                wide_grad[:, :, r],
                queries[:, :, r],
                keys[:, :, c],
                values[:, :, c],
                wide_out[:, :, r],
                lse[:, :, r],
                tile.mask,
                tile.causal,
            )
            grad_queries[:, :, r] += parts[0]
            grad_keys[:, :, c] += parts[1]
            grad_value[:, :, c] += parts[2][..., :width]
        del values, wide_grad, wide_out
        for sinks in plan.sink_blocks(beyond=plan.window):
            b, r, c = slice(sinks.batch, sinks.batch + 1), sinks.rows, sinks.keys
            parts = Dense(1.0).backward(
                grad[b, :, r], query[b, :, r], key[b, :, c], value[b, :, c], out[b, :, r], lse[b, :, r], sinks.mask
            )
            grad_query[b, :, r] += parts[0]
            grad_key[b].index_add_(2, c, parts[1])
            grad_value[b].index_add_(2, c, parts[2])
        for band in plan.bands():
            b, r = band.batch, band.rows
            g, q, o, norm = (band.queries_of(x[b], x.dtype) for x in (grad, query, out, lse))
            k, v = (band.keys_of(x[b], x.dtype) for x in (key, value))
            parts = pieces.backward(g, q, k, v, o, norm, plan.band_mask(band))
            grad_query[b, :, r] += join_blocks(parts[0])
            band.add_to_keys(grad_key[b], parts[1])
            band.add_to_keys(grad_value[b], parts[2])
        return *grads, None, None


def _far(plan: Plan) -> tuple[int, Iterator[Tile]]:
    """Far pairs as a causal segment: its query r is the token r + shift, its key c the token c."""
    shift = plan.window + 1
    count = max(plan.keys - shift, 0)
    reach = None if plan.sliding_window is None else plan.sliding_window - shift
    if count == 0 or reach == 0:
        return shift, iter(())
    tokens = torch.arange(count, device=plan.device)
    return shift, Segment(0, tokens, tokens, True, reach).tiles(together=False)


def _moved(rows: slice, shift: int) -> slice:
    return slice(rows.start + shift, rows.stop + shift)


def _widened(x: Tensor, like: Tensor) -> Tensor:
    """Zeros behind the last dimension, up to that of `like`: the kernel wants one width for queries and values."""
    return pad(x, (0, like.shape[3] - x.shape[3]))
