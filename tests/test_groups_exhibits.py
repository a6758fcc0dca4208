"""The table, the figure and the page of a groups result with known answers."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas
import pytest
import yaml

from focus import jobs, scales
from focus.errors import UserError
from focus.paper import groups, groups_figure, groups_page

BASE = Path(__file__).parents[1] / "config" / "config.yaml"
GROUPS = "groups={model: gpt2-mini, corpus: austen, method: focus, passage_tokens: 4, shuffles: 100}"
HOSTILE = "</script><script>alert(1)</script>&\"'"


def group(share, category=None, purity=None, top=()):
    categories = {} if category is None else {category: purity, "NOUN": round(1 - purity, 4)}
    confidence = None if category is None else 0.75
    known = {"share": share, "category": category, "purity": purity, "categories": categories}
    return known | {"confidence": confidence, "top": [list(pair) for pair in top]}


def layer(found, purity):
    null = {"purity": 0.2, "spread": 0.01, "p_value": 0.001, "information": 0.02, "information_p_value": 0.001}
    pair = {"a": "Henry", "b": HOSTILE, "a_position": 3, "b_position": 90, "distance": 87, "affinity": 0.9}
    same = {"same_word": 0.25, "same_category": 0.5}
    return {
        "groups": found,
        "confidence": 0.75,
        "purity": purity,
        "information": 0.4,
        "shuffled": null,
        "by_token": null | {"purity": 0.3, "p_value": 0.4},
        "far": {"pairs": [pair], "listed": same, "strong": same, "chance": same},
    }


@pytest.fixture
def result(tmp_path):
    """A result of two layers, K=3, the second the best, with one empty group; tokens that look like markup."""
    settings = scales.load([BASE], [GROUPS])
    first = layer([group(0.5, "VERB", 0.5, [("ran", 1.0)]), group(0.3, "NOUN", 0.4, [("a", 1.0)]), group(0.2)], 0.37)
    comma = [(",", 0.6), ("\n", 0.2), (HOSTILE, 0.2)]
    second = layer([group(0.6, "PUNCT", 0.8, comma), group(0.4, "NOUN", 0.5, [("cat", 0.5)]), group(0.0)], 0.68)
    metrics = {
        "layers": [first, second],
        "best": {"layer": 1, "rule": "the purest", "p_values": {"shuffled": 0.002, "by_token": 0.3}},
        "categories": {"NOUN": 0.5, "PUNCT": 0.5},
        "tokens": 1000,
        "windows": [{"document": "A & B", "start": 512}],
        "context": 512,
        "window": 64,
        "passage": {
            "document": "A & B",
            "start": 512,
            "pieces": ["Henry", HOSTILE, "\n", ""],
            "categories": ["PROPN", "PUNCT", "SPACE", "X"],
            "groups": ["0 1 2 0", "1 0 2 1"],
            "confidence": ["90 80 70 5", "100 20 30 40"],
        },
    }
    known = {"kind": "k", "source": "s", "revision": "r", "licence": "MIT", "note": "stand-in for <X>: a model"}
    provenance = {"code": "0" * 64, "device": "cpu", "dtype": "float32", "versions": {}}
    provenance["revisions"] = dict.fromkeys(("model", "corpus"), known) | {"tagger": known | {"spacy": "3"}}
    value = {"result_version": 1, "experiment": "groups", "metrics": metrics, "provenance": provenance}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(value | {"settings": jobs.groups_job(settings).model_dump(mode="json")}))
    return path


def made(result, tmp_path):
    groups.write(result, tmp_path / "groups")
    return {suffix: (tmp_path / f"groups.{suffix}").read_text() for suffix in ("csv", "md", "html", "tex")}


def test_the_best_layer_stands_beside_chance_and_the_paper(result, tmp_path):
    lines = [" ".join(line.split()) for line in made(result, tmp_path)["md"].splitlines()]
    assert "## Layer 1" in lines
    assert "| G1 | nouns | cat 50 % | 40.0 % | 0.75 | 50.0 % |" in lines
    assert "| G2 | - | empty | 0.0 % | - | - |" in lines
    assert "| Purity of all groups | 68.0 % | - |" in lines
    assert "| Purity of shuffled groups | 20.0 % ± 1.0 | - |" in lines
    assert "| p-value against shuffled groups | 0.002 | - |" in lines
    assert "| p-value against groups drawn by token | 0.300 | - |" in lines
    assert "| Largest share of punctuation in a group | 80.0 % | 96.0 % |" in lines
    assert "| Mean confidence | 0.75 | 0.89 |" in lines
    assert "| Smallest group | 0.0 % | 10.0 % |" in lines
    assert "| Largest group | 60.0 % | 16.0 % |" in lines
    assert "| paper | Henry | Walker | 18 | 772 | 754 | 0.945 |" in lines
    assert any(line.startswith("| G4 | punctuation | , 55 %, . 24 %") and "96 %" in line for line in lines)


def test_a_few_pure_tokens_are_no_group_of_punctuation():
    big, small = group(0.84, "PUNCT", 0.3), group(0.16, "PUNCT", 1.0)
    assert groups.punctuation({"groups": [big, small, group(0.0)]}) == 0.3
    assert groups.punctuation({"groups": [big, small | {"share": 0.17}, group(0.0)]}) == 1.0
    assert groups.punctuation({"groups": [group(1.0, "NOUN", 1.0), *[group(0.0)] * 31]}) == 0.0


def test_every_format_escapes_tokens(result, tmp_path):
    pages = made(result, tmp_path)
    assert "<script>" not in pages["html"]
    assert "&lt;/script&gt;" in pages["html"]
    assert r"'\textbackslash{}n'" in pages["tex"]
    assert "'\\n'" in pages["md"]


def test_the_csv_holds_every_layer_and_the_papers_numbers(result, tmp_path):
    groups.write(result, tmp_path / "groups")
    table = pandas.read_csv(tmp_path / "groups.csv", keep_default_na=False, na_values=[""])
    whole = table[table.group.isna() & (table.metric == "punctuation")].set_index("layer")
    assert whole.value.to_dict() == {0: 0.0, 1: 0.8}
    assert whole.paper.dropna().to_dict() == {1: 0.96}
    purity = table[(table.metric == "purity") & table.group.notna()].set_index(["layer", "group"])
    assert purity.value.dropna().to_dict() == {(0, 0): 0.5, (0, 1): 0.4, (1, 0): 0.8, (1, 1): 0.5}
    tokens = table[table.metric == "token"]
    assert set(tokens.layer) == {1}
    assert HOSTILE in set(tokens.text)


def test_the_figure_orders_groups_by_purity_and_is_the_same_each_time(result, tmp_path):
    share, pure = groups_figure.grids(json.loads(result.read_text())["metrics"]["layers"])
    assert share.tolist() == [[0.5, 0.6], [0.3, 0.4], [0.2, 0.0]]
    assert np.nan_to_num(pure, nan=-1).tolist() == [[0.5, 0.8], [0.4, 0.5], [-1, -1]]
    for name in ("first", "second"):
        groups_figure.write(result, tmp_path / name)
    for suffix, magic in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
        first = (tmp_path / f"first.{suffix}").read_bytes()
        assert first.startswith(magic)
        assert first == (tmp_path / f"second.{suffix}").read_bytes()


class Page(HTMLParser):
    """What a browser finds: tags with their attributes, the text of each token, and the contents of the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tokens, self.scripts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "span":
            self.tokens.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        kind = self.tags[-1][0] if self.tags else ""
        if kind == "span":
            self.tokens[-1] += data
        if kind == "script":
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        self.tags.append(("/" + tag, {}))


