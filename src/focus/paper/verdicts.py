"""From a measured number to a verdict: reproduced, within tolerance, contradicted or undecided."""

from __future__ import annotations

from statistics import NormalDist

from focus.paper import printed
from focus.paper.claim import Claim

EXACT = 1e-4
ROUNDING = 1e-2  # percent of a perplexity by which kernels differ that add in another order
WORST_FIRST = ("contradicted", "undecided", "within tolerance", "reproduced", "not comparable")


def judge(claim: Claim, value: float, error: float, *, of: int = 1) -> str:
    """The verdict on one measured number, change or difference with its standard error.

    `of`: how many numbers, one for each task, an identity must hold for. One that moves by chance is no contradiction,
    so the more there are, the wider is the interval of each (Bonferroni, 95 % over all).
    """
    if claim.kind == "identity":
        return _identity(claim, value, error, max(2.0, NormalDist().inv_cdf(1 - 0.025 / of)))
    return {"ordering": _ordering, "bound": _bound, "value": _value}[claim.kind](claim, value, error)


def worst(verdicts: list[str]) -> str:
    """The verdict on a claim about several tasks or cases, in all of which it must hold."""
    return min(verdicts, key=WORST_FIRST.index)


def agreed(verdicts: list[str], over: str) -> str:
    """The verdict that all give, else that they are mixed over seeds, models or texts; nothing for none.

    What some reproduce and the others come near is within tolerance.
    """
    found = set(verdicts)
    if found == {"reproduced", "within tolerance"}:
        return "within tolerance"
    return verdicts[0] if len(found) == 1 else f"mixed over {over}" if found else ""


def _ordering(claim: Claim, value: float, error: float) -> str:
    if abs(value) + 2 * error <= (ROUNDING if claim.metric == "perplexity" else EXACT):
        return "contradicted"
    signed, least = -value if claim.relation == "below" else value, claim.margin + claim.tolerance * error
    return "reproduced" if signed > least else "contradicted" if signed < -least else "undecided"


def _bound(claim: Claim, value: float, error: float) -> str:
    room = claim.limit - value if claim.relation == "at_most" else value - claim.limit
    if room >= 2 * error:
        return "reproduced"
    if room + claim.tolerance >= 2 * error:
        return "within tolerance"
    return "contradicted" if room + claim.tolerance < -2 * error else "undecided"


def _identity(claim: Claim, value: float, error: float, errors: float) -> str:
    most = abs(value) + errors * error
    if most <= claim.tolerance:
        return "reproduced" if most <= EXACT else "within tolerance"
    return "contradicted" if abs(value) - errors * error > claim.tolerance else "undecided"


def _value(claim: Claim, value: float, error: float) -> str:
    expected = printed.number(claim.printed[0])
    away, allowed = abs(value - expected), claim.tolerance * abs(expected) / 100
    if away <= min(printed.rounding(claim.printed[0]), allowed):
        return "reproduced"
    if away <= allowed:
        return "within tolerance"
    return "contradicted" if away - 2 * error > allowed else "undecided"
