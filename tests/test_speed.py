import csv
import json

import pytest
from paper_results import experiment, write_speed

from focus.errors import UserError
from focus.paper import speed, speed_figure

MEASURED = dict.fromkeys(("full_us", "focus_us", "full_ms", "full_cache_ms", "focus_ms", "focus_first_ms"), 1.0)
MEASURED |= {"speedup": 1.0, "limit": 2.0}


@pytest.fixture
def result(tmp_path):
    write_speed(tmp_path, experiment())
    return tmp_path / speed.RESULT


@pytest.mark.parametrize("table", ["table6", "table7speed"])
def test_a_table_has_every_case_in_full_precision(result, tmp_path, table):
    speed.write(table, result, tmp_path / table)
    metrics = json.loads(result.read_text())["metrics"]
    with (tmp_path / f"{table}.csv").open() as file:
        found = {
            (line["section"], line["length"], line["groups"], line["top_k"]): float(line["value"])
            for line in csv.DictReader(file)
            if line["metric"] == "speedup"
        }
    sections = ["membership"] if table == "table7speed" else ["forward", "backward", "unbalanced"]
    assert found == {
        (name, str(row["length"]), str(row["groups"]), str(row.get("top_k", ""))): row["speedup"]
        for name in sections
        for row in metrics[name]
    }
    assert (tmp_path / f"{table}.tex").read_text().count("\\begin{table*}") >= 1
    assert "<table>" in (tmp_path / f"{table}.html").read_text()


def cells(text, *first):
    """The cells after those that begin a line of the page."""
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines()]
    return next(line[len(first) :] for line in lines if tuple(line[: len(first)]) == first)


def test_the_papers_numbers_stand_beside_ours(result):
    full, ours, ratio, spread, limit, reached, paper, cosine = cells(speed.text("table6", result), "64K", "8")
    assert (ratio, paper, cosine) == ("8.00", "4.7", "1.0000")
    assert (full, ours, spread, limit, reached) == ("2,000", "250", "7.20 to 8.80", "8.00", "100 %")
    kept, far, gpt2, mistral, _, ratio, _, paper, way = cells(speed.text("table7speed", result), "16K", "2 of 4")
    assert (kept, far, gpt2, mistral) == ("80.0 %", "80.0 %", "60 %", "73 %")
    assert (ratio, paper, way) == ("1.25", "2.0", "full")


@pytest.mark.parametrize(("section", "word"), [("decode", "Decoding: "), ("decode_model", "The whole model ")])
def test_what_was_not_timed_is_not_explained(result, section, word):
    whole = json.loads(result.read_text())
    whole["metrics"][section] = [dict.fromkeys(("length", "groups", "threads"), 1024) | MEASURED]
    result.write_text(json.dumps(whole))
    assert word in speed.text("table6", result)
    whole["metrics"][section] = []
    result.write_text(json.dumps(whole))
    page = speed.text("table6", result)
    assert word not in page
    assert "Limit: " in page and "Cosine: " in page


def test_memory_is_a_ratio(result):
    assert cells(speed.text("table6", result), "16K", "8", "100") == ["150", "1.50"]


def test_the_papers_curve_is_table_6s():
    assert speed_figure.paper_curve(4)[1024] == 0.2
    assert speed_figure.paper_curve(8)[1048576] == 8.6
    assert speed_figure.paper_curve(16) == {}


def test_the_figure_has_the_same_bytes_each_time(result, tmp_path):
    for name in ("first", "second"):
        speed_figure.write(result, tmp_path / name)
    for suffix in ("pdf", "png"):
        assert (tmp_path / f"first.{suffix}").read_bytes() == (tmp_path / f"second.{suffix}").read_bytes()


def test_other_tables_and_results_are_refused(result, tmp_path):
    with pytest.raises(UserError, match="table: expected one of table6, table7speed, got table5"):
        speed.write("table5", result, tmp_path / "t")
    result.write_text(result.read_text().replace('"attention"', '"training"'))
    with pytest.raises(UserError, match=r"expected the result of focus bench attention, got one of training"):
        speed.load(result)
