"""What the groups hold (the paper's section 5): shares, confidence, top tokens, parts of speech, and far pairs.

Held-out windows are read once; each token's group in a layer is the largest entry of its assignment. Parts of speech
come from a tagger, by characters.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from focus import purity
from focus.adapter import watching
from focus.checkpoint import writing
from focus.corpora import Document, documents
from focus.data import Window, evaluation_windows
from focus.errors import UserError
from focus.evaluation.rows import load_row
from focus.jobs import GroupsJob
from focus.models import revision_of
from focus.progress import Progress
from focus.provenance import write_result
from focus.taggers import Tagger, load_tagger

TOP_TOKENS = 8
MARGIN = 2000  # characters before and after a window that are searched for the end of its paragraph
SEED = 0  # of the baselines' draws
STRONGEST = 0.01  # share of the far pairs that count as strong
RULE = "the layer whose purity lies farthest above the mean of its shuffled baseline"


@dataclass(frozen=True)
class Text:
    """A tokenised document: `ids` int64 [n], and the characters `spans[i]` = (start, end) of each token."""

    name: str
    text: str
    ids: Tensor
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Assigned:
    """Every token of every window: groups int64 [L, N], confidence float32 [L, N], ids int64 [N].

    `first` is the assignment of the first window's tokens, float32 [L, T, K].
    """

    groups: ndarray
    confidence: ndarray
    ids: ndarray
    first: ndarray


def run(job: GroupsJob, *, model: Path, corpus: Path, tagger: Path, weights: Path | None, output: Path) -> None:
    """Look into the groups of one row and write the result. model, corpus, tagger: manifests; weights: a folder."""
    started = time.time()
    row = load_row(job, model, weights)
    texts = {document.name: tokenise(document, row.tokenizer) for document in documents(corpus, "held_out")}
    encoded = [(text.name, text.ids) for text in texts.values()]
    windows = evaluation_windows(encoded, job.model_settings.context, job.groups.windows, settings="groups")
    tag = load_tagger(tagger)
    categories = [category for window in windows for category in tags_of(texts[window.document], window, tag)]
    assigned = assign(row.model, windows, name=f"groups {job.model} {job.method}")
    metrics = summarise(assigned, categories, row.tokenizer, draws=job.groups.shuffles) | {
        "categories": _shares(categories),
        "tokens": len(categories),
        "windows": [{"document": window.document, "start": window.start} for window in windows],
        "context": job.model_settings.context,
        "window": job.model_settings.window,
    }
    first = categories[: job.model_settings.context]
    words = [row.tokenizer.decode([number]) for number in windows[0].tokens.tolist()]
    for layer, assignment in zip(metrics["layers"], assigned.first, strict=True):
        layer["far"] = far_pairs(assignment, words, first, window=job.model_settings.window, count=job.groups.pairs)
    metrics["passage"] = passage(texts[windows[0].document], windows[0], assigned, first, job.groups.passage_tokens)
    revisions = {"model": revision_of(model), "corpus": revision_of(corpus)}
    revisions["tagger"] = revision_of(tagger) | {"spacy": version("spacy")}
    with writing(output):
        write_result(
            output,
            experiment="groups",
            settings=job.model_dump(mode="json"),
            metrics=metrics,
            started=started,
            modules=["focus.groups"],
            revisions=revisions,
            backend=row.method.backend(row.model),
            dtype=str(row.model.dtype).removeprefix("torch."),
            device=row.model.device.type,
        )


def tokenise(document: Document, tokenizer: PreTrainedTokenizerBase) -> Text:
    """A document's tokens, the same as `data.tokenise` gives, with their characters."""
    encoded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return Text(document.name, document.text, torch.tensor(encoded["input_ids"]), encoded["offset_mapping"])


