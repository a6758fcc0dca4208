"""Exact Focus attention from disjoint pieces merged by log-sum-exp (paper Appendix D), forward and backward.

No array of Tq x Tk is made: besides the inputs and the output there is one gathered segment and a few thousand rows of
the band at a time. Pieces are computed in float32 at least: in bfloat16 each would round its output, and merging
would pass twice the error on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.attention.flash import Dense, Pieces
from focus.attention.plan import Plan


def decomposed_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: Plan, pieces: Pieces
) -> tuple[Tensor, Tensor]:
    """Out [B, H, Tq, D], differentiable, and lse [B, H, Tq], which is not (-inf for padding).

    query: [B, H, Tq, D]; key, value: [B, Hkv, Tk, D].
    """
    return _Decomposed.apply(_packed(query), _packed(key), _packed(value), plan, pieces)


class _Decomposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, plan: Plan, pieces: Pieces):
        high = torch.promote_types(query.dtype, torch.float32)
        total = torch.zeros_like(query, dtype=high)
        lse = torch.full(query.shape[:3], float("-inf"), dtype=high, device=query.device)
        for segment in plan.segments:
            b, rows = segment.batch, segment.rows - plan.offset
            q, k, v = (
                _take(x[b], index).to(high) for x, index in ((query, rows), (key, segment.keys), (value, segment.keys))
            )
            part, part_lse = torch.empty_like(q), lse.new_empty(q.shape[:3])
            for tile in segment.tiles():
                r, c = tile.rows, tile.keys
                out, out_lse = pieces.forward(q[:, :, r], k[:, :, c], v[:, :, c], tile.mask, tile.causal)
                if tile.causal:
                    part, part_lse = out, out_lse
                elif tile.more:
                    merge(part[:, :, r], part_lse[:, :, r], out, out_lse)
                else:
                    part[:, :, r], part_lse[:, :, r] = out, out_lse
            _put(total[b], rows, part[0])
            lse[b].index_copy_(1, rows, part_lse[0])
        few_keys = Dense(pieces.scale, pieces.softcap)
        for sinks in plan.sink_blocks():
            b, r = slice(sinks.batch, sinks.batch + 1), sinks.rows
            out, out_lse = few_keys.forward(
                query[b, :, r].to(high), key[b, :, sinks.keys].to(high), value[b, :, sinks.keys].to(high), sinks.mask
            )
            merge(total[b, :, r], lse[b, :, r], out, out_lse)
        for band in plan.bands():
            b, r = band.batch, band.rows
            out, out_lse = pieces.forward(
                band.queries_of(query[b], high),
                band.keys_of(key[b], high),
                band.keys_of(value[b], high),
                plan.band_mask(band),
            )
            merge(total[b, :, r], lse[b, :, r], join_blocks(out), join_blocks(out_lse))
        if plan.padding is not None:
            padded = plan.padding[:, None, plan.offset :]
            total.masked_fill_(padded.unsqueeze(-1), 0.0)
            lse.masked_fill_(padded, float("-inf"))
        total = total.to(query.dtype)
        ctx.save_for_backward(query, key, value, total, lse)
        ctx.plan, ctx.pieces = plan, pieces
        ctx.mark_non_differentiable(lse)
        return total, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        query, key, value, out, lse = ctx.saved_tensors
        plan, pieces, high = ctx.plan, ctx.pieces, lse.dtype
        grad = _packed(grad)
        if plan.padding is not None:
            padded = plan.padding[:, None, plan.offset :]
            grad = grad.masked_fill(padded.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(padded, 0.0)
        grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=high) for x in (query, key, value))
        for segment in plan.segments:
            b, rows, keys = segment.batch, segment.rows - plan.offset, segment.keys
            q, g, o = (_take(x[b], rows).to(high) for x in (query, grad, out))
            k, v = (_take(x[b], keys).to(high) for x in (key, value))
            norm = lse[b : b + 1, :, rows]
            dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
            for tile in segment.tiles():
                r, c = tile.rows, tile.keys
                parts = pieces.backward(
                    g[:, :, r], q[:, :, r], k[:, :, c], v[:, :, c], o[:, :, r], norm[:, :, r], tile.mask, tile.causal
                )
                dq[:, :, r] += parts[0]
                dk[:, :, c] += parts[1]
                dv[:, :, c] += parts[2]
            _put(grad_query[b], rows, dq[0])
            grad_key[b].index_add_(1, keys, dk[0])
            grad_value[b].index_add_(1, keys, dv[0])
        few_keys = Dense(pieces.scale, pieces.softcap)
        for sinks in plan.sink_blocks():
            b, r, c = slice(sinks.batch, sinks.batch + 1), sinks.rows, sinks.keys
            g, q, o = (x[b, :, r].to(high) for x in (grad, query, out))
            parts = few_keys.backward(g, q, key[b, :, c].to(high), value[b, :, c].to(high), o, lse[b, :, r], sinks.mask)
            grad_query[b, :, r] += parts[0]
            grad_key[b].index_add_(2, c, parts[1])
            grad_value[b].index_add_(2, c, parts[2])
        for band in plan.bands():
            b, r = band.batch, band.rows
            g, q, o, norm = (band.queries_of(x[b], high) for x in (grad, query, out, lse))
            k, v = (band.keys_of(x[b], high) for x in (key, value))
            parts = pieces.backward(g, q, k, v, o, norm, plan.band_mask(band))
            grad_query[b, :, r] += join_blocks(parts[0])
            band.add_to_keys(grad_key[b], parts[1])
            band.add_to_keys(grad_value[b], parts[2])
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _packed(x: Tensor) -> Tensor:
    """[B, H, T, D] with heads or tokens outermost in memory: what `_take` and `_put` are fast on."""
    return x if x.is_contiguous() or x.transpose(1, 2).is_contiguous() else x.contiguous()


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of [H, T, D], as [1, H, n, D] in the same order of memory."""
    heads, length, width = x.shape
    if x.is_contiguous():
        return x.view(heads * length, width).index_select(0, _flat(index, heads, length)).view(1, heads, -1, width)
    return x.transpose(0, 1).reshape(length, -1).index_select(0, index).view(1, -1, heads, width).transpose(1, 2)


def _put(x: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write rows [H, n, D] to the positions `index` of [H, T, D]."""
    x.index_copy_(1, index, rows.to(x.dtype))


def _flat(index: Tensor, heads: int, length: int) -> Tensor:
    return (torch.arange(heads, device=index.device).unsqueeze(1) * length + index).view(-1)


def merge(total: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge a piece into total [..., n, D] and lse [..., n], in place."""
    weight = torch.sigmoid(out_lse - lse).unsqueeze(-1)
    total.lerp_(out.to(total.dtype), weight.to(total.dtype))
    torch.logaddexp(lse, out_lse, out=lse)


def join_blocks(x: Tensor) -> Tensor:
    """[blocks, H, size, ...] -> [H, blocks * size, ...]."""
    return x.transpose(0, 1).flatten(1, 2)
