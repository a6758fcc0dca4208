"""Whether groups see the future (PAPER.md 4.1), measured on trained centroids under one balance after another.

Projection and centroids stay as trained. For each balance: what a changed later token does to earlier logits under the
gate and under hard groups, held-out perplexity under the gate, and dominance on several corpora.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus import adapter
from focus.cache import cache_root
from focus.checkpoint import writing
from focus.corpora import documents
from focus.data import Window, evaluation_windows, tokenise, training_batches
from focus.evaluation.perplexity import perplexity
from focus.jobs import LeakJob
from focus.method_config import FocusConfig
from focus.methods import METHODS
from focus.models import load_model, revision_of
from focus.progress import Progress
from focus.provenance import write_result

NOISE = 1e-3
"""Largest change of a logit that is rounding: later tokens decide the order in which hard groups are computed, and
float32 logits of some 20 carry errors of 1e-5 to 1e-4. A balance whose changes stay below sees no later token."""
ROWS = 64
MODES = {"soft": None, "hard-k1": 1}


def run(job: LeakJob, *, model: Path, corpus: Path, others: list[Path], weights: Path, output: Path) -> None:
    """Measure one row's trained centroids and write the result.

    model, corpus: manifests, and others those of `job.leak.corpora`, in their order; weights: the folder of training.
    """
    started = time.time()
    leak, context, name = job.leak, job.model_settings.context, f"leak {job.model} {job.method}"
    network, tokenizer = load_model(model, job.model_settings.dtype, job.model_settings.placement)
    windows = _windows(corpus, tokenizer, context, leak.windows)
    elsewhere = {
        each: _windows(path, tokenizer, context, leak.other_windows)
        for each, path in zip(leak.corpora, others, strict=True)
    }
    tokens = tokenise(documents(corpus, "train"), tokenizer, cache_root() / "tokens")
    training = training_batches(tokens, context, 1, job.seed, separator=tokenizer.eos_token_id)
    base = perplexity(network, windows, name=f"{name} pretrained")
    method = METHODS[job.settings.kind]
    network = method.restore(network, job.settings, weights, window=job.model_settings.window)
    network.requires_grad_(False).eval()
    balances = {}
    for balance in leak.balances:
        adapter.rebalance(network, balance)
        if balance == "potentials" and job.settings.adapter.balance != "potentials":
            adapter.calibrate(network, (training[number] for number in range(leak.calibration_windows)))
        balances[balance] = _measure(network, windows, elsewhere, job, balance, name=f"{name} {balance}")
    method.choose(network, "soft", None)
    metrics = {
        "pretrained": _kept(base),
        "balances": balances,
        "noise": NOISE,
        "context": context,
        "window": job.model_settings.window,
    }
    revisions = {"model": revision_of(model), "corpus": revision_of(corpus)}
    revisions |= {each: revision_of(path) for each, path in zip(leak.corpora, others, strict=True)}
    with writing(output):
        write_result(
            output,
            experiment="leak",
            settings=job.model_dump(mode="json"),
            metrics=metrics,
            started=started,
            modules=["focus.leak"],
            revisions=revisions,
            backend=method.backend(network),
            dtype=str(network.dtype).removeprefix("torch."),
            device=network.device.type,
        )


def changes(model: PreTrainedModel, windows: Sequence[Window], *, seed: int = 0) -> dict[str, dict]:
    """What later tokens do to the logits of earlier positions, whatever the attention in force.

    token: one token of each window's second half, drawn by `seed`, becomes another; rest: the whole second half becomes
    that of the next window (of a single window: its own in reverse). Of each: max_abs, the largest change of a logit;
    mean_kl, the mean over earlier positions of KL(before || after) in nats; positions, how many were compared.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[tuple[float, float, int]]] = {"token": [], "rest": []}
    for number, window in enumerate(windows):
        ids, half = window.tokens, len(window.tokens) // 2
        before = _logits(model, ids)
        place = int(torch.randint(half, len(ids), (1,), generator=generator))
        other = ids.clone()
        step = 1 + int(torch.randint(before.shape[-1] - 1, (1,), generator=generator))
        other[place] = (other[place] + step) % before.shape[-1]
        found["token"].append(_difference(before[:place], _logits(model, other)[:place]))
        later = windows[(number + 1) % len(windows)].tokens if len(windows) > 1 else ids.flip(0)
        swapped = torch.cat([ids[:half], later[half:]])
        found["rest"].append(_difference(before[:half], _logits(model, swapped)[:half]))
    return {
        name: {
            "max_abs": max(most for most, _, _ in parts),
            "mean_kl": sum(total for _, total, _ in parts) / sum(count for _, _, count in parts),
            "positions": sum(count for _, _, count in parts),
        }
        for name, parts in found.items()
    }


def dominance(model: PreTrainedModel, windows: Sequence[Window], *, name: str = "dominance") -> list[float]:
    """Share of a window's tokens in its fullest group, the mean over windows, layer by layer."""
    progress, seen = Progress(name, len(windows)), []
    with adapter.observe(model) as layers, torch.no_grad():
        for window in windows:
            model.base_model(input_ids=window.tokens[None].to(model.device), use_cache=False)
            seen.append([layer["dominance"] for layer in layers])
            progress.step()
    return [fmean(layer) for layer in zip(*seen, strict=True)]


def _measure(
    model: PreTrainedModel,
    windows: Sequence[Window],
    elsewhere: dict[str, list[Window]],
    job: LeakJob,
    balance: str,
    *,
    name: str,
) -> dict:
    """Everything about one balance, which is in force."""
    moved = {}
    for mode, top_k in MODES.items():
        adapter.switch(model, "hard" if top_k else "soft", top_k)
        moved[mode] = changes(model, windows[: job.leak.changed_windows], seed=job.seed)
    adapter.switch(model, "soft")
    held_out = perplexity(model, windows, observe=adapter.observe(model), name=name)
    groups = {job.corpus: [layer["dominance"] for layer in held_out["layers"]]}
    groups |= {each: dominance(model, found, name=f"{name} {each}") for each, found in elsewhere.items()}
    return _kept(held_out) | {
        "declared_causal": FocusConfig(balance=balance).causal,
        "causal": all(part["max_abs"] <= NOISE for parts in moved.values() for part in parts.values()),
        "changes": moved,
        "dominance": {each: {"mean": fmean(layers), "layers": layers} for each, layers in groups.items()},
    }


def _windows(corpus: Path, tokenizer, context: int, count: int) -> list[Window]:
    texts = documents(corpus, "held_out")
    tokens = tokenise(texts, tokenizer, cache_root() / "tokens")
    named = [(text.name, ids) for text, ids in zip(texts, tokens, strict=True)]
    return evaluation_windows(named, context, count, settings="leak")


def _kept(measured: dict) -> dict:
    return {key: measured[key] for key in ("perplexity", "loss", "tokens", "windows")}


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """int64 [T] -> [T, V]."""
    return model(input_ids=ids[None].to(model.device), use_cache=False).logits[0]


def _difference(before: Tensor, after: Tensor) -> tuple[float, float, int]:
    """(largest change, summed KL in nats, positions) of logits [n, V]; KL in float64, a few rows at a time."""
    most = (before - after).abs().max().item()
    return most, sum(_divergences(before, after)), len(before)


def _divergences(before: Tensor, after: Tensor) -> Iterator[float]:
    for parts in zip(before.split(ROWS), after.split(ROWS), strict=True):
        old, new = (part.double().log_softmax(dim=-1) for part in parts)
        yield (old.exp() * (old - new)).sum().item()
