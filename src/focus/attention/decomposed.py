"""Exact Focus attention from disjoint pieces merged by log-sum-exp (paper Appendix D), forward and backward.

No array of Tq x Tk is made: besides the inputs and the output there is one gathered segment and a few thousand rows of
the band at a time. Pieces are computed in float32 at least: in bfloat16 each would round its output, and merging
would pass twice the error on. The few sink keys go through plain products, which sum their gradients over many
queries more exactly than the kernel does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.attention.dense import Dense
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
        high, work = torch.promote_types(query.dtype, torch.float32), pieces.working_dtype(query.dtype)
        covered = sum(segment.queries for segment in plan.segments) == len(query) * query.shape[2]
        batch, heads, count, _ = query.shape
        total = (query.new_empty if covered else query.new_zeros)(batch, count, heads, query.shape[3], dtype=high)
        lse = query.new_full((batch, count, heads), float("-inf"), dtype=high)
        total, lse = total.transpose(1, 2), lse.transpose(1, 2)
        rows, keys = plan.longest
        rooms = _Room(query[0], rows), _Room(key[0], keys), _Room(value[0], keys), _Room(total[0], rows)
        for segment in plan.segments:
            b, rows = segment.batch, segment.rows - plan.offset
            q = segment.apart(rooms[0].take(query[b], rows).to(work))
            k, v = (
                segment.apart(room.take(x[b], segment.keys).to(work))
                for room, x in zip(rooms[1:3], (key, value), strict=True)
            )
            part, part_lse = (
                segment.apart(rooms[3].rows(len(rows))),
                segment.apart(lse.new_empty(1, len(rows), heads).transpose(1, 2)),
            )
            for tile in segment.tiles():
                out, out_lse = pieces.forward(tile.rows_of(q), tile.keys_of(k), tile.keys_of(v), tile.mask, tile.causal)
                if tile.causal:
                    part, part_lse = out, out_lse
                elif tile.more:
                    merge(tile.rows_of(part), tile.rows_of(part_lse), out, out_lse)
                else:
                    tile.rows_of(part).copy_(out)
                    tile.rows_of(part_lse).copy_(out_lse)
            for positions, of_group, lse_of_group in segment.real(part, part_lse):
                _put(total[b], positions - plan.offset, of_group)
                _put(lse[b], positions - plan.offset, lse_of_group)
        del rooms
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
                band.queries_of(query[b], work),
                band.keys_of(key[b], work),
                band.keys_of(value[b], work),
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
        work = pieces.working_dtype(query.dtype)
        grad = _packed(grad)
        if plan.padding is not None:
            padded = plan.padding[:, None, plan.offset :]
            grad = grad.masked_fill(padded.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(padded, 0.0)
        grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=high) for x in (query, key, value))
        sources = query, grad, out, key, value
        rows, keys = plan.longest
        rooms = [_Room(x[0], n) for x, n in zip(sources, (rows, rows, rows, keys, keys), strict=True)]
        for segment in plan.segments:
            b, rows, keys = segment.batch, segment.rows - plan.offset, segment.keys
            q, g, o, k, v = (
                segment.apart(room.take(x[b], index).to(work))
                for room, x, index in zip(rooms, sources, (rows, rows, rows, keys, keys), strict=True)
            )
            segment.clear_copies(g)
            norm = segment.apart(lse[b : b + 1, :, rows])
            dq, dk, dv = (torch.zeros_like(x, dtype=high) for x in (q, k, v))
            for tile in segment.tiles():
                parts = pieces.backward(
                    tile.rows_of(g),
                    tile.rows_of(q),
                    tile.keys_of(k),
                    tile.keys_of(v),
                    tile.rows_of(o),
                    tile.rows_of(norm),
                    tile.mask,
                    tile.causal,
                )
                for whole, part in zip((tile.rows_of(dq), tile.keys_of(dk), tile.keys_of(dv)), parts, strict=True):
                    whole.add_(part)
            for positions, of_group in segment.real(dq):
                _put(grad_query[b], positions - plan.offset, of_group)
            dk, dv = (x.transpose(0, 1).flatten(1, 2) for x in (dk, dv))
            grad_key[b].index_add_(1, keys, dk)
            grad_value[b].index_add_(1, keys, dv)
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
            g, q, o = (band.queries_of(x[b], work) for x in (grad, query, out))
            k, v = (band.keys_of(x[b], work) for x in (key, value))
            norm = band.queries_of(lse[b], high)
            parts = pieces.backward(g, q, k, v, o, norm, plan.band_mask(band))
            grad_query[b, :, r] += join_blocks(parts[0])
            band.add_to_keys(grad_key[b], parts[1])
            band.add_to_keys(grad_value[b], parts[2])
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _packed(x: Tensor) -> Tensor:
    """[B, H, T, D] with heads or tokens outermost in memory: what `_Room` takes rows from."""
    return x if x.is_contiguous() or x.transpose(1, 2).is_contiguous() else x.contiguous()


class _Room:
    """Memory for rows of [H, T, D], used again for each segment: fresh memory costs more than the copy into it."""

    def __init__(self, x: Tensor, longest: int, dtype: torch.dtype | None = None):
        self.heads_first = x.is_contiguous()
        self.heads, self.width = x.shape[0], x.shape[2]
        self.memory = x.new_empty(self.heads * longest * self.width, dtype=dtype)

    def rows(self, count: int) -> Tensor:
        """[1, H, count, D], not initialised, in the order of memory of the tensor it was made for."""
        memory = self.memory[: self.heads * count * self.width]
        if self.heads_first:
            return memory.view(1, self.heads, count, self.width)
        return memory.view(1, count, self.heads, self.width).transpose(1, 2)

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        """Rows `index` of x [H, T, D], as [1, H, n, D]."""
        rows = self.rows(len(index))
        if self.heads_first:
            flat = (torch.arange(self.heads, device=index.device).unsqueeze(1) * x.shape[1] + index).view(-1)
            torch.index_select(x.view(-1, self.width), 0, flat, out=rows.view(-1, self.width))
        else:
            target = rows.transpose(1, 2).view(len(index), -1)
            torch.index_select(x.transpose(0, 1).view(x.shape[1], -1), 0, index, out=target)
        return rows


def _put(x: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write rows [H, n, ...] to the positions `index` of [H, T, ...]."""
    x.transpose(0, 1).index_copy_(0, index, rows.transpose(0, 1).to(x.dtype))


def merge(total: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge a piece into total [..., n, D] and lse [..., n], in place."""
    weight = torch.sigmoid(out_lse - lse).unsqueeze(-1)
    total.lerp_(out.to(total.dtype), weight.to(total.dtype))
    torch.logaddexp(lse, out_lse, out=lse)


def join_blocks(x: Tensor) -> Tensor:
    """[blocks, H, size, ...] -> [H, blocks * size, ...]."""
    return x.transpose(0, 1).flatten(1, 2)
