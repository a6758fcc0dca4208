"""What a claim is: the keys of config/claims.yaml, whose head explains them, and how the file is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from focus.errors import UserError
from focus.paper import arithmetic, gain, printed, speed
from focus.paper.rows import TASKS
from focus.strict import Count, Name, Strict
from focus.wording import mistake

ROW = r"^[^/]+/[^/]+$"
METRICS = Literal[
    *("perplexity", "accuracy", "scored_beyond_window", "pairs_kept", "far_pairs_kept", "trained_parameters"),
    *("dominance", "held_out_dominance", "stability", "collapse", "gsm8k"),
    *gain.SHOWN_BY,
    *speed.METRICS,
    *("source", "arithmetic"),
]
COMPARED = ("perplexity", "accuracy", "gsm8k", "dominance", "held_out_dominance", "stability", "source")
"""Metrics whose difference between two rows or numbers can be a claim; arithmetic has functions for that."""

BY_TASK = ("accuracy", "scored_beyond_window")
TRAINED = ("dominance", "stability", "collapse")
"""Metrics of a training's probe."""


class Source(Strict):
    """A number in result files."""

    result: str
    key: str
    error: str | None = None
    factor: float = 1.0
    over: Literal["mean", "min", "max", "all"] | None = None
    seeds: Literal["all", "first"] = "all"

    @model_validator(mode="after")
    def _one_error(self) -> Source:
        if self.over and self.error:
            raise ValueError(f"error: expected none beside over, which makes one number of many, got {self.error}")
        return self


