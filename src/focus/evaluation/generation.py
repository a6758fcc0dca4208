"""GSM8K: a row writes its answers greedily through the cache, after lm-eval's own 8 worked examples and its filters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from torch import Tensor

from focus.benchmarks import items
from focus.checkpoint import writing
from focus.errors import UserError
from focus.evaluation.downstream import RowLM, beyond_window, choose_items, load_task
from focus.evaluation.rows import EvaluatedRow, load_row
from focus.jobs import GenerationJob
from focus.methods import METHODS
from focus.models import revision_of
from focus.precision import product_dtype, products_in
from focus.progress import Progress
from focus.provenance import write_result

SHOTS = {"gsm8k": 8}
FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}
"""Ours and lm-eval's names: the number after "The answer is", and the last number of the answer."""

SHOWN = 400
"""Characters of an answer that a result keeps."""


def run(job: GenerationJob, *, model: Path, benchmark: Path, weights: Path | None, output: Path) -> None:
    """Let one row answer and write its result; model and benchmark are manifests.

    A row that cannot decode gets a result too, whose only metric is the reason.
    """
    started = time.time()
    ran: dict = {}
    if METHODS[job.settings.kind].decodes(job.settings):
        row = load_row(job, model, weights)
        dtype = product_dtype(job.generation.precision, row.model.device)
        metrics = answers(row, job, choose_items(items(benchmark), job.generation.items), dtype)
        metrics["trained_parameters"] = row.trained_parameters
        ran = {"backend": row.method.backend(row.model), "dtype": str(dtype).removeprefix("torch.")}
        ran["device"] = row.model.device.type
    else:
        metrics = {"reason": "cannot generate: what a token attends to depends on later tokens"}
    with writing(output):
        write_result(
            output,
            experiment="generation",
            settings=job.model_dump(mode="json"),
            metrics=metrics,
            started=started,
            modules=["focus.evaluation.generation"],
            revisions={"model": revision_of(model), job.generation.task: revision_of(benchmark)},
            **ran,
        )


def answers(row: EvaluatedRow, job: GenerationJob, chosen: Sequence[dict], dtype: torch.dtype) -> dict:
    """The answers to the chosen items, and which are right by each filter, item by item.

    correct is by the strict filter. prompts_cut is how many prompts lost their beginning to fit into the context;
    tokens_per_second counts the reading of prompts too.
    Raises UserError when the model knows no more tokens than an answer may have.
    """
    settings, window = job.generation, job.model_settings.window
    context = min(settings.context, row.model.config.max_position_embeddings)
    if settings.max_new_tokens >= context:
        raise UserError(
            f"generation.max_new_tokens: expected less than the {context} tokens of {job.model}, "
            f"got {settings.max_new_tokens}"
        )
    language_model = WritingLM(row, context=context, dtype=dtype)
    language_model.begin(f"{settings.task} {job.model} {job.method} {job.attention}")
    task = load_task(settings.task, chosen, shots=SHOTS[settings.task])
    task.set_config("generation_kwargs", {"max_gen_toks": settings.max_new_tokens}, update=True)
    samples = evaluate(language_model, {"tasks": {settings.task: task}}, bootstrap_iters=0)["samples"][settings.task]
    written = [
        {"text": sample["resps"][0][0][:SHOWN], "target": str(sample["target"])} for sample in _by(samples, "strict")
    ]
    correct = {}
    for name in FILTERS:
        filtered = _by(samples, name)
        correct[name] = [int(sample["exact_match"]) for sample in filtered]
        for answer, sample in zip(written, filtered, strict=True):
            answer[name] = sample["filtered_resps"][0]
    lengths, tokens = language_model.lengths, sum(language_model.new_tokens)
    return {
        "task": settings.task,
        "shots": SHOTS[settings.task],
        "items": len(written),
        "accuracy": sum(correct["strict"]) / len(written),
        "accuracy_flexible": sum(correct["flexible"]) / len(written),
        "correct": correct["strict"],
        "correct_flexible": correct["flexible"],
        "answers": written,
        "context": context,
        "prompts_cut": language_model.cut,
        "new_tokens": tokens,
        "positions": sum(lengths),
        "beyond_window": beyond_window(lengths, window),
        "seconds": language_model.seconds,
        "tokens_per_second": tokens / language_model.seconds,
    }


class WritingLM(RowLM):
    """A row that writes, one prompt at a time.

    lengths: tokens read in each request, in lm-eval's order, as new_tokens: those written; seconds: of all writing;
    cut: prompts that lost their beginning.
    """

    def __init__(self, row: EvaluatedRow, *, context: int, dtype: torch.dtype):
        device = row.model.device
        super().__init__(
            row.model, row.tokenizer, context=context, batch_size=1, products=lambda: products_in(dtype, device)
        )
        self.mixed_precision_dtype = None if dtype == torch.float32 else dtype

    def begin(self, name: str) -> None:
        """Start a task: nothing written yet."""
        super().begin(name)
        self.new_tokens: list[int] = []
        self.seconds, self.cut = 0.0, 0

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """As lm-eval does it, with our progress lines alone."""
        self.progress = Progress(self.task_name, len(requests))
        room = [(request.args[0], self.max_length - request.args[1]["max_gen_toks"]) for request in requests]
        self.cut = sum(len(self.tok_encode(prompt)) > most for prompt, most in room)
        return super().generate_until(requests, disable_tqdm=True)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings) -> Tensor:
        started = time.perf_counter()
        tokens = super()._model_generate(context, max_length, stop, **settings)
        taken = time.perf_counter() - started
        new = tokens.shape[1] - context.shape[1]
        self.new_tokens.append(new)
        self.lengths.append(tokens.shape[1] - 1)
        self.seconds += taken
        self.progress.step(tokens_per_second=new / taken)
        return tokens


def _by(samples: Sequence[dict], name: str) -> list[dict]:
    """The samples of one filter, in the order of the items."""
    return sorted((each for each in samples if each["filter"] == FILTERS[name]), key=lambda each: each["doc_id"])