def test_the_page_shows_the_passage_whatever_is_in_it(result, tmp_path):
    groups_page.write(result, tmp_path / "groups.html")
    text = (tmp_path / "groups.html").read_text()
    page = Page(text)
    assert page.tokens == ["Henry", HOSTILE, "\n", ""]
    assert len(page.scripts) == 2
    data = json.loads(page.scripts[0])
    assert [each["groups"] for each in data["layers"]] == [[0, 1, 2, 0], [1, 0, 2, 1]]
    assert data["layers"][1]["confidence"] == [100, 20, 30, 40]
    assert data["layers"][1]["legend"][0] == ["G0", "60.0 %", "80.0 %", "punctuation", f", '\\n' {HOSTILE}"]
    assert data["categories"] == ["names", "punctuation", "spaces", "other"]
    options = [attributes for tag, attributes in page.tags if tag == "option"]
    assert [option["value"] for option in options if "selected" in option] == ["1"]
    assert len(options) == 2


def test_the_page_needs_no_network_and_has_a_dark_form(result):
    text = groups_page.page(json.loads(result.read_text()))
    assert not [word for word in ("http", "src=", "href=", "@import", "url(", "fetch(") if word in text]
    assert "prefers-color-scheme: dark" in text
    assert "innerHTML" not in text


def test_another_kind_of_result_is_refused(result):
    result.write_text(result.read_text().replace('"experiment": "groups"', '"experiment": "training"'))
    with pytest.raises(UserError, match="expected the result of focus groups analyse, got one of training"):
        groups.load(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt9"}, "groups.model: expected a key of model_settings"),
        ({"corpus": "gutenberg"}, "groups.corpus: expected a corpus of the registry"),
        ({"method": "window"}, "groups.method: expected a method of kind focus, got window of kind window"),
        ({"passage_tokens": 2000}, "groups.passage_tokens: expected at most the context of gpt2-mini (1024), got 2000"),
    ],
)
def test_settings_that_do_not_fit_are_named(change, message):
    settings = yaml.safe_load(GROUPS.partition("=")[2]) | change
    with pytest.raises(UserError) as error:
        scales.load([BASE], [f"groups={json.dumps(settings)}"])
    assert str(error.value).startswith(f"--config: {message}")


def test_the_job_has_the_adapters_k_and_the_first_seed():
    job = jobs.groups_job(scales.load([BASE], [GROUPS, "seeds=[3, 4]"]))
    assert (job.attention, job.top_k, job.seed, job.model_settings.window) == ("hard", 2, 3, 128)
    soft = GROUPS.replace("shuffles", "attention: soft, shuffles")
    assert jobs.groups_job(scales.load([BASE], [soft])).top_k is None
