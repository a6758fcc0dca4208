"""The figure of dominance: how large the largest group is while a model trains, from training logs alone."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
import seaborn
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.method_config import FocusConfig
from focus.paper import rows
from focus.paper.figures import STYLE, save
from focus.probe import COLLAPSED, mean

DASHES = ["-", "--", ":", "-."]
EVEN = {"color": "black", "linewidth": 0.8, "linestyle": "--"}
COLLAPSE = {"color": "0.55", "linewidth": 0.8, "linestyle": ":"}
PHASE = {"color": "0.55", "linewidth": 0.8}


@dataclass(frozen=True)
class Line:
    """One method on one model: the probed records of its training log for each seed."""

    model: str
    method: str
    label: str
    adapter: FocusConfig
    probed: dict[int, list[dict]]

    @property
    def isolates(self) -> bool:
        """Whether a path to collapse is closed: centroids or projection frozen, or the router's inputs detached."""
        return bool(self.adapter.frozen) or self.adapter.detach_inputs

    @property
    def curve(self) -> list[tuple[int, float, float, float]]:
        """(step, mean over seeds of the mean dominance over layers, its lowest, its highest) of each probe."""
        found = []
        for records in zip(*self.probed.values(), strict=True):
            values = [mean(record, "dominance") for record in records]
            found.append((records[0]["step"], fmean(values), min(values), max(values)))
        return found

    @property
    def phases(self) -> list[tuple[int, str]]:
        """(last step before it, what it trains) of each phase but the first."""
        records = next(iter(self.probed.values()))
        ends = [record["step"] for record in records if record["probe"]["ends_phase"]]
        return [(end, next(each["phase"] for each in records if each["step"] > end)) for end in ends[:-1]]


def write(
    figure: str,
    exhibit: Exhibit,
    experiment: Experiment,
    results_root: Path,
    output_prefix: Path,
    *,
    partial: bool = False,
) -> None:
    """Write `output_prefix`.pdf and .png: a panel a model, and one more where some rows close a path to collapse.

    Raises UserError when a log is missing, unless `partial`, or holds no probe.
    """
    found = lines(exhibit, experiment, results_root, partial=partial)
    panels = [panel for model in dict.fromkeys(line.model for line in found) for panel in _panels(model, found)]
    if not panels:
        raise UserError(f"figures.{figure}.models: expected one that this run covers, got {exhibit.models}")
    styles = _styles(found)
    with plt.rc_context(seaborn.axes_style("whitegrid") | STYLE):
        canvas, grid = plt.subplots(1, len(panels), figsize=(2.4 + 3.1 * len(panels), 3.8), sharey=True, squeeze=False)
        for axes, (model, title, own, grey) in zip(grid[0], panels, strict=True):
            _panel(axes, own, grey, styles)
            axes.set_title(f"{rows.display_name(results_root, model)}: {title}")
        grid[0][0].set_ylabel("Tokens in the largest group")
        canvas.suptitle(exhibit.title, fontsize=10)
        canvas.supxlabel(_footnote(found, exhibit, experiment, 60 * len(panels)), fontsize=7, color="0.3")
        canvas.legend(handles=_legend(styles), loc="outside right center", frameon=False, fontsize=8)
        save(canvas, output_prefix)


def lines(exhibit: Exhibit, experiment: Experiment, root: Path, *, partial: bool = False) -> list[Line]:
    """Every method of the exhibit on every model that this run covers, in the order of the config.

    A partial run's lines are those of the seeds whose logs are there.
    """
    found = {}
    for model in exhibit.models or experiment.models:
        for row in exhibit.rows if model in experiment.models else []:
            method, corpus = experiment.methods[row.method], row.corpus or exhibit.corpus
            label = f"{method.label}, {row.corpus}" if row.corpus else method.label
            seeds = experiment.seeds_of(model, row.method)
            cell = Path(root) / "training" / model / corpus / row.method
            logs = {seed: cell / f"seed{seed}" / "log.jsonl" for seed in seeds}
            probed = {seed: _probed(log, label) for seed, log in logs.items() if log.exists() or not partial}
            if probed:
                found[cell] = Line(model, row.method, label, method.adapter, probed)
    return list(found.values())


