"""What a job will take, from results of jobs that ran: seconds, memory, and disk for what it keeps.

A prediction says what it rests on: `like`, a run with the same settings (seed, name and learning rates aside);
`scaled`, the same row with other amounts (steps, windows, items, lengths); `other`, another row of the same model, of
which the slowest counts where the kind differs; or `unknown`. Time grows with the amount of work, on top of what a
training takes to start; memory with the tokens of one forward pass, on top of the process and the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from focus.provenance import RESULT_VERSION

MIB = 2**20
PROCESS = 400
"""MiB of a process that has imported torch and transformers and run a model of no size (measured: 397)."""
BYTES = {"float32": 4, "bfloat16": 2}
"""Of a weight; one that trains is float32."""
ADAM = 3
"""What a trained weight needs beside itself, in weights: its gradient and AdamW's two averages."""
WITHOUT_BFLOAT16 = {True: 5.0, False: 2.6}
"""Times as long where the processor has no products in bfloat16, for what trains and for what does not. Measured on a
core with AVX-512 and one with AVX2 alone: a step of gpt2-mini's training 0.93 and 4.69 s, of SmolLM2's 1.43 and 6.87 s;
SmolLM2's reading of hidden numbers 184 and 473 s."""
BACKWARD = 3.5
"""Forward and backward over forward alone: five matrix products more, of two."""
NAMES = {"seed", "method", "label", "learning_rate"}
AMOUNTS = NAMES | {
    *("steps", "batch_size", "accumulation", "context", "checkpoint_every", "calibration_windows", "warmup", "corpora"),
    *("windows", "stride", "tasks", "corpus", "window", "training", "items", "max_new_tokens"),
    *("passage_tokens", "pairs", "changed_windows", "other_windows", "length", "batch_tokens", "evaluation_tokens"),
    *("behind", "lengths", "tests", "depths", "candidates", "digits", "passages", "passage"),
}
TRAINS = ("training", "pretraining")


@dataclass(frozen=True)
class Record:
    """A result of an earlier run; `path` is relative to its results folder, `size` its bytes.

    `parameters` are the weights of its model, 0 where there is none or no manifest beside it tells. `seconds` are those
    of the processor for what ran in one thread, so that a busy machine does not count, and `alone` is their share of
    the time it took. `device` is cpu or cuda, `dtype` that of most products.
    """

    path: str
    kind: str
    settings: dict
    metrics: dict
    seconds: float
    memory: float
    processor: str
    size: int
    parameters: int = 0
    alone: float = 1.0
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def working(self) -> float:
        """Seconds that grow with the amount of work; a training's are those of all its processes."""
        whole = self.metrics.get("training_seconds")
        return self.seconds if whole is None else whole * self.alone

    @property
    def starting(self) -> float:
        """Seconds before the work; 0 where a run was resumed, of which `seconds` holds the last process alone."""
        return max(self.seconds - self.working, 0.0)

    @property
    def trained_bytes(self) -> int:
        """What the trained weights take on disk; 0 for what does not train."""
        return self.metrics["trained_parameters"] * BYTES["float32"] if self.kind in TRAINS else 0

    @property
    def fixed(self) -> float:
        """MiB of memory that do not grow with the tokens: the process, the weights, and what those that train need."""
        weight = BYTES[self.settings.get("model_settings", {}).get("dtype", "float32")]
        return min(self.memory, PROCESS + (self.parameters * weight + ADAM * self.trained_bytes) / MIB)


@dataclass(frozen=True)
class Estimate:
    """Seconds, MiB of memory and MiB of disk, each None where unknown, and what they rest on; GPUs and their memory."""

    basis: str
    seconds: float | None = None
    memory: float | None = None
    disk: float | None = None
    device: float = 0.0
    gpus: int = 0


UNKNOWN = Estimate("unknown")