def tags_of(text: Text, window: Window, tag: Tagger) -> list[str]:
    """The part of speech of each token of a window, tagged within whole paragraphs."""
    spans = text.spans[window.start : window.start + len(window.tokens)]
    start, end = spans[0][0], spans[-1][1]
    before = text.text.rfind("\n\n", max(start - MARGIN, 0), start)
    after = text.text.find("\n\n", end, end + MARGIN)
    first = max(start - MARGIN, 0) if before < 0 else before
    last = end + MARGIN if after < 0 else after
    return align(text.text[first:last], [(a - first, b - first) for a, b in spans], tag)


def align(text: str, spans: Sequence[tuple[int, int]], tag: Tagger) -> list[str]:
    """The tag of the word that covers the first character of each span that is no space.

    A span of spaces alone is SPACE; one that no word covers is X, the universal tag set's "other".
    """
    words = tag(text)
    starts = [word.start for word in words]
    tags = []
    for start, end in spans:
        piece = text[start:end]
        place = start + len(piece) - len(piece.lstrip())
        number = bisect_right(starts, place) - 1
        if not piece.strip():
            tags.append("SPACE")
        else:
            tags.append(words[number].tag if number >= 0 and place < words[number].end else "X")
    return tags


def assign(model: PreTrainedModel, windows: Sequence[Window], *, name: str = "groups") -> Assigned:
    """Read every window, without the language model's head, and keep what the routers give.

    Raises UserError where that is not finite.
    """
    progress = Progress(name, len(windows))
    groups, confidence, first = [], [], None
    for window in windows:
        with watching(model) as layers, torch.no_grad():
            model.base_model(input_ids=window.tokens[None].to(model.device), use_cache=False)
        assignment = torch.stack([seen.assignment[0].float().cpu() for (seen,) in layers])
        if not assignment.isfinite().all():
            raise UserError(f"{name}: {window.document} from token {window.start}: expected finite assignments")
        first = assignment.numpy() if first is None else first
        top = assignment.max(dim=-1)
        groups.append(top.indices)
        confidence.append(top.values)
        progress.step()
    ids = torch.cat([window.tokens for window in windows])
    return Assigned(torch.cat(groups, dim=1).numpy(), torch.cat(confidence, dim=1).numpy(), ids.numpy(), first)


def summarise(assigned: Assigned, categories: list[str], tokenizer: PreTrainedTokenizerBase, *, draws: int) -> dict:
    """What the groups hold: {layers, best}, with both baselines of `focus.purity` beside each layer.

    `best` is the layer the tables show, chosen by RULE, with p-values against each that count the choice.
    """
    names, numbers = np.unique(categories, return_inverse=True)
    size = assigned.first.shape[2], len(names)
    table = purity.contingency(assigned.groups, numbers, size)
    observed, bits = purity.purity(table), purity.information(table)
    shuffled = purity.shuffled(assigned.groups, numbers, size, draws, SEED)
    by_token = purity.by_token(assigned.groups, assigned.ids, numbers, size, draws, SEED)
    kinds, place = np.unique(assigned.ids, return_inverse=True)
    words = [_word(tokenizer.decode([number])) for number in kinds.tolist()]
    layers = []
    for layer, counts in enumerate(table):
        certain, groups = assigned.confidence[layer], []
        for group, row in enumerate(counts):
            members = np.flatnonzero(assigned.groups[layer] == group)
            tokens = Counter(words[number] for number in place[members])
            groups.append(_group(row, names.tolist(), certain[members], tokens, len(certain)))
        layers.append(
            {
                "groups": groups,
                "confidence": float(certain.mean()),
                "purity": float(observed[layer]),
                "information": float(bits[layer]),
                "shuffled": _against(observed, bits, shuffled, layer),
                "by_token": _against(observed, bits, by_token, layer),
            }
        )
    best = int(purity.excess(observed, shuffled.purity).argmax())
    p_values = {
        name: purity.chosen_p_value(observed, null.purity, best)
        for name, null in (("shuffled", shuffled), ("by_token", by_token))
    }
    return {"layers": layers, "best": {"layer": best, "rule": RULE, "p_values": p_values}}


