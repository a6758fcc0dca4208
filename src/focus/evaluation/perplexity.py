"""Perplexity on held-out documents, window by window, so that the differences between rows are paired."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean

import torch
from transformers import PreTrainedModel

from focus.cache import cache_root
from focus.corpora import documents
from focus.data import Window, batched, evaluation_windows, tokenise
from focus.errors import UserError
from focus.evaluation.rows import load_row, write_row
from focus.jobs import PerplexityJob
from focus.loss import token_losses
from focus.precision import product_dtype, products_in
from focus.progress import Progress


def run(job: PerplexityJob, *, model: Path, corpus: Path, weights: Path | None, output: Path) -> None:
    """Measure one row and write its result. model, corpus: manifests; weights: what training wrote, if it trains."""
    started = time.time()
    row = load_row(job, model, weights)
    most = getattr(row.model.config, "max_position_embeddings", job.model_settings.context)
    if job.model_settings.context > most:
        raise UserError(
            f"context: expected at most the {most} positions of {job.model}, got {job.model_settings.context}"
        )
    texts = documents(corpus, "held_out")
    tokens = tokenise(texts, row.tokenizer, cache_root() / "tokens")
    context, settings = job.model_settings.context, job.perplexity
    windows = evaluation_windows(
        [(text.name, ids) for text, ids in zip(texts, tokens, strict=True)], context, settings.windows, settings.stride
    )
    dtype = product_dtype(job.perplexity.precision, row.model.device)
    metrics = perplexity(
        row.model,
        windows,
        batch_size=settings.batch_size,
        dtype=dtype,
        observe=row.method.observe(row.model),
        name=f"perplexity {job.model} {job.method} {job.attention}",
    )
    metrics |= pairs_kept(job, row.method, metrics["layers"]) | {
        "context": context,
        "stride": settings.stride or context,
        "trained_parameters": row.trained_parameters,
    }
    write_row(
        output,
        row,
        job,
        metrics,
        experiment="perplexity",
        module="focus.evaluation.perplexity",
        manifests={"model": model, "corpus": corpus},
        dtype=dtype,
        started=started,
    )


def perplexity(
    model: PreTrainedModel,
    windows: Sequence[Window],
    *,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    observe: AbstractContextManager[list[dict[str, float]]] | None = None,
    name: str = "perplexity",
) -> dict:
    """Losses in nats of the scored tokens of `windows` (all of one length), and what follows from them.

    windows: {document, start, tokens, loss_sum} each; documents: {document, tokens, loss_sum} each; layers: the means
    over the windows of what `observe` yields.
    """
    progress, measured, layers, total, count = Progress(name, len(windows)), [], [], 0.0, 0
    with observe or nullcontext([]) as watched:
        for batch in batched(windows, batch_size):
            tokens = torch.stack([window.tokens for window in batch]).to(model.device)
            with products_in(dtype, model.device):
                losses = token_losses(model, tokens, first=batch[0].first)
            for window, loss in zip(batch, losses.double().sum(dim=1).tolist(), strict=True):
                if not math.isfinite(loss):
                    raise UserError(
                        f"{name}: {window.document} from token {window.start}: expected a finite loss, got {loss}"
                    )
                scored = losses.shape[1]
                measured.append(
                    {"document": window.document, "start": window.start, "tokens": scored, "loss_sum": loss}
                )
                total, count = total + loss, count + scored
            layers += [[dict(layer) for layer in watched]] * len(batch)
            progress.step(len(batch), loss=total / count)
    return {
        "perplexity": math.exp(total / count),
        "loss": total / count,
        "tokens": count,
        "windows": measured,
        "documents": _by_document(measured),
        "layers": [{key: fmean(layer[key] for layer in same) for key in same[0]} for same in zip(*layers, strict=True)],
    }


def pairs_kept(job: PerplexityJob, method, layers: list[dict[str, float]]) -> dict[str, float]:
    """Shares of the pairs that attention really reads: as counted, or as layers observed, else all."""
    counted = method.pairs_kept(job.settings, job.model_settings.window, job.model_settings.context)
    if counted is None and job.attention != "soft" and all("pairs_kept" in layer for layer in layers):
        counted = fmean(layer["pairs_kept"] for layer in layers), fmean(layer["far_pairs_kept"] for layer in layers)
    every, far = counted or (1.0, 1.0)
    return {"pairs_kept": every, "far_pairs_kept": far}


def _by_document(windows: Sequence[dict]) -> list[dict]:
    sums: dict[str, dict] = {}
    for window in windows:
        document = sums.setdefault(window["document"], {"document": window["document"], "tokens": 0, "loss_sum": 0.0})
        document["tokens"] += window["tokens"]
        document["loss_sum"] += window["loss_sum"]
    return list(sums.values())
