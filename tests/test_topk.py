"""Pairs kept by counting against brute force and against masks, and the exhibits of the groups a token joins."""

import csv
import math
from itertools import combinations, combinations_with_replacement, product

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_results import experiment as default_experiment
from paper_results import write_results
from pydantic import ValidationError

from focus.config import Experiment
from focus.errors import UserError
from focus.paper import speed, topk, topk_figure
from focus.routing import pairs_kept, top_k_membership

SIZES = [(groups, k) for groups in range(1, 9) for k in range(1, groups + 1)]
SHIFTS = {"focus/hard-k1": 0.3, "focus/hard-k2": 0.05}


def members(tokens, groups, k, seed):
    generator = torch.Generator().manual_seed(seed)
    return top_k_membership(torch.rand(1, tokens, groups, generator=generator), k)


@pytest.mark.parametrize(("groups", "k"), SIZES)
def test_the_share_is_that_of_all_choices_of_two_tokens(groups, k):
    choices = [set(choice) for choice in combinations(range(groups), k)]
    together = sum(bool(own & other) for own, other in product(choices, choices))
    assert topk.even_share(groups, k) == pytest.approx(together / len(choices) ** 2, abs=1e-12)


@pytest.mark.parametrize("groups", range(1, 9))
@pytest.mark.parametrize("seed", [0, 1])
def test_more_than_half_of_the_groups_keep_every_pair_of_any_membership(groups, seed):
    for k in range(groups // 2 + 1, groups + 1):
        assert pairs_kept(members(40, groups, k, seed), window=3) == (1.0, 1.0)
        assert topk.even_share(groups, k) == 1.0
    for k in range(1, groups // 2 + 1):
        apart = torch.zeros(1, 9, groups, dtype=torch.bool)
        apart[:, ::2, :k] = apart[:, 1::2, groups - k :] = True
        assert pairs_kept(apart, window=3)[1] < 1
        assert topk.even_share(groups, k) < 1


@given(
    size=st.sampled_from(SIZES),
    length=st.integers(1, 14),
    window=st.integers(0, 15),
    sinks=st.integers(0, 16),
)
def test_expected_pairs_are_a_sum_over_pairs(size, length, window, sinks):
    chances, far = [], []
    for i, j in combinations_with_replacement(range(length), 2):
        chance = 1.0 if j - i <= window or i < sinks else topk.even_share(*size)
        chances.append(chance)
        far += [chance] if j - i > window else []
    expected = sum(chances) / len(chances), sum(far) / len(far) if far else 1.0
    assert topk.even_pairs(*size, length=length, window=window, sinks=sinks) == pytest.approx(expected)


@settings(max_examples=15, deadline=None)
@given(size=st.sampled_from(SIZES), length=st.integers(20, 40), window=st.integers(0, 10), sinks=st.integers(0, 4))
def test_expected_pairs_are_the_mean_over_random_memberships(size, length, window, sinks):
    groups, k = size
    expected = topk.even_pairs(groups, k, length=length, window=window, sinks=sinks)
    found = torch.tensor([pairs_kept(members(length, groups, k, seed), window, sinks) for seed in range(40)])
    most = 6 * math.sqrt(expected[1] * (1 - expected[1]) / 40)
    assert found.double().mean(dim=0).tolist() == pytest.approx(expected, abs=most + 1e-6)


def test_a_long_context_reaches_the_formula():
    for groups, k in ((4, 1), (4, 2), (8, 2)):
        _, far = pairs_kept(members(1500, groups, k, 0), window=10)
        assert far == pytest.approx(topk.even_share(groups, k), abs=0.01)


@pytest.mark.parametrize("k", [0, 5])
def test_a_token_joins_at_least_one_group_and_at_most_all(k):
    with pytest.raises(UserError, match=f"top_k: expected 1 to 4, got {k}"):
        topk.even_share(4, k)


def test_bounds_are_those_of_the_pairs():
    assert topk.even_share(4, 2) == pytest.approx(5 / 6)
    assert [topk.calls_limit(4, k) for k in (1, 2, 4)] == [4.0, 1.0, 0.25]
    assert topk.printed_limit("gpt2_124m", 4, 2) == pytest.approx(1 / 0.6)
    assert topk.printed_limit("mistral_7b", 8, 2) is None
    assert topk.printed_change("gpt2_124m", 4, 4) == pytest.approx(47.2 / 42.8)


def hard(method, *ks):
    return [{"method": method, "attention": "hard", "top_k": k} for k in ks]


ROWS = [*hard("focus-paper", 1, 2, 3, 4), *hard("focus", 1, 2, 3)]


def experiment(rows=ROWS, **changes):
    exhibit = {"title": "Groups a token joins", "corpus": "austen", "shows": "topk"}
    exhibit |= {"models": ["gpt2-mini"], "rows": [{"method": "pretrained"}, *rows]}
    changed = default_experiment().model_dump() | {"models": ["gpt2-mini"], "tables": {}} | changes
    return Experiment.model_validate(changed | {"tables": {"joined": exhibit}, "figures": {"joined": exhibit}})


def cells(page, heading):
    """The lines of the grid under a heading, as {first cell: other cells}, with its header first."""
    lines = page.split(f"{heading}\n", 1)[1].split("\n## ")[0].split("\n- ")[0].splitlines()
    grid = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    return {line[0]: line[1:] for line in grid if not set(line[0]) <= {"-"}}


def test_the_table_has_a_row_for_each_k(tmp_path):
    known = experiment()
    write_results(tmp_path, known, SHIFTS)
    topk.write("joined", known.tables["joined"], known, tmp_path, tmp_path / "out")
    page = (tmp_path / "out.md").read_text()
    pairs = cells(page, "gpt2-mini: far pairs kept")
    sinks = sum(895 - sink for sink in range(4)) / (895 * 896 / 2)
    even = f"{100 * (sinks + (1 - sinks) * 5 / 6):.1f} %"
    assert pairs["2 of 4"] == ["83.3 %", "85.0 %", "83.3 %", "85.0 %", even, "60 %", "73 %"]
    assert pairs["4 of 4"] == ["100.0 %", "100.0 %", "100.0 %", "-", "-", "100 %", "100 %"]
    fast = cells(page, "gpt2-mini: bounds on any speed-up, and speed")
    assert fast["Groups"][-5:] == ["Measured at 1K", "its bound", "Measured at 16K", "its bound", "Paper's speed-up"]
    assert fast["2 of 4"] == ["1.20", "1.18", "1.18", "1.67", "1.37", "1.00", "1.25", "8.00", "1.25", "8.00", "2.0"]
    quality = cells(page, "gpt2-mini: perplexity over the pretrained model's")
    assert [quality[f"{k} of 4"][0] for k in (1, 2, 3, 4)] == ["no", "no", "yes", "yes"]
    assert quality["4 of 4"][1:] == ["1.000 ± 0.000", "-", "1.103", "1.000"]
    assert quality["1 of 4"][2].startswith(f"{math.exp(0.3):.3f}")
    assert "prints 47.2 there against 42.8 pretrained" in page
    assert (tmp_path / "out.tex").read_text().count(r"\begin{tabular}") == 3


def test_the_csv_holds_what_is_counted_and_timed(tmp_path):
    known = experiment()
    write_results(tmp_path, known, SHIFTS)
    topk.write("joined", known.tables["joined"], known, tmp_path, tmp_path / "out")
    with (tmp_path / "out.csv").open() as file:
        lines = list(csv.DictReader(file))
    values = {(line["row"], line["metric"]): line["value"] or line["paper"] for line in lines}
    assert float(values["Even groups, 2 of 4", "far_pairs_kept"]) == pytest.approx(5 / 6)
    assert float(values["Even groups, 2 of 4", "bound"]) == pytest.approx(1.2)
    assert float(values["Paper: GPT-2 124M, 2 of 4", "bound_of_its_pairs"]) == pytest.approx(1 / 0.6)
    assert float(values["Paper: GPT-2 124M, 4 of 4", "speedup"]) == 1.0
    assert {line["result"] for line in lines if line["metric"] == "speedup" and line["value"]} == {speed.RESULT}


def test_the_figure_draws_ours_the_bounds_and_the_papers(tmp_path, monkeypatch):
    known = experiment()
    write_results(tmp_path, known, SHIFTS)
    drawn = []
    monkeypatch.setattr(topk_figure, "save", lambda canvas, prefix: drawn.append(canvas))
    topk_figure.write("joined", known.figures["joined"], known, tmp_path, tmp_path / "out")
    pairs, fast, quality = drawn[0].axes
    curves = [[list(line.get_ydata()) for line in axes.lines] for axes in (pairs, fast, quality)]
    assert pytest.approx([0.25, 5 / 6, 1, 1]) in curves[0]
    assert [0.3, 0.85, 1.0] in curves[0] and [0.26, 0.6, 1.0, 1.0] in curves[0]
    assert pytest.approx([4, 1.2, 1, 1]) in curves[1] and [4.0, 1.0, 4 / 9, 0.25] in curves[1]
    assert [4.0, 2.0, 1.3, 1.0] in curves[1] and [4.0, 1.25, 1.0, 1.0] in curves[1]
    assert pytest.approx([82.9 / 42.8, 41.3 / 42.8, 47.2 / 42.8, 47.2 / 42.8]) in curves[2]
    assert "16K tokens" in fast.get_ylabel()
    plt.close(drawn[0])


def test_figure_files_are_the_same_each_time_and_what_is_missing_is_named(tmp_path, monkeypatch):
    known = experiment()
    write_results(tmp_path, known, SHIFTS)
    for name in ("first", "second"):
        topk_figure.write("joined", known.figures["joined"], known, tmp_path, tmp_path / name)
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()
    (tmp_path / "perplexity/gpt2-mini/austen/focus/hard-k2/seed0.json").unlink()
    with pytest.raises(UserError, match="expected the result of Focus, hard k=2 on gpt2-mini, found none"):
        topk.write("joined", known.tables["joined"], known, tmp_path, tmp_path / "out")
    topk.write("joined", known.tables["joined"], known, tmp_path, tmp_path / "out", partial=True)
    page = (tmp_path / "out.md").read_text()
    assert "Focus, hard k=2: not run: no perplexity/gpt2-mini/austen/focus/hard-k2/seed0.json." in page
    assert cells(page, "gpt2-mini: far pairs kept")["2 of 4"][3:5] == ["-", "-"]
    said = []
    monkeypatch.setattr("matplotlib.figure.Figure.supxlabel", lambda self, text, **_: said.append(text))
    topk_figure.write("joined", known.figures["joined"], known, tmp_path, tmp_path / "part", partial=True)
    assert "Not run: Focus, hard k=2 on gpt2-mini." in said[0].replace("\n", " ")


def test_rows_must_have_one_number_of_groups(tmp_path):
    known = experiment([*hard("focus", 1), *hard("focus-k8", 1)])
    write_results(tmp_path, known)
    for module, place in ((topk, "tables"), (topk_figure, "figures")):
        with pytest.raises(UserError, match=rf"{place}.joined.rows: expected hard rows .* got K of \[4, 8\]"):
            module.write("joined", getattr(known, place)["joined"], known, tmp_path, tmp_path / "out")


def test_it_is_made_only_where_such_attention_is_timed():
    known = experiment()
    assert known.made(known.tables["joined"])
    untimed = experiment(speed=known.speed.model_dump() | {"membership_lengths": []})
    assert not untimed.made(untimed.tables["joined"])
    with pytest.raises(ValidationError, match=r"figures.joined.rows: expected a row of kind pretrained"):
        wrong = known.model_dump()
        wrong["figures"]["joined"]["rows"] = hard("focus", 1)
        Experiment.model_validate(wrong)
