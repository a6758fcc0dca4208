"""The ledger is whole: every claim has what decides it, and everything that is measured or printed has a claim."""

import re

import pytest
from paper_results import REPOSITORY

from focus import scales
from focus.paper import claim_sources, printed, speed
from focus.paper.claim import load, questions

CLAIMS = load(REPOSITORY / "config/claims.yaml")
EXPERIMENT = scales.load([REPOSITORY / "config/config.yaml", REPOSITORY / "config/overnight.yaml"])
MANIFESTS = ("models", "corpora", "benchmarks", "taggers", "claims.json")
BY_ROWS = [claim for claim in CLAIMS if claim.subject and claim.metric not in speed.METRICS]
MEASURES = {"accuracy": "downstream", "scored_beyond_window": "downstream", "gsm8k": "generation"} | dict.fromkeys(
    ("dominance", "stability", "collapse"), "training"
)


def exhibits() -> dict:
    """Every table and figure of the overnight scale, which has all rows of the laptop's, by "tables/name"."""
    return {
        f"{kind}/{name}": each for kind in ("tables", "figures") for name, each in getattr(EXPERIMENT, kind).items()
    }


def cells(exhibit) -> set[tuple]:
    """(model, corpus, "method/variant") of each row."""
    return {
        (model, row.corpus or exhibit.corpus, f"{row.method}/{row.variant}")
        for model in exhibit.models or EXPERIMENT.models
        for row in exhibit.rows
    }


def test_the_overnight_scale_has_every_row_of_the_laptop_scale():
    laptop = scales.load([REPOSITORY / "config/config.yaml"])
    for kind in ("tables", "figures"):
        for name, exhibit in getattr(laptop, kind).items():
            assert cells(exhibit) <= cells(exhibits()[f"{kind}/{name}"])


def decided(claim, rows: set[tuple]) -> set[tuple]:
    """The (model, corpus) of `rows` on which both rows of a claim are, and which it is about."""
    return {
        (model, corpus)
        for model, corpus, name in rows
        if name == claim.subject
        and (claim.reference is None or (model, corpus, claim.reference) in rows)
        and (not claim.only_models or model in claim.only_models)
        and (not claim.only_corpora or corpus in claim.only_corpora)
    }


def outputs() -> list[str]:
    """The result files that the workflow's rules write, below a scale's folder, with their wildcards."""
    rules = "\n".join(path.read_text() for path in sorted((REPOSITORY / "workflow/rules").glob("*.smk")))
    named = dict(re.findall(r'^(\w+) = "<results>/([^"]+\.json)"', rules, re.MULTILINE))
    blocks = [block for _, block in re.findall(r"^( *)output:\n((?:\1 {4}.*\n)+)", rules, re.MULTILINE)]
    written = [path for block in blocks for path in re.findall(r'"<results>/([^"]+\.json)"', block)]
    written += [path for name, path in named.items() if any(name in block for block in blocks)]
    return [path for path in dict.fromkeys(written) if not path.startswith(MANIFESTS)]


def same_file(pattern: str, output: str) -> bool:
    """Whether a claim's pattern can name the file of a rule: wildcards on either side stand for one part of a path."""
    ours, theirs = pattern.split("/"), output.split("/")
    return len(ours) == len(theirs) and all(map(same_part, ours, theirs))


def same_part(one: str, two: str) -> bool:
    wild = re.compile(r"\{\w+\}|\*")
    expressions = ["[^/]+".join(map(re.escape, wild.split(part))) for part in (one, two)]
    return bool(re.fullmatch(expressions[0], wild.sub("0", two)) or re.fullmatch(expressions[1], wild.sub("0", one)))


def read_by(claim) -> list[str]:
    """The patterns of the results that decide a claim."""
    if claim.metric == "source":
        return [source.result for source in (claim.source, claim.against) if source]
    if claim.metric in speed.METRICS:
        return [speed.RESULT]
    measure = MEASURES.get(claim.metric, "perplexity")
    if measure == "training":
        return ["training/{model}/{corpus}/*/seed{seed}/result.json"]
    return [f"{measure}/{{model}}/{{corpus}}/*/*/seed{{seed}}.json"] if claim.subject else []


