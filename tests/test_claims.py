import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from paper_results import REPOSITORY, experiment, write_results, write_speed

from focus.errors import UserError
from focus.paper import claims
from focus.paper import verdicts as verdicts_of
from focus.paper.claim import Claim, questions

CLAIMS = REPOSITORY / "config/claims.yaml"
ORDERING = {
    "id": "x",
    "place": "Table 1",
    "statement": "A is below B.",
    "kind": "ordering",
    "metric": "perplexity",
    "subject": "focus/soft",
    "relation": "below",
    "reference": "pretrained/full",
    "tolerance": 2.0,
    "reason": "two standard errors",
}
BOUND = ORDERING | {"kind": "bound", "relation": "at_most", "limit": 50.0, "reference": None, "metric": "pairs_kept"}
IDENTITY = ORDERING | {"kind": "identity", "relation": None, "tolerance": 0.1}
VALUE = ORDERING | {
    "kind": "value",
    "relation": None,
    "reference": None,
    "printed": ["table1.focus.perplexity"],
    "models": ["gpt2-124m"],
    "corpora": ["pg19"],
    "tolerance": 5.0,
}
FASTER = VALUE | {"metric": "speedup", "subject": "forward/K4", "printed": ["table6.k4.65536"]}
TIMED = BOUND | {"metric": "speedup", "subject": "forward/all"}


def verdicts(root, settings, **options) -> dict[str, dict]:
    claims.write(CLAIMS, settings, root, root / "claims.json", root / "claims.md", **options)
    return {claim["id"]: claim for claim in json.loads((root / "claims.json").read_text())["claims"]}


@pytest.mark.parametrize(
    ("settings", "value", "error", "verdict"),
    [
        (ORDERING, -1.0, 0.4, "reproduced"),
        (ORDERING, -1.0, 0.6, "undecided"),
        (ORDERING, 1.0, 0.6, "undecided"),
        (ORDERING, 1.0, 0.4, "contradicted"),
        (ORDERING, 0.0, 0.0, "contradicted"),
        (ORDERING | {"relation": "above"}, 1.0, 0.4, "reproduced"),
        (BOUND, 49.0, 0.0, "reproduced"),
        (BOUND, 51.0, 0.0, "within tolerance"),
        (BOUND, 83.0, 0.0, "contradicted"),
        (BOUND, 53.0, 1.0, "undecided"),
        (BOUND, 49.0, 3.0, "undecided"),
        (BOUND | {"relation": "at_least"}, 83.0, 0.0, "reproduced"),
        (IDENTITY, 0.0, 0.0, "reproduced"),
        (IDENTITY, -0.05, 0.0, "within tolerance"),
        (IDENTITY, 0.3, 0.2, "undecided"),
        (IDENTITY, -0.3, 0.05, "contradicted"),
        (VALUE, 36.24, 0.0, "reproduced"),
        (VALUE, 37.5, 0.0, "within tolerance"),
        (VALUE, 38.5, 0.5, "undecided"),
        (VALUE, 42.8, 0.5, "contradicted"),
        (FASTER, 3.04, 0.0, "reproduced"),
        (FASTER, 2.94, 0.0, "within tolerance"),
        (FASTER, 2.55, 0.0, "contradicted"),
        (FASTER | {"tolerance": 1.0}, 3.04, 0.0, "contradicted"),
        (VALUE | {"printed": ["longcontext.t8192.full.perplexity"]}, 6.104, 0.0, "reproduced"),
        (VALUE | {"printed": ["longcontext.t8192.full.perplexity"]}, 6.13, 0.0, "within tolerance"),
        (VALUE | {"printed": ["table7.gpt2_124m.k1.pairs_kept"]}, 26.4, 0.0, "reproduced"),
    ],
)
def test_verdicts(settings, value, error, verdict):
    assert verdicts_of.judge(Claim(**settings), value, error) == verdict


def test_an_identity_over_several_tasks_allows_for_one_that_moves_by_chance():
    claim = Claim(**IDENTITY | {"tolerance": 0.3})
    assert [verdicts_of.judge(claim, 12.5, 5.8, of=of) for of in (1, 4)] == ["contradicted", "undecided"]
    assert verdicts_of.judge(claim, 20.0, 5.8, of=4) == "contradicted"


