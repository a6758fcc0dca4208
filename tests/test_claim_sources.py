"""Claims that rows, other result files and arithmetic decide, on made-up results with known answers."""

import json
import math
from types import SimpleNamespace

import numpy
import pytest
from paper_results import experiment, scored, write_answers, write_result, write_results

from focus.errors import UserError
from focus.paper import claim_sources, evidence
from focus.paper.claim import Claim
from focus.paper.claims import decide
from focus.paper.evidence import Evidence

SETTINGS = experiment(figures={})
LEAK = "leak/{model}/{corpus}/{method}/seed{seed}.json"
BOUND = {
    "id": "x",
    "place": "Section 4.1",
    "statement": "A future token changes nothing.",
    "kind": "bound",
    "relation": "at_most",
    "limit": 0.5,
    "tolerance": 0.0,
    "reason": "exact",
    "source": {"result": "leak/{model}/{corpus}/focus/seed{seed}.json", "key": "metrics.change.max"},
}
ORDERING = {key: value for key, value in BOUND.items() if key != "limit"} | {
    "kind": "ordering",
    "relation": "below",
    "tolerance": 2.0,
    "source": BOUND["source"] | {"error": "metrics.change.error"},
    "against": {
        "result": "leak/{model}/{corpus}/focus-paper/seed{seed}.json",
        "key": "metrics.change.max",
        "error": "metrics.change.error",
    },
}
ROW = {
    "id": "x",
    "place": "Table 8",
    "statement": "x",
    "kind": "bound",
    "relation": "at_least",
    "limit": 100.0,
    "metric": "collapse",
    "subject": "collapse-softmax/soft",
    "tolerance": 0.0,
    "reason": "x",
}


@pytest.fixture(autouse=True)
def made_up_results_count_as_planned(request, monkeypatch):
    if "planned" not in request.node.originalname:
        monkeypatch.setattr(claim_sources, "_planned", lambda known, path: True)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("leak/smollm2-135m-instruct/austen/focus-paper/seed0.json", True),
        ("leak/smollm2-135m-instruct/austen/no-such-row/seed0.json", False),
        ("bits/sinkhorn/t16/everything/seed0.json", True),
        ("bits/sinkhorn/t17/everything/seed0.json", False),
        ("groups/smollm2-135m-instruct/austen/focus-k8/seed0.json", True),
        ("groups/gpt2-mini/austen/focus-k8/seed0.json", False),
        ("speed/attention.json", True),
        ("recall/any/thing/seed0.json", True),
    ],
)
def test_what_no_setting_names_any_more_is_not_planned(path, expected):
    assert claim_sources._planned(SETTINGS, path) is expected


@pytest.mark.parametrize("path", ["leak/a/b/c/seed0.json", "bits/a/t1/b/seed0.json", "groups/a/b/c.json", "speed/a"])
def test_nothing_is_planned_where_the_scale_leaves_it_out(path):
    bare = SETTINGS.model_copy(update={"leak": None, "bits": None, "groups": None, "speed": None})
    assert not claim_sources._planned(bare, path)


def write(root, method: str, value: float | None, *, model="gpt2-mini", seed=0, error=0.0, **metrics) -> None:
    path = root / LEAK.format(model=model, corpus="austen", method=method, seed=seed)
    settings = SimpleNamespace(model_dump=lambda mode: {})
    write_result(path, "leak", settings, {"change": {"max": value, "error": error}} | metrics)


def verdict(root, settings: dict, seeds=(0,)) -> dict:
    return decide(Claim(**settings), Evidence(SETTINGS.model_copy(update={"seeds": list(seeds)}), root, {}, None))


def test_a_claim_reads_a_number_of_every_model_with_a_result(tmp_path):
    write(tmp_path, "focus", 0.4)
    claim = verdict(tmp_path, BOUND)
    assert claim["verdict"] == "reproduced"
    assert [case["model"] for case in claim["cases"]] == ["gpt2-mini"]
    assert claim["cases"][0]["results"] == ["leak/gpt2-mini/austen/focus/seed0.json"]
    write(tmp_path, "focus", 0.6, model="smollm2-135m-instruct")
    assert verdict(tmp_path, BOUND)["verdict"] == "mixed over models"
    write(tmp_path, "focus", 0.6)
    assert verdict(tmp_path, BOUND)["verdict"] == "contradicted"


