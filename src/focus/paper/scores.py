"""Cells of accuracy: percent, its error, and the paired change against another row."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from focus.paper import rows, statistics
from focus.paper.formats import spread_over_seeds
from focus.paper.rows import Entry, Run

Correct = Callable[[Run], list[int]]
"""The items that a run has right, 0 or 1 each."""


def score(entry: Entry, base: Entry | None, correct: Correct) -> str:
    """Accuracy in percent, and its change against `base`, of what `correct` finds in a run."""
    measured = [statistics.accuracy(correct(run)) for run in entry.runs.values()]
    values, errors = zip(*measured, strict=True)
    shown = f"{100 * fmean(values):.1f}" + ("" if None in errors else f" ± {100 * fmean(errors):.1f}")
    shown += spread_over_seeds(statistics.spread([100 * value for value in values]), len(values), 1)
    if base is None or entry is base:
        return shown
    return f"{shown}; change {change(entry, base, correct)}"


def change(entry: Entry, base: Entry, correct: Correct) -> str:
    """The change in points with its interval, the items gained and lost, and the chance of as many flips."""
    found = statistics.mean_change(
        [statistics.flips(correct(run), correct(other)) for run, other in rows.pairs(entry, base)]
    )
    mean, low, high = (f"{100 * share:+z.1f}" for share in (found.value, found.low, found.high))
    chance = f"{found.p_value:.2f}" if found.p_value >= 0.01 else f"{found.p_value:.0e}"
    return f"{mean} [{low}, {high}] (+{found.gained:.3g} -{found.lost:.3g}), p={chance}"
