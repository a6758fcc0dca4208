"""Names beside points that cover neither each other nor the points: the same places for the same figure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

MARKER = 7.0
GAP = 1.0
FAR = 9.0
DISTANCES = (1, 4, 8, 13, 19, 26, 34, 43, 54, 67, 82, 100, 122, 148, 180, 220)
ANGLES = 24
LEADER = {"arrowstyle": "-", "linewidth": 0.4, "color": "0.55", "shrinkA": 0, "shrinkB": 0}


def place(
    axes: Axes,
    points: list[tuple[float, float, str]],
    lines: list[tuple[float, float, float, float]] = (),
    **style,
) -> list[Annotation]:
    """Write each (x, y, text) inside the axes, as near to its point as there is room, with a thin line if far.

    `lines`: level or upright ones (x0, y0, x1, y1) to keep clear of, as far as possible. The limits of the axes and
    what decides the figure's layout must be final. Sizes are in points (1/72 inch).
    """
    axes.figure.draw_without_rendering()
    unit, inside, written = axes.figure.dpi / 72, axes.get_window_extent(), []
    anchored = sorted((tuple(axes.transData.transform((x, y))), x, y, text) for x, y, text in points)
    taken = [_box(*anchor, MARKER * unit, MARKER * unit) for anchor, *_ in anchored]
    ends = [axes.transData.transform([line[:2], line[2:]]) for line in lines]
    taken += [Bbox.from_extents(*pair.min(axis=0) - unit / 2, *pair.max(axis=0) + unit / 2) for pair in ends]
    for anchor, x, y, text in anchored:
        probe = axes.text(x, y, text, **style)
        size = probe.get_window_extent()
        probe.remove()
        width, height = size.width + 2 * GAP * unit, size.height + 2 * GAP * unit
        box = _best(_around(*anchor, width, height, unit), taken, inside)
        taken.append(box)
        middle = (((box.x0 + box.x1) / 2 - anchor[0]) / unit, ((box.y0 + box.y1) / 2 - anchor[1]) / unit)
        where = {"textcoords": "offset points", "ha": "center", "va": "center", "annotation_clip": False}
        leader = {"arrowprops": LEADER} if _distance(box, *anchor) > FAR * unit else {}
        label = axes.annotate(text, (x, y), middle, **where, **leader, **style)
        label.set_in_layout(False)
        written.append(label)
    return written


def _around(x: float, y: float, width: float, height: float, unit: float) -> Iterator[Bbox]:
    """Boxes of that size whose edges are farther and farther from the point; to the right first."""
    for distance in DISTANCES:
        for step in range(ANGLES):
            angle = (step + 1) // 2 * (-1) ** step * 2 * math.pi / ANGLES
            reach = distance * unit + MARKER * unit / 2
            across, up = math.cos(angle), math.sin(angle)
            yield _box(x + across * (reach + width / 2), y + up * (reach + height / 2), width, height)


def _best(boxes: Iterator[Bbox], taken: list[Bbox], inside: Bbox) -> Bbox:
    """The first box that is free and inside, else the one that covers least."""
    found, least = None, math.inf
    for box in boxes:
        covered = sum(_common(box, other) for other in taken) + box.width * box.height - _common(box, inside)
        if covered < least:
            found, least = box, covered
        if covered <= 1e-6:
            break
    return found


def _box(x: float, y: float, width: float, height: float) -> Bbox:
    return Bbox.from_extents(x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def _common(one: Bbox, other: Bbox) -> float:
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else common.width * common.height


def _distance(box: Bbox, x: float, y: float) -> float:
    return math.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))
