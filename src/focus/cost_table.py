"""What a run still has to do and will take, table by table and in total: `snakemake cost`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from focus import cost, jobs, prediction
from focus.config import Experiment
from focus.cost import MIB, Estimate, Record
from focus.errors import UserError
from focus.paper import layout
from focus.paper.layout import Grid
from focus.precision import multiplies_bfloat16
from focus.provenance import digest, processor, read_result

MODULES = {
    "training": "focus.training",
    "pretraining": "focus.pretraining",
    "perplexity": "focus.evaluation.perplexity",
    "gates": "focus.gate_values",
    "downstream": "focus.evaluation.downstream",
    "generation": "focus.evaluation.generation",
    "long_inputs": "focus.evaluation.long_inputs",
    "recall": "focus.evaluation.recall",
    "groups": "focus.groups",
    "leak": "focus.leak",
    "bits": "focus.random_bits",
    "attention": "focus.benchmark",
    "methods": "focus.benchmark_methods",
}
EVALUATIONS = {
    "perplexity": jobs.perplexity_job,
    "gates": jobs.gate_values_job,
    "downstream": jobs.downstream_job,
    "generation": jobs.generation_job,
    "long_inputs": jobs.long_inputs_job,
    "recall": jobs.recall_job,
}
READS = {
    "training": lambda job: [f"corpora/{job.corpus}.json"],
    "perplexity": lambda job: [f"corpora/{job.corpus}.json"],
    "gates": lambda job: [f"corpora/{job.corpus}.json"],
    "downstream": lambda job: [f"benchmarks/{task}.json" for task in job.downstream.tasks],
    "generation": lambda job: [f"benchmarks/{job.generation.task}.json"],
    "long_inputs": lambda job: [
        f"corpora/{job.corpus}.json",
        *(f"benchmarks/{task}.json" for task in job.long_inputs.tasks),
    ],
    "recall": lambda job: [f"corpora/{job.corpus}.json"],
    "groups": lambda job: [f"corpora/{job.corpus}.json", "taggers/en-core-web-sm.json"],
    "leak": lambda job: [f"corpora/{name}.json" for name in (job.corpus, *job.leak.corpora)],
}
"""What the jobs of a kind need beside their model and its training."""
SPEED = {"speed/attention.json": "attention", "speed/methods.json": "methods"}
START = 8.0
"""Seconds that a job takes beside what its result records: starting, imports, writing. The median over 72 jobs of a
laptop run, two at a time on a busy machine, of what Snakemake timed less what the result says (4 to 25)."""
BASES = {
    "like": "same job",
    "scaled": "same job of another size",
    "other": "another row",
    "shape": "shape alone",
    "unknown": "no record",
}
"""How the page calls what a prediction rests on (see cost.py)."""
LEAST = 0.01
HEADER = ["What", "Jobs", "done", "Core hours", "Hours here", "GiB, largest job", "GiB of disk", "Predicted from"]
GPU_HEADER = [
    *("What", "Jobs", "done", "GPU hours", "Core hours, no GPU", "Hours at least", "GPUs, largest job"),
    *("GiB of GPU memory, largest job", "GiB of memory, largest job", "GiB of disk", "Predicted from"),
]


@dataclass(frozen=True)
class Job:
    """What makes one result file; `needs` are the result files that must be there first."""

    path: str
    kind: str
    settings: dict | None
    needs: tuple[str, ...]
    finished: bool
    estimate: Estimate

    @property
    def alone(self) -> bool:
        """Whether it takes every core."""
        return self.path in SPEED


class Plan:
    """The jobs behind result files: what is finished in the folder `results`, and what the others will take."""

    def __init__(self, experiment: Experiment, results: Path, recorded: Sequence[Path], cores: int):
        self.experiment, self.results, self.cores = experiment, Path(results), cores
        self.folders = [self.results, *recorded]
        self.gpu = experiment.environment == "cuda"
        self.shapes = prediction.shapes(experiment)
        self.records: list[Record] = cost.read(self.folders)
        self.slower = not self.gpu and not multiplies_bfloat16(torch.device("cpu"))
        if self.slower:
            self.records = [cost.without_bfloat16(record) for record in self.records]
        self.known: dict[str, Job] = {}

    def job(self, path: str) -> Job:
        """The job that writes `path`, relative to the results folder."""
        path = _result_of(path)
        if path not in self.known:
            kind, settings, needs = _described(path, self.experiment)
            finished = all(self.job(each).finished for each in needs) and self._finished(path, kind, settings)
            self.known[path] = Job(path, kind, settings, needs, finished, self._estimate(path, kind, settings))
        return self.known[path]

    def all_of(self, paths: Sequence[str]) -> list[Job]:
        """The jobs of these files and of all that they need."""
        found: dict[str, Job] = {}
        queue = list(paths)
        while queue:
            job = self.job(queue.pop())
            if job.path not in found:
                found[job.path] = job
                queue += job.needs
        return list(found.values())

    def hours(self, left: list[Job]) -> tuple[float, float]:
        """(core hours, hours on this many cores) of the jobs whose time is known, with what each takes to start."""
        timed = {job.path: job.estimate.seconds + START for job in left if job.estimate.seconds is not None}
        alone = sum(seconds for path, seconds in timed.items() if path in SPEED)
        beside = sum(timed.values()) - alone

        longest = self._longest({path: seconds for path, seconds in timed.items() if path not in SPEED})
        return (beside + self.cores * alone) / 3600, (max(beside / self.cores, longest) + alone) / 3600

    def gpu_hours(self, left: list[Job]) -> tuple[float, float, float]:
        """(GPU hours, core hours of what needs no GPU, hours with as many GPUs and cores as there are jobs)."""
        timed = {job.path: job.estimate.seconds + START for job in left if job.estimate.seconds is not None}
        held = sum(job.estimate.gpus * timed[job.path] for job in left if job.path in timed)
        cores = sum(timed[job.path] for job in left if job.path in timed and not job.estimate.gpus)
        return held / 3600, cores / 3600, self._longest(timed) / 3600

    def _longest(self, timed: dict[str, float]) -> float:
        """Seconds of the chain of jobs that takes longest, of those with a time."""

        @cache
        def chain(path: str) -> float:
            return timed.get(path, 0.0) + max((chain(each) for each in self.job(path).needs), default=0.0)

        return max((chain(path) for path in timed), default=0.0)

    def _estimate(self, path: str, kind: str, settings: dict | None) -> Estimate:
        if kind == "fetch":
            return Estimate("fetch", disk=self._size(path))
        if settings is None:
            return cost.by_path(path, self.records)
        alike = "cuda" if self.gpu and kind not in prediction.WITHOUT_GPU else "cpu"
        found = cost.predict(kind, settings, [record for record in self.records if record.device == alike])
        shape = prediction.predict(kind, settings, self.shapes, self.experiment.machine, gpu=self.gpu)
        if shape is None:
            return found
        if found is cost.UNKNOWN:
            return Estimate("shape", shape.seconds, shape.host, shape.disk, shape.device, shape.gpus)
        return replace(found, device=shape.device, gpus=shape.gpus)

    def _size(self, path: str) -> float | None:
        """MiB of what a manifest lists, where a folder holds that manifest, or about what the registry's entry has."""
        for manifest in (folder / path for folder in self.folders):
            if manifest.exists():
                return sum(each["size"] for each in json.loads(manifest.read_text())["files"].values()) / MIB
        return prediction.download(Path(path).name.removesuffix(".json"))

    def _finished(self, path: str, kind: str, settings: dict | None) -> bool:
        """Whether the folder holds this job's result, by the same settings and source, as far as they are known."""
        if settings is None:
            return (self.results / path).exists()
        home = path.replace(".json", ".result.json") if kind == "pretraining" else path
        try:
            result = read_result(self.results / home)
        except UserError:
            return False
        return result["settings"] == settings and result["provenance"]["code"] == _code(kind)


