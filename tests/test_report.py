import gzip
import json
import re
import shutil
from base64 import b64decode
from collections import Counter
from html.parser import HTMLParser

import pytest
from paper_results import REPOSITORY, experiment

from focus.errors import UserError
from focus.paper import report, report_claims, report_exhibits
from focus.paper.report_exhibits import natural

REFERENCE = REPOSITORY / "results/reference/laptop"
CLAIM = {
    "id": "T1.x",
    "place": "Table 1",
    "statement": "A is below B.",
    "origin": "paper",
    "printed": {"table1.focus.perplexity": 36.2},
    "kind": "ordering",
    "metric": "perplexity",
    "subject": "focus/soft",
    "relation": "below",
    "reference": "pretrained/full",
    "tolerance": 2.0,
    "reason": "two standard errors",
    "verdict": "reproduced",
    "cases": [],
}


class Found(HTMLParser):
    """Attributes of every element by tag, and the text of those with an id."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def of(self, tag: str, name: str) -> list[dict]:
        return [found for each, found in self.elements if each == tag and name in found]


def packed(page: str, name: str):
    """What a page holds packed under a name."""
    return json.loads(gzip.decompress(b64decode(re.search(rf'<script id="{name}"[^>]*>(.*?)</script>', page).group(1))))


def unfolded(path) -> str:
    """A page as the browser makes it: what is folded away in its place."""
    page = path.read_text()
    parts = packed(page, "folded")
    whole = re.sub(r'<div data-folded="(\d+)"></div>', lambda place: parts[int(place[1])], page)
    assert "data-folded" not in whole.partition("<dialog")[0]
    return whole


def case(model="m", verdict="reproduced", seeds=((0, -1.0, 0.2),), **changes) -> dict:
    found = {
        str(seed): {"verdict": verdict, "measured": [{"name": "", "value": value, "error": error, "verdict": verdict}]}
        for seed, value, error in seeds
    }
    return {"model": model, "corpus": "c", "verdict": verdict, "reason": "", "seeds": found, "results": []} | changes


def written(folder, *claims, prefix="report", **options) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "claims.json").write_text(json.dumps({"scale": "tiny", "claims": claims}))
    report.write(folder, folder / prefix, **options)
    return unfolded(folder / f"{prefix}.html")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("page") / "report"
    report.write(REFERENCE, prefix, experiment=experiment(), captions=REPOSITORY / "workflow/report")
    return unfolded(prefix.with_suffix(".html"))


@pytest.fixture(scope="module")
def provenance(page):
    return packed(page, "provenance")


def test_counts_and_verdicts_are_those_of_the_claims(page):
    claims = json.loads((REFERENCE / "claims.json").read_text())["claims"]
    expected = {claim["id"]: claim["verdict"].split(" over ")[0] for claim in claims}
    cards = {each["id"].removeprefix("claim-"): each["data-verdict"] for each in Found(page).of("article", "id")}
    assert cards == expected
    papers = Counter(expected[claim["id"]] for claim in claims if claim["origin"] == "paper")
    counted = re.findall(r'data-filter="([^"]+)".*?<span class="count">(\d+)</span>', page)
    assert {verdict: int(count) for verdict, count in counted} == papers
    lead = re.search(r'<p class="lead">(.*?)</p>', page, re.DOTALL).group(1)
    assert [int(count) for count in re.findall(r"<strong>(\d+)</strong>", lead)] == [int(count) for _, count in counted]


def test_contradictions_stand_on_top_with_their_numbers(page):
    top = page.partition('id="questions"')[0]
    for claim in json.loads((REFERENCE / "claims.json").read_text())["claims"]:
        assert (f'href="#claim-{claim["id"]}"' in top) == (
            claim["origin"] == "paper" and claim["verdict"] in ("contradicted", "reproduced", "within tolerance")
        )


def test_every_source_is_a_result_file_and_every_result_of_a_claim_a_source(page, provenance):
    paths = [result["path"] for result in provenance["results"]]
    assert len(paths) == len(set(paths)) > 0
    for result in provenance["results"]:
        file = json.loads((REFERENCE / result["path"]).read_text())
        assert result["provenance"]["code"] == file["provenance"]["code"]
        shared = result["settings"].get("settings")
        assert shared is None or provenance["shared"][shared["$"]] == file["settings"]["settings"]
    for element in [each for tag in ("td", "button") for each in Found(page).of(tag, "data-r")]:
        assert element["data-r"] == "" or max(map(int, element["data-r"].split())) < len(paths)
    for claim in json.loads((REFERENCE / "claims.json").read_text())["claims"]:
        assert {path for each in claim["cases"] for path in each["results"]} <= set(paths)


def test_full_precision_of_a_tables_number_is_in_the_result_it_leads_to(page, provenance):
    checked = 0
    for cell in Found(page).of("td", "data-v"):
        places = cell["data-r"].split()
        metrics = json.loads((REFERENCE / provenance["results"][int(places[0])]["path"]).read_text())["metrics"]
        if len(places) == 1 and cell["data-v"] == repr(metrics.get("perplexity")):
            checked += 1
    assert checked >= 10


def test_the_page_needs_nothing_else_and_stays_small(page):
    assert not re.search(r"https?://", page)
    assert not [each for tag in ("script", "img", "link") for each in Found(page).of(tag, "href")]
    assert all(each["src"].startswith("data:") for each in Found(page).of("img", "src"))
    ids = [found["id"] for _, found in Found(page).elements if "id" in found]
    assert len(ids) == len(set(ids))
    assert {each["href"][1:] for each in Found(page).of("a", "href") if each["href"].startswith("#")} <= set(ids)


def test_the_reference_page_leaves_room_for_more(tmp_path):
    report.write(REFERENCE, tmp_path / "report", experiment=experiment(), captions=REPOSITORY / "workflow/report")
    assert (tmp_path / "report.html").stat().st_size <= report.LARGEST


def test_the_same_results_give_the_same_bytes(tmp_path):
    for folder in ("claims.json", "tables", "figures", "models", "perplexity"):
        source = REFERENCE / folder
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / folder)
    for path in (tmp_path / "tables").glob("table[267]*"):
        path.unlink()
    for prefix in ("one", "two"):
        report.write(tmp_path, tmp_path / prefix)
    for suffix in (".html", ".md", ".tex"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_text_of_a_claim_is_never_markup(tmp_path):
    evil = "</script><script>alert(1)</script> a & b | 50 % of $x_1$ `code <b>`"
    results = {"model": evil, "results": ["perplexity/x.json"]}
    (tmp_path / "perplexity").mkdir()
    result = {"result_version": 1, "experiment": evil, "settings": {"method": evil}, "metrics": {}, "provenance": {}}
    (tmp_path / "perplexity/x.json").write_text(json.dumps(result))
    page = written(tmp_path, CLAIM | {"statement": evil, "reason": evil, "cases": [case(**results)]})
    assert "alert(1)" in page
    assert page.count("<script") == 3  # sources, folded parts and the script
    assert "<code>code &lt;b&gt;</code>" in page
    assert r"a & b \| 50 %" in (tmp_path / "report.md").read_text()
    assert r"a \& b | 50 \% of \$x\_1\$" in (tmp_path / "report.tex").read_text()


def test_latex_is_balanced_and_counts(tmp_path):
    written(tmp_path, CLAIM, CLAIM | {"id": "T1.y", "origin": "ours", "verdict": "contradicted"})
    text = (tmp_path / "report.tex").read_text()
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")
    assert re.findall(r"\\begin{(\w+)}", text) == re.findall(r"\\end{(\w+)}", text) == ["longtable", "longtable"]
    assert r"\newcommand{\FocusReproduced}{1}" in text
    assert "does not hold" in text


def test_several_seeds_show_mean_and_range_and_every_number(tmp_path):
    page = written(tmp_path, CLAIM | {"cases": [case(seeds=((0, -1.0, 0.2), (1, -2.0, 0.2), (2, -6.0, 0.2)))]})
    assert "-3.0 ± 1.5 % (3 seeds: -6.0 % to -1.0 %)" in page
    assert all(f"<td>{seed}</td>" in page for seed in range(3))


def test_hundreds_of_claims_leave_room_for_tables_and_figures(tmp_path):
    rule = "perplexity of `focus/soft` below `pretrained/full` by more than 2 standard errors " * 2
    claims = [CLAIM | {"id": f"x{number}", "rule": rule, "cases": [case("a"), case("b")]} for number in range(360)]
    assert len(written(tmp_path, *claims).encode()) < 700_000


@pytest.mark.parametrize(
    ("changes", "value", "error", "text"),
    [
        ({}, 20.123, 1.07, "+20.1 ± 1.1 %"),
        ({}, 1e-6, 1e-6, "0 ± less than 0.0001 %"),
        ({"metric": "accuracy"}, -12.5, 5.8, "-12.5 ± 5.8 points"),
        ({"metric": "far_pairs_kept", "reference": None}, 83.3312, 0.0, "83.33 %"),
        ({"metric": "trained_parameters", "reference": None}, 278400.0, 0.0, "278,400"),
        ({"metric": "speedup", "reference": None}, 3.1449, 0.0, "3.145"),
        ({"metric": "nats", "reference": None}, 0.6931, 0.002, "0.6931 ± 0.0020"),
        ({"metric": "nats", "reference": None, "unit": " nats"}, 0.4, 0.0, "0.4000 nats"),
    ],
)
def test_numbers_show_as_much_as_their_error_allows(changes, value, error, text):
    assert report_claims.number(CLAIM | changes, {"value": value, "error": error})["text"] == text


def test_of_several_tasks_the_one_that_fails_is_shown(tmp_path):
    measured = [
        {"name": "piqa", "value": 0.0, "error": 1.0, "verdict": "within tolerance"},
        {"name": "lambada", "value": -24.8, "error": 2.0, "verdict": "contradicted"},
    ]
    seeds = {"0": {"verdict": "contradicted", "measured": measured}}
    page = written(tmp_path, CLAIM | {"metric": "accuracy", "cases": [case() | {"seeds": seeds}]})
    assert "LAMBADA: -24.8 ± 2.0 points" in page


def test_unknown_metrics_kinds_verdicts_and_keys_are_shown_as_they_are(tmp_path):
    odd = {"metric": "leaked_nats", "kind": "floor", "verdict": "beyond doubt", "novel": [1], "reference": None}
    page = written(tmp_path, CLAIM | odd | {"cases": [case(verdict="beyond doubt")]})
    assert "beyond doubt" in page
    assert "leaked nats" in page


def test_a_question_lists_its_claims_with_verdict_and_number_and_counts_them(tmp_path):
    ours = CLAIM | {"id": "C.y", "origin": "ours", "verdict": "contradicted", "cases": [case(verdict="contradicted")]}
    known = [CLAIM | {"cases": [case()], "same_as": "T1.x"}, ours | {"same_as": "T1.x"}, ours | {"id": "C.z"}]
    asked = [{"id": "4.1", "asks": "Does it hold?", "claims": ["T1.x", "C.y", "C.z"]}]
    (tmp_path / "claims.json").write_text(json.dumps({"scale": "tiny", "questions": asked, "claims": known}))
    report.write(tmp_path, tmp_path / "report")
    page = unfolded(tmp_path / "report.html")
    section = page.partition('<section id="questions"')[2].partition("</section>")[0]
    assert "1 reproduced, 2 do not hold" in section
    for claim in known:
        assert section.count(f'href="#claim-{claim["id"]}"') == 1
    assert section.count("-1.00 ± 0.20 %") == 3
    assert 'The same numbers decide <a href="#claim-T1.x">T1.x</a>' in page
    assert "1 of them have numbers, which are 1 different measurements." in page
    text = (tmp_path / "report.md").read_text()
    assert "- Does it hold? 1 reproduced, 2 do not hold:" in text
    assert "  - does not hold: A is below B. -1.00 ± 0.20 % (C.y)" in text


def test_a_partial_run_shows_what_it_has(tmp_path):
    shutil.copytree(REFERENCE / "tables", tmp_path / "tables")
    report.write(tmp_path, tmp_path / "report")
    page = unfolded(tmp_path / "report.html")
    assert "No verdicts yet" in page
    assert 'id="table-table1"' in page
    only = written(tmp_path / "claims", CLAIM | {"verdict": "not run", "cases": [case(seeds=(), reason="needs a GPU")]})
    assert "needs a GPU" in only.partition('id="not-run"')[2]


def test_nothing_to_show_and_broken_claims_are_one_line(tmp_path):
    with pytest.raises(UserError, match="expected a folder to write the page to, found none"):
        report.write(tmp_path, tmp_path / "nowhere/report")
    with pytest.raises(UserError, match=r"expected claims\.json, tables or figures of a run, found none"):
        report.write(tmp_path, tmp_path / "report")
    (tmp_path / "claims.json").write_text('{"scale": "x"}')
    with pytest.raises(UserError, match=r"claims\.json: expected the verdicts of focus claims"):
        report.write(tmp_path, tmp_path / "report")


def test_commands_name_targets_results_and_config_files():
    assert report.command(["table1"], "laptop", ()) == "snakemake --cores all table1"
    assert report.command(["a/b c.json"], "x", ("config/x.yaml",)) == (
        "snakemake --cores all 'results/x/a/b c.json' --configfile config/x.yaml"
    )


def test_a_claims_command_is_the_table_that_holds_its_results():
    tables = {"table1": {"a", "b"}, "table7": {"a", "b", "c"}, "headline": {"a"}}
    assert report_claims.target("Tables 2 and 7", ["a", "b"], tables) == ["table7"]
    assert report_claims.target("abstract", ["a"], tables) == ["headline"]
    assert report_claims.target("Table 1", ["a", "z"], tables) == ["a", "z"]


def test_pictures_shrink_until_they_fit():
    figures = [report_exhibits.Figure(REFERENCE / "figures/headline.png", "x", "x", "", False)]
    report_exhibits.draw(figures, 10**6)
    whole = len(figures[0].uri)
    report_exhibits.draw(figures, whole // 2)
    assert 1000 < len(figures[0].uri) <= whole // 2


@pytest.mark.parametrize(
    ("text", "header", "expected"),
    [
        ("40.36 ± 3.13", "Perplexity", ("40.3643", ["b"])),
        ("40.0", "Perplexity", ("40.0", ["a", "b"])),
        ("25.0 %", "Far pairs kept", ("0.25", ["a"])),
        ("25.0 %", "Pairs kept", None),
        ("7", "Perplexity", None),
    ],
)
def test_a_tables_number_leads_to_the_only_line_that_rounds_to_it(text, header, expected):
    lines = [("perplexity", "0", "39.6357", "a"), ("perplexity", "1", "40.3643", "b")]
    lines += [("far_pairs_kept", "0", "0.25", "a"), ("near_pairs_kept", "0", "0.2501", "a")]
    pairs = [({"metric": metric, "seed": seed, "value": value}, path) for metric, seed, value, path in lines]
    assert report_exhibits.matching(text, header, pairs) == expected


def test_the_papers_tables_come_first_in_order():
    names = ["training", "table10", "headline", "table2", "table7speed", "figure1", "table7", "domains"]
    assert sorted(names, key=natural) == [
        *("figure1", "table2", "table7", "table7speed", "table10", "domains", "headline", "training")
    ]


def test_templates_are_installed_with_the_package():
    assert '"paper/templates/*"' in (REPOSITORY / "pyproject.toml").read_text()
