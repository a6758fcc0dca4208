"""`focus_attention`: the mask "same group, or near, or a sink" as one call."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from focus.attention.reference import allowed_pairs, dense_attention


def focus_attention(
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
    backend: str = "auto",
) -> Tensor:
    """Hard Focus attention (paper section 2, Appendix D; k > 1 as the union over shared groups).

    query: [B, H, Tq, D]; key, value: [B, Hkv, Tk, D], the queries being the last Tq of the Tk positions; groups: int
    [B, Tk] or bool [B, Tk, K]; sinks: the first `sinks` real tokens, or bool [B, Tk]; padding_mask: bool [B, Tk],
    True = real. Returns [B, H, Tq, D] in query's dtype, zero for padding.
    """
    allowed = allowed_pairs(
        query.shape[2],
        groups,
        window=window,
        sinks=sinks,
        sliding_window=sliding_window,
        padding_mask=padding_mask,
    )
    if backend == "reference" or softcap is not None:
        return dense_attention(query, key, value, allowed, scale=scale, softcap=softcap)
    empty = ~allowed.any(dim=-1)[:, None, :, None]
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=(allowed[:, None] | empty), scale=scale, enable_gqa=True
    )
    return out.masked_fill(empty, 0.0)
