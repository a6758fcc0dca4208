"""The command line: exit codes, streams, and that each command hands its arguments on."""

import errno
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from focus import cli, jobs, scales
from focus.config import AttentionBenchmark
from focus.errors import UserError

BASE = Path(__file__).parents[1] / "config" / "config.yaml"


@pytest.fixture
def call(monkeypatch, capsys):
    """Run `focus ARGUMENTS`; return (exit code, standard output, standard error)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["focus", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def fake(monkeypatch):
    """Put a module of the given functions in a focus module's place."""

    def replace(name, **functions):
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        package, _, attribute = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(package), attribute, module, raising=False)

    return replace


def test_the_users_mistake_is_one_line_and_exit_code_2(call, tmp_path):
    code, out, err = call("config", "check", BASE, tmp_path / "absent.yaml")
    assert code == 2
    assert out == ""
    assert err == f"focus: error: {tmp_path}/absent.yaml: expected a config file, got No such file or directory\n"


def test_check_says_what_is_valid(call):
    code, out, err = call("config", "check", BASE)
    assert (code, err) == (0, "")
    assert out.startswith("laptop: ")


def test_check_lays_an_overlay_over_the_default_scale(call, monkeypatch, tmp_path):
    """As a run does: from this folder's config/config.yaml, whichever of the files is named."""
    monkeypatch.chdir(BASE.parents[1])
    for files in (["config/smoke.yaml"], ["config/config.yaml", "config/smoke.yaml"]):
        expected = "smoke: the settings of config/config.yaml + config/smoke.yaml are valid\n"
        assert call("config", "check", *files) == (0, expected, "")
    (tmp_path / "bad.yaml").write_text("sedes: [1]")
    problem = "sedes: there is no such key; did you mean seeds?"
    for command in (["config", "check"], ["cost"]):
        assert call(*command, tmp_path / "bad.yaml") == (2, "", f"focus: error: {tmp_path}/bad.yaml: {problem}\n")
        code, out, err = call(*command, tmp_path / "none.yaml")
        assert (code, out) == (2, "")
        assert err == f"focus: error: {tmp_path}/none.yaml: expected a config file, got No such file or directory\n"


def test_cost_takes_a_scale_by_its_name_and_keeps_the_page(call, monkeypatch, tmp_path):
    monkeypatch.chdir(BASE.parents[1])
    missing = "focus: error: config/none.yaml: expected a config file, got No such file or directory\n"
    assert call("cost", "--scale", "none") == (2, "", missing)
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "# the page\n", "progress")

    monkeypatch.setattr(subprocess, "run", run)
    assert call("cost", "--scale", "paper", "--output", tmp_path / "kept/cost.md") == (0, "# the page\n", "")
    assert commands[0][-2:] == ["--configfile", "config/paper.yaml"]
    assert (tmp_path / "kept/cost.md").read_text() == "# the page\n"


def test_check_elsewhere_needs_a_whole_scale_and_says_so(call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("config", "check", BASE.parent / "smoke.yaml")
    assert (code, out) == (2, "")
    assert "smoke.yaml: expected a whole scale, or config/config.yaml in this folder to lay it over, got neither" in err
    assert "schema_version" in err and err.count("\n") == 1
    assert call("config", "check", BASE)[0] == 0
    assert call("config", "check", BASE, BASE.parent / "smoke.yaml")[0] == 0
    code, _, err = call("cost")
    assert (code, err) == (
        2,
        "focus: error: config/config.yaml: expected a config file, got No such file or directory\n",
    )


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "expected a mapping of keys, got nothing but comments"),
        ("# later\n", "expected a mapping of keys, got nothing but comments"),
        ("- 1", "expected a mapping of keys, got list"),
        ("a: [1", "expected YAML, line 1, column 6: expected ',' or ']'"),
    ],
)
def test_a_file_that_is_no_scale_is_one_line(call, monkeypatch, tmp_path, text, got):
    monkeypatch.chdir(BASE.parents[1])
    (tmp_path / "over.yaml").write_text(text)
    code, out, err = call("config", "check", tmp_path / "over.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"focus: error: {tmp_path}/over.yaml: {got}")


def test_schema_is_printed(call):
    assert json.loads(call("config", "schema")[1])["title"] == "Experiment"


@pytest.mark.parametrize("kind", ["model", "corpus", "benchmark", "tagger"])
def test_fetch_writes_the_manifest(call, fake, tmp_path, kind):
    module = {"model": "models", "corpus": "corpora", "benchmark": "benchmarks", "tagger": "taggers"}[kind]
    fake(f"focus.{module}", **{f"fetch_{kind}": lambda name: {"name": name}})
    assert call("fetch", kind, "some", "--output", tmp_path / "a/b.json")[0] == 0
    assert json.loads((tmp_path / "a/b.json").read_text()) == {"name": "some"}


def test_a_failed_fetch_leaves_no_manifest(call, fake, tmp_path):
    def fail(name):
        raise UserError(f"{name}: no source could be reached")

    fake("focus.models", fetch_model=fail)
    code, _, err = call("fetch", "model", "some", "--output", tmp_path / "b.json")
    assert (code, err) == (2, "focus: error: some: no source could be reached\n")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(call, fake, tmp_path):
    def fail(name):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "big"))

    fake("focus.models", fetch_model=fail)
    code, _, err = call("fetch", "model", "some", "--output", tmp_path / "b.json")
    assert code == 2
    assert err == f"focus: error: {tmp_path}/big: expected to write or read it, got: No space left on device\n"


