"""The held-out loss of random bits over the length, one line a balance, from the results of `focus bits train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import seaborn
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from focus.paper.bits import TRAINED, Point, load, points
from focus.paper.figures import MARKERS, STYLE, save

APART = 1.05  # factor between the marks of neighbouring balances, which lie on one another at the floor


def write(paths: Sequence[Path], output_prefix: Path) -> None:
    """Write `output_prefix`.pdf and .png: a panel for every weight trained and one for centroids alone.

    Bars are two standard errors. Raises UserError when a result is missing.
    """
    known = points(load(paths))
    panels = list(dict.fromkeys(point.trains for point in known))
    balances = list(dict.fromkeys(point.balance for point in known))
    colours = dict(zip(balances, seaborn.color_palette("colorblind", len(balances)), strict=True))
    with plt.rc_context(seaborn.axes_style("whitegrid") | STYLE):
        canvas, axes = plt.subplots(1, len(panels), figsize=(1.9 + 3.4 * len(panels), 3.4), squeeze=False)
        for panel, trains in zip(axes[0], panels, strict=True):
            _panel(panel, [point for point in known if point.trains == trains], colours)
            panel.set_title(TRAINED[trains][:1].upper() + TRAINED[trains][1:])
        axes[0][0].set_ylabel("Held-out loss, nats a bit")
        canvas.suptitle("Independent random bits: only who sees the future is below ln 2", fontsize=10)
        handles, labels = axes[0][0].get_legend_handles_labels()
        canvas.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
        save(canvas, output_prefix)


def _panel(axes: Axes, known: list[Point], colours: dict) -> None:
    lengths = sorted({point.length for point in known})
    bounds = {point.length: point.first["count_bound"] for point in known}
    axes.axhline(known[0].first["floor"], color="black", linewidth=0.9, label="floor, ln 2")
    axes.plot(
        lengths, [bounds[length] for length in lengths], color="0.4", linestyle=":", label="told the number of ones"
    )
    for number, (balance, colour) in enumerate(colours.items()):
        mine = sorted((point for point in known if point.balance == balance), key=lambda point: point.length)
        shift = APART ** (number - (len(colours) - 1) / 2)
        axes.errorbar(
            [point.length * shift for point in mine],
            [point.loss for point in mine],
            yerr=[2 * point.error for point in mine],
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            linewidth=1,
            label=balance,
        )
    axes.set(xlabel="Bits of a sequence, T", xscale="log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
