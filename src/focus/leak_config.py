"""The settings of what shows whether a balance sees the future (PAPER.md 4.1); nothing here imports torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from focus.method_config import OWN_STATE, Balance, FocusConfig
from focus.strict import Count, Distinct, Name, NonNegative, Positive, Strict


class LeakRow(Strict):
    """Trained centroids that are looked at."""

    model: Name = Field(description="a key of model_settings")
    corpus: Name = Field(description="the corpus they are trained on, whose held-out windows are read")
    method: Name = Field(description="a key of methods, of kind focus")


class LeakMeasure(Strict):
    """What is measured on trained centroids under each balance, their projection and centroids unchanged."""

    balances: Distinct[Balance] = Field(
        ["sinkhorn", "prefix", "potentials", "softmax"],
        description="sinkhorn among them, against which the share that survives is taken, but not ema or recluster",
    )
    windows: int = Field(8, ge=2, description="held-out windows whose perplexity is measured")
    changed_windows: Count = Field(2, description="of these, the first in which later tokens are changed")
    corpora: list[Name] = Field([], description="other corpora on whose held-out windows dominance is measured, too")
    other_windows: Count = Field(4, description="held-out windows of each of the other corpora")
    calibration_windows: Count = Field(
        8, description="training windows that set the potentials of centroids trained under another balance"
    )

    @model_validator(mode="after")
    def _consistent(self) -> LeakMeasure:
        if "sinkhorn" not in self.balances or OWN_STATE & set(self.balances):
            raise ValueError(
                f"balances: expected sinkhorn, and neither {' nor '.join(sorted(OWN_STATE))}, "
                f"got {', '.join(self.balances)}"
            )
        if self.changed_windows > self.windows:
            raise ValueError(f"changed_windows: expected at most windows ({self.windows}), got {self.changed_windows}")
        return self


class LeakSettings(LeakMeasure):
    """Whether trained centroids see the future, and what is left of their gain when they do not."""

    rows: list[LeakRow] = Field(min_length=1, description="the trained centroids")

    @property
    def measure(self) -> LeakMeasure:
        """The settings of one row's job."""
        return LeakMeasure(**{name: getattr(self, name) for name in LeakMeasure.model_fields})


Trains = Literal["everything", "centroids"]


class BitsTraining(Strict):
    """A tiny GPT-2 that learns to predict independent fair bits, which no causal model can: its floor is ln 2."""

    adapter: FocusConfig = Field(description="what every model has; its balance is one of `balances`")
    layers: Count = Field(2, description="transformer layers")
    width: Count = Field(32, description="hidden size, a multiple of heads")
    heads: Count = Field(2, description="attention heads")
    initial_std: Positive = Field(0.1, description="deviation of the initial weights")
    steps: Count = Field(300, description="optimiser steps, with fresh bits each")
    learning_rate: Positive = Field(1.0e-2, description="peak learning rate of AdamW")
    batch_tokens: Count = Field(1024, description="tokens of a step, at least one sequence")
    evaluation_tokens: Count = Field(65536, description="fresh bits the loss is measured on, at least two sequences")

    @model_validator(mode="after")
    def _consistent(self) -> BitsTraining:
        if self.width % self.heads:
            raise ValueError(f"width: expected a multiple of heads ({self.heads}), got {self.width}")
        return self


class BitsSettings(BitsTraining):
    """The decisive probe: models that learn to predict random bits under each balance."""

    balances: Distinct[Balance] = Field(description="one model each")
    lengths: Distinct[Count] = Field(description="T, the bits of a sequence")
    trains: Distinct[Trains] = Field(["everything", "centroids"], description="which weights move")
    seeds: Distinct[NonNegative] | None = Field(None, description="null means the scale's seeds")

    @property
    def training(self) -> BitsTraining:
        """The settings of one model's job."""
        return BitsTraining(**{name: getattr(self, name) for name in BitsTraining.model_fields})
