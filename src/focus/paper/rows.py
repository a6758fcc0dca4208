"""The results behind a table or a figure, gathered from result files alone.

Paths under the results of a scale: perplexity/{model}/{corpus}/{method}/{variant}/seed{seed}.json, downstream/,
generation/, long_inputs/ and recall/ alike, training/{model}/{corpus}/{method}/seed{seed}/result.json, and the
manifests models/{model}.json, corpora/{corpus}.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import get_type_hints

import pandas

from focus import jobs
from focus.config import Exhibit, Experiment, Row
from focus.errors import UserError
from focus.paper import printed, statistics
from focus.provenance import read_result
from focus.strict import Strict

TASKS = {
    "hellaswag": "HellaSwag",
    "arc_easy": "ARC-Easy",
    "piqa": "PIQA",
    "lambada": "LAMBADA",
    "truthfulqa_mc1": "TruthfulQA MC1",
    "gsm8k": "GSM8K",
}
JOBS = {
    **{"perplexity": jobs.perplexity_job, "downstream": jobs.downstream_job, "generation": jobs.generation_job},
    **{"long_inputs": jobs.long_inputs_job, "recall": jobs.recall_job},
}
COLUMNS = [
    *("model", "corpus", "row", "method", "variant", "seed", "metric", "value", "standard_error", "against"),
    *("paper_row", "paper"),
    *("not_run", "result", "code", "device", "dtype", "backend", "seconds", "peak_memory_mib"),
]


@dataclass(frozen=True)
class Run:
    """The results of one row with one seed: {experiment: result}, and {experiment: path below the results folder}."""

    results: dict[str, dict]
    paths: dict[str, str]

    @property
    def windows(self) -> list[dict]:
        """Scored windows of {document, start, tokens, loss_sum}."""
        return self.results["perplexity"]["metrics"]["windows"]

    @property
    def tasks(self) -> dict[str, dict]:
        """{task: {"items", "correct", "beyond_window", ...}} in the paper's order; empty without downstream results."""
        measured = self.results["downstream"]["metrics"]["tasks"] if "downstream" in self.results else {}
        return {task: measured[task] for task in TASKS if task in measured}

    @property
    def behind(self) -> dict[str, dict]:
        """{"text" or "examples": {"tokens", "tasks"}}, tasks as above; empty without results of long inputs."""
        return self.results["long_inputs"]["metrics"]["behind"] if "long_inputs" in self.results else {}

    @property
    def recalled(self) -> dict[str, list[dict]]:
        """{"needle" and "copy": summaries by length}; empty without results of recall."""
        return self.results["recall"]["metrics"] if "recall" in self.results else {}

    @property
    def trained(self) -> dict:
        """The metrics of training, with those of the probe if there was one; {} where nothing trains."""
        return self.results["training"]["metrics"] if "training" in self.results else {}

    @property
    def written(self) -> dict | None:
        """{"items", "correct", "correct_flexible", ...} of generation; None for what cannot generate."""
        metrics = self.results.get("generation", {}).get("metrics", {})
        return None if "reason" in metrics else metrics or None


@dataclass(frozen=True)
class Entry:
    """One row of an exhibit on one model: its run for each seed, or the reason why there is none.

    In a partial run a row may have some of its seeds; the reason then names the others.
    """

    model: str
    corpus: str
    row: Row
    label: str
    method_label: str
    kind: str
    runs: dict[int, Run] = field(default_factory=dict)
    reason: str = ""

    @property
    def first(self) -> Run:
        """The run with the lowest seed."""
        return self.runs[min(self.runs)]

    def mean(self, metric: str) -> float:
        """Mean over seeds of a scalar metric of the perplexity results."""
        return fmean(run.results["perplexity"]["metrics"][metric] for run in self.runs.values())

    def over_seeds(self, value: Callable[[Run], float | None]) -> list[float]:
        """A value of each run, without those that have none."""
        return [found for run in self.runs.values() if (found := value(run)) is not None]

    def against(self, reference: Entry) -> statistics.Ratio:
        """Perplexity over the reference's, paired by window or document, each seed with its own or the only one."""
        return statistics.combine(
            [statistics.compare(run.windows, base.windows) for run, base in pairs(self, reference)]
        )


