"""Claims as the page shows them, from claims.json alone: what was printed, what was measured, which rule decides."""

from __future__ import annotations

import math
import re
from collections import Counter
from statistics import fmean, variance

from focus.paper.report_sources import Sources
from focus.paper.rows import TASKS

VERDICTS = {
    "reproduced": "✓",
    "within tolerance": "≈",
    "contradicted": "✗",
    "mixed": "±",
    "undecided": "?",
    "not comparable": "≠",
    "not run": "○",
}
"""Every verdict, in the order shown, with the sign that stands beside its colour."""
MEANINGS = {
    "reproduced": "the number is the printed one as it is rounded, or the order or bound holds by two standard errors",
    "within tolerance": "it misses the printed number, bound or identity by no more than the rule of the claim allows",
    "contradicted": "it misses by more than the rule and two standard errors allow",
    "mixed": "models, texts or seeds disagree",
    "undecided": "the difference is within its error",
    "not comparable": "the number is of another model or text than the paper's",
    "not run": "this scale has no result",
}
"""What each verdict says of a measured number; the rule of every claim is written out beside it."""
OTHER = "·"
CONTROLS = {"reproduced": "holds", "contradicted": "does not hold"}
SEVERAL = {"holds": "hold", "does not hold": "do not hold"}
WORST = ("contradicted", "mixed", "undecided", "within tolerance", "reproduced", "not comparable", "not run")
UNITS = {"accuracy": " points", "pairs_kept": " %", "far_pairs_kept": " %"}
WORDS = {
    "trained_parameters": "trained parameters",
    "speedup": "times as fast as full attention",
    "cosine": "cosine similarity",
    "pairs_kept": "pairs kept",
    "far_pairs_kept": "far pairs kept",
}
SMALLEST = 1e-4  # below which a number without a unit of its own says no more than that it is small


def views(claims: list[dict], sources: Sources, tables: dict[str, set[str]]) -> list[dict]:
    """What the page shows of each claim; `tables` are the results behind each table, by name."""
    return [_view(claim, sources, tables) for claim in claims]


def answers(asked: list[dict], shown: list[dict]) -> list[dict]:
    """Each question with the claims that settle it and, in words, how many of them have which verdict."""
    by_id = {claim["id"]: claim for claim in shown}
    found = []
    for question in asked:
        claims = [by_id[name] for name in question["claims"] if name in by_id]
        told = Counter(claim["shown"].partition(" over ")[0] for claim in claims)
        plural = {verdict: SEVERAL.get(verdict, verdict) if count > 1 else verdict for verdict, count in told.items()}
        said = ", ".join(f"{count} {plural[verdict]}" for verdict, count in told.items())
        found.append({"id": question["id"], "asks": question["asks"], "said": said, "claims": claims})
    return found


def counts(shown: list[dict]) -> list[dict]:
    """How many of these claims have each verdict, in the order of VERDICTS, then verdicts that it does not know."""
    found = Counter(each["verdict"] for each in shown)
    signs = VERDICTS | {verdict: OTHER for verdict in sorted(found.keys() - VERDICTS)}
    return [{"verdict": verdict, "sign": sign, "count": found[verdict]} for verdict, sign in signs.items()]


def base(verdict: str) -> str:
    """The verdict without what it is mixed over."""
    return "mixed" if verdict.startswith("mixed") else verdict


def named(verdict: str, origin: str) -> str:
    """A control of ours holds or not: there is nothing that it could reproduce."""
    return CONTROLS.get(verdict, verdict) if origin == "ours" else verdict


def _view(claim: dict, sources: Sources, tables: dict[str, set[str]]) -> dict:
    origin = claim.get("origin", "paper")
    verdict = claim.get("verdict", "not run")
    cases = [_case(claim, case, sources) for case in claim.get("cases", [])]
    paths = list(dict.fromkeys(path for case in claim.get("cases", []) for path in case.get("results", [])))
    measured = [case for case in cases if case["text"]]
    return {
        "id": claim["id"],
        "place": claim.get("place", ""),
        "places": places(claim.get("place", "")),
        "statement": claim.get("statement", ""),
        "origin": origin,
        "verdict": base(verdict),
        "shown": named(verdict, origin),
        "printed": [{"name": name, "value": f"{value:,}"} for name, value in claim.get("printed", {}).items()],
        "cases": cases,
        "measured": measured,
        "why_not": list(dict.fromkeys(case["reason"] for case in cases if case["reason"])) if not measured else [],
        "same_as": claim.get("same_as", ""),
        "quantity": quantity(claim),
        "rule": claim.get("rule") or rule(claim),
        "reason": claim.get("reason", ""),
        "target": target(claim.get("place", ""), paths, tables) or (["claims"] if measured else []),
    }


def _case(claim: dict, case: dict, sources: Sources) -> dict:
    """One model and text: the number that decides in each seed, and all numbers."""
    seeds = case.get("seeds", {})
    numbers = [
        {"seed": seed, "verdict": named(each.get("verdict", ""), claim.get("origin", "paper")), **number(claim, each)}
        for seed, found in seeds.items()
        for each in found.get("measured", [])
    ]
    deciding = [_deciding(found.get("measured", [])) for found in seeds.values()]
    return {
        "model": case.get("model", ""),
        "corpus": case.get("corpus", ""),
        "verdict": base(case.get("verdict", "not run")),
        "shown": named(case.get("verdict", "not run"), claim.get("origin", "paper")),
        "reason": case.get("reason", ""),
        "numbers": numbers if len(numbers) > 1 else [],
        "value": numbers[0]["value"] if len(numbers) == 1 else "",
        "text": over_seeds(claim, [each for each in deciding if each]),
        "results": sources.places(case.get("results", [])),
    }


