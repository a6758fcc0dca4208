"""The errors beside the numbers: paired where two rows were measured on the same text or items.

Windows and items are treated as independent draws; windows of one document are not quite, so the errors of perplexity
are a lower limit when few documents are held out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import NamedTuple

from focus.errors import UserError


class Measured(NamedTuple):
    """A metric, or its change against a reference, with its standard error (0 when there is none)."""

    name: str
    value: float
    error: float


@dataclass(frozen=True)
class Ratio:
    """How many times one perplexity is another: the logarithm of the ratio and its standard error."""

    log: float
    log_error: float | None

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


def perplexity(windows: list[dict]) -> tuple[float, float | None]:
    """Token perplexity of windows of {tokens, loss_sum (nats)}, and its standard error over windows."""
    log, error = _mean_loss([window["loss_sum"] for window in windows], [window["tokens"] for window in windows])
    return math.exp(log), None if error is None else math.exp(log) * error


def compare(ours: list[dict], reference: list[dict]) -> Ratio:
    """Our perplexity over the reference's, from per-window differences of {document, start, tokens, loss_sum (nats)}.

    Raises UserError when the two did not score the same windows.
    """
    identity = [
        [(each["document"], each["start"], each["tokens"]) for each in windows] for windows in (ours, reference)
    ]
    if identity[0] != identity[1]:
        raise UserError(
            f"paired comparison: expected the same windows in both results, got {len(ours)} and {len(reference)} "
            "windows that differ in document, start or tokens"
        )
    differences = [our["loss_sum"] - base["loss_sum"] for our, base in zip(ours, reference, strict=True)]
    return Ratio(*_mean_loss(differences, [window["tokens"] for window in ours]))


def combine(ratios: list[Ratio]) -> Ratio:
    """The mean over seeds: its error holds that over windows, which seeds share, and that over seeds."""
    logs = [ratio.log for ratio in ratios]
    errors = [ratio.log_error for ratio in ratios]
    if None in errors:
        return Ratio(fmean(logs), None)
    between = variance(logs) / len(logs) if len(logs) > 1 else 0.0
    return Ratio(fmean(logs), math.sqrt(fmean(error**2 for error in errors) + between))


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


def _mean_loss(sums: list[float], tokens: list[int]) -> tuple[float, float | None]:
    """Loss per token, and its standard error as a ratio of sums over windows."""
    total, count = sum(tokens), len(tokens)
    mean = sum(sums) / total
    if count < 2:
        return mean, None
    residual = sum((each - mean * size) ** 2 for each, size in zip(sums, tokens, strict=True))
    return mean, math.sqrt(residual * count / (count - 1)) / total
