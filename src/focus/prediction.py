"""What a job will take where no run of it is recorded: seconds, memory and GPUs, from the shape of its model alone.

A pass takes as long as the longest of three: its products at the rate that the hardware reaches, the bytes of weights
that it reads, the launches of its layers; then the arrays of T x T scores that some attentions write and read again.
Memory is the weights, with gradients and AdamW's averages where everything trains, what the backward pass keeps, a
piece of the logits, the cache, and the process. Centroids and LoRA are too small to count. Processes that train
together share windows and weights; what they send one another is not counted.

A hard mask counts as full attention and a padded batch as its real tokens. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from focus.config import Experiment
from focus.cost import ADAM, AMOUNT, BYTES, MIB, PROCESS, timed_attention
from focus.hardware import Hardware
from focus.paper.shapes import OTHERS, SHAPES, Shape, gpt2_shape

GIB = 2**30
REQUESTS = {
    **{"hellaswag": (4, 81), "arc_easy": (4, 27), "piqa": (2, 34), "lambada": (1, 75)},
    "truthfulqa_mc1": (4.2, 197),
}
"""Requests an item, and tokens of one: means of the committed run, by SmolLM2's and GPT-2's tokens."""
PROMPT = 930
"""Tokens of GSM8K's 8 worked examples and a question, in the same run."""
ANSWER = 32
"""Positions of a request for whose logits there must be room."""
ADAMW_BYTES = 28
"""A trained weight's traffic in a step: its gradient, two averages and itself, read and all but the first written."""
ATTENTION_BACKWARD = 2.5
"""Products of attention's backward pass over those forward: five of two."""
SCORES_MOVED, SCORES_KEPT = 8, 3
"""How often dense attention moves an array of float32 scores in a forward pass, and how many it keeps for backward."""
LOGIT_ROWS, LOGIT_BYTES = 512, 12
"""Rows of logits made at a time (focus.loss), and bytes of one of their entries: itself, in float32, its softmax."""
PLAIN = ("gpt2", "llama", "qwen2", "olmo2")
"""Kinds whose loss is made in such rows; of others all logits are held, and of all kinds where logits are compared."""
DENSE_KINDS = {"oracle_top_k", "sparq", "magicpig", "quest", "performer"}
"""Methods that hold scores of all pairs, or as much in random features."""
CUDA_PROCESS = 1024
"""MiB of GPU memory for the CUDA context and the libraries."""
FRAGMENTS = 1.1
"""GPU memory over what tensors that come and go fill."""
HOST = 4096
"""MiB of a process with CUDA beside weights and text."""
SHARD = 10 * GIB
"""The most weights that are in the host's memory at once where accelerate places them."""
LM_EVAL = 200
"""MiB of a process that has imported lm-eval too."""
COPIES = 4
"""Of a text in memory while it is cut into tokens: the documents, their lines, the ids."""
TEXTS = {"pg19": 0.6, "wikitext103": 0.6, "openwebtext": 10.0}
"""GB of the published texts' parts that we read, about."""
DOWNLOADS = TEXTS | {"pg19": 0.4, "wikitext103": 0.4, "openwebtext": 6.5}
"""GB of their compressed files, about."""
PUBLISHED_BYTES = {
    **dict.fromkeys(("gpt2-124m", "gpt2-774m", "gpt2-1.5b", "olmo2-7b", "gemma2-9b"), 4),
    **dict.fromkeys(("mistral-7b", "mistral-7b-instruct", "qwen2.5-7b", "llama2-13b", "llama2-70b"), 2),
    "mistral-7b-from-scratch": 0,
}
"""Of a weight, as a model of the hub is published; 0 where only its shape is taken."""
MEMORY_MARGIN, TIME_MARGIN, LEAST_MINUTES = 1.2, 3, 15
"""What a job asks for over what is predicted: a test holds memory to 1.5 times, mostly 1.2, and seconds to 2."""
WITHOUT_GPU = {"bits"}
"""Kinds that run on the processor whatever the environment."""
BESIDE_CASES = 1.5
"""All timings over those of attention's cases alone: decoding and memory too; 1.3 and 1.4 in the committed runs."""
METHOD_CALLS = 100
"""Full attention's time in which a method is timed at a length: ten calls that take ten times as long."""
TIMED_COPIES = 16
"""Of a query, in GPU memory at once: inputs, their sorted copies, outputs and gradients."""
WITHOUT_TEXT = {"downstream", "generation"}
"""Kinds that do not read their corpus, on which the method was trained."""


