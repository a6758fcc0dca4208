"""How numbers and sentences of the tables are written."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from focus.paper import statistics


def number(value: float, error: float | None = None) -> str:
    """A value and its error with the same decimals: two below 100, one below 1000, none above."""
    decimals = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{decimals}f}" + ("" if error is None else f" ± {error:,.{decimals}f}")


def ratios(values: list[statistics.Ratio | None]) -> list[str]:
    """A column of ratios and their spread over seeds: three decimals, or the four that its smallest error needs."""
    small = any(value and value.error and value.error < 0.0005 for value in values)
    decimals = 4 if small else 3
    shown = []
    for value in values:
        error = "" if value is None or value.error is None else f" ± {value.error:.{decimals}f}"
        spread = "" if value is None else spread_over_seeds(value.spread, value.seeds, decimals)
        shown.append("-" if value is None else f"{value.value:.{decimals}f}{error}{spread}")
    return shown


def paper_number(value: float | None) -> str:
    """A printed number, or a dash where the paper prints none."""
    return "-" if value is None else str(value)


def paper_ratio(value: float | None) -> str:
    """A ratio of printed perplexities."""
    return "-" if value is None else f"{value:.3f}"


def percent(share: float) -> str:
    """A share of 0 to 1 as percent."""
    return f"{100 * share:.1f} %"


def sentence(note: str) -> str:
    """A registry's note as a sentence."""
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def either(values: list) -> str:
    """a, b or c; at least one."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def mean_over_seeds(values: list[float], shown: Callable[[float], str]) -> str:
    """One seed's value, or the mean over seeds with the standard deviation and the number of seeds."""
    if len(values) < 2:
        return shown(values[0]) if values else "-"
    return f"{shown(fmean(values))} ± {shown(statistics.spread(values))} ({len(values)})"


def spread_over_seeds(deviation: float | None, seeds: int, decimals: int) -> str:
    """What follows a mean over several seeds: the standard deviation over them."""
    return "" if deviation is None else f", seeds ± {deviation:.{decimals}f} ({seeds})"
