"""Training through hard groups: the hard mask forward, a straight-through estimate of the assignment's gradient back.

The paper leaves this open ("training has no speedup"). Forward is `focus_attention`, exactly. Backward treats each pair
that the mask keeps as if its score held lam * g_i . g_j: the assignment g gets the gradient that this bias would pass
on. It rides in head dimensions that add nothing to the scores, query [q, 0, g] and key [k, g, 0], whose gradients from
the kernel are the sums over keys (in the first) and over queries (in the second) that the bias would give.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from focus.attention.api import focus_attention
from focus.errors import UserError


def straight_through_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Tensor,
    assignment: Tensor,
    *,
    steepness: float,
    window: int,
    sinks: int | Tensor = 0,
    scale: float | None = None,
    sliding_window: int | None = None,
    padding_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Hard Focus attention [B, H, T, D], differentiable in query, key, value and, by the estimate, in assignment.

    groups: int [B, T] or bool [B, T, K], what `assignment` [B, T, K] came down to; the rest as in `focus_attention`,
    with as many queries as keys. Raises UserError for an assignment that does not fit.
    """
    if assignment.dim() != 3 or assignment.shape[:2] != (query.shape[0], query.shape[2]):
        raise UserError(
            f"assignment: expected [{query.shape[0]}, {query.shape[2]}, K] and as many queries as keys, "
            f"got {list(assignment.shape)}"
        )
    width, extra = value.shape[3], 2 * assignment.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    queries, keys = _Ride.apply(query, key, assignment, steepness / scale)
    out = focus_attention(
        queries,
        keys,
        pad(value, (0, extra)),
        groups,
        window=window,
        sinks=sinks,
        scale=scale,
        sliding_window=sliding_window,
        padding_mask=padding_mask,
        backend=backend,
    )
    return out[..., :width]


class _Ride(torch.autograd.Function):
    """query, key, assignment -> [q, 0, g], [k, g, 0]; back, what arrives in the zeros is the assignment's gradient."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, assignment: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor, ctx.dtype = factor, assignment.dtype
        ctx.width, groups = query.shape[3], assignment.shape[2]
        ctx.groups = groups
        queries, keys = (pad(x, (0, 2 * groups)) for x in (query, key))
        queries[..., ctx.width + groups :] = assignment.unsqueeze(1)
        keys[..., ctx.width : ctx.width + groups] = assignment.unsqueeze(1)
        return queries, keys

    @staticmethod
    def backward(ctx, grad_queries: Tensor, grad_keys: Tensor):
        width, groups = ctx.width, ctx.groups
        from_queries = grad_queries[..., width : width + groups].to(ctx.dtype).sum(1)
        from_keys = grad_keys[..., width + groups :].to(ctx.dtype).sum(1)
        grad = ctx.factor * (from_queries + from_keys)
        return grad_queries[..., :width], grad_keys[..., :width], grad, None
