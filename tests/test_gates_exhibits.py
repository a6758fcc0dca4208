"""The table and the figure of the gates, from made-up results with known answers."""

import csv
import math

import matplotlib.pyplot as plt
import pytest
from paper_results import experiment as default_experiment
from paper_results import write_results

from focus.config import Experiment
from focus.errors import UserError
from focus.paper import claims, gates, gates_figure

READINGS = ("printed", "centred", "log_sigmoid", "exponential")
SHIFTS = {"gate-centred/soft": 0.4, "gate-exponential/hard-k1": 0.2}


def experiment(seeds=(0,)):
    changed = default_experiment().model_dump() | {"models": ["gpt2-mini"], "seeds": list(seeds)}
    rows = [{"method": "pretrained"}]
    for name in READINGS:
        method = changed["methods"]["focus"] | {"label": f"Gate {name}"}
        changed["methods"][f"gate-{name}"] = method | {"adapter": {**method["adapter"], "gate": name}}
        rows.append({"method": f"gate-{name}", "attention": "soft"})
        rows += [{"method": f"gate-{name}", "attention": "hard", "top_k": k} for k in (1, 2)]
    exhibit = {"title": "Gates", "corpus": "austen", "shows": "gates", "models": ["gpt2-mini"], "rows": rows}
    return Experiment.model_validate(changed | {"tables": {"readings": exhibit}, "figures": {"readings": exhibit}})


def lines_of(page):
    grid = page.split("what the gate gives\n", 1)[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in grid if line.startswith("|")]
    return {(line[0], line[2]): line for line in cells[2:]}


def test_the_table_shows_each_gate_near_and_far(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings, SHIFTS)
    gates.write("readings", settings.tables["readings"], settings, tmp_path, tmp_path / "out")
    page = (tmp_path / "out.md").read_text()
    lines = lines_of(page)
    assert len(lines) == 8
    far = lines["Gate exponential", "far"]
    low, high = math.exp(10 * (0.2 - 1)), math.exp(10 * (0.4 - 1))
    assert far[1] == "weight * exp(lam (a - 1))"
    assert far[3:8] == ["0.0003"] * 2 + [f"{high:.3f}"] * 3
    assert far[8] == f"{(low + high) / 2:.3f} ± 0.002"
    assert far[9:] == ["100.0 %", "0.0 %"]
    printed = lines["Gate printed", "far"]
    assert printed[9] == "0.0 %" and float(printed[3]) == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-3)
    assert lines["Gate log_sigmoid", "near"][3:8] == [f"{1 / (1 + math.exp(-4)):.3f}"] * 5
    assert "| Gate centred, soft " in page and f"{math.exp(0.4):.3f}" in page
    assert "2 held-out windows of 1024 tokens, lam=10" in page
    assert (tmp_path / "out.tex").exists() and (tmp_path / "out.html").exists()


def test_the_csv_names_the_result_behind_each_number(tmp_path):
    settings = experiment(seeds=(0, 1))
    write_results(tmp_path, settings, SHIFTS)
    gates.write("readings", settings.tables["readings"], settings, tmp_path, tmp_path / "out")
    with (tmp_path / "out.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["metric"] == "far_quantile_50"]
    assert len(lines) == 8
    found = {(line["method"], line["seed"]): (float(line["value"]), line["result"]) for line in lines}
    value, path = found["gate-log_sigmoid", "1"]
    assert value == pytest.approx(1 / (1 + math.exp(1)), rel=1e-3)
    assert path == "gates/gpt2-mini/austen/gate-log_sigmoid/soft/seed1.json"
    assert (tmp_path / path).exists()
    assert " (2)" in lines_of((tmp_path / "out.md").read_text())["Gate printed", "far"][8]


def test_the_figure_has_a_panel_a_gate_and_one_of_perplexities(tmp_path, monkeypatch):
    settings = experiment()
    write_results(tmp_path, settings, SHIFTS)
    drawn = []
    monkeypatch.setattr(gates_figure, "save", lambda canvas, prefix: drawn.append(canvas))
    gates_figure.write("readings", settings.figures["readings"], settings, tmp_path, tmp_path / "out")
    *panels, quality = drawn[0].axes
    assert [axes.get_title().split("\n")[0] for axes in panels] == [f"Gate {name}" for name in READINGS]
    near, far = (line.get_xdata()[0] for line in panels[3].lines)
    assert near == pytest.approx(math.exp(-1), rel=1e-2) and far < 0.01
    heights = [float(line.get_ydata()[0]) for line in quality.lines if len(line.get_xdata()) == 1]
    assert len(heights) == 12
    assert heights[3] == pytest.approx(math.exp(0.4)) and heights[10] == pytest.approx(math.exp(0.2))
    plt.close(drawn[0])


def test_files_are_the_same_each_time_and_what_is_missing_is_named(tmp_path, monkeypatch):
    settings = experiment()
    exhibit = settings.figures["readings"]
    write_results(tmp_path, settings, SHIFTS)
    for name in ("first", "second"):
        gates_figure.write("readings", exhibit, settings, tmp_path, tmp_path / name)
    assert (tmp_path / "first.pdf").read_bytes() == (tmp_path / "second.pdf").read_bytes()
    (tmp_path / "perplexity/gpt2-mini/austen/gate-printed/soft/seed0.json").unlink()
    said = []
    monkeypatch.setattr("matplotlib.figure.Figure.supxlabel", lambda self, text, **_: said.append(text))
    gates_figure.write("readings", exhibit, settings, tmp_path, tmp_path / "part", partial=True)
    assert "Not run: Gate printed, soft on gpt2-mini." in said[0].replace("\n", " ")
    gates.write("readings", exhibit, settings, tmp_path, tmp_path / "part", partial=True)
    assert len(lines_of((tmp_path / "part.md").read_text())) == 6
    (tmp_path / "gates/gpt2-mini/austen/gate-centred/soft/seed0.json").unlink()
    with pytest.raises(UserError, match=r"gate-centred/soft/seed0.json: expected a result file, found none"):
        gates.write("readings", exhibit, settings, tmp_path, tmp_path / "out", partial=True)


def test_claims_find_the_rows_of_such_a_table(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings, SHIFTS)
    claim = {
        "id": "gate.printed",
        "place": "Eq. 2",
        "statement": "The centred gate is worse than the model.",
        "kind": "ordering",
        "metric": "perplexity",
        "subject": "gate-centred/soft",
        "relation": "above",
        "reference": "pretrained/full",
        "tolerance": 2,
        "reason": "two standard errors",
    }
    (tmp_path / "claims.yaml").write_text(f"claims: [{claim}]")
    claims.write(tmp_path / "claims.yaml", settings, tmp_path, tmp_path / "c.json", tmp_path / "c.md")
    assert '"verdict": "reproduced"' in (tmp_path / "c.json").read_text()