def read(folders: Iterable[Path]) -> list[Record]:
    """All results below the folders of results, the first folder's first; what is no result is passed over."""
    found = []
    for folder in map(Path, folders):
        contents = {str(path.relative_to(folder)): _content(path) for path in sorted(folder.glob("**/*.json"))}
        for path, result in contents.items():
            if result.get("result_version") == RESULT_VERSION:
                settings, origin = result["settings"], result["provenance"]
                seconds = (
                    origin.get("cpu_seconds", origin["seconds"]) if origin.get("threads") == 1 else origin["seconds"]
                )
                manifest = contents.get(f"models/{settings.get('model')}.json", {})
                found.append(
                    Record(
                        path=path,
                        kind=result["experiment"],
                        settings=settings,
                        metrics=result["metrics"],
                        seconds=seconds,
                        alone=min(1.0, seconds / origin["seconds"]) if origin["seconds"] else 1.0,
                        memory=origin["peak_memory_mib"],
                        processor=origin["processor"],
                        size=(folder / path).stat().st_size,
                        parameters=manifest.get("parameters") or 0,
                        device=origin.get("device", "cpu"),
                        dtype=origin.get("dtype") or "float32",
                    )
                )
    return found


def without_bfloat16(record: Record) -> Record:
    """The record of the same job on a processor that has no products in bfloat16."""
    if record.device != "cpu" or record.dtype != "bfloat16":
        return record
    times, metrics = WITHOUT_BFLOAT16[record.kind in TRAINS], record.metrics
    if "training_seconds" in metrics:
        metrics = metrics | {"training_seconds": metrics["training_seconds"] * times}
    return replace(record, seconds=record.seconds * times, metrics=metrics, dtype="float32")


def _content(path: Path) -> dict:
    """The mapping a file of JSON holds; empty for what is none."""
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def grown(memory: float, fixed: float, ratio: float) -> float:
    """`memory`, of which all but `fixed` grows with the tokens, at `ratio` times as many; never less."""
    return fixed + (memory - fixed) * max(1.0, ratio)


def predict(kind: str, settings: dict, records: Sequence[Record]) -> Estimate:
    """What a job of this kind (as its result names it) and these settings will take."""
    if kind == "training":
        return _training(settings, records)
    return _best(settings, [record for record in records if record.kind == kind])


def by_path(path: str, records: Sequence[Record]) -> Estimate:
    """For kinds that this module does not know: what the result at the same place took."""
    for record in records:
        if record.path == path:
            return Estimate("other", record.seconds, record.memory, record.size / MIB)
    return UNKNOWN


def _best(settings: dict, records: Sequence[Record]) -> Estimate:
    """The mean over the records that are most alike; over any of the model, the one that takes longest."""
    ranked: dict[int, list[Estimate]] = {}
    for record in records:
        rank = _rank(settings, record.settings)
        estimate = None if rank is None else _scaled(settings, record, BASES[rank])
        if estimate is not None:
            ranked.setdefault(rank, []).append(estimate)
    if not ranked:
        return UNKNOWN
    rank = min(ranked)
    if rank == SLOWEST:
        return max(ranked[rank], key=lambda estimate: estimate.seconds)
    found = ranked[rank][:1] if rank == 0 else ranked[rank]
    means = (fmean(getattr(each, name) for each in found) for name in ("seconds", "memory", "disk"))
    return Estimate(BASES[rank], *means)


BASES = ("like", "like", "scaled", "other", "other")
SLOWEST = 4


def _rank(asked: dict, recorded: dict) -> int | None:
    """0: the very job; 1: other names; 2: other amounts; 3: other settings; 4: another row; None: another model."""
    if asked.get("model") != recorded.get("model") and isinstance(asked.get("model"), str):
        return None
    row, other = _row(asked), _row(recorded)
    if row[-1] != other[-1]:
        return None
    for rank, ignored in enumerate((set(), NAMES, AMOUNTS)):
        if (rank < 2 or row == other) and _agree(asked, recorded, ignored):
            return rank
    if "lengths" in asked:
        return 2
    return 3 if row == other else SLOWEST


def _row(settings: dict) -> tuple:
    """What makes a row's cost: the kind of method, its attention, and last, what trains ("" for evaluations)."""
    method = settings.get("settings", {})
    if "attention" in settings:
        return method["kind"], settings["attention"], settings["top_k"], ""
    training = method.get("training") or {}
    trained = "+".join(trains for trains, steps in _phases(training) if steps)
    if training.get("distillation"):
        trained = f"distillation+{trained}"
    return method.get("kind"), training.get("attention", "soft"), None, trained