def test_other_failures_keep_their_traceback(monkeypatch, fake):
    def fail(name):
        raise ZeroDivisionError

    fake("focus.models", fetch_model=fail)
    monkeypatch.setattr(sys, "argv", ["focus", "fetch", "model", "some", "--output", "unused"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_downstream_hands_on_its_job_and_names_benchmarks_by_task(call, fake):
    seen = {}
    fake("focus.evaluation.downstream", run=lambda job, **paths: seen.update(job=job, **paths))
    job = jobs.downstream_job(scales.load([BASE]), "gpt2-mini", "austen", "window", "full", 0)
    arguments = ["--job", job.model_dump_json(), "--model", "m.json", "--output", "o.json"]
    assert call("downstream", "b/piqa.json", "b/lambada.json", *arguments)[0] == 0
    assert seen == {
        "job": job,
        "model": Path("m.json"),
        "benchmarks": {"piqa": Path("b/piqa.json"), "lambada": Path("b/lambada.json")},
        "weights": None,
        "output": Path("o.json"),
    }


def test_generate_hands_on_its_job(call, fake):
    seen = {}
    fake("focus.evaluation.generation", run=lambda job, **paths: seen.update(job=job, **paths))
    job = jobs.generation_job(scales.load([BASE]), "gpt2-mini", "austen", "focus", "hard-k1-t2048", 0)
    assert (job.attention, job.top_k) == ("hard", 1)
    arguments = ["--job", job.model_dump_json(), "--model", "m.json", "--weights", "w", "--output", "o.json"]
    assert call("generate", "b/gsm8k.json", *arguments)[0] == 0
    paths = {"model": "m.json", "benchmark": "b/gsm8k.json", "weights": "w", "output": "o.json"}
    assert seen == {"job": job} | {name: Path(path) for name, path in paths.items()}


def test_long_inputs_and_recall_hand_on_their_jobs(call, fake):
    seen, cell = {}, ("gpt2-mini", "austen", "focus", "hard-k2", 0)
    options = ["--model", "m.json", "--corpus", "c.json", "--weights", "w", "--output", "o.json"]
    paths = {
        name: Path(path) for name, path in zip(("model", "corpus", "weights", "output"), options[1::2], strict=True)
    }
    fake("focus.evaluation.long_inputs", run=lambda job, **given: seen.update(job=job, **given))
    job = jobs.long_inputs_job(scales.load([BASE]), *cell)
    assert call("long-inputs", "b/piqa.json", "b/lambada.json", "--job", job.model_dump_json(), *options)[0] == 0
    benchmarks = {task: Path(f"b/{task}.json") for task in ("piqa", "lambada")}
    assert seen == {"job": job, "benchmarks": benchmarks} | paths
    seen.clear()
    fake("focus.evaluation.recall", run=lambda job, **given: seen.update(job=job, **given))
    job = jobs.recall_job(scales.load([BASE]), *cell)
    assert (job.attention, job.top_k) == ("hard", 2)
    assert call("recall", "--job", job.model_dump_json(), *options)[0] == 0
    assert seen == {"job": job} | paths


def test_groups_hand_on_their_job_and_the_result(call, fake):
    seen = {}
    fake("focus.groups", run=lambda job, **paths: seen.update(job=job, **paths))
    groups = "groups={model: gpt2-mini, corpus: austen, method: focus}"
    job = jobs.groups_job(scales.load([BASE], [groups]))
    manifests = ["--model", "m.json", "--corpus", "c.json", "--tagger", "t.json"]
    arguments = ["--job", job.model_dump_json(), *manifests, "--weights", "w", "--output", "o.json"]
    assert call("groups", "analyse", *arguments)[0] == 0
    paths = {"model": "m.json", "corpus": "c.json", "tagger": "t.json", "weights": "w", "output": "o.json"}
    assert seen == {"job": job} | {name: Path(path) for name, path in paths.items()}
    for command, module in {"table": "groups", "figure": "groups_figure", "page": "groups_page"}.items():
        written = []
        fake(f"focus.paper.{module}", write=lambda *given, written=written: written.extend(given))
        assert call("groups", command, "--result", "r.json", "--output", "t/groups")[0] == 0
        assert written == [Path("r.json"), Path("t/groups")]


def test_timing_takes_settings_and_prints_the_ratios(call, fake):
    seen = []
    fake("focus.benchmark", run=lambda job, path: seen.append(job))
    fake("focus.paper.speed", text=lambda table, path: f"{table} of {path.name}")
    code, out, _ = call("bench", "attention", "--length", 64, "--length", 128, "--groups", 2, "--seconds", 0.5)
    assert (code, out) == (0, "table6 of attention.json\n")
    assert seen[0] == AttentionBenchmark(lengths=[64, 128], groups=[2], seconds=0.5, memory_lengths=[128])
    job = scales.load([BASE]).speed.attention
    assert call("bench", "attention", "--job", job.model_dump_json(), "--output", "o.json")[:2] == (0, "")
    assert seen[1] == job


def test_tables_get_their_exhibit(call, fake):
    seen = []
    fake("focus.paper.tables", write=lambda *arguments: seen.extend(arguments))
    experiment = scales.load([BASE])
    scale = experiment.model_dump_json()
    assert call("table", "table1", "--scale", scale, "--results", "results/laptop", "--output", "t/table1")[0] == 0
    assert seen == ["table1", experiment.tables["table1"], experiment, Path("results/laptop"), Path("t/table1")]


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        ("x", "expected JSON, got: expected value at line 1 column 1"),
        ('{"windw": 1}', "windw: there is no such key; did you mean window?"),
        ("[1]", "expected a mapping of keys, got [1]"),
        ('{"window": -1, "heads": 0}', "window: expected at least 0, got -1 (and 1 more)"),
    ],
)
def test_settings_of_a_timing_that_are_none_are_one_line(call, job, problem):
    assert call("bench", "attention", "--job", job) == (2, "", f"focus: error: --job: {problem}\n")