@dataclass(frozen=True)
class Pass:
    """`count` passes of `tokens` each, in rows of `context`; with a backward pass to what precedes the weights, or to
    all weights; `dense`: with arrays of all pairs' scores."""

    count: float
    tokens: float
    context: float
    backward: str = ""
    dense: bool = False


@dataclass(frozen=True)
class Prediction:
    """Seconds, MiB of the host's memory and of disk, MiB of GPU memory in all, and GPUs; on a processor none of these
    two."""

    seconds: float
    host: float
    disk: float
    device: float = 0.0
    gpus: int = 0


NOTHING = Prediction(0.0, 0.0, 0.0)


def shapes(experiment: Experiment) -> dict[str, Shape]:
    """The shape of every model that a scale may use, those that a rule trains among them."""
    trained = {
        name: gpt2_shape(settings.pretraining.model_dump())
        for name, settings in experiment.model_settings.items()
        if settings.pretraining
    }
    return SHAPES | OTHERS | trained


def predict(
    kind: str, settings: Mapping, known: Mapping[str, Shape], hardware: Hardware, *, gpu: bool
) -> Prediction | None:
    """What a job of this kind and these settings takes; None for a kind or a model that nothing is known of."""
    if kind in ("attention", "methods"):
        return _timed(kind, settings, hardware) if gpu and settings.get("device") != "cpu" else None
    if kind not in PASSES:
        return None
    shape = gpt2_shape(settings["pretraining"]) if kind == "pretraining" else known.get(settings["model"])
    if shape is None:
        return None
    passes, job = list(PASSES[kind](settings)), _Job(shape, settings, hardware)
    seconds = hardware.start + job.loading + sum(each.count * job.seconds(each) for each in passes) + job.fitting
    changing = max((job.memory(each) for each in passes), default=0.0) + job.cache(kind) + job.lessons
    beside = LM_EVAL if kind in ("downstream", "generation", "long_inputs") else 0.0
    beside += text_memory(_corpora(kind, settings)) + job.restored / MIB
    disk = shape.parameters * BYTES["float32"] / MIB if job.everything else 1.0
    if not gpu:
        return Prediction(seconds, job.processes * (PROCESS + beside + changing / MIB) + job.weights / MIB, disk)
    device = job.processes * (CUDA_PROCESS + FRAGMENTS * changing / MIB) + job.weights / MIB
    host = job.processes * (HOST + job.staged / MIB + beside)
    return Prediction(seconds, host, disk, device, max(job.processes, _gpus(device, hardware)))


def _gpus(device: float, hardware: Hardware) -> int:
    return math.ceil(device / (hardware.memory * hardware.usable * 1024))


def _timed(kind: str, settings: Mapping, hardware: Hardware) -> Prediction:
    """Timings of attention alone on a GPU: cases as long as settings say, or by the products of full attention."""
    dtype = "float32" if settings.get("dtype") == "float32" else "bfloat16"
    width = settings["heads"] * settings["head_dim"]
    unit = 2.0 * width / hardware.rate(dtype)
    if kind == "attention":
        seconds = BESIDE_CASES * timed_attention({**settings, "threads": settings["threads"][:1]}, unit)
    else:
        times = (min(settings["seconds"], METHOD_CALLS * unit * length**2) for length in settings["lengths"])
        seconds = len(settings["rows"]) * sum(times)
    inputs = max(settings["lengths"]) * width / MIB
    device = CUDA_PROCESS + FRAGMENTS * TIMED_COPIES * BYTES[dtype] * inputs
    host = HOST + 3 * BYTES["float32"] * inputs
    return Prediction(hardware.start + seconds, host, 1.0, device, _gpus(device, hardware))


