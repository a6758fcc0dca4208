"""The key tables of config/README.md, generated from the models, so that no key goes unexplained."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from focus.config import Experiment

WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", list: "list", dict: "mapping"}
START = "\n## The whole file\n"


def page(text: str) -> str:
    """The README's text with everything from the first generated section on made anew."""
    return text.split(START, maxsplit=1)[0] + START + "".join(_sections())


def _sections() -> Iterator[str]:
    paths: dict[type[BaseModel], list[str]] = {}
    for path, model in _walk("", Experiment):
        if path not in paths.setdefault(model, []):
            paths[model].append(path)
    for model, places in paths.items():
        heading = f"\n## {', '.join(f'`{place}`' for place in places)}\n" if places[0] else ""
        kind = model.model_fields.get("kind")
        if kind is not None and heading:
            heading = heading.rstrip() + f", kind `{get_args(kind.annotation)[0]}`\n"
        yield f"{heading}\n{model.__doc__.strip()}\n\n| key | value | default | meaning |\n| --- | --- | --- | --- |\n"
        for name, field in model.model_fields.items():
            yield f"| `{name}` | {_value(field.annotation)} | {_default(field)} | {field.description} |\n"


def _walk(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        for suffix, inner in _models(field.annotation):
            yield from _walk(f"{path}.{name}{suffix}".lstrip("."), inner)


def _models(annotation) -> Iterator[tuple[str, type[BaseModel]]]:
    """(what follows the key in a path, model) of every model inside an annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    elif origin is Annotated:
        yield from _models(arguments[0])
    elif origin in (Union, types.UnionType):
        for each in arguments:
            yield from _models(each)
    elif origin is dict:
        yield from ((f".<name>{suffix}", model) for suffix, model in _models(arguments[1]))
    elif origin is list:
        yield from ((f"[]{suffix}", model) for suffix, model in _models(arguments[0]))


def _value(annotation) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    value = WORDS.get(origin or annotation, "the keys below")
    if origin is Annotated:
        value = _value(arguments[0])
    elif origin is Literal:
        value = ", ".join(f"`{each}`" for each in arguments)
    elif origin is list and not any(_models(arguments[0])):
        value = f"list of {_value(arguments[0])}"
    elif origin in (Union, types.UnionType):
        optional = " or null" if types.NoneType in arguments else ""
        value = _value(next(each for each in arguments if each is not types.NoneType)) + optional
    return value


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        return "its defaults"
    plain = isinstance(field.default, bool | types.NoneType)
    return f"`{json.dumps(field.default) if plain else field.default}`"
