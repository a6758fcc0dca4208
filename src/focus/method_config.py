"""The settings of the adapter and of every compared method, as strict models; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, TypeAdapter, model_validator

from focus.adapter_config import OWN_STATE, READS, Balance, FocusConfig, Gate  # noqa: F401 (read from here too)
from focus.distillation_config import Distillation
from focus.strict import Count, Distinct, NonNegative, Positive, Strict

Attention = Literal["full", "soft", "hard"]


class Phase(Strict):
    """One phase of training: which weights move, for how long, how fast."""

    trains: Literal["centroids", "lora", "scales", "everything"] = Field(description="which weights move in this phase")
    steps: NonNegative = Field(description="optimiser steps")
    learning_rate: Positive = Field(description="peak learning rate of AdamW")


class Training(Strict):
    """How a method trains; phases follow one another with fresh optimisers."""

    phases: list[Phase] = Field(description="one after the other; two make the paper's full fine-tuning")
    attention: Literal["soft", "hard"] = Field(
        "soft",
        description="kind focus only: the gate, or hard groups (straight-through gradient, no dropout)",
    )
    distillation: Distillation | None = Field(
        None,
        description="kind focus only: before the phases, fit the centroids of each layer to the frozen model's own "
        "attention; null means not",
    )
    from_scratch: bool = Field(False, description="start from random weights instead of the model's own")
    batch_size: Count = Field(1, description="windows a forward pass takes")
    accumulation: Count = Field(1, description="forward passes an optimiser step takes")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of a phase's steps in which the rate rises")
    clip: Positive = Field(1.0, description="largest gradient norm")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    calibration_windows: NonNegative = Field(
        4, description="training windows that set the potentials before the first step (balance: potentials)"
    )
    skipped_steps: NonNegative = Field(
        0, description="steps whose windows are passed over, so that rows with fewer phases end on the same text"
    )
    checkpoint_every: Count = Field(20, description="steps between checkpoints, from which a killed run resumes")
    probe_every: NonNegative = Field(
        0,
        description="steps between looks at the groups of the same few windows, also after each phase; 0 means never",
    )
    probe_windows: Count = Field(4, description="first training windows, whose groups are looked at")


class _Method(Strict):
    label: str = Field(description="the row's name in tables and figures")
    window: NonNegative | None = Field(None, description="w; null means the model's")
    training: Training | None = Field(None, description="null means nothing trains")

    @model_validator(mode="after")
    def _trainable(self) -> _Method:
        allowed = self.TRAINS
        if self.training is None:
            if self.NEEDS_TRAINING:
                raise ValueError(f"training of kind {self.kind}: expected settings, got null")
            return self
        for phase in self.training.phases:
            if phase.trains not in allowed:
                expected = f"phases that train {' or '.join(allowed)}" if allowed else "null"
                raise ValueError(f"training of kind {self.kind}: expected {expected}, got one of {phase.trains}")
        if self.training.from_scratch and not self.trains_everything:
            raise ValueError("training.from_scratch: expected a phase that trains everything, got none")
        if self.training.attention != "soft" and self.kind != "focus":
            raise ValueError(f"training.attention belongs to kind focus and only there, got kind {self.kind}")
        if self.training.distillation is not None and self.kind != "focus":
            raise ValueError(f"training.distillation belongs to kind focus and only there, got kind {self.kind}")
        return self

    TRAINS: ClassVar[tuple[str, ...]] = ("everything",)
    NEEDS_TRAINING: ClassVar[bool] = False
    RANDOM: ClassVar[bool] = False
    """Whether the seed decides more than training: what such a method attends to, or computes, is drawn at random."""

    ATTENTIONS: ClassVar[tuple[Attention, ...]] = ("full",)
    """With which a row may be evaluated."""

    @property
    def trains_everything(self) -> bool:
        """Whether a phase moves the model's own weights."""
        return self.training is not None and any(phase.trains == "everything" for phase in self.training.phases)


class PretrainedSettings(_Method):
    """The base model as it is."""

    TRAINS: ClassVar[tuple[str, ...]] = ()
    kind: Literal["pretrained"] = Field(description="the method file")


class FullFinetuningSettings(_Method):
    """Full attention, every weight trained."""

    NEEDS_TRAINING: ClassVar[bool] = True
    kind: Literal["full_finetuning"] = Field(description="the method file")


class WindowSettings(_Method):
    """Keys within the window and the first tokens (StreamingLLM, arXiv 2309.17453)."""

    kind: Literal["window"] = Field(description="the method file")
    sinks: NonNegative = Field(0, description="first tokens that every query may see")


