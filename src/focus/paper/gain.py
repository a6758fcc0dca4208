"""What of learned grouping's gain is left once its controls have theirs (PAPER 4.8), and once all weights train.

The gain of hard groups is over the window with sinks, which they are beside what they add: the learned row is the first
of kind focus with trained centroids and as many groups a token. That of the soft gate, and of what reads all pairs, is
over the pretrained model.

Absorption (arXiv 2603.02227) is a lead that goes away: that of learned groups over a control with frozen weights, less
that of the same two once every weight is fine-tuned. The fine-tuned twin of the method `x` is called `x-finetuned`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, variance

from focus.paper import rows, statistics
from focus.paper.rows import Entry, Run
from focus.paper.statistics import Measured, Ratio

TUNED = "-finetuned"
SHOWN_BY = {"part_of_gain": "gain", "left_to_learning": "gain"} | dict.fromkeys(
    ("lead_of_learned", "change_of_lead"), "absorption"
)
"""Numbers of a row beside the others of its exhibit, and the column of the exhibits that have them."""
SURE = 2.0
"""Standard errors by which a learned row must lie below its baseline for parts of that gain to mean anything."""


def ends(entries: list[Entry], entry: Entry) -> tuple[Entry, Entry] | None:
    """(baseline, learned row) of the gain that the entry is measured on; None where the exhibit lacks one of them."""
    if not entry.runs or entry.kind in ("pretrained", "window") or _trains(entry, "everything"):
        return None
    hard = entry.row.attention == "hard"
    beside = [other for other in rows.alongside(entries, entry) if other.runs and not _trains(other, "everything")]
    bases = [other for other in beside if other.kind == ("window" if hard else "pretrained")]
    base = next((other for other in bases if not hard or _settings(other)["sinks"]), None)
    variant = entry.row.variant if hard else "soft"
    learned = next((other for other in beside if other.row.variant == variant and _trains(other, "centroids")), None)
    return (base, learned) if base and learned else None


def part(entry: Entry, base: Entry, learned: Entry) -> tuple[float, float | None] | None:
    """Which part of the gain the entry reaches, mean over seeds, with its error; None where nothing is gained."""
    gain = learned.against(base)
    if gain.log + SURE * (gain.log_error or 0.0) >= 0:
        return None
    found = [
        statistics.part(run.windows, _same(learned, seed).windows, _same(base, seed).windows)
        for seed, run in entry.runs.items()
    ]
    values, errors = zip(*found, strict=True)
    if None in errors:
        return fmean(values), None
    between = variance(values) / len(values) if len(values) > 1 else 0.0
    return fmean(values), math.sqrt(fmean(error**2 for error in errors) + between)


def leader(entries: list[Entry], entry: Entry) -> Entry | None:
    """The learned row that the entry is compared with: fine-tuned too if the entry is. None without such a pair."""
    beside = [other for other in rows.alongside(entries, entry) if other.runs]
    for frozen in beside:
        tuned = _twin(beside, frozen, tuned=True)
        if tuned and _trains(frozen, "centroids"):
            return tuned if entry.runs and _trains(entry, "everything") else frozen
    return None


def change_of_lead(entries: list[Entry], entry: Entry) -> Ratio | None:
    """For a fine-tuned row: the learned groups' lead over it, over their lead over its frozen twin; paired throughout.

    Below 1 fine-tuning has taken from the lead. None for rows without a twin, and for the learned ones.
    """
    learned = leader(entries, entry) if entry.runs and entry.row.method.endswith(TUNED) else None
    beside = [other for other in rows.alongside(entries, entry) if other.runs]
    frozen, before = (_twin(beside, each, tuned=False) if each else None for each in (entry, learned))
    if not (frozen and before) or entry is learned:
        return None
    return statistics.combine(
        [
            statistics.contrast(
                [
                    (1.0, run.windows),
                    (-1.0, _same(learned, seed).windows),
                    (-1.0, _same(frozen, seed).windows),
                    (1.0, _same(before, seed).windows),
                ]
            )
            for seed, run in entry.runs.items()
        ]
    )


def measured(entries: list[Entry], entry: Entry, seed: int) -> Iterator[dict]:
    """{metric, value, standard_error, against} of one seed: for the machine-readable table."""

    def line(metric: str, value: float, error: float | None, against: str) -> dict:
        return {"metric": metric, "value": value, "standard_error": error, "against": against}

    alone = [_of_seed(each, seed) for each in entries if each.runs]
    this = next(each for each in alone if (each.model, each.row) == (entry.model, entry.row))
    found = ends(alone, this)
    reached = part(this, *found) if found else None
    if reached:
        yield line("part_of_gain", *reached, f"{found[1].label} over {found[0].label}")
    learned = leader(alone, this)
    if learned and learned is not this:
        ratio = this.against(learned)
        yield line("lead_of_learned", ratio.value, ratio.error, learned.label)
    change = change_of_lead(alone, this)
    if change:
        yield line("change_of_lead", change.value, change.error, f"{learned.label}, and both before")


def judged_by(entries: list[Entry], entry: Entry, seed: int, metric: str) -> tuple[Measured, list[Entry]] | None:
    """A metric of SHOWN_BY for one seed, in percent, and the rows it rests on; None where the exhibit cannot tell it.

    part_of_gain: of the learned row's gain; left_to_learning: of a learned row, what its best control leaves of that;
    lead_of_learned: by how much a row's perplexity is above the learned one's; change_of_lead: what fine-tuning makes
    of that, below 0 where it takes from the lead.
    """
    alone = [_of_seed(each, seed) for each in entries if each.runs]
    this = next((each for each in alone if (each.model, each.row) == (entry.model, entry.row)), None)
    if this is None:
        return None
    if metric == "left_to_learning":
        return _left(alone, this)
    if metric == "part_of_gain":
        found = ends(alone, this)
        reached = part(this, *found) if found else None
        return (_percent("", *reached), [this, *found]) if reached else None
    learned = leader(alone, this)
    if learned is None or learned is this:
        return None
    if metric == "lead_of_learned":
        ratio, behind = this.against(learned), [this, learned]
    else:
        ratio = change_of_lead(alone, this)
        behind = [this, learned, *(_twin(alone, each, tuned=False) for each in (this, learned))]
    return (_percent("", ratio.value - 1, ratio.error), behind) if ratio else None


def _left(alone: list[Entry], learned: Entry) -> tuple[Measured, list[Entry]] | None:
    """What the control that reaches most of a learned row's gain leaves of it; the number bears the control's name."""
    reached = []
    for other in alone:
        found = None if _trains(other, "centroids") else ends(alone, other)
        if found and found[1] is learned and (of_gain := part(other, *found)):
            reached.append((*of_gain, other, found[0]))
    if not reached:
        return None
    most, error, control, base = max(reached, key=lambda each: each[0])
    return _percent(f"beside {control.label}", 1 - most, error), [learned, control, base]


def _percent(name: str, share: float, error: float | None) -> Measured:
    return Measured(name, 100 * share, 100 * (error or 0.0))


def _of_seed(entry: Entry, seed: int) -> Entry:
    return replace(entry, runs={seed: _same(entry, seed)})


def _same(entry: Entry, seed: int) -> Run:
    return entry.runs.get(seed, entry.first)


def _twin(entries: list[Entry], entry: Entry, *, tuned: bool) -> Entry | None:
    """The row of the same attention whose method is the entry's with every weight fine-tuned, or before that."""
    name = entry.row.method + TUNED if tuned else entry.row.method.removesuffix(TUNED)
    return next(
        (other for other in entries if (other.row.method, other.row.variant) == (name, entry.row.variant)), None
    )


def _settings(entry: Entry) -> dict:
    return entry.first.results["perplexity"]["settings"]["settings"]


def _trains(entry: Entry, what: str) -> bool:
    training = _settings(entry)["training"] or {"phases": []}
    return any(phase["trains"] == what and phase["steps"] for phase in training["phases"])
