"""Downstream tasks through lm-eval, offline: its own task definitions over items read from a file."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import lm_eval
import torch
from datasets import Dataset
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus.benchmarks import items
from focus.errors import UserError
from focus.evaluation.reading import likelihood
from focus.evaluation.rows import load_row, write_row
from focus.jobs import DownstreamJob
from focus.precision import product_dtype, products_in
from focus.progress import Progress

DEFINITIONS = {
    "hellaswag": ("hellaswag", "hellaswag"),
    "arc_easy": ("arc", "arc_easy"),
    "piqa": ("piqa", "piqa"),
    "lambada": ("lambada", "lambada_openai"),
    "truthfulqa_mc1": ("truthfulqa", "truthfulqa_mc1"),
    "gsm8k": ("gsm8k", "gsm8k_cot"),
}
"""Task -> folder and name in lm-eval."""

SHUFFLE_SEED = 0
"""Of the choice of items: the same for every row and seed, so that rows are paired."""


def run(job: DownstreamJob, *, model: Path, benchmarks: dict[str, Path], weights: Path | None, output: Path) -> None:
    """Measure one row on the job's tasks and write its result. model and benchmarks (by task): manifests."""
    started = time.time()
    missing = sorted(job.downstream.tasks.keys() - benchmarks.keys())
    if missing:
        raise UserError(f"downstream: expected the manifests of all tasks, got none for {', '.join(missing)}")
    row = load_row(job, model, weights)
    dtype = product_dtype(job.downstream.precision, row.model.device)
    language_model = RowLM(
        row.model,
        row.tokenizer,
        context=job.model_settings.context,
        batch_size=job.downstream.batch_size,
        products=lambda: products_in(dtype, row.model.device),
    )
    tasks = {
        task: accuracy(language_model, task, choose_items(items(benchmarks[task]), count), job.model_settings.window)
        for task, count in job.downstream.tasks.items()
    }
    write_row(
        output,
        row,
        job,
        {"tasks": tasks, "trained_parameters": row.trained_parameters},
        experiment="downstream",
        module="focus.evaluation.downstream",
        manifests={"model": model} | {task: benchmarks[task] for task in tasks},
        dtype=dtype,
        started=started,
    )


def choose_items(path: Path, count: int) -> list[dict]:
    """The first `count` items of a JSONL file after a seeded shuffle, so that a larger count only adds items."""
    lines = _shuffled(path)
    if count > len(lines):
        raise UserError(f"{path}: expected at least {count} items, found {len(lines)}")
    return [json.loads(line) for line in lines[:count]]


def spare_items(path: Path, *, after: int, most: int) -> list[dict]:
    """Up to `most` items of those that `choose_items` leaves when it takes `after`."""
    return [json.loads(line) for line in _shuffled(path)[after : after + most]]


def _shuffled(path: Path) -> list[str]:
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    random.Random(SHUFFLE_SEED).shuffle(lines)
    return lines


def accuracy(language_model: RowLM, task: str, chosen: Sequence[dict], window: int) -> dict:
    """Zero-shot accuracy on the chosen items, item by item.

    accuracy_norm is null for a task without choices.
    """
    language_model.begin(task)
    samples = answered(language_model, task, chosen)
    return tally(samples, language_model.lengths, language_model.scored, window)


def answered(language_model: RowLM, task: str, chosen: Sequence[dict]) -> list[dict]:
    """lm-eval's sample of each of the chosen items, zero-shot, in their order."""
    definition = load_task(task, chosen)
    results = evaluate(language_model, {"tasks": {task: definition}}, bootstrap_iters=0, log_samples=True)
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])


