import itertools
import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from jinja2 import Template
from matplotlib.text import Text
from paper_results import REPOSITORY, experiment, write_methods, write_results

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.paper import labels, rows, tradeoff

SHIFTS = {"focus/hard-k1": -0.1, "focus/hard-k2": 0.05, "window/full": 1.0}
SPEEDS = {"pretrained/full": 1.0, "window/full": 40.0, "focus/hard-k1": 3.0, "focus/hard-k2": 0.8}
REASON = "not run: quadratic memory"


def settings() -> Experiment:
    shown = [{"method": "pretrained"}, {"method": "window"}, {"method": "focus", "attention": "soft"}]
    shown += [{"method": "focus", "attention": "hard", "top_k": k} for k in (1, 2)]
    figure = {"title": "Quality against speed", "corpus": "austen", "shows": "tradeoff", "rows": shown}
    every = experiment(figures={"figure1": figure})
    return every.model_copy(update={"speed": every.speed.model_copy(update={"method_lengths": []})})


@pytest.fixture
def root(tmp_path):
    write_results(tmp_path, settings(), SHIFTS)
    write_methods(tmp_path, SPEEDS | {"focus/soft": REASON})
    return tmp_path


def draw(root, name="figure", **options):
    every = settings()
    tradeoff.write("figure1", every.figures["figure1"], every, root, root / name, **options)


def test_points_are_ratios_over_the_speed_at_the_longest_context(root):
    every = settings()
    entries = rows.gather(every.figures["figure1"], every, root)
    found = tradeoff.points(entries, "gpt2-mini", tradeoff.load(root / tradeoff.RESULT))
    named = {f"{point.entry.row.method}/{point.entry.row.variant}": point for point in found}
    assert {name: point.speedup for name, point in named.items()} == SPEEDS
    assert named["focus/hard-k1"].ratio == pytest.approx(math.exp(-0.1))
    assert named["focus/hard-k1"].error > 0
    assert (named["window/full"].least, named["window/full"].most) == pytest.approx((36.0, 44.0))
    assert (named["pretrained/full"].ratio, named["pretrained/full"].error) == (1.0, 0.0)


def test_rows_of_the_same_attention_share_a_time(root):
    write_methods(root, {"pretrained/full": 1.0, "x": 2.0})
    timed = tradeoff.load(root / tradeoff.RESULT)
    entry = rows.gather(settings().figures["figure1"], settings(), root)[0]
    assert tradeoff._case(entry, timed)["rows"] == ["pretrained/full", "pretrained/full-again"]


def test_the_papers_points_have_table_1s_quality_and_table_6s_speed():
    assert tradeoff.paper_points(65536) == [
        ("full fine-tuning", 1.0, 36.4 / 42.8),
        ("Focus, K=4", 3.0, 36.2 / 42.8),
    ]
    assert [name for name, *_ in tradeoff.paper_points(512)] == ["full fine-tuning"]


def drawn(root, monkeypatch, **options):
    """The figure as it is saved."""
    kept = []
    monkeypatch.setattr(tradeoff, "save", lambda canvas, prefix: kept.append(canvas))
    draw(root, **options)
    return kept[0]


def test_better_is_up_and_the_shaded_quadrant_is_the_faster_and_better(root, monkeypatch):
    canvas = drawn(root, monkeypatch)
    for axes in canvas.axes:
        assert axes.get_xscale() == "log"
        assert axes.yaxis_inverted()
        (shaded,) = [each for each in axes.collections if each.get_alpha() == tradeoff.BETTER["alpha"]]
        corners = shaded.get_paths()[0].vertices
        assert corners[:, 0].min() == 1.0
        assert corners[:, 1].max() == 1.0
        assert corners[:, 0].max() == axes.get_xlim()[1]
        assert corners[:, 1].min() == axes.get_ylim()[1]
    plt.close(canvas)


def test_every_point_has_its_label_and_what_is_missing_is_named(root, monkeypatch):
    canvas = drawn(root, monkeypatch)
    for axes in canvas.axes:
        assert sorted(text.get_text() for text in axes.texts) == [
            *("Focus, hard k=1", "Focus, hard k=2", "Paper: Focus, K=4"),
            *("Paper: full fine-tuning", "Pretrained", "Window only"),
        ]
    footnote = canvas.get_supxlabel().replace("\n", " ")
    assert "Not timed: Focus, soft (quadratic memory)." in footnote
    assert "it prints no speed for Longformer 0.91, Performer 2.62, Routing Transformer 0.87." in footnote
    plt.close(canvas)


