"""The paper's claims against the results: config/claims.yaml says what decides a claim, this file computes its verdict.

Verdicts: reproduced; within tolerance; contradicted; undecided (the difference is within its error); mixed over seeds
or models; not comparable (a printed value, but other models or text here); not run. The last three and undecided are
never a pass.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from focus.config import TABLE_MODULES, Experiment
from focus.errors import UserError
from focus.paper import layout, printed, rows, speed, statistics
from focus.paper.rows import TASKS, Entry, Run
from focus.paper.statistics import Measured
from focus.provenance import write_atomically
from focus.strict import Name, Strict

EXACT = 1e-4
ROUNDING = 1e-2  # percent of a perplexity by which kernels differ that add in another order
HERE = "this machine"
UNITS = {"perplexity": "", "pairs_kept": " %", "far_pairs_kept": " %"}


class Claim(Strict):
    """One claim; the head of config/claims.yaml explains the keys."""

    id: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    place: str
    statement: str
    origin: Literal["paper", "ours"] = "paper"
    printed: list[str] = Field(default_factory=list)
    kind: Literal["value", "ordering", "identity", "bound"]
    metric: Literal["perplexity", "accuracy", "pairs_kept", "far_pairs_kept", "trained_parameters", "speedup", "cosine"]
    subject: str = Field(pattern=r"^[^/]+/[^/]+$")
    relation: Literal["below", "above", "at_most", "at_least"] | None = None
    limit: float | None = None
    shortest: int | None = None
    longest: int | None = None
    reference: str | None = Field(None, pattern=r"^[^/]+/[^/]+$")
    tolerance: float = Field(ge=0)
    reason: str
    models: list[Name] = Field(default_factory=list)
    corpora: list[Name] = Field(default_factory=list)
    stand_ins: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        if self.metric in speed.METRICS and self.kind not in ("bound", "value"):
            raise ValueError(f"kind: expected bound or value for metric {self.metric}, got {self.kind}")
        relations = {"ordering": ("below", "above"), "bound": ("at_most", "at_least")}.get(self.kind, (None,))
        if self.relation not in relations:
            raise ValueError(f"relation: expected one of {relations} for kind {self.kind}, got {self.relation}")
        if (self.limit is not None) != (self.kind == "bound"):
            raise ValueError(f"limit belongs to kind bound and only there, got kind {self.kind}")
        if self.reference is None and (self.kind in ("ordering", "identity") or self.metric == "accuracy"):
            raise ValueError(f"reference: expected method/variant for {self.kind} of {self.metric}, got none")
        if self.reference is not None and self.metric not in ("perplexity", "accuracy"):
            raise ValueError(f"reference: expected none for metric {self.metric}, got {self.reference}")
        if self.metric not in speed.METRICS and (self.shortest, self.longest) != (None, None):
            raise ValueError(f"shortest and longest belong to {' and '.join(speed.METRICS)}, got {self.metric}")
        if self.kind == "value" and (len(self.printed) != 1 or not self.models or not self.corpora):
            raise ValueError("kind value: expected one printed number, models and corpora")
        for number in self.printed:
            printed.number(number)
        return self


def load(path: Path) -> list[Claim]:
    """The claims of a file. Raises UserError that names the claim and key at fault."""
    try:
        entries = list(yaml.safe_load(Path(path).read_text())["claims"])
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: expected a list under the key claims, got {type(error).__name__}: {error}") from None
    claims = []
    for number, entry in enumerate(entries):
        name = entry.get("id", number) if isinstance(entry, dict) else number
        try:
            claims.append(Claim.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in ("claims", name, *first["loc"]))
            raise UserError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
    twice = [name for name, count in Counter(claim.id for claim in claims).items() if count > 1]
    if twice:
        raise UserError(f"{path}: expected every id once, got {twice[0]} twice")
    return claims


def write(
    claims_file: Path,
    experiment: Experiment,
    results_root: Path,
    output_json: Path,
    output_markdown: Path,
    *,
    partial: bool = False,
) -> None:
    """Write the verdicts as JSON and as a page: Markdown, and HTML beside it.

    Raises UserError when a result that the scale names is missing, unless `partial`.
    """
    entries = _gather(experiment, results_root, partial)
    timed = _timed(experiment, Path(results_root), partial)
    decided = [decide(claim, entries, timed) for claim in load(claims_file)]
    content = json.dumps({"scale": experiment.scale, "claims": decided}, indent=2, ensure_ascii=False)
    title, page = f"Claims at scale {experiment.scale}", _page(decided, entries, results_root)
    write_atomically(Path(output_json), content + "\n")
    write_atomically(Path(output_markdown), layout.markdown(title, *page))
    write_atomically(Path(output_markdown).with_suffix(".html"), layout.page(title, *page))


def decide(claim: Claim, entries: dict[tuple, Entry], timed: dict | None = None) -> dict:
    """The claim with its verdict, and the case behind it for each model and corpus.

    `entries` holds the rows by (model, corpus, "method/variant"), `timed` the result of timing attention alone.
    """
    cases = [_timed_case(claim, timed)] if claim.metric in speed.METRICS else []
    for model, corpus in dict.fromkeys(key[:2] for key in entries) if not cases else ():
        subject = entries.get((model, corpus, claim.subject))
        reference = entries.get((model, corpus, claim.reference)) if claim.reference else None
        needed = {claim.subject: subject} | ({claim.reference: reference} if claim.reference else {})
        reason = _why_not(claim, model, needed)
        case = {"model": model, "corpus": corpus, "verdict": "not run", "reason": reason, "seeds": {}, "results": []}
        if not reason:
            case |= _case(claim, model, corpus, subject, reference)
        cases.append(case)
    verdict = _agreed([case["verdict"] for case in cases if case["verdict"] != "not run"], "models")
    numbers = {name: printed.number(name) for name in claim.printed}
    return claim.model_dump() | {"printed": numbers, "verdict": verdict or "not run", "cases": cases}


def judge(claim: Claim, value: float, error: float) -> str:
    """The verdict on one measured metric or change."""
    return {"ordering": _ordering, "bound": _bound, "identity": _identity, "value": _value}[claim.kind](
        claim, value, error
    )


def _ordering(claim: Claim, value: float, error: float) -> str:
    if abs(value) + 2 * error <= (ROUNDING if claim.metric == "perplexity" else EXACT):
        return "contradicted"
    signed, margin = -value if claim.relation == "below" else value, claim.tolerance * error
    return "reproduced" if signed > margin else "contradicted" if signed < -margin else "undecided"


def _bound(claim: Claim, value: float, error: float) -> str:
    room = claim.limit - value if claim.relation == "at_most" else value - claim.limit
    if room >= 2 * error:
        return "reproduced"
    if room + claim.tolerance >= 2 * error:
        return "within tolerance"
    return "contradicted" if room + claim.tolerance < -2 * error else "undecided"


def _identity(claim: Claim, value: float, error: float) -> str:
    most = abs(value) + 2 * error
    if most <= claim.tolerance:
        return "reproduced" if most <= EXACT else "within tolerance"
    return "contradicted" if abs(value) - 2 * error > claim.tolerance else "undecided"


def _value(claim: Claim, value: float, error: float) -> str:
    expected = printed.number(claim.printed[0])
    away, allowed = abs(value - expected), claim.tolerance * abs(expected) / 100
    rounded = away <= min(printed.rounding(claim.printed[0]), allowed)
    return "reproduced" if rounded else _near(away, error, allowed)


def _near(away: float, error: float, allowed: float) -> str:
    if away <= allowed:
        return "within tolerance"
    return "contradicted" if away - 2 * error > allowed else "undecided"


def measure(claim: Claim, run: Run, other: Run | None) -> list[Measured]:
    """The claim's metric for one run, one value a task for accuracy: percent, points, or the plain number.

    The error of an accuracy's change is at least one item, since few items without a flip do not prove that there are
    none.
    """
    if claim.metric == "accuracy":
        return [_accuracy(claim, task, run, other) for task in run.tasks if task in other.tasks]
    if claim.metric == "perplexity" and other:
        change = statistics.compare(run.windows, other.windows)
        return [Measured("", 100 * (change.value - 1), 100 * (change.error or 0.0))]
    if claim.metric == "perplexity":
        value, error = statistics.perplexity(run.windows)
        return [Measured("", value, error or 0.0)]
    if claim.metric == "trained_parameters":
        return [Measured("", float(run.results["perplexity"]["metrics"][claim.metric]), 0.0)]
    return [Measured("", 100 * run.results["perplexity"]["metrics"][claim.metric], 0.0)]


def _accuracy(claim: Claim, task: str, run: Run, other: Run) -> Measured:
    flips = statistics.flips(*(statistics.scored(each.tasks[task]) for each in (run, other)))
    return Measured(task, 100 * flips.change, 100 * max(flips.error, 1 / flips.items))


def _gather(experiment: Experiment, root: Path, partial: bool) -> dict[tuple, Entry]:
    """Every row of every exhibit by (model, corpus, "method/variant"), the one with downstream results if several.

    A figure of dominance has no rows with results.
    """
    found: dict[tuple, Entry] = {}
    exhibits = [*experiment.tables.values(), *experiment.figures.values()]
    for exhibit in [each for each in exhibits if each.shows in TABLE_MODULES]:
        for entry in rows.gather(exhibit, experiment, root, partial=partial):
            key = (entry.model, entry.corpus, f"{entry.row.method}/{entry.row.variant}")
            if key not in found or (entry.runs and not (found[key].runs and found[key].first.tasks)):
                found[key] = entry
    return found


def _why_not(claim: Claim, model: str, needed: dict[str, Entry | None]) -> str:
    """Why a claim cannot be tested on a model, or nothing."""
    if claim.kind == "value" and not claim.stand_ins and model not in claim.models:
        return f"needs {', '.join(claim.models)}"
    for name, entry in needed.items():
        if entry is None:
            return f"this scale has no row {name} on {model}"
        if not entry.runs:
            return entry.reason.removeprefix("not run: ")
        if claim.metric == "accuracy" and not entry.first.tasks:
            return f"this scale has no downstream tasks for {name} on {model}"
    return ""


def _case(claim: Claim, model: str, corpus: str, subject: Entry, reference: Entry | None) -> dict:
    """The verdict on one model and corpus, seed by seed."""
    comparable = claim.kind != "value" or (model in claim.models and corpus in claim.corpora)
    seeds = {}
    for seed, run in subject.runs.items():
        other = reference.runs.get(seed, reference.first) if reference else None
        measured = []
        for each in measure(claim, run, other):
            verdict = judge(claim, each.value, each.error) if comparable else "not comparable"
            task = run.tasks[each.name] if claim.metric == "accuracy" else {}
            seen = {key: task[key] for key in ("items", "beyond_window") if key in task}
            measured.append(each._asdict() | {"verdict": verdict} | seen)
        seeds[str(seed)] = {"verdict": _worst([each["verdict"] for each in measured]), "measured": measured}
    source = "downstream" if claim.metric == "accuracy" else "perplexity"
    paths = [run.paths[source] for entry in (subject, reference) if entry for run in entry.runs.values()]
    verdict = _agreed([each["verdict"] for each in seeds.values()], "seeds")
    return {"verdict": verdict, "seeds": seeds, "results": paths}


def _timed(experiment: Experiment, root: Path, partial: bool) -> dict | None:
    """The timing of attention alone, or None where the scale has none (or, if `partial`, where it is missing)."""
    path = root / speed.RESULT
    return speed.load(path) if experiment.speed and (path.exists() or not partial) else None


def _timed_case(claim: Claim, timed: dict | None) -> dict:
    """The verdict on one machine; a claim must hold at every length, group count and thread count that it is about."""
    case = {"model": HERE, "corpus": "random", "verdict": "not run", "reason": "", "seeds": {}, "results": []}
    if timed is None:
        return case | {"reason": "this scale times nothing"}
    processor = timed["provenance"]["processor"]
    comparable = claim.kind != "value" or any(name in processor.lower() for name in claim.models)
    measured = []
    for each in speed.measured(timed, claim.metric, claim.subject, claim.shortest, claim.longest):
        verdict = judge(claim, each.value, each.error) if comparable else "not comparable"
        measured.append(each._asdict() | {"verdict": verdict})
    if not measured:
        return case | {"reason": f"this scale does not time {claim.subject}{_lengths(claim.shortest, claim.longest)}"}
    verdict = _worst([each["verdict"] for each in measured])
    seeds = {str(timed["settings"]["seed"]): {"verdict": verdict, "measured": measured}}
    return case | {"verdict": verdict, "seeds": seeds, "results": [speed.RESULT]}


def _worst(verdicts: list[str]) -> str:
    """The verdict on a claim about several tasks, on all of which it must hold."""
    return min(verdicts, key=("contradicted", "undecided", "within tolerance", "reproduced", "not comparable").index)


def _agreed(verdicts: list[str], over: str) -> str:
    return verdicts[0] if len(set(verdicts)) == 1 else f"mixed over {over}" if verdicts else ""


def _page(decided: list[dict], entries: dict[tuple, Entry], root: Path) -> tuple[list[layout.Grid], list[str]]:
    models = list(dict.fromkeys(model for model, _, _ in entries))
    grids = []
    quality = [claim for claim in decided if claim["metric"] not in speed.METRICS]
    sections = {
        "What the paper claims": (models, [claim for claim in quality if claim["origin"] == "paper"]),
        "What the paper claims about speed": ([HERE], [claim for claim in decided if claim not in quality]),
        "Controls that the paper lacks": (models, [claim for claim in quality if claim["origin"] == "ours"]),
    }
    for title, (shown, found) in sections.items():
        mine = [_named(claim) for claim in found]
        lines = [
            [
                claim["id"],
                claim["statement"],
                _printed(claim),
                claim["verdict"],
                *(_cell(claim, model) for model in shown),
            ]
            for claim in mine
        ]
        if lines:
            counts = Counter(claim["verdict"] for claim in mine)
            summary = (
                f"{len(mine)}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + "."
            )
            names = [rows.display_name(root, model) for model in shown]
            header = ["Claim", "Statement", "Printed", "Verdict", *names]
            grids.append(layout.Grid(title, header, lines, [summary], text=len(header)))
    notes = [f"{model}: {note}" for model in models if (note := rows.manifest(root, "models", model).get("note"))]
    notes += [
        "Verdicts are computed from result files at this scale. A verdict about a stand-in is about the stand-in.",
        "Not comparable: a printed value whose model or text is not run here; ours is shown, not judged.",
        "Undecided: the difference lies within its error. Several numbers in a cell: one a seed.",
        "A claim about speed must hold in every case timed; the one that decides is shown. Ratios on this machine "
        "decide orderings and bounds; the paper's own values are from an H100.",
        "Changes of perplexity are percent, changes of accuracy points, of several tasks the one that decides; each "
        "with its standard error.",
    ]
    rules = [[claim["id"], claim["place"], _rule(claim)] for claim in decided]
    return [*grids, layout.Grid("How each is decided", ["Claim", "Place", "Rule"], rules, text=3)], notes


def _named(claim: dict) -> dict:
    """A control holds or not: there is nothing that it could reproduce."""
    if claim["origin"] == "paper":
        return claim
    names = {"reproduced": "holds", "contradicted": "does not hold"}
    cases = [case | {"verdict": names.get(case["verdict"], case["verdict"])} for case in claim["cases"]]
    return claim | {"verdict": names.get(claim["verdict"], claim["verdict"]), "cases": cases}


def _printed(claim: dict) -> str:
    return " against ".join(f"{number:,}" for number in claim["printed"].values()) or "-"


def _cell(claim: dict, model: str) -> str:
    """What was measured on a model, led by its verdict where that is not the claim's."""
    shown = []
    for case in claim["cases"]:
        if case["model"] == model:
            numbers = dict.fromkeys(_measured(claim, seed["measured"]) for seed in case["seeds"].values())
            text = case["reason"] or "; ".join(numbers)
            shown.append(text if case["verdict"] == claim["verdict"] else f"{case['verdict']}: {text}")
    return "; ".join(dict.fromkeys(shown))