def text(experiment: Experiment, exhibits: dict[str, list[str]], results: Path, reference: Path, cores: int) -> str:
    """The page. exhibits: {name: result files relative to `results`}; reference: the folder of recorded scales."""
    plan = Plan(experiment, results, sorted(path for path in Path(reference).glob("*") if path.is_dir()), cores)
    plans = {name: plan.all_of(paths) for name, paths in exhibits.items()}
    plans["All of these, shared jobs once"] = plan.all_of([path for paths in exhibits.values() for path in paths])
    header, line = (GPU_HEADER, _gpu_line) if plan.gpu else (HEADER, _line)
    grid = Grid("Jobs still to run", header, [line(name, plan, found) for name, found in plans.items()])
    return layout.markdown(f"What the scale {experiment.scale} will take", [grid], _notes(plan))


def _result_of(path: str) -> str:
    """The file that stands for a job: a training's result and a model's manifest, for all that they write."""
    place, name, *rest = path.split("/")
    if place == "training":
        return "/".join([place, name, *rest[:3], "result.json"])
    if place == "models":
        name = name.removesuffix(".log.jsonl").removesuffix(".json").removesuffix(".result")
        return f"{place}/{name}.json"
    return path


def _described(path: str, experiment: Experiment) -> tuple[str, dict | None, tuple[str, ...]]:
    """(kind as its result names it, settings or None where there are none, needed files) of a result file."""
    place, *rest = path.split("/")
    if path in SPEED:
        job = experiment.speed.attention if SPEED[path] == "attention" else jobs.methods_job(experiment)
        return SPEED[path], job.model_dump(mode="json"), ()
    if place == "models" and experiment.model_settings[rest[0].removesuffix(".json")].pretraining:
        job = jobs.pretrain_job(experiment, rest[0].removesuffix(".json"))
        needs = [f"corpora/{name}.json" for name in job.pretraining.corpora]
        return "pretraining", job.model_dump(mode="json"), tuple(needs)
    if place in ("models", "corpora", "benchmarks", "taggers"):
        return "fetch", None, ()
    if place == "bits":
        job = jobs.bits_job(experiment, rest[0], int(rest[1].removeprefix("t")), rest[2], _seed(rest[3]))
        return place, job.model_dump(mode="json"), ()
    if place not in READS:
        return place, None, ()
    model, corpus, method, *row = rest
    if place == "training":
        job = jobs.train_job(experiment, model, corpus, method, _seed(row[0]))
    elif place == "groups":
        job = jobs.groups_job(experiment)
    elif place == "leak":
        job = jobs.leak_job(experiment, model, corpus, method, _seed(row[0]))
    else:
        job = EVALUATIONS[place](experiment, model, corpus, method, row[0], _seed(row[1]))
    needs = [f"models/{model}.json", *READS[place](job)]
    if place != "training" and experiment.methods[method].training:
        needs.append(f"training/{model}/{corpus}/{method}/seed{job.seed}/result.json")
    return place, job.model_dump(mode="json"), tuple(needs)


