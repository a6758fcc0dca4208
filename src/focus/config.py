"""Every setting of an experiment, as strict models.

`Experiment` describes one scale (a file in config/), and cuts itself into the `*Job` models that the commands receive
as JSON. Nothing here imports torch, so a bad key stops a run at once.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from focus.evaluation_config import Downstream, Evaluation, Generation, Perplexity, Task  # noqa: F401 (read from here too)
from focus.groups_config import GroupsSettings
from focus.hardware import CORE, GPU, Hardware
from focus.leak_config import BitsSettings, LeakRow, LeakSettings
from focus.method_config import OWN_STATE, Attention, Method
from focus.strict import Count, Distinct, Name, NonNegative, Positive, Precision, Strict
from focus.wording import among, instead

Column = Literal[
    "perplexity",
    "ratio",
    "far_pairs",
    "parameters",
    "gain",
    "absorption",
    "dominance",
    "stability",
    "collapse",
    "training_time",
]


class Pretraining(Strict):
    """How a model without published weights is trained from scratch."""

    corpora: list[Name] = Field(min_length=1, description="corpora whose training documents it reads")
    steps: Count = Field(description="optimiser steps")
    learning_rate: Positive = Field(description="peak learning rate of AdamW")
    batch_size: Count = Field(1, description="windows a forward pass takes")
    accumulation: Count = Field(1, description="forward passes an optimiser step takes")
    context: Count = Field(1024, description="tokens a window holds, at least the model's context")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps in which the rate rises")
    clip: Positive = Field(1.0, description="largest gradient norm")
    weight_decay: float = Field(0.1, ge=0, description="AdamW's weight decay")
    checkpoint_every: Count = Field(50, description="steps between checkpoints")
    layers: Count = Field(4, description="transformer layers")
    width: Count = Field(256, description="hidden size, a multiple of heads")
    heads: Count = Field(4, description="attention heads")

    @model_validator(mode="after")
    def _consistent(self) -> Pretraining:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads ({self.heads}), got {self.width}")
        return self


class ModelSettings(Strict):
    """What one model uses at this scale."""

    context: Count = Field(description="T, tokens a window holds in training and evaluation")
    window: NonNegative = Field(description="w of every sparse method on this model")
    seeds: Distinct[NonNegative] | None = Field(None, description="null means the scale's seeds")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the weights in memory; float32 where a method trains everything"
    )
    placement: Literal["single", "auto"] = Field("single", description="one device, or spread over all by accelerate")
    gradient_checkpointing: bool = Field(False, description="recompute activations to save memory")
    processes: Count = Field(1, description="processes that train together, a GPU each; they share every batch")
    pretraining: Pretraining | None = Field(None, description="only for models trained from scratch by a rule")

    @model_validator(mode="after")
    def _consistent(self) -> ModelSettings:
        if self.window >= self.context:
            raise ValueError(f"window must be below context ({self.context}), got {self.window}")
        if self.pretraining and self.pretraining.context < self.context:
            raise ValueError(
                f"pretraining.context must be at least context ({self.context}), got {self.pretraining.context}"
            )
        return self


def variant_of(attention: Attention, top_k: int | None) -> str:
    """full, soft, hard-k1, ..."""
    return f"hard-k{top_k}" if attention == "hard" else attention


class Row(Strict):
    """One row of a table: a method, and the attention it is evaluated with."""

    method: Name = Field(description="a key of methods")
    attention: Attention = Field("full", description="full, or for a kind with groups the soft gate or hard groups")
    top_k: Count | None = Field(None, description="groups a token joins; hard attention only")
    corpus: Name | None = Field(None, description="what it is trained and evaluated on; null means the exhibit's")
    context: Count | None = Field(
        None, description="tokens a window holds in evaluation; null means the model's, with which it was trained"
    )
    paper: str | None = Field(None, description="the printed row beside it: table.row of printed.yaml")

    @model_validator(mode="after")
    def _consistent(self) -> Row:
        if (self.top_k is not None) != (self.attention == "hard"):
            raise ValueError(f"top_k belongs to attention hard and only there, got attention {self.attention}")
        return self

    @property
    def variant(self) -> str:
        """The row's part of a result path: full, soft, hard-k1, hard-k1-t2048, ..."""
        attention = variant_of(self.attention, self.top_k)
        return f"{attention}-t{self.context}" if self.context else attention


