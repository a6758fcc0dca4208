"""Tables and the figure of long inputs and recall, and rows beside a control, from made-up results."""

import matplotlib.pyplot as plt
import pandas
import pytest
from paper_results import experiment, write_result, write_results

from focus import jobs
from focus.config import Exhibit, Row
from focus.errors import UserError
from focus.paper import contrast, recall_figure, rows, statistics, tables

MODEL = "smollm2-135m-instruct"
ROWS = [
    Row(method="pretrained"),
    Row(method="window-sinks"),
    Row(method="focus", attention="hard", top_k=1),
    Row(method="focus", attention="hard", top_k=2),
    Row(method="focus-untrained", attention="hard", top_k=1),
]


def exhibit(**changes):
    known = {"title": "A title", "corpus": "austen", "models": [MODEL], "rows": ROWS, "columns": ["far_pairs"]}
    return Exhibit(**known | changes)


def made(tmp_path, shown, *, kind="tables", lost=1):
    settings = experiment(**{"tables": {}, "figures": {}} | {kind: {"x": shown}})
    write_results(tmp_path, settings, lost=lost)
    return settings


def test_a_row_needs_what_its_exhibit_shows():
    assert exhibit().measures == ["perplexity"]
    assert exhibit(downstream=True, long_inputs=True).measures == ["perplexity", "downstream", "long_inputs"]
    assert exhibit(shows="recall").measures == exhibit(recall=True).measures == ["perplexity", "recall"]
    assert exhibit(shows="dominance", recall=True).measures == []


def test_a_control_is_one_of_the_rows():
    with pytest.raises(ValueError, match="control must be a method of the rows, got moba"):
        exhibit(control="moba")


def test_rows_stand_beside_the_control_of_as_many_groups(tmp_path):
    shown = exhibit(
        downstream=True,
        control="focus-untrained",
        rows=[*ROWS, Row(method="focus-untrained", attention="hard", top_k=2)],
    )
    settings = made(tmp_path, shown)
    entries = rows.gather(shown, settings, tmp_path)
    found = {entry.label: contrast.counterpart(entries, entry, "focus-untrained") for entry in entries}
    named = {label: other and other.label for label, other in found.items()}
    assert named == {
        "Pretrained": None,
        "StreamingLLM: window and sinks": None,
        "Focus, hard k=1": "Focus, untrained centroids, hard k=1",
        "Focus, hard k=2": "Focus, untrained centroids, hard k=2",
        "Focus, untrained centroids, hard k=1": None,
        "Focus, untrained centroids, hard k=2": None,
    }
    alone = [entry for entry in entries if entry.row.variant != "hard-k2" or entry.row.method == "focus"]
    assert contrast.counterpart(alone, alone[3], "focus-untrained").row.variant == "hard-k1"
    assert contrast.counterpart(alone[:4], alone[3], "focus-untrained") is None


def test_flips_against_the_control_are_those_of_the_items(tmp_path):
    shown = exhibit(downstream=True, control="focus-untrained")
    settings = made(tmp_path, shown)
    cell = (MODEL, "austen", "focus", "hard-k1", 0)
    scores = {"items": 10, "correct": [0, 0, *[1] * 8], "beyond_window": 0.031, "lengths": [50, 129, 131, 190]}
    path = tmp_path / "downstream" / "/".join(cell[:4]) / "seed0.json"
    write_result(path, "downstream", jobs.downstream_job(settings, *cell), {"tasks": {"piqa": scores}})
    entries = rows.gather(shown, settings, tmp_path)
    grid = contrast.grid("t", entries, "focus-untrained", lambda run: run.tasks)
    (line,) = [line for line in grid.rows if line[:2] == ["PIQA", "Focus, hard k=1"]]
    flips = statistics.flips(scores["correct"], [1] * 6 + [0] * 4)
    assert (flips.gained, flips.lost) == (4, 2)
    assert line[2:7] == ["Focus, untrained centroids, hard k=1", "10", "3.1 %", "-", "12.6 %"]  # 2 + 61 of 500
    assert line[7].startswith("+20.0 [") and line[7].endswith("] (+4 -2), p=0.69")
    (bare,) = [line for line in grid.rows if line[:2] == ["PIQA", "Focus, hard k=2"]]
    assert bare[5:7] == ["70.0 %", "-"]
    assert contrast.grid("t", entries, "full-finetuning", lambda run: run.tasks) is None