@given(value=st.floats(-100, 100), error=st.floats(0, 10))
def test_an_ordering_and_its_opposite_never_both_hold(value, error):
    found = {verdicts_of.judge(Claim(**ORDERING | {"relation": name}), value, error) for name in ("below", "above")}
    assert found in ({"reproduced", "contradicted"}, {"undecided"}, {"contradicted"})


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (["reproduced", "reproduced"], "reproduced"),
        (["reproduced", "within tolerance"], "within tolerance"),
        (["reproduced", "undecided"], "mixed over seeds"),
        (["within tolerance", "contradicted"], "mixed over seeds"),
        ([], ""),
    ],
)
def test_seeds_must_agree(found, verdict):
    assert verdicts_of.agreed(found, "seeds") == verdict


def test_verdicts_follow_the_results(tmp_path):
    settings = experiment()
    shifts = {"focus-paper/soft": -0.1, "focus-paper/hard-k1": 0.8, "focus-paper/hard-k2": 0.1}
    write_results(tmp_path, settings, shifts)
    found = verdicts(tmp_path, settings)
    expected = {
        "T1.improves": "reproduced",
        "T7.k1-ruins": "reproduced",
        "T7.k2-improves": "contradicted",
        "T7.k3-exact": "reproduced",
        "T7.k4-differs": "contradicted",
        "T7.k2-speedup": "contradicted",
        "T1.benchmarks-unchanged": "undecided",
        "T2.worst-change": "undecided",
        "T1.perplexity": "not comparable",
        "T2.llama2-70b": "not run",
    }
    assert {name: found[name]["verdict"] for name in expected} == expected
    write_results(tmp_path, settings, shifts | {"focus-paper/soft": 0.1}, lost=7)
    found = verdicts(tmp_path, settings)
    assert found["T1.improves"]["verdict"] == "contradicted"
    assert found["T1.benchmarks-unchanged"]["verdict"] == "contradicted"
    assert found["T1.finetuning-degrades"]["verdict"] == "reproduced"


def test_seeds_and_models_that_disagree_are_mixed(tmp_path):
    settings = experiment(seeds=[0, 1])
    write_results(tmp_path, settings, {"focus-paper/soft/0": -0.1, "focus-paper/soft/1": 0.1})
    claim = verdicts(tmp_path, settings)["T1.improves"]
    assert claim["verdict"] == "mixed over seeds"
    seeds = claim["cases"][0]["seeds"]
    assert [seeds[seed]["verdict"] for seed in ("0", "1")] == ["reproduced", "contradicted"]
    write_results(tmp_path, settings, {"focus-paper/soft": -0.1})
    other = experiment(models=["gpt2-mini"], seeds=[0, 1])
    write_results(tmp_path, other, {"focus-paper/soft": 0.1})
    assert verdicts(tmp_path, settings)["T1.improves"]["verdict"] == "mixed over models"


def test_what_is_absent_is_not_run_and_says_why(tmp_path):
    settings = experiment()
    quality = settings.figures["quality"]
    rows = [row for row in quality.rows if row.top_k not in (3, 4)]
    figures, tables = {"quality": quality.model_copy(update={"rows": rows})}, {"table1": settings.tables["table1"]}
    settings = settings.model_copy(update={"figures": figures, "tables": tables})
    write_results(tmp_path, settings)
    claim = verdicts(tmp_path, settings)["T7.k3-exact"]
    assert claim["verdict"] == "not run"
    assert claim["cases"][0]["reason"] == "this scale has no row focus-paper/hard-k3 on smollm2-135m-instruct"
    (tmp_path / "perplexity/gpt2-mini/austen/focus/soft/seed0.json").unlink()
    with pytest.raises(UserError, match=r"focus/soft/seed0.json: expected the result"):
        verdicts(tmp_path, settings)
    cases = verdicts(tmp_path, settings, partial=True)["C.improves"]["cases"]
    assert {case["model"]: case["verdict"] for case in cases}["gpt2-mini"] == "not run"


