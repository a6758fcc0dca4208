"""The readings of Eq. 2 beside one another: perplexity, and what each gate gives to near and to far pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pandas

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.paper import captions, layout, rows, tables
from focus.paper.formats import either, mean_over_seeds, percent
from focus.paper.layout import Grid
from focus.paper.rows import Entry
from focus.provenance import read_result, write_atomically

FORMS = {
    "printed": "score * sigmoid(lam a)",
    "centred": "score * sigmoid(lam (a - 1/2))",
    "log_sigmoid": "weight * sigmoid(lam (a - 1/2))",
    "exponential": "weight * exp(lam (a - 1))",
}
"""What a far pair is multiplied by, a being its affinity g_i . g_j."""
PAIRS = ("near", "far")
LEVELS = ("5", "25", "50", "75", "95")


@dataclass(frozen=True)
class Gate:
    """What one method's gate gives on one model: the soft row it was looked at in, and for each seed what was found."""

    entry: Entry
    found: dict[int, dict]
    paths: dict[int, str]

    @property
    def name(self) -> str:
        """printed, centred, log_sigmoid or exponential."""
        return next(iter(self.found.values()))["gate"]

    def mean(self, pairs: str, *keys: str) -> float:
        """Mean over seeds of a number of the near or far pairs."""
        return fmean(self._each(pairs, *keys))

    def shown_mean(self, pairs: str) -> str:
        """The mean gate value, with its spread over seeds, or the error over windows of the only seed."""
        values, errors = self._each(pairs, "mean"), self._each(pairs, "mean_error")
        if len(values) == 1 and errors[0] is not None:
            return f"{_value(values[0])} ± {_value(errors[0])}"
        return mean_over_seeds(values, _value)

    def _each(self, pairs: str, *keys: str) -> list:
        values = [found[pairs] for found in self.found.values()]
        for key in keys:
            values = [value[key] for value in values]
        return values


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
    found = gather(entries, results_root)
    grids = []
    for model in exhibit.models or experiment.models:
        grids += tables.of_model(model, entries, exhibit, results_root)
        mine = [gate for gate in found if gate.entry.model == model]
        grids += [_grid(rows.display_name(results_root, model), mine)] if mine else []
    notes = captions.notes(entries, exhibit, experiment, results_root) + (_notes(found) if found else [])
    write_atomically(Path(f"{output_prefix}.csv"), frame(entries, found).to_csv(index=False))
    write_atomically(Path(f"{output_prefix}.md"), layout.markdown(exhibit.title, grids, notes))
    write_atomically(Path(f"{output_prefix}.html"), layout.page(exhibit.title, grids, notes))
    write_atomically(Path(f"{output_prefix}.tex"), layout.latex(table, exhibit.title, grids, notes))


def gather(entries: list[Entry], root: Path) -> list[Gate]:
    """The gate of every soft row with results. Raises UserError when what was found in one is missing."""
    gates = []
    for entry in entries:
        if entry.row.attention != "soft" or not entry.runs:
            continue
        cell = f"gates/{entry.model}/{entry.corpus}/{entry.row.method}/{entry.row.variant}"
        paths = {seed: f"{cell}/seed{seed}.json" for seed in entry.runs}
        gates.append(Gate(entry, {seed: _read(Path(root) / path) for seed, path in paths.items()}, paths))
    return gates


def frame(entries: list[Entry], found: list[Gate]) -> pandas.DataFrame:
    """The rows' tidy frame, and below it every gate's numbers as near_mean, far_quantile_5, ..., shares of 0 to 1."""
    lines = []
    for gate in found:
        entry = gate.entry
        known = {"model": entry.model, "corpus": entry.corpus, "row": entry.label, "method": entry.row.method}
        for seed, values in gate.found.items():
            where = known | {"variant": entry.row.variant, "seed": seed, "result": gate.paths[seed]}
            for pairs in PAIRS:
                own = values[pairs]
                numbers = {name: own[name] for name in ("mean", "below_low", "above_high", "affinity", "pairs")}
                numbers |= {f"quantile_{level}": value for level, value in own["quantiles"].items()}
                for name, value in numbers.items():
                    error = own["mean_error"] if name == "mean" else None
                    lines.append(where | {"metric": f"{pairs}_{name}", "value": value, "standard_error": error})
            for layer, means in enumerate(values["layers"]):
                lines += [where | {"metric": f"layer{layer}_{name}", "value": value} for name, value in means.items()]
    measured = rows.frame(entries)
    if not lines:
        return measured
    return pandas.concat([measured, pandas.DataFrame(lines).astype({"seed": "Int64"})])[rows.COLUMNS]


def _read(path: Path) -> dict:
    result = read_result(path)
    if result["experiment"] != "gates":
        raise UserError(f"{path}: expected the result of focus gate-values, got one of {result['experiment']}")
    return result["metrics"]


def _grid(name: str, found: list[Gate]) -> Grid:
    header = ["Row", "The gate", "Pairs", *(f"{level} %" for level in LEVELS), "Mean", "Below 0.1", "Above 0.9"]
    lines = []
    for gate in found:
        for pairs in PAIRS:
            line = [gate.entry.method_label, FORMS[gate.name], pairs]
            line += [_value(gate.mean(pairs, "quantiles", level)) for level in LEVELS]
            shares = (percent(gate.mean(pairs, share)) for share in ("below_low", "above_high"))
            lines.append([*line, gate.shown_mean(pairs), *shares])
    return Grid(f"{name}: what the gate gives", header, lines, text=3)


def _value(value: float) -> str:
    """Three decimals, or one digit of what is smaller."""
    return f"{value:.3f}" if value >= 0.001 or not value else f"{value:.1g}"


def _notes(found: list[Gate]) -> list[str]:
    results = [values for gate in found for values in gate.found.values()]
    windows, steepness, context = (
        sorted({read(result) for result in results})
        for read in (lambda r: len(r["windows"]), lambda r: f"{r['steepness']:g}", lambda r: r["context"])
    )
    return [
        f"What the gate gives: over all layers and {either(windows)} held-out windows of {either(context)} tokens, "
        f"lam={either(steepness)}; a is the affinity g_i . g_j of the soft assignments. Near: 0 <= i - j <= w, a token "
        "with itself included, where the value is computed but not applied. Far: the pairs it is applied to, which are "
        "farther apart and not to a sink. Columns in percent: quantiles; ± of one seed: standard error over windows.",
        "Log-sigmoid and exponential gates multiply the pair's weight before the softmax's sum, since score + log g "
        "is weight * g: 0 prunes. The printed and centred gates multiply the score s, which multiplies the weight by "
        "exp((g - 1) s): smaller where s > 0, larger where s < 0, and for g = 0 it is the weight of a score of 0, so "
        "neither prunes; the printed gate is never below 1/2.",
    ]
