"""Made-up results with known answers, in the folders and shapes of real ones, for the tests of focus.paper."""

from __future__ import annotations

import json
import math
from pathlib import Path

from focus import jobs, scales
from focus.config import Exhibit, Experiment, Row
from focus.method_config import make_method

TASKS = ("hellaswag", "arc_easy", "piqa", "lambada")
REPOSITORY = Path(__file__).parents[1]
KEPT = {"full": 1.0, "soft": 1.0, "hard-k1": 0.3, "hard-k2": 0.85, "hard-k3": 1.0, "hard-k4": 1.0}


def experiment(**changes) -> Experiment:
    """The default scale with changed keys, and Table 1 on both models."""
    settings = scales.load([REPOSITORY / "config/config.yaml"]).model_dump()
    settings["tables"]["table1"]["models"] = None
    return Experiment.model_validate(settings | changes)


def scored(shift: float = 0.0, *, windows: int = 8, tokens: int = 100, uneven: float = 0.1) -> list[dict]:
    """Windows whose loss a token is `shift` above the same window's at shift 0, give or take the share `uneven`."""
    return [
        {
            "document": f"book{number % 2}",
            "start": 100 * number,
            "tokens": tokens,
            "loss_sum": tokens * (3.0 + 0.1 * math.sin(number) + shift * (1 + uneven * (-1) ** number)),
        }
        for number in range(windows)
    ]


def write_results(
    root: Path, settings: Experiment, shifts: dict[str, float] | None = None, *, lost: int = 0, uneven: float = 0.1
) -> None:
    """Every result that the exhibits name.

    `shifts`: log perplexity over the pretrained model's, by "method/variant" or "method/variant/seed"; `lost`: items
    of 10 that rows other than pretrained lose in each task.
    """
    write_speed(root, settings)
    for exhibit in [*settings.tables.values(), *settings.figures.values()]:
        for model in set(exhibit.models or settings.models) & set(settings.models):
            for row in exhibit.rows:
                for seed in settings.seeds_of(model, row.method):
                    key = f"{row.method}/{row.variant}"
                    shift = (shifts or {}).get(f"{key}/{seed}", (shifts or {}).get(key, 0.0))
                    losing = 0 if row.method == "pretrained" else lost
                    write_row(root, settings, exhibit, model, row, seed, scored(shift, uneven=uneven), losing)


def write_row(
    root: Path,
    settings: Experiment,
    exhibit: Exhibit,
    model: str,
    row: Row,
    seed: int,
    windows: list[dict],
    lost: int,
) -> None:
    """The results of one row with one seed."""
    cell = (model, row.corpus or exhibit.corpus, row.method, row.variant, seed)
    tokens = sum(window["tokens"] for window in windows)
    loss = sum(window["loss_sum"] for window in windows) / tokens
    kept = 0.2 if row.method.startswith("window") else KEPT[row.variant.partition("-t")[0]]
    metrics = {
        "perplexity": math.exp(loss),
        "loss": loss,
        "tokens": tokens,
        "context": row.context or settings.model_settings[model].context,
        "stride": settings.model_settings[model].context,
        "windows": windows,
        "documents": [],
        "layers": [{"dominance": 0.3, "confidence": 0.6}] if row.method.startswith("focus") else [],
        "pairs_kept": kept,
        "far_pairs_kept": kept,
        "trained_parameters": 0 if row.method in ("pretrained", "window", "window-sinks") else 69120,
    }
    path = "/".join(cell[:4]) + f"/seed{seed}.json"
    write_result(root / "perplexity" / path, "perplexity", jobs.perplexity_job(settings, *cell), metrics)
    write_training(root, settings, cell)
    if exhibit.downstream:
        correct = [1] * (7 - lost) + [0] * (3 + lost)
        scores = {"accuracy": (7 - lost) / 10, "items": 10, "correct": correct}
        scores |= {"beyond_window": 0.031, "scored_beyond_window": 0.7}
        job = jobs.downstream_job(settings, *cell)
        write_result(root / "downstream" / path, "downstream", job, {"tasks": dict.fromkeys(TASKS, scores)})
    if exhibit.generation:
        write_answers(root, settings, cell, [1, 0])
    if exhibit.shows == "gates" and row.attention == "soft":
        write_gate(root, settings, cell)
    if "long_inputs" in exhibit.measures:
        write_long(root, settings, cell, lost)
    if "recall" in exhibit.measures:
        write_recall(root, settings, cell, lost)