def test_a_value_is_judged_where_it_was_printed(tmp_path):
    settings = experiment()
    paper = settings.model_settings["gpt2-mini"]
    settings = settings.model_copy(
        update={
            "models": ["gpt2-124m"],
            "model_settings": {"gpt2-124m": paper},
            "tables": {"table1": settings.tables["table1"].model_copy(update={"corpus": "pg19"})},
            "figures": {},
        }
    )
    write_results(tmp_path, settings, {"focus-paper/soft": 0.6})
    claim = verdicts(tmp_path, settings)["T1.perplexity"]
    assert claim["verdict"] == "within tolerance"
    assert verdicts(tmp_path, settings)["T1.parameters"]["verdict"] == "contradicted"


def test_claims_about_speed_must_hold_in_every_case_timed(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    found = verdicts(tmp_path, settings)
    expected = {
        "T6.faster": "reproduced",
        "T6.slower": "reproduced",
        "T6.exact": "reproduced",
        "T6.k8-64k": "not comparable",
        "T6.k8-1m": "not run",
        "T7.k1-measured": "within tolerance",
        "T7.k2-measured": "contradicted",
        "T7.k4-measured": "within tolerance",
    }
    assert {name: found[name]["verdict"] for name in expected} == expected
    assert "| T6.k8-64k" in (tmp_path / "claims.md").read_text()
    assert "K=8, 64K, 1 thread: 8.00" in (tmp_path / "claims.md").read_text()
    assert found["T6.k8-1m"]["cases"][0]["reason"] == "this scale does not time forward/K8 at 1M tokens"
    write_speed(tmp_path, settings, faster=0.4)
    assert verdicts(tmp_path, settings)["T6.faster"]["verdict"] == "contradicted"


def test_without_a_timing_claims_about_speed_are_not_run(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    (tmp_path / "speed/attention.json").unlink()
    with pytest.raises(UserError, match=r"speed/attention.json: expected a result file, found none"):
        verdicts(tmp_path, settings)
    for found in (verdicts(tmp_path, settings, partial=True), verdicts(tmp_path, experiment(speed=None))):
        assert found["T6.faster"]["verdict"] == "not run"


def test_the_page_shows_statement_number_and_rule(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings, {"focus/soft": -0.1})
    verdicts(tmp_path, settings)
    page = (tmp_path / "claims.md").read_text()
    assert "36.2 against 42.8" in page
    assert "by more than 2 standard errors (two standard errors of the paired differences" in page
    control = next(line for line in page.splitlines() if line.startswith("| C.improves"))
    assert "holds" in control
    task = next(line for line in page.splitlines() if line.startswith("| T1.benchmarks-unchanged"))
    assert "+0.0 ± 10.0 points (n=10, 3 % of positions beyond the window)" in task
    assert "-9.5" in control


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verdict": "reproduced"}, r"claims.x.verdict: there is no such key"),
        ({"kind": "guess"}, r"claims.x.kind: expected value"),
        ({"metric": "speedup"}, r"claims.x.kind: expected bound or value for metric speedup, got ordering"),
        ({"shortest": 1024}, r"claims.x: shortest and longest belong to speedup and cosine, got perplexity"),
        ({"relation": "at_most"}, r"claims.x.relation: expected one of"),
        ({"reference": None}, r"claims.x.reference: expected method/variant"),
        ({"limit": 1.0}, r"claims.x: limit belongs to kind bound"),
        ({"metric": "pairs_kept"}, r"claims.x.reference: expected none for metric pairs_kept"),
        ({"margin": 1.0, "kind": "identity", "relation": None}, r"claims.x: margin belongs to kind ordering"),
        ({"horizon": 600}, r"claims.x: horizon belongs to metric collapse"),
        ({"tasks": ["piqa"]}, r"claims.x: tasks belong to accuracy and scored_beyond_window, got perplexity"),
        ({"source": {"result": "a.json", "key": "b"}}, r"claims.x.source: expected one of metric source"),
        ({"against": {"result": "a.json", "key": "b"}}, r"claims.x: against belongs to metric source"),
        ({"percent": True}, r"claims.x: percent and paired: expected one of them at most, and against beside it"),
        ({"subject": None}, r"claims.x.subject: expected method/variant, or a source instead, got None"),
        ({"metric": None, "subject": None}, r"claims.x.metric: expected perplexity"),
        ({"printed": ["table1.focus.nothing"]}, r"expected a printed number, got table1.focus.nothing"),
    ],
)
def test_bad_claims_are_refused_in_one_line(tmp_path, change, message):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [ORDERING | change]}))
    with pytest.raises(UserError, match=message) as error:
        claims.load(path)
    assert "\n" not in str(error.value)


