"""What evaluations of a row begin and end with: the model with the row's method and attention, and the result file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus.checkpoint import writing
from focus.errors import UserError
from focus.jobs import DownstreamJob, GenerationJob, GroupsJob, LongInputsJob, PerplexityJob, RecallJob
from focus.methods import METHODS, MethodKind
from focus.models import load_model, revision_of
from focus.provenance import write_result


@dataclass
class EvaluatedRow:
    """A model in evaluation mode with its method; `trained_parameters` is how many weights training moved."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    method: MethodKind
    trained_parameters: int


def load_row(
    job: PerplexityJob | DownstreamJob | GenerationJob | LongInputsJob | RecallJob | GroupsJob,
    model: Path,
    weights: Path | None,
) -> EvaluatedRow:
    """The row of a job: model is a manifest, weights the folder its training wrote, None for what does not train."""
    settings, window = job.settings, job.model_settings.window
    method = METHODS[settings.kind]
    network, tokenizer = load_model(model, job.model_settings.dtype, job.model_settings.placement)
    phases = settings.training.phases if settings.training else []
    if settings.training is None:
        method.attach(network, settings, window=window, seed=job.seed)
    elif weights is None:
        raise UserError(f"method {job.method}: expected the folder of its trained weights, got none")
    else:
        method.restore(network, settings, weights, window=window)
    trained = {p for phase in phases if phase.steps for p in method.parameters(network, phase.trains)}
    if settings.training is not None and settings.training.distillation is not None:
        trained |= set(method.parameters(network, "centroids"))
    network.requires_grad_(False)
    method.choose(network, job.attention, job.top_k)
    return EvaluatedRow(network.eval(), tokenizer, method, sum(parameter.numel() for parameter in trained))


def write_row(
    output: Path,
    row: EvaluatedRow,
    job: PerplexityJob | DownstreamJob | LongInputsJob | RecallJob,
    metrics: dict,
    *,
    experiment: str,
    module: str,
    manifests: dict[str, Path],
    dtype: torch.dtype,
    started: float,
) -> None:
    """Write what `module` measured of a row on what `manifests` name, its products in `dtype`."""
    with writing(output):
        write_result(
            output,
            experiment=experiment,
            settings=job.model_dump(mode="json"),
            metrics=metrics,
            started=started,
            modules=[module],
            revisions={name: revision_of(manifest) for name, manifest in manifests.items()},
            backend=row.method.backend(row.model),
            dtype=str(dtype).removeprefix("torch."),
            device=row.model.device.type,
        )
