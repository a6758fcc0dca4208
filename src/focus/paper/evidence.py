"""The cases behind a verdict: what rows, timings, other result files or arithmetic say of a claim, seed by seed.

A case is {model, corpus, verdict, reason, seeds: {seed: {verdict, measured}}, results}; without seeds it is not run,
and the reason says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from focus.config import Experiment
from focus.paper import arithmetic, gain, rows, speed, statistics
from focus.paper.claim import BY_TASK, TRAINED, Claim
from focus.paper.formats import either
from focus.paper.rows import Entry, Run
from focus.paper.statistics import Measured
from focus.paper.verdicts import agreed, judge, worst

HERE = "this machine"
COMPUTED = "arithmetic"
UNPLANNED = "this scale has no"


@dataclass(frozen=True)
class Evidence:
    """What a scale has: its rows by (model, corpus, "method/variant"), and the timing of attention alone, if any.

    beside: the rows of each exhibit that compares them with one another, by the column that does (gain.SHOWN_BY).
    """

    experiment: Experiment
    root: Path
    entries: dict[tuple, Entry]
    timed: dict | None
    beside: dict[str, list[list[Entry]]] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """What a run that is not finished lacks; empty for a finished one."""
        some = sum(bool(entry.runs and entry.reason) for entry in self.entries.values())
        none = sum(not entry.runs for entry in self.entries.values())
        if not some and not none:
            return ""
        without = f" and {none} have no result yet" if none else ""
        return (
            f"The run is not finished: {some} of {len(self.entries)} rows lack a seed or a measurement{without}; "
            "verdicts rest on what there is."
        )


def gather(experiment: Experiment, root: Path, partial: bool) -> Evidence:
    """All rows of all exhibits, each with every measure that some exhibit takes of it.

    A figure of dominance has no rows with results, and one that this run does not make has none here. Raises UserError
    when a result is missing, unless `partial`.
    """
    found: dict[tuple, Entry] = {}
    beside: dict[str, list[list[Entry]]] = {}
    exhibits = [*experiment.tables.values(), *experiment.figures.values()]
    for exhibit in [each for each in exhibits if each.shows != "dominance" and experiment.made(each)]:
        entries = rows.gather(exhibit, experiment, root, partial=partial)
        for column in set(gain.SHOWN_BY.values()) & set(exhibit.columns):
            beside.setdefault(column, []).append(entries)
        for entry in entries:
            key = (entry.model, entry.corpus, f"{entry.row.method}/{entry.row.variant}")
            found[key] = _merged(found[key], entry) if key in found else entry
    path = Path(root) / speed.RESULT
    timed = speed.load(path) if experiment.speed and (path.exists() or not partial) else None
    return Evidence(experiment, Path(root), found, timed, beside)


def _merged(entry: Entry, other: Entry) -> Entry:
    """One row in two exhibits: what either measures; the reason is of what is missing in one of them."""
    runs = {
        seed: Run(
            {name: result for each in (entry, other) for name, result in _of(each, seed).results.items()},
            {name: path for each in (entry, other) for name, path in _of(each, seed).paths.items()},
        )
        for seed in {**entry.runs, **other.runs}
    }
    return replace(entry, runs=runs, reason=entry.reason or other.reason)


def _of(entry: Entry, seed: int) -> Run:
    return entry.runs.get(seed, Run({}, {}))


def empty_case(model: str, corpus: str, reason: str) -> dict:
    """A case that is not run."""
    return {"model": model, "corpus": corpus, "verdict": "not run", "reason": reason, "seeds": {}, "results": []}


def judged(
    claim: Claim, measured: list[Measured], comparable: bool, seen: Callable[[Measured], dict] = lambda _: {}
) -> dict:
    """One seed: its verdict, and each number with its own, beside what else was `seen` of it."""
    each = [
        one._asdict()
        | {"verdict": judge(claim, one.value, one.error, of=len(measured)) if comparable else "not comparable"}
        | seen(one)
        for one in measured
    ]
    return {"verdict": worst([one["verdict"] for one in each]), "measured": each}


def of_rows(claim: Claim, evidence: Evidence) -> list[dict]:
    """A case for each model and corpus that the claim is about."""
    cases: dict[str, list[dict]] = {}
    for model, corpus in dict.fromkeys(key[:2] for key in evidence.entries):
        if claim.only_models and model not in claim.only_models:
            continue
        if claim.only_corpora and corpus not in claim.only_corpora:
            continue
        subject = evidence.entries.get((model, corpus, claim.subject))
        reference = evidence.entries.get((model, corpus, claim.reference)) if claim.reference else None
        needed = {claim.subject: subject} | ({claim.reference: reference} if claim.reference else {})
        reason = _why_not(claim, model, needed)
        case = empty_case(model, corpus, reason)
        cases.setdefault(model, []).append(
            case if reason else case | _row_case(claim, model, corpus, subject, reference)
        )
    found = [case for mine in cases.values() for case in _planned(mine)]
    return found or [empty_case("", "", f"this scale covers no {either(claim.only_models or claim.only_corpora)}")]


def _planned(cases: list[dict]) -> list[dict]:
    """A model's cases without the texts on which this scale does not measure it, or the first if it does on none."""
    return [case for case in cases if not case["reason"].startswith(UNPLANNED)] or cases[:1]


