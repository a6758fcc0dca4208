"""What the rules plan and rerun, with a `focus` that only writes its outputs."""

import os
import re
import signal
import time

import pytest
from conftest import ROOT, trained

from focus import scales

BAD = {
    "methods: {focus: {adapter: {top_k: 5}}}": "methods.focus.adapter: top_k must be at most groups (4), got 5",
    "methods: {focus: {adapter: {temprature: 1.0}}}": "methods.focus.adapter.temprature: there is no such key",
    "methods: {focus: {training: {clip: 1e-3}}}": "methods.focus.training.clip: expected a valid number, got '1e-3'",
    "model_settings: {gpt2-mini: {window: 1024}}": "model_settings.gpt2-mini: window must be below context (1024)",
    "models: [gpt2-mino]": "models: expected a key of model_settings",
    "seeds: 0": "seeds: expected a valid list, got 0",
}


def scale(*overlays):
    """The laptop scale, or one laid over it."""
    return scales.load([ROOT / f"config/{name}.yaml" for name in ("config", *overlays)])


PAGES = {"all", "report_page"}
"""What is made again whenever anything is."""


def edit(path, change):
    path.write_text(change(path.read_text()))


def test_nothing_to_do_after_a_full_run(finished):
    assert finished.planned() == {}


def test_a_comment_in_the_readme_reruns_nothing(finished):
    with (finished.folder / "README.md").open("a") as readme:
        readme.write("<!-- a comment -->\n")
    assert finished.planned() == {}


def test_a_touched_source_file_reruns_nothing(finished):
    (finished.folder / "src/focus/config.py").touch()
    assert finished.planned() == {}


@pytest.mark.parametrize(
    ("module", "rules"),
    [
        ("paper/tables.py", {"table", "figure"}),
        ("paper/figures.py", {"figure", "speed_figure", "groups_figure", "bits_figure"}),
        ("paper/tradeoff.py", {"figure"}),
        ("paper/speed.py", {"table", "speed_table", "speed_figure", "figure", "claims"}),
        ("benchmark.py", {"bench_attention", "speed_table", "speed_figure", "table", "figure", "claims"}),
        ("paper/claims.py", {"claims"}),
        ("cli.py", set()),
    ],
)
def test_a_changed_source_file_reruns_the_rules_that_use_it(finished, module, rules):
    source = finished.folder / "src/focus" / module
    before = source.read_text()
    edit(source, lambda text: text + "\n# changed\n")
    try:
        assert set(finished.planned()) - PAGES == rules
    finally:
        source.write_text(before)
    assert finished.planned() == {}


def test_changed_training_code_leaves_fetched_models_and_untrained_rows_alone(finished):
    source = finished.folder / "src/focus/training.py"
    before = source.read_text()
    edit(source, lambda text: text + "\n# changed\n")
    try:
        planned = finished.planned()
    finally:
        source.write_text(before)
    assert planned["train"] == len(trained(scale()))
    assert not {"fetch_model", "fetch_corpus", "fetch_benchmark"} & set(planned)


def test_a_changed_setting_reruns_what_reads_it(finished):
    planned = finished.planned("--config", "methods={window: {sinks: 1}}")
    assert planned["perplexity"] == 2
    assert planned["downstream"] == 1
    assert "train" not in planned


def test_a_table_can_ask_for_written_answers(finished):
    planned = finished.planned("--config", "tables={headline: {generation: true}}")
    assert planned["generation"] == 1
    assert "train" not in planned


def resources(checkout, *options):
    """{last wildcards of each perplexity job: (mem_mb, gpus, runtime)}: a rule without a message is shown with its
    resources."""
    rule = checkout.folder / "workflow/rules/evaluation.smk"
    edit(rule, lambda text: re.sub(r"    message:\n.*\n", "", text))
    output = checkout.run(*options, "--dry-run", "--quiet", "host")
    jobs = re.findall(r"rule perplexity:.*?wildcards: (.*?), seed=0\n.*?resources: (.*?)\n", output, re.DOTALL)
    names = ("mem_mb", "gpu", "runtime")
    found = {row: dict(part.split("=") for part in parts.split(", ")) for row, parts in jobs}
    return {row: tuple(int(parts[name]) for name in names) for row, parts in found.items()}


