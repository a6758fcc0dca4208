"""The errors beside the numbers: paired where two rows were measured on the same text or items.

Windows of one document resemble each other, so losses are summed, and differences paired, by document where at least
`ENOUGH` documents are held out. With fewer, windows are treated as independent draws, and the errors are a lower limit.
Items are independent draws.

Over seeds: rows trained with several seeds are measured on the same windows and items, which averaging over seeds does
not make more numerous. So a change's mean over seeds carries the error within a seed undivided (the root of the mean
square), and beside it, in quadrature, the error of a mean of so many seeds. What differs between seeds on single
windows or items is in both, so the result errs on the large side. The spread, the standard deviation over seeds, is
shown apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev, variance
from typing import NamedTuple

from scipy.stats import binomtest
from scipy.stats import t as student

from focus.errors import UserError

ENOUGH = 5
"""Documents from which the spread between documents can be told."""

LEVEL = 0.95
"""Of every interval."""

HALVINGS = 50


class Measured(NamedTuple):
    """A metric, or its change against a reference, with its standard error (0 when there is none)."""

    name: str
    value: float
    error: float


@dataclass(frozen=True)
class Ratio:
    """How many times one perplexity is another: the logarithm of the ratio and its standard error.

    `spread` is the standard deviation of the ratio over `seeds` seeds; None for one.
    """

    log: float
    log_error: float | None
    spread: float | None = None
    seeds: int = 1

    @property
    def value(self) -> float:
        """The ratio."""
        return math.exp(self.log)

    @property
    def error(self) -> float | None:
        """Its standard error, by the delta method."""
        return None if self.log_error is None else self.value * self.log_error


@dataclass(frozen=True)
class Flips:
    """Items that two rows disagree on: gained by ours, lost by ours, of all items."""

    gained: int
    lost: int
    items: int

    @property
    def change(self) -> float:
        """Change of accuracy, as a share."""
        return (self.gained - self.lost) / self.items

    @property
    def error(self) -> float:
        """Standard error of the change over items."""
        return math.sqrt(max(self.gained + self.lost - self.items * self.change**2, 0.0)) / self.items

    @property
    def p_value(self) -> float:
        """Exact two-sided McNemar test: the flips as tosses of a fair coin."""
        tosses = self.gained + self.lost
        tail = sum(math.comb(tosses, count) for count in range(min(self.gained, self.lost) + 1))
        return min(1.0, 2 * tail / 2**tosses)

    @property
    def low(self) -> float:
        """Lower end of the interval of the change (LEVEL), as a share; see `_limit`."""
        return -_limit(self.lost, self.gained, self.items)

    @property
    def high(self) -> float:
        """Upper end."""
        return _limit(self.gained, self.lost, self.items)


class Change(NamedTuple):
    """A change of accuracy over seeds: the mean and its interval (LEVEL) as shares, mean flips, and a p-value."""

    value: float
    low: float
    high: float
    gained: float
    lost: float
    p_value: float


def perplexity(windows: list[dict]) -> tuple[float, float | None]:
    """Token perplexity of windows of {document, tokens, loss_sum (nats)}, and its standard error over `units`."""
    log, error = _mean_loss([window["loss_sum"] for window in windows], windows)
    return math.exp(log), None if error is None else math.exp(log) * error


def compare(ours: list[dict], reference: list[dict]) -> Ratio:
    """Our perplexity over the reference's, from differences of windows of {document, start, tokens, loss_sum (nats)}.

    The error is over `units`, documents or windows. Raises UserError when the two did not score the same windows.
    """
    return contrast([(1.0, ours), (-1.0, reference)])


def contrast(weighted: list[tuple[float, list[dict]]]) -> Ratio:
    """The product of perplexities to the power of their weights, from window-wise sums of weighted losses.

    Several rows' windows as in `compare`, each with its weight. Raises UserError unless all scored the same windows.
    """
    first = weighted[0][1]
    for _, windows in weighted[1:]:
        if [_place(each) for each in windows] != [_place(each) for each in first]:
            raise UserError(
                f"paired comparison: expected the same windows in both results, got {len(first)} and {len(windows)} "
                "windows that differ in document, start or tokens"
            )
    sums = [
        sum(weight * window["loss_sum"] for (weight, _), window in zip(weighted, same, strict=True))
        for same in zip(*(windows for _, windows in weighted), strict=True)
    ]
    return Ratio(*_mean_loss(sums, first))


def part(ours: list[dict], whole: list[dict], reference: list[dict]) -> tuple[float, float | None]:
    """Which part of the change from the reference's log perplexity to the whole's our row reaches, with its error.

    1 is all of it, 0 none. Windows as in `compare`; the error is that of a ratio of paired sums, by the delta method.
    """
    change = compare(whole, reference).log
    share = compare(ours, reference).log / change
    error = contrast([(1.0, ours), (-share, whole), (share - 1, reference)]).log_error
    return share, None if error is None else error / abs(change)


def units(windows: list[dict]) -> str:
    """What the errors of perplexities are over: "documents" where there are ENOUGH of them, else "windows"."""
    return "documents" if len({window["document"] for window in windows}) >= ENOUGH else "windows"


def combine(ratios: list[Ratio]) -> Ratio:
    """The mean over seeds: its error holds that over windows or documents, which seeds share, and that over seeds."""
    logs = [ratio.log for ratio in ratios]
    errors = [ratio.log_error for ratio in ratios]
    over_seeds = spread([ratio.value for ratio in ratios])
    if None in errors:
        return Ratio(fmean(logs), None, over_seeds, len(ratios))
    between = variance(logs) / len(logs) if len(logs) > 1 else 0.0
    return Ratio(fmean(logs), math.sqrt(fmean(error**2 for error in errors) + between), over_seeds, len(ratios))


def spread(values: list[float]) -> float | None:
    """Sample standard deviation over seeds; None for one seed."""
    return stdev(values) if len(values) > 1 else None


def scored(values: dict) -> list[int]:
    """The items of a task that are right, as the paper scores them: by length-normalised likelihood where there is one.

    The printed GPT-2 rows are lm-eval's acc_norm for HellaSwag, ARC-Easy and PIQA, and acc for LAMBADA.
    """
    return values.get("correct_norm") or values["correct"]


def accuracy(correct: list[int]) -> tuple[float, float | None]:
    """Share of 1s, and its standard error over items."""
    share = fmean(correct)
    return share, math.sqrt(share * (1 - share) / (len(correct) - 1)) if len(correct) > 1 else None


def flips(ours: list[int], reference: list[int]) -> Flips:
    """Which items changed. Raises UserError when the two did not answer the same number of items."""
    if len(ours) != len(reference):
        raise UserError(f"paired comparison: expected the same items, got {len(ours)} and {len(reference)}")
    pairs = list(zip(ours, reference, strict=True))
    return Flips(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs), len(pairs))


def paired(ours: list[float], reference: list[float]) -> tuple[float, float | None]:
    """Mean of our values minus the reference's, item by item, and its standard error (None for one item).

    Raises UserError when the two did not answer the same number of items.
    """
    if len(ours) != len(reference):
        raise UserError(f"paired comparison: expected the same items, got {len(ours)} and {len(reference)}")
    differences = [a - b for a, b in zip(ours, reference, strict=True)]
    deviation = spread(differences)
    return fmean(differences), None if deviation is None else deviation / math.sqrt(len(differences))


def mean_change(changes: list[Flips]) -> Change:
    """The mean change over seeds, which answered the same items.

    Its limits are as far from it as those of the seeds, by the root of the mean square, and the error of the mean over
    seeds (Student's t, since seeds are few), in quadrature. Twice the mean of p-values is one, however they depend on
    each other (Vovk and Wang, arXiv 1212.4966).
    """
    values, count = [change.change for change in changes], len(changes)
    between = student.ppf((1 + LEVEL) / 2, count - 1) * stdev(values) / math.sqrt(count) if count > 1 else 0.0
    below = math.hypot(math.sqrt(fmean((change.change - change.low) ** 2 for change in changes)), between)
    above = math.hypot(math.sqrt(fmean((change.high - change.change) ** 2 for change in changes)), between)
    mean, p_values = fmean(values), [change.p_value for change in changes]
    return Change(
        mean,
        max(mean - below, -1.0),
        min(mean + above, 1.0),
        fmean(change.gained for change in changes),
        fmean(change.lost for change in changes),
        p_values[0] if count == 1 else min(1.0, 2 * fmean(p_values)),
    )


def _limit(gained: int, lost: int, items: int) -> float:
    """Upper limit of a paired difference of proportions at LEVEL, as a share.

    Tango's score interval (Statistics in Medicine 17, 1998, 891-908), which keeps a width when nothing flips, widened
    to the exact conditional one (Clopper and Pearson's of the gained among the flips) where that is wider. So it leaves
    out 0 only where the exact test finds p < 1 - LEVEL.
    """
    flipped = gained + lost
    chance = binomtest(gained, flipped).proportion_ci(LEVEL, "exact").high if flipped else 0.0
    return max(_score_limit(gained, lost, items), (2 * chance - 1) * flipped / items)


def _score_limit(gained: int, lost: int, items: int) -> float:
    """The largest difference that the score test does not reject, by halving."""
    quantile = NormalDist().inv_cdf((1 + LEVEL) / 2)
    kept, beyond = (gained - lost) / items, 1.0
    for _ in range(HALVINGS):
        middle = (kept + beyond) / 2
        if (gained - lost - items * middle) ** 2 <= quantile**2 * items * _score_variance(gained, lost, items, middle):
            kept = middle
        else:
            beyond = middle
    return kept


def _score_variance(gained: int, lost: int, items: int, difference: float) -> float:
    """Variance of an item's change where the difference is given: 2 q + d - d^2, q the likeliest share of losses."""
    linear = (2 * items - gained + lost) * difference - gained - lost
    root = math.sqrt(max(linear**2 + 8 * items * lost * difference * (1 - difference), 0.0))
    return 2 * (root - linear) / (4 * items) + difference - difference**2


def _place(window: dict) -> tuple:
    return window["document"], window["start"], window["tokens"]


def _mean_loss(sums: list[float], windows: list[dict]) -> tuple[float, float | None]:
    """Loss per token of windows' sums, and its standard error as a ratio of sums over `units`."""
    by_document = units(windows) == "documents"
    totals: dict = {}
    for number, (loss, window) in enumerate(zip(sums, windows, strict=True)):
        unit = window["document"] if by_document else number
        before = totals.get(unit, (0.0, 0))
        totals[unit] = before[0] + loss, before[1] + window["tokens"]
    total, count = sum(window["tokens"] for window in windows), len(totals)
    mean = sum(sums) / total
    if count < 2:
        return mean, None
    residual = sum((loss - mean * size) ** 2 for loss, size in totals.values())
    return mean, math.sqrt(residual * count / (count - 1)) / total
