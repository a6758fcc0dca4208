"""The one training loop: centroids, everything, or a model from scratch, in phases, resumable from a checkpoint.

A killed run that starts again with the same settings ends with the same numbers: a batch depends on its number alone,
and a checkpoint holds all that has changed since the start.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus import distributed, probe
from focus.checkpoint import Checkpoints, writing
from focus.data import TrainingBatches
from focus.errors import UserError
from focus.loss import mean_loss
from focus.method_config import Phase, Training
from focus.methods.base import MethodKind
from focus.precision import products_in
from focus.progress import Progress
from focus.provenance import read_result, write_atomically

BETAS = (0.9, 0.95)
LAYERS_EVERY = 5
LAYER_STATISTICS = ("dominance", "pairs_kept", "far_pairs_kept")
MEAN_OVER = 10


@dataclass
class State:
    """How far a run is; `distilled` and `records` are the lines of its log, one a layer and one a step, `groups` (int16
    [L, B, T]) those seen at step `probed`."""

    step: int = 0
    phase: int = 0
    phase_step: int = 0
    seconds: float = 0.0
    distilled: list[dict] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)
    groups: Tensor | None = None
    probed: int = 0


def fit(
    model: PreTrainedModel,
    training: Training,
    method: MethodKind,
    batches: TrainingBatches,
    *,
    dtype: torch.dtype,
    seed: int,
    store: Checkpoints,
    name: str,
) -> dict:
    """Train `model` in place, from its last checkpoint if there is one, and return the metrics.

    First the layers' distillation, if there is one. Then cross entropy of the next token, and what the method adds to
    it; AdamW with fresh state each phase, decay on matrices only; products in `dtype`. `store.log` gets a line of JSON
    each layer and each step, whose loss is the cross entropy alone. Raises UserError when the loss or the gradient's
    norm is not finite.
    """
    torch.manual_seed(seed)
    model.train()
    state, optimiser_state = State(), None
    saved = store.load()
    phases = [(number, phase) for number, phase in enumerate(training.phases) if phase.steps]
    if saved is None and training.distillation is None:
        windows = (row[None] for row in _first_windows(batches, training.calibration_windows))
        with products_in(dtype, model.device):
            method.prepare(model, windows)
    elif saved is not None:
        state, optimiser_state = State(**saved["state"]), saved["optimiser"]
        _restore(model, saved)
        print(f"{name}: resuming after step {state.step}", flush=True)
    _begin_log(store, state)
    trained = _distil(model, training, method, batches, state, dtype=dtype, seed=seed, store=store, name=name)
    if state.step == 0:
        state.groups = _groups(model, training, method, batches, dtype)
    progress = Progress(name, sum(phase.steps for _, phase in phases), done=state.step)
    earlier, clock = state.seconds, time.monotonic()
    for number, phase in phases:
        parameters = method.parameters(model, phase.trains)
        trained |= {key: value for key, value in model.named_parameters() if value.requires_grad}
        if number < state.phase:
            continue
        if number > state.phase:
            state.phase, state.phase_step = number, 0
        optimiser = _optimiser(parameters, training)
        if optimiser_state is not None and state.phase_step:
            optimiser.load_state_dict(distributed.optimiser_state(optimiser_state, optimiser))
        optimiser_state = None
        while state.phase_step < phase.steps:
            record = _step(model, training, method, batches, phase, state, optimiser, parameters, dtype)
            state.step += 1
            state.phase_step += 1
            done = state.phase_step == phase.steps
            if state.groups is not None and (done or state.step % training.probe_every == 0):
                groups = _groups(model, training, method, batches, dtype)
                record["probe"] = probe.look(groups, state.groups, steps=state.step - state.probed, ends_phase=done)
                state.groups, state.probed = groups, state.step
            state.seconds = round(earlier + time.monotonic() - clock, 3)
            record |= {"seconds": state.seconds}
            state.records.append(record)
            _append(store, record)
            progress.step(loss=record["loss"])
            if done or state.step % training.checkpoint_every == 0:
                _save(store, model, trained, state, None if done else optimiser)
    model.eval()
    return _metrics(state, trained, training, batches)


def _distil(
    model: PreTrainedModel,
    training: Training,
    method: MethodKind,
    batches: TrainingBatches,
    state: State,
    *,
    dtype: torch.dtype,
    seed: int,
    store: Checkpoints,
    name: str,
) -> dict[str, Tensor]:
    """Fit the layers that are not yet, with a checkpoint and a line of the log after each; what that trained, by name.

    A run that was killed between two layers reads the windows again.
    """
    settings = training.distillation
    if settings is None:
        return {}
    method.parameters(model, "centroids")
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    earlier, clock = state.seconds, time.monotonic()
    windows = (row[None] for row in _first_windows(batches, settings.windows))
    with products_in(dtype, model.device):
        for record in method.distil(model, settings, windows, seed=seed, done=len(state.distilled), name=name):
            state.seconds = round(earlier + time.monotonic() - clock, 3)
            state.distilled.append(record | {"seconds": state.seconds})
            _append(store, state.distilled[-1])
            _save(store, model, trained, state, None)
    return trained


def _begin_log(store: Checkpoints, state: State) -> None:
    if distributed.rank() == 0:
        lines = "".join(json.dumps(record) + "\n" for record in state.distilled + state.records)
        with writing(store.log):
            write_atomically(store.log, lines)


def _append(store: Checkpoints, record: dict) -> None:
    if distributed.rank() == 0:
        with writing(store.log), open(store.log, "a") as file:
            file.write(json.dumps(record) + "\n")


def _save(
    store: Checkpoints,
    model: PreTrainedModel,
    trained: dict[str, Tensor],
    state: State,
    optimiser: torch.optim.Optimizer | None,
) -> None:
    """A checkpoint, made whole by all processes and written by the first."""
    moments = None if optimiser is None else distributed.whole(optimiser.state_dict())
    changed = _changed(model, trained)
    if distributed.rank() == 0:
        store.save(changed | {"state": asdict(state), "optimiser": moments})


def learning_rate(phase: Phase, warmup: float, step: int) -> float:
    """Linear rise over the first `warmup` share of the phase, then half a cosine down; `step` counts from 0."""
    rising = round(warmup * phase.steps)
    if step < rising:
        return phase.learning_rate * (step + 1) / (rising + 1)
    return phase.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - rising) / (phase.steps - rising)))


def fingerprint(settings: dict, code: str, revisions: dict, dtype: torch.dtype, device: torch.device) -> str:
    """What must be equal for a checkpoint to be resumed: the job, and what decides the order and size of roundings."""
    hardware = [str(dtype), device.type, torch.get_num_threads()]
    return hashlib.sha256(json.dumps([settings, code, revisions, *hardware], sort_keys=True).encode()).hexdigest()


def finished(result_file: Path, outputs: Sequence[Path], settings: dict, code: str) -> bool:
    """Whether the process that was waited for has done exactly this job: its result and its other outputs are there."""
    if not all(path.exists() for path in (result_file, *outputs)):
        return False
    result = read_result(result_file)
    return result["settings"] == settings and result["provenance"]["code"] == code


def _step(
    model: PreTrainedModel,
    training: Training,
    method: MethodKind,
    batches: TrainingBatches,
    phase: Phase,
    state: State,
    optimiser: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    dtype: torch.dtype,
) -> dict:
    rate = learning_rate(phase, training.warmup, state.phase_step)
    for group in optimiser.param_groups:
        group["lr"] = rate
    last = state.phase_step == phase.steps - 1
    watch = method.observe(model) if state.phase_step % LAYERS_EVERY == 0 or last else nullcontext([])
    total, extra = 0.0, 0.0
    with watch as watched:
        for part in range(training.accumulation):
            number = (training.skipped_steps + state.step) * training.accumulation + part
            batch = distributed.share(batches[number]).to(model.device)
            with products_in(dtype, model.device), method.auxiliary(model) as terms:
                loss = mean_loss(model, batch)
            total += distributed.mean(loss.item()) / training.accumulation
            _check_finite("loss", total, state, phase)
            extra += sum(term.item() for term in terms) / training.accumulation
            loss = loss + sum(term.to(loss.device) for term in terms)
            (loss / training.accumulation).backward()
        layers = [{key: distributed.mean(layer[key]) for key in LAYER_STATISTICS if key in layer} for layer in watched]
    distributed.average(parameter.grad for parameter in parameters)
    norm = distributed.clip(parameters, training.clip)
    _check_finite("gradient norm", norm, state, phase)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    method.after_step(model)
    distributed.average(model.buffers())
    record = {
        "step": state.step + 1,
        "phase": phase.trains,
        "loss": total,
        "learning_rate": rate,
        "gradient_norm": norm,
    }
    return record | ({"auxiliary_loss": extra} if terms else {}) | ({"layers": layers} if layers else {})


def _groups(
    model: PreTrainedModel, training: Training, method: MethodKind, batches: TrainingBatches, dtype: torch.dtype
) -> Tensor | None:
    """The groups of the probe's tokens in every layer, int16 [L, B, T]; None without a probe or without groups."""
    windows = _first_windows(batches, training.probe_windows if training.probe_every else 0)
    with products_in(dtype, model.device):
        found = [method.groups(model, window[None]) for window in windows]
    return None if not found or found[0] is None else torch.cat(found, dim=1).to(torch.int16)