def pairs(entry: Entry, reference: Entry) -> list[tuple[Run, Run]]:
    """Each run of the entry with the reference's run of the same seed, or with its first where it has no such seed."""
    return [(run, reference.runs.get(seed, reference.first)) for seed, run in entry.runs.items()]


def gather(exhibit: Exhibit, experiment: Experiment, root: Path, *, partial: bool = False) -> list[Entry]:
    """All rows of an exhibit, model by model in the order of the config.

    A model that this run leaves out becomes an entry with a reason. Raises UserError when a result is missing, unless
    `partial`: then the entry carries the reason, and the seeds that there are with the settings of this scale.
    """
    return [
        _entry(exhibit, experiment, Path(root), model, row, partial)
        for model in exhibit.models or experiment.models
        for row in exhibit.rows
    ]


def reference(entries: list[Entry], entry: Entry) -> Entry | None:
    """The pretrained row of the entry's model, text and context, or None when the exhibit has none with results."""
    return next((other for other in alongside(entries, entry) if other.kind == "pretrained" and other.runs), None)


def other_baseline(entries: list[Entry], entry: Entry) -> Entry | None:
    """The row of the same model, text and context that the paper's ratios there are taken over, with results or not.

    None where that is the pretrained row or none of the exhibit, and for a pretrained entry.
    """
    beside = alongside(entries, entry)
    own = printed.against(entry.row.paper) if entry.row.paper else None
    wanted = {own} if own else {printed.against(other.row.paper) for other in beside if other.row.paper} - {None}
    base = next((other for other in beside if other.row.paper in wanted), None)
    return None if base is None or "pretrained" in (base.kind, entry.kind) else base


def alongside(entries: list[Entry], entry: Entry) -> list[Entry]:
    """The rows of the entry's model, text and context, itself among them."""
    place = (entry.model, entry.corpus, entry.row.context)
    return [other for other in entries if (other.model, other.corpus, other.row.context) == place]


def frame(
    entries: list[Entry], more: Callable[[list[Entry], Entry, int], Iterator[dict]] | None = None
) -> pandas.DataFrame:
    """The entries as a tidy frame: one line per model, row, seed and metric, in full precision.

    `more` gives further lines {metric, value, standard_error, against} of an entry's seed from the perplexities.

    Accuracies and their changes are percent as in the paper; shares of pairs, tokens and positions are 0 to 1.
    `against` names the row that ratios and changes are taken over.
    """
    lines = []
    for entry in entries:
        known = {
            "model": entry.model,
            "corpus": entry.corpus,
            "row": entry.label,
            "method": entry.row.method,
            "variant": entry.row.variant,
            "paper_row": entry.row.paper,
        }
        if not entry.runs:
            lines.append(known | {"not_run": entry.reason})
        for seed, run in entry.runs.items():
            bases = reference(entries, entry), other_baseline(entries, entry)
            measured = list(_metrics(entry, run, *bases, seed))
            measured += [("perplexity", values) for values in (more(entries, entry, seed) if more else ())]
            lines += [known | {"seed": seed} | _origin(run, source) | values for source, values in measured]
    table = pandas.DataFrame(lines, columns=COLUMNS)
    return table.astype({"seed": "Int64"})


def printed_value(entry: Entry, column: str) -> float | None:
    """What the paper prints for the entry's row in a column, or None."""
    return printed.row(entry.row.paper).get(column) if entry.row.paper else None


def manifest(root: Path, kind: str, name: str) -> dict:
    """The manifest of a model or corpus ({} when it is not there): source, revision, licence, note."""
    path = Path(root) / kind / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def display_name(root: Path, model: str) -> str:
    """The model's name, called a stand-in where its manifest calls it one."""
    stands_in = manifest(root, "models", model).get("note", "").lower().startswith("stand-in")
    return f"{model} (stand-in)" if stands_in else model


