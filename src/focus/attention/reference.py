"""The oracle: Focus attention by the definition, dense, in any floating dtype up to float64.

Everything here holds a Tq x Tk array. It is what the fast paths are tested against, and the place to read what Focus
attention means:

    i attends j  when  j <= i, neither is padding, i - j < sliding_window,
                 and   (i and j share a group, or i - j <= window, or j is one of the first `sinks` real tokens)
"""

from __future__ import annotations

import torch
from torch import Tensor


def focus_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    *,
    window: int,
    sinks: int | Tensor = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    padding_mask: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Hard Focus attention (paper section 2, Appendix D; k > 1 as the union over shared groups).

    query: [B, H, Tq, D], the last Tq of the Tk positions; key, value: [B, Hkv, Tk, D] with H a multiple of Hkv; groups:
    int [B, Tk] (one group a token) or bool [B, Tk, K] (membership); sinks: that many first real tokens, or bool
    [B, Tk]; padding_mask: bool [B, Tk], True = real. Returns [B, H, Tq, D] in query's dtype, zero for padding, and with
    `return_lse` the log-sum-exp [B, H, Tq] too (-inf for padding).
    """
    allowed = allowed_pairs(
        query.shape[2],
        groups,
        window=window,
        sinks=sinks,
        sliding_window=sliding_window,
        padding_mask=padding_mask,
    )
    return dense_attention(query, key, value, allowed, scale=scale, softcap=softcap, return_lse=return_lse)


def allowed_pairs(
    queries: int,
    groups: Tensor,
    *,
    window: int,
    sinks: int | Tensor = 0,
    sliding_window: int | None = None,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """The whole mask, bool [B, Tq, Tk], for the arguments of `focus_attention_reference`."""
    keys, device = groups.shape[1], groups.device
    pairs = causal_pairs(queries, keys, sliding_window, padding_mask, device)
    seen = same_group(groups, queries) | sink_keys(keys, sinks, padding_mask, device)[:, None]
    return pairs & (seen | near_pairs(queries, keys, window, device))


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    *,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the pairs of `allowed` (bool [B or 1, Tq, Tk]), shared by the heads.

    Scores are scale * q.k, capped as softcap * tanh(scores / softcap) if given, then multiplied by `factor` and
    increased by `bias` (both [B or 1, Tq, Tk]). Scores and softmax are at least float32. A query without any pair
    gives zero.
    """
    batch, heads, length, width = query.shape
    shared = heads // key.shape[1]
    high = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(high).reshape(batch, key.shape[1], shared, length, width)
    scores = torch.einsum("bgsid,bgjd->bgsij", grouped, key.to(high)) * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if factor is not None:
        scores = scores * factor[:, None, None]
    if bias is not None:
        scores = scores + bias[:, None, None]
    empty = ~allowed.any(dim=-1)[:, None, None]
    scores = scores.masked_fill(~allowed[:, None, None], float("-inf")).masked_fill(empty[..., None], 0.0)
    weights = torch.softmax(scores, dim=-1)
    out = torch.einsum("bgsij,bgjd->bgsid", weights, value.to(high)).masked_fill(empty[..., None], 0.0)
    out = out.reshape(batch, heads, length, -1).to(query.dtype)
    if not return_lse:
        return out
    return out, torch.logsumexp(scores, dim=-1).masked_fill(empty, float("-inf")).reshape(batch, heads, length)


def causal_pairs(
    queries: int, keys: int, sliding_window: int | None, padding_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Pairs the base model itself allows: bool [B or 1, Tq, Tk]; the queries are the last Tq of the Tk positions."""
    distance = _distance(queries, keys, device)
    allowed = (distance >= 0)[None]
    if sliding_window is not None:
        allowed = allowed & (distance < sliding_window)[None]
    if padding_mask is not None:
        allowed = allowed & padding_mask[:, None, :] & padding_mask[:, keys - queries :, None]
    return allowed


def near_pairs(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Pairs at a distance of at most `window`: bool [1, Tq, Tk]."""
    return (_distance(queries, keys, device) <= window)[None]


def same_group(groups: Tensor, queries: int) -> Tensor:
    """Pairs that share a group: bool [B, Tq, Tk]; groups as int [B, Tk] or bool [B, Tk, K]."""
    last = groups[:, groups.shape[1] - queries :]
    if groups.dim() == 2:
        return last[:, :, None] == groups[:, None, :]
    return torch.einsum("bik,bjk->bij", last.float(), groups.float()) > 0


def sink_keys(keys: int, sinks: int | Tensor, padding_mask: Tensor | None, device: torch.device) -> Tensor:
    """The first `sinks` real tokens, or those a bool [B, Tk] marks: bool [B or 1, Tk]."""
    if isinstance(sinks, Tensor):
        return sinks if padding_mask is None else sinks & padding_mask
    if padding_mask is None:
        return (torch.arange(keys, device=device) < sinks)[None]
    return padding_mask & (padding_mask.cumsum(dim=1) <= sinks)


def _distance(queries: int, keys: int, device: torch.device) -> Tensor:
    rows = torch.arange(keys - queries, keys, device=device)
    return rows[:, None] - torch.arange(keys, device=device)
