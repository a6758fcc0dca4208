"""Tasks behind other tokens: without any, lm-eval's own scores; with them, those of the joined tokens."""

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from test_downstream import ITEMS, row_lm, world
from tiny import WINDOW, byte_tokenizer, focus_method, row_settings, text, tiny_model

from focus.errors import UserError
from focus.evaluation import downstream, long_inputs
from focus.evaluation.rows import EvaluatedRow
from focus.jobs import LongInputsJob
from focus.long_config import LongInputs
from focus.method_config import make_method
from focus.methods import METHODS
from focus.provenance import read_result

__all__ = ["world"]
TASKS = ("hellaswag", "arc_easy", "piqa", "lambada")
TOKENIZER = byte_tokenizer()


def long_lm(model, *, caches=True):
    row = EvaluatedRow(model, TOKENIZER, METHODS["pretrained"], 0)
    return long_inputs.LongLM(row, dtype=torch.float32, caches=caches)


def likelihoods(samples):
    return [score for sample in samples for ((score, _),) in sample["resps"]]


@pytest.mark.parametrize("task", TASKS)
def test_without_a_prefix_scores_are_those_of_lm_eval(task):
    model = tiny_model()
    plain = HFLM(pretrained=model, tokenizer=TOKENIZER, batch_size=1, max_length=256)
    definition = downstream.load_task(task, ITEMS[task])
    expected = evaluate(plain, {"tasks": {task: definition}}, bootstrap_iters=0)["samples"].popitem()[1]
    expected = sorted(expected, key=lambda sample: sample["doc_id"])
    ours = long_lm(model)
    ours.begin(task)
    samples = downstream.answered(ours, task, ITEMS[task])
    assert likelihoods(samples) == pytest.approx(likelihoods(expected), abs=1e-3)
    measured = long_inputs.accuracy(ours, task, ITEMS[task], [], WINDOW, name=task)
    short = downstream.accuracy(row_lm(model, context=256), task, ITEMS[task], WINDOW)
    assert {key: measured[key] for key in short} == short
    assert measured["correct"] == [int(sample["acc"]) for sample in expected]


@pytest.mark.parametrize("balance", [None, "potentials", "sinkhorn"])
def test_behind_a_prefix_scores_are_those_of_the_joined_tokens(balance):
    model, caches = tiny_model(), balance != "sinkhorn"
    if balance:
        METHODS["focus"].attach(model, focus_method([], {"balance": balance}), window=WINDOW, seed=0)
    prefixes = [torch.tensor(TOKENIZER(text(number, 120))["input_ids"])[:80] for number in (1, 2)]
    ours = long_lm(model, caches=caches)
    measured = long_inputs.accuracy(ours, "arc_easy", ITEMS["arc_easy"], prefixes, WINDOW, name="arc")
    for number, item in enumerate(ITEMS["arc_easy"]):
        choices, losses = item["choices"]["text"], []
        for choice in choices:
            context = TOKENIZER(f"Question: {item['question']}\nAnswer:")["input_ids"]
            answer = TOKENIZER(f" {choice}")["input_ids"]
            tokens = torch.cat([prefixes[number % 2], torch.tensor(context + answer)])
            with torch.no_grad():
                logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0, -len(answer) :]
            losses.append(float(torch.nn.functional.cross_entropy(logits, tokens[-len(answer) :], reduction="sum")))
        assert measured["losses"][number] == pytest.approx(losses["ABC".index(item["answerKey"])], abs=1e-3)
        assert measured["correct"][number] == (min(losses) == losses["ABC".index(item["answerKey"])])
    lengths = [
        80 + len(TOKENIZER(f"Question: {item['question']}\nAnswer: {choice}")["input_ids"]) - 1
        for item in ITEMS["arc_easy"]
        for choice in item["choices"]["text"]
    ]
    assert measured["positions"] == sum(lengths)
    assert measured["beyond_window"] == downstream.beyond_window(lengths, WINDOW)


def test_what_stands_before_is_read_once():
    ours = long_lm(tiny_model())
    prefix = torch.arange(150)
    measured = long_inputs.accuracy(ours, "piqa", ITEMS["piqa"], [prefix], WINDOW, name="piqa")
    assert ours.reader.tokens_read < 150 + measured["positions"] - 150 * measured["requests"]


def test_what_does_not_fit_loses_its_beginning_and_is_counted():
    ours = long_lm(tiny_model())
    prefix = torch.arange(200)
    measured = long_inputs.accuracy(ours, "lambada", ITEMS["lambada"], [prefix], WINDOW, name="lambada")
    assert measured["requests_cut"] == 6
    assert measured["positions"] == 6 * 256
    with pytest.raises(UserError, match="expected to leave room for an answer"):
        long_inputs.accuracy(ours, "lambada", ITEMS["lambada"], [torch.arange(256)], WINDOW, name="lambada")


