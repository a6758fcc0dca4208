"""What a job will take, from results of jobs that ran: seconds, memory, and disk for what it keeps.

A prediction says what it rests on: `like`, a run with the same settings (seed, name and learning rates aside);
`scaled`, the same row with other amounts (steps, windows, items, lengths); `other`, another row of the same model, of
which the slowest counts where the kind differs; or `unknown`. Time grows with the amount of work, on top of what a
training takes to start; memory with the tokens of one forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from focus.provenance import RESULT_VERSION

MIB = 2**20
BYTES_A_WEIGHT = 4
BACKWARD = 3.5
"""Forward and backward over forward alone: five matrix products more, of two."""
NAMES = {"seed", "method", "label", "learning_rate"}
AMOUNTS = NAMES | {
    *("steps", "batch_size", "accumulation", "context", "checkpoint_every", "calibration_windows", "warmup", "corpora"),
    *("windows", "stride", "tasks", "corpus", "window", "training"),
}


@dataclass(frozen=True)
class Record:
    """A result of an earlier run; `path` is relative to its results folder, `size` its bytes."""

    path: str
    kind: str
    settings: dict
    metrics: dict
    seconds: float
    memory: float
    processor: str
    size: int


@dataclass(frozen=True)
class Estimate:
    """Seconds, MiB of memory and MiB of disk, each None where unknown, and what they rest on."""

    basis: str
    seconds: float | None = None
    memory: float | None = None
    disk: float | None = None


UNKNOWN = Estimate("unknown")


def read(folders: Iterable[Path]) -> list[Record]:
    """All results below the folders of results, the first folder's first; what is no result is passed over."""
    found = []
    for folder in folders:
        for path in sorted(Path(folder).glob("**/*.json")):
            try:
                result = json.loads(path.read_text())
            except ValueError:
                continue
            if isinstance(result, dict) and result.get("result_version") == RESULT_VERSION:
                origin = result["provenance"]
                found.append(
                    Record(
                        path=str(path.relative_to(folder)),
                        kind=result["experiment"],
                        settings=result["settings"],
                        metrics=result["metrics"],
                        seconds=origin["seconds"],
                        memory=origin["peak_memory_mib"],
                        processor=origin["processor"],
                        size=path.stat().st_size,
                    )
                )
    return found


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
    working = record.metrics.get("training_seconds", record.seconds)
    seconds = record.seconds - working + (working * asked / done if done else 0.0)
    memory = record.memory * max(1.0, forward(settings) / forward(record.settings))
    trains = record.kind in ("training", "pretraining")
    kept = record.metrics["trained_parameters"] * BYTES_A_WEIGHT if trains else record.size
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
    if not parts:
        of_model = [record for record in records if record.settings["model"] == settings["model"]]
        parts = [
            Estimate("other", record.seconds - record.metrics["training_seconds"], record.memory, 0.0)
            for record in sorted(of_model, key=lambda record: record.seconds)[:1]
        ]
    if not parts or UNKNOWN in parts:
        return UNKNOWN
    seconds, memory, disk = ([getattr(part, name) for part in parts] for name in ("seconds", "memory", "disk"))
    return Estimate("other", sum(seconds), max(memory), max(disk))


def _trained_tokens(settings: dict, record: Record) -> int:
    training = settings["settings"]["training"]
    steps = sum(count for _, count in _phases(training))
    return steps * training["batch_size"] * training["accumulation"] * settings["model_settings"]["context"]


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


def _timed_attention(settings: dict, record: Record) -> float:
    """Seconds for which attention is timed: each case as long as it may be, or once where once is longer."""
    longest = max(record.metrics["forward"], key=lambda row: row["length"])
    unit = longest["full_ms"] / 1e3 / longest["length"] ** 2
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
    "downstream": (_positions, lambda job: job["downstream"]["batch_size"]),
    "attention": (_timed_attention, lambda job: max(job["lengths"])),
    "methods": (_timed_methods, lambda job: max(job["lengths"])),
}
"""By kind: the amount of work, and the tokens (or what grows with them) of one forward pass."""
