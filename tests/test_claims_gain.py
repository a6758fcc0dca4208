"""Claims on parts of a gain and on leads: the shifts that the made-up results have, in percent."""

import math

import pytest
from paper_results import write_results
from test_gain import SHIFTS, settings

from focus.paper import evidence
from focus.paper.claim import Claim
from focus.paper.claims import decide

CLAIM = {
    "id": "x",
    "place": "our control",
    "statement": "x",
    "origin": "ours",
    "kind": "bound",
    "relation": "at_most",
    "limit": 50.0,
    "tolerance": 0.0,
    "reason": "half",
}


def decided(root, metric: str, subject: str, *, partial: bool = False, **changes) -> dict:
    known = evidence.gather(settings(), root, partial=partial)
    return decide(Claim(**CLAIM | {"metric": metric, "subject": subject} | changes), known)


def measured(claim: dict) -> dict:
    return claim["cases"][0]["seeds"]["0"]["measured"][0]


@pytest.mark.parametrize(
    ("metric", "subject", "value", "verdict"),
    [
        ("part_of_gain", "fixed/hard-k1", 40.0, "reproduced"),
        ("part_of_gain", "focus-untrained/hard-k1", 60.0, "contradicted"),
        ("part_of_gain", "far-scale/full", 25.0, "reproduced"),
        ("left_to_learning", "focus/hard-k1", 40.0, "reproduced"),
        ("left_to_learning", "focus/soft", 75.0, "contradicted"),
        ("lead_of_learned", "fixed-finetuned/hard-k1", 100 * math.expm1(0.03), "reproduced"),
        ("change_of_lead", "fixed-finetuned/hard-k1", 100 * math.expm1(-0.07), "reproduced"),
    ],
)
def test_the_numbers_are_those_of_the_shifts(tmp_path, metric, subject, value, verdict):
    write_results(tmp_path, settings(), SHIFTS)
    claim = decided(tmp_path, metric, subject)
    assert measured(claim)["value"] == pytest.approx(value)
    assert claim["verdict"] == verdict and claim["unit"] == " %"


def test_what_a_number_rests_on_is_named(tmp_path):
    write_results(tmp_path, settings(), SHIFTS)
    claim = decided(tmp_path, "left_to_learning", "focus/hard-k1")
    assert measured(claim)["name"].startswith("beside ") and measured(claim)["name"].endswith("hard k=1")
    rows = {path.split("/", 3)[3].removesuffix("/seed0.json") for path in claim["cases"][0]["results"]}
    assert rows == {"focus/hard-k1", "focus-untrained/hard-k1", "window-sinks/full"}
    change = decided(tmp_path, "change_of_lead", "fixed-finetuned/hard-k1")
    rows = {path.split("/", 3)[3].removesuffix("/seed0.json") for path in change["cases"][0]["results"]}
    assert rows == {f"{name}/hard-k1" for name in ("fixed", "fixed-finetuned", "focus-hard", "focus-hard-finetuned")}


def test_an_uncertain_change_is_undecided(tmp_path):
    write_results(tmp_path, settings(), SHIFTS | {"fixed-finetuned/hard-k1": 0.0}, uneven=5.0)
    claim = decided(tmp_path, "change_of_lead", "fixed-finetuned/hard-k1", limit=0.0)
    error = measured(claim)["error"]
    assert error > 0
    assert (claim["verdict"] == "undecided") == (abs(measured(claim)["value"]) < 2 * error)


@pytest.mark.parametrize("metric", ["part_of_gain", "left_to_learning"])
def test_without_a_gain_or_a_row_nothing_is_decided(tmp_path, metric):
    write_results(tmp_path, settings(), SHIFTS | {"focus/soft": 0.01})
    subject = "far-scale/full" if metric == "part_of_gain" else "focus/soft"
    claim = decided(tmp_path, metric, subject)
    assert claim["verdict"] == "not run" and claim["cases"][0]["reason"].startswith("no gain or lead")
    (tmp_path / f"perplexity/gpt2-mini/austen/{subject}/seed0.json").unlink()
    assert "no perplexity/" in decided(tmp_path, metric, subject, partial=True)["cases"][0]["reason"]
    assert "no row nothing/full" in decided(tmp_path, metric, "nothing/full", partial=True)["cases"][0]["reason"]


def test_the_best_control_is_not_told_from_some_of_them(tmp_path):
    write_results(tmp_path, settings(), SHIFTS)
    (tmp_path / "perplexity/gpt2-mini/austen/focus-untrained/hard-k1/seed0.json").unlink()
    assert decided(tmp_path, "left_to_learning", "focus/hard-k1", partial=True)["verdict"] == "not run"
