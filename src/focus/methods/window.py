"""The window with sinks of StreamingLLM (arXiv 2309.17453): hard Focus attention in which no token has a group.

Positions stay as they are in the text; the paper's rolling ones matter only beyond a model's context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.attention import choose_backend, focus_attention
from focus.method_config import Method
from focus.methods.structural import Call, Structural


class Window(Structural):
    """Keys at a distance of at most the window, and the first `settings.sinks` tokens."""

    name = "window"

    def attend(self, call: Call) -> Tensor:
        """Through the engine, with no token in any group."""
        state = call.state
        no_groups = torch.zeros(len(call.key), call.key.shape[2], 1, dtype=torch.bool, device=call.key.device)
        sinks = state.settings.sinks if call.forgotten is None else call.positions() < state.settings.sinks
        mask = {"softcap": call.softcap, "padding_mask": call.padding_mask}
        state.backend = choose_backend(call.query, call.value, no_groups, **mask)
        return focus_attention(
            call.query,
            call.key,
            call.value,
            no_groups,
            window=state.window,
            sinks=sinks,
            scale=call.scale,
            sliding_window=call.sliding_window,
            **mask,
        )

    def pairs_kept(self, settings: Method, window: int, length: int) -> tuple[float, float]:
        """By counting: a query at position i reads window + 1 keys at most, and the sinks farther back."""
        sinks = settings.sinks
        near = sum(min(position, window) + 1 for position in range(length))
        far = sum(max(position - window, 0) for position in range(length))
        far_sinks = sum(min(max(position - window, 0), sinks) for position in range(length))
        return (near + far_sinks) / (near + far), far_sinks / far if far else 1.0
