"""Performer attention, FAVOR+ (arXiv 2009.14794): softmax's kernel estimated by positive orthogonal random features.

exp(q . k) is the mean over w ~ N(0, I) of exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2), for q and k scaled by the root
of the attention scale. The w of a layer are rows of random orthogonal matrices with the lengths of independent normal
vectors, drawn once from the seed and shared by the heads (the paper may redraw them in training). Sums over the keys
then need no pair of tokens: the cost is linear in the length.

The paper keeps exponentials in range by the largest exponent of the sequence, which looks at later tokens, and adds a
small constant. Here every exponent is taken relative to a maximum over earlier keys (for each feature), or over the
features of one query or key, which cancels: what a query gives never depends on later tokens, and its denominator is at
least one. Only within a chunk of keys are pairs formed, whose kernel is at least `SMALLEST` of the largest it could be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from focus.errors import UserError
from focus.method_config import Method
from focus.methods.structural import Call, LayerState, Structural

CHUNK = 128
NEVER = -1e30
SMALLEST = 1e-30


class Performer(Structural):
    """Linear attention with `settings.features` random features; there is no window."""

    name = "performer"

    def layer_state(self, settings: Method, *, window: int, heads: int, head_dim: int, generator) -> LayerState:
        """The features' directions, float32 [m, D]."""
        state = LayerState(settings, window)
        state.register_buffer("directions", orthogonal_directions(settings.features, head_dim, generator))
        return state

    def attend(self, call: Call) -> Tensor:
        """Chunk by chunk: what earlier keys summed up to, and the pairs inside the chunk."""
        _check(call)
        call.state.backend = "chunked sums"
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        directions, root = call.state.directions.to(dtype), call.scale**0.5
        query = call.query.unflatten(1, (call.key.shape[1], -1)).to(dtype) * root
        values = torch.cat([call.value, torch.ones_like(call.value[..., :1])], dim=-1).to(dtype)
        past, outputs = None, []
        for start in range(0, call.key.shape[2], CHUNK):
            stop = min(start + CHUNK, call.key.shape[2])
            chunk = _chunk(call, slice(start, stop), values, directions, root)
            if stop > call.offset:
                rows = slice(max(start - call.offset, 0), stop - call.offset)
                outputs.append(_attend(log_features(query[:, :, :, rows], directions), chunk, past))
            past = _add(past, chunk)
        out = torch.cat(outputs, dim=3).flatten(1, 2)
        return out[..., :-1] / out[..., -1:].clamp(min=SMALLEST)

    def pairs_kept(self, settings: Method, window: int, length: int) -> tuple[float, float]:
        """All pairs, though none is formed beyond a chunk."""
        return 1.0, 1.0


@dataclass(frozen=True)
class Keys:
    """Some keys as a query meets them.

    exponents [B, Hkv, c, m]: log features, `NEVER` for padding; values [B, Hkv, c, D + 1]: with a column of ones, zero
    for padding; real: bool [B, 1, 1, 1, c] or None.
    """

    exponents: Tensor
    values: Tensor
    real: Tensor | None


@dataclass(frozen=True)
class Past:
    """Sums over earlier keys: sums [B, Hkv, m, D + 1] relative to exp(peak), peak [B, Hkv, 1, m] their largest one."""

    sums: Tensor
    peak: Tensor


def orthogonal_directions(features: int, dim: int, generator: torch.Generator) -> Tensor:
    """float32 [features, dim]: rows of independent random rotations, each as long as a normal vector is."""
    blocks = []
    for _ in range(-(-features // dim)):
        orthogonal, triangle = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
        blocks.append((orthogonal * triangle.diagonal().sign()).T)
    lengths = torch.randn(features, dim, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:features] * lengths


def log_features(vectors: Tensor, directions: Tensor) -> Tensor:
    """Logarithms [..., m] of the features of vectors [..., D], without the factor 1 / sqrt(m)."""
    return vectors @ directions.T - 0.5 * vectors.square().sum(dim=-1, keepdim=True)


def _chunk(call: Call, keys: slice, values: Tensor, directions: Tensor, root: float) -> Keys:
    exponents = log_features(call.key[:, :, keys].to(directions.dtype) * root, directions)
    if call.padding_mask is None:
        return Keys(exponents, values[:, :, keys], None)
    real = call.padding_mask[:, None, keys]
    exponents = exponents.masked_fill(~real.unsqueeze(-1), NEVER)
    return Keys(exponents, values[:, :, keys] * real.unsqueeze(-1), real[:, :, None, None])


def _add(past: Past | None, chunk: Keys) -> Past:
    peak = chunk.exponents.detach().amax(dim=2, keepdim=True)
    if past is not None:
        peak = torch.maximum(peak, past.peak)
    sums = torch.exp(chunk.exponents - peak).mT @ chunk.values
    if past is not None:
        sums = sums + torch.exp(past.peak - peak).mT * past.sums
    return Past(sums, peak)


def _attend(query: Tensor, chunk: Keys, past: Past | None) -> Tensor:
    """Sums [B, Hkv, H/Hkv, n, D + 1] up to a factor of each query, the last n of the chunk's positions.

    query: log features [B, Hkv, H/Hkv, n, m].
    """
    near, near_top = _attend_near(query, chunk)
    if past is None:
        return near
    exponents = query + past.peak.unsqueeze(2)
    far_top = exponents.detach().amax(dim=-1, keepdim=True)
    far = torch.exp(exponents - far_top) @ past.sums.unsqueeze(2)
    top = torch.maximum(near_top, far_top)
    return near * torch.exp(near_top - top) + far * torch.exp(far_top - top)


def _attend_near(query: Tensor, chunk: Keys) -> tuple[Tensor, Tensor]:
    """The sums over the chunk's keys relative to exp(top), and top [B, Hkv, H/Hkv, n, 1]."""
    query_top = query.detach().amax(dim=-1, keepdim=True)
    key_top = chunk.exponents.detach().amax(dim=-1, keepdim=True)
    kernel = torch.exp(query - query_top) @ torch.exp(chunk.exponents - key_top).unsqueeze(2).mT
    exponents = kernel.clamp(min=SMALLEST).log() + query_top + key_top.unsqueeze(2).mT
    rows, keys = query.shape[3], chunk.exponents.shape[2]
    visible = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    if chunk.real is not None:
        visible = visible & chunk.real
    exponents = exponents.masked_fill(~visible, NEVER)
    top = exponents.detach().amax(dim=-1, keepdim=True)
    return (torch.exp(exponents - top) * visible) @ chunk.values.unsqueeze(2), top


def _check(call: Call) -> None:
    for name, value in (("softcap", call.softcap), ("sliding_window", call.sliding_window)):
        if value is not None:
            raise UserError(f"kind performer: expected a model whose attention has no {name}, got {value}")
