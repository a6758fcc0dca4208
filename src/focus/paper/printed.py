"""What the paper prints: printed.yaml, looked up by `table.row` or `table.row.column`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import yaml

from focus.errors import UserError
from focus.wording import among, instead


@cache
def printed() -> dict:
    """All of printed.yaml: {table: {place, model, corpus, context, window, steps, rows: {row: {column: number}}}}."""
    return yaml.safe_load(_text())


@cache
def _digits() -> dict:
    """The same with every number as the text that it is written as."""
    return yaml.load(_text(), Loader=yaml.BaseLoader)


def _text() -> str:
    return files("focus.paper").joinpath("printed.yaml").read_text()


def row(reference: str) -> dict:
    """The printed row `table.row` as {column: number, "label": str, "against": row name}.

    Raises UserError when the paper has no such row.
    """
    table, _, name = reference.partition(".")
    rows = printed().get(table, {}).get("rows", {})
    if name not in rows:
        known = [f"{key}.{each}" for key, value in printed().items() for each in value["rows"]]
        raise UserError(f"paper: expected a printed row ({among(known)}), {instead(reference, known)}")
    return rows[name]


def number(reference: str) -> float:
    """The printed number `table.row.column` (or `table.column` for one of the whole table).

    Raises UserError when the paper does not print it.
    """
    home, _, column = reference.rpartition(".")
    values = row(home) if "." in home else printed().get(home, {})
    if not isinstance(values.get(column), int | float):
        raise UserError(f"paper: expected a printed number, got {reference}")
    return values[column]


def rounding(reference: str) -> float:
    """Half a unit of the last digit of a printed number `table.row.column`, or `table.column`.

    Raises UserError when the paper does not print it.
    """
    number(reference)
    home, _, column = reference.rpartition(".")
    table, _, name = home.partition(".")
    values = _digits()[table]["rows"][name] if name else _digits()[table]
    _, _, decimals = values[column].partition(".")
    return 0.5 * 10.0 ** -len(decimals)


def against(reference: str) -> str | None:
    """The printed row that `table.row` is compared with, as "table.row", or None for the baseline itself."""
    name = row(reference).get("against")
    return None if name is None else f"{reference.partition('.')[0]}.{name}"


def baseline(reference: str) -> dict | None:
    """The values of that row, or None for the baseline itself."""
    name = against(reference)
    return None if name is None else row(name)


def rows_of(table: str) -> dict[str, dict]:
    """All printed rows of a table, as {"table.row": row}; empty for what the paper does not have."""
    return {f"{table}.{name}": values for name, values in printed().get(table, {}).get("rows", {}).items()}
