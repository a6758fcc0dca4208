"""Which groups a token belongs to: scores, the balances that keep groups even, and hard membership (paper section 2).

Shapes: B batch, T tokens, d hidden size, d_g routing size, K groups. Everything is computed in float32 (float64 for
float64 scores) whatever the model's dtype, and autocast never applies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from focus.attention.reference import causal_pairs, near_pairs, same_group, sink_keys

PADDED = -1e30
PREFIXES = 64
"""Prefixes balanced at a time by `prefix_sinkhorn`."""
SMALLEST = 1e-300


def scores(hidden: Tensor, projection: Tensor, centroids: Tensor) -> Tensor:
    """S = (W_g h) C^T: hidden [B, T, d], projection [d_g, d], centroids [K, d_g] -> float32 [B, T, K].

    The two small matrices are multiplied first, which costs T*d*K instead of T*d*d_g.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return hidden.float() @ (centroids.float() @ projection.float()).T


def sinkhorn(scores: Tensor, *, temperature: float, iterations: int, padding_mask: Tensor | None = None) -> Tensor:
    """The paper's balance: exp(S / tau), `iterations` times divided by the sum over tokens, then over groups.

    scores [B, T, K] -> [B, T, K]. Each row is a distribution over groups, column sums approach T / K. Depends on every
    token of the sequence, later ones included. padding_mask: bool [B, T], True = real; padding is not counted.
    """
    columns = _log_column_scale(scores, temperature, iterations, padding_mask)
    return assign(scores, temperature=temperature, potentials=columns)


def prefix_sinkhorn(
    scores: Tensor, *, temperature: float, iterations: int, padding_mask: Tensor | None = None
) -> Tensor:
    """Sinkhorn over each prefix: row t is the last row of `sinkhorn` over the tokens up to t, so it is exactly causal.

    scores [B, T, K] -> [B, T, K]. padding_mask: bool [B, T], True = real. Takes T^2 / 2 numbers an iteration, in
    float64, of which chunks of prefixes are held at a time. Outside the log domain, where prefixes cannot share their
    exponentials: a token's row scale cancels, so exp is taken below its row's maximum; what float64 still loses
    (columns apart by a factor of 1e300) is clamped.
    """
    logits = scores.double() / temperature
    real = torch.ones_like(logits[..., 0], dtype=torch.bool) if padding_mask is None else padding_mask
    first = -torch.logcumsumexp(logits.masked_fill(~real[..., None], PADDED), dim=1)
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True).detach())
    positions = torch.arange(logits.shape[1], device=logits.device)
    columns = []
    for chunk in positions.split(PREFIXES):
        end = int(chunk[-1]) + 1
        seen = (positions[:end] <= chunk[:, None]) & real[:, None, :end]
        known, scale = weights[:, :end], torch.exp(_below_zero(first[:, chunk]))
        for _ in range(iterations - 1):
            rows = seen / (scale @ known.transpose(1, 2)).clamp(min=SMALLEST)
            scale = 1 / (rows @ known).clamp(min=SMALLEST)
            scale = scale / scale.amax(dim=-1, keepdim=True).detach()
        columns.append(scale.clamp(min=SMALLEST).log())
    return torch.softmax(logits + torch.cat(columns, dim=1), dim=-1).to(_high(scores).dtype)


def column_potentials(
    scores: Tensor, *, temperature: float, iterations: int, padding_mask: Tensor | None = None
) -> Tensor:
    """The log column scale of Sinkhorn, centred over the groups: scores [B, T, K] -> [B, K].

    `assign` with these potentials is `sinkhorn`; with potentials frozen from elsewhere it is causal.
    """
    columns = _log_column_scale(scores, temperature, iterations, padding_mask)
    return columns - columns.mean(dim=-1, keepdim=True)


def assign(scores: Tensor, *, temperature: float, potentials: Tensor | None = None) -> Tensor:
    """softmax(S / tau + potential) over the groups: scores [B, T, K], potentials [K] or [B, K] -> [B, T, K]."""
    logits = _high(scores) / temperature
    if potentials is not None:
        logits = logits + potentials.to(logits.dtype).unsqueeze(-2)
    return torch.softmax(logits, dim=-1)