READING = {
    "pretrain x": ["--weights", "--log", "--checkpoints", "--output", "--result"],
    "train": ["--model", "--corpus", "--weights", "--log", "--checkpoints", "--output"],
    "perplexity": ["--model", "--corpus", "--output"],
    "downstream x": ["--model", "--output"],
    "generate x": ["--model", "--output"],
    "groups analyse": ["--model", "--corpus", "--tagger", "--output"],
    "bench methods": ["--output"],
    "table x": ["--results", "--output"],
    "figure x": ["--results", "--output"],
    "claims x": ["--results", "--output", "--markdown"],
}


@pytest.mark.parametrize("command", READING)
def test_settings_of_a_job_that_are_none_are_one_line(call, command):
    """Every command that takes settings, on a text that is no JSON and on settings of something else."""
    paths = [each for name in READING[command] for each in (name, "unused")]
    option = "--scale" if "--results" in paths else "--job"
    for text, problem in (("x", "expected JSON, got: "), ('{"speed": []}', "speed: ")):
        code, out, err = call(*command.split(), option, text, *paths)
        assert (code, out) == (2, "")
        assert err.startswith(f"focus: error: {option}: {problem}")
        assert err.count("\n") == 1


def test_the_adapter_is_there_without_loading_anything_first():
    code = "import focus; focus.adapter.calibrate; assert set(dir(focus)) >= {'compose', 'load'}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compare_exits_with_1_where_runs_differ(call, tmp_path):
    for name, text in (("one", "a"), ("same", "a"), ("other", "b")):
        (tmp_path / name / "tables").mkdir(parents=True)
        (tmp_path / name / "tables/table1.md").write_text(text)
    code, out, err = call("compare", tmp_path / "one", tmp_path / "same")
    assert (code, out, err) == (0, "identical: 1 files are the same, 0 hold timings and were not compared\n", "")
    code, out, _ = call("compare", tmp_path / "one", tmp_path / "other")
    assert (code, out.splitlines()[0]) == (1, "tables/table1.md: differs")
    code, out, err = call("compare", tmp_path / "one", tmp_path / "none")
    assert (code, err) == (2, f"focus: error: {tmp_path}/none: expected the results of a run, found none\n")
