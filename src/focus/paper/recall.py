"""The grids of recall: numbers hidden in text and named at its end, and passages that come a second time."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from focus.paper import rows, statistics
from focus.paper.layout import Grid
from focus.paper.rows import Entry, Run
from focus.paper.scores import score

PASSAGES = {"text": "text", "random": "random tokens"}


def grids(name: str, entries: list[Entry]) -> Iterator[Grid]:
    """One grid for the needles and one for the copies, where they were measured."""
    measured = [entry for entry in entries if entry.runs and entry.first.recalled]
    if not measured:
        return
    first = measured[0].first
    settings = first.results["recall"]["settings"]["recall"]
    if first.recalled.get("needle"):
        yield Grid(f"{name}: hidden numbers, percent", *_needles(entries, first), [_about_needles(settings)])
    if first.recalled.get("copy"):
        yield Grid(f"{name}: passages that come twice", *_copies(entries, first), [_about_copies(settings)])


def _inputs(settings: dict) -> str:
    return f"{settings['windows']} input{'s' * (settings['windows'] > 1)} a length"


def _about_needles(settings: dict) -> str:
    depths, others = settings["depths"], settings["candidates"] - 1
    return (
        f"Each input holds {len(depths)} sentences with a number of {settings['digits']} digits, at "
        f"{', '.join(f'{depth:g}' for depth in depths)} of held-out text ({_inputs(settings)}), and asks for "
        f"one. Likeliest: the right number before {others} that are not in the text; chance is "
        f"{100 / (others + 1):.3g}. Exact: every digit, greedily."
    )


def _about_copies(settings: dict) -> str:
    return (
        f"{settings['passage']} tokens near the beginning come again at the end ({_inputs(settings)}). Change: nats a "
        "token of the second time minus the first, the lower the more is recalled. Greedy: the share of the second's "
        "tokens that are the likeliest."
    )


def _needles(entries: list[Entry], first: Run) -> tuple[list[str], list[list[str]]]:
    header, lines = ["Row"], [[entry.label] for entry in entries]
    for place, known in enumerate(first.recalled["needle"]):
        length, count = known["length"], len(known["correct"])
        header += [f"{length:,} tokens, likeliest (n={count})", f"{length:,} tokens, exact"]
        for entry, line in zip(entries, lines, strict=True):
            for key in ("correct", "exact"):
                base = rows.reference(entries, entry)
                line.append(score(entry, base, _right(place, key)) if entry.runs else "not run")
    return header, lines


def _right(place: int, key: str):
    return lambda run: run.recalled["needle"][place][key]


def _copies(entries: list[Entry], first: Run) -> tuple[list[str], list[list[str]]]:
    header, lines = ["Row"], [[entry.label] for entry in entries]
    for place, known in enumerate(first.recalled["copy"]):
        header += [f"{PASSAGES[known['passage']]}, {known['length']:,} tokens: change", "greedy"]
        for entry, line in zip(entries, lines, strict=True):
            if not entry.runs:
                line += ["not run", "-"]
                continue
            change, right = (entry.over_seeds(_copied(place, key)) for key in ("change", "accuracy"))
            spread = statistics.spread(change)
            line.append(f"{fmean(change):+.2f}" + ("" if spread is None else f", seeds ± {spread:.2f} ({len(change)})"))
            line.append(f"{100 * fmean(right):.0f} %")
    return header, lines


def _copied(place: int, key: str):
    return lambda run: run.recalled["copy"][place][key]