def write_training(root: Path, settings: Experiment, cell: tuple) -> None:
    """How the method of one row (model, corpus, method, variant, seed) was trained, if it was.

    A probe finds 40 % of the tokens in the largest group, and 0.9 of them where they were.
    """
    model, corpus, method, _, seed = cell
    training = settings.methods[method].training
    if training is None:
        return
    job, steps = jobs.train_job(settings, model, corpus, method, seed), sum(phase.steps for phase in training.phases)
    tokens = steps * training.batch_size * training.accumulation * job.model_settings.context
    metrics = {"steps": steps, "tokens": tokens, "final_loss": 3.0}
    if training.probe_every:
        metrics |= {"dominance": 0.4, "stability": 0.9, "collapse_step": None}
    write_result(root / "training" / model / corpus / method / f"seed{seed}/result.json", "training", job, metrics)


def write_gate(root: Path, settings: Experiment, cell: tuple) -> None:
    """What the gate of one soft row (model, corpus, method, variant, seed) gives, over two windows.

    Near pairs have the affinity 0.9; of the far ones, half have 0.2, half 0.4.
    """
    job = jobs.gate_values_job(settings, *cell)
    adapter = job.settings.adapter
    near, low, high = (gate_value(adapter.gate, adapter.steepness, affinity) for affinity in (0.9, 0.2, 0.4))
    metrics = {"gate": adapter.gate, "steepness": adapter.steepness, "context": job.model_settings.context}
    for pairs, values, affinity in (("near", [near, near], 0.9), ("far", [low, high], 0.3)):
        histogram = [sum(int(50 * value) == step for value in values) / 2 for step in range(50)]
        quantiles = {level: values[int(level) >= 50] for level in ("5", "25", "50", "75", "95")}
        known = {"pairs": 200, "mean": sum(values) / 2, "mean_error": 0.002, "quantiles": quantiles}
        known |= {"below_low": sum(value < 0.1 for value in values) / 2, "affinity": affinity, "histogram": histogram}
        metrics[pairs] = known | {"above_high": sum(value > 0.9 for value in values) / 2}
    metrics |= {"layers": [{"near_mean": near, "far_mean": (low + high) / 2}], "window": adapter.window}
    metrics |= {"windows": [{"document": "book0", "start": 0}] * 2, "sinks": adapter.sinks}
    write_result(root / "gates" / "/".join(cell[:4]) / f"seed{cell[4]}.json", "gates", job, metrics)


def gate_value(gate: str, steepness: float, affinity: float) -> float:
    """The four readings of Eq. 2."""
    if gate == "exponential":
        return math.exp(steepness * (affinity - 1))
    return 1 / (1 + math.exp(-steepness * (affinity - (0.0 if gate == "printed" else 0.5))))


def write_answers(root: Path, settings: Experiment, cell: tuple, correct: list[int] | None) -> None:
    """What one row (model, corpus, method, variant, seed) wrote; None for one that cannot generate."""
    metrics = {"reason": "cannot generate"}
    if correct is not None:
        metrics = {"task": "gsm8k", "shots": 8, "items": len(correct), "correct": correct, "correct_flexible": correct}
        metrics |= {"accuracy_flexible": sum(correct) / len(correct), "context": 2048, "prompts_cut": 0}
        metrics |= {"beyond_window": 0.9, "tokens_per_second": 12.5}
    path = root / "generation" / "/".join(cell[:4]) / f"seed{cell[4]}.json"
    write_result(path, "generation", jobs.generation_job(settings, *cell), metrics)


def write_long(root: Path, settings: Experiment, cell: tuple, lost: int) -> None:
    """Tasks behind text: of 8 items 6 - `lost` right, each `lost` and a little nats farther off than at 0."""
    losses = [2.0 + 0.1 * number + lost + 0.01 * lost * (-1) ** number for number in range(8)]
    scores = {"items": 8, "correct": [int(number < 6 - lost) for number in range(8)], "beyond_window": 0.97}
    scores |= {"losses": losses, "requests_cut": 0}
    behind = {"text": {"tokens": 1024, "tasks": dict.fromkeys(TASKS, scores)}}
    path = root / "long_inputs" / "/".join(cell[:4]) / f"seed{cell[4]}.json"
    write_result(path, "long_inputs", jobs.long_inputs_job(settings, *cell), {"behind": behind})


