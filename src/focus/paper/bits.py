"""Held-out loss of models that learn random bits, beside the floor no causal model passes, from `focus bits train`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pandas

from focus.errors import UserError
from focus.paper import layout, statistics
from focus.paper.layout import Grid
from focus.provenance import read_result, write_atomically

TITLE = "Random bits, which only a model that sees the future can predict"
CERTAIN = 4.0
"""Standard errors below the floor from which a loss counts as below it, in every seed."""
COLUMNS = [
    *("balance", "length", "trains", "seed", "loss", "error", "floor", "sigmas_below_floor", "below_floor"),
    *("declared_causal", "count_bound", "base_loss", "tokens", "device", "dtype", "code", "source"),
]
TRAINED = {"everything": "every weight trained", "centroids": "centroids alone, on a frozen model"}


@dataclass(frozen=True)
class Point:
    """One balance, length and trained part over its seeds."""

    balance: str
    length: int
    trains: str
    results: list[dict]

    @property
    def loss(self) -> float:
        """Mean over seeds, in nats a bit."""
        return fmean(result["metrics"]["loss"] for result in self.results)

    @property
    def error(self) -> float:
        """Of the mean: the seeds' errors over sequences, which are independent bits."""
        errors = [result["metrics"]["error"] for result in self.results]
        return math.sqrt(sum(error**2 for error in errors)) / len(errors)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return statistics.spread([result["metrics"]["loss"] for result in self.results])

    @property
    def below(self) -> list[bool]:
        """Of each seed, whether it is below the floor."""
        return [below(result["metrics"]) for result in self.results]

    @property
    def sigmas(self) -> float:
        """How many standard errors below the floor, in the seed nearest to it."""
        return min(result["metrics"]["sigmas_below_floor"] for result in self.results)

    @property
    def first(self) -> dict:
        """The metrics of the first seed."""
        return self.results[0]["metrics"]


def below(metrics: dict) -> bool:
    """Whether a loss is below the floor by more than CERTAIN standard errors."""
    return metrics["sigmas_below_floor"] > CERTAIN


def load(paths: Sequence[Path]) -> list[tuple[dict, Path]]:
    """The results. Raises UserError when a file is missing or another kind of result."""
    found = [(read_result(path), path) for path in paths]
    for result, path in found:
        if result["experiment"] != "bits":
            raise UserError(f"{path}: expected the result of focus bits train, got one of {result['experiment']}")
    return found


def points(found: Sequence[tuple[dict, Path]]) -> list[Point]:
    """The results of each balance, length and trained part together, in the order in which they come."""
    rows: dict[tuple, list[dict]] = {}
    for result, _ in found:
        settings = result["settings"]
        rows.setdefault((settings["balance"], settings["length"], settings["trains"]), []).append(result)
    return [Point(*key, results) for key, results in rows.items()]


def write(paths: Sequence[Path], output_prefix: Path) -> None:
    """Write `output_prefix`.csv, .md, .html and .tex."""
    found = load(paths)
    known = points(found)
    grids = [_grid(trains, [point for point in known if point.trains == trains]) for trains in _trained(known)]
    notes = _notes(known)
    write_atomically(Path(f"{output_prefix}.csv"), frame(found).to_csv(index=False))
    write_atomically(Path(f"{output_prefix}.md"), layout.markdown(TITLE, grids, notes))
    write_atomically(Path(f"{output_prefix}.html"), layout.page(TITLE, grids, notes))
    write_atomically(Path(f"{output_prefix}.tex"), layout.latex("bits", TITLE, grids, notes))


def frame(found: Sequence[tuple[dict, Path]]) -> pandas.DataFrame:
    """One line a result, in nats a bit and full precision."""
    lines = []
    for result, path in found:
        metrics, provenance = result["metrics"], result["provenance"]
        line = {name: result["settings"][name] for name in ("balance", "length", "trains", "seed")}
        line |= {name: metrics[name] for name in COLUMNS if name in metrics}
        line |= {name: provenance[name] for name in ("device", "dtype", "code")}
        base = metrics["base"]["loss"] if metrics["base"] else None
        lines.append(line | {"below_floor": below(metrics), "base_loss": base, "source": str(path)})
    return pandas.DataFrame(lines, columns=COLUMNS)


def _trained(known: list[Point]) -> list[str]:
    return list(dict.fromkeys(point.trains for point in known))


def _grid(trains: str, known: list[Point]) -> Grid:
    frozen = trains == "centroids"
    header = ["Balance", "T", "Held-out loss", "Below the floor", "Standard errors below", "Told the number of ones"]
    header += ["Frozen model before"] * frozen + ["Sees the future", "Declared causal"]
    lines = []
    for point in known:
        first, seeds = point.first, "" if point.spread is None else f", seeds ± {point.spread:.4f} ({len(point.below)})"
        line = [point.balance, str(point.length), f"{point.loss:.4f} ± {point.error:.4f}{seeds}"]
        line += [f"{first['floor'] - point.loss:+.4f}", f"{point.sigmas:+.1f}", f"{first['count_bound']:.4f}"]
        line += [f"{first['base']['loss']:.4f}"] if frozen else []
        proved = "yes" if all(point.below) else "in some seeds" if any(point.below) else "not shown"
        lines.append([*line, proved, "yes" if first["declared_causal"] else "no"])
    return Grid(TRAINED[trains][:1].upper() + TRAINED[trains][1:], header, lines, [])


def _notes(known: list[Point]) -> list[str]:
    results = [result for point in known for result in point.results]
    settings, first = results[0]["settings"]["training"], known[0].first
    adapter = settings["adapter"]
    return [
        f"Independent fair bits: the floor is ln 2 = {first['floor']:.6f} nats a bit for whatever sees no later bit. "
        f"Sees the future: below it by more than {CERTAIN:g} standard errors in every seed; a loss at the floor proves "
        "nothing, as the model may not have learnt to use what it sees.",
        "Told the number of ones: the mean loss of whoever knows in advance how many bits of the sequence are 1, and "
        "no more. Column sums over the sequence tell that much.",
        f"GPT-2 of {settings['layers']} layers, width {settings['width']}, {settings['heads']} heads; "
        f"{settings['steps']} steps of {settings['batch_tokens']:,} fresh bits, AdamW at "
        f"{settings['learning_rate']:g}; K={adapter['groups']}, w={adapter['window']}, "
        f"tau={adapter['temperature']:g}, gate {adapter['gate']} with "
        f"lam={adapter['steepness']:g}, {adapter['sinks']} sinks. Measured on some "
        f"{settings['evaluation_tokens']:,} fresh bits a seed; ± is the standard error over sequences.",
        "Centroids alone: the model has first learnt, with full attention and as many steps, bits of which every other "
        "sequence holds as many ones as zeros, so that it counts the bits it has seen; then it is frozen.",
    ]
