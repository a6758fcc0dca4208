"""What a benchmark states beside its times: the pairs kept, the limit they set, and whether outputs are right."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from focus.attention.reference import causal_pairs, focus_attention_reference, near_pairs, same_group

COUNT_ROWS = 256
CHECKED_BLOCKS, CHECKED_ROWS = 4, 16


def operation_limit(shares: list[float], window: int, length: int) -> float:
    """The speed-up that counting pairs allows: n^2/2 over n^2/2 * sum p^2 + n*w (paper Appendix D)."""
    return 1 / min(1.0, sum(p * p for p in shares) + 2 * window / length)


def pairs_kept(groups: Tensor, window: int) -> tuple[float, float]:
    """Shares of the causal pairs, and of those farther than `window`, that the mask keeps.

    groups: [1, T] or [1, T, K].
    """
    length = groups.shape[1]
    kept = far_kept = far = 0
    for start in range(0, length, COUNT_ROWS):
        stop = min(start + COUNT_ROWS, length)
        rows = stop - start
        pairs = causal_pairs(rows, stop, None, None, groups.device)
        near = near_pairs(rows, stop, window, groups.device)
        same = same_group(groups[:, :stop], rows)
        kept += int((pairs & (same | near)).sum())
        far_kept += int((pairs & same & ~near).sum())
        far += int((pairs & ~near).sum())
    return kept / (length * (length + 1) / 2), far_kept / far if far else 1.0


@torch.no_grad()
def cosine_to_reference(
    query: Tensor, key: Tensor, value: Tensor, groups: Tensor, output: Tensor, window: int
) -> float:
    """The smallest cosine similarity of `output` to the dense definition in float64, over heads and sampled queries.

    The queries are blocks spread evenly over the sequence, the last one included, so that long ones can be checked too.
    """
    length, smallest = query.shape[2], 1.0
    stops = torch.linspace(min(CHECKED_ROWS, length), length, CHECKED_BLOCKS).long().tolist()
    for stop in stops:
        rows = slice(max(stop - CHECKED_ROWS, 0), stop)
        exact = focus_attention_reference(
            query[:, :, rows].double(),
            key[:, :, :stop].double(),
            value[:, :, :stop].double(),
            groups[:, :stop],
            window=window,
        )
        similar = cosine_similarity(output[:, :, rows].double(), exact, dim=-1)
        smallest = min(smallest, float(similar.min()))
    return smallest
