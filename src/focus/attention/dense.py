"""The attention piece in plain matrix products (see flash.py for what a piece is)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor

MASKED = -1e30
DENSE_SCORES = 1 << 22


def _full_precision(method):
    """Keep autocast out of a method's matrix products."""

    @wraps(method)
    def wrapped(self, query: Tensor, *arguments):
        with torch.autocast(query.device.type, enabled=False):
            return method(self, query, *arguments)

    return wrapped


@dataclass(frozen=True)
class Dense:
    """Plain matrix products in at least float32, some queries at a time: for softcap, and where no kernel serves."""

    scale: float | None = None
    softcap: float | None = None
    name = "dense"

    def working_dtype(self, given: torch.dtype) -> torch.dtype:
        return torch.promote_types(given, torch.float32)

    @_full_precision
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=_high(query))
        values = value.to(lse.dtype).unsqueeze(2)
        for rows in _row_blocks(query, key):
            scores, _ = self._scores(query, key, mask, causal, rows)
            total = torch.logsumexp(scores, dim=-1, keepdim=True)
            out[:, :, rows] = torch.matmul(torch.exp(scores - total), values).flatten(1, 2).to(out.dtype)
            lse[:, :, rows] = total.squeeze(-1).flatten(1, 2)
        return out, lse

    @_full_precision
    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        high, shared = _high(query), key.shape[1]
        scale = query.shape[3] ** -0.5 if self.scale is None else self.scale
        grad_query = torch.empty_like(query)
        keys, values = key.to(high), value.to(high)
        grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _row_blocks(query, key):
            scores, slope = self._scores(query, key, mask, causal, rows)
            weights = torch.exp(scores - lse[:, :, rows].to(high).unflatten(1, (shared, -1)).unsqueeze(-1))
            grad = grad_out[:, :, rows].to(high).unflatten(1, (shared, -1))
            inner = (grad * out[:, :, rows].to(high).unflatten(1, (shared, -1))).sum(-1, keepdim=True)
            grad_scores = weights * (torch.matmul(grad, values.unsqueeze(2).mT) - inner) * scale
            if slope is not None:
                grad_scores *= slope
            grad_query[:, :, rows] = torch.matmul(grad_scores, keys.unsqueeze(2)).flatten(1, 2).to(query.dtype)
            queries = query[:, :, rows].to(high).unflatten(1, (shared, -1))
            grad_key += torch.matmul(grad_scores.mT, queries).sum(2)
            grad_value += torch.matmul(weights.mT, grad).sum(2)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)

    def _scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, rows: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Masked scores [N, Hkv, H/Hkv, rows, Tk], and the slope of the cap there."""
        high = _high(query)
        scale = query.shape[3] ** -0.5 if self.scale is None else self.scale
        grouped = query[:, :, rows].to(high).unflatten(1, (key.shape[1], -1))
        scores = torch.matmul(grouped * scale, key.to(high).unsqueeze(2).mT)
        slope = None
        if self.softcap is not None:
            capped = torch.tanh(scores / self.softcap)
            slope = 1 - capped * capped
            scores = self.softcap * capped
        if mask is not None:
            scores = scores + mask[:, :, None, rows]
        if causal:
            later = torch.arange(key.shape[2], device=key.device) > torch.arange(
                rows.start, rows.stop, device=key.device
            ).unsqueeze(1)
            scores = scores.masked_fill(later, MASKED)
        return scores, slope


def _high(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _row_blocks(query: Tensor, key: Tensor) -> list[slice]:
    """Blocks of queries whose scores stay under DENSE_SCORES numbers."""
    size = max(1, DENSE_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    length = query.shape[2]
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
