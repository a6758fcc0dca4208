"""Figures from result files: the same bytes for the same results."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.paper import printed, rows
from focus.paper.rows import Entry
from focus.provenance import write_atomically

STYLE = {
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9,
    "pdf.fonttype": 42,
    "svg.hashsalt": "focus",
}
MARKERS = "oDvPX<>dp"
TICKS = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100]
PAPER = {
    "gpt2_124m": {"label": "Paper: GPT-2 124M", "marker": "s", "linestyle": "--"},
    "mistral_7b": {"label": "Paper: Mistral 7B", "marker": "^", "linestyle": ":"},
}
LABEL_GAP = 0.5
"""Least distance of two labels, in heights of one."""
LABEL_HEIGHT = 9
"""Points from one row of labels to the next."""
SAME_SHARE = 0.03
"""Shares that differ by less lie in the same place."""
GREY = {"color": "0.55", "markerfacecolor": "white", "markersize": 5, "linewidth": 0.8}


def write(
    figure: str,
    exhibit: Exhibit,
    experiment: Experiment,
    results_root: Path,
    output_prefix: Path,
    *,
    partial: bool = False,
) -> None:
    """Write `output_prefix`.pdf and .png: perplexity over the pretrained model's against the share of pairs kept.

    One panel a model; error bars are two standard errors of paired differences. Raises UserError when a result is
    missing, unless `partial`: then its point is left out and named below the panels.
    """
    entries = rows.gather(exhibit, experiment, results_root, partial=partial)
    measured = {entry.model for entry in entries if rows.reference(entries, entry)}
    models = [model for model in exhibit.models or experiment.models if model in measured]
    if not models:
        raise UserError(f"figures.{figure}.rows: expected a pretrained row with results to compare with, found none")
    with plt.rc_context(seaborn.axes_style("whitegrid") | STYLE):
        canvas, panels = plt.subplots(
            1, len(models), figsize=(1.6 + 3.1 * len(models), 4.2), sharey=True, squeeze=False
        )
        styles = _styles(entries)
        for axes, model in zip(panels[0], models, strict=True):
            _panel(axes, model, entries, styles)
        panels[0][0].set_ylabel("Perplexity / pretrained perplexity")
        canvas.suptitle(exhibit.title, fontsize=10)
        canvas.supxlabel(_footnote(entries, exhibit, experiment), fontsize=7, color="0.3")
        canvas.legend(handles=_legend(styles), loc="outside right center", frameon=False, fontsize=8)
        canvas.draw_without_rendering()
        labels = [
            label_shares(axes, shares_of_k(points(entries, m))) for axes, m in zip(panels[0], models, strict=True)
        ]
        for axes, model in zip(panels[0], models, strict=True):
            axes.set_title(rows.display_name(results_root, model), pad=6 + LABEL_HEIGHT * max(map(len, labels)))
        save(canvas, output_prefix)


def save(canvas: Figure, output_prefix: Path) -> None:
    """Write and close the figure: `output_prefix`.pdf and .png without the time or the name of the software."""
    for suffix, metadata in (("pdf", {"CreationDate": None, "Producer": None}), ("png", {"Software": None})):
        buffer = io.BytesIO()
        canvas.savefig(buffer, format=suffix, dpi=200, metadata=metadata)
        write_atomically(Path(f"{output_prefix}.{suffix}"), buffer.getvalue())
    plt.close(canvas)


def points(entries: list[Entry], model: str) -> list[tuple[Entry, float, float, float]]:
    """(entry, share of far pairs kept, ratio of perplexities, its standard error) for every row with results."""
    found = []
    for entry in entries:
        if entry.model != model or not entry.runs:
            continue
        change = entry.against(rows.reference(entries, entry))
        found.append((entry, entry.mean("far_pairs_kept"), change.value, change.error or 0.0))
    return found


def paper_points() -> list[tuple[str, str, float, float]]:
    """(model, k, share of pairs kept, ratio of perplexities) of the paper's Table 7."""
    found = []
    for reference, row in printed.rows_of("table7").items():
        base = printed.baseline(reference)
        if base:
            _, model, k = reference.split(".")
            found.append((model, k, row["pairs_kept"] / 100, row["perplexity"] / base["perplexity"]))
    return found


