"""What the methods have in common whose queries each choose keys: blocks, the largest scores, attention over a choice.

Scores are in float32 at least, since a choice among many near-equal ones needs more digits than bfloat16 has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from focus.methods.structural import Call, LayerState

ROWS = 128


def causal_blocks(call: Call) -> Iterator[Call]:
    """Some queries at a time, the last ones first, each time a call of its own with the keys up to the last of them.

    In this order each block fits into the memory that the one before it freed.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, key, value = (tensor.to(dtype) for tensor in (call.query, call.key, call.value))
    for start in reversed(range(0, query.shape[2], ROWS)):
        stop = min(start + ROWS, query.shape[2])
        keys = call.offset + stop
        yield replace(
            call,
            query=query[:, :, start:stop],
            key=key[:, :, :keys],
            value=value[:, :, :keys],
            padding_mask=None if call.padding_mask is None else call.padding_mask[:, :keys],
        )


def distances(block: Call) -> Tensor:
    """int64 [n, m]: how far each key lies before each query; negative for later keys."""
    keys = torch.arange(block.key.shape[2], device=block.key.device)
    return keys[block.offset :, None] - keys


def nearest_top(scores: Tensor, count: int) -> Tensor:
    """Indices [..., min(count, m)] of the largest `scores` [..., m], in no order; of equal ones the last, or nearest.

    Where fewer than `count` are above -inf, the rest are any others.
    """
    if count >= scores.shape[-1]:
        return torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    values, index = scores.topk(count + 1)
    index, smallest = index[..., :count].contiguous(), values[..., count - 1 : count]
    tied = (smallest[..., 0] == values[..., count]) & (smallest[..., 0] > -torch.inf)
    if tied.any():
        rows, edge = scores[tied], smallest[tied]
        above, equal = rows > edge, rows == edge
        places = count - above.sum(dim=-1, keepdim=True)
        last = equal.flip(-1).cumsum(dim=-1).flip(-1) <= places
        index[tied] = (above | (equal & last)).nonzero()[:, 1].view(-1, count)
    return index


def attend_to(block: Call, index: Tensor, read: Tensor) -> Tensor:
    """Exact attention [B, H, n, D] of the block's queries over the keys at `index`, where `read` is true.

    index int64 and read bool [B, S, n, k]: S is H, or a divisor of it when query heads share a choice. Zero where
    nothing is read.
    """
    choices = index.shape[1]
    query = block.query.unflatten(1, (choices, -1)).transpose(2, 3)
    scores = query @ _gathered(block.key, index).mT * block.scale
    if block.softcap is not None:
        scores = block.softcap * torch.tanh(scores / block.softcap)
    weights = scores.masked_fill(~read.unsqueeze(3), -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    return (weights @ _gathered(block.value, index)).transpose(2, 3).flatten(1, 2)


class PairCounter:
    """Counts the pairs read over the blocks of a call, when its layer is observed."""

    def __init__(self, state: LayerState):
        self.state = state
        self.kept = self.every = self.far_kept = self.far_every = 0

    def add(self, block: Call, index: Tensor, read: Tensor) -> None:
        """Count what `attend_to` reads with these arguments."""
        if self.state.observed is not None:
            nothing = torch.zeros(*index.shape[:3], block.key.shape[2], dtype=torch.bool, device=index.device)
            self.add_mask(block, nothing.scatter(-1, index, read))

    def add_mask(self, block: Call, read: Tensor) -> None:
        """Count the visible pairs read: bool [B, S, n, m], for S heads that choose, equally large."""
        if self.state.observed is not None:
            visible = block.visible(slice(None)).expand(read.shape)
            far = visible & (distances(block) > self.state.window)
            self.kept += (visible & read).sum().item()
            self.every += visible.sum().item()
            self.far_kept += (far & read).sum().item()
            self.far_every += far.sum().item()

    def report(self) -> None:
        """Tell the layer's observer the shares."""
        if self.state.observed is not None:
            self.state.observed["pairs_kept"] = self.kept / self.every if self.every else 1.0
            self.state.observed["far_pairs_kept"] = self.far_kept / self.far_every if self.far_every else 1.0


def _gathered(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows [B, S, n, k, D] of `tensor` [B, Hkv, m, D], S a multiple of Hkv."""
    flat = index.reshape(*tensor.shape[:2], -1, 1).expand(-1, -1, -1, tensor.shape[3])
    return tensor.gather(2, flat).view(*index.shape, tensor.shape[3])
