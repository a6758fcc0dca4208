"""Window and global tokens (Longformer, arXiv 2004.05150, section 3.1), in a causal decoder.

Global attention is symmetric in the paper: a global token reads everything and everything reads it. Made causal, it
reads all tokens before it and all later tokens read it. Which tokens are global is up to the task there; a language
model has none that stand out, so one in `global_stride` is, `global_tokens` in all, from the first on: as many however
long the text. With a stride of 1 they are the first tokens, and what remains is StreamingLLM's mask (its sinks read
only each other and the window anyway). Farther apart, they are relays: what one has gathered from its whole past
reaches every later token in the next layer.

Simplified: the window is not dilated, and global tokens have no projections of their own, which in the paper start as
copies of the window's and which a pretrained decoder lacks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from focus.attention import choose_backend, focus_attention
from focus.method_config import Method
from focus.methods.structural import Call, Structural


class Longformer(Structural):
    """Keys at a distance of at most the window, and global tokens both ways."""

    name = "longformer"

    def attend(self, call: Call) -> Tensor:
        """Through the engine, with the global tokens as sinks; what these read themselves is computed apart."""
        state = call.state
        no_groups = torch.zeros(len(call.key), call.key.shape[2], 1, dtype=torch.bool, device=call.key.device)
        marked = _global(call.positions(), state.settings)
        if call.padding_mask is not None:
            marked = marked & call.padding_mask
        mask = {"softcap": call.softcap, "padding_mask": call.padding_mask}
        state.backend = choose_backend(call.query, call.value, no_groups, **mask)
        out = focus_attention(
            call.query,
            call.key,
            call.value,
            no_groups,
            window=state.window,
            sinks=marked,
            scale=call.scale,
            sliding_window=call.sliding_window,
            **mask,
        )
        readers = marked[:, call.offset :]
        return _with_global_rows(call, out, readers) if readers.any() else out

    def pairs_kept(self, settings: Method, window: int, length: int) -> tuple[float, float]:
        """By counting, position by position."""
        marked = _global(torch.arange(length), settings).tolist()
        near = far = far_kept = seen = 0
        for position, reads_all in enumerate(marked):
            near += min(position, window) + 1
            beyond = max(position - window, 0)
            seen += marked[beyond - 1] if beyond else 0
            far += beyond
            far_kept += beyond if reads_all else seen
        return (near + far_kept) / (near + far), far_kept / far if far else 1.0


def _global(positions: Tensor, settings: Method) -> Tensor:
    """Which of the real positions are global, bool of the same shape."""
    stride = settings.global_stride
    return (positions % stride == 0) & (positions < settings.global_tokens * stride)


def _with_global_rows(call: Call, out: Tensor, readers: Tensor) -> Tensor:
    """`out` [B, H, Tq, D] with the rows that `readers` (bool [B, Tq]) marks replaced by attention to all keys."""
    length, most = readers.shape[1], int(readers.sum(dim=1).max())
    order = torch.where(readers, torch.arange(length, device=out.device), length).sort(dim=1).values[:, :most]
    rows = order.clamp(max=length - 1)
    index = rows[:, None, :, None]
    query = call.query.gather(2, index.expand(-1, call.query.shape[1], -1, call.query.shape[3]))
    asked = replace(call, query=query)
    scores = asked.scores(slice(None))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    distance = (rows + call.offset).unsqueeze(2) - torch.arange(call.key.shape[2], device=out.device)
    seen = distance >= 0
    if call.sliding_window is not None:
        seen = seen & (distance < call.sliding_window)
    if call.padding_mask is not None:
        seen = seen & call.padding_mask.unsqueeze(1)
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    read = asked.weighted(weights.to(call.value.dtype)).to(out.dtype)
    room = torch.cat([out, out.new_zeros(*out.shape[:2], 1, out.shape[3])], dim=2)
    return room.scatter(2, order[:, None, :, None].expand_as(read), read)[:, :, :length]
