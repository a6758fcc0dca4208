"""Tables and figures of a run as the page shows them: from the files beside it, each number led back to its result.

A table's HTML holds what is shown, its CSV the same numbers in full precision with the result file behind each.
"""

from __future__ import annotations

import csv
import io
import re
from base64 import b64encode
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean

from focus.paper.report_sources import Sources

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
COLOURS = 32
SCALES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3)


@dataclass
class Cell:
    """What a cell shows, the places of the results behind it, and its value in full precision where one matches."""

    text: str
    results: list[int] = field(default_factory=list)
    value: str = ""


@dataclass
class Grid:
    """One grid of a table: the sentences above it, its header, and its rows; the first `text` columns hold words."""

    title: str
    lines: list[str]
    header: list[str]
    rows: list[list[Cell]]
    text: int = 1


@dataclass
class Table:
    """One table; `ours` when nothing in it is printed in the paper; `not_run` are (row, reason)."""

    name: str
    title: str
    grids: list[Grid]
    notes: list[str]
    ours: bool
    not_run: list[tuple[str, str]]
    results: set[str]


@dataclass
class Figure:
    """One figure; `draw` gives it its picture as a data URI."""

    path: Path
    name: str
    title: str
    caption: str
    ours: bool
    uri: str = ""
    width: int = 0
    height: int = 0


def tables(root: Path, sources: Sources) -> list[Table]:
    """Every table of the folder that has both files, Table 1, 2, ... first."""
    paths = sorted(Path(root).glob("tables/*.html"), key=lambda path: natural(path.stem))
    return [_table(path, sources) for path in paths if path.with_suffix(".csv").exists()]


def natural(name: str) -> tuple:
    """The order of names by the numbers in them, those of the paper's tables and figures first."""
    parts = tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
    return (not re.match(r"(table|figure)\d", name), *map(str, parts[:1]), *parts[1:2], *map(str, parts[2:]))


def draw(figures: list[Figure], largest: int) -> None:
    """Give the figures their pictures, with few colours and as large as `largest` bytes of all together allow.

    Bytes fall about as the side does; the smallest scale is taken when none fits.
    """
    fits = 1.0
    for scale in SCALES:
        if scale > fits and scale != SCALES[-1]:
            continue
        for figure in figures:
            figure.uri, figure.width, figure.height = _picture(figure.path, scale)
        size = sum(len(figure.uri) for figure in figures)
        if size <= largest:
            break
        fits = scale * largest / size


def _picture(path: Path, scale: float) -> tuple[str, int, int]:
    """(data URI, width, height) of a figure; the size is that of the original."""
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    full = image.size
    if scale < 1:
        image = image.resize([round(scale * side) for side in full], Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).convert("RGB").save(buffer, "WEBP", lossless=True, method=4)
    return f"data:image/webp;base64,{b64encode(buffer.getvalue()).decode()}", *full


def _table(path: Path, sources: Sources) -> Table:
    page = _Page()
    page.feed(path.read_text())
    with open(path.with_suffix(".csv"), newline="") as file:
        lines = list(csv.DictReader(file))
    behind = _behind(lines, sources)
    for grid in page.grids:
        _lead_back(grid, lines, behind, sources)
    printed = any(line.get("paper") or line.get("paper_row") for line in lines)
    missing = {(_row(line), line["not_run"].removeprefix("not run: ")): None for line in lines if line.get("not_run")}
    return Table(
        path.stem, page.title, page.grids, page.notes, not printed, list(missing), {each for each in behind if each}
    )


def _row(line: dict[str, str]) -> str:
    return " on ".join(part for part in (line.get("row"), line.get("model")) if part)


def _behind(lines: list[dict[str, str]], sources: Sources) -> list[str]:
    """The result file behind each line of a CSV: the one it names, or the only one it can be from."""
    known: dict[tuple, str] = {}
    found = []
    for line in lines:
        if "result" in line:
            found.append(line["result"])
            continue
        key = tuple(line.get(name) for name in ("code", "model", "corpus", "method", "seed"))
        if key not in known:
            like = sources.like(line)
            known[key] = like[0] if len(like) == 1 else ""
        found.append(known[key])
    return found