def settings(**changes):
    counts = dict.fromkeys(TASKS, 3)
    return LongInputs(**{"tasks": counts, "tokens": 64, "windows": 2, "precision": "float32"} | changes)


def test_text_is_held_out_and_has_exactly_as_many_tokens(world):
    prefixes, places = long_inputs.text_prefixes(world.corpus, TOKENIZER, settings())
    held_out = {f"d{number}": text(number, 600) for number in (2, 5)}
    for prefix, place in zip(prefixes, places, strict=True):
        written = TOKENIZER.decode(prefix)
        assert len(prefix) == 64
        assert written == held_out[place["document"]][place["start"] : place["start"] + 62] + "\n\n"
    assert places[0] != places[1]


def test_examples_are_lm_evals_and_none_of_the_measured_items(world):
    path = world.folder / "cache/benchmarks/arc_easy/items.jsonl"
    few = settings(tasks={"arc_easy": 2}, tokens=120)
    prefixes = long_inputs.example_prefixes("arc_easy", path, TOKENIZER, few)
    spare = downstream.spare_items(path, after=2, most=100)
    assert len(spare) == 4
    assert [item for item in spare if item in downstream.choose_items(path, 2)] == []
    rendered = []
    for item in spare:
        right = item["choices"]["text"]["ABC".index(item["answerKey"])]
        rendered.append(f"Question: {item['question']}\nAnswer: {right}\n\n")
    assert long_inputs.worked(downstream.load_task("arc_easy", spare)) == rendered
    assert [TOKENIZER.decode(prefix) for prefix in prefixes] == [
        "".join(rendered[:2])[-120:],
        "".join(rendered[2:])[-120:],
    ]
    with pytest.raises(UserError, match=r"tasks.arc_easy: expected so few items that the others fill 2 windows"):
        long_inputs.example_prefixes("arc_easy", path, TOKENIZER, settings(tasks={"arc_easy": 6}, tokens=120))


RIGHT = {
    "hellaswag": lambda item: int(item["label"]),
    "arc_easy": lambda item: "ABC".index(item["answerKey"]),
    "piqa": lambda item: item["label"],
    "lambada": lambda item: 0,
}


@pytest.mark.parametrize("task", TASKS)
def test_a_worked_example_is_the_right_one_of_the_items_requests(task):
    definition, requests = downstream.load_task(task, ITEMS[task]), {}
    definition.build_all_requests()
    for instance in definition.instances:
        requests.setdefault(instance.doc_id, []).append("".join(instance.args))
    expected = [requests[number][RIGHT[task](item)] + "\n\n" for number, item in enumerate(ITEMS[task])]
    assert long_inputs.worked(downstream.load_task(task, ITEMS[task])) == expected


def measure(world, method, **changes):
    job = LongInputsJob.model_validate(
        row_settings(method) | {"attention": "full", "top_k": None, "long_inputs": settings(**changes)}
    )
    output = world.folder / f"{method.kind}.json"
    manifests = {task: world.folder / f"{task}.json" for task in TASKS}
    long_inputs.run(job, model=world.model, corpus=world.corpus, benchmarks=manifests, weights=None, output=output)
    return read_result(output)


def test_a_job_measures_the_first_of_the_short_items_the_same_way_each_time(world):
    few = {"tasks": {"piqa": 3, "lambada": 3}, "behind": ["text", "examples"], "windows": 1}
    first = measure(world, make_method(kind="window", label="x"), **few)
    again = measure(world, make_method(kind="window", label="x"), **few)
    assert first["metrics"] == again["metrics"]
    for kind in ("text", "examples"):
        behind = first["metrics"]["behind"][kind]
        assert behind["tokens"] == 64
        assert {
            task: (each["items"], len(each["correct"]), len(each["losses"])) for task, each in behind["tasks"].items()
        } == {"piqa": (3, 3, 3), "lambada": (3, 3, 3)}
    assert first["metrics"]["text"][0]["document"] in ("d2", "d5")
    assert first["provenance"]["revisions"].keys() == {"model", "corpus", "piqa", "lambada"}


def test_more_tokens_than_positions_are_refused(world):
    with pytest.raises(
        UserError, match=r"long_inputs.tokens: expected less than the 256 positions of tiny-gpt2, got 256"
    ):
        measure(world, make_method(kind="pretrained", label="x"), tokens=256)
    job = {"attention": "full", "top_k": None, "long_inputs": settings()}
    job = LongInputsJob.model_validate(row_settings(make_method(kind="pretrained", label="x")) | job)
    paths = {"model": world.model, "corpus": world.corpus, "weights": None, "output": world.folder / "x.json"}
    with pytest.raises(UserError, match="got none for arc_easy, hellaswag, lambada, piqa"):
        long_inputs.run(job, benchmarks={}, **paths)