def of_gains(claim: Claim, evidence: Evidence) -> list[dict]:
    """A case for each exhibit and model that has the claim's row beside those its gain or lead is measured on."""
    column = gain.SHOWN_BY[claim.metric]
    found = [
        _gain_case(claim, entries, entry)
        for entries in evidence.beside.get(column, [])
        for entry in entries
        if f"{entry.row.method}/{entry.row.variant}" == claim.subject
        and (not claim.only_models or entry.model in claim.only_models)
    ]
    return found or [empty_case("", "", f"{UNPLANNED} row {claim.subject} in a table of {column}")]


def _gain_case(claim: Claim, entries: list[Entry], entry: Entry) -> dict:
    """The verdict on one model; not run where the row, or one that it is measured on, has no results or no gain."""
    missing = next((each.reason for each in (entry, *entries) if not each.runs and each.model == entry.model), "")
    reason = entry.reason if not entry.runs else "; ".join(filter(None, ["no gain or lead to measure it on", missing]))
    case = empty_case(entry.model, entry.corpus, reason.replace("not run: ", ""))
    if missing and claim.metric == "left_to_learning":
        return case
    seeds, paths = {}, []
    for seed in sorted(entry.runs):
        if (found := gain.judged_by(entries, entry, seed, claim.metric)) is None:
            return case
        measured, behind = found
        seeds[str(seed)] = judged(claim, [measured], comparable=True)
        paths += [run.paths["perplexity"] for each in behind for run in each.runs.values()]
    verdict = agreed([each["verdict"] for each in seeds.values()], "seeds")
    if not verdict:
        return case
    return case | {"verdict": verdict, "reason": "", "seeds": seeds, "results": list(dict.fromkeys(paths))}


def of_attention(claim: Claim, evidence: Evidence) -> list[dict]:
    """One case: attention alone on this machine, at every length, group count and thread count of the claim."""
    timed, planned = evidence.timed, evidence.experiment.speed
    case = empty_case(HERE, "random", f"no {speed.RESULT}" if planned else "this scale times nothing")
    if timed is None:
        return [case]
    processor = timed["provenance"]["processor"].lower()
    comparable = claim.kind != "value" or any(name in processor for name in claim.models)
    measured = speed.measured(timed, claim.metric, claim.subject, claim.shortest, claim.longest)
    if not measured:
        return [case | {"reason": f"this scale does not time {claim.subject}{lengths(claim.shortest, claim.longest)}"}]
    seed = judged(claim, measured, comparable)
    seeds = {str(timed["settings"]["seed"]): seed}
    return [case | {"verdict": seed["verdict"], "reason": "", "seeds": seeds, "results": [speed.RESULT]}]


def of_arithmetic(claim: Claim) -> list[dict]:
    """One case: the formula's value, the same everywhere."""
    value = arithmetic.call(claim.source.function, claim.source.arguments)
    seed = judged(claim, [Measured("", value, 0.0)], comparable=True)
    return [empty_case(COMPUTED, "", "") | {"verdict": seed["verdict"], "seeds": {"": seed}}]


def lengths(shortest: int | None, longest: int | None) -> str:
    """The tokens that a claim about attention alone is about, as the end of a sentence."""
    if shortest and shortest == longest:
        return f" at {speed.tokens(shortest)} tokens"
    lower = f" from {speed.tokens(shortest)} tokens on" if shortest else ""
    return lower + (f" up to {speed.tokens(longest)} tokens" if longest else "")


def _why_not(claim: Claim, model: str, needed: dict[str, Entry | None]) -> str:
    """Why a claim cannot be tested on a model, or nothing."""
    if claim.kind == "value" and not claim.stand_ins and model not in claim.models:
        return f"needs {', '.join(claim.models)}"
    for name, entry in needed.items():
        if entry is None:
            return f"{UNPLANNED} row {name} on {model}"
        missing = entry.reason.removeprefix("not run: ")
        if not entry.runs:
            return missing
        for run in entry.runs.values():
            if lacking := _lacking(claim, run):
                return missing or f"{lacking} for {name} on {model}"
    return ""


def _lacking(claim: Claim, run: Run) -> str:
    """What a run would need to tell the claim's metric, or nothing."""
    if claim.metric in BY_TASK and not _tasks(claim, run):
        return f"{UNPLANNED} {either(claim.tasks) if claim.tasks else 'downstream tasks'}"
    if claim.metric == "gsm8k" and not run.written:
        reason = run.results.get("generation", {}).get("metrics", {}).get("reason")
        return reason or f"{UNPLANNED} written answers"
    if claim.metric in TRAINED and "dominance" not in run.trained:
        return "no probe looked at the groups in training"
    if claim.metric == "held_out_dominance" and _held_out_dominance(run) is None:
        return "there are no groups"
    return ""