class OracleTopKSettings(_Method):
    """Keys of largest true weight: the most that a selection of that size can hold."""

    TRAINS: ClassVar[tuple[str, ...]] = ()
    kind: Literal["oracle_top_k"] = Field(description="the method file")
    tokens: Count = Field(32, description="keys that a query reads")


class SparQSettings(_Method):
    """Keys chosen by scores guessed from the query's largest components (SparQ, arXiv 2312.04985)."""

    TRAINS: ClassVar[tuple[str, ...]] = ()
    kind: Literal["sparq"] = Field(description="the method file")
    tokens: Count = Field(32, description="k, the keys that a query reads, its own counted")
    local: NonNegative = Field(8, description="how many of them are the most recent; the paper takes a quarter of k")
    components: Count = Field(16, description="r, the query's components that the guess reads, at most the head size")
    mean_reallocation: bool = Field(False, description="mix in the mean value for the weight guessed to be left out")

    @model_validator(mode="after")
    def _consistent(self) -> SparQSettings:
        if self.local > self.tokens:
            raise ValueError(f"local must be at most tokens ({self.tokens}), got {self.local}")
        return self


class MagicPIGSettings(_Method):
    """Keys sampled by locality-sensitive hashing (MagicPIG, arXiv 2410.16179)."""

    RANDOM: ClassVar[bool] = True
    TRAINS: ClassVar[tuple[str, ...]] = ()
    kind: Literal["magicpig"] = Field(description="the method file")
    tables: int = Field(75, ge=2, le=255, description="L, the hash tables; two collisions make a sample")
    bits: int = Field(8, ge=1, le=15, description="K, the signs that make a hash")
    sinks: NonNegative = Field(4, description="first real tokens that every query reads")
    local: Count = Field(8, description="most recent keys that a query reads, its own counted")
    centred: bool = Field(True, description="hash keys relative to the mean of the keys up to them")


class PerformerSettings(_Method):
    """Linear attention by positive orthogonal random features (Performer, arXiv 2009.14794)."""

    RANDOM: ClassVar[bool] = True
    kind: Literal["performer"] = Field(description="the method file")
    features: Count = Field(256, description="m, the random features of a head")


class FocusSettings(_Method):
    """Learned groups gate the far pairs (the paper)."""

    ATTENTIONS: ClassVar[tuple[Attention, ...]] = ("full", "soft", "hard")
    TRAINS: ClassVar[tuple[str, ...]] = ("centroids", "everything")
    NEEDS_TRAINING: ClassVar[bool] = True
    kind: Literal["focus"] = Field(description="the method file")
    adapter: FocusConfig = Field(description="its window comes from the method or the model")

    @model_validator(mode="after")
    def _learns(self) -> FocusSettings:
        centroids = self.training is not None and any(phase.trains == "centroids" for phase in self.training.phases)
        if centroids and not self.adapter.learnt:
            raise ValueError("adapter.frozen: expected something that a phase of centroids can train, got nothing")
        if self.training is not None and self.training.distillation is not None:
            if self.adapter.balance != "potentials" or self.adapter.frozen:
                raise ValueError(
                    "training.distillation: expected adapter.balance potentials and nothing in adapter.frozen, "
                    f"got {self.adapter.balance} and {self.adapter.frozen}"
                )
            if self.training.from_scratch:
                raise ValueError("training.distillation: expected a model to learn from, got training.from_scratch")
        return self


class LoraSettings(_Method):
    """Full attention with a trained low-rank update of frozen matrices (LoRA, arXiv 2106.09685)."""

    TRAINS: ClassVar[tuple[str, ...]] = ("lora",)
    NEEDS_TRAINING: ClassVar[bool] = True
    kind: Literal["lora"] = Field(description="the method file")
    rank: Count = Field(description="r, the rank of the update")
    alpha: Count | None = Field(None, description="the update is scaled by alpha / r; null means r, a scale of 1")
    targets: Distinct[str] | None = Field(
        None, description="names of the updated matrices; null means c_attn in GPT-2, q_proj and v_proj elsewhere"
    )


class FarScaleSettings(_Method):
    """One learned scale a layer for the scores of far pairs, without groups."""

    TRAINS: ClassVar[tuple[str, ...]] = ("scales",)
    NEEDS_TRAINING: ClassVar[bool] = True
    kind: Literal["far_scale"] = Field(description="the method file")
    sinks: NonNegative = Field(4, description="first real tokens whose scores stay as they are")


