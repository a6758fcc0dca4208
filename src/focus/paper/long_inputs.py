"""The grids of the tasks behind other tokens: accuracy beside the short inputs' of the same items, and losses."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from focus.paper import contrast, rows, statistics
from focus.paper.formats import percent
from focus.paper.layout import Grid
from focus.paper.rows import TASKS, Entry
from focus.paper.scores import score

BEHIND = {"text": "held-out text", "examples": "worked examples of the same task"}


def grids(name: str, entries: list[Entry], control: str | None) -> Iterator[Grid]:
    """Two grids for each kind of beginning, and a third against the control, if there is one."""
    measured = [entry for entry in entries if entry.runs and entry.first.behind]
    if not measured:
        return
    for kind, values in measured[0].first.behind.items():
        title = f"{name}: behind {values['tokens']:,} tokens of {BEHIND[kind]}"
        yield Grid(f"{title}, accuracy in percent", *_accuracy(entries, kind), [_about(measured, kind)])
        yield Grid(f"{title}, loss of the right answer", *_losses(entries, kind), LOSSES)
        if control:
            against = contrast.grid(f"{title}, against a control", entries, control, _tasks_behind(kind))
            if against:
                yield against


LOSSES = [
    "Nats of each item's right answer, mean over items, and the change against pretrained with the standard error of "
    "paired differences; losses tell apart what few items cannot."
]


def _tasks_behind(kind: str):
    return lambda run: run.behind[kind]["tasks"]


def _about(entries: list[Entry], kind: str) -> str:
    behind = entries[0].first.behind[kind]
    cut = sum(values["requests_cut"] for values in behind["tasks"].values())
    settings = entries[0].first.results["long_inputs"]["settings"]["long_inputs"]
    turns = f"{settings['windows']} different beginnings, in turn" if settings["windows"] > 1 else "the same for all"
    return (
        f"The items of the short tasks, each behind exactly {behind['tokens']:,} tokens ({turns}); scored alike. "
        f"Short: the same items without them. {cut or 'No'} requests lost their beginning to fit."
    )


def _accuracy(entries: list[Entry], kind: str) -> tuple[list[str], list[list[str]]]:
    measured = [entry for entry in entries if entry.runs]
    tasks = measured[0].first.behind[kind]["tasks"]
    header = [
        "Row",
        *(cell for task, each in tasks.items() for cell in (f"{TASKS[task]} (n={each['items']})", "short")),
    ]
    lines = []
    for entry in entries:
        line, base = [entry.label], rows.reference(entries, entry)
        for task, each in tasks.items():
            if not entry.runs:
                line += ["not run", "-"]
                continue
            line.append(score(entry, base, lambda run, task=task: statistics.scored(run.behind[kind]["tasks"][task])))
            line.append(_short(entry, task, each["items"]))
        lines.append(line)
    beyond = [
        percent(fmean(entry.first.behind[kind]["tasks"][task]["beyond_window"] for entry in measured)) for task in tasks
    ]
    short = [
        percent(fmean(entry.first.tasks[task]["beyond_window"] for entry in measured))
        if all(task in entry.first.tasks for entry in measured)
        else "-"
        for task in tasks
    ]
    lines.append(
        ["Positions that see beyond the window", *(cell for pair in zip(beyond, short, strict=True) for cell in pair)]
    )
    return header, lines


def _short(entry: Entry, task: str, items: int) -> str:
    """Percent right of the first `items` of the short task; a dash where fewer were measured."""
    correct = [statistics.scored(run.tasks[task])[:items] for run in entry.runs.values() if task in run.tasks]
    if not correct or any(len(each) < items for each in correct):
        return "-"
    return f"{100 * fmean(fmean(each) for each in correct):.1f}"


def _losses(entries: list[Entry], kind: str) -> tuple[list[str], list[list[str]]]:
    tasks = next(entry for entry in entries if entry.runs).first.behind[kind]["tasks"]
    lines = []
    for entry in entries:
        line, base = [entry.label], rows.reference(entries, entry)
        for task in tasks:
            if not entry.runs:
                line.append("not run")
                continue
            shown = f"{fmean(fmean(run.behind[kind]['tasks'][task]['losses']) for run in entry.runs.values()):.2f}"
            if base and entry is not base:
                changes = [
                    statistics.paired(*(each.behind[kind]["tasks"][task]["losses"] for each in pair))
                    for pair in rows.pairs(entry, base)
                ]
                values, errors = zip(*changes, strict=True)
                error = "" if None in errors else f" ± {fmean(errors):.2f}"
                shown += f"; change {fmean(values):+.2f}{error}"
            line.append(shown)
        lines.append(line)
    return ["Row", *(TASKS[task] for task in tasks)], lines
