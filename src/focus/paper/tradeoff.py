"""Figure 1: perplexity against the measured speed of attention alone, one point a row; up and right is better."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import seaborn
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from focus.config import Exhibit, Experiment, variant_of
from focus.errors import UserError
from focus.paper import labels, printed, rows
from focus.paper.figures import MARKERS, STYLE, TICKS, save
from focus.paper.formats import either
from focus.paper.rows import Entry
from focus.paper.speed import tokens
from focus.provenance import read_result

RESULT = "speed/methods.json"
SPEEDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
BETTER = {"color": "tab:green", "alpha": 0.1, "linewidth": 0, "zorder": 0}
PAPER = {"marker": "s", "color": "0.5", "markerfacecolor": "white", "markersize": 5, "linewidth": 0.8, "zorder": 2}
PAPER_GROUPS = 4  # K of Table 1's Focus, so of the only quality that has a speed


@dataclass(frozen=True)
class Point:
    """One row: how many times faster than full attention, least and most over rounds, and perplexity's ratio."""

    entry: Entry
    speedup: float
    least: float
    most: float
    ratio: float
    error: float


def write(
    figure: str,
    exhibit: Exhibit,
    experiment: Experiment,
    results_root: Path,
    output_prefix: Path,
    *,
    partial: bool = False,
) -> None:
    """Write `output_prefix`.pdf and .png: one panel a model, the speed of the longest context timed.

    Vertical bars are two standard errors of paired differences; horizontal ones the range over rounds. Raises UserError
    when a result is missing, unless `partial`: then the row is left out and named below the panels.
    """
    entries = rows.gather(exhibit, experiment, results_root, partial=partial)
    measured = {entry.model for entry in entries if rows.reference(entries, entry)}
    models = [model for model in exhibit.models or experiment.models if model in measured]
    if not models:
        raise UserError(f"figures.{figure}.rows: expected a pretrained row with results to compare with, found none")
    timed = load(Path(results_root) / RESULT)
    length = longest(timed)
    shown = [points(entries, model, timed) for model in models]
    with plt.rc_context(seaborn.axes_style("whitegrid") | STYLE):
        canvas, panels = plt.subplots(1, len(models), figsize=(0.6 + 5.4 * len(models), 5.6), squeeze=False)
        canvas.suptitle(textwrap.fill(exhibit.title, 62 * len(models)), fontsize=10)
        canvas.supxlabel(_footnote(entries, exhibit, experiment, timed, len(models)), fontsize=7, color="0.3")
        for axes, model, found in zip(panels[0], models, shown, strict=True):
            _panel(axes, found, _colours(entries), length)
            axes.set_title(rows.display_name(results_root, model))
        panels[0][0].set_ylabel("Perplexity / pretrained perplexity (better is up)")
        for axes, found in zip(panels[0], shown, strict=True):
            names = [(point.speedup, point.ratio, point.entry.label) for point in found]
            names += [(speedup, ratio, f"Paper: {name}") for name, speedup, ratio in paper_points(length)]
            labels.place(axes, names, _lines(axes, found), fontsize=6.5, color="0.15", zorder=6)
        save(canvas, output_prefix)


def load(path: Path) -> dict:
    """The result of one run. Raises UserError when the file is missing or another kind of result."""
    result = read_result(path)
    if result["experiment"] != "methods":
        raise UserError(f"{path}: expected the result of focus bench methods, got one of {result['experiment']}")
    return result


def longest(timed: dict) -> int:
    """The longest context timed, which the figure shows."""
    return max(case["length"] for case in timed["metrics"]["cases"])


def points(entries: list[Entry], model: str, timed: dict) -> list[Point]:
    """Every row of a model with results and a time at the longest context.

    Raises UserError for a row that the timing does not know.
    """
    found = []
    for entry in entries:
        if entry.model != model or not entry.runs:
            continue
        case = _case(entry, timed)
        if "speedup" in case:
            change = entry.against(rows.reference(entries, entry))
            found.append(Point(entry, case["speedup"], *case["speedup_range"], change.value, change.error or 0.0))
    return found


def paper_points(length: int) -> list[tuple[str, float, float]]:
    """(name, speed-up, ratio of perplexities) of the paper: full fine-tuning, and Focus with Table 6's speed-up.

    The paper prints no speed of other methods, and none at other lengths than Table 6's.
    """
    found = [("full fine-tuning", 1.0, printed_ratio("full_attention_ft"))]
    speedup = printed.row(f"table6.k{PAPER_GROUPS}").get(str(length))
    if speedup is not None:
        found.append((f"Focus, K={PAPER_GROUPS}", speedup, printed_ratio("focus")))
    return found


def printed_ratio(name: str) -> float:
    """Table 1's perplexity of a row over the pretrained model's."""
    return printed.row(f"table1.{name}")["perplexity"] / printed.row("table1.pretrained")["perplexity"]


def _case(entry: Entry, timed: dict) -> dict:
    name, length = f"{entry.row.method}/{variant_of(entry.row.attention, entry.row.top_k)}", longest(timed)
    for case in timed["metrics"]["cases"]:
        if case["length"] == length and name in case["rows"]:
            return case
    raise UserError(f"{RESULT}: expected the time of {name} at {length} tokens, found none")


