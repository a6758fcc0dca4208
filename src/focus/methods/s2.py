"""The window, and another shard of the context for each head (S2-Attention, arXiv 2407.17678).

The context is dealt in blocks of `block` tokens into `stride` shards, block c into shard c mod `stride`. Every head
sees the window and, beyond it, one shard: head h the shard h mod `stride`, so that heads differ and, where there are at
least `stride` of them, together see everything. Which keys a head ever needs beyond the window does not change as the
text grows (the paper's KV-efficiency). The shares are of the whole past: work stays quadratic, divided by the stride.

Simplified: the window is the model's w, in tokens, instead of a number of blocks; the paper's first layers with full
attention (its hybrid architecture) are left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.attention.decomposed import decomposed_attention
from focus.attention.flash import choose_pieces
from focus.attention.plan import Labels, Plan
from focus.attention.tiles import Segment
from focus.method_config import Method
from focus.methods.structural import Call, Masked

SHORTEST_DECOMPOSED = 2048


class S2(Masked):
    """Near keys, and those of the head's shard."""

    name = "s2"

    def allowed(self, call: Call, rows: slice) -> Tensor:
        """bool [B, H, n, Tk]."""
        settings = call.state.settings
        queries = torch.arange(call.query.shape[2], device=call.key.device)[rows, None] + call.offset
        near = queries - torch.arange(call.key.shape[2], device=call.key.device) <= call.state.window
        head = torch.arange(call.query.shape[1], device=call.key.device) % settings.stride
        return near | (_shards(call)[:, None] == head[:, None])[:, :, None]

    def attend(self, call: Call) -> Tensor:
        """From SHORTEST_DECOMPOSED queries on exactly through the engine's pieces, else masked.

        A shard is a segment of some keys for all queries, causal; the band leaves these keys out. A layer with a
        sliding window of its own is masked.
        """
        sliding = call.sliding_window is not None and call.sliding_window < call.key.shape[2]
        if call.query.shape[2] < SHORTEST_DECOMPOSED or sliding:
            return super().attend(call)
        self.count_pairs(call)
        pieces = choose_pieces(call.query, call.value, scale=call.scale, softcap=call.softcap)
        call.state.backend = f"decomposed/{pieces.name}"
        shards, shared = _shards(call), call.query.shape[1] // call.key.shape[1]
        outputs: dict[int, Tensor] = {}
        for shard in range(min(call.state.settings.stride, call.query.shape[1])):
            plan = _plan(call, shards == shard)
            for key_head in range(call.key.shape[1]):
                own = range(key_head * shared, (key_head + 1) * shared)
                heads = [head for head in own if head % call.state.settings.stride == shard]
                if heads:
                    key, value = (x[:, key_head : key_head + 1] for x in (call.key, call.value))
                    out, _ = decomposed_attention(call.query[:, heads], key, value, plan, pieces)
                    outputs |= dict(zip(heads, out.unbind(dim=1), strict=True))
        return torch.stack([outputs[head] for head in sorted(outputs)], dim=1)

    def pairs_kept(self, settings: Method, window: int, length: int) -> None:
        """Heads may see different numbers of pairs, and their number is the model's: what layers observe tells."""


def _shards(call: Call) -> Tensor:
    """int64 [B, Tk]: the shard of each key."""
    settings = call.state.settings
    return call.positions() // settings.block % settings.stride


def _plan(call: Call, inside: Tensor) -> Plan:
    """The pieces of the heads whose shard's keys `inside` (bool [B, Tk]) marks."""
    batch, keys = inside.shape
    real = torch.ones_like(inside) if call.padding_mask is None else call.padding_mask
    segments = []
    for sequence in range(batch):
        rows = real[sequence, call.offset :].nonzero().squeeze(1) + call.offset
        members = (inside & real)[sequence].nonzero().squeeze(1)
        rows = rows[rows >= members[0]] if len(members) else rows[:0]
        if len(rows):
            segments.append(Segment(sequence, rows, members, whole=False, sliding_window=None))
    padding = None if call.padding_mask is None else ~real
    return Plan(
        device=inside.device,
        offset=call.offset,
        keys=keys,
        window=min(call.state.window, keys - 1),
        sliding_window=None,
        segments=segments,
        banded=[True] * batch,
        labels=Labels(torch.ones_like(inside, dtype=torch.int32), inside.int(), bits=False),
        sinks=None,
        blocked=padding,
        padding=padding,
    )