def memory_asked(found: Prediction | None, least: float, attempt: int = 1) -> int:
    """MiB for a job: `least` or a fifth more than predicted, and half as much again on each further attempt."""
    return math.ceil(max(least, MEMORY_MARGIN * (found or NOTHING).host) * 1.5 ** (attempt - 1))


def minutes_asked(found: Prediction | None, attempt: int = 1) -> int:
    """Minutes for a job: three times what is predicted, `LEAST_MINUTES` at least, and as much again on each attempt."""
    return attempt * max(LEAST_MINUTES, math.ceil(TIME_MARGIN * (found or NOTHING).seconds / 60))


def text_memory(corpora: Iterable[str]) -> float:
    """MiB of published texts while they are read; the others are small."""
    return COPIES * sum(TEXTS.get(name, 0.0) for name in corpora) * 1e9 / MIB


def download(name: str) -> float | None:
    """MiB that a published model or text takes in the cache; None for others."""
    if name in DOWNLOADS:
        return (DOWNLOADS[name] + TEXTS[name]) * 1e9 / MIB
    if name in PUBLISHED_BYTES:
        return (SHAPES | OTHERS)[name].parameters * PUBLISHED_BYTES[name] / MIB
    return None


def _corpora(kind: str, settings: Mapping) -> list[str]:
    if kind in WITHOUT_TEXT:
        return []
    return settings["pretraining"]["corpora"] if kind == "pretraining" else [settings["corpus"]]


