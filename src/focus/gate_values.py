"""What the soft gate gives to near and to far pairs of held-out text, under any reading of Eq. 2.

Every gate rises with the affinity g_i . g_j, so pairs are counted by affinity in BINS equal steps, and mean, quantiles,
shares and histogram follow from the counts, as exact as a step is fine, whatever the number of pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedModel

from focus.adapter import watching
from focus.attention.reference import causal_pairs, near_pairs, sink_keys
from focus.cache import cache_root
from focus.corpora import documents
from focus.data import Window, evaluation_windows, tokenise
from focus.errors import UserError
from focus.evaluation.rows import load_row, write_row
from focus.gates import gate_terms
from focus.jobs import PerplexityJob
from focus.method_config import Gate
from focus.precision import product_dtype, products_in
from focus.progress import Progress

BINS = 10_000
HISTOGRAM = 50
LEVELS = (5, 25, 50, 75, 95)
LOW, HIGH = 0.1, 0.9


def run(job: PerplexityJob, *, model: Path, corpus: Path, weights: Path | None, output: Path) -> None:
    """Look at the gate of one soft row and write the result. model, corpus: manifests; weights: what training wrote.

    Raises UserError for a row that is not soft.
    """
    started = time.time()
    if job.attention != "soft":
        raise UserError(f"attention: expected soft, since nothing else has a gate, got {job.attention}")
    row = load_row(job, model, weights)
    texts = documents(corpus, "held_out")
    tokens = tokenise(texts, row.tokenizer, cache_root() / "tokens")
    context, settings, adapter = job.model_settings.context, job.perplexity, job.settings.adapter
    named = [(text.name, ids) for text, ids in zip(texts, tokens, strict=True)]
    windows = evaluation_windows(named, context, settings.windows, settings.stride)
    dtype = product_dtype(settings.precision, row.model.device)
    name = f"gate of {job.model} {job.method}"
    near, far = count_pairs(row.model, windows, adapter.window, adapter.sinks, dtype=dtype, name=name)
    gate = {"gate": adapter.gate, "steepness": adapter.steepness}
    metrics = gate | {
        "near": summarise(near.sum(axis=1), **gate),
        "far": summarise(far.sum(axis=1), **gate),
        "layers": [
            {"near_mean": mean(own.sum(axis=0), **gate), "far_mean": mean(other.sum(axis=0), **gate)}
            for own, other in zip(near.swapaxes(0, 1), far.swapaxes(0, 1), strict=True)
        ],
        "windows": [{"document": window.document, "start": window.start} for window in windows],
        "context": context,
        "window": adapter.window,
        "sinks": adapter.sinks,
    }
    write_row(
        output,
        row,
        job,
        metrics,
        experiment="gates",
        module="focus.gate_values",
        manifests={"model": model, "corpus": corpus},
        dtype=dtype,
        started=started,
    )


@torch.no_grad()
def count_pairs(
    model: PreTrainedModel,
    windows: Sequence[Window],
    window: int,
    sinks: int,
    *,
    dtype: torch.dtype = torch.float32,
    name: str = "gate",
) -> tuple[ndarray, ndarray]:
    """Near and far pairs of every window and layer by affinity: int64 [W, L, BINS] each.

    The model runs as it is switched, its products in `dtype`, without its language model's head. Raises UserError where
    an assignment is not finite or no pair is far.
    """
    progress, counted = Progress(name, len(windows)), []
    for each in windows:
        with watching(model) as layers, products_in(dtype, model.device):
            model.base_model(input_ids=each.tokens[None].to(model.device), use_cache=False)
        assignments = [seen.assignment[0] for (seen,) in layers]
        if not all(assignment.isfinite().all() for assignment in assignments):
            raise UserError(f"{name}: {each.document} from token {each.start}: expected finite assignments")
        counted.append(torch.stack([by_affinity(assignment, window, sinks) for assignment in assignments]).cpu())
        progress.step()
    near, far = torch.stack(counted).unbind(dim=2)
    if not far.any():
        raise UserError(f"{name}: expected pairs that are gated, got none in {len(windows[0].tokens)} tokens")
    return near.numpy(), far.numpy()


def by_affinity(assignment: Tensor, window: int, sinks: int) -> Tensor:
    """Pairs of one sequence by affinity: assignment [T, K] -> int64 [2, BINS], near then far.

    Near: 0 <= i - j <= window, a token with itself included, where the gate is not applied. Far: the pairs that it is
    applied to, so those farther apart whose key is none of the first `sinks` tokens.
    """
    length, device = len(assignment), assignment.device
    pairs = causal_pairs(length, length, None, None, device)[0]
    near = pairs & near_pairs(length, length, window, device)[0]
    far = pairs & ~near & ~sink_keys(length, sinks, None, device)
    steps = ((assignment @ assignment.T) * BINS).long().clamp(0, BINS - 1)
    return torch.stack([torch.bincount(steps[chosen], minlength=BINS) for chosen in (near, far)])


def gate_of(affinity: Tensor, gate: Gate, steepness: float) -> Tensor:
    """What the gate multiplies by, 0 to 1: the score (printed, centred), or the weight (log_sigmoid, exponential)."""
    factor, bias = gate_terms(affinity, gate, steepness)
    return bias.exp() if factor is None else factor


def mean(counts: ndarray, gate: Gate, steepness: float) -> float:
    """The mean gate value of pairs counted by affinity, int64 [BINS]."""
    return float(counts @ _values(gate, steepness) / counts.sum())


def summarise(counts: ndarray, gate: Gate, steepness: float) -> dict:
    """The distribution of gate values over pairs counted by affinity in each window: counts int64 [W, BINS].

    pairs; mean and its standard error over windows (None for one); quantiles at LEVELS percent; the shares below LOW
    and above HIGH; affinity, the mean of what the gate is of; histogram, the shares in HISTOGRAM equal steps of 0 to 1.
    """
    values, total = _values(gate, steepness), counts.sum(axis=0)
    pairs, reached = int(total.sum()), np.cumsum(total)
    means = [mean(each, gate, steepness) for each in counts]
    shares, _ = np.histogram(values, bins=HISTOGRAM, range=(0.0, 1.0), weights=total / pairs)
    return {
        "pairs": pairs,
        "mean": mean(total, gate, steepness),
        "mean_error": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        "quantiles": {str(level): float(values[np.searchsorted(reached, level / 100 * pairs)]) for level in LEVELS},
        "below_low": float(total[values < LOW].sum() / pairs),
        "above_high": float(total[values > HIGH].sum() / pairs),
        "affinity": float(total @ _middles() / pairs),
        "histogram": shares.tolist(),
    }


def _values(gate: Gate, steepness: float) -> ndarray:
    """The gate in the middle of each step of affinity: float64 [BINS]."""
    return gate_of(torch.from_numpy(_middles()), gate, steepness).numpy()


def _middles() -> ndarray:
    return (np.arange(BINS) + 0.5) / BINS
