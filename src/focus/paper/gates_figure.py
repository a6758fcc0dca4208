"""What each reading of the gate gives to near and to far pairs, with the perplexity under it beside."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import seaborn
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.paper import gates, rows
from focus.paper.figures import STYLE, TICKS, save
from focus.paper.formats import either
from focus.paper.gates import FORMS, Gate
from focus.paper.rows import Entry

COLOURS = {"near": "0.55", "far": "tab:blue"}
VARIANTS = {"soft": ("o", "white"), "hard-k1": ("s", "tab:red"), "hard-k2": ("^", "tab:green")}
LEAST = 1e-4  # share of pairs at which the logarithmic axis ends


def write(
    figure: str,
    exhibit: Exhibit,
    experiment: Experiment,
    results_root: Path,
    output_prefix: Path,
    *,
    partial: bool = False,
) -> None:
    """Write `output_prefix`.pdf and .png: a line of panels a model, one for each soft row and one of perplexities.

    Bars are two standard errors of paired differences. Raises UserError when a result is missing, unless `partial`:
    then its row is left out and named below the panels.
    """
    entries = rows.gather(exhibit, experiment, results_root, partial=partial)
    found = gates.gather(entries, results_root)
    models = [model for model in dict.fromkeys(gate.entry.model for gate in found) if _base(entries, model)]
    if not models:
        raise UserError(f"figures.{figure}.rows: expected soft rows and a pretrained one with results, found none")
    count = max(sum(gate.entry.model == model for gate in found) for model in models)
    with plt.rc_context(seaborn.axes_style("whitegrid") | STYLE):
        canvas, grid = plt.subplots(
            len(models), count + 1, figsize=(2.2 * count + 3.6, 1.0 + 2.5 * len(models)), squeeze=False
        )
        for panels, model in zip(grid, models, strict=True):
            mine = [gate for gate in found if gate.entry.model == model]
            for axes, gate in zip(panels, mine, strict=False):
                distribution(axes, gate)
            for axes in panels[len(mine) : count]:
                axes.set_axis_off()
            perplexities(panels[-1], [gate.entry for gate in mine], entries)
            panels[0].set_ylabel(f"{rows.display_name(results_root, model)}\nShare of pairs")
        canvas.suptitle(exhibit.title, fontsize=10)
        canvas.supxlabel(_footnote(entries, found, exhibit, experiment, count), fontsize=7, color="0.3")
        canvas.legend(handles=_legend(), loc="outside right center", frameon=False, fontsize=8)
        save(canvas, output_prefix)


def distribution(axes: Axes, gate: Gate) -> None:
    """Steps of the shares of near and of far pairs over the gate's value, the means as upright lines."""
    for pairs, colour in COLOURS.items():
        shares = np.mean([found[pairs]["histogram"] for found in gate.found.values()], axis=0)
        edges = np.linspace(0, 1, len(shares) + 1)
        axes.stairs(np.maximum(shares, LEAST), edges, baseline=LEAST, color=colour, fill=pairs == "near", alpha=0.6)
        axes.axvline(gate.mean(pairs, "mean"), color=colour, linestyle="--", linewidth=1)
    axes.set(xlim=(0, 1), ylim=(LEAST, 1), yscale="log", xlabel="Gate value")
    axes.set_title(f"{gate.entry.method_label}\n{FORMS[gate.name]}", fontsize=7.5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.yaxis.set_minor_locator(NullLocator())


def perplexities(axes: Axes, soft: list[Entry], entries: list[Entry]) -> None:
    """The ratio to the pretrained perplexity of each soft row and of its method's hard rows, from left to right."""
    axes.axhline(1.0, color="black", linewidth=0.8, zorder=1)
    for place, entry in enumerate(soft):
        for shift, (variant, (marker, filled)) in zip((-0.2, 0.0, 0.2), VARIANTS.items(), strict=True):
            same = [other for other in entries if _same(other, entry) and other.row.variant == variant and other.runs]
            for other in same:
                change = other.against(rows.reference(entries, other))
                style = {"fmt": marker, "color": "0.2", "markerfacecolor": filled, "markersize": 6}
                axes.errorbar(place + shift, change.value, yerr=2 * (change.error or 0.0), **style, zorder=3)
    axes.set(xlim=(-0.5, len(soft) - 0.5), yscale="log", title="Perplexity / pretrained")
    axes.set_xticks(
        range(len(soft)), [textwrap.fill(entry.method_label, 14) for entry in soft], rotation=45, fontsize=7
    )
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(FixedLocator([*TICKS, 1.05, 1.1, 1.3]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _same(other: Entry, entry: Entry) -> bool:
    return (other.model, other.corpus, other.row.method) == (entry.model, entry.corpus, entry.row.method)


def _base(entries: list[Entry], model: str) -> bool:
    return any(entry.model == model and entry.kind == "pretrained" and entry.runs for entry in entries)


def _footnote(entries: list[Entry], found: list[Gate], exhibit: Exhibit, experiment: Experiment, panels: int) -> str:
    seeds = sorted({seed for gate in found for seed in gate.found})
    windows = sorted({len(values["windows"]) for gate in found for values in gate.found.values()})
    missing = sorted({f"{entry.label} on {entry.model}" for entry in entries if not entry.runs})
    sentences = [
        f"Scale {experiment.scale}, text {exhibit.corpus}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.",
        f"Pairs of all layers on {either(windows)} held-out windows; dashed: means. Near pairs are within the window, "
        "where the gate is not applied; far ones are those it is applied to. a: affinity of two tokens' assignments.",
        "Bars: two standard errors of paired differences.",
        f"Not run: {'; '.join(missing)}." if missing else "",
    ]
    return textwrap.fill(" ".join(filter(None, sentences)), 40 + 32 * panels)


def _legend() -> list[Line2D]:
    shares = [Line2D([], [], color=colour, linewidth=4, alpha=0.6, label=pairs) for pairs, colour in COLOURS.items()]
    names = {"soft": "soft gate", "hard-k1": "hard, k=1", "hard-k2": "hard, k=2"}
    points = [
        Line2D([], [], linestyle="", marker=marker, color="0.2", markerfacecolor=filled, label=names[variant])
        for variant, (marker, filled) in VARIANTS.items()
    ]
    return [*shares, *points]
