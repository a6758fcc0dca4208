"""The soft gate of training (Eq. 2) in its four readings, and dense attention with it.

Far pairs (farther than the window, and not to a sink) are gated by the affinity a = g_i . g_j of their assignments:

    printed      score * sigmoid(lam * a)            the paper's letter: between 1/2 and 1, so it prunes nothing
    centred      score * sigmoid(lam * (a - 1/2))    reaches 0, but a score of 0 is not a weight of 0
    log_sigmoid  score + log sigmoid(lam * (a - 1/2))    multiplies the weight, so it prunes
    exponential  score + lam * (a - 1)                   the same with exp: linear in g, so it fits any attention kernel
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from focus.attention.reference import causal_pairs, near_pairs, sink_keys
from focus.method_config import Gate


def gate_terms(affinity: Tensor, gate: Gate, steepness: float) -> tuple[Tensor | None, Tensor | None]:
    """(factor, bias) for far pairs, one of them None: scores are multiplied by the factor or increased by the bias."""
    if gate == "printed":
        return torch.sigmoid(steepness * affinity), None
    if gate == "centred":
        return torch.sigmoid(steepness * (affinity - 0.5)), None
    if gate == "log_sigmoid":
        return None, functional.logsigmoid(steepness * (affinity - 0.5))
    if gate == "exponential":
        return None, steepness * (affinity - 1.0)
    raise ValueError(f"gate: expected printed, centred, log_sigmoid or exponential, got {gate!r}")


def gated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    assignment: Tensor,
    *,
    gate: Gate,
    steepness: float,
    window: int,
    sinks: int | Tensor = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    padding_mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Soft Focus attention over all pairs, differentiable in everything; holds one Tq x Tk array a head.

    query: [B, H, Tq, D], the last Tq of the Tk positions; key, value: [B, Hkv, Tk, D]; assignment: [B, Tk, K];
    sinks: how many first real tokens are never gated, or bool [B, Tk]; padding_mask: bool [B, Tk], True = real.
    Returns [B, H, Tq, D] in value's dtype, zero for padding. Products run in the inputs' dtype (or autocast's), the
    gate and the softmax in float32 or more.
    """
    _, heads, queries, width = query.shape
    shared = heads // key.shape[1]
    factor, bias, empty = _terms(assignment, queries, gate, steepness, window, sinks, sliding_window, padding_mask)
    if not torch.is_grad_enabled():  # like the other attentions; training does without, for its speed
        query, key = query.to(torch.promote_types(query.dtype, torch.float32)), key.to(torch.float32)
    grouped = (query * (width**-0.5 if scale is None else scale)).unflatten(1, (-1, shared))
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if factor is not None:
        scores = scores * factor[:, None, None]
    weights = torch.softmax(scores.add_(bias[:, None, None]), dim=-1)
    weights = functional.dropout(weights, dropout, training=dropout > 0)
    out = torch.matmul(weights.to(value.dtype), value[:, :, None]).flatten(1, 2)
    return out if empty is None else out.masked_fill(empty[:, None], 0.0)


def _terms(
    assignment: Tensor,
    queries: int,
    gate: Gate,
    steepness: float,
    window: int,
    sinks: int | Tensor,
    sliding_window: int | None,
    padding_mask: Tensor | None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Factor (or None) and bias [B, Tq, Tk] for all pairs, shared by the heads, and which queries see nothing.

    The bias is -inf where the base model does not look, but 0 along the row of a query that sees nothing.
    """
    keys, device = assignment.shape[1], assignment.device
    untouched = near_pairs(queries, keys, window, device) | sink_keys(keys, sinks, padding_mask, device)[:, None]
    pairs = causal_pairs(queries, keys, sliding_window, padding_mask, device)
    empty = None if padding_mask is None else ~pairs.any(dim=-1, keepdim=True)
    with torch.autocast(device.type, enabled=False):
        affinity = assignment[:, keys - queries :] @ assignment.transpose(1, 2)
        factor, bias = gate_terms(affinity, gate, steepness)
    if factor is None:
        bias = bias.masked_fill(untouched, 0.0)
    else:
        factor = factor.masked_fill(untouched, 1.0)
        bias = torch.zeros_like(affinity)
    bias = bias.masked_fill(~pairs, float("-inf"))
    return factor, bias if empty is None else bias.masked_fill(empty, 0.0), empty
