"""Rows beside a control, such as random groups: which items of the tasks flip between the two (PAPER.md 4.5)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from focus.paper import statistics
from focus.paper.formats import percent
from focus.paper.layout import Grid
from focus.paper.rows import TASKS, Entry, Run
from focus.paper.scores import change

PAPER_WINDOW = 128
"""w of the paper's benchmarks."""

LINES = [
    "Each row against the control on the same items: change in points with its 95 % interval, items (+gained -lost), "
    "and the exact two-sided McNemar test's p. The control has as many groups a token where it has such a row."
]


def counterpart(entries: list[Entry], entry: Entry, control: str) -> Entry | None:
    """The control's row with results that a row is held against: of the same attention, or the only one."""
    rows = [other for other in entries if other.row.method == control and other.runs and other.model == entry.model]
    if entry.row.method == control or not entry.runs:
        return None
    same = [other for other in rows if other.row.variant == entry.row.variant]
    return next(iter(same or (rows if len(rows) == 1 else [])), None)


def grid(title: str, entries: list[Entry], control: str, tasks: Callable[[Run], dict[str, dict]]) -> Grid | None:
    """A line for each task and pair of rows: items, positions beyond the window and beyond the paper's, what flips.

    tasks: a run's {task: {"items", "correct", "beyond_window", ...}}. None where nothing stands beside a control.
    """
    pairs = [(entry, other) for entry in entries if (other := counterpart(entries, entry, control))]
    lines = [
        [
            TASKS[task],
            entry.label,
            other.label,
            str(values["items"]),
            percent(fmean(tasks(run)[task]["beyond_window"] for run in entry.runs.values())),
            percent(values["scored_beyond_window"]) if "scored_beyond_window" in values else "-",
            beyond(values.get("lengths"), PAPER_WINDOW),
            change(entry, other, lambda run, task=task: statistics.scored(tasks(run)[task])),
        ]
        for entry, other in pairs
        for task, values in tasks(entry.first).items()
        if task in tasks(other.first)
    ]
    header = [
        "Task",
        "Row",
        "Against",
        "Items",
        "Positions beyond the window",
        "scored ones",
        f"beyond {PAPER_WINDOW}",
        "Change",
    ]
    return Grid(title, header, lines, LINES, text=3) if lines else None


def beyond(lengths: list[int] | None, window: int) -> str:
    """The share of the positions of requests that see a key farther than `window`; a dash where none are recorded."""
    if not lengths:
        return "-"
    return percent(sum(max(length - 1 - window, 0) for length in lengths) / sum(lengths))