class _ControlGroups(_Method):
    groups: Count = Field(4, description="K, the number of groups a layer sorts its tokens into")
    top_k: Count = Field(1, description="k, the groups a token joins while the model trains")
    sinks: NonNegative = Field(4, description="first real tokens that every query may see")

    @model_validator(mode="after")
    def _few(self) -> _ControlGroups:
        if self.top_k > self.groups:
            raise ValueError(f"top_k must be at most groups ({self.groups}), got {self.top_k}")
        return self

    @property
    def adapter(self) -> FocusConfig:
        """The adapter that is put on the model."""
        shared = {"groups": self.groups, "top_k": self.top_k, "sinks": self.sinks}
        window = {} if self.window is None else {"window": self.window}
        return FocusConfig(**shared, **window, routing_dim=self.groups, frozen=["centroids", "projection"])


class FixedGroupsSettings(_ControlGroups):
    """Hard groups by position, by token or at random, which nothing learns."""

    ATTENTIONS: ClassVar[tuple[Attention, ...]] = ("hard",)
    RANDOM: ClassVar[bool] = True
    kind: Literal["fixed_groups"] = Field(description="the method file")
    by: Literal["position", "token", "random"] = Field(
        description="what decides a token's groups in a layer, through a seeded hash: its position, its id, or both"
    )


class KMeansGroupsSettings(_ControlGroups):
    """Groups from k-means on hidden states of training windows."""

    ATTENTIONS: ClassVar[tuple[Attention, ...]] = ("soft", "hard")
    NEEDS_TRAINING: ClassVar[bool] = True
    kind: Literal["kmeans_groups"] = Field(description="the method file")


class LongformerSettings(_Method):
    """The window and a fixed number of global tokens (Longformer, arXiv 2004.05150)."""

    kind: Literal["longformer"] = Field(description="the method file")
    global_tokens: NonNegative = Field(16, description="tokens that read all before them and that all after them read")
    global_stride: Count = Field(32, description="one in so many tokens is global, from the first; 1 means sinks")


class BigBirdSettings(_Method):
    """The window, global blocks and random blocks (BigBird, arXiv 2007.14062)."""

    RANDOM: ClassVar[bool] = True
    kind: Literal["bigbird"] = Field(description="the method file")
    block: Count = Field(64, description="tokens in a block of queries or keys")
    random_blocks: NonNegative = Field(3, description="past blocks drawn for each block of queries, head and layer")
    global_blocks: NonNegative = Field(1, description="first blocks, which every query may see")


class RoutingTransformerSettings(_Method):
    """The window and tokens of the same online k-means cluster (Routing Transformer, arXiv 2003.05997)."""

    RANDOM: ClassVar[bool] = True
    kind: Literal["routing_transformer"] = Field(description="the method file")
    clusters: Count = Field(16, description="centroids of a head")
    cluster_tokens: Count = Field(64, description="most recent far members of its cluster that a query sees")
    decay: float = Field(0.999, ge=0, lt=1, description="share of the old centroids kept at each training step")


class S2Settings(_Method):
    """The window, and of the rest another shard for each head (S2-Attention, arXiv 2407.17678)."""

    kind: Literal["s2"] = Field(description="the method file")
    stride: Count = Field(4, description="shards the context is dealt into; heads take them in turn")
    block: Count = Field(64, description="tokens dealt at a time")


class MobaSettings(_Method):
    """Its own block and those with the best mean key (MoBA, arXiv 2502.13189)."""

    kind: Literal["moba"] = Field(description="the method file")
    block: Count = Field(512, description="keys in a block")
    top_k: Count = Field(3, description="blocks a query reads, its own among them")


class QuestSettings(_Method):
    """Its own page and those whose keys can score highest (Quest, arXiv 2406.10774)."""

    kind: Literal["quest"] = Field(description="the method file")
    page: Count = Field(16, description="keys in a page")
    pages: Count = Field(16, description="pages a query reads, its own among them")


Method = Annotated[
    PretrainedSettings
    | FullFinetuningSettings
    | WindowSettings
    | OracleTopKSettings
    | SparQSettings
    | MagicPIGSettings
    | PerformerSettings
    | FocusSettings
    | LoraSettings
    | FarScaleSettings
    | FixedGroupsSettings
    | KMeansGroupsSettings
    | LongformerSettings
    | BigBirdSettings
    | RoutingTransformerSettings
    | S2Settings
    | MobaSettings
    | QuestSettings,
    Field(discriminator="kind"),
]
METHOD: TypeAdapter[Method] = TypeAdapter(Method)
KINDS = tuple(settings.model_fields["kind"].annotation.__args__[0] for settings in Method.__origin__.__args__)


def make_method(**settings) -> Method:
    """The settings of one method, of the class that its kind has."""
    return METHOD.validate_python(settings)
