"""The verdicts as a page: how many of each first, then a section for each place in the paper, then the controls."""

from __future__ import annotations

from collections import Counter

from focus.paper import gain, layout, rows, speed
from focus.paper.evidence import BY_TASK, Evidence, lengths
from focus.paper.formats import either
from focus.paper.rows import TASKS
from focus.paper.verdicts import worst

VERDICTS = ("reproduced", "within tolerance", "contradicted", "mixed", "undecided", "not comparable", "not run")
CONTROLS = "Controls that the paper lacks"
DIGITS = {"stability": 3, "trained_parameters": 0}
PLAIN = ("perplexity", "stability", "trained_parameters", "source", "arithmetic", *speed.METRICS)
"""Metrics whose numbers have no unit but their claim's."""


def page(decided: list[dict], known: Evidence) -> tuple[list[layout.Grid], list[str]]:
    """Grids and notes."""
    sections: dict[str, list[dict]] = {}
    for claim in [each for each in decided if each["origin"] == "paper"]:
        sections.setdefault(claim["place"], []).append(claim)
    controls = [_named(claim) for claim in decided if claim["origin"] == "ours"]
    grids = [_strip(sections), *(_section(place, found, known) for place, found in sections.items())]
    if controls:
        counts = Counter(_short(claim["verdict"]) for claim in controls)
        grids.append(_section(CONTROLS, controls, known, _counted(len(controls), counts)))
    models = dict.fromkeys(model for model, _, _ in known.entries)
    notes = [f"{model}: {note}" for model in models if (note := rows.manifest(known.root, "models", model).get("note"))]
    notes += [known.state] if known.state else []
    notes += [
        "Verdicts are computed from result files at this scale. A verdict about a stand-in is about the stand-in.",
        "Not comparable: a printed value whose model or text is not run here; ours is shown, not judged.",
        "Undecided: the difference lies within its error. Several numbers in a cell: one a seed. Seeds that disagree "
        "make a verdict mixed, and so do models and texts.",
        "Not run: no result here decides it; the cell says what is missing.",
        "Arithmetic: computed from the models' shapes or from what the paper prints, so the same at every scale.",
        "A claim about speed must hold in every case timed; the one that decides is shown. Ratios on this machine "
        "decide orderings and bounds; the paper's own values are from an H100.",
        "Changes of perplexity are percent, changes of accuracy points, of several tasks the one that decides; each "
        "with its standard error. The largest group and stability have none within a seed.",
    ]
    rules = [[claim["id"], claim["place"], f"{rule(claim)} ({claim['reason']})."] for claim in decided]
    return [*grids, layout.Grid("How each is decided", ["Claim", "Place", "Rule"], rules, text=3)], notes


def _strip(sections: dict[str, list[dict]]) -> layout.Grid:
    """How many claims have each verdict, of the whole paper and of each place."""
    everything = [claim for found in sections.values() for claim in found]
    lines = []
    for name, found in ({"The paper": everything} | sections).items():
        counts = Counter(_short(claim["verdict"]) for claim in found)
        lines.append([name, str(len(found)), *(str(counts[verdict] or "-") for verdict in VERDICTS)])
    said = _counted(len(everything), Counter(_short(claim["verdict"]) for claim in everything))
    header = ["Place", "Claims", *(_capital(verdict) for verdict in VERDICTS)]
    return layout.Grid("Verdicts", header, lines, [said, resting(everything)])


def resting(claims: list[dict]) -> str:
    """On how many different measurements the verdicts of claims rest."""
    numbers = [claim["same_as"] for claim in claims if claim.get("same_as")]
    return f"{len(numbers)} of them have numbers, which are {len(set(numbers))} different measurements."


def _counted(total: int, counts: Counter) -> str:
    return f"{total} claims: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + "."


def _section(title: str, found: list[dict], known: Evidence, said: str = "") -> layout.Grid:
    """The claims of a place: a column for each model, machine or formula that says something of them."""
    shown = dict.fromkeys(case["model"] for claim in found for case in claim["cases"] if case["model"])
    names = [
        _capital(model) if " " in model or model == "arithmetic" else rows.display_name(known.root, model)
        for model in shown
    ]
    lines = [
        [claim["id"], claim["statement"], _printed(claim), claim["verdict"], *(_cell(claim, model) for model in shown)]
        for claim in found
    ]
    header = ["Claim", "Statement", "Printed", "Verdict", *(names or ["Measured"])]
    lines = lines if shown else [[*line, _cell(claim, "")] for line, claim in zip(lines, found, strict=True)]
    return layout.Grid(_capital(title), header, lines, [said] if said else [], text=len(header))


def _named(claim: dict) -> dict:
    """A control holds or not: there is nothing that it could reproduce."""
    names = {"reproduced": "holds", "contradicted": "does not hold"}
    cases = [case | {"verdict": names.get(case["verdict"], case["verdict"])} for case in claim["cases"]]
    return claim | {"verdict": names.get(claim["verdict"], claim["verdict"]), "cases": cases}


def _printed(claim: dict) -> str:
    return " against ".join(f"{number:,}" for number in claim["printed"].values()) or "-"


