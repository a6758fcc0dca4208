"""Two runs side by side: what must be the same, what may differ, and that every difference is found."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_results import experiment, write_results, write_speed

from focus.compare import compare
from focus.errors import UserError

ROW = "perplexity/gpt2-mini/austen/focus/soft/seed0.json"


@pytest.fixture
def runs(tmp_path):
    """Two folders of the same results, tables and verdicts."""
    first = tmp_path / "first"
    write_results(first, experiment(), {"focus/soft": 0.1})
    write_speed(first, experiment())
    for name in ("tables/table1.csv", "tables/table1.md", "tables/table6.md", "figures/quality.png", "claims.md"):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text(name)
    claims = [{"id": "a", "metric": "perplexity", "value": 1.0}, {"id": "b", "metric": "speedup", "value": 2.0}]
    (first / "claims.json").write_text(json.dumps({"claims": claims}))
    shutil.copytree(first, tmp_path / "second")
    return first, tmp_path / "second"


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_the_same_run_twice_is_identical(runs):
    found = compare(*runs)
    assert found.differences == []
    assert found.timed == 3
    assert found.same == sum(path.is_file() for path in runs[0].rglob("*.*")) - found.timed
    assert found.text() == f"identical: {found.same} files are the same, 3 hold timings and were not compared\n"


@pytest.mark.parametrize(
    ("path", "edit"),
    [
        (ROW, lambda content: content["provenance"].update(seconds=9.9, peak_memory_mib=7, argv=["focus"])),
        (ROW, lambda content: content["metrics"].update(training_seconds=9.9, tokens_per_second=3)),
        ("speed/attention.json", lambda content: content["metrics"]["forward"][0].update(full_ms=1.0)),
        ("claims.json", lambda content: content["claims"][1].update(value=7.0)),
    ],
)
def test_what_the_clock_decides_may_differ(runs, path, edit):
    change(runs[1] / path, edit)
    assert compare(*runs).differences == []


@pytest.mark.parametrize(
    ("path", "edit", "line"),
    [
        (ROW, lambda content: content["metrics"].update(perplexity=1.5), "metrics.perplexity: {} against 1.5"),
        (ROW, lambda content: content["settings"].update(seed=4), "settings.seed: 0 against 4"),
        (ROW, lambda content: content["metrics"]["windows"].pop(), "metrics.windows: "),
        (ROW, lambda content: content["metrics"].pop("loss"), "metrics.loss: "),
        (ROW, lambda content: content["metrics"].update(extra=1), "metrics.extra: nothing against 1"),
        ("claims.json", lambda content: content["claims"][0].update(value=7.0), "claims.0.value: 1.0 against 7.0"),
    ],
)
def test_a_changed_number_is_named(runs, path, edit, line):
    change(runs[1] / path, edit)
    before = json.loads((runs[0] / path).read_text()).get("metrics", {}).get("perplexity")
    [difference] = compare(*runs).differences
    assert difference.startswith(f"{path}: {line.format(json.dumps(before))}")


def test_of_a_csv_only_durations_and_speeds_may_differ(runs):
    table = "tables/table1.csv"
    line = "metric,value,seconds,peak_memory_mib\nperplexity,{},{},{}\ngsm8k_tokens_per_second,{},1,1\n"
    (runs[0] / table).write_text(line.format(3.0, 1.0, 100, 7))
    (runs[1] / table).write_text(line.format(3.0, 2.0, 101, 8))
    assert compare(*runs).differences == []
    (runs[1] / table).write_text(line.format(3.1, 1.0, 100, 7))
    assert compare(*runs).differences == [f"{table}: differs"]


def test_files_that_differ_or_are_missing_are_named(runs):
    first, second = runs
    (second / "tables/table1.csv").write_text("other")
    (second / "figures/quality.png").unlink()
    (first / ROW).unlink()
    assert sorted(compare(*runs).differences) == [
        f"figures/quality.png: only in {first}",
        f"{ROW}: only in {second}",
        "tables/table1.csv: differs",
    ]


def test_another_source_is_named_but_is_no_difference(runs):
    change(runs[1] / ROW, lambda content: content["provenance"].update(code="f" * 64))
    found = compare(*runs)
    assert found.differences == []
    assert found.text().startswith("other code behind 1 of the results\nidentical: ")
    for folder, code in zip(runs, "ab", strict=True):
        (folder / "tables/table1.csv").write_text(f"metric,value,code\nperplexity,1.0,{code}\n")
        (folder / "corpora").mkdir()
        (folder / "corpora/austen.json").write_text(json.dumps({"folder": f"corpora/austen-{code}", "files": {"x": 1}}))
    assert compare(*runs).differences == []
    change(runs[1] / "corpora/austen.json", lambda content: content["files"].update(x=2))
    assert compare(*runs).differences == ["corpora/austen.json: files.x: 1 against 2"]


def test_a_folder_without_results_is_refused(runs, tmp_path):
    for folders in ((runs[0], tmp_path / "none"), (tmp_path / "none", runs[0])):
        with pytest.raises(UserError, match=r"none: expected the results of a run, found none"):
            compare(*folders)


LEAVES = st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abcd"), inner))


@settings(deadline=None)
@given(TREES, TREES)
def test_two_results_are_the_same_exactly_when_their_metrics_are(tmp_path_factory, one, other):
    folders = []
    for name, metrics in (("one", one), ("other", other)):
        folders.append(tmp_path_factory.mktemp(name))
        (folders[-1] / "perplexity").mkdir()
        (folders[-1] / "perplexity/a.json").write_text(json.dumps({"metrics": {"x": metrics}, "provenance": {}}))
    assert bool(compare(*folders).differences) == (one != other)


def test_a_damaged_result_is_one_line(runs):
    (runs[1] / ROW).write_text('{"a":')
    with pytest.raises(UserError, match=r"seed0\.json: expected JSON, got a damaged file"):
        compare(*runs)
