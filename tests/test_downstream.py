"""lm-eval's own tasks on our items, scored by our batches as lm-eval scores them."""

import json
import socket

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from tiny import (
    WINDOW,
    byte_tokenizer,
    focus_method,
    make_world,
    manifest_of,
    row_settings,
    text,
    tiny_model,
    write_json,
)

from focus.cache import describe
from focus.config import Downstream
from focus.errors import UserError
from focus.evaluation import downstream
from focus.jobs import DownstreamJob
from focus.method_config import make_method
from focus.methods import METHODS
from focus.precision import products_in
from focus.provenance import read_result

CONTEXT = 96
ITEMS = {
    "hellaswag": [
        {
            "activity_label": "Cat",
            "ctx_a": text(number, 30),
            "ctx_b": "then",
            "endings": [text(40 + number * 4 + ending, 12 + 8 * ending) + " [title] end" for ending in range(4)],
            "label": str(number % 4),
        }
        for number in range(6)
    ],
    "arc_easy": [
        {
            "question": text(100 + number, 60),
            "choices": {"text": ["cat", "mat", "the end"], "label": ["A", "B", "C"]},
            "answerKey": "ABC"[number % 3],
        }
        for number in range(6)
    ],
    "piqa": [
        {"goal": text(200 + number, 20), "sol1": text(300 + number, 24), "sol2": "it ran", "label": number % 2}
        for number in range(6)
    ],
    "lambada": [{"text": text(400 + number, 120)} for number in range(6)],
    "truthfulqa_mc1": [
        {
            "question": text(500 + number, 30) + "?",
            "mc1_targets": {"choices": ["It ran.", text(600 + number, 20), "A mat."], "labels": [1, 0, 0]},
        }
        for number in range(6)
    ],
}


def row_lm(model, **settings):
    arguments = {"context": CONTEXT, "batch_size": 4, "products": lambda: products_in(torch.float32, model.device)}
    return downstream.RowLM(model, byte_tokenizer(), **arguments | settings)


@pytest.mark.parametrize("task", ITEMS)
def test_accuracies_are_those_of_lm_eval(task):
    model = tiny_model()
    definition = downstream.load_task(task, ITEMS[task])
    plain = HFLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=1, max_length=CONTEXT)
    expected = evaluate(plain, {"tasks": {task: definition}}, bootstrap_iters=0)
    ours = row_lm(model)
    measured = downstream.accuracy(ours, task, ITEMS[task], WINDOW)
    samples = sorted(next(iter(expected["samples"].values())), key=lambda sample: sample["doc_id"])
    assert measured["correct"] == [int(sample["acc"]) for sample in samples]
    answers = evaluate(ours, {"tasks": {task: downstream.load_task(task, ITEMS[task])}}, bootstrap_iters=0)
    for sample, other in zip(samples, next(iter(answers["samples"].values())), strict=True):
        scores = [score for ((score, _),) in sample["resps"]]
        assert [score for ((score, _),) in other["resps"]] == pytest.approx(scores, abs=1e-3)
    if task not in ("lambada", "truthfulqa_mc1"):
        assert measured["accuracy_norm"] == next(iter(expected["results"].values()))["acc_norm,none"]


def test_requests_are_worded_as_the_tasks_are():
    def requests(task):
        definition = downstream.load_task(task, ITEMS[task])
        definition.build_all_requests()
        return [instance.args for instance in definition.instances]

    first = ITEMS["hellaswag"][0]
    ending = first["endings"][1].replace(" [title]", ". ").replace("  ", " ")
    assert requests("hellaswag")[1] == (f"Cat: {first['ctx_a']} Then", f" {ending}")
    assert requests("arc_easy")[2] == (f"Question: {ITEMS['arc_easy'][0]['question']}\nAnswer:", " the end")
    assert requests("piqa")[1] == (f"Question: {ITEMS['piqa'][0]['goal']}\nAnswer:", " it ran")
    asked = requests("truthfulqa_mc1")[2]
    assert asked[0].endswith(f"Barcelona, Spain.\n\nQ: {ITEMS['truthfulqa_mc1'][0]['question']}\nA:")
    assert asked[1] == " A mat."
    beginning, last = ITEMS["lambada"][0]["text"].rsplit(" ", 1)
    assert requests("lambada")[0] == (beginning, f" {last}")


@pytest.mark.parametrize(("lengths", "window"), [([1], 0), ([3, 1, 7], 2), ([5, 5], 4), ([9, 2], 0)])
def test_a_position_is_beyond_the_window_when_its_first_key_is(lengths, window):
    far = [position > window for length in lengths for position in range(length)]
    assert downstream.beyond_window(lengths, window) == sum(far) / len(far)