def test_the_footnote_says_where_quality_and_speed_were_measured(root, monkeypatch):
    canvas = drawn(root, monkeypatch)
    footnote = canvas.get_supxlabel().replace("\n", " ")
    assert (
        "Quality: context 512, window 64 (smollm2-135m-instruct); context 1024, window 128 (gpt2-mini). "
        "Speed: context 65536, window 128. Fixed budgets"
    ) in footnote
    assert "two standard errors of paired differences" in footnote
    plt.close(canvas)


@pytest.mark.parametrize(
    ("shows", "said"),
    [
        (None, "against the share of causal pairs kept"),
        ("tradeoff", "faster than full attention"),
        ("dominance", "tokens in the largest group over the steps"),
        ("gates", "reading of the gate"),
        ("topk", "by the groups k that a token joins"),
    ],
)
def test_the_report_says_of_a_figure_what_it_shows(shows, said):
    config = {"scale": "laptop", "figures": {"x": {"title": "t"} | ({"shows": shows} if shows else {})}}
    snakemake = SimpleNamespace(config=config, wildcards=SimpleNamespace(figure="x"))
    template = Template((REPOSITORY / "workflow/report/figure.rst").read_text())
    caption = " ".join(template.render(snakemake=snakemake).split())
    assert said in caption
    others = ("causal pairs kept", "faster than", "over the steps", "reading of the gate", "token joins")
    assert sum(other in caption for other in others) == 1
    assert "{" not in caption


def test_files_are_whole_and_the_same_each_time(root):
    for name in ("first", "second"):
        draw(root, name)
    for suffix, magic in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
        first = (root / f"first.{suffix}").read_bytes()
        assert first.startswith(magic)
        assert first == (root / f"second.{suffix}").read_bytes()
    assert not plt.get_fignums()


def test_missing_results_stop_and_missing_rows_are_named(root, monkeypatch):
    (root / "perplexity/gpt2-mini/austen/window/full/seed0.json").unlink()
    with pytest.raises(UserError, match="expected the result of Window only"):
        draw(root)
    canvas = drawn(root, monkeypatch, partial=True)
    assert "Not run: Window only on gpt2-mini." in canvas.get_supxlabel().replace("\n", " ")
    plt.close(canvas)
    write_methods(root, {"pretrained/full": 1.0})
    with pytest.raises(UserError, match=r"speed/methods.json: expected the time of window/full at 65536 tokens"):
        draw(root, partial=True)
    (root / tradeoff.RESULT).unlink()
    with pytest.raises(UserError, match="expected a result file, found none"):
        draw(root, partial=True)


def test_another_kind_of_result_is_refused(root):
    path = root / tradeoff.RESULT
    path.write_text(path.read_text().replace('"methods"', '"attention"'))
    with pytest.raises(UserError, match="expected the result of focus bench methods, got one of attention"):
        tradeoff.load(path)


def test_a_table_cannot_show_the_tradeoff():
    table = experiment().tables["headline"].model_dump() | {"shows": "tradeoff"}
    with pytest.raises(ValueError, match=r"tables.headline.shows: belongs to figures"):
        experiment(tables={"headline": table})


def test_without_timing_the_figure_is_left_out():
    every = settings()
    figure: Exhibit = every.figures["figure1"]
    assert not every.made(figure)
    timed = every.speed.model_copy(update={"method_lengths": [4096]})
    assert every.model_copy(update={"speed": timed}).made(figure)
    assert not every.model_copy(update={"speed": None}).made(figure)
    assert every.made(figure.model_copy(update={"shows": "quality"}))
    assert not every.made(figure.model_copy(update={"shows": "quality", "models": ["other"]}))


@pytest.mark.parametrize("spread", [0.3, 0.02, 0.0])
def test_labels_cover_neither_each_other_nor_the_points(spread):
    canvas, axes = plt.subplots(figsize=(6, 5), layout="constrained")
    axes.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0))
    points = [(0.5 + spread * math.cos(n), 0.5 + spread * math.sin(n), f"a name of row {n}") for n in range(24)]
    written = labels.place(axes, points, [(0.0, 0.5, 1.0, 0.5)], fontsize=6.5)
    boxes = [_text_box(text) for text in written]
    assert not [1 for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)]
    for x, y, _ in points:
        assert not any(box.contains(*axes.transData.transform((x, y))) for box in boxes)
    level = axes.transData.transform((0.5, 0.5))[1]
    assert not any(box.y0 < level < box.y1 for box in boxes)
    inside = axes.get_window_extent()
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 for box in boxes)
    plt.close(canvas)


def _text_box(label):
    """The box of the text alone, without its line."""
    label.update_positions(label.figure._get_renderer())
    return Text.get_window_extent(label, label.figure._get_renderer())