def _phases(training: dict) -> list[tuple[str, int]]:
    return [(phase["trains"], phase["steps"]) for phase in training.get("phases", [])]


def _agree(asked, recorded, ignored: set[str]) -> bool:
    """Equal in all that both have: results of earlier versions may lack a key, or have one more."""
    if isinstance(asked, dict) and isinstance(recorded, dict):
        shared = (asked.keys() & recorded.keys()) - ignored
        return all(_agree(asked[key], recorded[key], ignored) for key in shared)
    if isinstance(asked, list) and isinstance(recorded, list):
        return len(asked) == len(recorded) and all(
            _agree(one, other, ignored) for one, other in zip(asked, recorded, strict=True)
        )
    return asked == recorded


def _scaled(settings: dict, record: Record, basis: str) -> Estimate | None:
    """The record with the asked amount of work; None where it cannot tell."""
    amount, forward = AMOUNT.get(record.kind, (None, None))
    if amount is None:
        return Estimate(basis, record.seconds, record.memory, record.size / MIB)
    asked, done = amount(settings, record), amount(record.settings, record)
    if asked is None or (asked and not done):
        return None
    seconds = record.starting + (record.working * asked / done if done else 0.0)
    memory = grown(record.memory, record.fixed, forward(settings) / forward(record.settings))
    kept = record.trained_bytes if record.kind in TRAINS else record.size
    return Estimate(basis, seconds, memory, kept / MIB)


def _training(settings: dict, records: Sequence[Record]) -> Estimate:
    """From records with the same phases; else phase by phase, each from the slowest that trained just that."""
    records = [record for record in records if record.kind == "training"]
    whole = _best(settings, records)
    if whole is not UNKNOWN:
        return whole
    method = settings["settings"]
    parts = [
        _best(settings | {"settings": method | {"training": method["training"] | {"phases": [phase]}}}, records)
        for phase in method["training"]["phases"]
        if phase["steps"]
    ]
    if not parts and not method["training"].get("distillation"):
        of_model = [record for record in records if record.settings["model"] == settings["model"]]
        parts = [
            Estimate("other", record.starting, record.memory, 0.0)
            for record in sorted(of_model, key=lambda record: record.seconds)[:1]
        ]
    if not parts or UNKNOWN in parts:
        return UNKNOWN
    seconds, memory, disk = ([getattr(part, name) for part in parts] for name in ("seconds", "memory", "disk"))
    return Estimate("other", sum(seconds), max(memory), max(disk))


def _trained_tokens(settings: dict, record: Record) -> int:
    training = settings["settings"]["training"]
    steps = sum(count for _, count in _phases(training))
    windows = steps * training["batch_size"] * training["accumulation"]
    windows += (training.get("distillation") or {}).get("windows", 0)
    return windows * settings["model_settings"]["context"]


def _pretrained_tokens(settings: dict, record: Record) -> float:
    """Tokens times weights, where the shape differs, taking layers * width^2 for these."""
    plan = settings["pretraining"]
    tokens = plan["steps"] * plan["batch_size"] * plan["accumulation"] * plan["context"]
    return tokens * plan["layers"] * plan["width"] ** 2


def _read_tokens(settings: dict, record: Record) -> int:
    return settings["perplexity"]["windows"] * settings["model_settings"]["context"]


def _positions(settings: dict, record: Record) -> float | None:
    """Tokens of all requests, at the recorded length of a task's items; None with a task that was not recorded."""
    total = 0.0
    for task, items in settings["downstream"]["tasks"].items():
        known = record.metrics["tasks"].get(task)
        if known is None:
            return None
        total += items * known["positions"] / known["items"]
    return total


def _written_tokens(settings: dict, record: Record) -> float | None:
    """The most that all answers may hold; a row that cannot write tells of its own settings alone."""
    if "reason" in record.metrics:
        return 1.0 if settings["settings"] == record.settings["settings"] else None
    return settings["generation"]["items"] * settings["generation"]["max_new_tokens"]