@pytest.mark.parametrize(
    ("first", "second", "error", "expected"),
    [(1.0, 2.0, 0.1, "reproduced"), (2.0, 1.0, 0.1, "contradicted"), (1.0, 2.0, 0.4, "undecided")],
)
def test_an_ordering_compares_two_files_with_their_errors_in_quadrature(tmp_path, first, second, error, expected):
    """The difference of 1 has an error of 0.14 or 0.57, of which it must be more than two."""
    write(tmp_path, "focus", first, error=error)
    write(tmp_path, "focus-paper", second, error=error)
    claim = verdict(tmp_path, ORDERING)
    assert claim["verdict"] == expected
    measured = claim["cases"][0]["seeds"]["0"]["measured"][0]
    assert measured["error"] == pytest.approx(2**0.5 * error)


def test_a_change_in_percent_of_the_reference(tmp_path):
    write(tmp_path, "focus", 3.0)
    write(tmp_path, "focus-paper", 2.0)
    measured = verdict(tmp_path, ORDERING | {"percent": True})["cases"][0]["seeds"]["0"]["measured"][0]
    assert measured["value"] == pytest.approx(50)


@pytest.mark.parametrize(
    ("ours", "reference", "value", "error"),
    [
        (scored(0.1), scored(0.0), 100 * (math.exp(0.1) - 1), None),
        ([1, 0, 0, 1], [1, 1, 1, 1], -50, 25),
        ([1, 0, 1, 1], [1, 0, 1, 1], 0, 25),
        ({"correct": [1], "correct_norm": [0, 0]}, {"correct": [0], "correct_norm": [1, 1]}, -100, 50),
    ],
)
def test_lists_of_windows_or_items_are_compared_one_by_one(tmp_path, ours, reference, value, error):
    """With no item flipped the error is one item of the four."""
    write(tmp_path, "focus", 0.0, balances={"potentials": ours, "sinkhorn": reference})
    source = {"result": "leak/{model}/{corpus}/focus/seed{seed}.json", "key": "metrics.balances.potentials"}
    against = source | {"key": "metrics.balances.sinkhorn"}
    claim = verdict(tmp_path, ORDERING | {"source": source, "against": against, "paired": True})
    measured = claim["cases"][0]["seeds"]["0"]["measured"][0]
    assert measured["value"] == pytest.approx(value)
    assert measured["error"] == pytest.approx(error) if error else measured["error"] > 0
    assert claim["unit"] == " %"
    absent = {"source": source, "against": against | {"key": "metrics.x"}, "paired": True}
    missing = verdict(tmp_path, ORDERING | absent)
    assert missing["cases"][0]["reason"] == "leak/gpt2-mini/austen/focus/seed0.json has no list metrics.x"


def losses_claim(root, ours: list, reference: list, **changes) -> dict:
    """What is said of the losses of two tasks, all of their items together."""
    write(root, "focus", 0.0, ours=ours, reference=reference)
    source = {"result": BOUND["source"]["result"], "key": "metrics.ours.*", "over": "all"}
    against = source | {"key": "metrics.reference.*"}
    return verdict(root, ORDERING | {"source": source, "against": against, "paired": True, "unit": "nats"} | changes)


def test_losses_of_all_tasks_together_are_paired_by_item_in_nats(tmp_path):
    claim = losses_claim(tmp_path, [[1.0, 2.5], [3.0, 1.0]], [[2.0, 3.0], [3.5, 3.0]])
    differences = numpy.array([-1.0, -0.5, -0.5, -2.0])
    measured = claim["cases"][0]["seeds"]["0"]["measured"]
    assert [one["value"] for one in measured] == pytest.approx([differences.mean()])
    assert measured[0]["error"] == pytest.approx(differences.std(ddof=1) / 2)
    assert claim["verdict"] == "reproduced" and claim["unit"] == " nats"
    assert (
        losses_claim(tmp_path, [1.0, 2.5, 3.0, 1.0], [2.0, 3.0, 3.5, 3.0])["cases"][0]["seeds"]["0"]
        == (claim["cases"][0]["seeds"]["0"])
    )


def test_losses_that_vary_more_than_they_differ_decide_nothing_and_one_tells_no_error(tmp_path):
    assert losses_claim(tmp_path, [[1.0, 2.5, 0.5]], [[2.0, 1.0, 0.7]])["verdict"] == "undecided"
    alone = losses_claim(tmp_path, [[1.0]], [[2.0]])
    assert alone["verdict"] == "not run" and "no error" in alone["cases"][0]["reason"]


def test_all_is_for_paired_lists_on_both_sides(tmp_path):
    with pytest.raises(ValueError, match="over all: expected paired"):
        losses_claim(tmp_path, [[1.0, 2.0]], [[1.0, 2.0]], paired=False)


