"""The settings of single jobs, cut from an experiment.

A rule passes one of these to its command as JSON, so that a job is rerun exactly when something it reads has changed,
and a result can carry the settings it was made with.
"""

from __future__ import annotations

from focus.config import (
    Downstream,
    Experiment,
    Generation,
    GroupsSettings,
    ModelSettings,
    Perplexity,
    Pretraining,
    TimedIn,
    TimedOn,
)
from focus.leak_config import BitsTraining, LeakMeasure, Trains
from focus.long_config import LongInputs, Recall
from focus.method_config import Attention, Balance, Method, Training
from focus.strict import Count, NonNegative, Positive, Strict

GATE_WINDOWS = 4
"""Held-out windows on which gates are looked at: with 512 tokens each, half a million pairs a layer."""


class PretrainJob(Strict):
    """Train a model from scratch."""

    model: str
    pretraining: Pretraining
    seed: int
    precision: str


class TrainJob(Strict):
    """Train one method on one model and corpus."""

    model: str
    model_settings: ModelSettings
    corpus: str
    method: str
    settings: Method
    seed: int
    precision: str


class _Evaluate(Strict):
    model: str
    model_settings: ModelSettings
    corpus: str
    method: str
    settings: Method
    seed: int
    attention: Attention
    top_k: int | None


class PerplexityJob(_Evaluate):
    """Held-out perplexity of one row."""

    perplexity: Perplexity


class DownstreamJob(_Evaluate):
    """Downstream tasks of one row; `corpus` is the one the method was trained on."""

    downstream: Downstream


class GenerationJob(_Evaluate):
    """Answers that one row writes; `corpus` is the one the method was trained on."""

    generation: Generation


class LongInputsJob(_Evaluate):
    """Downstream tasks of one row behind other tokens; `corpus` gives the text, and trained the method."""

    long_inputs: LongInputs


class RecallJob(_Evaluate):
    """What one row recalls from far back in the text of `corpus`, on which its method was trained."""

    recall: Recall


class GroupsJob(_Evaluate):
    """What the groups of one row hold."""

    groups: GroupsSettings


class LeakJob(Strict):
    """Whether one row's trained centroids see the future under each balance."""

    model: str
    model_settings: ModelSettings
    corpus: str
    method: str
    settings: Method
    seed: int
    leak: LeakMeasure


class BitsJob(Strict):
    """Learn to predict random bits under one balance."""

    balance: Balance
    length: Count
    trains: Trains
    seed: int
    training: BitsTraining


class TimedRow(Strict):
    """A method as a figure's row runs it; `settings.training` has no phases, since none is needed to time it."""

    method: str
    settings: Method
    attention: Attention
    top_k: int | None


class MethodsJob(Strict):
    """Time the attention of every method; `seconds` and `rounds` are the most for a method at a length."""

    rows: list[TimedRow]
    lengths: list[Count]
    heads: Count
    head_dim: Count
    device: TimedOn = "auto"
    dtype: TimedIn = "auto"
    seconds: Positive
    rounds: Count = 5
    seed: NonNegative


def pretrain_job(experiment: Experiment, model: str) -> PretrainJob:
    """The job that makes a model without published weights; always with the scale's first seed."""
    settings = experiment.model_settings[model]
    return PretrainJob(
        model=model,
        pretraining=settings.pretraining,
        seed=experiment.seeds[0],
        precision=experiment.precision,
    )


def train_job(experiment: Experiment, model: str, corpus: str, method: str, seed: int) -> TrainJob:
    """The job that trains one method."""
    return TrainJob(**_common(experiment, model, corpus, method, seed), precision=experiment.precision)