def _long_tokens(settings: dict, record: Record) -> float | None:
    """Tokens of the beginnings, and those of the items at their recorded length; None with what was not recorded."""
    asked, total = settings["long_inputs"], 0.0
    for kind in asked["behind"]:
        shared = 1 if kind == "text" else len(asked["tasks"])
        total += shared * asked["windows"] * asked["tokens"]
        for task, items in asked["tasks"].items():
            behind = record.metrics["behind"].get(kind, {})
            known = behind.get("tasks", {}).get(task)
            if known is None:
                return None
            total += items * (known["positions"] - known["requests"] * behind["tokens"]) / known["items"]
    return total


def _recalled_tokens(settings: dict, record: Record) -> float:
    """Tokens of the inputs, and those of the questions with each candidate."""
    asked = settings["recall"]
    inputs = ("needle" in asked["tests"]) + ("copy" in asked["tests"]) * len(asked["passages"])
    answers = ("needle" in asked["tests"]) * len(asked["depths"]) * asked["candidates"] * asked["digits"]
    return asked["windows"] * sum(inputs * length + answers for length in asked["lengths"])


def _grouped_tokens(settings: dict, record: Record) -> int:
    """Tokens read, which every draw of the baselines shuffles."""
    return settings["groups"]["windows"] * settings["model_settings"]["context"]


def _read_under_balances(settings: dict, record: Record) -> int:
    """Tokens read: under each balance every window once, and the changed ones three times under both attentions."""
    leak = settings["leak"]
    windows = leak["windows"] + 6 * leak["changed_windows"] + len(leak["corpora"]) * leak["other_windows"]
    return (leak["windows"] + len(leak["balances"]) * windows) * settings["model_settings"]["context"]


def _learnt_bits(settings: dict, record: Record) -> int:
    return settings["training"]["steps"] * max(settings["training"]["batch_tokens"], settings["length"])


def _timed_attention(settings: dict, record: Record) -> float:
    longest = max(record.metrics["forward"], key=lambda row: row["length"])
    return timed_attention(settings, longest["full_ms"] / 1e3 / longest["length"] ** 2)


def timed_attention(settings: dict, unit: float) -> float:
    """Seconds for which attention is timed: each case as long as it may be, or once where once is longer.

    `unit` are full attention's seconds over the squared length.
    """
    shares = sum(1 / groups for groups in settings["groups"])
    full = len(settings["groups"])
    passes = {
        "lengths": 1 + shares,
        "backward_lengths": BACKWARD * (1 + shares),
        "unbalanced_lengths": 1 + shares,
        "membership_lengths": 1 + settings["membership_groups"],
        "training_lengths": 3 * BACKWARD * full,
    }
    total = 0.0
    for section, count in passes.items():
        total += sum(max(settings["seconds"], count * unit * length**2) for length in settings[section])
    return total * len(settings["threads"])


def _timed_methods(settings: dict, record: Record) -> float:
    return len(settings["rows"]) * sum(length**2 for length in settings["lengths"])


AMOUNT: dict[str, tuple[Callable[[dict, Record], float | None], Callable[[dict], float]]] = {
    "training": (
        _trained_tokens,
        lambda job: job["settings"]["training"]["batch_size"] * job["model_settings"]["context"],
    ),
    "pretraining": (_pretrained_tokens, lambda job: job["pretraining"]["batch_size"] * job["pretraining"]["context"]),
    "perplexity": (_read_tokens, lambda job: job["perplexity"]["batch_size"] * job["model_settings"]["context"]),
    "gates": (_read_tokens, lambda job: job["model_settings"]["context"]),
    "downstream": (_positions, lambda job: job["downstream"]["batch_size"]),
    "generation": (_written_tokens, lambda job: job["generation"]["context"]),
    "long_inputs": (_long_tokens, lambda job: job["long_inputs"]["tokens"]),
    "recall": (_recalled_tokens, lambda job: max(job["recall"]["lengths"])),
    "groups": (_grouped_tokens, lambda job: job["model_settings"]["context"]),
    "leak": (_read_under_balances, lambda job: job["model_settings"]["context"]),
    "bits": (_learnt_bits, lambda job: max(job["training"]["batch_tokens"], job["length"])),
    "attention": (_timed_attention, lambda job: max(job["lengths"])),
    "methods": (_timed_methods, lambda job: max(job["lengths"])),
}
"""By kind: the amount of work, and the tokens (or what grows with them) of one forward pass."""
