"""Over the groups a token joins: far pairs kept, speed and its bounds, and perplexity, each beside the paper's."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import seaborn
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.paper import rows, speed, topk
from focus.paper.figures import GREY, MARKERS, PAPER, STYLE, TICKS, save
from focus.paper.rows import Entry
from focus.paper.topk import Sweep

SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16]
EVEN = {"color": "black", "linestyle": "--", "linewidth": 1}
CALLS = {"color": "black", "linestyle": ":", "linewidth": 1}
MEASURED = {"color": "tab:red", "marker": "o", "markersize": 5, "linewidth": 1.4}


def write(
    figure: str,
    exhibit: Exhibit,
    experiment: Experiment,
    results_root: Path,
    output_prefix: Path,
    *,
    partial: bool = False,
) -> None:
    """Write `output_prefix`.pdf and .png: three panels over k; speed is that of the longest context timed.

    Bars are two standard errors of paired differences, and the range over rounds. Raises UserError when a result is
    missing, unless `partial`: then its point is left out and named below the panels.
    """
    entries = rows.gather(exhibit, experiment, results_root, partial=partial)
    found, timed = topk.sweeps(entries, experiment), speed.load(Path(results_root) / speed.RESULT)
    groups = topk.one_number_of_groups(found, f"figures.{figure}")
    cases = topk.timings(timed, groups)
    if not cases:
        raise UserError(f"{speed.RESULT}: expected times with k of {groups} groups a token, found none")
    length = max(cases)
    styles = _styles(found, results_root)
    with plt.rc_context(seaborn.axes_style("whitegrid") | STYLE):
        canvas, (pairs, fast, quality) = plt.subplots(1, 3, figsize=(11.5, 3.9))
        draw_pairs(pairs, groups, found, styles)
        draw_speed(fast, groups, cases[length])
        draw_perplexity(quality, groups, found, entries, styles)
        fast.set_ylabel(f"Full attention's time / Focus's, {speed.tokens(length)} tokens")
        for axes in (pairs, fast, quality):
            axes.set(xlabel=f"k, of {groups} groups", xlim=(0.7, groups + 0.3))
            axes.xaxis.set_major_locator(FixedLocator(range(1, groups + 1)))
        canvas.suptitle(exhibit.title, fontsize=10)
        canvas.supxlabel(_footnote(entries, exhibit, experiment, timed), fontsize=7, color="0.3")
        canvas.legend(handles=_legend(styles, groups), loc="outside right center", frameon=False, fontsize=8)
        save(canvas, output_prefix)


def draw_pairs(axes: Axes, groups: int, found: list[Sweep], styles: dict) -> None:
    """Far pairs kept: by counting even groups, as measured, and as printed."""
    ks = range(1, groups + 1)
    axes.plot(ks, [topk.even_share(groups, k) for k in ks], **EVEN, zorder=2)
    for sweep in found:
        shown = [(k, sum(sweep.far(k)) / len(sweep.far(k))) for k in ks if sweep.far(k)]
        axes.plot(*_columns(shown), **styles[sweep.model, sweep.label][1], zorder=3)
    for model in topk.PAPERS:
        shown = [(k, row["pairs_kept"] / 100) for k, row in _printed(model, groups)]
        axes.plot(*_columns(shown), **PAPER[model], **GREY, zorder=2)
    axes.set(ylabel="Far pairs kept", ylim=(0, 1.05))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def draw_speed(axes: Axes, groups: int, cases: dict[int, dict]) -> None:
    """The bound of even groups, what one call a group costs, the speed measured, and the one printed."""
    ks = range(1, groups + 1)
    axes.axhline(1.0, color="black", linewidth=0.8, zorder=1)
    axes.plot(ks, [1 / topk.even_share(groups, k) for k in ks], **EVEN, zorder=2)
    axes.plot(ks, [topk.calls_limit(groups, k) for k in ks], **CALLS, zorder=2)
    axes.plot(
        *_columns([(k, row["speedup"]) for k, row in _printed("gpt2_124m", groups)]), **PAPER["gpt2_124m"], **GREY
    )
    order = sorted(cases)
    fast = [cases[k]["speedup"] for k in order]
    low = [max(cases[k]["speedup"] - cases[k]["speedup_range"][0], 0.0) for k in order]
    high = [max(cases[k]["speedup_range"][1] - cases[k]["speedup"], 0.0) for k in order]
    axes.errorbar(order, fast, yerr=[low, high], elinewidth=0.8, zorder=4, **MEASURED)
    axes.set(yscale="log")
    _ticks(axes, SPEEDS)


def draw_perplexity(axes: Axes, groups: int, found: list[Sweep], entries: list[Entry], styles: dict) -> None:
    """Perplexity over the pretrained model's, as measured and as printed."""
    axes.axhline(1.0, color="black", linewidth=0.8, zorder=1)
    for sweep in found:
        changes = {k: topk.change(sweep, k, entries) for k in range(1, groups + 1)}
        known = {k: change for k, change in changes.items() if change}
        bars = [2 * (change.error or 0.0) for change in known.values()]
        values = [change.value for change in known.values()]
        axes.errorbar(list(known), values, yerr=bars, elinewidth=0.8, zorder=3, **styles[sweep.model, sweep.label][1])
    for model in topk.PAPERS:
        shown = [(k, topk.printed_change(model, groups, k)) for k, _ in _printed(model, groups)]
        axes.plot(*_columns(shown), **PAPER[model], **GREY, zorder=2)
    axes.set(ylabel="Perplexity / pretrained perplexity", yscale="log")
    axes.margins(y=0.12)
    _ticks(axes, TICKS)


