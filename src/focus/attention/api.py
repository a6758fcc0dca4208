"""`focus_attention`: the mask "same group, or near, or a sink" as one exact call, by whichever way is fastest."""

from __future__ import annotations

import torch
from torch import Tensor

from focus.attention.decomposed import decomposed_attention
from focus.attention.flash import check_shapes, choose_pieces
from focus.attention.masked import masked_attention
from focus.attention.plan import MAX_GROUPS_IN_BITS, make_plan, single_groups
from focus.attention.reference import focus_attention_reference
from focus.errors import UserError

BACKENDS = ("auto", "decomposed", "masked", "reference")
SHORTEST_DECOMPOSED = 768
SHORTEST_DECOMPOSED_SEVERAL = 3072
LARGEST_SHARE_DECOMPOSED = 0.9


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
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Hard Focus attention (paper section 2, Appendix D; k > 1 as the union over shared groups).

    query: [B, H, Tq, D], the last Tq of the Tk positions; key, value: [B, Hkv, Tk, D] with H a multiple of Hkv; groups:
    int [B, Tk] (one group a token) or bool [B, Tk, K] (membership); sinks: that many first real tokens, or bool
    [B, Tk]; padding_mask: bool [B, Tk], True = real. Returns [B, H, Tq, D] in query's dtype, zero for padding, and with
    `return_lse` the log-sum-exp [B, H, Tq] too (-inf for padding). Differentiable in query, key and value.

    `backend` is "auto" (see `choose_backend`), "decomposed", "masked" or "reference"; raises UserError for others and
    for shapes that do not fit.
    """
    check_shapes(query, key, value)
    if groups.shape[:2] != (key.shape[0], key.shape[2]):
        raise UserError(
            f"groups: expected [{key.shape[0]}, {key.shape[2]}] or [{key.shape[0]}, {key.shape[2]}, K], "
            f"got {list(groups.shape)}"
        )
    given = query.dtype
    common = torch.promote_types(torch.promote_types(given, key.dtype), value.dtype)
    query, key, value = query.to(common), key.to(common), value.to(common)
    mask = {"window": window, "sinks": sinks, "sliding_window": sliding_window, "padding_mask": padding_mask}
    if backend == "reference":
        return focus_attention_reference(
            query, key, value, groups, **mask, scale=scale, softcap=softcap, return_lse=return_lse
        )
    if backend not in BACKENDS:
        raise UserError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        backend = _way(query.shape[2], groups, padding_mask)
    pieces = choose_pieces(query, value, scale=scale, softcap=softcap)
    if backend == "masked":
        out, lse = masked_attention(query, key, value, groups, pieces, **mask)
    else:
        out, lse = decomposed_attention(query, key, value, make_plan(query.shape[2], groups, **mask), pieces)
    return (out.to(given), lse) if return_lse else out.to(given)


def choose_backend(
    query: Tensor, value: Tensor, groups: Tensor, *, softcap: float | None = None, padding_mask: Tensor | None = None
) -> str:
    """What "auto" does for these arguments, as "way/kernel", for results to report.

    The way is "full" (every pair shares a group, so full attention is called once), "decomposed" or "masked"; the
    kernel "cpu-flash" or "dense".
    """
    way = _way(query.shape[2], groups, padding_mask)
    return f"{way}/{choose_pieces(query, value, scale=None, softcap=softcap).name}"


def _way(queries: int, groups: Tensor, padding_mask: Tensor | None) -> str:
    several = False
    if groups.dim() == 3:
        single = single_groups(groups, padding_mask)
        if single.dim() == 2 and not single.any():
            return "full"
        several = single.dim() == 3
    if queries < (SHORTEST_DECOMPOSED_SEVERAL if several else SHORTEST_DECOMPOSED):
        return "masked"
    if several and (groups.shape[-1] > MAX_GROUPS_IN_BITS or _share_kept(groups) > LARGEST_SHARE_DECOMPOSED):
        return "masked"
    return "decomposed"


def _share_kept(groups: Tensor) -> float:
    """The share of pairs that share a group, counted over the memberships that occur; bool [B, T, K]."""
    members, counts = torch.unique(groups.flatten(0, 1), dim=0, return_counts=True)
    meets = (members.float() @ members.float().T) > 0
    share = counts / counts.sum()
    return float(share @ meets.float() @ share)