def test_a_reference_with_one_seed_serves_all(tmp_path):
    for seed, value in ((0, 1.0), (1, 3.0)):
        write(tmp_path, "focus", value, seed=seed)
    write(tmp_path, "focus-paper", 2.0, seed=0)
    assert verdict(tmp_path, ORDERING, seeds=(0, 1))["verdict"] == "mixed over seeds"
    write(tmp_path, "focus-paper", 4.0, seed=1)
    assert verdict(tmp_path, ORDERING, seeds=(0, 1))["verdict"] == "reproduced"


def test_seeds_that_disagree_are_mixed_and_a_missing_one_decides_nothing(tmp_path):
    write(tmp_path, "focus", 0.4, seed=0)
    claim = verdict(tmp_path, BOUND, seeds=(0, 1))
    assert (claim["verdict"], list(claim["cases"][0]["seeds"])) == ("reproduced", ["0"])
    assert verdict(tmp_path, BOUND, seeds=(1, 2))["verdict"] == "not run"
    first = BOUND | {"source": BOUND["source"] | {"seeds": "first"}}
    assert verdict(tmp_path, first, seeds=(0, 1))["verdict"] == "reproduced"
    write(tmp_path, "focus", 0.6, seed=1)
    assert verdict(tmp_path, BOUND, seeds=(0, 1))["verdict"] == "mixed over seeds"
    assert verdict(tmp_path, BOUND, seeds=(0,))["verdict"] == "reproduced"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (BOUND | {"source": {"result": "bits/{model}.json", "key": "metrics.x"}}, "no bits/{model}.json"),
        (ORDERING, "no leak/gpt2-mini/austen/focus-paper/seed0.json"),
        (
            BOUND | {"source": BOUND["source"] | {"key": "metrics.nothing"}},
            "leak/gpt2-mini/austen/focus/seed0.json has no number metrics.nothing",
        ),
        (
            BOUND | {"source": BOUND["source"] | {"error": "metrics.words"}},
            "leak/gpt2-mini/austen/focus/seed0.json has no number metrics.words for each metrics.change.max",
        ),
        (
            BOUND | {"source": BOUND["source"] | {"key": "metrics.words"}},
            "leak/gpt2-mini/austen/focus/seed0.json has no number metrics.words",
        ),
    ],
)
def test_what_is_missing_is_not_run_and_says_so(tmp_path, settings, reason):
    write(tmp_path, "focus", 0.4, words="none")
    claim = verdict(tmp_path, settings)
    assert (claim["verdict"], claim["cases"][0]["reason"]) == ("not run", reason)


def test_models_and_seeds_that_this_run_leaves_out_decide_nothing(tmp_path):
    write(tmp_path, "focus", 0.4, model="another")
    write(tmp_path, "focus", 0.4, seed=7)
    assert verdict(tmp_path, BOUND)["verdict"] == "not run"


def test_every_file_and_every_entry_that_an_asterisk_finds_has_to_hold(tmp_path):
    for length, value in (("T16", 0.3), ("T64", 0.2)):
        write(tmp_path, length, value, layers=[{"gate": 0.1}, {"gate": value}])
    everywhere = BOUND | {
        "source": {"result": "leak/{model}/{corpus}/*/seed{seed}.json", "key": "metrics.layers.*.gate"}
    }
    claim = verdict(tmp_path, everywhere | {"limit": 0.25})
    measured = claim["cases"][0]["seeds"]["0"]["measured"]
    assert {each["name"]: each["value"] for each in measured} == {
        "T16, 0": 0.1,
        "T16, 1": 0.3,
        "T64, 0": 0.1,
        "T64, 1": 0.2,
    }
    assert claim["verdict"] == "contradicted"
    mean = everywhere | {"source": everywhere["source"] | {"over": "mean"}, "limit": 0.25}
    assert verdict(tmp_path, mean)["verdict"] == "reproduced"


