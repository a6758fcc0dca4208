"""Parts of a gain and changes of a lead: against resampling, by known shifts, and in the tables."""

import io
import math

import numpy
import pandas
import pytest
from paper_results import experiment, scored, write_results

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.method_config import make_method
from focus.paper import statistics, tables

TUNING = {"phases": [{"trains": "everything", "steps": 3, "learning_rate": 1e-5}]}
SCALES = {"phases": [{"trains": "scales", "steps": 9, "learning_rate": 1e-2}]}
HARD = {"attention": "hard", "top_k": 1}
ROWS = {
    "controls": [
        *({"method": "pretrained"}, {"method": "window"}, {"method": "window-sinks"}, {"method": "far-scale"}),
        *({"method": "fixed", **HARD}, {"method": "fixed", "attention": "hard", "top_k": 2}),
        *({"method": "focus-untrained", **HARD}, {"method": "focus", "attention": "soft"}),
        *({"method": "focus", **HARD}, {"method": "focus", "attention": "hard", "top_k": 2}),
    ],
    "absorption": [
        *({"method": "pretrained"}, {"method": "window-sinks"}, {"method": "window-sinks-finetuned"}),
        *({"method": name, **HARD} for name in ("focus-hard", "fixed", "focus-hard-finetuned", "fixed-finetuned")),
    ],
}
SHIFTS = {
    **{"window/full": 0.9, "window-sinks/full": 0.2, "far-scale/full": -0.01, "fixed/hard-k1": 0.14},
    **{"fixed/hard-k2": 0.05, "focus-untrained/hard-k1": 0.11, "focus/soft": -0.04, "focus/hard-k1": 0.05},
    **{"focus/hard-k2": 0.02, "focus-hard/hard-k1": 0.04, "focus-hard-finetuned/hard-k1": -0.1},
    **{"fixed-finetuned/hard-k1": -0.07, "window-sinks-finetuned/full": -0.02},
}
COLUMNS = {"controls": ["perplexity", "ratio", "gain"], "absorption": ["perplexity", "absorption"]}


def settings(**changes) -> Experiment:
    base = experiment()
    fixed = make_method(kind="fixed_groups", label="Fixed", by="token")
    tuned = fixed.model_copy(
        update={"label": "Fixed, tuned", "training": base.methods["window-sinks-finetuned"].training}
    )
    hard = base.methods["focus-hard"]
    phases = [*hard.training.phases, *tuned.training.phases]
    methods = base.methods | {
        "far-scale": make_method(kind="far_scale", label="Far scale", training=SCALES),
        "fixed": fixed,
        "fixed-finetuned": tuned,
        "focus-hard-finetuned": hard.model_copy(
            update={"label": "Learned, tuned", "training": hard.training.model_copy(update={"phases": phases})}
        ),
    }
    shown = {
        name: Exhibit(title=name, corpus="austen", models=["gpt2-mini"], rows=rows, columns=COLUMNS[name])
        for name, rows in ROWS.items()
    }
    return base.model_copy(
        update={"methods": methods, "tables": shown, "figures": {}, "models": ["gpt2-mini"]} | changes
    )


def made(root, experiment: Experiment, table: str) -> tuple[pandas.DataFrame, str]:
    tables.write(table, experiment.tables[table], experiment, root, root / table)
    page = (root / f"{table}.md").read_text()
    return pandas.read_csv(io.StringIO((root / f"{table}.csv").read_text())), page


def values(table: pandas.DataFrame, metric: str) -> dict[str, float]:
    found = table[table.metric == metric]
    return {
        f"{method}/{variant}": value
        for method, variant, value in zip(found.method, found.variant, found.value, strict=True)
    }


def test_parts_of_the_gain_are_those_of_the_shifts(tmp_path):
    write_results(tmp_path, settings(), SHIFTS)
    table, page = made(tmp_path, settings(), "controls")
    expected = {
        **{"far-scale/full": 0.01 / 0.04, "focus/soft": 1.0, "fixed/hard-k1": 0.06 / 0.15, "focus/hard-k1": 1.0},
        **{"fixed/hard-k2": 0.15 / 0.18, "focus-untrained/hard-k1": 0.09 / 0.15, "focus/hard-k2": 1.0},
    }
    assert values(table, "part_of_gain") == pytest.approx(expected)
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    cells = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in lines}
    assert cells["Fixed, hard k=1"] == "40 ± 0 %" and cells["Focus, hard k=1"] == "100.0 %"
    assert cells["Pretrained"] == cells["Window only"] == "-"
    assert "from the window with sinks to the first row of trained centroids" in page


