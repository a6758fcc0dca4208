"""Exact Focus attention from disjoint pieces merged by log-sum-exp (paper Appendix D), forward and backward.

No array of Tq x Tk is made: besides the inputs and the output there is one gathered segment and a few thousand rows of
the band at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.attention.flash import Pieces
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
            q, k, v = _take(query[b], rows), _take(key[b], segment.keys), _take(value[b], segment.keys)
            for tile in segment.tiles():
                r, c = tile.rows, tile.keys
                out, out_lse = pieces.forward(q[:, :, r], k[:, :, c], v[:, :, c], tile.mask, tile.causal)
                _put(total[b], rows[r], out[0])
                lse[b].index_copy_(1, rows[r], out_lse[0])
        for sinks in plan.sink_blocks():
            b, r = slice(sinks.batch, sinks.batch + 1), sinks.rows
            out, out_lse = pieces.forward(query[b, :, r], key[b, :, sinks.keys], value[b, :, sinks.keys], sinks.mask)
            _merge(total[b, :, r], lse[b, :, r], out, out_lse)
        for band in plan.bands():
            b, r = band.batch, band.rows
            out, out_lse = pieces.forward(
                band.queries_of(query[b]), band.keys_of(key[b]), band.keys_of(value[b]), plan.band_mask(band)
            )
            _merge(total[b, :, r], lse[b, :, r], _joined(out), _joined(out_lse))
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
        plan, pieces = ctx.plan, ctx.pieces
        grad = _packed(grad)
        if plan.padding is not None:
            padded = plan.padding[:, None, plan.offset :]
            grad = grad.masked_fill(padded.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(padded, 0.0)
        grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))
        for segment in plan.segments:
            b, rows, keys = segment.batch, segment.rows - plan.offset, segment.keys
            q, k, v = _take(query[b], rows), _take(key[b], keys), _take(value[b], keys)
            g, o, norm = _take(grad[b], rows), _take(out[b], rows), lse[b : b + 1, :, rows]
            dk, dv = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
            for tile in segment.tiles():
                r, c = tile.rows, tile.keys
                parts = pieces.backward(
                    g[:, :, r], q[:, :, r], k[:, :, c], v[:, :, c], o[:, :, r], norm[:, :, r], tile.mask, tile.causal
                )
                _put(grad_query[b], rows[r], parts[0][0])
                dk[:, :, c] += parts[1]
                dv[:, :, c] += parts[2]
            grad_key[b].index_add_(1, keys, dk[0])
            grad_value[b].index_add_(1, keys, dv[0])
        for sinks in plan.sink_blocks():
            b, r, c = slice(sinks.batch, sinks.batch + 1), sinks.rows, sinks.keys
            parts = pieces.backward(
                grad[b, :, r], query[b, :, r], key[b, :, c], value[b, :, c], out[b, :, r], lse[b, :, r], sinks.mask
            )
            grad_query[b, :, r] += parts[0]
            grad_key[b].index_add_(2, c, parts[1].to(lse.dtype))
            grad_value[b].index_add_(2, c, parts[2].to(lse.dtype))
        for band in plan.bands():
            b, r = band.batch, band.rows
            g, q, o, norm = (band.queries_of(x[b]) for x in (grad, query, out, lse))
            parts = pieces.backward(g, q, band.keys_of(key[b]), band.keys_of(value[b]), o, norm, plan.band_mask(band))
            grad_query[b, :, r] += _joined(parts[0])
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


def _merge(total: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge a piece into total [..., n, D] and lse [..., n], in place."""
    weight = torch.sigmoid(out_lse - lse).unsqueeze(-1)
    total.lerp_(out.to(total.dtype), weight)
    torch.logaddexp(lse, out_lse, out=lse)


def _joined(x: Tensor) -> Tensor:
    """[blocks, H, size, ...] -> [H, blocks * size, ...]."""
    return x.transpose(0, 1).flatten(1, 2)