def _footnote(entries: list[Entry], exhibit: Exhibit, experiment: Experiment) -> str:
    seeds = sorted({seed for entry in entries for seed in entry.runs})
    missing = sorted({f"{entry.label} on {entry.model}" for entry in entries if not entry.runs})
    sentences = [
        f"Scale {experiment.scale}, text {exhibit.corpus}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.",
        "Bars: two standard errors of paired differences.",
        "Grey: the paper's Table 7 (K=4, PG-19), whose shares fit far pairs.",
        "A soft gate weighs every pair, so it keeps all.",
        f"Not run: {'; '.join(missing)}." if missing else "",
    ]
    return textwrap.fill(" ".join(sentences), 30 + 60 * len({entry.model for entry in entries}))


def _styles(entries: list[Entry]) -> dict[str, tuple[str, tuple, str]]:
    """{method: (label, colour, marker)}, the pretrained model in black."""
    methods = {entry.row.method: entry for entry in entries}
    colours = iter(seaborn.color_palette("colorblind", len(methods)))
    return {
        method: (entry.method_label, "black" if entry.kind == "pretrained" else next(colours), marker)
        for (method, entry), marker in zip(methods.items(), MARKERS * 9, strict=False)
    }


def _panel(axes: Axes, model: str, entries: list[Entry], styles: dict) -> None:
    axes.axhline(1.0, color="black", linewidth=0.8, zorder=1)
    for name, style in PAPER.items():
        printed_points = [(k, share, change) for other, k, share, change in paper_points() if other == name]
        axes.plot(*zip(*[point[1:] for point in printed_points], strict=True), **style, **GREY, zorder=2)
    found = points(entries, model)
    for method, (_, colour, marker) in styles.items():
        mine = [point for point in found if point[0].row.method == method]
        hard = sorted((share, change) for entry, share, change, _ in mine if entry.row.attention == "hard")
        if hard:
            axes.plot(*zip(*hard, strict=True), color=colour, linewidth=1, zorder=3)
        for entry, share, change, error in mine:
            filled = "white" if entry.row.attention == "soft" else colour
            bar = {"yerr": 2 * error, "fmt": marker, "color": colour, "markerfacecolor": filled, "markersize": 5.5}
            axes.errorbar(share, change, **bar, zorder=5 if filled == "white" else 4)
    axes.set(xlabel="Pairs farther than the window kept", xlim=(-0.04, 1.08), yscale="log")
    axes.margins(y=0.12)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def shares_of_k(found: list[tuple[Entry, float, float, float]]) -> dict[int, float]:
    """Where along the axis each k lies, on average over the methods."""
    shares: dict[int, list[float]] = {}
    for entry, share, _, _ in found:
        if entry.row.top_k is not None:
            shares.setdefault(entry.row.top_k, []).append(share)
    return {k: fmean(values) for k, values in sorted(shares.items())}


def label_shares(axes: Axes, shares: dict[int, float]) -> list[list[Text]]:
    """Write each k above a panel that has been laid out, and return the rows: what would touch goes a row higher.

    Those that lie in the same place share a label.
    """
    groups: list[list[int]] = []
    for k, share in sorted(shares.items(), key=lambda item: item[1]):
        if groups and share - shares[groups[-1][0]] < SAME_SHARE:
            groups[-1].append(k)
        else:
            groups.append([k])
    rows: list[list[Text]] = []
    for group in groups:
        text = _label(axes, fmean(shares[k] for k in group), sorted(group))
        left = text.get_window_extent().x0 - LABEL_GAP * text.get_window_extent().height
        row = next((row for row in rows if row[-1].get_window_extent().x1 <= left), None)
        if row is None:
            rows.append(row := [])
        text.set_position((0, LABEL_HEIGHT * rows.index(row) + 2))
        row.append(text)
    return rows


def _label(axes: Axes, share: float, ks: list[int]) -> Text:
    """A label over the share, moved to lie within the panel's width."""
    place = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
    name = f"k={', '.join(map(str, ks))}"
    text = axes.annotate(name, (share, 1), (0, 2), **place, ha="center", va="bottom", fontsize=7)
    box, panel = text.get_window_extent(), axes.get_window_extent()
    shift = max(panel.x0 - box.x0, 0.0) - max(box.x1 - panel.x1, 0.0)
    left, right = axes.get_xlim()
    text.xy = (share + shift * (right - left) / panel.width, 1)
    return text


def _legend(styles: dict) -> list[Line2D]:
    ours = [
        Line2D([], [], linestyle="", marker=marker, color=colour, label=label)
        for label, colour, marker in styles.values()
    ]
    soft = Line2D([], [], linestyle="", marker="o", color="black", markerfacecolor="white", label="hollow: soft gate")
    return [*ours, soft, *(Line2D([], [], **style, **GREY) for style in PAPER.values())]
