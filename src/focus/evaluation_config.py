"""How rows are evaluated: perplexity, the tasks, written answers, long inputs and recall."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from focus.long_config import LongInputs, Recall
from focus.strict import Count, Precision, Strict

Task = Literal["hellaswag", "arc_easy", "piqa", "lambada", "truthfulqa_mc1"]


class Perplexity(Strict):
    """Held-out perplexity: windows spread evenly over the held-out documents, each read without earlier context."""

    windows: Count = Field(description="windows in all")
    stride: Count | None = Field(
        None, description="tokens between windows' scored parts; null means the context, the most"
    )
    batch_size: Count = Field(1, description="windows a forward pass takes")
    precision: Precision = Field("float32", description="of the model's products; see the scale's precision")


class Downstream(Strict):
    """Multiple choice and last-word tasks through lm-eval."""

    tasks: dict[Task, Count] = Field(description="items per task, from the start of a seeded shuffle")
    batch_size: Count = Field(8, description="requests a forward pass takes")
    precision: Precision = Field("auto", description="of the model's products; see the scale's precision")


class Generation(Strict):
    """Answers that a row writes itself, greedily, token by token."""

    task: Literal["gsm8k"] = Field("gsm8k", description="8 worked examples, then a question")
    items: Count = Field(8, description="questions, from the start of a seeded shuffle")
    context: Count = Field(2048, description="tokens of prompt and answer; at most what the model knows")
    max_new_tokens: Count = Field(256, description="longest answer in tokens")
    precision: Precision = Field("float32", description="of the model's products; see the scale's precision")

    @model_validator(mode="after")
    def _consistent(self) -> Generation:
        if self.max_new_tokens >= self.context:
            raise ValueError(f"max_new_tokens must be below context ({self.context}), got {self.max_new_tokens}")
        return self


class Evaluation(Strict):
    """How rows are evaluated."""

    perplexity: Perplexity = Field(description="held-out perplexity")
    downstream: Downstream = Field(description="the tasks")
    generation: Generation = Field(Generation(), description="answers written by the rows themselves")
    long_inputs: LongInputs = Field(LongInputs(), description="the tasks with each item behind other tokens")
    recall: Recall = Field(Recall(), description="hidden numbers and passages that come twice")