def _lead_back(grid: Grid, lines: list[dict[str, str]], behind: list[str], sources: Sources) -> None:
    """Give each number of a grid its result: of the lines of its row, or of all where the CSV names no rows."""
    pairs = list(zip(lines, behind, strict=True))
    models = sorted({line.get("model") or "" for line in lines}, key=len, reverse=True)
    model = next((name for name in models if name and grid.title.startswith(name)), None)
    if model is not None:
        pairs = [pair for pair in pairs if pair[0].get("model") == model]
    named = any("row" in line for line in lines)
    for row in grid.rows:
        mine = [pair for pair in pairs if pair[0].get("row") == row[0].text] if named else pairs
        everything = list(dict.fromkeys(path for _, path in mine if path))
        for header, cell in zip(grid.header, row, strict=False):
            if not re.search(r"\d", cell.text) or (cell is row[0] and named) or "paper" in header.lower():
                continue
            match = matching(cell.text, header, mine)
            paths = (match and match[1]) or everything
            cell.results = sources.places(paths) if match or named or len(everything) == 1 else []
            cell.value = match[0] if match else ""
        row[0].results = sources.places(everything) if named or len(everything) == 1 else []


def matching(text: str, header: str, pairs: list[tuple[dict[str, str], str]]) -> tuple[str, list[str]] | None:
    """(value in full precision, results) of the CSV's number that a cell shows first, or None unless there is one.

    A metric's mean over lines of a seed each counts too. Of several that round to what is shown, those whose metric
    shares most words with the column's header are taken.
    """
    shown = NUMBER.search(text).group()
    decimals = len(shown.partition(".")[2])
    lines: dict[str, list[tuple[str, str]]] = {}
    seeds: dict[str, set[str]] = {}
    for line, path in pairs:
        if _is_number(line.get("value")):
            lines.setdefault(line.get("metric", ""), []).append((line["value"], path))
            seeds.setdefault(line.get("metric", ""), set()).add(line.get("seed", ""))
    found: dict[tuple[str, tuple[str, ...]], str] = {}
    for metric, values in lines.items():
        several = [(str(fmean(float(value) for value, _ in values)), tuple(path for _, path in values))]
        single = [(value, (path,)) for value, path in values]
        for value, paths in [*single, *several * (1 < len(values) == len(seeds[metric]))]:
            if any(f"{factor * float(value):,.{decimals}f}" == shown.lstrip("+") for factor in (1, 100)):
                found[value, paths] = metric
    words = set(re.findall(r"[a-z]+", header.lower()))
    shared = {key: len(words & set(metric.lower().split("_"))) for key, metric in found.items()}
    chosen = [key for key, count in shared.items() if count == max(shared.values())]
    if len(chosen) != 1:
        return None
    value, paths = chosen[0]
    return value, [path for path in paths if path]


def _is_number(text: str | None) -> bool:
    try:
        return text is not None and float(text) == float(text)
    except ValueError:
        return False


class _Page(HTMLParser):
    """Reads back what `focus.paper.layout.page` writes."""

    def __init__(self):
        super().__init__()
        self.title, self.grids, self.notes = "", [], []
        self.text, self.row, self.heads, self.left = "", [], False, 0

    def handle_starttag(self, tag, attributes):
        if tag == "code":
            self.text += "`"
            return
        self.text = ""
        if tag == "h2":
            self.grids.append(Grid("", [], [], []))
        elif tag == "tr":
            self.row, self.heads, self.left = [], False, 0
        elif tag in ("td", "th"):
            self.heads = tag == "th"
            self.left += ("class", "left") in attributes

    def handle_data(self, data):
        self.text += data

    def handle_endtag(self, tag):
        text = self.text.strip()
        if tag == "code":
            self.text += "`"
        elif tag == "h1":
            self.title = text
        elif tag == "li":
            self.notes.append(text)
        elif tag in ("td", "th"):
            self.row.append(text)
        elif self.grids and tag == "h2":
            self.grids[-1].title = text
        elif self.grids and tag == "p":
            self.grids[-1].lines.append(text)
        elif self.grids and tag == "tr":
            grid = self.grids[-1]
            grid.text = self.left
            if self.heads:
                grid.header = self.row
            else:
                grid.rows.append([Cell(cell) for cell in self.row])
