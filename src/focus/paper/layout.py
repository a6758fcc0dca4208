"""Headings, grids and notes, written as Markdown, HTML or LaTeX from the same cells."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
}
FITTED = r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}"
"""LaTeX for a box that keeps its size unless it is wider than the page."""
STYLE = (
    "body{font:14px sans-serif;margin:2em} table{border-collapse:collapse} td,th{padding:.2em .7em;"
    "border-bottom:1px solid #ccc} .left{text-align:left} .right{text-align:right;white-space:nowrap}"
)


@dataclass(frozen=True)
class Grid:
    """A titled grid of text; the first `text` columns are left-aligned, the rest right-aligned. `lines` explain it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    lines: list[str] = field(default_factory=list)
    text: int = 1


def markdown(title: str, grids: list[Grid], notes: list[str]) -> str:
    """The page: a heading, each grid under its own, and the notes."""
    parts = [f"# {title}"]
    for grid in grids:
        parts.append(f"## {grid.title}")
        parts += [line.replace("|", "\\|") for line in grid.lines]
        parts.append(_markdown_grid(grid))
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"


def page(title: str, grids: list[Grid], notes: list[str]) -> str:
    """The same as an HTML page, which the Snakemake report can show."""
    parts = ["<!doctype html>", '<meta charset="utf-8">', f"<style>{STYLE}</style>", f"<h1>{_html(title)}</h1>"]
    for grid in grids:
        parts += [f"<h2>{_html(grid.title)}</h2>", *(f"<p>{_html(line)}</p>" for line in grid.lines), "<table>"]
        for tag, cells in [("th", grid.header), *(("td", row) for row in grid.rows)]:
            sides = ["left" if column < grid.text else "right" for column in range(len(cells))]
            row = (f'<{tag} class="{side}">{_html(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True))
            parts.append(f"<tr>{''.join(row)}</tr>")
        parts.append("</table>")
    return "\n".join([*parts, "<ul>", *(f"<li>{_html(note)}</li>" for note in notes), "</ul>"]) + "\n"


def latex(label: str, title: str, grids: list[Grid], notes: list[str]) -> str:
    """A floating table for each grid (needs booktabs and graphicx), one wider than the page scaled down to it.

    The notes follow in small print.
    """
    parts = []
    for number, grid in enumerate(grids, 1):
        columns = "l" * grid.text + "r" * (len(grid.header) - grid.text)
        parts += [r"\begin{table*}", r"\centering\scriptsize", f"{FITTED}{{\\begin{{tabular}}{{{columns}}}"]
        parts += [r"\toprule", _latex_row(grid.header), r"\midrule", *map(_latex_row, grid.rows)]
        parts += [r"\bottomrule", r"\end{tabular}}"]
        parts.append(f"\\caption{{{escape(' '.join([f'{title}. {grid.title}.', *grid.lines]))}}}")
        parts += [f"\\label{{tab:{label}-{number}}}", r"\end{table*}", ""]
    return "\n".join([*parts, r"{\footnotesize", *(rf"\par {escape(note)}" for note in notes), "}"]) + "\n"


def escape(text: str) -> str:
    """Text as LaTeX shows it; backquoted names become typewriter."""
    escaped = "".join(LATEX.get(character, character) for character in text)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", escaped)


def _html(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _markdown_grid(grid: Grid) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [grid.header, *grid.rows]]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(grid.header))]
    header, *rows = [
        " | ".join(
            _pad(cell, width, column < grid.text) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    rule = " | ".join(
        "-" * width if column < grid.text else "-" * (width - 1) + ":" for column, width in enumerate(widths)
    )
    return "\n".join(f"| {line} |" for line in [header, rule, *rows])


def _pad(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


def _latex_row(cells: list[str]) -> str:
    return " & ".join(escape(cell) for cell in cells) + r" \\"
