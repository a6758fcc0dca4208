"""The figure of recall: hidden numbers named and passages continued, over the length of the input."""

from __future__ import annotations

import textwrap
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import seaborn
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.paper import rows, statistics
from focus.paper.figures import MARKERS, STYLE, save
from focus.paper.rows import Entry

Point = tuple[int, float, float | None]
"""Tokens of the input, share right over all seeds, and its standard error over items (None where there is none)."""

PANELS = {
    "Hidden number, likeliest": ("needle", None, "correct"),
    "Hidden number, every digit": ("needle", None, "exact"),
    "Text copied": ("copy", "text", "accuracy"),
    "Random tokens copied": ("copy", "random", "accuracy"),
}
"""By title: the test, the kind of passage, and the items' value, a share or 0 or 1."""

CHANCE = "Hidden number, likeliest"
"""The panel of which guessing gets some right."""


def write(
    figure: str,
    exhibit: Exhibit,
    experiment: Experiment,
    results_root: Path,
    output_prefix: Path,
    *,
    partial: bool = False,
) -> None:
    """Write `output_prefix`.pdf and .png: a row of panels for each model, a line for each row of the exhibit.

    Raises UserError when a result is missing, unless `partial`: then its line is left out and named below the panels.
    """
    entries = rows.gather(exhibit, experiment, results_root, partial=partial)
    measured = [entry for entry in entries if entry.runs]
    models = list(dict.fromkeys(entry.model for entry in measured))
    if not models:
        raise UserError(f"figures.{figure}.rows: expected rows with results of recall, found none")
    titles = [title for title in PANELS if any(points(entry, title) for entry in measured)]
    colours = _colours(entries)
    with plt.rc_context(seaborn.axes_style("whitegrid") | STYLE):
        size = (1.8 + 2.3 * len(titles), 0.9 + 2.5 * len(models))
        canvas, panels = plt.subplots(len(models), len(titles), figsize=size, sharey=True, squeeze=False)
        for line, model in zip(panels, models, strict=True):
            for axes, title in zip(line, titles, strict=True):
                _panel(axes, title, [entry for entry in measured if entry.model == model], colours)
            line[0].set_ylabel(f"{rows.display_name(results_root, model)}\nright")
        lines, labels = panels[0][0].get_legend_handles_labels()
        canvas.legend(lines, labels, loc="outside right center", frameon=False, fontsize=8)
        canvas.suptitle(exhibit.title, fontsize=10)
        canvas.supxlabel(_footnote(entries, exhibit, experiment, len(titles)), fontsize=7, color="0.3")
        save(canvas, output_prefix)


def points(entry: Entry, title: str) -> list[Point]:
    """What a panel shows of an entry, by length; empty where the test was not made."""
    test, passage, value = PANELS[title]
    lengths: dict[int, list[list[float]]] = {}
    for run in entry.runs.values():
        for each in run.recalled.get(test, []):
            if each.get("passage") == passage:
                lengths.setdefault(each["length"], []).append([item[value] for item in each["items"]])
    return [(length, fmean(map(fmean, runs)), _error(runs)) for length, runs in sorted(lengths.items())]


def _error(runs: list[list[float]]) -> float | None:
    """Standard error over items, mean over seeds."""
    deviations = [statistics.spread(values) for values in runs]
    if None in deviations:
        return None
    return fmean(deviation / len(values) ** 0.5 for deviation, values in zip(deviations, runs, strict=True))


def _colours(entries: list[Entry]) -> dict[str, tuple]:
    labels = list(dict.fromkeys(entry.label for entry in entries if entry.kind != "pretrained"))
    black = {entry.label: (0.0, 0.0, 0.0) for entry in entries if entry.kind == "pretrained"}
    return black | dict(zip(labels, seaborn.color_palette("colorblind", len(labels)), strict=True))


def _panel(axes: Axes, title: str, entries: list[Entry], colours: dict[str, tuple]) -> None:
    lengths = set()
    for entry, marker in zip(entries, MARKERS * 9, strict=False):
        found = points(entry, title)
        if found:
            x, y, errors = zip(*found, strict=True)
            bars = None if None in errors else errors
            axes.errorbar(
                x, y, yerr=bars, label=entry.label, color=colours[entry.label], marker=marker, markersize=4, linewidth=1
            )
            lengths |= set(x)
    if title == CHANCE and entries:
        candidates = entries[0].first.results["recall"]["settings"]["recall"]["candidates"]
        axes.axhline(1 / candidates, color="0.55", linestyle=":", linewidth=1, zorder=1)
    axes.set(title=title, xscale="log", ylim=(-0.04, 1.04), xlabel="Tokens of the input")
    axes.xaxis.set_major_locator(FixedLocator(sorted(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:g}K"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _footnote(entries: list[Entry], exhibit: Exhibit, experiment: Experiment, panels: int) -> str:
    settings = next(entry for entry in entries if entry.runs).first.results["recall"]["settings"]
    recall, window = settings["recall"], settings["model_settings"]["window"]
    missing = sorted({f"{entry.label} on {entry.model}" for entry in entries if not entry.runs})
    sentences = [
        f"Scale {experiment.scale}, text {exhibit.corpus}, window {window}.",
        f"Numbers of {recall['digits']} digits, likeliest of {recall['candidates']}; passages of {recall['passage']} "
        "tokens from near the beginning, continued greedily at the end.",
        "Dotted: guessing. Bars: standard error over items, where there are several.",
        f"Not run: {'; '.join(missing)}." if missing else "",
    ]
    return textwrap.fill(" ".join(filter(None, sentences)), 40 + 40 * panels)