def test_the_rules_write_what_this_test_knows():
    assert {"groups/{model}/{corpus}/{method}/seed{seed}.json", speed.RESULT, "speed/methods.json"} <= set(outputs())
    assert all(path.partition("/")[0].isidentifier() for path in outputs())
    assert same_file("leak/{model}/*/seed{seed}.json", "leak/{model}/{method}/seed{seed}.json")
    assert not same_file("leak/{model}/seed{seed}.json", "bits/{model}/seed{seed}.json")
    assert not same_file("leak/{model}.json", "leak/{model}/{method}.json")


@pytest.mark.parametrize("claim", BY_ROWS, ids=lambda claim: claim.id)
def test_every_row_of_a_claim_is_in_a_table_or_figure(claim):
    """Those of models or texts that are not run here may lack their rows."""
    known = {cell for exhibit in exhibits().values() for cell in cells(exhibit)}
    names = {name for _, _, name in known}
    assert {claim.subject, claim.reference} - {None} <= names
    if set(claim.only_models or EXPERIMENT.models) & set(EXPERIMENT.models):
        assert decided(claim, known), f"{claim.id}: its rows are never on one model and text"


def test_every_result_that_a_claim_reads_is_written_by_a_rule():
    for claim in CLAIMS:
        for pattern in read_by(claim):
            assert any(same_file(pattern, output) for output in outputs()), f"{claim.id}: no rule writes {pattern}"


def test_every_claim_can_be_decided_or_says_why_not():
    unreachable = [claim.id for claim in CLAIMS if claim.out_of_reach]
    assert len(unreachable) < 10
    for claim in CLAIMS:
        assert read_by(claim) or claim.metric == "arithmetic" or claim.out_of_reach, claim.id


def test_what_attention_alone_is_asked_for_is_timed():
    sections = {claim.subject.partition("/")[0] for claim in CLAIMS if claim.metric in speed.METRICS and claim.subject}
    assert sections <= set(speed.SECTIONS)


@pytest.mark.parametrize("name", exhibits())
def test_every_table_and_figure_decides_a_claim(name):
    exhibit = exhibits()[name]
    rows = cells(exhibit)
    if exhibit.shows == "dominance":
        rows |= {(model, corpus, f"{name.partition('/')[0]}/soft") for model, corpus, name in rows}
    assert any(decided(claim, rows) for claim in BY_ROWS), f"{name}: config/claims.yaml has no claim that it decides"


def test_every_measurement_decides_a_claim():
    patterns = {pattern for claim in CLAIMS for pattern in read_by(claim)}
    for output in outputs():
        assert any(same_file(pattern, output) for pattern in patterns), (
            f"{output}: no claim of config/claims.yaml reads it"
        )


def test_every_printed_number_of_a_claim_is_printed():
    numbers = {number for claim in CLAIMS for number in claim.printed}
    assert len(numbers) > 150
    for number in numbers:
        printed.number(number)


def numeric_rows() -> list[str]:
    """The printed rows with numbers of their own."""
    return [
        name
        for table in printed.printed()
        for name, row in printed.rows_of(table).items()
        if any(isinstance(value, int | float) for value in row.values())
    ]


@pytest.mark.parametrize("row", numeric_rows())
def test_every_printed_row_is_behind_a_claim(row):
    assert any(number.rpartition(".")[0] == row for claim in CLAIMS for number in claim.printed)


@pytest.mark.parametrize("table", printed.printed())
def test_every_number_of_a_whole_table_is_behind_a_claim(table):
    named = {number for claim in CLAIMS for number in claim.printed}
    for column, value in printed.printed()[table].items():
        if isinstance(value, int | float) and column not in ("context", "window", "steps"):
            assert f"{table}.{column}" in named


def test_the_paper_has_at_least_sixty_claims_and_each_section_some():
    paper = [claim for claim in CLAIMS if claim.origin == "paper"]
    assert len(paper) >= 60
    assert all(claim.printed or claim.kind != "value" for claim in paper)
    places = {claim.place for claim in paper}
    assert {f"Table {number}" for number in range(1, 11)} | {"Abstract", "Figure 1", "GSM8K", "Section 5"} <= places


def test_wildcards_of_every_source_are_known(tmp_path):
    for claim in CLAIMS:
        for source in (claim.source, claim.against):
            if claim.metric == "source" and source:
                assert list(claim_sources.matches(source.result, tmp_path)) == []


def test_every_contradiction_of_the_paper_is_a_question_with_claims():
    asked = questions(REPOSITORY / "config/claims.yaml", CLAIMS)
    assert [question.id for question in asked] == [f"4.{number}" for number in range(1, 13)]
    assert all(len(question.claims) == len(set(question.claims)) >= 3 for question in asked)