def perplexity_job(
    experiment: Experiment, model: str, corpus: str, method: str, variant: str, seed: int
) -> PerplexityJob:
    """The job that measures one row's perplexity; `variant` is `Row.variant`.

    A row with a context of its own is evaluated on as many tokens as the others, in fewer windows, but two at least:
    one has no standard error.
    """
    common, perplexity = _common(experiment, model, corpus, method, seed), experiment.evaluation.perplexity
    _, _, context = variant.partition("-t")
    if context:
        windows = max(2, perplexity.windows * common["model_settings"].context // int(context))
        perplexity = perplexity.model_copy(update={"windows": windows})
        common["model_settings"] = common["model_settings"].model_copy(update={"context": int(context)})
    return PerplexityJob(**common, **_attention(variant), perplexity=perplexity)


def gate_values_job(
    experiment: Experiment, model: str, corpus: str, method: str, variant: str, seed: int
) -> PerplexityJob:
    """The job that looks at the gate of one soft row: a few of the windows that its perplexity is measured on."""
    job = perplexity_job(experiment, model, corpus, method, variant, seed)
    windows = min(GATE_WINDOWS, job.perplexity.windows)
    return job.model_copy(update={"perplexity": job.perplexity.model_copy(update={"windows": windows})})


def downstream_job(
    experiment: Experiment, model: str, corpus: str, method: str, variant: str, seed: int
) -> DownstreamJob:
    """The job that measures one row's tasks; `variant` is `Row.variant`, whose context is perplexity's alone."""
    return DownstreamJob(
        **_common(experiment, model, corpus, method, seed),
        **_attention(variant),
        downstream=experiment.evaluation.downstream.model_copy(
            update={"tasks": experiment.tasks_of(model, corpus, method, variant)}
        ),
    )


def generation_job(
    experiment: Experiment, model: str, corpus: str, method: str, variant: str, seed: int
) -> GenerationJob:
    """The job that lets one row write answers; `variant` is `Row.variant`, whose context is perplexity's alone."""
    return GenerationJob(
        **_common(experiment, model, corpus, method, seed),
        **_attention(variant),
        generation=experiment.evaluation.generation,
    )


def long_inputs_job(
    experiment: Experiment, model: str, corpus: str, method: str, variant: str, seed: int
) -> LongInputsJob:
    """The job that measures one row's tasks behind other tokens; `variant` as for `downstream_job`."""
    common = _common(experiment, model, corpus, method, seed) | _attention(variant)
    return LongInputsJob(**common, long_inputs=experiment.evaluation.long_inputs)


def recall_job(experiment: Experiment, model: str, corpus: str, method: str, variant: str, seed: int) -> RecallJob:
    """The job that measures what one row recalls; `variant` as for `downstream_job`."""
    common = _common(experiment, model, corpus, method, seed) | _attention(variant)
    return RecallJob(**common, recall=experiment.evaluation.recall)


def groups_job(experiment: Experiment) -> GroupsJob:
    """The job that looks into the groups of the scale's `groups`, which must not be null; always the first seed."""
    groups = experiment.groups
    seed = experiment.seeds_of(groups.model, groups.method)[0]
    common = _common(experiment, groups.model, groups.corpus, groups.method, seed)
    top_k = common["settings"].adapter.top_k if groups.attention == "hard" else None
    return GroupsJob(**common, attention=groups.attention, top_k=top_k, groups=groups)


def leak_job(experiment: Experiment, model: str, corpus: str, method: str, seed: int) -> LeakJob:
    """The job of one row of the scale's `leak`, which must not be null."""
    return LeakJob(**_common(experiment, model, corpus, method, seed), leak=experiment.leak.measure)


def bits_job(experiment: Experiment, balance: Balance, length: int, trains: Trains, seed: int) -> BitsJob:
    """The job of one model of the scale's `bits`, which must not be null."""
    shared = {"balance": balance, "length": length, "trains": trains, "seed": seed}
    return BitsJob(**shared, training=experiment.bits.training)


def methods_job(experiment: Experiment) -> MethodsJob:
    """The job that times what the figures of speed against quality show, with the window of `speed`."""
    speed, rows = experiment.speed, {}
    exhibits = [exhibit for exhibit in experiment.figures.values() if exhibit.shows == "tradeoff"]
    for row in (row for exhibit in exhibits if experiment.made(exhibit) for row in exhibit.rows):
        settings = experiment.methods[row.method]
        window = speed.window if settings.window is None else settings.window
        changes = {"label": row.method, "window": window}
        if settings.training:
            changes["training"] = Training(phases=[])
        if settings.kind == "focus":
            changes["adapter"] = settings.adapter.model_copy(update={"window": window})
        known = {"settings": settings.model_copy(update=changes), "attention": row.attention, "top_k": row.top_k}
        rows[row.method, row.attention, row.top_k] = TimedRow(method=row.method, **known)
    return MethodsJob(
        rows=list(rows.values()),
        lengths=speed.method_lengths,
        heads=speed.heads,
        head_dim=speed.head_dim,
        device=speed.device,
        dtype=speed.dtype,
        seconds=speed.method_seconds,
        rounds=speed.method_rounds,
        seed=speed.seed,
    )


def _common(experiment: Experiment, model: str, corpus: str, method: str, seed: int) -> dict:
    """What every job of a method reads: no pretraining, no list of seeds, and the method's key for its label."""
    settings = experiment.method_for(model, method).model_copy(update={"label": method})
    changes = {"pretraining": None, "seeds": None, "window": settings.window}
    return {
        "model": model,
        "model_settings": experiment.model_settings[model].model_copy(update=changes),
        "corpus": corpus,
        "method": method,
        "settings": settings,
        "seed": seed,
    }


def _attention(variant: str) -> dict:
    """The attention of a `Row.variant`, whatever its context."""
    variant = variant.partition("-t")[0]
    if variant.startswith("hard-k"):
        return {"attention": "hard", "top_k": int(variant.removeprefix("hard-k"))}
    return {"attention": variant, "top_k": None}
