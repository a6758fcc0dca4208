"""What an unfinished run has so far: its tables, figures, verdicts and page, each row that is missing said to be."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from focus.config import FIGURE_MODULES, TABLE_MODULES, Exhibit, Experiment
from focus.errors import UserError
from focus.paper import claims, dominance, report, rows


def write(experiment: Experiment, results: Path, claims_file: Path, captions: Path | None = None) -> Iterator[str]:
    """Write everything below the folder `results` that its results allow; yield a line about each table and figure.

    The exhibits of speed, groups, leak and bits need all of their results: the workflow makes them as soon as it can.
    """
    made = 0
    for kind, exhibits, modules in (
        ("tables", experiment.tables, TABLE_MODULES),
        ("figures", experiment.figures, FIGURE_MODULES),
    ):
        for name, exhibit in exhibits.items():
            state = _state(exhibit, experiment, results)
            if state:
                try:
                    module = import_module(modules[exhibit.shows])
                    module.write(name, exhibit, experiment, results, results / kind / name, partial=True)
                    made += 1
                except UserError as error:
                    state = f"left out: {error}"
            yield f"{kind}/{name}: {state or 'no results yet'}"
    if not made:
        raise UserError(f"{results}: expected results of the scale {experiment.scale}, found none")
    claims.write(claims_file, experiment, results, results / "claims.json", results / "claims.md", partial=True)
    report.write(results, results / "report", experiment=experiment, captions=captions)
    yield f"{results / 'report.html'}: verdicts, tables and figures of what there is"


def _state(exhibit: Exhibit, experiment: Experiment, results: Path) -> str:
    """How many rows have results, and how many of every seed; nothing where no row has."""
    if exhibit.shows == "dominance":
        drawn = dominance.lines(exhibit, experiment, results, partial=True)
        return f"{len(drawn)} curves from the logs of training" if drawn else ""
    entries = rows.gather(exhibit, experiment, results, partial=True)
    begun = sum(bool(entry.runs) for entry in entries)
    whole = sum(bool(entry.runs) and not entry.reason for entry in entries)
    return f"{begun} of {len(entries)} rows begun, {whole} with every seed" if begun else ""
