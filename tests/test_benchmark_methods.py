"""Every method's attention against full attention: what is timed, once, by which code, and what is left out."""

import time

import pytest
import torch
from paper_results import experiment

from focus import benchmark_methods, jobs
from focus.benchmark_methods import distinct, expected, run
from focus.config import Experiment, variant_of
from focus.methods import METHODS
from focus.methods.structural import LayerState, Masked
from focus.provenance import read_result

TRADEOFF = {
    "title": "Quality against speed",
    "corpus": "austen",
    "shows": "tradeoff",
    "rows": [
        {"method": "pretrained"},
        {"method": "full-finetuning"},
        {"method": "window"},
        {"method": "window-sinks"},
        {"method": "focus", "attention": "soft"},
        {"method": "focus", "attention": "hard", "top_k": 1},
        {"method": "focus-untrained", "attention": "hard", "top_k": 1},
        {"method": "focus", "attention": "hard", "top_k": 2},
    ],
}


def settings(**speed) -> Experiment:
    base = experiment()
    timed = base.speed.model_dump() | {"method_lengths": [256], "window": 16, "heads": 2, "head_dim": 8} | speed
    return experiment(speed=timed, figures=experiment().model_dump()["figures"] | {"figure1": TRADEOFF})


def names(rows) -> list[str]:
    return [f"{row.method}/{variant_of(row.attention, row.top_k)}" for row in rows]


@pytest.fixture
def measured(tmp_path):
    def measure(**speed):
        run(jobs.methods_job(settings(**speed)), tmp_path / "methods.json")
        return read_result(tmp_path / "methods.json")

    return measure


def test_the_job_holds_each_row_with_the_timings_own_window_and_no_training():
    job = jobs.methods_job(settings())
    assert names(job.rows) == [
        *("pretrained/full", "full-finetuning/full", "window/full", "window-sinks/full", "focus/soft"),
        *("focus/hard-k1", "focus-untrained/hard-k1", "focus/hard-k2"),
    ]
    assert {row.settings.window for row in job.rows} == {16}
    assert {row.settings.adapter.window for row in job.rows if row.settings.kind == "focus"} == {16}
    assert all(row.settings.training is None or not row.settings.training.phases for row in job.rows)
    again = settings()
    longer = again.methods["focus"].training.model_copy(update={"phases": []})
    methods = again.methods | {"focus": again.methods["focus"].model_copy(update={"training": longer})}
    assert jobs.methods_job(again.model_copy(update={"methods": methods})) == job


def test_rows_with_the_same_attention_are_timed_once():
    groups = distinct(jobs.methods_job(settings()).rows)
    assert [names(rows) for rows in groups.values()] == [
        ["pretrained/full", "full-finetuning/full"],
        ["window/full"],
        ["window-sinks/full"],
        ["focus/soft"],
        ["focus/hard-k1", "focus-untrained/hard-k1"],
        ["focus/hard-k2"],
    ]


def test_a_run_times_every_case_at_every_length(measured):
    result = measured(method_lengths=[512, 256])
    cases = result["metrics"]["cases"]
    assert [(case["length"], case["rows"][0]) for case in cases] == [
        (length, name)
        for length in (256, 512)
        for name in (
            *("pretrained/full", "window/full", "window-sinks/full", "focus/soft"),
            *("focus/hard-k1", "focus/hard-k2"),
        )
    ]
    assert result["experiment"] == "methods"
    assert result["provenance"]["threads"] == 1
    for case in cases:
        if case["rows"][0] == "pretrained/full":
            assert (case["speedup"], case["how"], case["reason"]) == (1.0, "full attention", None)
        elif case["rows"] == ["focus/soft"]:
            assert case["reason"] == "not run: quadratic memory"
            assert "speedup" not in case
        else:
            assert case["speedup"] == pytest.approx(case["full_ms"] / case["ms"])
            assert case["repeats"] == settings().speed.method_rounds
    named = {case["rows"][0]: case for case in cases if case["length"] == 512}
    assert named["window/full"]["how"].startswith("window, ")
    assert named["window/full"]["pairs_kept"] < named["window-sinks/full"]["pairs_kept"] < 0.1
    assert named["focus/hard-k2"]["how"].startswith("focus hard, ")


def test_the_exponential_gate_runs_in_linear_memory(tmp_path):
    job = jobs.methods_job(settings())
    rows = [row for row in job.rows if row.attention == "soft"]
    adapter = rows[0].settings.adapter.model_copy(update={"gate": "exponential"})
    soft = rows[0].model_copy(update={"settings": rows[0].settings.model_copy(update={"adapter": adapter})})
    run(job.model_copy(update={"rows": [soft]}), tmp_path / "methods.json")
    (case,) = read_result(tmp_path / "methods.json")["metrics"]["cases"]
    assert case["speedup"] > 0


class Slow(Masked):
    """Every pair, as slowly as a test can bear; takes the place of a kind that the config knows."""

    name = "window"

    def __init__(self):
        self.calls = []

    def layer_state(self, settings, *, window, heads, head_dim, generator):
        state = LayerState(settings, window)
        state.register_buffer("random", torch.randn(heads, head_dim, generator=generator))
        return state

    def allowed(self, call, rows):
        self.calls.append((tuple(call.query.shape), tuple(call.state.random.shape), call.state.training))
        time.sleep(0.01)
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setitem(METHODS, "window", Slow())
    # The thread's own time does not pass while it sleeps.
    monkeypatch.setattr(benchmark_methods.Place, "clock", lambda place, threads: time.perf_counter)
    return METHODS["window"]


def test_any_structural_method_runs_its_own_attend(measured, slow):
    cases = measured()["metrics"]["cases"]
    case = next(case for case in cases if case["rows"] == ["window/full"])
    assert case["how"] == "window, masked, dense"
    assert case["ms"] >= 10
    assert case["speedup"] < 1
    assert case["pairs_kept"] is None
    assert set(slow.calls) == {((1, 2, 256, 8), (2, 8), False)}
    assert len(slow.calls) == 2 * settings().speed.method_rounds


def test_what_would_take_too_long_is_not_run_and_says_so(measured, slow):
    cases = measured(method_lengths=[512, 4096], method_seconds=0.05, method_rounds=20)["metrics"]["cases"]
    short, long = (case for case in cases if case["rows"] == ["window/full"])
    assert 1 <= short["repeats"] < 20
    assert long["reason"].startswith("not run: expected to take ")
    assert "speedup" not in long
    assert max(shape[2] for shape, *_ in slow.calls) == 512


def test_a_method_that_needs_too_much_memory_spares_the_others(measured, monkeypatch):
    class Greedy(Slow):
        def attend(self, call):
            return torch.empty(2**50)

    monkeypatch.setitem(METHODS, "window", Greedy())
    cases = {case["rows"][0]: case for case in measured()["metrics"]["cases"]}
    assert cases["window/full"]["reason"] == "not run: needs more memory than the machine has"
    assert cases["focus/hard-k1"]["speedup"] > 0


def test_expected_seconds_grow_as_they_grew_but_at_most_quadratically():
    assert expected([], 4096) == 0.0
    assert expected([(1024, 1.0)], 4096) == pytest.approx(16.0)
    assert expected([(256, 0.5), (1024, 2.0)], 4096) == pytest.approx(8.0)
    assert expected([(256, 0.001), (1024, 2.0)], 4096) == pytest.approx(32.0)
    assert expected([(256, 2.0), (1024, 2.0)], 4096) == pytest.approx(8.0)