def _row_case(claim: Claim, model: str, corpus: str, subject: Entry, reference: Entry | None) -> dict:
    """The verdict on one model and corpus, seed by seed."""
    comparable = claim.kind != "value" or (model in claim.models and corpus in claim.corpora)
    seeds, reasons = {}, []
    for seed, run in sorted(subject.runs.items()):
        other = reference.runs.get(seed, reference.first) if reference else None

        def seen(one: Measured, run: Run = run) -> dict:
            task = run.tasks[one.name] if claim.metric in BY_TASK else {}
            return {key: task[key] for key in ("items", "beyond_window") if key in task}

        found = judged(claim, measure(claim, run, other), comparable, seen)
        steps = run.trained.get("steps")
        if claim.horizon and found["verdict"] == "contradicted" and steps < claim.horizon:
            found["verdict"] = "undecided"
            found["measured"] = [one | {"verdict": "undecided"} for one in found["measured"]]
            reasons.append(f"trained for {steps} of {claim.horizon} steps")
        seeds[str(seed)] = found
    paths = [
        run.paths[name]
        for entry in (subject, reference)
        if entry
        for run in entry.runs.values()
        for name in _measures(claim)
        if name in run.paths
    ]
    verdict = agreed([each["verdict"] for each in seeds.values()], "seeds")
    return {"verdict": verdict, "reason": "; ".join(dict.fromkeys(reasons)), "seeds": seeds, "results": paths}


def _measures(claim: Claim) -> tuple[str, ...]:
    """The kinds of result that a metric is read from."""
    kinds = {"gsm8k": ("generation",)} | dict.fromkeys(BY_TASK, ("downstream",)) | dict.fromkeys(TRAINED, ("training",))
    return kinds.get(claim.metric, ("perplexity",))


def measure(claim: Claim, run: Run, other: Run | None) -> list[Measured]:
    """The claim's metric for one run, or its change against another: percent, points, or the plain number.

    One value a task for those of tasks. The error of an accuracy's change is at least one item, since few items without
    a flip do not prove that there are none. Dominance, stability and collapse have no error but that over seeds.
    """
    if claim.metric == "accuracy" and other:
        return [
            _flips(task, mine, other.tasks[task]) for task, mine in _tasks(claim, run).items() if task in other.tasks
        ]
    if claim.metric in BY_TASK:
        return [_share(claim, task, values) for task, values in _tasks(claim, run).items()]
    if claim.metric == "gsm8k":
        return [_flips("gsm8k", run.written, other.written) if other else _accuracy("gsm8k", run.written)]
    if claim.metric == "perplexity" and other:
        change = statistics.compare(run.windows, other.windows)
        return [Measured("", 100 * (change.value - 1), 100 * (change.error or 0.0))]
    if claim.metric == "perplexity":
        value, error = statistics.perplexity(run.windows)
        return [Measured("", value, error or 0.0)]
    value = PLAIN[claim.metric](run)
    return [Measured("", value - (PLAIN[claim.metric](other) if other else 0.0), 0.0)]


def _tasks(claim: Claim, run: Run) -> dict[str, dict]:
    return {task: values for task, values in run.tasks.items() if not claim.tasks or task in claim.tasks}


def _flips(task: str, mine: dict, other: dict) -> Measured:
    flips = statistics.flips(statistics.scored(mine), statistics.scored(other))
    return Measured(task, 100 * flips.change, 100 * max(flips.error, 1 / flips.items))


def _share(claim: Claim, task: str, values: dict) -> Measured:
    if claim.metric == "scored_beyond_window":
        return Measured(task, 100 * values["scored_beyond_window"], 0.0)
    return _accuracy(task, values)


def _accuracy(task: str, values: dict) -> Measured:
    share, error = statistics.accuracy(statistics.scored(values))
    return Measured(task, 100 * share, 100 * (error or 0.0))


def _held_out_dominance(run: Run) -> float | None:
    layers = run.results["perplexity"]["metrics"].get("layers") or []
    values = [layer["dominance"] for layer in layers if "dominance" in layer]
    return fmean(values) if values else None


def _of_perplexity(name: str, factor: float) -> Callable[[Run], float]:
    return lambda run: factor * run.results["perplexity"]["metrics"][name]


PLAIN: dict[str, Callable[[Run], float]] = {
    "trained_parameters": _of_perplexity("trained_parameters", 1),
    "pairs_kept": _of_perplexity("pairs_kept", 100),
    "far_pairs_kept": _of_perplexity("far_pairs_kept", 100),
    "dominance": lambda run: 100 * run.trained["dominance"],
    "held_out_dominance": lambda run: 100 * _held_out_dominance(run),
    "stability": lambda run: run.trained["stability"],
    "collapse": lambda run: 100.0 * (run.trained["collapse_step"] is not None),
}
"""Numbers without an error of their own: percent, a count, or for stability a share."""