def far_pairs(assignment: ndarray, words: Sequence[str], categories: Sequence[str], *, window: int, count: int) -> dict:
    """The strongest affinities g_i . g_j of pairs farther apart than the window: assignment [T, K], `count` listed.

    Also, of those listed, of the strongest hundredth, and of all far pairs (chance): the shares that are the same word
    twice (but for spaces around it and capitals) and that have the same part of speech. None without far pairs.
    """
    high = assignment.astype(np.float64)
    later, earlier = np.tril_indices(len(high), -(window + 1))
    affinity = (high @ high.T)[later, earlier]
    order = np.lexsort((later, earlier, -affinity))
    plain = np.unique([word.strip().casefold() for word in words], return_inverse=True)[1]
    kinds = np.unique(categories, return_inverse=True)[1]
    alike = {"same_word": plain[later] == plain[earlier], "same_category": kinds[later] == kinds[earlier]}
    sets = {"listed": order[:count], "strong": order[: max(1, int(STRONGEST * len(order)))], "chance": order}
    pairs = [
        {
            "a": _word(words[earlier[number]]),
            "b": _word(words[later[number]]),
            "a_position": int(earlier[number]),
            "b_position": int(later[number]),
            "distance": int(later[number] - earlier[number]),
            "affinity": round(float(affinity[number]), 6),
        }
        for number in order[:count]
    ]
    shares = {
        name: {key: float(same[chosen].mean()) for key, same in alike.items()} if len(chosen) else None
        for name, chosen in sets.items()
    }
    return {"pairs": pairs, **shares}


def passage(text: Text, window: Window, assigned: Assigned, categories: Sequence[str], length: int) -> dict:
    """The first `length` tokens of a window, which must be the first read, with group and confidence in every layer.

    `pieces` joined are the text itself; a piece is empty where a token is a later part of a character. Groups and
    percents of confidence are one string a layer, numbers with spaces between.
    """
    spans = text.spans[window.start : window.start + length]
    ends = [spans[0][0], *(end for _, end in spans)]
    return {
        "document": window.document,
        "start": window.start,
        "pieces": [text.text[start:end] for start, end in pairwise(ends)],
        "categories": list(categories[:length]),
        "groups": [_joined(layer[:length]) for layer in assigned.groups],
        "confidence": [_joined(np.rint(100 * layer[:length]).astype(int)) for layer in assigned.confidence],
    }


def _group(counts: ndarray, names: list[str], confidence: ndarray, tokens: Counter, total: int) -> dict:
    """One group: its share of `total` tokens, and, unless it is empty, what its tokens are."""
    size = int(counts.sum())
    found = {"share": size / total, "confidence": None, "category": None, "purity": None, "categories": {}, "top": []}
    if size:
        order = np.argsort(-counts, kind="stable")
        top = sorted(tokens.items(), key=lambda item: (-item[1], item[0]))[:TOP_TOKENS]
        found |= {
            "confidence": float(confidence.mean()),
            "category": names[order[0]],
            "purity": float(counts[order[0]] / size),
            "categories": {names[number]: round(counts[number] / size, 4) for number in order if counts[number]},
            "top": [[word, round(count / size, 4)] for word, count in top],
        }
    return found


def _against(observed: ndarray, bits: ndarray, null: purity.Null, layer: int) -> dict:
    """One layer beside a baseline: the draws' mean and spread, and p-values."""
    return {
        "purity": float(null.purity[:, layer].mean()),
        "spread": float(null.purity[:, layer].std()),
        "p_value": float(purity.p_values(observed, null.purity)[layer]),
        "information": float(null.information[:, layer].mean()),
        "information_p_value": float(purity.p_values(bits, null.information)[layer]),
    }


def _shares(categories: list[str]) -> dict[str, float]:
    counted = Counter(categories)
    order = sorted(counted, key=lambda name: (-counted[name], name))
    return {name: round(counted[name] / len(categories), 4) for name in order}


def _word(decoded: str) -> str:
    """A token without the spaces around it, unless it is nothing else."""
    return decoded.strip() or decoded


def _joined(numbers: ndarray) -> str:
    return " ".join(map(str, numbers.tolist()))