def test_a_seed_counts_once_every_file_that_an_asterisk_finds_has_it(tmp_path):
    for length, seed, value in (("T16", 0, 0.1), ("T16", 1, 0.9), ("T64", 0, 0.2), ("T64", 2, 0.9)):
        write(tmp_path, length, value, seed=seed)
    source = {"result": "leak/{model}/{corpus}/*/seed{seed}.json", "key": "metrics.change.max"}
    claim = verdict(tmp_path, BOUND | {"source": source}, seeds=(0, 1, 2))
    assert (claim["verdict"], list(claim["cases"][0]["seeds"])) == ("reproduced", ["0"])
    case = verdict(tmp_path, BOUND | {"source": source}, seeds=(1, 2))["cases"][0]
    assert (case["verdict"], case["reason"]) == ("not run", "no leak/gpt2-mini/austen/T64/seed1.json")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a.b", [1]),
        ("list.1.x", [3]),
        ("list.-1.x", [3]),
        ("list.*.x", [2, 3]),
        ("list[name=two].x", [3]),
        ("list[tags=p].x", [2]),
        ("list[tags=p][name=one].x", [2]),
        ("list[tags=p][name=two].x", []),
        ("[dotted.name]", [4]),
        ("a.*", [1, 5]),
        ("a.nothing", []),
        ("list.9.x", []),
        ("a.b.c", []),
    ],
)
def test_dotted_places(key, expected):
    content = {
        "a": {"b": 1, "c": 5},
        "list": [{"x": 2, "name": "one", "tags": ["p", "q"]}, {"x": 3, "name": "two", "tags": []}],
        "dotted.name": 4,
    }
    assert [value for _, value in claim_sources.look_up(content, key)] == expected


def test_an_unknown_wildcard_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected the wildcards model, corpus, seed, got \{method\}"):
        list(claim_sources.matches("leak/{method}.json", tmp_path))


def groups_result(root) -> None:
    """Two layers, of which the second is shown; its third group is small and pure."""
    groups = [
        {"share": 0.5, "categories": {"PUNCT": 0.9, "NOUN": 0.1}},
        {"share": 0.45, "categories": {"NOUN": 0.7}},
        {"share": 0.05, "categories": {"NOUN": 1.0}},
    ]
    layers = [{"confidence": 0.5, "groups": groups[:1]}, {"confidence": 0.9, "groups": groups}]
    best = {"layer": 1, "p_values": {"shuffled": 0.001, "by_token": 0.3}}
    path = root / "groups/gpt2-mini/austen/focus-k8/seed0.json"
    write_result(path, "groups", SimpleNamespace(model_dump=lambda mode: {}), {"layers": layers, "best": best})


@pytest.mark.parametrize(
    ("key", "value"),
    [("best.most.NOUN", 0.7), ("best.most.DET", 0.0), ("best.p_values.by_token", 0.3), ("best.largest_share", 0.5)],
)
def test_the_groups_are_read_at_the_layer_that_their_table_shows(tmp_path, key, value):
    groups_result(tmp_path)
    source = {"result": "groups/{model}/{corpus}/*/seed{seed}.json", "key": key, "seeds": "first"}
    claim = verdict(tmp_path, BOUND | {"source": source}, seeds=(0, 1, 2))
    assert claim["cases"][0]["seeds"]["0"]["measured"][0]["value"] == value


def rows_of(root, *tables, change=None) -> Evidence:
    """The rows of some tables, the training of gpt2-mini's collapse-softmax changed."""
    settings = SETTINGS.model_copy(update={"tables": {name: SETTINGS.tables[name] for name in tables}})
    write_results(root, settings)
    if change:
        path = root / "training/gpt2-mini/austen/collapse-softmax/seed0/result.json"
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"metrics": result["metrics"] | change}))
    return evidence.gather(settings, root, partial=False)


@pytest.mark.parametrize(
    ("change", "horizon", "expected"),
    [
        ({"collapse_step": 40}, 600, "reproduced"),
        ({"collapse_step": None}, 600, "undecided"),
        ({"collapse_step": None}, None, "contradicted"),
        ({"collapse_step": None, "steps": 800}, 600, "contradicted"),
    ],
)
def test_a_short_training_can_confirm_a_collapse_but_not_refute_it(tmp_path, change, horizon, expected):
    claim = decide(Claim(**ROW | {"horizon": horizon}), rows_of(tmp_path, "table8", change=change))
    assert claim["verdict"] == expected
    case = next(case for case in claim["cases"] if case["model"] == "gpt2-mini")
    steps = SETTINGS.methods["collapse-softmax"].training.phases[0].steps
    assert case["reason"] == (f"trained for {steps} of 600 steps" if expected == "undecided" else "")
    assert case["results"] == ["training/gpt2-mini/austen/collapse-softmax/seed0/result.json"]