def _measured(claim: dict, measured: list[dict]) -> str:
    """One seed's number; of several tasks the one that decides."""
    worst = _worst([each["verdict"] for each in measured])
    deciding = next(each for each in measured if each["verdict"] == worst)
    value, error = deciding["value"], deciding["error"]
    if claim["metric"] == "accuracy":
        sample = f"n={deciding['items']}, {100 * deciding['beyond_window']:.0f} % of positions beyond the window"
        return f"{TASKS[deciding['name']]} {value:+.1f} ± {error:.1f} points ({sample})"
    if claim["metric"] in speed.METRICS:
        return f"{deciding['name']}: {value:.{4 if claim['metric'] == 'cosine' else 2}f}"
    if claim["reference"]:
        return f"{value:+.2f} ± {error:.2f} %"
    return f"{value:,.0f}" if claim["metric"] == "trained_parameters" else f"{value:,.1f}{UNITS[claim['metric']]}"


def _rule(claim: dict) -> str:
    metric, subject, tolerance = claim["metric"].replace("_", " "), f"`{claim['subject']}`", f"{claim['tolerance']:g}"
    limit = f"{claim['relation'] or ''}".replace("_", " ")
    change = f", change from `{claim['reference']}`," if claim["reference"] else ""
    rule = {
        "ordering": f"{metric} of {subject} {limit} `{claim['reference']}` by more than {tolerance} standard errors",
        "identity": f"{metric} of {subject} equals `{claim['reference']}`, tolerance {tolerance}",
        "bound": f"{metric} of {subject}{change} {limit} {claim['limit']}, tolerance {tolerance}",
        "value": f"{metric} of {subject} within {tolerance} % of the printed value on {', '.join(claim['models'])}",
    }[claim["kind"]]
    return f"{claim['kind']}; {rule}{_lengths(claim['shortest'], claim['longest'])} ({claim['reason']})."


def _lengths(shortest: int | None, longest: int | None) -> str:
    if shortest and shortest == longest:
        return f" at {speed.tokens(shortest)} tokens"
    lower = f" from {speed.tokens(shortest)} tokens on" if shortest else ""
    return lower + (f" up to {speed.tokens(longest)} tokens" if longest else "")