def over_seeds(claim: dict, measured: list[dict]) -> str:
    """The number that decides: of one seed with its error, of several as a mean with the lowest and highest.

    Seeds share windows and items, so their errors do not average out; the spread over seeds is added. Seeds that
    different tasks decide are listed one by one.
    """
    if not measured:
        return ""
    if len(measured) == 1:
        only = number(claim, measured[0])
        return f"{only['name']}: {only['text']}" if only["name"] else only["text"]
    names = list(dict.fromkeys(each.get("name") or "" for each in measured))
    if len(names) > 1:
        return "; ".join(over_seeds(claim, [each]) for each in measured)
    values = [each["value"] for each in measured]
    squares = [(each.get("error") or 0.0) ** 2 for each in measured]
    error = math.sqrt(fmean(squares) + variance(values) / len(values))
    mean = number(claim, measured[0] | {"value": fmean(values), "error": error})
    exact = {"error": 0.0, "decimals": mean["decimals"]}
    low, high = (number(claim, measured[0] | exact | {"value": each(values)})["text"] for each in (min, max))
    lead = f"{names[0]}: " if names[0] else ""
    return f"{lead}{mean['text']} ({len(measured)} seeds: {low} to {high})"


def number(claim: dict, measured: dict) -> dict:
    """A measured number as text with its error and unit, and what it is called."""
    value, error, metric = measured["value"], measured.get("error") or 0.0, claim.get("metric", "")
    change = claim.get("reference") or claim.get("against")
    unit = measured.get("unit", claim.get("unit"))
    if unit is None:
        unit = " %" if metric == "perplexity" and change else UNITS.get(metric, "")
    decimals = measured.get("decimals", _decimals(value, error))
    text = f"{value:{'+' if change else ''},.{decimals}f}" + (f" ± {error:,.{decimals}f}" if error else "")
    if change and abs(value) + 2 * error < SMALLEST:
        text = f"0 ± less than {SMALLEST:g}"
    name = str(measured.get("name") or "")
    shown = TASKS.get(name, name.replace("_", " "))
    return {"name": shown, "text": text + unit, "value": repr(value), "decimals": decimals}


def quantity(claim: dict) -> str:
    """What the measured numbers are, in a few words."""
    metric = claim.get("metric", "")
    if claim.get("quantity"):
        return claim["quantity"]
    words = WORDS.get(metric, metric.replace("_", " "))
    return f"change of {words} from `{claim['reference']}`" if claim.get("reference") else words


def _decimals(value: float, error: float) -> int:
    """As many as show two digits of the error or, without one, four of the value; none of a whole number."""
    if not error and float(value).is_integer():
        return 0
    shown = error or abs(value) / 100
    return min(6, max(0, 1 - math.floor(math.log10(shown)))) if shown else 0


def _deciding(measured: list[dict]) -> dict | None:
    """Of several numbers that must all agree the one that fails first."""
    verdicts = [base(each.get("verdict", "not run")) for each in measured]
    order = [WORST.index(verdict) if verdict in WORST else len(WORST) for verdict in verdicts]
    return measured[order.index(min(order))] if measured else None


def rule(claim: dict) -> str:
    """What decides the claim, as a sentence."""
    what = f"{claim.get('metric', 'metric').replace('_', ' ')} of `{claim.get('subject', '')}`"
    reference, relation = claim.get("reference"), (claim.get("relation") or "").replace("_", " ")
    tolerance = claim.get("tolerance")
    tolerance = f"{tolerance:g}" if isinstance(tolerance, int | float) else "-"
    change = f", as change from `{reference}`," if reference else ""
    models = f" on {', '.join(claim['models'])}" if claim.get("models") else ""
    known = {
        "ordering": f"{what} is {relation} that of `{reference}` by more than {tolerance} standard errors",
        "identity": f"{what} equals that of `{reference}`, give or take {tolerance}",
        "bound": f"{what}{change} is {relation} {claim.get('limit')}, give or take {tolerance}",
        "value": f"{what} is within {tolerance} % of the printed number{models}",
    }
    sentence = known.get(claim.get("kind", ""), f"{what}{change} decides, with tolerance {tolerance}")
    return sentence[:1].upper() + sentence[1:] + _lengths(claim)


def _lengths(claim: dict) -> str:
    lower, upper = claim.get("shortest"), claim.get("longest")
    if lower and lower == upper:
        return f", at {lower:,} tokens"
    return (f", from {lower:,} tokens on" if lower else "") + (f", up to {upper:,} tokens" if upper else "")


def target(place: str, paths: list[str], tables: dict[str, set[str]]) -> list[str]:
    """The Snakemake targets that make a claim's results: a table that holds them all, else the results themselves.

    The table that the place names comes first, then the smallest.
    """
    holding = [name for name, results in tables.items() if paths and set(paths) <= results]
    own = [name for name in _tables_named(place) if name in holding]
    return own[:1] or sorted(holding, key=lambda name: (len(tables[name]), name))[:1] or paths


def places(place: str) -> list[str]:
    """Where a claim stands, each place alone: Tables 2 and 7 -> Table 2, Table 7."""
    numbers = re.findall(r"\d+", place) if re.match(r"Tables\b", place) else []
    return [f"Table {number}" for number in numbers] or ([place] if place else [])


def _tables_named(place: str) -> list[str]:
    """Table 7 -> table7."""
    return [f"table{number}" for each in places(place) for number in re.findall(r"^Table (\d+)$", each)]