def _printed(model: str, groups: int) -> list[tuple[int, dict]]:
    printed = ((k, speed.printed_membership(model, groups, k)) for k in range(1, groups + 1))
    return [(k, row) for k, row in printed if row]


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _ticks(axes: Axes, ticks: list[float]) -> None:
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _styles(found: list[Sweep], root: Path) -> dict[tuple[str, str], tuple[str, dict]]:
    """{(model, label): (name, line style)}."""
    colours = seaborn.color_palette("colorblind", len(found))
    return {
        (sweep.model, sweep.label): (
            f"{rows.display_name(root, sweep.model)}:\n{sweep.label}",
            {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1},
        )
        for sweep, colour, marker in zip(found, colours, MARKERS * len(found), strict=False)
    }


def _footnote(entries: list[Entry], exhibit: Exhibit, experiment: Experiment, timed: dict) -> str:
    seeds = sorted({seed for entry in entries for seed in entry.runs})
    missing = sorted({f"{entry.label} on {entry.model}" for entry in entries if not entry.runs})
    sentences = [
        f"Scale {experiment.scale}, text {exhibit.corpus}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.",
        "Even groups: two tokens share one with probability 1 - C(K-k,k)/C(K,k); the bound on any speed-up is one over "
        "that. One call a group on its kT/K tokens is K/k^2 times faster. The paper's speed-ups are K/k.",
        f"Speed: attention alone, forward, on {timed['provenance']['processor']}, random groups. Bars: two "
        "standard errors of paired differences; range over rounds.",
        f"Not run: {'; '.join(missing)}." if missing else "",
    ]
    return textwrap.fill(" ".join(filter(None, sentences)), 185)


def _legend(styles: dict, groups: int) -> list[Line2D]:
    handles = [
        Line2D([], [], **EVEN, label="Even groups; bound"),
        Line2D([], [], **CALLS, label=f"{groups} calls of kT/{groups} tokens"),
        Line2D([], [], **MEASURED, label="Speed measured"),
        *(Line2D([], [], **style, label=name) for name, style in styles.values()),
    ]
    if any(speed.printed_membership(model, groups, 1) for model in topk.PAPERS):
        handles += [Line2D([], [], **style, **GREY) for style in PAPER.values()]
    return handles