def _colours(entries: list[Entry]) -> dict[str, tuple[tuple | str, str]]:
    """{method: (colour, marker)}, the pretrained model in black."""
    methods = {entry.row.method: entry for entry in entries}
    colours = iter(seaborn.color_palette("husl", len(methods)))
    return {
        method: ("black" if entry.kind == "pretrained" else next(colours), marker)
        for (method, entry), marker in zip(methods.items(), MARKERS * len(methods), strict=False)
    }


def _panel(axes: Axes, found: list[Point], colours: dict, length: int) -> None:
    for _, speedup, ratio in paper_points(length):
        axes.plot([speedup], [ratio], **PAPER)
    for point in found:
        colour, marker = colours[point.entry.row.method]
        reach = [[max(point.speedup - point.least, 0.0)], [max(point.most - point.speedup, 0.0)]]
        filled = "white" if point.entry.row.attention == "soft" else colour
        style = {"fmt": marker, "color": colour, "markerfacecolor": filled, "markersize": 5, "elinewidth": 0.8}
        axes.errorbar(point.speedup, point.ratio, yerr=2 * point.error, xerr=reach, **style, zorder=4)
    speeds = [1.0, *(point.speedup for point in found), *(speedup for _, speedup, _ in paper_points(length))]
    ratios = [1.0, *(point.ratio for point in found), *(ratio for *_, ratio in paper_points(length))]
    axes.set(xscale="log", yscale="log", xlabel=f"Times faster than full attention at {tokens(length)} tokens")
    axes.set_xlim(min(speeds) / 2, max(speeds) * 4)
    axes.set_ylim(max(ratios) * 1.15, min(ratios) / 1.15)
    axes.axhline(1.0, color="black", linewidth=0.8, zorder=1)
    axes.axvline(1.0, color="black", linewidth=0.8, zorder=1)
    axes.fill_between([1.0, axes.get_xlim()[1]], 1.0, axes.get_ylim()[1], **BETTER)
    for axis, ticks in ((axes.xaxis, SPEEDS), (axes.yaxis, TICKS)):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def _lines(axes: Axes, found: list[Point]) -> list[tuple[float, float, float, float]]:
    """What is drawn beside the points, within the panel: where quality and speed are full attention's, and the bars."""
    (left, right), (worst, best) = axes.get_xlim(), axes.get_ylim()
    lines = [(left, 1.0, right, 1.0), (1.0, worst, 1.0, best)]
    for point in found:
        low, high = max(point.ratio - 2 * point.error, best), min(point.ratio + 2 * point.error, worst)
        lines += [(point.least, point.ratio, point.most, point.ratio), (point.speedup, low, point.speedup, high)]
    return lines


def _footnote(entries: list[Entry], exhibit: Exhibit, experiment: Experiment, timed: dict, panels: int) -> str:
    settings, origin = timed["settings"], timed["provenance"]
    seeds = sorted({seed for entry in entries for seed in entry.runs})
    missing = sorted({f"{entry.label} on {entry.model}" for entry in entries if not entry.runs})
    untimed = {
        entry.label: case["reason"].removeprefix("not run: ")
        for entry in entries
        if entry.runs and "speedup" not in (case := _case(entry, timed))
    }
    silent = [f"{printed.row(f'table1.{name}')['label']} {printed_ratio(name):.2f}" for name in _unplotted()]
    sentences = [
        f"Scale {experiment.scale}, text {exhibit.corpus}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.",
        f"Timed: attention alone, forward, one thread of {origin['processor']}, {origin['dtype']}, "
        f"H={settings['heads']}, D={settings['head_dim']}, random inputs; full attention is at 1 by definition.",
        f"{_measured_at(entries)} {_timed_at(timed)} Fixed budgets (global tokens, blocks, pages, tokens selected) are "
        "another share of the keys at each.",
        "Shaded: faster and better. Bars: two standard errors of paired differences; range over rounds.",
        "Grey: the paper's Table 1 (GPT-2 124M, PG-19) at Table 6's speed on an H100; it prints no speed for "
        f"{', '.join(silent)}.",
        *(f"Not timed: {name} ({reason})." for name, reason in untimed.items()),
        f"Not run: {'; '.join(missing)}." if missing else "",
    ]
    return textwrap.fill(" ".join(sentences), 10 + 105 * panels)


def _measured_at(entries: list[Entry]) -> str:
    """The context and windows that each model's quality was measured with."""
    found: dict[str, list[dict]] = {}
    for entry in (each for each in entries if each.runs):
        settings = entry.first.results["perplexity"]["settings"]["model_settings"]
        found.setdefault(entry.model, []).append(settings)
    each = {
        model: f"{_setting(settings, 'context')}, {_setting(settings, 'window')}" for model, settings in found.items()
    }
    if len(set(each.values())) == 1:
        return f"Quality: {next(iter(each.values()))}."
    return f"Quality: {'; '.join(f'{known} ({model})' for model, known in each.items())}."


def _setting(settings: list[dict], name: str) -> str:
    return f"{name} {either(sorted({each[name] for each in settings}))}"


def _timed_at(timed: dict) -> str:
    """The context and windows that the speed shown was measured with."""
    windows = {row["settings"]["window"] for row in timed["settings"]["rows"]}
    return f"Speed: context {longest(timed)}, window {either(sorted(windows))}."


def _unplotted() -> list[str]:
    """Table 1's rows whose speed the paper does not print."""
    shown = ("pretrained", "full_attention_ft", "focus")
    return [name.removeprefix("table1.") for name in printed.rows_of("table1") if name.split(".")[1] not in shown]
