"""The downstream tasks with each item far from the beginning: behind held-out text or worked examples (PAPER.md 4.5).

Items, wording and scoring are those of `downstream`; only the tokens in front are new. They are read once for all items
behind them, and the context of an item once for all of its answers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from focus.benchmarks import items
from focus.cache import cache_root
from focus.corpora import documents
from focus.data import evaluation_windows, tokenise
from focus.errors import UserError
from focus.evaluation.downstream import RowLM, answered, choose_items, load_task, spare_items, tally
from focus.evaluation.reading import Reader
from focus.evaluation.rows import EvaluatedRow, load_row, write_row
from focus.jobs import LongInputsJob
from focus.long_config import LongInputs
from focus.methods import METHODS
from focus.precision import product_dtype, products_in
from focus.progress import Progress

SETTINGS = "evaluation.long_inputs"
SEPARATOR = "\n\n"
SHORTEST = 8
"""Tokens that no worked example of any task falls short of."""


def run(
    job: LongInputsJob,
    *,
    model: Path,
    corpus: Path,
    benchmarks: dict[str, Path],
    weights: Path | None,
    output: Path,
) -> None:
    """Measure one row on the job's tasks and write its result. model, corpus, benchmarks (by task): manifests."""
    started = time.time()
    settings = job.long_inputs
    missing = sorted(settings.tasks.keys() - benchmarks.keys())
    if missing:
        raise UserError(f"long inputs: expected the manifests of all tasks, got none for {', '.join(missing)}")
    row = load_row(job, model, weights)
    dtype = product_dtype(settings.precision, row.model.device)
    language_model = LongLM(row, dtype=dtype, caches=METHODS[job.settings.kind].decodes(job.settings))
    if settings.tokens >= language_model.max_length:
        raise UserError(
            f"{SETTINGS}.tokens: expected less than the {language_model.max_length} positions of {job.model}, "
            f"got {settings.tokens}"
        )
    paths = {task: items(benchmarks[task]) for task in settings.tasks}
    text, places = text_prefixes(corpus, row.tokenizer, settings) if "text" in settings.behind else ([], [])
    measured: dict[str, dict] = {kind: {"tokens": settings.tokens, "tasks": {}} for kind in settings.behind}
    for kind in settings.behind:
        for task, count in settings.tasks.items():
            prefixes = text if kind == "text" else example_prefixes(task, paths[task], row.tokenizer, settings)
            chosen = choose_items(paths[task], count)
            measured[kind]["tasks"][task] = accuracy(
                language_model, task, chosen, prefixes, job.model_settings.window, name=f"{task} behind {kind}"
            )
    metrics = {"behind": measured, "text": places, "trained_parameters": row.trained_parameters}
    write_row(
        output,
        row,
        job,
        metrics,
        experiment="long_inputs",
        module="focus.evaluation.long_inputs",
        manifests={"model": model, "corpus": corpus} | {task: benchmarks[task] for task in settings.tasks},
        dtype=dtype,
        started=started,
    )


def text_prefixes(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, settings: LongInputs
) -> tuple[list[Tensor], list[dict]]:
    """Windows spread over the held-out documents, each ending with an empty line, and {document, start} of each."""
    texts = documents(corpus, "held_out")
    tokens = tokenise(texts, tokenizer, cache_root() / "tokens")
    named = [(text.name, ids) for text, ids in zip(texts, tokens, strict=True)]
    windows = evaluation_windows(named, settings.tokens, settings.windows, settings=SETTINGS)
    end = encoded(tokenizer, SEPARATOR)
    prefixes = [torch.cat([window.tokens, end])[-settings.tokens :] for window in windows]
    return prefixes, [{"document": window.document, "start": window.start + len(end)} for window in windows]