@pytest.mark.parametrize(("lengths", "scored", "window"), [([10], [3], 4), ([10, 5, 3], [6, 5, 1], 4), ([4], [2], 9)])
def test_of_the_scored_positions_those_are_counted_that_see_beyond(lengths, scored, window):
    seen = [p > window for length, last in zip(lengths, scored, strict=True) for p in range(length - last, length)]
    assert downstream.scored_beyond_window(lengths, scored, window) == sum(seen) / len(seen)


def test_positions_beyond_the_window_are_counted():
    measured = downstream.accuracy(row_lm(tiny_model()), "lambada", ITEMS["lambada"], 20)
    lengths = [min(len(item["text"]) - 1, CONTEXT) for item in ITEMS["lambada"]]
    beyond = sum(1 for length in lengths for position in range(length) if position - 0 > 20)
    assert measured["positions"] == sum(lengths)
    assert measured["beyond_window"] == pytest.approx(beyond / sum(lengths))
    assert downstream.accuracy(row_lm(tiny_model()), "piqa", ITEMS["piqa"], 200)["beyond_window"] == 0.0


@pytest.mark.parametrize("balance", ["sinkhorn", "potentials"])
def test_other_requests_of_a_batch_do_not_change_an_answer(balance):
    model = tiny_model()
    METHODS["focus"].attach(model, focus_method([], {"balance": balance}), window=WINDOW, seed=0)
    requests = [(("", ""), list(range(5, 5 + length)), [1, 2, 3][: 1 + length % 3]) for length in (60, 7, 31, 40)]
    alone = row_lm(model, batch_size=1)._loglikelihood_tokens(requests)
    together = row_lm(model, batch_size=4)._loglikelihood_tokens(requests)
    assert [score for score, _ in together] == pytest.approx([score for score, _ in alone], abs=1e-4)
    assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]


def test_items_come_from_a_shuffle_that_more_items_only_extend(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(50)))
    few = [item["number"] for item in downstream.choose_items(path, 10)]
    assert downstream.choose_items(path, 20)[:10] == downstream.choose_items(path, 10)
    assert few != sorted(few)
    with pytest.raises(UserError, match="expected at least 51 items, found 50"):
        downstream.choose_items(path, 51)


def test_an_item_may_hold_separators_that_end_no_line_of_json(tmp_path):
    path = tmp_path / "items.jsonl"
    texts = ["a\u2028b", "c\x85d", "e\u2029f"]
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    assert {item["text"] for item in downstream.choose_items(path, 3)} == set(texts)
    with pytest.raises(UserError, match="found 3"):
        downstream.choose_items(path, 4)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    for task, items in ITEMS.items():
        folder = tmp_path / "cache" / "benchmarks" / task
        folder.mkdir(parents=True)
        (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        values = {"folder": f"benchmarks/{task}", "files": describe(folder), "kind": "benchmark", "name": task}
        write_json(tmp_path / f"{task}.json", manifest_of(values))
    return world


def measure(world, settings, **values):
    tasks = Downstream(tasks=dict.fromkeys(ITEMS, 4), batch_size=3, precision="float32")
    job = DownstreamJob.model_validate(
        row_settings(settings) | {"attention": "full", "top_k": None, "downstream": tasks} | values
    )
    output = world.folder / f"{settings.kind}.json"
    manifests = {task: world.folder / f"{task}.json" for task in ITEMS}
    downstream.run(job, model=world.model, benchmarks=manifests, weights=None, output=output)
    return read_result(output)


def test_a_job_runs_without_a_network(world, monkeypatch):
    def refuse(*arguments, **settings):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    result = measure(world, make_method(kind="window", label="window", sinks=2))
    tasks = result["metrics"]["tasks"]
    assert tasks.keys() == ITEMS.keys()
    for task in tasks.values():
        assert task["items"] == len(task["correct"]) == 4
        assert task["accuracy"] == sum(task["correct"]) / 4
        assert 0 < task["beyond_window"] < 1
    assert result["provenance"]["revisions"]["piqa"]["revision"] == "sha256:0"


def test_rows_are_measured_on_the_same_items(world):
    first = measure(world, make_method(kind="pretrained", label="pretrained"), seed=0)
    second = measure(world, make_method(kind="pretrained", label="pretrained"), seed=7)
    assert first["metrics"] == second["metrics"]


def test_a_missing_benchmark_is_named(world):
    settings = row_settings(make_method(kind="pretrained", label="pretrained"))
    tasks = Downstream(tasks={"piqa": 1}, batch_size=1)
    job = DownstreamJob.model_validate(settings | {"attention": "full", "top_k": None, "downstream": tasks})
    with pytest.raises(UserError, match="got none for piqa"):
        downstream.run(job, model=world.model, benchmarks={}, weights=None, output=world.folder / "x.json")
