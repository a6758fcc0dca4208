"""The columns of a table, each beside what the paper prints for its rows."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from focus.paper import gain, rows, statistics
from focus.paper.formats import mean_over_seeds, number, paper_number, paper_ratio, percent, ratios
from focus.paper.rows import Entry, Run

Column = tuple[str, list[str]]
"""A title and one cell a row."""


def grid(entries: list[Entry], columns: list[str]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: the rows' labels, and each of the exhibit's columns with what the paper prints for it."""
    header, lines = ["Row"], [[entry.label] for entry in entries]
    for column in columns:
        for title, cells in COLUMNS[column](entries):
            header.append(title)
            for line, cell in zip(lines, cells, strict=True):
                line.append(cell)
    return header, lines


def probed(entries: list[Entry]) -> bool:
    """Whether training looked at the groups of every row that has some; else held-out text tells the largest group."""
    grouped = [entry for entry in entries if entry.runs and entry.kind == "focus"]
    return bool(grouped) and all(len(entry.over_seeds(_probed_group)) == len(entry.runs) for entry in grouped)


def _perplexity(entries: list[Entry]) -> Iterator[Column]:
    measured = [[statistics.perplexity(run.windows) for run in entry.runs.values()] for entry in entries]
    cells, spreads = [], []
    for each in measured:
        values, errors = zip(*each, strict=True) if each else ((), ())
        cells.append(number(fmean(values), None if None in errors else fmean(errors)) if each else "not run")
        spreads.append(f"± {number(statistics.spread(values))} ({len(values)})" if len(values) > 1 else "-")
    yield "Perplexity", cells
    if any(len(each) > 1 for each in measured):
        yield "Over seeds", spreads
    yield from _paper(entries, "perplexity", "Paper's perplexity")


def _ratio(entries: list[Entry]) -> Iterator[Column]:
    """Against the pretrained row, and against another where that is what the paper's ratios are taken over."""
    pretrained = [rows.reference(entries, entry) for entry in entries]
    if any(pretrained):
        yield "Ratio to pretrained", _ratios(entries, pretrained)
    bases = [rows.other_baseline(entries, entry) for entry in entries]
    names = dict.fromkeys(base.method_label for base in bases if base)
    if names:
        yield f"Ratio to {' or '.join(names)}", _ratios(entries, bases)
    if any(rows.printed_ratio(entry) is not None for entry in entries):
        yield "Paper's ratio", [paper_ratio(rows.printed_ratio(entry)) for entry in entries]


def _ratios(entries: list[Entry], bases: list[Entry | None]) -> list[str]:
    return ratios(
        [
            entry.against(base) if base and base.runs and entry.runs and entry is not base else None
            for entry, base in zip(entries, bases, strict=True)
        ]
    )


def _far_pairs(entries: list[Entry]) -> Iterator[Column]:
    yield "Far pairs kept", [percent(entry.mean("far_pairs_kept")) if entry.runs else "-" for entry in entries]


def _parameters(entries: list[Entry]) -> Iterator[Column]:
    cells = [f"{entry.mean('trained_parameters'):,.0f}" if entry.runs else "-" for entry in entries]
    yield "Trained parameters", cells


def _gain(entries: list[Entry]) -> Iterator[Column]:
    yield "Of the gain", [_part(entry, gain.ends(entries, entry)) for entry in entries]


def _part(entry: Entry, found: tuple[Entry, Entry] | None) -> str:
    if found is None:
        return "-"
    reached = gain.part(entry, *found)
    if reached is None:
        return "no gain"
    share, error = reached
    return percent(share) if error is None or entry is found[1] else f"{100 * share:.0f} ± {100 * error:.0f} %"


def _absorption(entries: list[Entry]) -> Iterator[Column]:
    leaders = [gain.leader(entries, entry) for entry in entries]
    yield "Lead of learned groups", _ratios(entries, leaders)
    yield "Change of the lead", ratios([gain.change_of_lead(entries, entry) for entry in entries])


def _dominance(entries: list[Entry]) -> Iterator[Column]:
    largest = _probed_group if probed(entries) else _held_out_group
    yield "Largest group", [mean_over_seeds(entry.over_seeds(largest), percent) for entry in entries]
    yield from _paper(entries, "dominance", "Paper's largest group, percent")


def _training_time(entries: list[Entry]) -> Iterator[Column]:
    values = [entry.over_seeds(_training_seconds) for entry in entries]
    yield "Training, seconds", [mean_over_seeds(each, "{:.0f}".format) for each in values]


def _stability(entries: list[Entry]) -> Iterator[Column]:
    values = [entry.over_seeds(lambda run: run.trained.get("stability")) for entry in entries]
    yield "Stability", [mean_over_seeds(each, "{:.3f}".format) for each in values]
    yield from _paper(entries, "stability", "Paper's stability")


def _collapse(entries: list[Entry]) -> Iterator[Column]:
    yield "Collapsed at step", [_collapsed(entry) for entry in entries]
    if any(rows.printed_value(entry, "outcome") for entry in entries):
        yield "Paper's outcome", [rows.printed_value(entry, "outcome") or "-" for entry in entries]


def _collapsed(entry: Entry) -> str:
    """The step of collapse, of several seeds the mean over those that collapsed, and how many did."""
    looked = [run.trained["collapse_step"] for run in entry.runs.values() if "collapse_step" in run.trained]
    steps = [step for step in looked if step is not None]
    if not steps:
        return "never" if looked else "-"
    spread = "" if len(steps) == 1 else f" ± {statistics.spread(steps):.0f}"
    count = "" if len(looked) == 1 else f" ({len(steps)} of {len(looked)})"
    return f"{fmean(steps):.0f}{spread}{count}"


COLUMNS = {
    "perplexity": _perplexity,
    "ratio": _ratio,
    "far_pairs": _far_pairs,
    "parameters": _parameters,
    "gain": _gain,
    "absorption": _absorption,
    "dominance": _dominance,
    "stability": _stability,
    "collapse": _collapse,
    "training_time": _training_time,
}
TITLES = {"dominance": "balance of the groups", "collapse": "balance of the groups"} | {
    name: "perplexity"
    for name in ("perplexity", "ratio", "far_pairs", "parameters", "gain", "absorption", "stability", "training_time")
}


def _paper(entries: list[Entry], metric: str, title: str) -> Iterator[Column]:
    """The paper's column, if it prints anything for these rows."""
    values = [rows.printed_value(entry, metric) for entry in entries]
    if any(value is not None for value in values):
        yield title, [paper_number(value) for value in values]


def _probed_group(run: Run) -> float | None:
    return run.trained.get("dominance")


def _training_seconds(run: Run) -> float | None:
    return run.trained.get("training_seconds")


def _held_out_group(run: Run) -> float | None:
    layers = run.results["perplexity"]["metrics"].get("layers") or []
    values = [layer["dominance"] for layer in layers if "dominance" in layer]
    return fmean(values) if values else None