def test_the_table_of_long_inputs_has_short_items_changes_and_losses(tmp_path):
    shown = exhibit(downstream=True, long_inputs=True, control="focus-untrained")
    settings = made(tmp_path, shown)
    tables.write("x", shown, settings, tmp_path, tmp_path / "x")
    page = (tmp_path / "x.md").read_text()
    assert "behind 1,024 tokens of held-out text, accuracy in percent" in page
    lines = [line for line in page.splitlines() if line.startswith("| Focus, hard k=1 ")]
    assert "62.5 ± 18.3; change -12.5 [" in lines[2]
    assert " 75.0 |" in lines[2]  # 6 of the first 8 short items
    assert "3.35; change +1.00 ± 0.00" in lines[3]
    assert "against a control" in page
    frame = pandas.read_csv(tmp_path / "x.csv").set_index(["row", "metric"]).sort_index()
    values = frame.loc["Focus, hard k=1"]
    assert values.loc["piqa_behind_text", "value"] == 62.5
    assert values.loc["piqa_behind_text_loss_change", "value"] == pytest.approx(1.0)
    assert values.loc["piqa_behind_text_lost", "value"] == 1
    assert values.loc["piqa_behind_text", "result"].startswith("long_inputs/")


def test_the_table_of_recall_has_every_length(tmp_path):
    shown = exhibit(recall=True)
    settings = made(tmp_path, shown)
    tables.write("x", shown, settings, tmp_path, tmp_path / "x")
    page = (tmp_path / "x.md").read_text()
    for title in ("1,024 tokens, likeliest (n=4)", "2,048 tokens, exact", "text, 1,024 tokens: change"):
        assert title in page
    values = pandas.read_csv(tmp_path / "x.csv").set_index(["row", "metric"]).sort_index().loc["Focus, hard k=2"]
    assert values.loc["needle_2048", "value"] == 50.0
    assert values.loc["needle_2048_lost", "value"] == 1
    assert values.loc["needle_exact_1024", "value"] == 25.0
    assert values.loc["copy_text_1024_change", "value"] == -0.5
    assert values.loc["copy_random_2048", "value"] == 25.0


def test_a_row_without_results_says_so(tmp_path):
    shown = exhibit(long_inputs=True, recall=True, downstream=True)
    settings = made(tmp_path, shown)
    (tmp_path / f"recall/{MODEL}/austen/window-sinks/full/seed0.json").unlink()
    with pytest.raises(UserError, match=r"recall/.*expected the result of StreamingLLM"):
        tables.write("x", shown, settings, tmp_path, tmp_path / "x")
    tables.write("x", shown, settings, tmp_path, tmp_path / "x", partial=True)
    assert "not run: no recall/" in (tmp_path / "x.md").read_text()


def test_points_are_means_with_errors_over_items(tmp_path):
    shown = exhibit(shows="recall", columns=["perplexity"])
    settings = made(tmp_path, shown, kind="figures")
    entry = rows.gather(shown, settings, tmp_path)[2]
    (first, second) = recall_figure.points(entry, "Hidden number, likeliest")
    assert (first[0], second[0]) == (1024, 2048)
    assert first[1:] == (0.5, pytest.approx(statistics.accuracy([1, 1, 0, 0])[1]))
    assert recall_figure.points(entry, "Random tokens copied")[0][1:] == (0.25, pytest.approx(0.1))


def test_the_figure_is_whole_and_the_same_each_time(tmp_path):
    shown = exhibit(shows="recall")
    settings = made(tmp_path, shown, kind="figures")
    for name in ("first", "second"):
        recall_figure.write("x", shown, settings, tmp_path, tmp_path / name)
    for suffix, magic in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
        first = (tmp_path / f"first.{suffix}").read_bytes()
        assert first.startswith(magic)
        assert first == (tmp_path / f"second.{suffix}").read_bytes()
    assert not plt.get_fignums()


def test_a_figure_of_nothing_is_refused(tmp_path):
    shown = exhibit(shows="recall")
    settings = experiment(tables={}, figures={"x": shown})
    with pytest.raises(UserError, match=r"figures.x.rows: expected rows with results of recall, found none"):
        recall_figure.write("x", shown, settings, tmp_path, tmp_path / "x", partial=True)
