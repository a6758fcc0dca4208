"""Sliding window attention with sinks, no training: hard Focus attention in which no token has a group."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from focus.attention import focus_attention
from focus.config import Method
from focus.methods.base import MethodKind
from focus.router import mask_function


class Window(MethodKind):
    """Keys at a distance of at most the model's window, and the first `settings.sinks` tokens."""

    def attach(self, model: PreTrainedModel, settings: Method, *, window: int, seed: int) -> PreTrainedModel:
        """Replace the model's attention."""
        name = f"window_{window}_sinks_{settings.sinks}"
        AttentionInterface.register(name, _attention_function(window, settings.sinks))
        AttentionMaskInterface.register(name, mask_function)
        model.set_attn_implementation(name)
        return model

    def pairs_kept(self, settings: Method, window: int, length: int) -> tuple[float, float]:
        """By counting: a query at position i reads window + 1 keys at most, and the sinks farther back."""
        sinks = settings.sinks
        near = sum(min(position, window) + 1 for position in range(length))
        far = sum(max(position - window, 0) for position in range(length))
        far_sinks = sum(min(max(position - window, 0), sinks) for position in range(length))
        return (near + far_sinks) / (near + far), far_sinks / far if far else 1.0


def _attention_function(window: int, sinks: int):
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            key, value = key[:, :, : attention_mask.shape[1]], value[:, :, : attention_mask.shape[1]]
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        no_groups = torch.zeros(len(key), key.shape[2], 1, dtype=torch.bool, device=key.device)
        out = focus_attention(
            query,
            key,
            value,
            no_groups,
            window=window,
            sinks=sinks,
            scale=scaling,
            softcap=softcap,
            sliding_window=sliding_window,
            padding_mask=attention_mask,
        )
        return out.transpose(1, 2).contiguous(), None

    return attention