@dataclass(frozen=True)
class _Job:
    shape: Shape
    settings: Mapping
    hardware: Hardware

    @property
    def _model(self) -> Mapping:
        return self.settings.get("model_settings", {})

    @property
    def _method(self) -> Mapping:
        return self.settings.get("settings") or {}

    @property
    def _stored(self) -> int:
        """Bytes of a weight in memory."""
        return BYTES[self._model.get("dtype", "float32")]

    @property
    def _products(self) -> str:
        """The dtype of products: what the job asks for, bfloat16 where it is "auto" or the weights are."""
        places = ("perplexity", "downstream", "generation", "long_inputs", "recall")
        asked = [self.settings[each]["precision"] for each in places if each in self.settings]
        asked += [self.settings["precision"]] if "precision" in self.settings else []
        auto = "auto" in asked or self._model.get("dtype") == "bfloat16"
        return "bfloat16" if auto or "bfloat16" in asked else "float32"

    @property
    def _checkpointing(self) -> bool:
        return self._model.get("gradient_checkpointing", False)

    @property
    def _is_training(self) -> bool:
        return "precision" in self.settings

    @property
    def processes(self) -> int:
        """How many train together."""
        return self._model.get("processes", 1) if self._is_training else 1

    @property
    def _moves_everything(self) -> bool:
        """Whether the method has weights of its own for the whole model."""
        plan = self._method.get("training") or {}
        return any(phase["trains"] == "everything" and phase["steps"] for phase in plan.get("phases", []))

    @property
    def everything(self) -> bool:
        """Whether this job trains every weight."""
        return "pretraining" in self.settings or (self._is_training and self._moves_everything)

    @property
    def restored(self) -> float:
        """Bytes of a second set of weights while they take the place of the model's own."""
        return 0.0 if self._is_training or not self._moves_everything else self._stored * self.shape.parameters

    @property
    def weights(self) -> float:
        """Bytes of the weights, of their copies in bfloat16 that the backward pass keeps, and of what trains."""
        each = self._stored
        if self._is_training and each == 4 and self._products == "bfloat16":
            each += BYTES["bfloat16"]
        if self.everything:
            each += ADAM * BYTES["float32"]
        return each * self.shape.parameters

    @property
    def loading(self) -> float:
        """Seconds in which the weights are read."""
        return self._stored * self.shape.parameters / (self.hardware.disk * 1e9)

    @property
    def staged(self) -> float:
        """Bytes of weights that are in the host's memory at once."""
        whole = self._stored * self.shape.parameters
        return min(whole, SHARD) if self._model.get("placement") == "auto" else whole

    @property
    def _distillation(self) -> Mapping:
        plan = self._method.get("training") or {}
        return (self._is_training and plan.get("distillation")) or {"windows": 0, "steps": 0, "batch_windows": 0}

    @property
    def lessons(self) -> float:
        """Bytes of what a frozen model's layers did in the windows that centroids are fitted to, in bfloat16."""
        context = self._model.get("context", 0)
        return self._distillation["windows"] * self.shape.layers * context * (context + self.shape.width) * 2.0

    @property
    def fitting(self) -> float:
        """Seconds in which the layers are fitted, each in its own steps: arrays of T x T that are moved."""
        plan, context = self._distillation, self._model.get("context", 0)
        moved = plan["steps"] * plan["batch_windows"] * self.shape.layers * context**2 * 4.0 * SCORES_MOVED
        return moved / self.hardware.bytes_a_second

    def cache(self, kind: str) -> float:
        """Bytes of keys and values that wait for later tokens."""
        length = {
            "generation": lambda: self.settings["generation"]["context"],
            "long_inputs": lambda: self.settings["long_inputs"]["tokens"],
            "recall": lambda: max(self.settings["recall"]["lengths"]),
        }.get(kind, lambda: 0)()
        return 2.0 * self.shape.layers * self.shape.key_width * length * BYTES[self._products]

    def seconds(self, each: Pass) -> float:
        """Of one pass, with its backward pass and the optimiser's step."""
        shape, gate = self.shape, 1 + ATTENTION_BACKWARD * bool(each.backward)
        layers = 2.0 * each.tokens * shape.layer_matrices * shape.layers
        head = 2.0 * each.tokens * shape.vocabulary * shape.width
        pairs = 4.0 * each.tokens * each.context * shape.query_width * shape.layers * (1.0 if each.dense else 0.5)
        times = {"": 1, "part": 2, "everything": 3}[each.backward]
        again = self._checkpointing and bool(each.backward)
        operations = (times + again) * layers + times * head + (gate + again) * pairs
        read = (times + again) * shape.parameters * self._stored
        read += ADAMW_BYTES * shape.parameters * (each.backward == "everything")
        launches = (3 * bool(each.backward) + (not each.backward) + again) * shape.layers * self.hardware.launch / 1e3
        speed = self.hardware.bytes_a_second
        longest = max(operations / self.hardware.rate(self._products), read / speed, launches)
        return longest + (gate + again) * self._scores(each) * SCORES_MOVED / speed * shape.layers

    def _scores(self, each: Pass) -> float:
        """Bytes of one layer's scores of all pairs in float32, where attention holds them."""
        return 4.0 * self.shape.heads * each.tokens * each.context if each.dense else 0.0

    def memory(self, each: Pass) -> float:
        """Bytes beside the weights: what layers keep or, without a backward pass, hold; logits; the head's gradient."""
        shape, size = self.shape, BYTES[self._products]
        width = 10 * shape.width + 2 * (shape.query_width + shape.key_width) + 4 * shape.feedforward
        layer = each.tokens * width * size + SCORES_KEPT * self._scores(each)
        rows = min(each.tokens, LOGIT_ROWS) if shape.kind in PLAIN and "leak" not in self.settings else each.tokens
        if "downstream" in self.settings:
            rows = self.settings["downstream"]["batch_size"] * ANSWER
        logits = float(LOGIT_BYTES) * rows * shape.vocabulary
        if not each.backward:
            return layer + logits
        head = shape.vocabulary * shape.width * (size + 4 * (each.backward == "everything"))
        if self._checkpointing:
            return shape.layers * each.tokens * shape.width * size + layer + logits + head
        return shape.layers * layer + logits + head


