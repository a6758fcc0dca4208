"""Headings, grids and notes, written as Markdown or LaTeX from the same cells."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {"±": r"$\pm$", "~": r"\textasciitilde{}"}


@dataclass(frozen=True)
class Grid:
    """A titled grid of text; the first column is left-aligned, the rest right-aligned. `lines` explain it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    lines: list[str] = field(default_factory=list)


def markdown(title: str, grids: list[Grid], notes: list[str]) -> str:
    """The page: a heading, each grid under its own, and the notes."""
    parts = [f"# {title}"]
    for grid in grids:
        parts.append(f"## {grid.title}")
        parts += [line.replace("|", "\\|") for line in grid.lines]
        parts.append(_markdown_grid(grid))
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in notes)]) + "\n"


def latex(label: str, title: str, grids: list[Grid], notes: list[str]) -> str:
    """One floating table (needs booktabs), its notes below in small print."""
    parts = [r"\begin{table*}", r"\centering", r"\footnotesize", f"\\caption{{{escape(title)}}}"]
    parts.append(f"\\label{{tab:{label}}}")
    for grid in grids:
        parts += [rf"\textbf{{{escape(grid.title)}}}\par\smallskip"]
        parts += [rf"{escape(line)}\par\smallskip" for line in grid.lines]
        parts.append(rf"\begin{{tabular}}{{l{'r' * (len(grid.header) - 1)}}}")
        parts += [r"\toprule", _latex_row(grid.header), r"\midrule"]
        parts += [_latex_row(row) for row in grid.rows]
        parts += [r"\bottomrule", r"\end{tabular}\par\medskip"]
    parts += [r"\raggedright", *[rf"{escape(note)}\par" for note in notes], r"\end{table*}"]
    return "\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text as LaTeX shows it; backquoted names become typewriter."""
    escaped = "".join(LATEX.get(character, character) for character in text)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", escaped)


def _markdown_grid(grid: Grid) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [grid.header, *grid.rows]]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(grid.header))]
    header, *rows = [
        " | ".join(_pad(cell, width, column) for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    rule = " | ".join("-" * width if not column else "-" * (width - 1) + ":" for column, width in enumerate(widths))
    return "\n".join(f"| {line} |" for line in [header, rule, *rows])


def _pad(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def _latex_row(cells: list[str]) -> str:
    return " & ".join(escape(cell) for cell in cells) + r" \\"
