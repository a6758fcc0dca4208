"""Config files: the ones shipped are valid and explained, and every mistake names its file and key."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from focus import explain, jobs, scales
from focus.config import Experiment
from focus.errors import UserError
from focus.method_config import FocusConfig
from focus.paper import printed

CONFIG = Path(__file__).parents[1] / "config"
BASE = CONFIG / "config.yaml"


@pytest.fixture
def overlay(tmp_path):
    """Load the laptop scale with a text laid over it."""

    def load(text, *overrides):
        path = tmp_path / "over.yaml"
        path.write_text(text)
        return scales.load([BASE, path], overrides)

    return load


@pytest.mark.parametrize("name", ["smoke", "overnight", "paper"])
def test_every_scale_is_valid_and_named_after_its_file(name):
    assert scales.load([BASE, CONFIG / f"{name}.yaml"]).scale == name


def test_overnight_trains_longer_on_the_same_models_with_three_seeds():
    laptop, overnight = scales.load([BASE]), scales.load([BASE, CONFIG / "overnight.yaml"])
    assert overnight.models == laptop.models
    assert len(overnight.seeds) == 3
    for name, method in laptop.methods.items():
        if method.training and method.training.phases:
            assert overnight.methods[name].training.phases[0].steps > method.training.phases[0].steps


def test_the_papers_setting_is_the_papers():
    assert scales.load([BASE]).methods["focus-paper"].adapter == FocusConfig.paper()


def test_a_method_like_another_takes_over_what_it_does_not_set(overlay):
    methods = overlay("methods: {more: {like: focus, label: More, adapter: {groups: 16}, window: 7}}").methods
    assert methods["more"].adapter == methods["focus"].adapter.model_copy(update={"groups": 16})
    assert methods["more"].training == methods["focus"].training


def test_a_window_of_the_methods_own_wins(overlay):
    experiment = overlay("methods: {more: {like: focus, label: More, window: 7}}")
    job = jobs.train_job(experiment, "gpt2-mini", "austen", "more", 0)
    assert (job.settings.window, job.settings.adapter.window, job.model_settings.window) == (7, 7, 7)
    job = jobs.train_job(experiment, "gpt2-mini", "austen", "focus", 0)
    assert (job.settings.window, job.settings.adapter.window, job.model_settings.window) == (128, 128, 128)


@pytest.mark.parametrize(("windows", "expected"), [(16, 4), (8, 2), (4, 2)])
def test_a_longer_context_is_evaluated_on_as_many_tokens_in_two_windows_at_least(overlay, windows, expected):
    experiment = overlay(f"evaluation: {{perplexity: {{windows: {windows}}}}}")
    job = jobs.perplexity_job(experiment, "gpt2-mini", "austen", "focus", "hard-k2-t4096", 0)
    assert (job.attention, job.top_k, job.model_settings.context, job.perplexity.windows) == ("hard", 2, 4096, expected)


def test_schema_is_in_step():
    assert (CONFIG / "schema.json").read_text() == scales.schema()


def test_readme_explains_every_key():
    readme = (CONFIG / "README.md").read_text()
    assert readme == explain.page(readme)
    schema = Experiment.model_json_schema()
    for model in [schema, *schema["$defs"].values()]:
        section = readme.split(model["description"].splitlines()[0])[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(model["properties"])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("methods: {focus: {adapter: {top_k: 5}}}", "methods.focus.adapter: top_k must be at most groups (4), got 5"),
        ("model_settings: {gpt2-mini: {window: 1024}}", "window must be below context (1024), got 1024"),
        ("methods: {focus: {adapter: {tau: 0.1}}}", "methods.focus.adapter.tau: there is no such key"),
        (
            "methods: {focus: {training: {clip: 1e-3}}}",
            "focus.training.clip: expected a valid number, got '1e-3'",
        ),
        (
            "methods: {focus: {adapter: {groups: 4.0}}}",
            "focus.adapter.groups: expected a valid integer, got 4.0",
        ),
        ("methods: {new: {kind: pretrained}}", "methods.new.label: this key is missing"),
        ("seeds: []", "seeds: expected at least 1 item, got 0"),
        ("seeds: [0]\nseeds: [1]", "expected YAML, got the key seeds twice"),
        ("tables: {table1: {corpus: gutenberg}}", "tables.table1.corpus: expected a corpus of the registry"),
        ("model_settings: {gpt2-mini: {pretraining: null}}", "model_settings.gpt2-mini.pretraining: expected settings"),
        ("models: [a]\nmodel_settings: {a: {context: 9, window: 1}}", "models: expected a model of the registry"),
        ("figures: {quality: {rows: [{method: focs}]}}", "figures.quality.rows.0.method: expected a key of methods"),
        ("- 1", "expected a mapping of keys, got list"),
        (
            "model_settings: {gpt2-mini: {pretraining: {context: 512}}}",
            "model_settings.gpt2-mini: pretraining.context must be at least context (1024), got 512",
        ),
        (
            "model_settings: {gpt2-mini: {pretraining: {heads: 3}}}",
            "pretraining: width must be a multiple of heads (3)",
        ),
        (
            "evaluation: {perplexity: {stride: 513}}",
            "evaluation.perplexity.stride: expected at most the context of smollm2-135m-instruct (512), got 513",
        ),
        ("seeds: [1, 0, 1]", "seeds: expected each value once, got 1 2 times"),
        ("model_settings: {gpt2-mini: {seeds: [3, 3]}}", "gpt2-mini.seeds: expected each value once, got 3 2 times"),
        ("models: [gpt2-mini, gpt2-mini]", "models: expected each value once, got gpt2-mini 2 times"),
        ("tables: {table1: {models: [gpt2-mini, gpt2-mini]}}", "tables.table1.models: expected each value once"),
        (
            "methods: {full-finetuning: {training: {phases: [{trains: centroids, steps: 1, learning_rate: 1.0}]}}}",
            "training of kind full_finetuning: expected phases that train everything, got one of centroids",
        ),
        ("methods: {focus: {sinks: 4}}", "methods.focus.sinks: there is no such key"),
        ("methods: {pretrained: {sinks: 0}}", "methods.pretrained.sinks: there is no such key"),
        ("methods: {new: {like: nothing}}", "methods.new.like: expected another method's name, got nothing"),
        (
            "methods: {a: {like: b}, b: {like: a}}",
            "methods.b.like: expected a chain that ends, got a",
        ),
        ("scale: reference", "scale: expected another name, since results/reference holds the committed runs"),
        ("methods: {focus: {like: focus}}", "methods.focus.like: expected another method's name, got focus"),
        ("methods: {focus: {adapter: {window: 64}}}", "methods.focus.adapter.window: comes from the method's window"),
        ("methods: {focus: {training: {clip: .inf}}}", "training.clip: expected a finite number, got inf"),
        ("methods: {focus: {training: {weight_decay: .inf}}}", "weight_decay: expected a finite number, got inf"),
        ("speed: {seconds: .nan}", "speed.seconds: expected a finite number, got nan"),
        (
            "tables: {table1: {rows: [{method: window, paper: table1.windw}]}}",
            "tables.table1.rows.0.paper: expected a printed row",
        ),
        ("figures: {quality: {rows: [{method: window}]}}", "figures.quality.rows: expected a row of kind pretrained"),
        (
            "tables: {train: {title: a, corpus: austen, rows: [{method: window}]}}",
            "tables.train: expected a name that no rule or target of the workflow has",
        ),
        (
            "figures: {model_gpt2_mini: {title: a, corpus: austen, rows: [{method: pretrained}]}}",
            "figures.model_gpt2_mini: expected a name that no rule",
        ),
        (
            "model_settings: {gpt2-mini: {dtype: bfloat16}}",
            "model_settings.gpt2-mini.dtype: expected float32, since weights that train must be float32 and "
            "full-finetuning trains everything, got bfloat16",
        ),
        (
            "models: [gpt2-mini]\nmodel_settings: {gpt2-mini: {dtype: bfloat16}}\n"
            "methods: {focus: {training: {phases: [{trains: everything, steps: 1, learning_rate: 1.0}]}}}\n"
            "tables: {table1: {rows: [{method: focus}]}}\nfigures: {quality: {rows: [{method: pretrained}]}}",
            "must be float32 and focus trains everything",
        ),
        (
            "model_settings: {smollm2-135m-instruct: {context: 8193}}",
            "model_settings.smollm2-135m-instruct.context: expected at most the 8192 positions of "
            "smollm2-135m-instruct, got 8193",
        ),
        (
            "tables: {longcontext: {rows: [{method: pretrained, context: 8192}, {method: window, context: 8193}]}}",
            "tables.longcontext.rows.1.context: expected at most the 8192 positions of smollm2-135m-instruct, got 8193",
        ),
        (
            "figures: {quality: {models: null, rows: [{method: pretrained, context: 1025}]}}",
            "figures.quality.rows.0.context: expected at most the 1024 positions of gpt2-mini, got 1025",
        ),
        (
            "tables: {table1: {models: [gpt2-mini], generation: true}}\n"
            "evaluation: {generation: {max_new_tokens: 1024}}",
            "evaluation.generation.max_new_tokens: expected less than the 1024 positions of gpt2-mini, "
            "which tables.table1 shows, got 1024",
        ),
        (
            "models: [gpt2-mini, mistral-7b-from-scratch]\n"
            "model_settings: {mistral-7b-from-scratch: {context: 512, window: 64}}\n"
            "tables: {table2: {rows: [{method: scratch}, {method: pretrained}]}}",
            "tables.table2.rows.1.method: expected a method that trains from scratch, since mistral-7b-from-scratch "
            "has no weights, got pretrained",
        ),
    ],
)
def test_a_mistake_names_file_and_key_in_one_line(overlay, text, line):
    with pytest.raises(UserError) as error:
        overlay(text)
    message = str(error.value)
    assert re.match(r"\S+/over\.yaml: ", message)
    assert line in message
    assert "\n" not in message


def test_a_context_may_fill_every_position_and_pretraining_decides_how_many_there_are(overlay):
    longer = "model_settings: {gpt2-mini: {pretraining: {context: 3000}}}\n"
    overlay(longer + "figures: {quality: {rows: [{method: pretrained, context: 3000}]}}")
    with pytest.raises(UserError, match="at most the 3000 positions of gpt2-mini, got 3001"):
        overlay(longer + "figures: {quality: {models: [gpt2-mini], rows: [{method: pretrained, context: 3001}]}}")
    rows = "rows: [{method: pretrained, context: 3001}]"
    overlay(f"models: [gpt2-mini]\ntables: {{longcontext: {{models: [smollm2-135m-instruct], {rows}}}}}")


def test_frozen_weights_may_be_bfloat16(overlay):
    settings = overlay("seeds: [0]").model_dump()
    settings["model_settings"]["gpt2-mini"]["dtype"] = "bfloat16"
    centroids_only = {"rows": [{"method": "pretrained"}, {"method": "focus", "attention": "soft"}]}
    settings["tables"] = {"table1": settings["tables"]["table1"] | centroids_only}
    settings["figures"] = {}
    assert Experiment.model_validate(settings).model_settings["gpt2-mini"].dtype == "bfloat16"


def test_no_exhibit_may_be_named_like_a_rule_of_the_workflow():
    workflow = [CONFIG.parent / "Snakefile", *(CONFIG.parent / "workflow" / "rules").glob("*.smk")]
    rules = {
        name
        for path in workflow
        for name in re.findall(r"^ *(?:rule|use rule \w+ as) (\w+)", path.read_text(), re.MULTILINE)
    }
    assert rules == scales.RULES


def test_a_mistake_is_laid_at_the_file_that_made_it(overlay, tmp_path):
    with pytest.raises(UserError, match=r"^--config: scale: "):
        overlay("seeds: [1]", "scale=UPPER")
    with pytest.raises(UserError, match=r"^--config: seeds\.1: expected a valid integer, got 'x'$"):
        overlay("seeds: [1]", "seeds=[0, x]")
    broken = tmp_path / "base.yaml"
    broken.write_text(BASE.read_text().replace("schema_version: 1", "schema_version: 2"))
    (tmp_path / "over.yaml").write_text("seeds: [1]")
    with pytest.raises(UserError, match=r"base\.yaml: schema_version: expected 1, got 2$"):
        scales.load([broken, tmp_path / "over.yaml"])
    with pytest.raises(UserError, match=r"missing\.yaml: expected a config file, got No such file"):
        scales.load([BASE, tmp_path / "missing.yaml"])


def test_later_layers_win_key_by_key(overlay):
    experiment = overlay("methods: {window: {sinks: 2}}", "seeds=[3]", "models=[gpt2-mini]")
    assert experiment.methods["window"].sinks == 2
    assert experiment.methods["window"].label == "Window only"
    assert experiment.seeds == [3]
    assert experiment.models == ["gpt2-mini"]


def test_every_row_names_a_printed_row_that_exists():
    experiment = scales.load([BASE])
    rows = [row for exhibit in [*experiment.tables.values(), *experiment.figures.values()] for row in exhibit.rows]
    assert all(printed.row(row.paper) for row in rows if row.paper)


def test_a_scale_survives_the_trip_through_the_command_line():
    experiment = scales.load([BASE])
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment


def test_jobs_survive_the_trip_through_the_command_line():
    experiment = scales.load([BASE])
    job = jobs.perplexity_job(experiment, "gpt2-mini", "austen", "focus", "hard-k2", 0)
    assert type(job).model_validate_json(job.model_dump_json()) == job
    assert job.settings.adapter.window == experiment.model_settings["gpt2-mini"].window
    assert (job.attention, job.top_k) == ("hard", 2)


def test_what_draws_at_random_is_repeated_like_what_trains(overlay):
    experiment = overlay("seeds: [3, 4]")
    for method in ("bigbird", "magicpig", "performer", "routing-transformer", "focus", "focus-untrained"):
        assert experiment.seeds_of("gpt2-mini", method) == [3, 4], method
    for method in ("pretrained", "window", "longformer", "sparq", "quest"):
        assert experiment.seeds_of("gpt2-mini", method) == [3], method


@pytest.mark.parametrize("make", [jobs.downstream_job, jobs.generation_job])
@pytest.mark.parametrize("variant", ["full", "soft", "hard-k2"])
def test_a_context_of_a_rows_own_is_none_of_the_tasks(make, variant):
    experiment = scales.load([BASE])
    row = experiment, "gpt2-mini", "austen", "focus"
    assert make(*row, f"{variant}-t2048", 0) == make(*row, variant, 0)


def test_a_job_changes_only_with_what_it_reads(overlay):
    def job(experiment):
        return jobs.train_job(experiment, "gpt2-mini", "austen", "focus", 0).model_dump_json()

    before = job(scales.load([BASE]))
    assert job(overlay("evaluation: {perplexity: {windows: 99}}\nmethods: {focus-paper: {label: other}}")) == before
    assert job(overlay("model_settings: {gpt2-mini: {window: 99}}")) != before


def test_checking_a_config_loads_no_torch():
    code = "import sys; from focus import scales, cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_mistake_in_a_list_is_laid_at_the_last_file_that_sets_the_list(overlay):
    with pytest.raises(UserError, match=r"over\.yaml: methods.focus.training.phases.0.trains: this key is missing"):
        overlay("methods: {focus: {training: {phases: [{steps: 1, learning_rate: 1.0}]}}}")


def test_overlays_set_nothing_that_the_laptop_scale_already_sets():
    base = yaml.safe_load(BASE.read_text())
    for name in ("smoke", "overnight", "paper"):
        over = yaml.safe_load((CONFIG / f"{name}.yaml").read_text())
        assert not [path for path in _leaves(over) if _at(base, path) == _at(over, path)]


def _leaves(tree, path=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _at(tree, path):
    for key in path:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree
