"""Tables from result files: CSV for machines; Markdown, HTML and LaTeX for people, each number beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from focus.config import Exhibit, Experiment
from focus.paper import layout, printed, rows, statistics
from focus.paper.layout import Grid
from focus.paper.rows import TASKS, Entry, Run
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
        for grid in _of_model(model, entries, exhibit, results_root)
    ]
    grids += _uncovered(table, exhibit, experiment)
    notes = _notes(entries, exhibit, experiment, results_root)
    write_atomically(Path(f"{output_prefix}.csv"), rows.frame(entries).to_csv(index=False))
    write_atomically(Path(f"{output_prefix}.md"), layout.markdown(exhibit.title, grids, notes))
    write_atomically(Path(f"{output_prefix}.html"), layout.page(exhibit.title, grids, notes))
    write_atomically(Path(f"{output_prefix}.tex"), layout.latex(table, exhibit.title, grids, notes))


def number(value: float, error: float | None = None) -> str:
    """A value and its error with the same decimals: two below 100, one below 1000, none above."""
    decimals = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{decimals}f}" + ("" if error is None else f" ± {error:,.{decimals}f}")


def ratios(values: list[statistics.Ratio | None]) -> list[str]:
    """A column of ratios and their spread over seeds: three decimals, or the four that its smallest error needs."""
    small = any(value and value.error and value.error < 0.0005 for value in values)
    decimals = 4 if small else 3
    shown = []
    for value in values:
        error = "" if value is None or value.error is None else f" ± {value.error:.{decimals}f}"
        spread = "" if value is None else _spread(value.spread, value.seeds, decimals)
        shown.append("-" if value is None else f"{value.value:.{decimals}f}{error}{spread}")
    return shown


def paper_number(value: float | None) -> str:
    """A printed number as printed, or a dash where the paper prints none."""
    return "-" if value is None else f"{value:g}"


def paper_ratio(value: float | None) -> str:
    """A ratio of printed perplexities."""
    return "-" if value is None else f"{value:.3f}"


def percent(share: float) -> str:
    """A share of 0 to 1 as percent."""
    return f"{100 * share:.1f} %"


def sentence(note: str) -> str:
    """A registry's note as a sentence."""
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def _of_model(model: str, entries: list[Entry], exhibit: Exhibit, root: Path) -> list[Grid]:
    mine = [entry for entry in entries if entry.model == model]
    lines = _measured_on(mine, rows.manifest(root, "models", model))
    name = rows.display_name(root, model)
    grids = [Grid(f"{name}: {TITLES[exhibit.columns[0]]}", *_columns(mine, exhibit.columns), lines)]
    if exhibit.downstream and any(entry.runs for entry in mine):
        grids.append(Grid(f"{name}: accuracy, percent", *_accuracy(mine)))
    if exhibit.generation and any(run.written for entry in mine for run in entry.runs.values()):
        grids.append(_generation(name, mine))
    return grids


def _columns(entries: list[Entry], columns: list[str]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: the rows' labels, and each of the exhibit's columns with what the paper prints for it."""
    header, lines = ["Row"], [[entry.label] for entry in entries]
    for column in columns:
        for title, cells in COLUMNS[column](entries):
            header.append(title)
            for line, cell in zip(lines, cells, strict=True):
                line.append(cell)
    return header, lines


def _perplexity(entries: list[Entry]) -> Iterator[tuple[str, list[str]]]:
    measured = [[statistics.perplexity(run.windows) for run in entry.runs.values()] for entry in entries]
    cells, spreads = [], []
    for each in measured:
        values, errors = zip(*each, strict=True) if each else ((), ())
        cells.append(number(fmean(values), None if None in errors else fmean(errors)) if each else "not run")
        spreads.append(f"± {number(statistics.spread(values))} ({len(values)})" if len(values) > 1 else "-")
    yield "Perplexity", cells
    if any(len(each) > 1 for each in measured):
        yield "Over seeds", spreads
    yield from _paper(entries, "perplexity", "Paper's perplexity")


def _ratio(entries: list[Entry]) -> Iterator[tuple[str, list[str]]]:
    changes = []
    for entry in entries:
        base = rows.reference(entries, entry)
        changes.append(entry.against(base) if base and entry.runs and entry is not base else None)
    yield "Ratio to pretrained", ratios(changes)
    if any(rows.printed_ratio(entry) is not None for entry in entries):
        yield "Paper's ratio", [paper_ratio(rows.printed_ratio(entry)) for entry in entries]


def _far_pairs(entries: list[Entry]) -> Iterator[tuple[str, list[str]]]:
    yield "Far pairs kept", [percent(entry.mean("far_pairs_kept")) if entry.runs else "-" for entry in entries]


def _parameters(entries: list[Entry]) -> Iterator[tuple[str, list[str]]]:
    cells = [f"{entry.mean('trained_parameters'):,.0f}" if entry.runs else "-" for entry in entries]
    yield "Trained parameters", cells


def _dominance(entries: list[Entry]) -> Iterator[tuple[str, list[str]]]:
    yield "Largest group", [_over_seeds(entry.over_seeds(_largest_group), percent) for entry in entries]
    yield from _paper(entries, "dominance", "Paper's largest group, percent")


def _stability(entries: list[Entry]) -> Iterator[tuple[str, list[str]]]:
    values = [entry.over_seeds(lambda run: _trained_metric(run, "stability")) for entry in entries]
    yield "Stability", [_over_seeds(each, "{:.3f}".format) for each in values]
    yield from _paper(entries, "stability", "Paper's stability")


def _collapse(entries: list[Entry]) -> Iterator[tuple[str, list[str]]]:
    values = [entry.over_seeds(lambda run: _trained_metric(run, "collapse_step")) for entry in entries]
    yield "Collapsed at step", [_over_seeds(each, "{:.0f}".format) for each in values]
    if any(rows.printed_value(entry, "outcome") for entry in entries):
        yield "Paper's outcome", [rows.printed_value(entry, "outcome") or "-" for entry in entries]


COLUMNS = {
    "perplexity": _perplexity,
    "ratio": _ratio,
    "far_pairs": _far_pairs,
    "parameters": _parameters,
    "dominance": _dominance,
    "stability": _stability,
    "collapse": _collapse,
}
TITLES = {"dominance": "balance of the groups", "collapse": "balance of the groups"} | {
    name: "perplexity" for name in ("perplexity", "ratio", "far_pairs", "parameters", "stability")
}


def _paper(entries: list[Entry], metric: str, title: str) -> Iterator[tuple[str, list[str]]]:
    """The paper's column, if it prints anything for these rows."""
    values = [rows.printed_value(entry, metric) for entry in entries]
    if any(value is not None for value in values):
        yield title, [paper_number(value) for value in values]


def _largest_group(run: Run) -> float | None:
    layers = run.results["perplexity"]["metrics"].get("layers") or []
    values = [layer["dominance"] for layer in layers if "dominance" in layer]
    return fmean(values) if values else None


def _trained_metric(run: Run, metric: str) -> float | None:
    return run.results["training"]["metrics"].get(metric) if "training" in run.results else None


def _over_seeds(values: list[float], shown: Callable[[float], str]) -> str:
    if len(values) < 2:
        return shown(values[0]) if values else "-"
    return f"{shown(fmean(values))} ± {shown(statistics.spread(values))} ({len(values)})"


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
            score = _score(entry, base, _right(task)) if entry.runs else "not run"
            line += [score, _paper_score(entry, task)]
        lines.append(line)
    beyond = {
        task: fmean(entry.first.tasks[task]["beyond_window"] for entry in entries if entry.runs) for task in tasks
    }
    lines.append(
        ["Positions that see beyond the window", *(cell for task in tasks for cell in (percent(beyond[task]), "-"))]
    )
    return header, lines


def _paper_score(entry: Entry, task: str) -> str:
    """The printed accuracy, or the printed change of it with its sign."""
    change = rows.printed_value(entry, f"{task}_change")
    return paper_number(rows.printed_value(entry, task)) if change is None else f"change {change:+g}"


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
        strict = _score(entry, base, lambda run: run.written["correct"])
        flexible = _score(entry, base, lambda run: run.written["correct_flexible"])
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


def _score(entry: Entry, base: Entry | None, correct: Callable[[Run], list[int]]) -> str:
    """Accuracy in percent, and its change against `base`, of what `correct` finds in a run."""
    measured = [statistics.accuracy(correct(run)) for run in entry.runs.values()]
    values, errors = zip(*measured, strict=True)
    shown = f"{100 * fmean(values):.1f}" + ("" if None in errors else f" ± {100 * fmean(errors):.1f}")
    shown += _spread(statistics.spread([100 * value for value in values]), len(values), 1)
    if base is None or entry is base:
        return shown
    change = statistics.mean_change(
        [statistics.flips(correct(run), correct(other)) for run, other in rows.pairs(entry, base)]
    )
    mean, low, high = (f"{100 * share:+z.1f}" for share in (change.value, change.low, change.high))
    chance = f"{change.p_value:.2f}" if change.p_value >= 0.01 else f"{change.p_value:.0e}"
    return f"{shown}; change {mean} [{low}, {high}] (+{change.gained:.3g} -{change.lost:.3g}), p={chance}"


def _spread(deviation: float | None, seeds: int, decimals: int) -> str:
    """What follows a mean over several seeds: the standard deviation over them."""
    return "" if deviation is None else f", seeds ± {deviation:.{decimals}f} ({seeds})"


def _measured_on(entries: list[Entry], manifest: dict) -> list[str]:
    """What a model's numbers were measured with, from the results themselves; and why rows are missing."""
    lines = [sentence(manifest["note"])] if manifest.get("note") else []
    run = next((entry.first for entry in entries if entry.runs), None)
    if run:
        result = run.results["perplexity"]
        metrics, settings, provenance = result["metrics"], result["settings"]["model_settings"], result["provenance"]
        documents = sorted({window["document"] for window in run.windows})
        held_out = ", ".join(documents) if len(documents) <= 4 else f"{len(documents)} documents"
        lines.append(
            f"Context {metrics['context']}, window {settings['window']}, stride {metrics['stride']}; "
            f"{len(run.windows)} windows, {metrics['tokens']:,} tokens scored, from held-out {held_out}; "
            f"{provenance['dtype']} on {provenance['device']}. Standard errors are over "
            f"{statistics.units(run.windows)} ({len(documents)} held-out documents)."
        )
    adapters = [line for entry in entries if (line := _adapter(entry))]
    if adapters:
        lines.append("Adapters: " + "; ".join(dict.fromkeys(adapters)) + ".")
    trained = [line for entry in entries if (line := _trained(entry))]
    if trained:
        lines.append("Trained: " + "; ".join(dict.fromkeys(trained)) + ".")
    lines += dict.fromkeys(f"{entry.label}: {entry.reason}." for entry in entries if entry.reason)
    return lines


def _adapter(entry: Entry) -> str | None:
    """What distinguishes a row's adapter from the paper's: groups, gate, balance, sinks."""
    adapter = entry.first.results["perplexity"]["settings"]["settings"].get("adapter") if entry.runs else None
    if adapter is None:
        return None
    return (
        f"{entry.method_label}: K={adapter['groups']}, gate {adapter['gate']}, balance {adapter['balance']}, "
        f"{adapter['sinks'] or 'no'} sinks"
    )


def _trained(entry: Entry) -> str | None:
    """How a row was trained: steps, rate, tokens and seeds."""
    if not entry.runs:
        return None
    settings = entry.first.results["perplexity"]["settings"]
    training = settings["settings"]["training"]
    if training is None:
        return None
    name = entry.method_label
    phases = " then ".join(
        f"{phase['steps']} steps of {phase['trains']} at {phase['learning_rate']:g}"
        for phase in training["phases"]
        if phase["steps"]
    )
    if not phases:
        return f"{name}: not at all"
    batch = training["batch_size"] * training["accumulation"]
    tokens = sum(phase["steps"] for phase in training["phases"]) * batch * settings["model_settings"]["context"]
    seeds = ", ".join(str(seed) for seed in entry.runs)
    return f"{name}: {phases}, {tokens:,} tokens, seed{'s' * (len(entry.runs) > 1)} {seeds}"


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


def _notes(entries: list[Entry], exhibit: Exhibit, experiment: Experiment, root: Path) -> list[str]:
    paper = printed.printed().get(next((row.paper for row in exhibit.rows if row.paper), "").partition(".")[0])
    corpus = rows.manifest(root, "corpora", exhibit.corpus)
    notes = [
        f"Scale `{experiment.scale}`; text `{exhibit.corpus}`"
        + (f" ({corpus['note'].rstrip('.')})." if corpus.get("note") else ".")
    ]
    if paper:
        steps = f", {paper['steps']} steps" if paper["steps"] else ""
        notes.append(
            f"The paper's numbers are from {paper['model']} on {paper['corpus']}, context {paper['context']}, window "
            f"{paper['window']}{steps}: other models and text, so compare changes and orderings, not perplexities."
        )
    seeds = {
        len(entry.runs)
        for entry in entries
        if entry.runs and entry.first.results["perplexity"]["settings"]["settings"]["training"]
    }
    if seeds == {1}:
        notes.append("One seed, so no spread over seeds.")
    elif seeds:
        notes.append(
            "Over seeds, and seeds ±: standard deviation (number of seeds), nothing where nothing trains. Other values "
            "are means over seeds. The error of a ratio and the interval of a change hold what varies within a seed "
            "and the error of a mean of so many seeds."
        )
    notes += [
        f"± of a perplexity: standard error over documents where at least {statistics.ENOUGH} are held out, else over "
        "windows. Ratio to pretrained: its standard error comes from differences paired in the same way.",
        "Far pairs kept: of the causal pairs farther apart than the window, the share attended, sinks included. The "
        "soft gate weighs every pair and computes all.",
    ]
    if exhibit.downstream:
        notes.append(
            "Accuracy is length-normalised where lm-eval has it (not LAMBADA, TruthfulQA), as in the printed rows. "
            "± of an accuracy: standard error over items. Change against pretrained: in points, with its 95 % interval "
            "(Tango's paired score interval, or the exact conditional one where that is wider), items (+gained -lost), "
            "and the exact two-sided McNemar test's p (of several seeds, twice its mean). Where few positions see "
            "beyond the window, hardly any item can change, whatever the groups."
        )
    return notes