def _dense(settings: Mapping) -> bool:
    """Whether attention holds the scores of all pairs: the soft gate but for the exponential one, and selections."""
    method = settings["settings"]
    soft = settings.get("attention", (method.get("training") or {}).get("attention")) == "soft"
    groups = method["kind"] in ("focus", "kmeans_groups")
    exponential = groups and method.get("adapter", {}).get("gate") == "exponential"
    return method["kind"] in DENSE_KINDS or (groups and soft and not exponential)


def _training(settings: Mapping) -> Iterator[Pass]:
    plan, context = settings["settings"]["training"], settings["model_settings"]["context"]
    tokens, dense = plan["batch_size"] / settings["model_settings"].get("processes", 1) * context, _dense(settings)
    for phase in plan["phases"]:
        trains = "everything" if phase["trains"] == "everything" else "part"
        yield Pass(phase["steps"] * plan["accumulation"], tokens, context, trains, dense)
    distillation = plan.get("distillation")
    if distillation:
        yield Pass(distillation["windows"], context, context, dense=True)


def _pretraining(settings: Mapping) -> Iterator[Pass]:
    plan = settings["pretraining"]
    tokens = plan["batch_size"] * plan["context"]
    yield Pass(plan["steps"] * plan["accumulation"], tokens, plan["context"], "everything")


def _windows(kind: str, batch: int | None = None):
    """Passes over whole windows: all tokens that a job of this kind reads, `batch` windows at a time."""

    def passes(settings: Mapping) -> Iterator[Pass]:
        context = settings["model_settings"]["context"]
        at_once = (batch or settings["perplexity"]["batch_size"]) * context
        total = AMOUNT[kind][0](settings, None)
        yield Pass(total / at_once, at_once, context, dense=_dense(settings))

    return passes


def _requests(settings: Mapping) -> Iterator[Pass]:
    batch, dense = settings["downstream"]["batch_size"], _dense(settings)
    for task, items in settings["downstream"]["tasks"].items():
        requests, tokens = REQUESTS[task]
        yield Pass(items * requests / batch, batch * tokens, tokens, dense=dense)


def _answers(settings: Mapping) -> Iterator[Pass]:
    plan, dense = settings["generation"], _dense(settings)
    yield Pass(plan["items"], PROMPT, PROMPT, dense=dense)
    yield Pass(plan["items"] * plan["max_new_tokens"], 1, PROMPT + plan["max_new_tokens"] / 2, dense=dense)


def _behind(settings: Mapping) -> Iterator[Pass]:
    plan, dense = settings["long_inputs"], _dense(settings)
    for kind in plan["behind"]:
        shared = 1 if kind == "text" else len(plan["tasks"])
        yield Pass(shared * plan["windows"], plan["tokens"], plan["tokens"], dense=dense)
        for task, items in plan["tasks"].items():
            requests, tokens = REQUESTS[task]
            yield Pass(items * requests, tokens, plan["tokens"] + tokens, dense=dense)


def _recalled(settings: Mapping) -> Iterator[Pass]:
    longest, dense = max(settings["recall"]["lengths"]), _dense(settings)
    yield Pass(AMOUNT["recall"][0](settings, None) / longest, longest, longest, dense=dense)


PASSES = {
    "training": _training,
    "pretraining": _pretraining,
    "perplexity": _windows("perplexity"),
    "gates": _windows("gates", 1),
    "groups": _windows("groups", 1),
    "leak": _windows("leak", 1),
    "downstream": _requests,
    "generation": _answers,
    "long_inputs": _behind,
    "recall": _recalled,
}
"""By kind of job as its result names it: the forward passes it takes."""