@pytest.mark.parametrize(
    ("metric", "change", "margin", "expected"),
    [
        ("dominance", {"dominance": 0.8}, 2.0, "reproduced"),
        ("dominance", {"dominance": 0.41}, 2.0, "undecided"),
        ("dominance", {"dominance": 0.2}, 2.0, "contradicted"),
        ("stability", {"stability": 0.95}, 0.02, "reproduced"),
    ],
)
def test_dominance_and_stability_differ_by_more_than_a_margin(tmp_path, metric, change, margin, expected):
    """All other trainings find 40 % in the largest group, and 0.9 of the tokens where they were."""
    ordering = {"kind": "ordering", "limit": None, "relation": "above", "tolerance": 2.0, "margin": margin}
    claim = Claim(**ROW | ordering | {"metric": metric, "reference": "collapse-sinkhorn/soft"})
    assert decide(claim, rows_of(tmp_path, "table8", change=change))["verdict"] == expected


def test_a_training_without_a_probe_tells_no_dominance(tmp_path):
    known = rows_of(tmp_path, "headline")
    claim = decide(Claim(**ROW | {"metric": "dominance", "subject": "focus/soft"}), known)
    assert claim["verdict"] == "not run"
    assert "no probe looked at the groups in training" in claim["cases"][0]["reason"]
    held_out = Claim(**ROW | {"metric": "held_out_dominance", "subject": "focus/soft", "limit": 30.0})
    assert decide(held_out, known)["verdict"] == "reproduced"


def test_written_answers_are_paired_by_item(tmp_path):
    known = rows_of(tmp_path, "gsm8k")
    change = {"metric": "gsm8k", "subject": "focus/hard-k2", "reference": "pretrained/full", "limit": -60.0}
    claim = Claim(**ROW | change)
    assert decide(claim, known)["verdict"] == "undecided"
    cell = ("smollm2-135m-instruct", "austen", "focus", "hard-k2", 0)
    write_answers(tmp_path, known.experiment, cell, [0, 0])
    measured = decide(claim, evidence.gather(known.experiment, tmp_path, partial=False))["cases"][0]["seeds"]["0"]
    assert measured["measured"][0]["value"] == -50
    write_answers(tmp_path, known.experiment, cell, None)
    case = decide(claim, evidence.gather(known.experiment, tmp_path, partial=False))["cases"][0]
    assert (case["verdict"], case["reason"]) == (
        "not run",
        "cannot generate for focus/hard-k2 on smollm2-135m-instruct",
    )


def test_a_claim_can_be_about_some_tasks_models_and_texts(tmp_path):
    known = rows_of(tmp_path, "table2", "domains")
    tasks = {"metric": "scored_beyond_window", "tasks": ["piqa"], "subject": "pretrained/full", "limit": 3.0}
    claim = decide(Claim(**ROW | tasks | {"only_models": ["gpt2-mini"]}), known)
    assert [case["model"] for case in claim["cases"]] == ["gpt2-mini"]
    assert [each["name"] for each in claim["cases"][0]["seeds"]["0"]["measured"]] == ["piqa"]
    perplexity = {"kind": "ordering", "limit": None, "relation": "below", "metric": "perplexity"}
    perplexity |= {"subject": "focus-k8-finetuned/soft", "reference": "full-finetuning/full"}
    claim = decide(Claim(**ROW | perplexity | {"only_corpora": ["wikipedia"]}), known)
    assert [(case["model"], case["corpus"]) for case in claim["cases"]] == [("gpt2-mini", "wikipedia")]
    claim = decide(Claim(**ROW | perplexity | {"only_models": ["llama2-70b"]}), known)
    assert claim["cases"][0]["reason"] == "this scale covers no llama2-70b"


@pytest.mark.parametrize(
    ("function", "arguments", "printed", "expected"),
    [
        ("lora_on_attention_input", {"model": "gpt2-124m", "rank": 4}, "table3.lora_r4.parameters", "within tolerance"),
        (
            "centroid_parameters",
            {"model": "gpt2-124m", "groups": 4, "routing_dim": 16},
            "table1.focus.parameters",
            "contradicted",
        ),
        ("groups_over_memberships", {"groups": 4, "top_k": 2}, "table7.gpt2_124m.k2.speedup", "reproduced"),
    ],
)
def test_arithmetic_is_judged_everywhere(tmp_path, function, arguments, printed, expected):
    settings = {key: value for key, value in BOUND.items() if key not in ("limit", "relation")}
    settings |= {"kind": "value", "printed": [printed], "tolerance": 1.5}
    claim = verdict(tmp_path, settings | {"source": {"function": function, "arguments": arguments}})
    assert claim["verdict"] == expected
    assert claim["metric"] == "arithmetic"


def test_what_is_out_of_reach_is_not_run(tmp_path):
    claim = verdict(tmp_path, BOUND | {"out_of_reach": "the code was not released"})
    assert (claim["verdict"], claim["cases"][0]["reason"]) == ("not run", "the code was not released")
