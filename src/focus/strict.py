"""What every settings model is built on."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

T = TypeVar("T")


def _distinct(values: list[T]) -> list[T]:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"expected each value once, got {value} {values.count(value)} times")
    return values


Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Precision = Literal["auto", "float32", "bfloat16"]
NAME = r"^[a-z0-9][a-z0-9._-]*$"
Name = Annotated[str, Field(pattern=NAME)]
Distinct = Annotated[list[T], Field(min_length=1, json_schema_extra={"uniqueItems": True}), AfterValidator(_distinct)]


class Strict(BaseModel):
    """No unknown keys, no silent conversion (the YAML string `1e-3` is no number), finite numbers, no later change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
