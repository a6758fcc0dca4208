"""Shares and purity of the groups over the layers, from the result of `focus groups analyse`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import seaborn
from matplotlib.patches import Rectangle
from numpy import ndarray

from focus.paper.figures import STYLE, save
from focus.paper.groups import CATEGORIES, load

LARGEST_NUMBERED = 160  # cells with their number in them; more would not be legible


def write(result_path: Path, output_prefix: Path) -> None:
    """Write `output_prefix`.pdf and .png: two heat maps, groups by layers, the best layer framed.

    The groups of a layer are ordered by purity, since their numbers mean nothing across layers. Raises UserError when
    the result is missing.
    """
    result = load(result_path)
    metrics = result["metrics"]
    share, pure = grids(metrics["layers"])
    groups, layers = share.shape
    best = metrics["best"]["layer"]
    even = 1 / groups
    panels = [
        (
            "Share of the layer's tokens",
            share,
            {"cmap": "vlag", "center": even, "vmin": 0, "vmax": max(2 * even, share.max())},
        ),
        ("Purity", pure, {"cmap": "viridis", "vmin": 0, "vmax": 1}),
    ]
    with plt.rc_context(seaborn.axes_style("white") | STYLE):
        canvas, axes = plt.subplots(2, 1, figsize=(2.2 + 0.22 * max(layers, 14), 1.8 + 0.4 * groups), sharex=True)
        for panel, (title, values, colours) in zip(axes, panels, strict=True):
            numbered = values.size <= LARGEST_NUMBERED
            seaborn.heatmap(values, ax=panel, annot=numbered, fmt=".2f", annot_kws={"fontsize": 6}, **colours)
            panel.add_patch(Rectangle((best, 0), 1, groups, fill=False, edgecolor="black", linewidth=1.5))
            panel.set(title=title, ylabel="Groups, purest first", yticks=[])
        axes[1].set_xlabel("Layer")
        canvas.suptitle(f"What the groups hold: {_name(result)}", fontsize=10)
        canvas.supxlabel(_footnote(result), fontsize=7, color="0.3")
        save(canvas, output_prefix)


def grids(layers: list[dict]) -> tuple[ndarray, ndarray]:
    """Shares and purities as float64 [K, L], each layer's groups by falling purity; that of an empty group is NaN."""
    share = np.array([[group["share"] for group in layer["groups"]] for layer in layers])
    pure = np.array([[group["purity"] for group in layer["groups"]] for layer in layers], dtype=np.float64)
    order = np.argsort(-np.nan_to_num(pure, nan=-1.0), axis=1, kind="stable")
    return np.take_along_axis(share, order, axis=1).T, np.take_along_axis(pure, order, axis=1).T


def _name(result: dict) -> str:
    settings, note = result["settings"], result["provenance"]["revisions"]["model"]["note"]
    stands_in = " (stand-in)" if note.lower().startswith("stand-in") else ""
    return f"{settings['model']}{stands_in}, {settings['method']}"


def _footnote(result: dict) -> str:
    metrics = result["metrics"]
    best = metrics["layers"][metrics["best"]["layer"]]
    purest = max((group for group in best["groups"] if group["top"]), key=lambda group: group["purity"])
    sentence = (
        f"{metrics['tokens']:,} held-out tokens of {result['settings']['corpus']}. Purity: share of a group's tokens "
        f"in its most frequent part of speech. Framed: layer {metrics['best']['layer']}, {100 * best['purity']:.0f} % "
        f"in all (shuffled groups {100 * best['shuffled']['purity']:.0f} %, groups drawn by token "
        f"{100 * best['by_token']['purity']:.0f} %); its purest group is {100 * purest['purity']:.0f} % "
        f"{CATEGORIES.get(purest['category'], purest['category'])}."
    )
    return textwrap.fill(sentence, 100)
