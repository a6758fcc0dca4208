"""The settings of the adapter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from focus.strict import Count, NonNegative, Positive, Strict

Gate = Literal["printed", "centred", "log_sigmoid", "exponential"]
Balance = Literal["sinkhorn", "prefix", "potentials", "softmax", "entropy", "stop_gradient", "ema", "recluster"]
READS: dict[Balance, Literal["sequence", "past", "token"]] = {
    "sinkhorn": "sequence",
    "prefix": "past",
    "potentials": "token",
    "softmax": "token",
    "entropy": "token",
    "stop_gradient": "token",
    "ema": "token",
    "recluster": "token",
}
"""What a token's groups depend on: the whole sequence, later tokens included; tokens up to it; or it alone."""
OWN_STATE: frozenset[Balance] = frozenset({"ema", "recluster"})
"""Balances whose routers hold more than the others', so that trained centroids cannot change to or from them."""


class FocusConfig(Strict):
    """The adapter: how tokens are grouped and what a group does to attention (paper section 2).

    The defaults are ours: causal, decodable, sinks kept. `FocusConfig.paper()` gives the paper's.
    """

    groups: Count = Field(8, description="K, the number of groups a layer sorts its tokens into")
    top_k: Count = Field(1, description="k, the groups a token joins when attention is hard")
    window: NonNegative = Field(
        128, description="w: keys at a distance of at most w are always seen; a config file sets it per model"
    )
    routing_dim: Count = Field(16, description="d_g, the width of the routing projection")
    temperature: Positive = Field(0.1, description="tau, which sharpens the assignment")
    sinkhorn_iterations: Count = Field(10, description="N, the normalisations over tokens then groups")
    gate: Gate = Field("log_sigmoid", description="the reading of Eq. 2 (see gates.py)")
    steepness: Positive = Field(10.0, description="lam of Eq. 2; the paper gives no value")
    balance: Balance = Field(
        "potentials",
        description="what keeps groups even: the paper's sinkhorn (sees the future), sinkhorn over each prefix "
        "(causal, but no cache can decode it; for comparison), frozen potentials, nothing "
        "(softmax), losses on uneven groups (entropy), those on a router that reads detached inputs (stop_gradient), "
        "centroids that are moving averages (ema), or k-means now and then (recluster)",
    )
    balance_weight: float = Field(
        0.01, ge=0, description="of the Switch balance loss, summed over layers (balance: entropy, stop_gradient)"
    )
    entropy_weight: float = Field(
        0.01,
        ge=0,
        description="of what the mean assignment's entropy lacks, summed over layers (balance: entropy, stop_gradient)",
    )
    ema_momentum: float = Field(
        0.99, ge=0, lt=1, description="share of the old centroids and projection kept at each step (balance: ema)"
    )
    recluster_every: Count = Field(100, description="steps between two runs of k-means (balance: recluster)")
    frozen: list[Literal["centroids", "projection"]] = Field(
        [], description="what of the router gets no gradient and stays as it was initialised"
    )
    detach_inputs: bool = Field(
        False, description="whether the router's gradient stops at its inputs and never reaches the layers below"
    )
    potential_momentum: float = Field(
        0.9, ge=0, lt=1, description="share of the old potentials kept at each training step"
    )
    sinks: NonNegative = Field(4, description="first real tokens that every query may see")
    projection_std: Positive | None = Field(None, description="deviation of the initial W_g; null means 1/sqrt(d)")
    centroid_std: Positive = Field(0.25, description="deviation of the initial centroids")

    @model_validator(mode="after")
    def _consistent(self) -> FocusConfig:
        if self.top_k > self.groups:
            raise ValueError(f"top_k must be at most groups ({self.groups}), got {self.top_k}")
        if "centroids" in self.frozen and self.balance in ("ema", "recluster"):
            raise ValueError(f"frozen must leave out centroids, which balance {self.balance} moves, got {self.frozen}")
        return self

    @property
    def causal(self) -> bool:
        """Whether no token's groups depend on later tokens."""
        return READS[self.balance] != "sequence"

    @property
    def per_token(self) -> bool:
        """Whether a token's groups depend on it alone, so that a cache can decode and batches need no care."""
        return READS[self.balance] == "token"

    @property
    def learnt(self) -> set[str]:
        """Which of "centroids" and "projection" gradients move."""
        return {"centroids", "projection"} - set(self.frozen) - ({"centroids"} if self.balance == "ema" else set())

    @classmethod
    def paper(cls, **overrides) -> FocusConfig:
        """The paper's own setting for composed models: K=4, k=2, Sinkhorn over the sequence, Eq. 2 as printed."""
        return cls(**{"groups": 4, "top_k": 2, "gate": "printed", "balance": "sinkhorn", "sinks": 0} | overrides)