def tally(samples: Sequence[dict], lengths: Sequence[int], scored: Sequence[int], window: int) -> dict:
    """Which of lm-eval's samples are right, and how far their requests, of these lengths, reach beyond the window."""
    correct = [int(sample["acc"]) for sample in samples]
    normalised = [int(sample["acc_norm"]) for sample in samples if "acc_norm" in sample]
    return {
        "accuracy": sum(correct) / len(correct),
        "accuracy_norm": sum(normalised) / len(normalised) if normalised else None,
        "items": len(correct),
        "correct": correct,
        "correct_norm": normalised or None,
        "requests": len(lengths),
        "lengths": sorted(lengths),
        "positions": sum(lengths),
        "beyond_window": beyond_window(lengths, window),
        "scored_beyond_window": scored_beyond_window(lengths, scored, window),
    }


def beyond_window(lengths: Sequence[int], window: int) -> float:
    """The share of the query positions of all requests with a key farther than `window` before them (PAPER.md 4.5)."""
    return sum(max(length - 1 - window, 0) for length in lengths) / sum(lengths)


def scored_beyond_window(lengths: Sequence[int], scored: Sequence[int], window: int) -> float:
    """That share of the positions that are scored alone: of each request's, the last `scored`."""
    beyond = sum(min(last, max(length - 1 - window, 0)) for length, last in zip(lengths, scored, strict=True))
    return beyond / sum(scored)


def load_task(task: str, chosen: Sequence[dict], shots: int = 0) -> Task:
    """lm-eval's own task with the chosen items as its data, after `shots` worked examples of its own."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folder, name = DEFINITIONS[task]
    path = Path(lm_eval.__file__).parent / "tasks" / folder
    ours = {
        "task": name,
        "custom_dataset": lambda **_: {"items": Dataset.from_list(list(chosen))},
        "training_split": None,
        "validation_split": None,
        "test_split": "items",
        "num_fewshot": shots,
    }
    manager = TaskManager(include_path=str(path), include_defaults=False)
    (loaded,) = manager.load([{"group": "focus", "task": [ours]}])["tasks"].values()
    return loaded


class RowLM(HFLM):
    """lm-eval's view of a row.

    Unlike HFLM it tells the model which tokens are padding, which Sinkhorn must not count, makes logits only where they
    are scored, and keeps the length of each request's input in `lengths`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        batch_size: int,
        products: Callable[[], AbstractContextManager],
    ):
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=context)
        self.products = products
        self.begin("requests")

    def begin(self, name: str) -> None:
        """Start a task: its name on the progress line, no lengths and scored positions yet."""
        self.task_name = name
        self.lengths: list[int] = []
        self.scored: list[int] = []

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As lm-eval does it, with our progress lines alone."""
        return super().loglikelihood(requests, disable_tqdm=True)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each request's continuation and whether greedy decoding gives it, in request order."""
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        progress = Progress(self.task_name, len(requests))
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number][1] + requests[number][2]))
        size = override_bs or self.batch_size
        for start in range(0, len(order), size):
            numbers = order[start : start + size]
            inputs = [self._input(requests[number]) for number in numbers]
            targets = [torch.tensor(requests[number][2]) for number in numbers]
            for number, answer in zip(numbers, self._score(inputs, targets), strict=True):
                answers[number] = answer
            self.lengths += [len(row) for row in inputs]
            self.scored += [len(target) for target in targets]
            progress.step(len(numbers))
        return answers

    def _input(self, request: tuple[tuple[str, str], list[int], list[int]]) -> Tensor:
        """What the model reads: all but the last token, shortened from the left to the context."""
        _, context, continuation = request
        return torch.tensor((context + continuation)[-(self.max_length + 1) : -1])

    def _score(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[tuple[float, bool]]:
        tokens = torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in inputs], batch_first=True)
        first = min(len(row) - len(target) for row, target in zip(inputs, targets, strict=True))
        with self.products():
            logits = self.model(
                input_ids=tokens.to(self.device),
                attention_mask=real.to(self.device),
                logits_to_keep=torch.arange(first, tokens.shape[1], device=self.device),
                use_cache=False,
            ).logits
        answers = []
        for row, target, scored in zip(inputs, targets, logits, strict=True):
            end = len(row) - first
            answers.append(likelihood(scored[end - len(target) : end], target))
        return answers