def test_an_entry_stands_for_one_claim_each(tmp_path):
    path = tmp_path / "claims.yaml"
    each = {"a": {"name": "Everything"}, "b": {"relation": "above"}}
    path.write_text(yaml.safe_dump({"claims": [ORDERING | {"id": "T.", "statement": "{name} holds.", "each": each}]}))
    found = [(claim.id, claim.statement, claim.relation) for claim in claims.load(path)]
    assert found == [("T.a", "Everything holds.", "below"), ("T.b", "b holds.", "above")]
    each["b"]["kind"] = "guess"
    path.write_text(yaml.safe_dump({"claims": [ORDERING | {"id": "T.", "each": each}]}))
    with pytest.raises(UserError, match=r"claims.T.b.kind: expected value"):
        claims.load(path)


def test_the_page_begins_with_the_counts_and_has_a_section_for_each_place(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    found = verdicts(tmp_path, settings)
    page = (tmp_path / "claims.md").read_text()
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    places = list(dict.fromkeys(claim["place"] for claim in found.values() if claim["origin"] == "paper"))
    assert headings == ["Verdicts", *places, "Controls that the paper lacks", "How each is decided"]
    strip = next(line for line in page.splitlines() if line.startswith("| Table 7 "))
    counts = [int(cell.strip().replace("-", "0")) for cell in strip.strip("| ").split("|")[1:]]
    assert counts[0] == sum(counts[1:]) == sum(claim["place"] == "Table 7" for claim in found.values())
    once = next(line for line in page.splitlines() if line.startswith("| T7.counted-once"))
    assert " 16.67 % of pairs " in once
    assert found["T7.counted-once"]["unit"] == " % of pairs"


def test_a_claim_file_without_claims_or_with_one_twice_is_refused(tmp_path):
    path = tmp_path / "claims.yaml"
    for text in ("", "nothing: 1", "claims:", "claims: 1", "- claims"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"expected a list under the key claims, got none$"):
            claims.load(path)
    path.write_text(yaml.safe_dump({"claims": [ORDERING, ORDERING]}))
    with pytest.raises(UserError, match="expected every id once, got x twice"):
        claims.load(path)


def test_claims_that_rest_on_the_same_numbers_name_the_first(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    same = {"again": {}, "stricter": {"tolerance": 9.0}, "other": {"reference": "window-sinks/full"}}
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [ORDERING, ORDERING | {"id": "", "each": same}]}))
    claims.write(path, settings, tmp_path, tmp_path / "claims.json", tmp_path / "claims.md")
    found = {claim["id"]: claim["same_as"] for claim in json.loads((tmp_path / "claims.json").read_text())["claims"]}
    assert found == {"x": "x", "again": "x", "stricter": "x", "other": "other"}
    assert "4 of them have numbers, which are 2 different measurements." in (tmp_path / "claims.md").read_text()


def test_what_has_no_numbers_shares_none(tmp_path):
    settings = experiment()
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [ORDERING, ORDERING | {"id": "y"}]}))
    claims.write(path, settings, tmp_path, tmp_path / "claims.json", tmp_path / "claims.md", partial=True)
    assert {claim["same_as"] for claim in json.loads((tmp_path / "claims.json").read_text())["claims"]} == {""}


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"id": "4.1", "asks": "Why?", "claims": ["x", "z"]}, r"questions.4.1: expected the ids of claims, got z"),
        ({"id": "4.1", "asks": "Why?", "claims": []}, "questions: "),
        ({"id": "4.1", "asks": "Why?"}, "questions: "),
    ],
)
def test_a_question_names_claims(tmp_path, question, message):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [ORDERING], "questions": [question]}))
    with pytest.raises(UserError, match=message):
        questions(path, claims.load(path))
    path.write_text(yaml.safe_dump({"claims": [ORDERING], "questions": [question | {"claims": ["x"]}]}))
    assert [each.claims for each in questions(path, claims.load(path))] == [["x"]]