def _entry(exhibit: Exhibit, experiment: Experiment, root: Path, model: str, row: Row, partial: bool) -> Entry:
    method = experiment.methods[row.method]
    attention = {"full": "", "soft": ", soft"}.get(row.attention, f", hard k={row.top_k}")
    corpus = row.corpus or exhibit.corpus
    details = [row.corpus, f"T={row.context}" if row.context else None]
    label = ", ".join([method.label + attention, *filter(None, details)])
    known = Entry(model, corpus, row, label, method.label, method.kind)
    if model not in experiment.models:
        return replace(known, reason="not run: this run leaves the model out")
    runs: dict[int, Run] = {}
    lacking: dict[int, list[str]] = {}
    for seed in experiment.seeds_of(model, row.method):
        cell = f"{model}/{corpus}/{row.method}"
        paths = {measure: f"{measure}/{cell}/{row.variant}/seed{seed}.json" for measure in exhibit.measures}
        missing = [path for path in paths.values() if not (root / path).exists()]
        if missing and not partial:
            raise UserError(f"{root / missing[0]}: expected the result of {known.label} on {model}, found none")
        place = (model, corpus, row.method, row.variant, seed)
        if partial and not missing:
            other = [
                path for name, path in paths.items() if _settings(root / path, name) != JOBS[name](experiment, *place)
            ]
            missing = [f"{path} with this scale's settings" for path in other]
        if missing:
            lacking[seed] = missing
            continue
        training = f"training/{cell}/seed{seed}/result.json"
        if (root / training).exists():
            paths["training"] = training
        runs[seed] = Run({name: _read(root / path, model, row, seed) for name, path in paths.items()}, paths)
    if not lacking:
        return replace(known, runs=runs)
    if not runs:
        return replace(known, reason=f"not run: no {', no '.join(next(iter(lacking.values())))}")
    seeds = f"seed{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))}"
    return replace(known, runs=runs, reason=f"{seeds} of {len(runs) + len(lacking)} not run yet")


def _read(path: Path, model: str, row: Row, seed: int) -> dict:
    result = read_result(path)
    settings = result["settings"]
    found = (settings.get("model"), settings.get("method"), settings.get("seed"))
    if found != (model, row.method, seed):
        raise UserError(f"{path}: expected a result of {model}, {row.method}, seed {seed}, got {found}")
    return result


def _settings(path: Path, measure: str) -> Strict:
    """The job that a result file says it is of."""
    return get_type_hints(JOBS[measure])["return"].model_validate(read_result(path)["settings"])


def _metrics(
    entry: Entry, run: Run, base: Entry | None, other_base: Entry | None, seed: int
) -> Iterator[tuple[str, dict]]:
    """(experiment, {metric, value, standard_error, against, paper}) for every number of one run."""
    metrics = run.results["perplexity"]["metrics"]
    yield _line("perplexity", "perplexity", *statistics.perplexity(run.windows), printed_value(entry, "perplexity"))
    paired = [("perplexity_ratio", base, None if other_base else printed_ratio(entry))]
    paired.append(("perplexity_ratio_to_baseline", other_base, printed_ratio(entry)))
    for metric, over, paper in paired:
        if over and over.runs and entry is not over:
            ratio = statistics.compare(run.windows, over.runs.get(seed, over.first).windows)
            yield _line("perplexity", metric, ratio.value, ratio.error, paper, against=over.label)
    yield _line("perplexity", "tokens", metrics["tokens"])
    yield _line("perplexity", "documents", len({window["document"] for window in run.windows}))
    for share in ("pairs_kept", "far_pairs_kept"):
        yield _line("perplexity", share, metrics[share])
    yield _line(
        "perplexity", "trained_parameters", metrics["trained_parameters"], None, printed_value(entry, "parameters")
    )
    for layer, values in enumerate(metrics.get("layers") or []):
        for name in ("dominance", "confidence"):
            if name in values:
                yield _line("perplexity", f"layer{layer}_{name}", values[name])
    yield from _items(entry, run, base, seed)
    if run.written:
        yield _line("generation", "gsm8k_flexible", 100 * run.written["accuracy_flexible"])
        yield _line("generation", "gsm8k_tokens_per_second", run.written["tokens_per_second"])
    for name in ("steps", "tokens", "final_loss", "dominance", "stability", "collapse_step"):
        if run.trained.get(name) is not None:
            yield _line("training", f"training_{name}", run.trained[name])


