"""Tables from result files: CSV for machines; Markdown, HTML and LaTeX for people, each number beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from focus.config import Exhibit, Experiment
from focus.paper import captions, columns, contrast, gain, layout, long_inputs, printed, recall, rows, statistics
from focus.paper.formats import number, paper_number, paper_ratio, percent
from focus.paper.layout import Grid
from focus.paper.rows import TASKS, Entry, Run
from focus.paper.scores import score
from focus.provenance import write_atomically


def write(
    table: str,
    exhibit: Exhibit,
    experiment: Experiment,
    results_root: Path,
    output_prefix: Path,
    *,
    partial: bool = False,
) -> None:
    """Write `output_prefix`.csv, .md, .html and .tex.

    Raises UserError when a result is missing, unless `partial`: then its row says "not run" and why.
    """
    entries = rows.gather(exhibit, experiment, results_root, partial=partial)
    grids = [
        grid
        for model in exhibit.models or experiment.models
        for grid in of_model(model, entries, exhibit, results_root)
    ]
    grids += _uncovered(table, exhibit, experiment)
    notes = captions.notes(entries, exhibit, experiment, results_root)
    more = gain.measured if {"gain", "absorption"} & set(exhibit.columns) else None
    write_atomically(Path(f"{output_prefix}.csv"), rows.frame(entries, more).to_csv(index=False))
    write_atomically(Path(f"{output_prefix}.md"), layout.markdown(exhibit.title, grids, notes))
    write_atomically(Path(f"{output_prefix}.html"), layout.page(exhibit.title, grids, notes))
    write_atomically(Path(f"{output_prefix}.tex"), layout.latex(table, exhibit.title, grids, notes))


def of_model(model: str, entries: list[Entry], exhibit: Exhibit, root: Path) -> list[Grid]:
    """A model's rows as grids: perplexity, then accuracy and answers where they are measured."""
    mine = [entry for entry in entries if entry.model == model]
    lines = captions.measured_on(mine, rows.manifest(root, "models", model))
    name = rows.display_name(root, model)
    grids = [Grid(f"{name}: {columns.TITLES[exhibit.columns[0]]}", *columns.grid(mine, exhibit.columns), lines)]
    if exhibit.downstream and any(entry.runs for entry in mine):
        grids.append(Grid(f"{name}: accuracy, percent", *_accuracy(mine)))
        if exhibit.control and not exhibit.long_inputs:
            title = f"{name}: accuracy against a control"
            grids += filter(None, [contrast.grid(title, mine, exhibit.control, lambda run: run.tasks)])
    if exhibit.generation and any(run.written for entry in mine for run in entry.runs.values()):
        grids.append(_generation(name, mine))
    return [*grids, *long_inputs.grids(name, mine, exhibit.control), *recall.grids(name, mine)]


def _accuracy(entries: list[Entry]) -> tuple[list[str], list[list[str]]]:
    measured = [entry.first.tasks for entry in entries if entry.runs]
    tasks = {task: values for task, values in measured[0].items() if all(task in each for each in measured)}
    items = {task: values["items"] for task, values in tasks.items()}
    header = ["Row", *(cell for task in tasks for cell in (f"{TASKS[task]} (n={items[task]})", "paper"))]
    lines = []
    for entry in entries:
        line = [entry.label]
        for task in tasks:
            base = rows.reference(entries, entry)
            shown = score(entry, base, _right(task)) if entry.runs else "not run"
            line += [shown, _paper_score(entry, task)]
        lines.append(line)
    for title, share in (
        ("Positions that see beyond the window", "beyond_window"),
        ("Scored positions that do", "scored_beyond_window"),
    ):
        cells = (percent(value) if (value := _mean(entries, task, share)) is not None else "-" for task in tasks)
        lines.append([title, *(each for cell in cells for each in (cell, "-"))])
    return header, lines


def _mean(entries: list[Entry], task: str, name: str) -> float | None:
    """Over the rows that hold it; None without one."""
    found = [entry.first.tasks[task][name] for entry in entries if entry.runs and name in entry.first.tasks[task]]
    return fmean(found) if found else None


def _paper_score(entry: Entry, task: str) -> str:
    """The printed accuracy, or the printed change of it with its sign."""
    change = rows.printed_value(entry, f"{task}_change")
    return paper_number(rows.printed_value(entry, task)) if change is None else f"change {change:+}"


def _right(task: str) -> Callable[[Run], list[int]]:
    return lambda run: statistics.scored(run.tasks[task])


def _generation(name: str, entries: list[Entry]) -> Grid:
    """GSM8K by both of lm-eval's filters, and how fast the answers were written."""
    written = next(run.written for entry in entries for run in entry.runs.values() if run.written)
    header = ["Row", 'After "The answer is"', "paper", "Last number", "Tokens per second"]
    lines = []
    for entry in entries:
        paper = paper_number(rows.printed_value(entry, written["task"]))
        if not entry.runs or not entry.first.written:
            lines.append([entry.label, "cannot generate" if entry.runs else "not run", paper, "-", "-"])
            continue
        base = rows.reference(entries, entry)
        strict = score(entry, base, lambda run: run.written["correct"])
        flexible = score(entry, base, lambda run: run.written["correct_flexible"])
        speed = fmean(run.written["tokens_per_second"] for run in entry.runs.values())
        lines.append([entry.label, strict, paper, flexible, number(speed)])
    title = f"{name}: {TASKS[written['task']]}, {written['shots']}-shot, {written['items']} items, percent"
    settings = next(run for entry in entries for run in entry.runs.values()).results["generation"]["settings"]
    about = (
        f"Greedy answers of at most {settings['generation']['max_new_tokens']} tokens in a context of "
        f"{written['context']}, by lm-eval's `gsm8k_cot`; {written['prompts_cut'] or 'no'} prompts lost their "
        f"beginning to fit; {percent(written['beyond_window'])} of the positions see beyond the window of "
        f"{settings['model_settings']['window']}. Tokens per second include reading the prompt."
    )
    return Grid(title, header, lines, [about])


def _uncovered(table: str, exhibit: Exhibit, experiment: Experiment) -> list[Grid]:
    """The paper's rows that no row here stands for: said, not left out."""
    named = {row.paper for row in exhibit.rows}
    lines = []
    for reference, row in printed.rows_of(table).items():
        if reference not in named:
            base = printed.baseline(reference)
            value = row.get("perplexity")
            change = paper_ratio(value / base["perplexity"] if base and value else None)
            lines.append([row["label"], paper_number(value), change, "not run"])
    if not lines:
        return []
    why = f"Nothing in the scale `{experiment.scale}` stands for these rows."
    return [Grid("The paper's other rows", ["Row", "Paper's perplexity", "Paper's ratio", "Here"], lines, [why])]