def write_recall(root: Path, settings: Experiment, cell: tuple, lost: int) -> None:
    """Two lengths: of 4 hidden numbers 3 - `lost` right, one exact; of copies half, and of random tokens a quarter."""
    needles, copies = [], []
    for length in (1024, 2048):
        hits = {"correct": [int(number < 3 - lost) for number in range(4)], "exact": [1, 0, 0, 0]}
        items = [{key: hits[key][number] for key in hits} for number in range(4)]
        needles.append({"length": length, "loss": 2.0, "items": items} | hits)
        for kind, share in (("text", 0.5), ("random", 0.25)):
            items = [{"accuracy": share - 0.1}, {"accuracy": share + 0.1}]
            copies.append({"length": length, "passage": kind, "change": -share, "accuracy": share, "items": items})
    path = root / "recall" / "/".join(cell[:4]) / f"seed{cell[4]}.json"
    write_result(path, "recall", jobs.recall_job(settings, *cell), {"needle": needles, "copy": copies})


def write_speed(root: Path, settings: Experiment, *, faster: float = 1.0) -> None:
    """The timing of attention alone: n/8192 times full attention's speed, or `faster` times that; k of K halves it."""
    job = settings.speed

    def timed(length: int, speedup: float, **known) -> dict:
        row = {"length": length, "threads": 1, "groups": 4, "full_ms": 2000.0, "focus_ms": 2000 / speedup}
        row |= {"speedup": speedup, "speedup_range": [0.9 * speedup, 1.1 * speedup], "speedup_error": 0.01 * speedup}
        return row | {"repeats": 3, "limit": 8.0, "share_of_limit": speedup / 8, "cosine": 1 - 1e-9} | known

    parts = {"sort": 1.0, "groups": 2.0, "band": 3.0, "merge": 4.0}
    cases = [(length, k) for length in job.lengths for k in job.groups]
    forward = [timed(length, faster * length / 8192, groups=k, parts=parts) for length, k in cases]
    kept = {1: 0.25, 2: 0.8, 3: 1.0, 4: 1.0}
    membership = [
        timed(length, faster / share, top_k=k, pairs_kept=share, far_pairs_kept=share, paper=4 / k, backend="full/x")
        for length in job.membership_lengths
        for k, share in kept.items()
    ]
    sizes = [{"length": 16384, "groups": k, "mib": mib} for k, mib in ((None, 100.0), (8, 150.0))]
    metrics = {"forward": forward, "backward": [timed(4096, 2.0)], "unbalanced": [timed(16384, 2.0, bound=3.3)]}
    metrics |= {"membership": membership, "memory": sizes, "training": [], "decode": [], "decode_model": []}
    write_result(root / "speed/attention.json", "attention", job, metrics)


def write_result(path: Path, kind: str, job, metrics: dict) -> None:
    """One result file."""
    provenance = {
        "code": "0" * 64,
        "device": "cpu",
        "processor": "A Processor",
        "versions": {"torch": "2"},
        "dtype": "float32",
        "backend": "eager",
        "seconds": 1.5,
        "peak_memory_mib": 900,
    }
    result = {"result_version": 1, "experiment": kind, "settings": job.model_dump(mode="json")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result | {"metrics": metrics, "provenance": provenance}))


def write_methods(root: Path, speeds: dict[str, float | str], length: int = 65536) -> None:
    """The timing of methods, by "method/variant": the speed-up, or the reason why there is none.

    At a quarter of the length everything is half as fast.
    """
    cases = []
    for share in (4, 1):
        for name, value in speeds.items():
            case = {"length": length // share, "rows": [name, f"{name}-again"], "how": "some way", "reason": None}
            if isinstance(value, str):
                cases.append(case | {"reason": value})
            else:
                speedup = value if share == 1 else value / 2
                cases.append(case | {"speedup": speedup, "speedup_range": [0.9 * speedup, 1.1 * speedup]})
    settings = make_method(kind="pretrained", label="x", window=128)
    rows = [
        jobs.TimedRow(method=name.partition("/")[0], settings=settings, attention="full", top_k=None) for name in speeds
    ]
    job = jobs.MethodsJob(rows=rows, lengths=[length // 4, length], heads=4, head_dim=64, seconds=1.0, seed=0)
    write_result(root / "speed/methods.json", "methods", job, {"cases": cases})