def test_memory_grows_with_a_rows_own_context_and_no_gpu_is_asked_for(checkout):
    rows = ", ".join(
        f"{{method: {method}, attention: {attention}, context: {context}}}"
        for method, attention in (("pretrained", "full"), ("focus", "soft"))
        for context in (256, 4096)
    )
    (checkout.folder / "over.yaml").write_text(f"tables: {{longcontext: {{rows: [{rows}]}}}}")
    found = resources(checkout, "longcontext", "--configfile", "over.yaml")
    start = "model=smollm2-135m-instruct, corpus=austen, method"
    least = (3000, 0, 15)
    assert found.pop(f"{start}=focus, variant=soft-t4096")[0] > 3500
    assert found == {
        f"{start}={row}": least
        for row in ("pretrained, variant=full-t256", "pretrained, variant=full-t4096", "focus, variant=soft-t256")
    }


def test_the_paper_scale_asks_for_as_many_gpus_as_hold_a_model(checkout):
    found = resources(checkout, "table2", "--configfile", "config/paper.yaml")
    rows = {row: asked for row, asked in found.items() if "method=pretrained" in row}
    gpus = {row.split(",")[0].removeprefix("model="): asked[1] for row, asked in rows.items()}
    assert gpus == dict.fromkeys(gpus, 1) | {"llama2-70b": 2} and len(gpus) == 7
    assert min(asked[2] for asked in rows.values()) >= 15


def test_a_slice_covers_one_model(checkout):
    planned = checkout.planned("--config", "models=[gpt2-mini]")
    assert planned["train"] == len({cell for cell in trained(scale()) if cell[0] == "gpt2-mini"})
    assert "fetch_model" not in checkout.planned("--config", "models=[gpt2-mini]")
    assert "pretrain" not in checkout.planned("model_smollm2_135m_instruct")


def test_a_changed_speed_setting_times_again_and_leaves_rows_alone(finished):
    planned = set(finished.planned("--config", "speed={seconds: 0.7}"))
    assert planned - PAGES == {"bench_attention", "speed_table", "speed_figure", "claims", "table", "figure"}


def test_a_scale_can_leave_speed_out(checkout):
    planned = checkout.planned("--config", "speed=null")
    assert planned["claims"] == 1
    assert not {"bench_attention", "speed_table", "speed_figure"} & set(planned)


GROUPS = "groups={model: gpt2-mini, corpus: austen, method: focus, passage_tokens: 100}"


def test_the_groups_are_a_target_of_their_own(checkout):
    assert not {"groups_analysis", "fetch_tagger"} & set(checkout.planned("--config", "groups=null"))
    assert "groups_analysis" not in checkout.planned("--config", GROUPS, "models=[smollm2-135m-instruct]")
    checkout.run("groups", "--config", GROUPS)
    results = checkout.folder / "results/laptop"
    for path in ("tables/groups.csv", "tables/groups.tex", "figures/groups.pdf", "figures/groups.html"):
        assert (results / path).stat().st_size
    assert '"top_k":2' in (results / "groups/gpt2-mini/austen/focus/seed0.json").read_text()
    planned = checkout.planned("groups", "--config", GROUPS.replace("100", "50"))
    assert set(planned) - {"groups"} == {"groups_analysis", "groups_table", "groups_figure", "groups_page"}


def test_changed_settings_of_the_groups_leave_everything_else_alone(finished):
    planned = set(finished.planned("--config", GROUPS)) - PAGES
    made = {"groups_analysis", "groups_table", "groups_figure", "groups_page", "claims"}
    assert planned - {"fetch_tagger"} == made


LEAK = """
leak:
  rows: [{model: gpt2-mini, corpus: austen, method: focus}]
  corpora: [essays]
bits: {balances: [sinkhorn, softmax], lengths: [16], trains: [everything], adapter: {groups: 2}}
"""


def test_the_leak_and_the_bits_are_targets_of_their_own(checkout):
    (checkout.folder / "over.yaml").write_text(LEAK)
    over = ("--configfile", "over.yaml")
    assert not {"leak_measure", "bits_train"} & set(checkout.planned("--config", "leak=null", "bits=null"))
    assert "leak_measure" not in checkout.planned(*over, "--config", "models=[smollm2-135m-instruct]")
    checkout.run("leak", "bits", *over)
    results = checkout.folder / "results/laptop"
    for path in ("tables/leak.csv", "tables/leak.tex", "tables/bits.csv", "figures/bits.pdf"):
        assert (results / path).stat().st_size
    assert "corpora/essays.json', '--job'" in (results / "leak/gpt2-mini/austen/focus/seed0.json").read_text()
    assert '"balance":"softmax"' in (results / "bits/softmax/t16/everything/seed0.json").read_text()
    planned = checkout.planned("leak", "bits", *over, "--config", "bits={steps: 5}")
    assert set(planned) - {"leak", "bits"} == {"bits_train", "bits_table", "bits_figure"}