class Formula(Strict):
    """A number computed from model shapes or from printed numbers."""

    function: str
    arguments: dict[str, int | float | str | list[int | float | str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known(self) -> Formula:
        arithmetic.call(self.function, self.arguments)
        return self


class Claim(Strict):
    """One claim; the head of config/claims.yaml explains the keys."""

    id: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    place: str
    statement: str
    origin: Literal["paper", "ours"] = "paper"
    printed: list[str] = Field(default_factory=list)
    kind: Literal["value", "ordering", "identity", "bound"]
    metric: METRICS
    subject: str | None = Field(None, pattern=ROW)
    reference: str | None = Field(None, pattern=ROW)
    source: Source | Formula | None = None
    against: Source | None = None
    percent: bool = False
    paired: bool = False
    relation: Literal["below", "above", "at_most", "at_least"] | None = None
    limit: float | None = None
    shortest: int | None = None
    longest: int | None = None
    horizon: Count | None = None
    tolerance: float = Field(ge=0)
    margin: float = Field(0.0, ge=0)
    reason: str
    tasks: list[Literal[tuple(TASKS)]] = Field(default_factory=list)
    only_models: list[Name] = Field(default_factory=list)
    only_corpora: list[Name] = Field(default_factory=list)
    models: list[Name] = Field(default_factory=list)
    corpora: list[Name] = Field(default_factory=list)
    stand_ins: bool = False
    unit: str = ""
    out_of_reach: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_source(cls, settings: dict) -> dict:
        source = settings.get("source")
        if isinstance(source, dict) and "metric" not in settings:
            return settings | {"metric": "arithmetic" if "function" in source else "source"}
        return settings

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        for number in self.printed:
            printed.number(number)
        relations = {"ordering": ("below", "above"), "bound": ("at_most", "at_least")}.get(self.kind, (None,))
        if self.relation not in relations:
            raise ValueError(f"relation: expected one of {relations} for kind {self.kind}, got {self.relation}")
        if (self.limit is not None) != (self.kind == "bound"):
            raise ValueError(f"limit belongs to kind bound and only there, got kind {self.kind}")
        if self.kind == "value" and len(self.printed) != 1:
            raise ValueError(f"kind value: expected one printed number, got {len(self.printed)}")
        if self.kind == "value" and self.metric != "arithmetic" and not (self.models and self.corpora):
            raise ValueError("kind value: expected one printed number, models and corpora")
        if self.margin and self.kind != "ordering":
            raise ValueError(f"margin belongs to kind ordering and only there, got kind {self.kind}")
        joined = [source.over == "all" for source in (self.source, self.against) if isinstance(source, Source)]
        if any(joined) and not (self.paired and all(joined)):
            raise ValueError("over all: expected paired, and the same of source and against")
        self._check_place()
        self._check_comparison()
        return self

    def _check_place(self) -> None:
        """Rows, sources and arithmetic each have their own keys."""
        sourced = self.metric in ("source", "arithmetic")
        if sourced != (self.source is not None) or (self.metric == "arithmetic") != isinstance(self.source, Formula):
            raise ValueError(f"source: expected one of metric source or arithmetic, got metric {self.metric}")
        if sourced == (self.subject is not None) and not self.out_of_reach:
            raise ValueError(f"subject: expected method/variant, or a source instead, got {self.subject}")
        if self.metric not in speed.METRICS and (self.shortest, self.longest) != (None, None):
            raise ValueError(f"shortest and longest belong to {' and '.join(speed.METRICS)}, got {self.metric}")
        if self.horizon is not None and self.metric != "collapse":
            raise ValueError(f"horizon belongs to metric collapse and only there, got {self.metric}")
        if self.tasks and self.metric not in BY_TASK:
            raise ValueError(f"tasks belong to {' and '.join(BY_TASK)}, got {self.metric}")

    def _check_comparison(self) -> None:
        other = self.against or self.reference
        if self.metric in speed.METRICS and self.kind not in ("bound", "value"):
            raise ValueError(f"kind: expected bound or value for metric {self.metric}, got {self.kind}")
        if self.metric == "arithmetic" and self.kind == "ordering":
            raise ValueError("kind: expected value, identity or bound for arithmetic, got ordering")
        if other is not None and self.metric not in COMPARED:
            raise ValueError(f"reference: expected none for metric {self.metric}, got {other}")
        needed = self.kind in ("ordering", "identity")
        needed |= self.metric in ("accuracy", "gsm8k") and self.kind != "value"
        if other is None and needed and self.metric != "arithmetic":
            raise ValueError(f"reference: expected method/variant for {self.kind} of {self.metric}, got none")
        if ((self.percent or self.paired) and self.against is None) or (self.percent and self.paired):
            raise ValueError("percent and paired: expected one of them at most, and against beside it")
        if other is not None and (self.metric == "source") != (self.against is not None):
            raise ValueError(f"against belongs to metric source, reference to the others, got {self.metric}")


class Question(Strict):
    """One place where the paper cannot be right, and the claims that settle it, by id."""

    id: str
    asks: str
    claims: list[str] = Field(min_length=1)


def questions(path: Path, claims: list[Claim]) -> list[Question]:
    """The questions of a file, if it has any. Raises UserError for one that is no question, or names no claim."""
    known = {claim.id for claim in claims}
    content = yaml.safe_load(Path(path).read_text())
    try:
        found = [Question.model_validate(each) for each in content.get("questions", [])]
    except ValidationError as error:
        raise UserError(f"{path}: questions: {mistake(error, Question).problem}") from None
    for question in found:
        if unknown := [name for name in question.claims if name not in known]:
            raise UserError(f"{path}: questions.{question.id}: expected the ids of claims, got {unknown[0]}")
    return found


def load(path: Path) -> list[Claim]:
    """The claims of a file. Raises UserError that names the claim and key at fault."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path}: expected a list under the key claims, got {type(error).__name__}: {error}") from None
    entries = content.get("claims") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UserError(f"{path}: expected a list under the key claims, got none")
    claims = []
    for number, entry in enumerate(entries):
        for name, settings in _each(entry, number):
            try:
                claims.append(Claim.model_validate(settings))
            except (ValidationError, UserError) as error:
                raise UserError(f"{path}: {_fault(name, error)}") from None
    twice = [name for name, count in Counter(claim.id for claim in claims).items() if count > 1]
    if twice:
        raise UserError(f"{path}: expected every id once, got {twice[0]} twice")
    return claims


def _each(entry: object, number: int) -> list[tuple[str, object]]:
    """(name, settings) of every claim that an entry stands for: one, or one for each of its `each`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("each"), dict):
        return [(entry.get("id", number) if isinstance(entry, dict) else number, entry)]
    common = {key: value for key, value in entry.items() if key != "each"}
    found = []
    for suffix, changes in entry["each"].items():
        name = f"{entry.get('id', number)}{suffix}"
        settings = common | changes | {"id": name}
        filled = settings.pop("name", suffix)
        found.append((name, settings | {"statement": str(settings.get("statement")).replace("{name}", str(filled))}))
    return found


def _fault(name: object, error: ValidationError | UserError) -> str:
    if isinstance(error, UserError):
        return f"claims.{name}: {error}"
    found = mistake(error, Claim)
    return f"{f'claims.{name}.{found.key}'.removesuffix('.')}: {found.problem}"