def _seed(part: str) -> int:
    return int(part.removeprefix("seed").removesuffix(".json"))


@cache
def _code(kind: str) -> str:
    return digest([MODULES[kind]])


@dataclass(frozen=True)
class _Left:
    """The jobs of a line that are still to run: all, those that are no download, and how many of these are unknown."""

    jobs: list[Job]
    work: list[Job]
    unknown: int

    @classmethod
    def of(cls, found: list[Job]) -> _Left:
        """Those of `found`."""
        jobs = [job for job in found if not job.finished]
        work = [job for job in jobs if job.kind != "fetch"]
        return cls(jobs, work, sum(job.estimate.memory is None for job in work))

    def shown(self, value: float) -> str:
        """A sum or a maximum over the work."""
        return _known(value, self.unknown, len(self.work))

    def largest(self, name: str) -> str:
        """GiB of the job that takes the most; `name` is that of the estimate's MiB."""
        return self.shown(max((getattr(job.estimate, name) or 0.0 for job in self.work), default=0.0) / 1024)

    @property
    def disk(self) -> str:
        """GiB of all."""
        sizes = [job.estimate.disk for job in self.jobs if job.estimate.disk is not None]
        return _known(sum(sizes) / 1024, len(self.jobs) - len(sizes), len(self.jobs))

    @property
    def rests(self) -> str:
        """What the predictions rest on, counted."""
        bases = Counter(job.estimate.basis for job in self.work)
        parts = [f"{bases[basis]} {name}" for basis, name in BASES.items() if bases[basis]]
        fetched = len(self.jobs) - len(self.work)
        return ", ".join(parts + [f"{fetched} download{'s' * (fetched > 1)}"] * bool(fetched)) or "-"


def _line(name: str, plan: Plan, found: list[Job]) -> list[str]:
    left = _Left.of(found)
    counts = [str(len(left.jobs)), str(len(found) - len(left.jobs))]
    return [name, *counts, *map(left.shown, plan.hours(left.work)), left.largest("memory"), left.disk, left.rests]


def _gpu_line(name: str, plan: Plan, found: list[Job]) -> list[str]:
    left = _Left.of(found)
    counts = [str(len(left.jobs)), str(len(found) - len(left.jobs))]
    held, cores, longest = plan.gpu_hours(left.work)
    gpus = max((job.estimate.gpus for job in left.work), default=0)
    on_gpu = [left.shown(held), str(gpus), left.largest("device")] if gpus or left.unknown else ["-"] * 3
    hours = [on_gpu[0], left.shown(cores) if cores or left.unknown else "-", left.shown(longest)]
    return [name, *counts, *hours, *on_gpu[1:], left.largest("memory"), left.disk, left.rests]


def _known(value: float, unknown: int, jobs: int) -> str:
    """A number, more than it where some jobs are unknown, and no number where all are."""
    if not jobs:
        return "-"
    if unknown == jobs or (unknown and value < LEAST):
        return "unknown"
    return f"over {value:.2f}" if unknown else f"{value:.2f}" if value >= LEAST else f"<{LEAST}"


def _notes(plan: Plan) -> list[str]:
    unknown = sorted(job.path for job in plan.known.values() if not job.finished and job.estimate.basis == "unknown")
    notes = [
        "Finished jobs (same settings, same source) are not counted. Tables, figures and verdicts take seconds and are "
        "left out, and so is the time of downloads, which the network decides.",
        "Predicted from recorded runs. Same job: one with the same settings, seed, name and learning rate aside. Same "
        "job of another size: the same row with more or fewer steps, windows or items, scaled. Another row: one of the "
        "same model, the slowest where the method differs. Shape alone: no run of the model is recorded on such a "
        "device, so its layers and widths predict what the job computes and holds. No record: nothing to go by, so "
        "sums are too small.",
        *(_gpu_notes(plan) if plan.gpu else _core_notes(plan)),
        "While a job trains every weight, its checkpoint takes three times as much disk again.",
    ]
    if unknown:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        notes.append(f"No record: {shown}.")
    return notes


def _core_notes(plan: Plan) -> list[str]:
    processors = sorted({record.processor for record in plan.records})
    training, other = (cost.WITHOUT_BFLOAT16[trains] for trains in (True, False))
    slower = (
        f" What ran in bfloat16, which this one has not, is counted {other:g} times, {training:g} where it trained."
    )
    return [
        f"Hours here: {plan.cores} core{'s' * (plan.cores > 1)}, one job a core, timings alone on all; for the start "
        f"and end of each job {START:g} seconds are counted.",
        f"Recorded on {', '.join(processors) or 'nothing'}; this machine: {processor()}.{slower * plan.slower}",
    ]


def _gpu_notes(plan: Plan) -> list[str]:
    machine = plan.experiment.machine
    return [
        f"Shapes are turned into hours for {machine.name}: products at {machine.utilisation:.0%} of "
        f"{machine.bfloat16_tflops:g} TFLOP/s in bfloat16 and {machine.float32_tflops:g} in float32, memory moved at "
        f"{machine.bandwidth_share:.0%} of {machine.bandwidth:g} GB/s, at least {machine.launch:g} ms a layer. The "
        "key `hardware` of a config file names another device. Nothing here was measured on one.",
        f"GPUs: what a job holds over {machine.usable:.0%} of {machine.memory:g} GiB, rounded up; layers on several of "
        "them wait for one another, so that more GPUs are not faster. Hours at least: the longest chain of jobs, each "
        f"with its GPUs; for the start and end of a job {START + machine.start:g} seconds are counted.",
        "Core hours, no GPU: random bits, which run on the processor, as recorded on one.",
        "Disk: files of the hub and, of texts, their documents too, about; weights of methods that train everything.",
    ]