def example_prefixes(task: str, path: Path, tokenizer: PreTrainedTokenizerBase, settings: LongInputs) -> list[Tensor]:
    """Worked examples as lm-eval words them, others for each prefix and none of the measured items.

    The oldest example loses its beginning, so that a prefix has exactly as many tokens as set.
    """
    most = settings.windows * (settings.tokens // SHORTEST + 1)
    spare = spare_items(path, after=settings.tasks[task], most=most)
    prefixes, examples = [], iter(worked(load_task(task, spare)) if spare else [])
    for _ in range(settings.windows):
        parts: list[Tensor] = []
        while sum(map(len, parts)) < settings.tokens:
            example = next(examples, None)
            if example is None:
                raise UserError(
                    f"{SETTINGS}.tasks.{task}: expected so few items that the others fill {settings.windows} windows "
                    f"of {settings.tokens} tokens, got {settings.tasks[task]}"
                )
            parts.append(encoded(tokenizer, example))
        prefixes.append(torch.cat(parts)[-settings.tokens :])
    return prefixes


def worked(task: Task) -> list[str]:
    """Each item of a task with its right answer, in the very words of its request, and lm-eval's end of an example."""
    task.build_all_requests()
    requests: dict[int, list[str]] = {}
    for instance in task.instances:
        requests.setdefault(instance.doc_id, []).append("".join(instance.args))
    examples = []
    for number, item in enumerate(task.eval_docs):
        right = int(task.doc_to_target(item)) if len(requests[number]) > 1 else 0
        examples.append(requests[number][right] + task.config.fewshot_delimiter)
    return examples


def accuracy(
    language_model: LongLM, task: str, chosen: Sequence[dict], prefixes: Sequence[Tensor], window: int, *, name: str
) -> dict:
    """What `downstream.accuracy` gives for the same items, here behind the prefixes, which items take in turn.

    losses: nats of each item's right answer; requests_cut: those that lost their beginning to fit into the context.
    """
    language_model.begin(name, prefixes)
    samples = answered(language_model, task, chosen)
    losses = []
    for sample in samples:
        right = int(sample["target"]) if len(sample["resps"]) > 1 else 0
        losses.append(-sample["resps"][right][0][0])
    values = tally(samples, language_model.lengths, language_model.scored, window)
    return values | {"losses": losses, "requests_cut": language_model.cut}


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """The tokens of a text, int64 [n], none added."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)


class LongLM(RowLM):
    """A row that answers behind a prefix; cut: requests that lost their beginning. Without prefixes as `RowLM`."""

    def __init__(self, row: EvaluatedRow, *, dtype: torch.dtype, caches: bool):
        device = row.model.device
        self.reader = Reader(row.model, products=lambda: products_in(dtype, device), caches=caches)
        super().__init__(
            row.model,
            row.tokenizer,
            context=row.model.config.max_position_embeddings,
            batch_size=1,
            products=self.reader.products,
        )

    def begin(self, name: str, prefixes: Sequence[Tensor] = ()) -> None:
        """Start a task: its name on the progress line, and what stands before its items, in turn."""
        super().begin(name)
        self.prefixes = list(prefixes) or [torch.empty(0, dtype=torch.long)]
        self.cut = 0

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As lm-eval does it, with the item's number deciding its prefix."""
        self._turns = [request.doc_id % len(self.prefixes) for request in requests]
        return super().loglikelihood(requests)

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
        order = sorted(
            range(len(requests)), key=lambda number: (self._turns[number], list(chain(*requests[number][1:])))
        )
        for number in order:
            prefix, (_, context, continuation) = self.prefixes[self._turns[number]], requests[number]
            room = self.max_length + 1 - len(prefix) - len(continuation)
            if room < 1:
                raise UserError(
                    f"{SETTINGS}.tokens: expected to leave room for an answer of {len(continuation)} tokens of "
                    f"{self.task_name} in {self.max_length} positions, got {len(prefix)}"
                )
            self.cut += len(context) > room
            asked = torch.cat([prefix, torch.tensor(context[-room:])])
            answers[number] = self.reader.answer(asked, torch.tensor(continuation))
            self.lengths.append(len(asked) + len(continuation) - 1)
            self.scored.append(len(continuation))
            progress.step()
        return answers