def _cell(claim: dict, model: str) -> str:
    """What was measured on a model, led by its verdict where that is not the claim's.

    What is missing for a claim of no model stands in every column; for one decided on other models it is left out.
    """
    shown = []
    cases = [case for case in claim["cases"] if case["model"] in (model, "")]
    texts = len([case for case in cases if case["seeds"]]) > 1
    for case in cases:
        if case["seeds"] or claim["verdict"] == "not run":
            numbers = dict.fromkeys(_measured(claim, seed["measured"]) for seed in case["seeds"].values())
            text = "; ".join([*numbers, *filter(None, [case["reason"]])])
            text = text if case["verdict"] == claim["verdict"] else f"{case['verdict']}: {text}"
            shown.append(f"{case['corpus']} {text}" if texts else text)
    return "; ".join(dict.fromkeys(shown)) or "-"


def _measured(claim: dict, measured: list[dict]) -> str:
    """One seed's number; of several tasks or cases the one that decides."""
    deciding = next(each for each in measured if each["verdict"] == worst([each["verdict"] for each in measured]))
    value, error, name, metric = deciding["value"], deciding["error"], deciding["name"], claim["metric"]
    if metric in BY_TASK:
        text = _of_task(claim, deciding)
    elif metric in ("source", "arithmetic"):
        number, spread = f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}", f" ± {error:.2g}" if error else ""
        text = f"{name}: " * bool(name) + f"{number}{spread}{claim['unit']}"
    elif metric in speed.METRICS:
        text = f"{name}: {value:.{4 if metric == 'cosine' else 2}f}"
    elif metric == "perplexity" and claim["reference"]:
        text = f"{value:+.2f} ± {error:.2f} %"
    elif metric == "collapse":
        text = "collapsed" if value else "no collapse"
    else:
        sign = "+" if claim["reference"] else ""
        text = f"{value:{sign},.{DIGITS.get(metric, 1)}f}" + f" ± {error:.1f}" * (metric in ("gsm8k", *gain.SHOWN_BY))
        text += claim["unit"]
        text = f"{name}: {text}" if name else text
    return text


def _of_task(claim: dict, deciding: dict) -> str:
    task, value, change = TASKS[deciding["name"]], deciding["value"], claim["reference"]
    if claim["metric"] == "scored_beyond_window":
        return f"{task} {value:.1f} %"
    sample = f"n={deciding['items']}, {100 * deciding['beyond_window']:.0f} % of positions beyond the window"
    number = f"{value:+.1f}" if change else f"{value:.1f}"
    return f"{task} {number} ± {deciding['error']:.1f} {'points' if change else '%'} ({sample})"


def rule(claim: dict) -> str:
    """What decides a claim."""
    tolerance, other = f"{claim['tolerance']:g}", claim["reference"] or (claim["against"] and claim["against"]["key"])
    measured = quantity(claim | {"reference": None, "against": None})
    limit, change = f"{claim['relation'] or ''}".replace("_", " "), f", change from `{other}`," if other else ""
    margin = f" and {claim['margin']:g}" if claim["margin"] else ""
    held = f" on {', '.join(claim['models'])}" if claim["models"] else ""
    same = f"equals `{other}`" if other else "is 0"
    said = {
        "ordering": f"{measured} {limit} `{other}` by more than {tolerance} standard errors{margin}",
        "identity": f"{measured} {same}, tolerance {tolerance}",
        "bound": f"{measured}{change} {limit} {claim['limit']}, tolerance {tolerance}",
        "value": f"{measured} within {tolerance} % of the printed value{held}",
    }[claim["kind"]]
    only = [*claim["only_models"], *claim["only_corpora"], *(TASKS[task] for task in claim["tasks"])]
    scope = f", only {either(only)}" if only else ""
    steps = f", undecided below {claim['horizon']} steps unless it holds" if claim["horizon"] else ""
    return f"{claim['kind']}; {said}{lengths(claim['shortest'], claim['longest'])}{scope}{steps}"


def quantity(claim: dict) -> str:
    """What is measured, and where; of a comparison, against what."""
    source, other = claim["source"], claim["reference"] or (claim["against"] and claim["against"]["key"])
    if claim["metric"] == "arithmetic":
        found = f"`{source['function']}({', '.join(f'{key}={value}' for key, value in source['arguments'].items())})`"
    elif claim["metric"] == "source":
        found = f"`{source['key']}` of `{source['result']}`"
    else:
        found = claim["metric"].replace("_", " ") + (f" of `{claim['subject']}`" if claim["subject"] else "")
    return f"change of {found} from `{other}`" if other else found


def unit(claim: dict) -> str:
    """What follows a claim's numbers, with a space before it."""
    changes, metric = bool(claim["reference"] or claim["against"]), claim["metric"]
    if claim["unit"]:
        return f" {claim['unit']}"
    if claim["percent"] or claim["paired"] or (metric == "perplexity" and changes):
        return " %"
    return "" if metric in PLAIN else " points" if changes else " %"


def _short(verdict: str) -> str:
    return verdict.partition(" over ")[0] if verdict.startswith("mixed") else verdict


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