def _line(
    source: str, metric: str, value: float, error: float | None = None, paper: float | None = None, **known
) -> tuple[str, dict]:
    return source, {"metric": metric, "value": value, "standard_error": error, "paper": paper} | known


def _items(entry: Entry, run: Run, base: Entry | None, seed: int) -> Iterator[tuple[str, dict]]:
    """What `_metrics` yields of all that consists of items, with the change against `base`."""
    for source, task, values, before in _scored(run, base.runs.get(seed, base.first) if base else None):
        share, error = statistics.accuracy(statistics.scored(values))
        yield _line(source, task, 100 * share, error and 100 * error, printed_value(entry, task))
        yield _line(source, f"{task}_items", values["items"])
        if "beyond_window" in values:
            yield _line(source, f"{task}_beyond_window", values["beyond_window"])
        if "losses" in values:
            yield _line(source, f"{task}_loss", fmean(values["losses"]))
        if before and entry is not base:
            flips, over = statistics.flips(statistics.scored(values), statistics.scored(before)), base.label
            yield _line(source, f"{task}_change", 100 * flips.change, 100 * flips.error, against=over)
            yield _line(source, f"{task}_change_low", 100 * flips.low, against=over)
            yield _line(source, f"{task}_change_high", 100 * flips.high, against=over)
            yield _line(source, f"{task}_gained", flips.gained, against=over)
            yield _line(source, f"{task}_lost", flips.lost, against=over)
            yield _line(source, f"{task}_p_value", flips.p_value, against=over)
            if "losses" in values:
                change, error = statistics.paired(values["losses"], before["losses"])
                yield _line(source, f"{task}_loss_change", change, error, against=over)
    for copied in run.recalled.get("copy", []):
        name = f"copy_{copied['passage']}_{copied['length']}"
        yield _line("recall", f"{name}_change", copied["change"])
        yield _line("recall", name, 100 * copied["accuracy"])


def _scored(run: Run, other: Run | None) -> Iterator[tuple[str, str, dict, dict | None]]:
    """(experiment, task, values, the other run's values) for all that is scored item by item."""
    for task, values in run.tasks.items():
        yield "downstream", task, values, other and other.tasks.get(task)
    if run.written:
        yield "generation", run.written["task"], run.written, other and other.written
    for kind, behind in run.behind.items():
        before = other.behind[kind]["tasks"] if other else {}
        for task, values in behind["tasks"].items():
            yield "long_inputs", f"{task}_behind_{kind}", values, before.get(task)
    for place, found in enumerate(run.recalled.get("needle", [])):
        for name, key in (("needle", "correct"), ("needle_exact", "exact")):
            values, before = (
                each and {"items": len(found[key]), "correct": each.recalled["needle"][place][key]}
                for each in (run, other)
            )
            yield "recall", f"{name}_{found['length']}", values, before


def printed_ratio(entry: Entry) -> float | None:
    """The paper's perplexity over its own baseline's, or None."""
    base = printed.baseline(entry.row.paper) if entry.row.paper else None
    value = printed_value(entry, "perplexity")
    return value / base["perplexity"] if base and value is not None else None


def _origin(run: Run, source: str) -> dict:
    provenance = run.results[source]["provenance"]
    names = ("code", "device", "dtype", "backend", "seconds", "peak_memory_mib")
    return {"result": run.paths[source]} | {name: provenance.get(name) for name in names}