def _check_finite(name: str, value: float, state: State, phase: Phase) -> None:
    if not math.isfinite(value):
        raise UserError(
            f"training step {state.step + 1}: expected a finite {name}, got {value}; "
            f"lower phases.learning_rate (now {phase.learning_rate}) or set precision to float32"
        )


def _optimiser(parameters: Sequence[Tensor], training: Training) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(distributed.optimiser_groups(groups), betas=BETAS, fused=True)


def _first_windows(batches: TrainingBatches, count: int):
    size = batches.batch_size
    return (batches[number // size][number % size] for number in range(count))


def _changed(model: PreTrainedModel, trained: dict[str, Tensor]) -> dict:
    """What differs from the start: trained parameters, persistent buffers, and the state of the random numbers."""
    kept = set(model.state_dict())
    buffers = {key: value for key, value in model.named_buffers() if key in kept}
    random = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    tensors = {key: distributed.whole(value.detach()) for key, value in (trained | buffers).items()}
    return {"tensors": tensors, "random": random}


@torch.no_grad()
def _restore(model: PreTrainedModel, saved: dict) -> None:
    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    for key, value in saved["tensors"].items():
        ours[key].copy_(distributed.like(value, ours[key]))
    torch.set_rng_state(saved["random"]["cpu"])
    torch.cuda.set_rng_state_all(saved["random"]["cuda"])


def _metrics(state: State, trained: dict[str, Tensor], training: Training, batches: TrainingBatches) -> dict:
    losses = [record["loss"] for record in state.records]
    tokens = state.step * training.accumulation * batches.batch_size * batches.context
    if training.distillation is not None:
        tokens += training.distillation.windows * batches.context
    metrics = {
        "steps": state.step,
        "first_loss": losses[0] if losses else None,
        "final_loss": fmean(losses[-MEAN_OVER:]) if losses else None,
        "trained_parameters": sum(parameter.numel() for parameter in trained.values()),
        "tokens": tokens,
        "training_seconds": state.seconds,
        "layers": next((record["layers"] for record in reversed(state.records) if "layers" in record), []),
    }
    kept = {
        name: fmean(record[name] for record in state.distilled)
        for name in ("kept_weight", "kept_far_pairs")
        if state.distilled
    }
    return metrics | kept | probe.summary(state.records)