TRADEOFF = """
speed: {method_lengths: [4096]}
figures:
  figure1:
    title: Quality against speed
    corpus: austen
    shows: tradeoff
    rows: [{method: pretrained}, {method: window}, {method: focus, attention: hard, top_k: 1}]
"""


def test_the_figure_of_speed_times_every_method_with_nothing_beside_it(checkout):
    (checkout.folder / "over.yaml").write_text(TRADEOFF)
    scale = ("--configfile", "config/smoke.yaml", "over.yaml")
    assert "bench_methods" not in checkout.planned(*scale, "--config", "speed={method_lengths: []}")
    assert "bench_methods" not in checkout.planned(*scale, "--config", "speed=null")
    checkout.run("figure1", *scale)
    results = checkout.folder / "results/smoke"
    assert "with 2 threads" in (results / "speed/methods.json").read_text()
    assert (results / "figures/figure1.pdf").exists()
    assert checkout.planned("figure1", *scale) == {}
    longer = checkout.planned("figure1", *scale, "--config", "methods={focus: {training: {checkpoint_every: 3}}}")
    assert longer["train"] == 1
    assert "bench_methods" not in longer
    planned = set(checkout.planned("figure1", *scale, "--config", "speed={method_lengths: [1024]}"))
    assert planned - {"figure1"} == {"bench_methods", "figure"}


WORK = {"fetch_model", "fetch_corpus", "fetch_benchmark", "pretrain", "train", "perplexity", "downstream"}
WORK |= {"generation", "fetch_tagger", "groups_analysis", "gate_values", "long_inputs", "recall_tests"}
WORK |= {"leak_measure", "bits_train"}


@pytest.mark.parametrize("scale", ["laptop", "smoke", "overnight", "paper"])
def test_cost_counts_the_jobs_that_a_run_would_start(checkout, scale):
    """Every table, figure and the total; nothing runs."""
    (checkout.folder / "over.yaml").write_text(TRADEOFF)
    files = [] if scale == "laptop" else [f"config/{scale}.yaml"]
    options = ("--configfile", *files, "over.yaml")
    page = checkout.run("cost", *options)
    planned = checkout.planned(*options)
    work = sum(count for rule, count in planned.items() if rule in WORK | {"bench_attention", "bench_methods"})
    assert f"# What the scale {scale} will take" in page
    lines = {cells[1].strip(): cells[2:] for line in page.splitlines() if len(cells := line.split("|")) > 5}
    assert int(lines["All of these, shared jobs once"][0]) == work
    assert {"tables/table1", "figures/figure1", "speed"} <= set(lines)
    planned = checkout.planned("table1", *options)
    assert int(lines["tables/table1"][0]) == sum(count for rule, count in planned.items() if rule in WORK)
    assert [path.name for path in (checkout.folder / "results" / scale).rglob("*.*")] == ["cost.log"]


def test_whole_models_can_be_dropped_and_are_trained_again_only_when_asked_for(checkout):
    """Adapters stay; without the setting all weights do."""
    targets, smoke = ("scratch", "table3"), ("--configfile", "config/smoke.yaml", "over.yaml")
    more = "{method: scratch, context: 64}, {method: lora-r4, context: 64}"
    rows = {"scratch": "{method: scratch}, {method: scratch-focus, attention: soft}", "table3": "{method: lora-r4}"}

    def over(keep, scratch=""):
        tables = [f"{name}: {{rows: [{{method: pretrained}}, {rows[name]}]}}" for name in targets]
        tables[0] = tables[0].replace("]}", f"{scratch}]}}")
        (checkout.folder / "over.yaml").write_text(f"keep_weights: {keep}\ntables:\n  " + "\n  ".join(tables))

    def trained():
        return {path.parts[-3] for path in checkout.folder.glob("results/smoke/training/**/weights")}

    over("small")
    checkout.run(*targets, *smoke)
    assert trained() == {"lora-r4"}
    assert checkout.planned(*targets, *smoke) == {}
    over("all")
    assert checkout.planned(*targets, *smoke) == {}
    over("small", f", {more}")
    planned = checkout.planned(*targets, *smoke)
    assert (planned["train_everything"], planned.get("train")) == (1, None)
    over("all", f", {more}")
    checkout.run(*targets, *smoke)
    assert trained() == {"lora-r4", "scratch"}


