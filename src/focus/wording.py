"""How a mistake in settings is said: one line from what pydantic found, and the nearest of many names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from focus.errors import UserError
from focus.strict import NAME

Model = TypeVar("Model", bound=BaseModel)
SHOWN = 160
"""Characters that a list of names may take; a longer one is counted instead."""
NEAR = 0.7
"""How alike two names must be (difflib's ratio) for one to be suggested for the other."""
BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
KEY = "[key]"


@dataclass(frozen=True)
class Mistake:
    """What is wrong at `key`, a dotted path ("" for the whole), and how many mistakes more there are."""

    key: str
    problem: str
    others: int = 0

    @property
    def line(self) -> str:
        """`key: problem`, and that there are more."""
        more = f" (and {self.others} more)" if self.others else ""
        return f"{self.key}: {self.problem}{more}" if self.key else f"{self.problem}{more}"


def among(names: Collection[str]) -> str:
    """The names where they are few, else how many there are."""
    listed = ", ".join(map(str, names))
    return listed if len(listed) <= SHOWN else f"{len(names)} names"


def instead(got: object, names: Collection[str]) -> str:
    """`got X`, and the nearest of the names if one is near."""
    near = [name for name in get_close_matches(str(got), list(map(str, names)), n=2, cutoff=NEAR) if name != got]
    shown = got if isinstance(got, str) and len(got) <= SHOWN else _shown(got)
    return f"got {shown}" + (f"; did you mean {near[0]}?" if near else "")


def parse(model: type[Model], text: str, where: str) -> Model:
    """The settings that a JSON text holds. Raises UserError, one line that begins with `where`."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"{where}: {mistake(error, model).line}") from None


def mistake(error: ValidationError, model: type[BaseModel]) -> Mistake:
    """The first of the mistakes that pydantic found in the settings of `model`."""
    found = error.errors()
    first = next((each for each in found if each["type"] != "missing"), found[0])
    schema = model.model_json_schema()
    location = [part for part in first["loc"] if part != KEY]
    path = list(_untagged(location, schema))
    kind, context = first["type"], first.get("ctx", {})
    problem = _problem(kind, first["msg"], context, first["input"])
    if kind == "value_error" and not path and (parts := re.fullmatch(r"([^\s:]+): (.*)", problem)):
        path, problem = [parts[1]], parts[2]
    elif kind == "extra_forbidden":
        near = get_close_matches(str(location[-1]), _keys(location[:-1], schema), n=1, cutoff=NEAR)
        problem += f"; did you mean {near[0]}?" if near else ""
    elif kind.startswith("union_tag"):
        path.append(context["discriminator"].strip("'"))
    return Mistake(".".join(map(str, path)), problem, len(found) - 1)


def _problem(kind: str, message: str, context: dict, got: object) -> str:
    """What pydantic's error of this kind says: what was expected, and what came."""
    if kind in SAID:
        return SAID[kind](context, got)
    if kind in BOUNDS:
        word, bound = BOUNDS[kind]
        return f"expected {word} {context[bound]:g}, got {_shown(got)}"
    problem = f"expected {message.removeprefix('Input should be ')}, got {_shown(got)}"
    if isinstance(got, str) and re.fullmatch(r"[\d.]+[eE][+-]?\d+", got):
        problem += " (YAML reads a number only with a point and a sign: 1.0e-3)"
    return problem


def _one_of(context: dict, got: object) -> str:
    expected = context["expected"].replace("'", "")
    return f"expected {expected}, {instead(got, re.split(', | or ', expected))}"


def _tag(context: dict, got: object) -> str:
    expected = re.findall(r"'([^']*)'", context["expected_tags"])
    return f"expected one of {among(expected)}, {instead(context['tag'], expected)}"


def _pattern(context: dict, got: object) -> str:
    named = context["pattern"] == NAME
    plain = "lower-case letters, digits and . _ -, a letter or digit first"
    return f"expected {plain if named else 'what matches ' + context['pattern']}, got {_shown(got)}"


def _too_few(context: dict, got: object) -> str:
    least = context["min_length"]
    return f"expected at least {least} item{'s' * (least > 1)}, got {context['actual_length']}"


def _no_mapping(context: dict, got: object) -> str:
    return f"expected a mapping of keys, got {_shown(got)}"


SAID: dict[str, Callable[[dict, object], str]] = {
    "value_error": lambda context, got: str(context["error"]),
    "missing": lambda context, got: "this key is missing",
    "extra_forbidden": lambda context, got: "there is no such key",
    "union_tag_not_found": lambda context, got: "this key is missing",
    "union_tag_invalid": _tag,
    "literal_error": _one_of,
    "string_pattern_mismatch": _pattern,
    "too_short": _too_few,
    "json_invalid": lambda context, got: f"expected JSON, got: {context['error']}",
    "model_type": _no_mapping,
    "model_attributes_type": _no_mapping,
    "dict_type": _no_mapping,
}
"""By the kind of pydantic's error: what is said of its context and of what came."""


def _shown(value: object) -> str:
    """A value as an error names it: a mapping or a long list by its type, a long text by its beginning."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a mapping of keys"
    shown = repr(value)
    if len(shown) <= SHOWN:
        return shown
    return "a list" if isinstance(value, list) else f"{shown[:SHOWN]}..."


def _untagged(location: list, schema: dict) -> Iterator:
    """The location without the tags of unions, which are no keys."""
    nodes = [schema]
    for part in location:
        tagged = [node["discriminator"]["mapping"] for node in _options(nodes, schema) if "discriminator" in node]
        if not any(part in mapping for mapping in tagged):
            yield part
        nodes = list(_step(nodes, part, schema))


def _keys(location: list, schema: dict) -> list[str]:
    """The keys that settings at this place may have."""
    nodes = [schema]
    for part in location:
        nodes = list(_step(nodes, part, schema))
    return [name for node in _options(nodes, schema) for name in node.get("properties", {})]


def _step(nodes: list[dict], part: str | int, schema: dict) -> Iterator[dict]:
    """What a part of a location leads to in each of the nodes of a JSON schema."""
    for node in _options(nodes, schema):
        if "discriminator" in node:
            if part in node["discriminator"]["mapping"]:
                yield {"$ref": node["discriminator"]["mapping"][part]}
        elif isinstance(part, int):
            yield node.get("items", {})
        elif part in node.get("properties", {}):
            yield node["properties"][part]
        else:
            yield from node.get("patternProperties", {}).values()
            if isinstance(node.get("additionalProperties"), dict):
                yield node["additionalProperties"]


def _options(nodes: list[dict], schema: dict) -> Iterator[dict]:
    """The nodes with references followed and unions, but for tagged ones, taken apart."""
    for node in nodes:
        if "$ref" in node:
            yield from _options([schema["$defs"][node["$ref"].rpartition("/")[2]]], schema)
        elif "anyOf" in node:
            yield from _options(node["anyOf"], schema)
        else:
            yield node
