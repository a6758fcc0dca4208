"""Whether two runs came to the same: their tables and figures byte by byte, their results number by number.

Left out is what the clock decides: durations and peak memory, the timings of attention, and what is made of these. What
made a result (its code, its processor) is no difference by itself: it is named beside those that there are.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from focus.errors import UserError
from focus.paper.reference import KEPT

TIMED = (
    *("speed/*", "tables/table6.*", "tables/table7speed.*", "figures/speed.*", "figures/figure1.*"),
    "figures/topk.*",
    *(f"tables/{name}.{suffix}" for name in ("gsm8k", "topk", "objective") for suffix in ("md", "html", "tex")),
)
"""What shows times; the CSVs of tables with a column of them are compared without."""
TIMED_COLUMNS = {"seconds", "peak_memory_mib"}
TIMED_METRICS = ("seconds", "per_second", "speedup")
DERIVED = ("claims.md", "claims.html", "report.*")
"""Pages of what claims.json and the results hold, verdicts on speed and durations included."""
ORIGIN = ("code", "versions", "processor", "threads", "backend", "device", "dtype", "revisions")
"""What of a result's provenance may explain a difference."""
UNTOLD = {"provenance", "folder"}
"""In JSON files, beside durations: how a result was made, and the folder of a manifest, named after its code."""
MISSING = object()


@dataclass
class Comparison:
    """How many files are the same, what differs, what may be why, and how many files the clock decides."""

    same: int = 0
    timed: int = 0
    differences: list[str] = field(default_factory=list)
    origins: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """One line a difference, then what was made otherwise, then the sum."""
        lines = list(self.differences)
        lines += [f"other {name} behind {count} of the results" for name, count in sorted(self.origins.items())]
        verdict = f"{len(self.differences)} differ" if self.differences else "identical"
        lines.append(f"{verdict}: {self.same} files are the same, {self.timed} hold timings and were not compared")
        return "\n".join(lines) + "\n"


def compare(first: Path, second: Path) -> Comparison:
    """What the repository would keep of two folders of results, side by side.

    Raises UserError when a folder holds no results.
    """
    found = [_kept(Path(folder)) for folder in (first, second)]
    for folder, paths in zip((first, second), found, strict=True):
        if not paths:
            raise UserError(f"{folder}: expected the results of a run, found none")
    result = Comparison()
    for path in sorted(found[0] | found[1]):
        if any(fnmatch(path, pattern) for pattern in (*TIMED, *DERIVED)):
            result.timed += 1
        elif path not in found[0] & found[1]:
            result.differences.append(f"{path}: only in {first if path in found[0] else second}")
        else:
            differences = list(_differences(path, Path(first) / path, Path(second) / path, result))
            result.differences += differences
            result.same += not differences
    return result


def _kept(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for pattern in KEPT for path in folder.glob(pattern) if path.is_file()}


def _differences(path: str, one: Path, other: Path, result: Comparison) -> Iterator[str]:
    """At most one line: what first differs in two files, and how much more does."""
    if one.read_bytes() == other.read_bytes():
        return
    if one.suffix == ".csv" and _untimed_lines(one) == _untimed_lines(other):
        return
    if one.suffix != ".json":
        yield f"{path}: differs"
        return
    contents = [_read(file) for file in (one, other)]
    if all("provenance" in content for content in contents):
        for name in ORIGIN:
            if contents[0]["provenance"].get(name) != contents[1]["provenance"].get(name):
                result.origins[name] = result.origins.get(name, 0) + 1
    unequal = list(_unequal(*map(_untimed, contents)))
    if unequal:
        more = f" (and {len(unequal) - 1} more)" if len(unequal) > 1 else ""
        yield f"{path}: {unequal[0]}{more}"


def _read(file: Path):
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: expected JSON, got a damaged file: {error}") from None


def _untimed_lines(table: Path) -> list[list[str]]:
    """The lines of a CSV, its header first, without its columns of durations and origins and its lines on speeds."""
    with table.open(newline="") as file:
        header, *lines = [*csv.reader(file)] or [[]]
    kept = [number for number, name in enumerate(header) if name not in TIMED_COLUMNS.union(ORIGIN)]
    lines = [line for line in lines if not any(cell.endswith(TIMED_METRICS) for cell in line)]
    return [[line[number] for number in kept] for line in (header, *lines)]


def _untimed(content):
    """What a JSON file holds, without its origin, durations, speeds, and verdicts on speeds."""
    if isinstance(content, dict):
        return {
            key: _untimed(value)
            for key, value in content.items()
            if key not in UNTOLD and not key.endswith(TIMED_METRICS)
        }
    if isinstance(content, list):
        return [_untimed(each) for each in content if not (isinstance(each, dict) and _on_speed(each))]
    return content


def _on_speed(claim: dict) -> bool:
    source = claim.get("source")
    timed = isinstance(source, dict) and str(source.get("result")).startswith("speed/")
    return claim.get("metric") == "speedup" or timed


def _unequal(one, other, where: str = "") -> Iterator[str]:
    """`place: value against value` for every leaf in which two trees differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(key, one.get(key, MISSING), other.get(key, MISSING)) for key in sorted(one.keys() | other.keys())]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(number, *pair) for number, pair in enumerate(zip(one, other, strict=True))]
    else:
        if one != other:
            yield f"{where}: {_short(one)} against {_short(other)}"
        return
    for key, left, right in pairs:
        yield from _unequal(left, right, f"{where}.{key}".lstrip("."))


def _short(value) -> str:
    if value is MISSING:
        return "nothing"
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