def test_without_a_gain_there_are_no_parts(tmp_path):
    write_results(tmp_path, settings(), SHIFTS | {"focus/soft": 0.01, "focus/hard-k2": 0.19}, uneven=5.0)
    table, page = made(tmp_path, settings(), "controls")
    assert values(table, "part_of_gain").keys() == set()
    assert page.count(" no gain |") == 7


def test_the_lead_of_learned_groups_and_how_it_changes(tmp_path):
    write_results(tmp_path, settings(), SHIFTS)
    table, page = made(tmp_path, settings(), "absorption")
    leads = {
        **{"pretrained/full": -0.04, "window-sinks/full": 0.16, "window-sinks-finetuned/full": 0.08},
        **{"fixed/hard-k1": 0.1, "fixed-finetuned/hard-k1": 0.03},
    }
    assert values(table, "lead_of_learned") == pytest.approx({name: math.exp(each) for name, each in leads.items()})
    changes = {"fixed-finetuned/hard-k1": 0.03 - 0.1, "window-sinks-finetuned/full": 0.08 - 0.16}
    assert values(table, "change_of_lead") == pytest.approx({name: math.exp(each) for name, each in changes.items()})
    line = next(line for line in page.splitlines() if line.startswith("| Fixed, tuned"))
    assert [cell.strip()[:5] for cell in line.split("|")[-3:-1]] == ["1.030", "0.932"]


def test_seeds_widen_the_error(tmp_path):
    several = settings(seeds=[0, 1])
    write_results(tmp_path, several, SHIFTS | {"fixed/hard-k1/1": 0.08})
    table, page = made(tmp_path, several, "controls")
    found = table[(table.metric == "part_of_gain") & (table.method == "fixed") & (table.variant == "hard-k1")]
    assert list(found.value) == pytest.approx([0.4, 0.8])
    assert "60 ± 20 %" in page


def draws(count: int, shift: float, source: numpy.random.Generator) -> list[dict]:
    windows = scored(windows=count)
    noise = source.normal(shift, 0.04, count)
    return [
        window | {"loss_sum": window["loss_sum"] + 100 * extra} for window, extra in zip(windows, noise, strict=True)
    ]


def test_the_error_of_a_part_is_its_spread_over_resampled_windows():
    source = numpy.random.default_rng(0)
    ours, whole, reference = (draws(60, shift, source) for shift in (0.1, 0.0, 0.2))
    value, error = statistics.part(ours, whole, reference)
    mean = {name: numpy.mean([each["loss_sum"] for each in windows]) for name, windows in
            (("ours", ours), ("whole", whole), ("reference", reference))}  # fmt: skip
    assert value == pytest.approx((mean["ours"] - mean["reference"]) / (mean["whole"] - mean["reference"]))
    found = []
    for _ in range(400):
        picks = source.integers(0, 60, 60)
        chosen = ([windows[pick] for pick in picks] for windows in (ours, whole, reference))
        found.append(statistics.part(*chosen)[0])
    assert error == pytest.approx(numpy.std(found), rel=0.15)


def test_a_contrast_is_a_sum_of_log_perplexities():
    source = numpy.random.default_rng(1)
    rows = [draws(9, shift, source) for shift in (0.1, 0.3, -0.2)]
    weights = (1.0, -2.0, 0.5)
    logs = [math.log(statistics.perplexity(windows)[0]) for windows in rows]
    found = statistics.contrast(list(zip(weights, rows, strict=True)))
    assert found.log == pytest.approx(sum(weight * log for weight, log in zip(weights, logs, strict=True)))
    sums = [
        sum(w * window["loss_sum"] for w, window in zip(weights, same, strict=True)) / 100
        for same in zip(*rows, strict=True)
    ]
    assert found.log_error == pytest.approx(numpy.std(sums, ddof=1) / 3)
    with pytest.raises(UserError, match="expected the same windows"):
        statistics.contrast([(1.0, rows[0]), (1.0, rows[1]), (1.0, rows[2][:8])])
