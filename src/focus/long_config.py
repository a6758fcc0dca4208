"""The settings of the evaluations with long inputs, as strict models; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from focus.strict import Count, Distinct, Precision, Strict

LongTask = Literal["hellaswag", "arc_easy", "piqa", "lambada"]
Depth = Annotated[float, Field(ge=0, le=1)]


class LongInputs(Strict):
    """The tasks again, each item behind as many tokens as said, so that groups can matter (PAPER.md 4.5)."""

    tasks: dict[LongTask, Count] = Field(
        {"hellaswag": 16, "arc_easy": 16, "piqa": 16, "lambada": 16},
        description="items per task, the first of those that downstream takes, so that both are paired",
    )
    behind: Distinct[Literal["text", "examples"]] = Field(
        ["text"], description="what stands before an item: held-out text, or worked examples of its own task"
    )
    tokens: Count = Field(1024, description="tokens before each item")
    windows: Count = Field(2, description="different beginnings, which the items of a task take in turn")
    precision: Precision = Field("auto", description="of the model's products; see the scale's precision")


class Recall(Strict):
    """What a row still knows from far back: facts hidden in a text, and passages that come a second time."""

    tests: Distinct[Literal["needle", "copy"]] = Field(
        ["needle", "copy"], description="hidden numbers to be named, passages to be continued"
    )
    lengths: Distinct[Count] = Field([1024, 2048], description="tokens of an input, with question and answer")
    windows: Count = Field(1, description="stretches of held-out text at each length, for needles and for passages")
    depths: Distinct[Depth] = Field(
        [0.0, 0.15, 0.3, 0.45, 0.6, 0.75],
        max_length=20,
        description="where the numbers hide, one each, as a share of the text before them",
    )
    digits: int = Field(5, ge=2, le=9, description="of a hidden number")
    candidates: int = Field(10, ge=2, le=100, description="numbers of which the likeliest counts, the hidden one among")
    passages: Distinct[Literal["text", "random"]] = Field(
        ["text", "random"], description="what comes twice: the text's own words, or random tokens"
    )
    passage: int = Field(64, ge=2, description="tokens of what comes twice")
    precision: Precision = Field("auto", description="of the model's products; see the scale's precision")

    @model_validator(mode="after")
    def _consistent(self) -> Recall:
        if "copy" in self.tests and min(self.lengths) < 3 * self.passage:
            raise ValueError(f"lengths must be at least three passages ({3 * self.passage}), got {min(self.lengths)}")
        if len(self.depths) * self.candidates > 9 * 10 ** (self.digits - 1):
            raise ValueError(f"digits must give each depth {self.candidates} numbers of its own, got {self.digits}")
        return self
