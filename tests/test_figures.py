import math
from itertools import combinations

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_results import experiment, write_results

from focus.errors import UserError
from focus.paper import figures, rows

SHIFTS = {"focus/hard-k1": 0.3, "focus/hard-k2": 0.05, "window/full": 1.0}


def test_points_are_ratios_over_pairs_kept(tmp_path):
    scale = experiment()
    write_results(tmp_path, scale, SHIFTS)
    entries = rows.gather(scale.figures["quality"], scale, tmp_path)
    found = {(entry.row.method, entry.row.variant): values for entry, *values in figures.points(entries, "gpt2-mini")}
    assert found["focus", "hard-k1"] == pytest.approx([0.3, math.exp(0.3), found["focus", "hard-k1"][2]])
    assert found["focus", "hard-k1"][2] > 0
    assert found["pretrained", "full"] == pytest.approx([1.0, 1.0, 0.0])


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(st.integers(1, 16), st.floats(0, 1), min_size=1, max_size=8), st.floats(1.5, 6))
def test_labels_name_every_k_once_within_the_panels_width_and_never_touch(shares, width):
    canvas, axes = plt.subplots(figsize=(width, 3))
    axes.set_xlim(-0.04, 1.08)
    canvas.draw_without_rendering()
    rows = figures.label_shares(axes, shares)
    canvas.draw_without_rendering()
    texts = [text for row in rows for text in row]
    named = [int(k) for text in texts for k in text.get_text().removeprefix("k=").split(", ")]
    boxes = [text.get_window_extent() for text in texts]
    panel = axes.get_window_extent()
    plt.close(canvas)
    assert sorted(named) == sorted(shares)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(box.y0 >= panel.y1 for box in boxes)
    assert all(panel.x0 - 1 <= box.x0 and box.x1 <= panel.x1 + 1 for box in boxes if box.width < panel.width)


def test_a_label_stays_over_its_points_and_rises_where_it_would_touch():
    canvas, axes = plt.subplots(figsize=(2.5, 3))
    axes.set_xlim(-0.04, 1.08)
    canvas.draw_without_rendering()
    rows = figures.label_shares(axes, {1: 0.3, 2: 0.93, 3: 0.99, 4: 1.0})
    plt.close(canvas)
    assert [[text.get_text() for text in row] for row in rows] == [["k=1", "k=2"], ["k=3, 4"]]
    assert [text.xy[0] for text in rows[0]] == [0.3, 0.93]


def test_the_papers_points_are_table_7s():
    found = {(model, k): (share, change) for model, k, share, change in figures.paper_points()}
    assert found["gpt2_124m", "k1"] == (0.26, 82.9 / 42.8)
    assert found["gpt2_124m", "k2"] == (0.60, 41.3 / 42.8)
    assert found["mistral_7b", "k3"] == (1.0, 1.0)
    assert len(found) == 8


def test_files_are_whole_and_the_same_each_time(tmp_path):
    scale = experiment()
    write_results(tmp_path, scale, SHIFTS)
    for name in ("first", "second"):
        figures.write("quality", scale.figures["quality"], scale, tmp_path, tmp_path / name)
    for suffix, magic in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
        first = (tmp_path / f"first.{suffix}").read_bytes()
        assert first.startswith(magic)
        assert first == (tmp_path / f"second.{suffix}").read_bytes()
    assert not plt.get_fignums()


def test_missing_results_stop_or_are_named(tmp_path, monkeypatch):
    scale = experiment()
    exhibit = scale.figures["quality"]
    with pytest.raises(UserError, match="expected the result of Pretrained"):
        figures.write("quality", exhibit, scale, tmp_path, tmp_path / "figure")
    with pytest.raises(UserError, match=r"figures.quality.rows: expected a pretrained row with results"):
        figures.write("quality", exhibit, scale, tmp_path, tmp_path / "figure", partial=True)
    write_results(tmp_path, scale, SHIFTS)
    (tmp_path / "perplexity/gpt2-mini/austen/focus/soft/seed0.json").unlink()
    said = []
    monkeypatch.setattr("matplotlib.figure.Figure.supxlabel", lambda self, text, **_: said.append(text))
    figures.write("quality", exhibit, scale, tmp_path, tmp_path / "figure", partial=True)
    assert "Not run: Focus, soft on gpt2-mini." in said[0].replace("\n", " ")
