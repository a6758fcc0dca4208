import math

import matplotlib.pyplot as plt
import pytest
from paper_results import experiment, write_results

from focus.errors import UserError
from focus.paper import figures, rows

SHIFTS = {"focus/hard-k1": 0.3, "focus/hard-k2": 0.05, "window/full": 1.0}


def test_points_are_ratios_over_pairs_kept(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings, SHIFTS)
    entries = rows.gather(settings.figures["quality"], settings, tmp_path)
    found = {(entry.row.method, entry.row.variant): values for entry, *values in figures.points(entries, "gpt2-mini")}
    assert found["focus", "hard-k1"] == pytest.approx([0.3, math.exp(0.3), found["focus", "hard-k1"][2]])
    assert found["focus", "hard-k1"][2] > 0
    assert found["pretrained", "full"] == pytest.approx([1.0, 1.0, 0.0])


def test_the_papers_points_are_table_7s():
    found = {(model, k): (share, change) for model, k, share, change in figures.paper_points()}
    assert found["gpt2_124m", "k1"] == (0.26, 82.9 / 42.8)
    assert found["gpt2_124m", "k2"] == (0.60, 41.3 / 42.8)
    assert found["mistral_7b", "k3"] == (1.0, 1.0)
    assert len(found) == 8


def test_files_are_whole_and_the_same_each_time(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings, SHIFTS)
    for name in ("first", "second"):
        figures.write("quality", settings.figures["quality"], settings, tmp_path, tmp_path / name)
    for suffix, magic in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
        first = (tmp_path / f"first.{suffix}").read_bytes()
        assert first.startswith(magic)
        assert first == (tmp_path / f"second.{suffix}").read_bytes()
    assert not plt.get_fignums()


def test_missing_results_stop_or_are_named(tmp_path, monkeypatch):
    settings = experiment()
    exhibit = settings.figures["quality"]
    with pytest.raises(UserError, match="expected the result of Pretrained"):
        figures.write("quality", exhibit, settings, tmp_path, tmp_path / "figure")
    with pytest.raises(UserError, match=r"figures.quality.rows: expected a pretrained row with results"):
        figures.write("quality", exhibit, settings, tmp_path, tmp_path / "figure", partial=True)
    write_results(tmp_path, settings, SHIFTS)
    (tmp_path / "perplexity/gpt2-mini/austen/focus/soft/seed0.json").unlink()
    said = []
    monkeypatch.setattr("matplotlib.figure.Figure.supxlabel", lambda self, text, **_: said.append(text))
    figures.write("quality", exhibit, settings, tmp_path, tmp_path / "figure", partial=True)
    assert "Not run: Focus, soft on gpt2-mini." in said[0].replace("\n", " ")