class Exhibit(Strict):
    """One table or figure: what it shows at this scale."""

    title: str = Field(description="the caption's first sentence")
    corpus: Name = Field(description="the corpus it is trained and evaluated on")
    models: Distinct[Name] | None = Field(None, description="null means the scale's models")
    rows: list[Row] = Field(
        min_length=1, description="one row of the table, or one point of the figure, which needs a pretrained one"
    )
    columns: Distinct[Column] = Field(
        ["perplexity", "ratio", "far_pairs", "parameters"],
        description="tables only: what is shown of each row, the paper's numbers beside it",
    )
    downstream: bool = Field(False, description="whether the rows are also evaluated on the tasks")
    tasks: dict[Task, Count] | None = Field(None, description="items of further tasks of these rows, with downstream")
    generation: bool = Field(False, description="whether the rows also write answers")
    long_inputs: bool = Field(False, description="whether the rows also answer the tasks behind other tokens")
    recall: bool = Field(False, description="whether the rows also recall numbers and passages; so in shows recall")
    control: Name | None = Field(
        None, description="a method of the rows, such as random groups, against which the tasks are shown once more"
    )
    shows: Literal["quality", "dominance", "tradeoff", "recall", "gates", "topk"] = Field(
        "quality",
        description="perplexity (in a figure against pairs kept); figures only: the largest group over the steps of "
        "training, perplexity against measured speed (Figure 1), or recall over the length of the input; both: what "
        "the gate gives to near and far pairs beside perplexity, or pairs kept, bounds and measured speed by the "
        "groups a token joins",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Exhibit:
        if self.control is not None and all(row.method != self.control for row in self.rows):
            raise ValueError(f"control must be a method of the rows, got {self.control}")
        return self

    @property
    def measures(self) -> list[str]:
        """The folders of results that its rows are made of; dominance is drawn from training logs alone."""
        if self.shows == "dominance":
            return []
        measured = {
            "downstream": self.downstream,
            "generation": self.generation,
            "long_inputs": self.long_inputs,
            "recall": self.recall or self.shows == "recall",
        }
        return ["perplexity", *(name for name, wanted in measured.items() if wanted)]


FIGURE_MODULES = {
    "quality": "focus.paper.figures",
    "dominance": "focus.paper.dominance",
    "tradeoff": "focus.paper.tradeoff",
    "gates": "focus.paper.gates_figure",
    "topk": "focus.paper.topk_figure",
    "recall": "focus.paper.recall_figure",
}
"""What draws a figure, by what it shows: its function `write`."""
TABLE_MODULES = {"quality": "focus.paper.tables", "gates": "focus.paper.gates", "topk": "focus.paper.topk"}
"""What writes a table, by what it shows: its function `write`."""


TimedOn = Literal["auto", "cpu", "cuda"]
TimedIn = Literal["auto", "float32", "bfloat16", "float16"]


class ModelShape(Strict):
    """A Llama with random weights, whose whole decoding is timed."""

    layers: Count = Field(4, description="layers")
    heads: Count = Field(4, description="query heads; the width is heads * head_dim")
    key_heads: Count = Field(4, description="key and value heads")
    head_dim: Count = Field(64, description="D")
    vocabulary: Count = Field(4096, description="tokens known")


class AttentionBenchmark(Strict):
    """What attention alone costs: random inputs of one batch entry in float32; lengths are in tokens."""

    lengths: list[Count] = Field([1024, 4096, 16384], min_length=1, description="of the forward pass (Table 6)")
    backward_lengths: list[Count] = Field([], description="of the forward and backward pass")
    unbalanced_lengths: list[Count] = Field([], description="of the forward pass with groups of unequal `shares`")
    membership_lengths: list[Count] = Field([], description="of the forward pass with k of K groups a token (Table 7)")
    training_lengths: list[Count] = Field([], description="of a step that trains centroids")
    decode_lengths: list[Count] = Field([], description="held by the cache when single tokens are timed")
    model_lengths: list[Count] = Field([], description="held by the cache when single tokens of a model are timed")
    memory_lengths: list[Count] = Field([], description="whose peak memory is measured, each in a fresh process")
    groups: list[Count] = Field([4, 8], min_length=1, description="K")
    membership_groups: Count = Field(4, description="K of the rows with k of K groups; k runs from 1 to K")
    shares: list[Positive] = Field([0.4, 0.3, 0.2, 0.1], description="of the tokens, for unequal groups")
    window: NonNegative = Field(128, description="w")
    heads: Count = Field(4, description="H")
    head_dim: Count = Field(64, description="D")
    device: TimedOn = Field("auto", description="cpu, cuda, or a GPU where there is one")
    dtype: TimedIn = Field("auto", description="of the inputs; auto is bfloat16 on a GPU, else float32")
    threads: list[NonNegative] = Field(
        [1], min_length=1, description="thread counts on a CPU; 0 means every core of the run"
    )
    seconds: Positive = Field(5.0, description="time for each case; every case runs at least once")
    decode_steps: Count = Field(64, description="single tokens timed at each length")
    model: ModelShape = Field(ModelShape(), description="the model whose single tokens are timed")
    model_steps: Count = Field(24, description="single tokens of the model timed at each length")
    one_group_up_to: NonNegative = Field(16384, description="longest length at which our tiling alone is timed too")
    seed: NonNegative = Field(0, description="of inputs and groups")


class Speed(AttentionBenchmark):
    """What attention alone costs: random inputs of one batch entry in float32; lengths are in tokens."""

    method_lengths: list[Count] = Field(
        [], description="of the forward pass of each method in a figure that shows tradeoff; none leaves it out"
    )
    method_seconds: Positive = Field(
        300.0, description="most time for a method at a length; one expected to need more for one call is not run"
    )
    method_rounds: Count = Field(5, description="most times that each method is timed at a length, in turns")

    @property
    def attention(self) -> AttentionBenchmark:
        """The settings of `focus bench attention`, which reads the others not."""
        return AttentionBenchmark(**{name: getattr(self, name) for name in AttentionBenchmark.model_fields})


class Experiment(Strict):
    """One scale: a whole config file."""

    schema_version: Literal[1] = Field(description="version of this schema")
    scale: Name = Field(description="the folder under results/")
    models: Distinct[Name] = Field(description="the models this run covers (a slice names fewer)")
    seeds: Distinct[NonNegative] = Field(description="every row that trains or draws at random is repeated for each")
    precision: Precision = Field(
        "auto",
        description="of training's products; auto is bfloat16 where the processor has it, else float32",
    )
    environment: Literal["cpu", "cuda"] = Field(
        "cpu", description="of envs/, what `--sdm conda` builds: cpu, or cuda with flash-attn and its compiler"
    )
    hardware: Hardware | None = Field(
        None,
        description="what jobs that no run is recorded of are predicted for: one GPU for environment cuda, else one "
        "core; null means an H100, or a core of the committed runs",
    )
    keep_weights: Literal["all", "small"] = Field(
        "all",
        description="small saves disk: of methods that train everything, whole models, weights are dropped once every "
        "row is evaluated on them, and what is evaluated later trains them again first",
    )
    model_settings: dict[Name, ModelSettings] = Field(description="per model")
    methods: dict[Name, Method] = Field(description="per method")
    evaluation: Evaluation = Field(description="how every row is evaluated")
    speed: Speed | None = Field(description="what is timed; null leaves speed out")
    groups: GroupsSettings | None = Field(None, description="whose groups are looked into; null leaves it out")
    leak: LeakSettings | None = Field(None, description="whose groups may see the future; null leaves it out")
    bits: BitsSettings | None = Field(None, description="models that learn random bits; null leaves it out")
    tables: dict[Name, Exhibit] = Field(description="per table")
    figures: dict[Name, Exhibit] = Field(description="per figure")

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        stride = self.evaluation.perplexity.stride or 0
        for name in self.models:
            _known(name, self.model_settings, "models", "model_settings")
            context = self.model_settings[name].context
            if stride > context:
                raise ValueError(
                    f"evaluation.perplexity.stride: expected at most the context of {name} ({context}), got {stride}"
                )
        for kind in ("tables", "figures"):
            for key, exhibit in getattr(self, kind).items():
                for name in exhibit.models or []:
                    _known(name, self.model_settings, f"{kind}.{key}.models", "model_settings")
                for number, row in enumerate(exhibit.rows):
                    self._check_row(row, f"{kind}.{key}.rows.{number}")
                self._check_dtypes(exhibit)
        for key, exhibit in self.tables.items():
            if exhibit.shows not in TABLE_MODULES:
                raise ValueError(f"tables.{key}.shows: belongs to figures and only there, got {exhibit.shows}")
        for key, exhibit in self.figures.items():
            if exhibit.shows == "dominance":
                self._check_probes(exhibit, f"figures.{key}")
            elif all(self.methods[row.method].kind != "pretrained" for row in exhibit.rows):
                raise ValueError(f"figures.{key}.rows: expected a row of kind pretrained to measure against, got none")
        if self.groups is not None:
            self._check_groups(self.groups)
        self._check_leak(self.leak.rows if self.leak else [])
        return self

    def _check_leak(self, rows: list[LeakRow]) -> None:
        for number, row in enumerate(rows):
            where = f"leak.rows.{number}"
            _known(row.model, self.model_settings, f"{where}.model", "model_settings")
            _known(row.method, self.methods, f"{where}.method", "methods")
            method = self.methods[row.method]
            if method.kind != "focus" or method.adapter.balance in OWN_STATE:
                raise ValueError(
                    f"{where}.method: expected kind focus without balance {' or '.join(sorted(OWN_STATE))}, "
                    f"got {row.method}"
                )

    def _check_groups(self, groups: GroupsSettings) -> None:
        _known(groups.model, self.model_settings, "groups.model", "model_settings")
        _known(groups.method, self.methods, "groups.method", "methods")
        kind, context = self.methods[groups.method].kind, self.model_settings[groups.model].context
        if kind != "focus":
            raise ValueError(f"groups.method: expected a method of kind focus, got {groups.method} of kind {kind}")
        if groups.passage_tokens > context:
            raise ValueError(
                f"groups.passage_tokens: expected at most the context of {groups.model} ({context}), "
                f"got {groups.passage_tokens}"
            )

    def _check_probes(self, exhibit: Exhibit, where: str) -> None:
        for number, row in enumerate(exhibit.rows):
            method = self.methods[row.method]
            if method.kind != "focus" or not method.training.probe_every:
                raise ValueError(
                    f"{where}.rows.{number}.method: expected one of kind focus with training.probe_every above 0, "
                    f"got {row.method}"
                )

    def _check_dtypes(self, exhibit: Exhibit) -> None:
        trained = [row.method for row in exhibit.rows if self.methods[row.method].trains_everything]
        for model in self.models:
            dtype = self.model_settings[model].dtype
            if trained and dtype != "float32" and model in (exhibit.models or self.models):
                raise ValueError(
                    f"model_settings.{model}.dtype: expected float32, since weights that train must be float32 and "
                    f"{trained[0]} trains everything, got {dtype}"
                )

    def _check_row(self, row: Row, where: str) -> None:
        _known(row.method, self.methods, f"{where}.method", "methods")
        method = self.methods[row.method]
        if row.attention not in method.ATTENTIONS:
            expected = " or ".join(method.ATTENTIONS)
            raise ValueError(f"{where}.attention: expected {expected} for kind {method.kind}, got {row.attention}")
        if row.top_k is not None and row.top_k > method.adapter.groups:
            raise ValueError(f"{where}.top_k: expected at most groups ({method.adapter.groups}), got {row.top_k}")

    @property
    def machine(self) -> Hardware:
        """What jobs are predicted for."""
        return self.hardware or (GPU if self.environment == "cuda" else CORE)

    def seeds_of(self, model: str, method: str) -> list[int]:
        """The seeds a row of this model and method is repeated for: one for what neither trains nor draws at random."""
        settings = self.methods[method]
        if settings.training is None and not settings.RANDOM:
            return [self.seeds[0]]
        return self.model_settings[model].seeds or self.seeds

    def tasks_of(self, model: str, corpus: str, method: str, variant: str) -> dict[Task, int]:
        """Items per task of one row: the scale's, and those that any exhibit showing this row adds."""
        tasks = dict(self.evaluation.downstream.tasks)
        for exhibit in [*self.tables.values(), *self.figures.values()]:
            rows = {(row.corpus or exhibit.corpus, row.method, row.variant) for row in exhibit.rows}
            if model in (exhibit.models or self.models) and (corpus, method, variant) in rows:
                tasks |= exhibit.tasks or {}
        return tasks

    def made(self, exhibit: Exhibit) -> bool:
        """Whether this run makes a table or figure: it shows one of the run's models, and what it shows is measured."""
        shown = any(model in (exhibit.models or self.models) for model in self.models)
        timed = {"tradeoff": "method_lengths", "topk": "membership_lengths"}.get(exhibit.shows)
        return shown and (timed is None or bool(self.speed and getattr(self.speed, timed)))

    def method_for(self, model: str, method: str) -> Method:
        """The method with the window it has on this model, in its adapter too if it has one."""
        settings = self.methods[method]
        window = self.model_settings[model].window if settings.window is None else settings.window
        if settings.kind == "focus":
            adapter = settings.adapter.model_copy(update={"window": window})
            settings = settings.model_copy(update={"adapter": adapter})
        return settings.model_copy(update={"window": window})


def _known(name: str, names, where: str, home: str) -> None:
    if name not in names:
        raise ValueError(f"{where}: expected a key of {home} ({among(sorted(names))}), {instead(name, names)}")
