"""Speed-up over context: ours, the limit that counting pairs sets, and the paper's curves for an H100."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import seaborn
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from focus.paper import printed, speed
from focus.paper.figures import STYLE, save

TICKS = [0.1, 0.2, 0.5, 1, 2, 4, 8, 16]
LIMIT = {"linestyle": ":", "linewidth": 1}
PAPER = {"linestyle": "--", "linewidth": 0.8, "marker": "s", "markerfacecolor": "white", "markersize": 4.5}
OURS = {"linewidth": 1.4, "marker": "o", "markersize": 5}


def write(result_path: Path, output_prefix: Path) -> None:
    """Write `output_prefix`.pdf and .png: the forward pass, one panel a thread count, both axes logarithmic.

    Bars reach over the rounds. Raises UserError when the result is missing.
    """
    result = speed.load(result_path)
    rows = result["metrics"]["forward"]
    counts = list(dict.fromkeys(row["threads"] for row in rows))
    groups = list(dict.fromkeys(row["groups"] for row in rows))
    colours = dict(zip(groups, seaborn.color_palette("colorblind", len(groups)), strict=True))
    with plt.rc_context(seaborn.axes_style("whitegrid") | STYLE):
        canvas, panels = plt.subplots(
            1, len(counts), figsize=(1.9 + 3.6 * len(counts), 3.6), sharex=True, sharey=True, squeeze=False
        )
        for axes, count in zip(panels[0], counts, strict=True):
            _panel(axes, [row for row in rows if row["threads"] == count], colours)
            axes.set_title(f"{count} thread{'s' * (count > 1)}")
        panels[0][0].set_ylabel("Full attention's time / Focus's")
        canvas.suptitle("Speed-up of attention alone, forward", fontsize=10)
        canvas.supxlabel(_footnote(result, len(counts)), fontsize=7, color="0.3")
        canvas.legend(handles=_legend(colours), loc="outside right center", frameon=False, fontsize=8)
        save(canvas, output_prefix)


def _panel(axes: Axes, rows: list[dict], colours: dict) -> None:
    lengths = {row["length"] for row in rows}
    axes.axhline(1.0, color="black", linewidth=0.8, zorder=1)
    for k, colour in colours.items():
        mine = sorted((row for row in rows if row["groups"] == k), key=lambda row: row["length"])
        x, y = [row["length"] for row in mine], [row["speedup"] for row in mine]
        axes.plot(x, [row["limit"] for row in mine], color=colour, zorder=2, **LIMIT)
        reach = [[max(row["speedup"] - row["speedup_range"][0], 0) for row in mine]]
        reach += [[max(row["speedup_range"][1] - row["speedup"], 0) for row in mine]]
        axes.errorbar(x, y, yerr=reach, color=colour, elinewidth=0.8, zorder=4, **OURS)
        paper = paper_curve(k)
        axes.plot(list(paper), list(paper.values()), color=colour, zorder=3, **PAPER)
        lengths |= set(paper)
    axes.set(xlabel="Tokens", xscale="log", yscale="log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(lengths)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: speed.tokens(int(value))))
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=90)


def paper_curve(groups: int) -> dict[int, float]:
    """{tokens: speed-up} of the paper's Table 6; empty for other K than its own."""
    row = printed.rows_of("table6").get(f"table6.k{groups}", {})
    return {int(column): value for column, value in row.items() if column.isdigit()}


def _footnote(result: dict, panels: int) -> str:
    settings, origin = result["settings"], result["provenance"]
    sentence = (
        f"{origin['processor']}, {origin['dtype']}, H={settings['heads']}, D={settings['head_dim']}, "
        f"w={settings['window']}. Bars: range over rounds. Limit: what counting pairs allows (Appendix D)."
    )
    return textwrap.fill(sentence, 40 + 60 * panels)


def _legend(colours: dict) -> list[Line2D]:
    ours = [Line2D([], [], color=colour, label=f"K={k}", **OURS) for k, colour in colours.items()]
    limit = Line2D([], [], color="0.3", label="Limit", **LIMIT)
    return [*ours, limit, Line2D([], [], color="0.3", label="Paper, H100", **PAPER)]