def test_snakemakes_report_shows_what_a_partial_run_has_made(checkout):
    scale = ("--configfile", "config/smoke.yaml")
    line = "focus: error: --report: expected tables, figures or claims in results/smoke, found none"
    assert line in checkout.run(*scale, "--report", "report.html", code=2)
    tables = checkout.folder / "results/smoke/tables"
    tables.mkdir(parents=True)
    for suffix in ("csv", "md", "html", "tex"):
        (tables / f"table1.{suffix}").write_text("a table")
    checkout.run(*scale, "--report", "report.html")
    assert "table1.html" in (checkout.folder / "report.html").read_text()


def test_timing_takes_every_core_and_other_jobs_one(finished):
    results = finished.folder / "results/laptop"
    assert "with 2 threads" in (results / "speed/attention.json").read_text()
    assert "with 1 threads" in (results / "perplexity/gpt2-mini/austen/focus/soft/seed0.json").read_text()


def test_figures_are_made_from_result_files_alone(finished):
    for figure in (finished.folder / "results/laptop/figures").iterdir():
        figure.unlink()
    made = {"figure", "speed_figure", "groups_figure", "groups_page", "bits_figure"}
    assert set(finished.planned("figures")) - {"figures"} == made
    finished.run("figures")


def test_the_headline_needs_neither_pretraining_nor_other_methods(checkout):
    planned = checkout.planned("headline")
    assert planned["train"] == 1
    assert "pretrain" not in planned


@pytest.mark.parametrize(("overlay", "line"), BAD.items())
def test_a_bad_config_stops_before_any_job_in_one_line(checkout, overlay, line):
    (checkout.folder / "bad.yaml").write_text(overlay)
    output = checkout.run("--configfile", "bad.yaml", code=2)
    errors = [text for text in output.splitlines() if "error" in text]
    assert len(errors) == 1
    assert errors[0].startswith(f"focus: error: bad.yaml: {line}")
    assert not (checkout.folder / "results").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("models: [a", "expected YAML, line 1, column 11: expected ',' or ']'"),
        ("", "expected a mapping of keys, got nothing but comments"),
        (None, "expected a config file, got No such file or directory"),
    ],
)
def test_a_default_scale_that_is_none_stops_in_one_line(checkout, text, line):
    """Files given with --configfile Snakemake reads before it reads the Snakefile; `focus config check` says more."""
    default = checkout.folder / "config/config.yaml"
    default.unlink() if text is None else default.write_text(text)
    output = checkout.run(code=2)
    errors = [each for each in output.splitlines() if "rror" in each]
    assert len(errors) == 1
    assert errors[0].startswith(f"focus: error: config/config.yaml: {line}")


def test_results_that_cannot_be_written_stop_before_any_job_in_one_line(checkout):
    (checkout.folder / "results").write_text("not a folder")
    assert "focus: error: results: expected a folder to write results to" in checkout.run(code=2)


def test_a_failure_shows_the_jobs_own_traceback_and_spares_other_rows(checkout):
    checkout.environment["STUB_FAILS"] = "downstream"
    output = checkout.run("table1", code=1)
    assert "RuntimeError: the stub was told to fail" in output
    assert (checkout.folder / "results/laptop/perplexity/smollm2-135m-instruct/austen/focus/soft/seed0.json").exists()


def test_a_killed_run_leaves_no_lock_and_a_living_one_keeps_its(checkout):
    stub = checkout.folder / "slow"
    stub.mkdir()
    (stub / "focus").write_text("#!/bin/sh\ntouch started\nexec sleep 30\n")
    (stub / "focus").chmod(0o755)
    path = checkout.environment["PATH"]
    checkout.environment["PATH"] = f"{stub}{os.pathsep}{path}"
    process = checkout.start("headline", start_new_session=True)
    while not (checkout.folder / "started").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    checkout.environment["PATH"] = path
    assert "cannot be locked" in checkout.run("headline", code=1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    checkout.run("headline")
    os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()


def test_scales_are_complete_for_snakemake_too(checkout):
    for name in ("smoke", "overnight", "paper"):
        planned = checkout.planned("--configfile", f"config/{name}.yaml")
        assert planned["train"] == len(trained(scale(name)))


def test_no_job_is_slowed_by_snakemakes_sampling():
    for file in (ROOT / "workflow/rules").glob("*.smk"):
        assert not re.search(r"^\s+benchmark:", file.read_text(), re.MULTILINE), f"{file.name}: expected no benchmark:"
