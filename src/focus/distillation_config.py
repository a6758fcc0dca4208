"""The settings of training that keeps the frozen model's own attention, layer by layer (see distillation.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from focus.strict import Count, Positive, Strict

PairWeight = Literal["mass", "output", "squared_output"]


class Distillation(Strict):
    """Centroids that keep far pairs the frozen model needs, fitted to each layer by itself, without a backward pass."""

    windows: Count = Field(48, description="training windows that the frozen model reads once")
    steps: Count = Field(200, description="optimiser steps of each layer")
    batch_windows: Count = Field(8, description="windows a step takes")
    learning_rate: Positive = Field(0.05, description="peak learning rate of Adam, on whitened hidden states")
    first_temperature: Positive = Field(0.5, description="tau of the whitened assignment at the first step")
    last_temperature: Positive = Field(0.05, description="tau at the last step; in between it falls geometrically")
    pair_weight: PairWeight = Field(
        "output",
        description="what a far pair counts for, summed over heads: its attention weight (mass), times how far its "
        "value is from the head's output (output), or the square of that product (squared_output)",
    )
    pair_price: float = Field(
        2.0,
        ge=0,
        description="how dear a kept pair is: the share of far pairs kept, times this, is taken off the share of "
        "their weight kept; 1 leaves nothing to groups that ignore the weights, even or uneven",
    )
