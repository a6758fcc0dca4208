"""What a row recalls from far back: numbers hidden in held-out text, and passages that come a second time.

Every row and seed meets the same inputs, so that rows are paired. Positions are exact to the token: pieces are
tokenised one by one and joined as tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

from focus.cache import cache_root
from focus.corpora import documents
from focus.data import Window, evaluation_windows, tokenise
from focus.errors import UserError
from focus.evaluation.long_inputs import encoded
from focus.evaluation.reading import Reader
from focus.evaluation.rows import load_row, write_row
from focus.jobs import RecallJob
from focus.long_config import Recall
from focus.methods import METHODS
from focus.precision import product_dtype, products_in
from focus.progress import Progress

SETTINGS = "evaluation.recall"
SEED = 0
"""Of numbers, names and random tokens: the same for every row and seed."""

STEM, END = "\nThe secret number of {} is", ".\n"
NAMES = (
    *("Lima", "Oslo", "Cairo", "Tokyo", "Quito", "Hanoi", "Accra", "Seoul", "Delhi", "Sofia", "Kabul", "Havana"),
    *("Nairobi", "Jakarta", "Bogota", "Manila", "Ankara", "Tehran", "Lisbon", "Prague"),
)
"""Whose numbers hide; strangers to the texts, most of one token or two."""


def run(job: RecallJob, *, model: Path, corpus: Path, weights: Path | None, output: Path) -> None:
    """Measure one row and write its result. model, corpus: manifests; weights: what training wrote, if it trains."""
    started = time.time()
    settings, row = job.recall, load_row(job, model, weights)
    most = row.model.config.max_position_embeddings
    if max(settings.lengths) > most:
        raise UserError(
            f"{SETTINGS}.lengths: expected at most the {most} positions of {job.model}, got {max(settings.lengths)}"
        )
    dtype = product_dtype(settings.precision, row.model.device)
    reader = Reader(
        row.model,
        products=lambda: products_in(dtype, row.model.device),
        caches=METHODS[job.settings.kind].decodes(job.settings),
    )
    texts = documents(corpus, "held_out")
    tokens = tokenise(texts, row.tokenizer, cache_root() / "tokens")
    named = [(text.name, ids) for text, ids in zip(texts, tokens, strict=True)]
    progress = Progress(
        f"recall {job.model} {job.method} {job.attention}",
        len(settings.lengths) * settings.windows * (("needle" in settings.tests) + ("copy" in settings.tests)),
    )
    found: dict[str, list[dict]] = {test: [] for test in settings.tests}
    for length in settings.lengths:
        windows = evaluation_windows(named, length, settings.windows, settings=SETTINGS)
        for test, measure in (("needle", needles), ("copy", copies)):
            if test in settings.tests:
                records = []
                for number, window in enumerate(windows):
                    draw = random.Random(f"{SEED} {test} {length} {number}")
                    records += measure(reader, row.tokenizer, window, settings, draw)
                    progress.step()
                found[test] += summaries(test, length, records)
    write_row(
        output,
        row,
        job,
        found | {"trained_parameters": row.trained_parameters},
        experiment="recall",
        module="focus.evaluation.recall",
        manifests={"model": model, "corpus": corpus},
        dtype=dtype,
        started=started,
    )


def needles(
    reader: Reader, tokenizer: PreTrainedTokenizerBase, window: Window, settings: Recall, draw: random.Random
) -> list[dict]:
    """Hide a number for each depth in one window's text, then ask for each at its end.

    Of an answer: start, the position of the hidden sentence; distance, from the hidden number's first token to the
    place where the answer begins; correct, whether the hidden number is likelier than the other candidates, none of
    which is in the text; exact, whether greedy decoding writes all of it; loss in nats. An input has as many tokens as
    the window at most, question and answer included.
    Raises UserError when the hidden sentences do not fit.
    """
    names = draw.sample(NAMES, len(settings.depths))
    low, count = 10 ** (settings.digits - 1), len(names) * settings.candidates
    drawn = iter(draw.sample(range(low, 10 * low), count))
    numbers = [[encoded(tokenizer, f" {next(drawn)}") for _ in range(settings.candidates)] for _ in names]
    questions = [encoded(tokenizer, STEM.format(name)) for name in names]
    end = encoded(tokenizer, END)
    hidden = [torch.cat([ask, values[0], end]) for ask, values in zip(questions, numbers, strict=True)]
    room = max(len(ask) + max(map(len, values)) for ask, values in zip(questions, numbers, strict=True))
    filler = len(window.tokens) - room - sum(map(len, hidden))
    if filler < 0:
        raise UserError(
            f"{SETTINGS}.lengths: expected at least the {len(window.tokens) - filler} tokens of the hidden sentences "
            f"and a question, got {len(window.tokens)}"
        )
    haystack, starts = hide(window.tokens[:filler], hidden, settings.depths)
    records = []
    for name, ask, values, depth, start in zip(names, questions, numbers, settings.depths, starts, strict=True):
        asked = torch.cat([haystack, ask])
        scores = [reader.answer(asked, value) for value in values]
        records.append(
            {
                "document": window.document,
                "name": name,
                "depth": depth,
                "start": start,
                "distance": len(asked) - start - len(ask),
                "correct": int(all(scores[0][0] > other for other, _ in scores[1:])),
                "exact": int(scores[0][1]),
                "loss": -scores[0][0],
            }
        )
    return records


def hide(filler: Tensor, hidden: Sequence[Tensor], depths: Sequence[float]) -> tuple[Tensor, list[int]]:
    """The filler with each hidden piece before its token number round(depth * len(filler)), and where each begins.

    Pieces of equal depth keep their order.
    """
    places = [round(depth * len(filler)) for depth in depths]
    parts, starts, done, length = [], [0] * len(hidden), 0, 0
    for number in sorted(range(len(hidden)), key=lambda number: places[number]):
        before = filler[done : places[number]]
        starts[number], done = length + len(before), places[number]
        parts += [before, hidden[number]]
        length = starts[number] + len(hidden[number])
    return torch.cat([*parts, filler[done:]]), starts


def copies(
    reader: Reader, tokenizer: PreTrainedTokenizerBase, window: Window, settings: Recall, draw: random.Random
) -> list[dict]:
    """Let a passage end the window that came near its beginning, behind as many other tokens as it has itself.

    Of each kind of passage: distance between the two; first and second, nats a token of both but for the first token,
    which nothing announces; accuracy, the share of the second's tokens that greedy decoding gives.
    """
    size, length = settings.passage, len(window.tokens)
    records = []
    for kind in settings.passages:
        passage = window.tokens[size : 2 * size]
        if kind == "random":
            usual = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
            passage = torch.tensor(draw.choices(usual, k=size))
        tokens = torch.cat([window.tokens[:size], passage, window.tokens[2 * size : length - size], passage])
        first, second = torch.arange(size, 2 * size - 1), torch.arange(length - size, length - 1)
        logits = reader.logits(tokens[:-1], torch.cat([first, second])).float().cpu()
        before, again = cross_entropy(logits, passage[1:].repeat(2), reduction="none").chunk(2)
        greedy = logits[size - 1 :].argmax(dim=-1) == passage[1:]
        records.append(
            {
                "document": window.document,
                "passage": kind,
                "distance": length - 2 * size,
                "first": float(before.mean()),
                "second": float(again.mean()),
                "accuracy": float(greedy.float().mean()),
            }
        )
    return records


def summaries(test: str, length: int, records: Sequence[dict]) -> list[dict]:
    """What the tables show of one length: of needles one summary, of copies one for each kind of passage."""
    if test == "needle":
        means = {key: fmean(record[key] for record in records) for key in ("correct", "exact", "loss")}
        known = {"length": length, "accuracy": means["correct"], "exact_match": means["exact"], "loss": means["loss"]}
        return [known | {key: [record[key] for record in records] for key in ("correct", "exact")} | {"items": records}]
    found = []
    for kind in dict.fromkeys(record["passage"] for record in records):
        same = [record for record in records if record["passage"] == kind]
        means = {key: fmean(record[key] for record in same) for key in ("first", "second", "accuracy")}
        known = {"length": length, "passage": kind, "change": means["second"] - means["first"]}
        found.append(known | means | {"items": same})
    return found