def balance_loss(assignment: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """K sum_k f_k p_k - 1, averaged over the batch: assignment [B, T, K] -> scalar with gradients, 0 for even groups.

    f_k is the share of a sequence's real tokens whose largest group is k, p_k their mean assignment to it: the load
    balancing loss of Switch Transformer (arXiv 2101.03961, Eq. 4), less its value for even groups. Sequence by
    sequence, so that a batch has the same loss in one piece or in several.
    """
    groups = assignment.shape[-1]
    hard = one_hot(assignment.argmax(dim=-1), groups).to(assignment.dtype)
    loads = _mean_of_real(hard, padding_mask) * _mean_of_real(assignment, padding_mask)
    return (groups * loads.sum(dim=-1) - 1).mean()


def entropy_gap(assignment: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """log K minus the entropy of a sequence's mean assignment, averaged over the batch: 0 for even groups, at least 0.

    assignment [B, T, K] -> scalar with gradients.
    """
    mean = _mean_of_real(assignment, padding_mask)
    return math.log(assignment.shape[-1]) - torch.special.entr(mean.clamp(min=1e-12)).sum(dim=-1).mean()


def vectors(hidden: Tensor, projection: Tensor) -> Tensor:
    """Directions of the routing vectors W_g h: hidden [..., d], projection [d_g, d] -> float32 [..., d_g], length 1."""
    with torch.autocast(hidden.device.type, enabled=False):
        return normalize(hidden.float() @ projection.float().T, dim=-1)


def mean_directions(vectors: Tensor, groups: Tensor, centroids: Tensor) -> Tensor:
    """Direction of the mean vector of each group: vectors [N, d_g], groups int64 [N], centroids [K, d_g] -> [K, d_g].

    A group without vectors keeps its centroid's direction. Rows have length 1.
    """
    count = len(centroids)
    sums = one_hot(groups, count).to(vectors.dtype).T @ vectors
    empty = (torch.bincount(groups, minlength=count) == 0)[:, None]
    return normalize(torch.where(empty, centroids, sums), dim=-1)


def spherical_kmeans(vectors: Tensor, groups: int, iterations: int = 20) -> Tensor:
    """Centroids of `groups` clusters of directions: vectors [N, d_g] of length 1 -> [groups, d_g] of length 1.

    Starts from vectors drawn as k-means++ does, with torch's own random numbers, and goes on for `iterations` rounds.
    Fewer vectors than groups are drawn more than once.
    """
    far = torch.ones(len(vectors))
    chosen = []
    for _ in range(groups):
        if not far.sum() > 0:
            far = torch.ones(len(vectors))
        chosen.append(int(torch.multinomial(far, 1)))
        distance = (1 - vectors @ vectors[chosen[-1]]).clamp(min=0).cpu().float()
        distance[chosen] = 0
        far = distance if len(chosen) == 1 else torch.minimum(far, distance)
    centroids = vectors[chosen]
    for _ in range(iterations):
        centroids = mean_directions(vectors, (vectors @ centroids.T).argmax(dim=-1), centroids)
    return centroids


def top_k_membership(assignment: Tensor, k: int) -> Tensor:
    """The k largest groups of each token: assignment [B, T, K] -> bool [B, T, K] with k True a row."""
    chosen = assignment.topk(k, dim=-1).indices
    return torch.zeros_like(assignment, dtype=torch.bool).scatter_(-1, chosen, True)


def dominance(assignment: Tensor, padding_mask: Tensor | None = None) -> float:
    """Share of a sequence's real tokens that are in its fullest group, averaged over the batch.

    1/K is even, 1 is collapse; a token counts for its largest group.
    """
    groups = assignment.argmax(dim=-1)
    real = groups if padding_mask is None else [row[mask] for row, mask in zip(groups, padding_mask, strict=True)]
    shares = [torch.bincount(row).max().item() / len(row) for row in real if len(row)]
    return sum(shares) / len(shares)


def pairs_kept(
    membership: Tensor,
    window: int,
    sinks: int | Tensor = 0,
    padding_mask: Tensor | None = None,
    sliding_window: int | None = None,
) -> tuple[float, float]:
    """Shares of the pairs full attention computes that hard attention keeps: of all pairs, and of the far ones.

    membership: bool [B, T, K]; sinks: how many, or bool [B, T]; far means a distance above `window`. Without any far
    pair nothing can be dropped, and its share is 1.
    """
    length, device = membership.shape[1], membership.device
    pairs = causal_pairs(length, length, sliding_window, padding_mask, device)
    far = pairs & ~near_pairs(length, length, window, device)
    kept = far & (same_group(membership, length) | sink_keys(length, sinks, padding_mask, device)[:, None])
    far_count = far.expand_as(kept).sum().item()
    near_count = pairs.expand_as(kept).sum().item() - far_count
    kept_count = kept.sum().item()
    return (near_count + kept_count) / (near_count + far_count), kept_count / far_count if far_count else 1.0


def _log_column_scale(scores: Tensor, temperature: float, iterations: int, padding_mask: Tensor | None) -> Tensor:
    logits = (_high(scores) / temperature).transpose(1, 2).contiguous()
    counted = logits if padding_mask is None else logits.masked_fill(~padding_mask[:, None], PADDED)
    columns = -torch.logsumexp(counted, dim=2, keepdim=True)
    for _ in range(iterations - 1):
        rows = -torch.logsumexp(logits + columns, dim=1, keepdim=True)
        columns = -torch.logsumexp(counted + rows, dim=2, keepdim=True)
    return columns.squeeze(2)


def _below_zero(logs: Tensor) -> Tensor:
    return logs - logs.amax(dim=-1, keepdim=True).detach()


def _mean_of_real(values: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Mean over a sequence's real tokens: [B, T, K] -> [B, K]."""
    if padding_mask is None:
        return values.mean(dim=1)
    real = padding_mask[..., None].to(values.dtype)
    return (values * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


def _high(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