def _probed(log: Path, label: str) -> list[dict]:
    try:
        records = [json.loads(line) for line in log.read_text().splitlines()]
    except OSError:
        raise UserError(f"{log}: expected the training log of {label}, found none") from None
    probed = [record for record in records if "probe" in record]
    if not probed:
        raise UserError(f"{log}: expected probes of {label}, found none; train it with probe_every above 0")
    return probed


def _panels(model: str, found: Sequence[Line]) -> list[tuple[str, str, list[Line], list[Line]]]:
    """(model, title, lines, grey lines to compare with) of each panel of a model.

    What closes a path is compared with the lines of the same balance that close none.
    """
    mine = [line for line in found if line.model == model]
    closing = [line for line in mine if line.isolates]
    others = [line for line in mine if not line.isolates]
    balances = {line.adapter.balance for line in closing}
    same = [line for line in others if line.adapter.balance in balances]
    return [
        *([(model, "ways to keep groups even", others, [])] if others else []),
        *([(model, "paths closed", closing, same)] if closing else []),
    ]


def _panel(axes: Axes, own: Sequence[Line], grey: Sequence[Line], styles: dict) -> None:
    for groups in sorted({line.adapter.groups for line in own}):
        axes.axhline(1 / groups, **EVEN, zorder=1)
    axes.axhline(COLLAPSED, **COLLAPSE, zorder=1)
    for step, trains in sorted({phase for line in own for phase in line.phases}):
        axes.axvline(step, **PHASE, zorder=1)
        axes.text(step, 0.5, f" {trains}", transform=axes.get_xaxis_transform(), rotation=90, fontsize=7, color="0.3")
    for line in grey:
        steps, values, _, _ = zip(*line.curve, strict=True)
        axes.plot(steps, values, color="0.7", linewidth=1.2, zorder=2)
    for line in own:
        steps, values, low, high = zip(*line.curve, strict=True)
        colour, dashes = styles[line.label]
        axes.plot(steps, values, color=colour, linestyle=dashes, marker="o", markersize=2.5, linewidth=1.2, zorder=3)
        if len(line.probed) > 1:
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)
    axes.set(xlabel="Step", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _styles(found: Sequence[Line]) -> dict[str, tuple[tuple, str]]:
    """{label: (colour, dashes)}; colours come round again with other dashes."""
    labels = list(dict.fromkeys(line.label for line in found))
    palette = seaborn.color_palette("colorblind", 8)
    return {label: (palette[n % 8], DASHES[n // 8 % len(DASHES)]) for n, label in enumerate(labels)}


def _footnote(found: Sequence[Line], exhibit: Exhibit, experiment: Experiment, width: int) -> str:
    seeds = sorted({seed for line in found for seed in line.probed})
    windows = sorted({experiment.methods[line.method].training.probe_windows for line in found})
    missing = [model for model in exhibit.models or [] if model not in experiment.models]
    sentences = [
        f"Scale {experiment.scale}, text {exhibit.corpus}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        f"{' (bands: lowest and highest)' if len(seeds) > 1 else ''}.",
        f"Mean over layers, on the same {' or '.join(map(str, windows))} training windows at every look.",
        "Vertical lines: a phase begins that trains what stands beside it."
        if any(line.phases for line in found)
        else "",
        "Grey: the same balance with every path open." if any(line.isolates for line in found) else "",
        f"Not run: {', '.join(missing)}." if missing else "",
    ]
    return textwrap.fill(" ".join(filter(None, sentences)), width)


def _legend(styles: dict) -> list[Line2D]:
    return [
        *(Line2D([], [], color=colour, linestyle=dashes, label=label) for label, (colour, dashes) in styles.items()),
        Line2D([], [], **EVEN, label="even, 1/K"),
        Line2D([], [], **COLLAPSE, label=f"collapse, {COLLAPSED:.0%}"),
    ]
