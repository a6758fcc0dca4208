"""What a run will take: recorded runs predict themselves, and amounts of work scale as they should."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from paper_results import REPOSITORY
from paper_results import experiment as default

from focus import cost, cost_table, jobs, scales
from focus.config import AttentionBenchmark, Experiment
from focus.cost import Record, predict
from focus.cost_table import Plan

REFERENCES = sorted(folder for folder in (REPOSITORY / "results/reference").iterdir() if any(folder.glob("**/*.json")))
MODEL = "gpt2-mini"
HEADLINE = [
    f"perplexity/{MODEL}/austen/focus/soft/seed0.json",
    f"downstream/{MODEL}/austen/focus/soft/seed0.json",
    f"perplexity/{MODEL}/austen/pretrained/full/seed0.json",
]
TRAINING = f"training/{MODEL}/austen/focus/seed0/result.json"


@pytest.mark.parametrize("folder", REFERENCES, ids=lambda folder: folder.name)
def test_recorded_runs_predict_themselves(folder):
    records = cost.read([folder])
    assert {record.kind for record in records} & cost.AMOUNT.keys()
    for record in records:
        if record.kind not in cost.AMOUNT:
            continue
        estimate = predict(record.kind, record.settings, records)
        assert estimate.basis == "like", record.path
        assert (estimate.seconds, estimate.memory) == pytest.approx((record.seconds, record.memory)), record.path


def experiment(**changes) -> Experiment:
    """The default scale with the steps, corpora and tasks that the numbers below are for."""
    settings = default().model_dump(mode="json")
    for method, trains in (("focus", "centroids"), ("focus-paper", "centroids"), ("full-finetuning", "everything")):
        settings["methods"][method]["training"]["phases"] = phases((trains, 100))
    settings["model_settings"][MODEL]["pretraining"]["corpora"] = ["austen", "wikipedia", "essays"]
    settings["evaluation"]["downstream"]["tasks"] = dict.fromkeys(("hellaswag", "arc_easy", "piqa", "lambada"), 32)
    return Experiment.model_validate(settings | {"seeds": [0]} | changes)


def make(kind, job, seconds=100.0, memory=1000.0, parameters=0, **metrics) -> Record:
    settings = job.model_dump(mode="json")
    return Record("x.json", kind, settings, metrics, seconds, memory, "A Processor", 2**20, parameters)


def trained(experiment: Experiment, method: str, seed: int = 0, seconds: float = 100.0) -> Record:
    job = jobs.train_job(experiment, MODEL, "austen", method, seed)
    return make("training", job, seconds, training_seconds=seconds - 10, trained_parameters=2**20)


def asked(experiment: Experiment, method: str, seed: int = 0, model: str = MODEL) -> dict:
    return jobs.train_job(experiment, model, "austen", method, seed).model_dump(mode="json")


def changed(method: str, **training) -> Experiment:
    """The default scale with other settings of a method's training."""
    base = experiment()
    settings = base.methods[method].model_dump(mode="json")
    settings["training"] |= training
    return experiment(methods=base.model_dump(mode="json")["methods"] | {method: settings})


def phases(*steps: tuple[str, int]) -> list[dict]:
    return [{"trains": trains, "steps": count, "learning_rate": 1.0e-3} for trains, count in steps]


def test_training_grows_with_its_steps_and_not_its_start():
    records = [trained(experiment(), "focus")]
    longer = predict("training", asked(changed("focus", phases=phases(("centroids", 300))), "focus"), records)
    assert (longer.basis, longer.seconds, longer.memory, longer.disk) == ("scaled", 10 + 3 * 90, 1000, 4)
    wider = predict("training", asked(changed("focus", batch_size=2), "focus"), records)
    assert (wider.seconds, wider.memory) == (10 + 2 * 90, 412 + 2 * 588)


def test_a_resumed_training_counts_all_of_its_processes():
    """The last process ran for 20 of the 90 seconds of training: its start is lost, its work is not."""
    job = jobs.train_job(experiment(), MODEL, "austen", "focus", 0)
    records = [make("training", job, 20.0, training_seconds=90.0, trained_parameters=2**20)]
    assert predict("training", asked(experiment(), "focus", 1), records).seconds == 90.0
    longer = changed("focus", phases=phases(("centroids", 300)))
    assert predict("training", asked(longer, "focus"), records).seconds == 270.0
    assert predict("training", asked(experiment(), "focus-untrained"), records).seconds == 0.0


def test_seeds_and_rates_are_like_runs_and_several_are_averaged():
    records = [trained(experiment(), "focus", seed, seconds) for seed, seconds in ((0, 100.0), (1, 140.0))]
    assert predict("training", asked(experiment(), "focus", 1), records).seconds == 140.0
    third = predict("training", asked(experiment(), "focus", 2), records)
    assert (third.basis, third.seconds) == ("like", 120.0)
    faster = changed("focus", phases=[{"trains": "centroids", "steps": 100, "learning_rate": 0.5}])
    assert predict("training", asked(faster, "focus", 2), records).basis == "like"


def test_other_rows_stand_in_when_they_train_the_same_and_no_other_model_does():
    records = [trained(experiment(), "focus"), trained(experiment(), "full-finetuning", seconds=210.0)]
    paper = predict("training", asked(experiment(), "focus-paper"), records)
    assert (paper.basis, paper.seconds) == ("other", 100.0)
    assert predict("training", asked(experiment(), "focus", model="smollm2-135m-instruct"), records) is cost.UNKNOWN
    assert predict("training", asked(experiment(), "full-finetuning"), records[:1]) is cost.UNKNOWN
    both = changed("focus", phases=phases(("centroids", 100), ("everything", 200)))
    two = predict("training", asked(both, "focus"), records)
    assert (two.basis, two.seconds) == ("other", 100 + 10 + 2 * 200)
    none = predict("training", asked(experiment(), "focus-untrained"), records)
    assert (none.basis, none.seconds, none.disk) == ("other", 10.0, 0.0)
    assert predict("training", asked(experiment(), "focus"), []) is cost.UNKNOWN


def evaluated(experiment, kind: str, method: str = "pretrained", variant: str = "full", model: str = MODEL):
    return cost_table.EVALUATIONS[kind](experiment, model, "austen", method, variant, 0)


def more(**evaluation) -> Experiment:
    base = experiment()
    settings = base.evaluation.model_dump(mode="json")
    return experiment(evaluation={kind: settings[kind] | evaluation.get(kind, {}) for kind in settings})


def test_perplexity_grows_with_its_windows():
    records = [make("perplexity", evaluated(experiment(), "perplexity"))]
    windows = 3 * experiment().evaluation.perplexity.windows
    job = evaluated(more(perplexity={"windows": windows, "batch_size": 2}), "perplexity").model_dump(mode="json")
    estimate = predict("perplexity", job, records)
    assert (estimate.basis, estimate.seconds, estimate.memory, estimate.disk) == ("scaled", 300.0, 1600.0, 1.0)


def test_gates_are_looked_at_on_a_few_of_the_windows():
    records = [make("gates", evaluated(experiment(), "gates", "focus", "soft"))]
    job = evaluated(more(perplexity={"windows": 2}), "gates", "focus", "soft").model_dump(mode="json")
    estimate = predict("gates", job, records)
    assert (job["perplexity"]["windows"], estimate.basis, estimate.seconds) == (2, "scaled", 50.0)


def test_only_memory_above_process_and_weights_grows_with_the_context():
    longer = evaluated(experiment(), "perplexity", variant="full-t8192").model_dump(mode="json")
    for parameters, expected in ((0, 400 + 8 * 600), (100 * 2**18, 500 + 8 * 500), (2**40, 1000)):
        records = [make("perplexity", evaluated(experiment(), "perplexity"), parameters=parameters)]
        assert predict("perplexity", longer, records).memory == expected
    shorter = evaluated(experiment(), "perplexity", variant="full-t512").model_dump(mode="json")
    assert predict("perplexity", shorter, records).memory == 1000


def test_trained_weights_need_gradients_and_averages_that_do_not_grow_either():
    job = jobs.train_job(experiment(), MODEL, "austen", "full-finetuning", 0)
    record = make("training", job, parameters=2**24, training_seconds=1.0, trained_parameters=2**24, memory=1000.0)
    assert record.fixed == 400 + 4 * 64
    half = job.model_copy(update={"model_settings": job.model_settings.model_copy(update={"dtype": "bfloat16"})})
    assert make("training", half, parameters=2**24, trained_parameters=0).fixed == 400 + 32


def test_weights_are_counted_by_the_manifest_beside_a_result(tmp_path):
    plan = plan_of(tmp_path)
    finish(plan, HEADLINE[2])
    (record,) = cost.read([tmp_path])
    assert record.parameters == 0
    (tmp_path / "models").mkdir()
    (tmp_path / f"models/{MODEL}.json").write_text('{"parameters": 5}')
    (record,) = cost.read([tmp_path])
    assert record.parameters == 5


def test_a_recorded_long_context_takes_what_was_measured():
    """A window of 512 tokens took 1176 MiB of the first, 513 of them weights; eight times as many take no 9 GiB."""
    records = cost.read(REFERENCES)
    job = evaluated(experiment(), "perplexity", variant="full-t4096", model="smollm2-135m-instruct")
    assert 1000 < predict("perplexity", job.model_dump(mode="json"), records).memory < 3500


def test_the_slowest_row_stands_in_for_one_never_run():
    records = [
        make("perplexity", evaluated(experiment(), "perplexity", *row), seconds)
        for seconds, row in ((50.0, ("pretrained", "full")), (90.0, ("focus", "hard-k1")), (70.0, ("focus", "soft")))
    ]
    window = predict("perplexity", evaluated(experiment(), "perplexity", "window").model_dump(mode="json"), records)
    assert (window.basis, window.seconds) == ("other", 90.0)
    paper = evaluated(experiment(), "perplexity", "focus-paper", "soft").model_dump(mode="json")
    assert predict("perplexity", paper, records).seconds == 70.0


def test_tasks_grow_with_their_items_and_an_unrecorded_one_is_unknown():
    few = more(downstream={"tasks": {"piqa": 10, "lambada": 10}})
    tasks = {"piqa": {"items": 10, "positions": 100}, "lambada": {"items": 10, "positions": 900}}
    records = [make("downstream", evaluated(few, "downstream"), tasks=tasks)]
    many = evaluated(more(downstream={"tasks": {"piqa": 10, "lambada": 20}}), "downstream").model_dump(mode="json")
    assert predict("downstream", many, records).seconds == pytest.approx(190.0)
    other = evaluated(more(downstream={"tasks": {"hellaswag": 10}}), "downstream").model_dump(mode="json")
    assert predict("downstream", other, records) is cost.UNKNOWN


def test_long_inputs_grow_with_their_beginnings_and_items():
    long = {"tasks": {"piqa": 10}, "behind": ["text", "examples"], "tokens": 100, "windows": 2}
    task = {"items": 10, "requests": 20, "positions": 20 * 100 + 200}
    behind = {kind: {"tokens": 100, "tasks": {"piqa": task}} for kind in long["behind"]}
    records = [make("long_inputs", evaluated(more(long_inputs=long), "long_inputs"), 80.0, behind=behind)]
    for change, seconds in (({"tasks": {"piqa": 30}}, 160.0), ({"tokens": 300}, 160.0), ({"behind": ["text"]}, 40.0)):
        job = evaluated(more(long_inputs=long | change), "long_inputs").model_dump(mode="json")
        assert predict("long_inputs", job, records).seconds == pytest.approx(seconds), change
    job = evaluated(more(long_inputs=long | {"tasks": {"lambada": 1}}), "long_inputs").model_dump(mode="json")
    assert predict("long_inputs", job, records) is cost.UNKNOWN


def test_recall_grows_with_its_lengths():
    recall = {"lengths": [200, 300], "depths": [0.0, 0.5], "candidates": 5, "digits": 5, "passage": 20}
    records = [make("recall", evaluated(more(recall=recall), "recall"), 16.0)]  # 3 * 500 inputs, 2 * 50 answers
    for change, seconds in (({"lengths": [750]}, 23.0), ({"tests": ["copy"]}, 10.0), ({"windows": 2}, 32.0)):
        job = evaluated(more(recall=recall | change), "recall").model_dump(mode="json")
        assert predict("recall", job, records).seconds == pytest.approx(seconds), change


def test_answers_grow_with_what_may_be_written_and_rows_that_cannot_write_stand_for_no_others():
    records = [
        make("generation", evaluated(experiment(), "generation", "focus-paper", "soft"), 3.0, reason="cannot"),
        make("generation", evaluated(experiment(), "generation", "focus", "hard-k2"), 100.0),
    ]
    twice = more(generation={"items": 2 * experiment().evaluation.generation.items})
    for method, variant, expected in (
        *(("focus", "hard-k2", ("scaled", 200.0)), ("focus-paper", "soft", ("scaled", 3.0))),
        *(("focus", "soft", ("other", 200.0)), ("window", "full", ("other", 200.0))),
    ):
        job = evaluated(twice, "generation", method, variant).model_dump(mode="json")
        estimate = predict("generation", job, records)
        assert (estimate.basis, estimate.seconds) == expected, (method, variant)


def test_looking_into_groups_grows_with_its_windows():
    groups = {"model": MODEL, "corpus": "austen", "method": "focus", "windows": 4}
    records = [make("groups", jobs.groups_job(experiment(groups=groups)))]
    job = jobs.groups_job(experiment(groups=groups | {"windows": 12, "pairs": 5})).model_dump(mode="json")
    estimate = predict("groups", job, records)
    assert (estimate.basis, estimate.seconds, estimate.memory) == ("scaled", 300.0, 1000.0)


def test_timing_grows_with_its_lengths():
    speed = AttentionBenchmark(lengths=[4096], groups=[4], seconds=0.01)
    rows = [{"length": 4096, "full_ms": 100.0}]
    records = [make("attention", speed, forward=rows)]
    longer = speed.model_copy(update={"lengths": [4096, 65536]}).model_dump(mode="json")
    estimate = predict("attention", longer, records)
    assert (estimate.basis, estimate.seconds, estimate.memory) == ("scaled", pytest.approx(25_700), 400 + 16 * 600)
    slower = speed.model_copy(update={"seconds": 1.25, "threads": [1, 2]}).model_dump(mode="json")
    assert predict("attention", slower, records).seconds == pytest.approx(2_000)
    job = jobs.MethodsJob(rows=[], lengths=[1024], heads=1, head_dim=8, seconds=1.0, seed=0).model_dump(mode="json")
    row = {"method": "x"}
    done = Record("x", "methods", job | {"rows": [row]}, {}, 10.0, 100.0, "A Processor", 1)
    twice = predict("methods", job | {"rows": [row, row], "lengths": [2048]}, [done])
    assert (twice.basis, twice.seconds) == ("scaled", 80.0)


def test_what_is_no_result_is_passed_over(tmp_path):
    (tmp_path / "claims.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "manifest.json").write_text('{"files": {}}')
    assert cost.read([tmp_path, tmp_path / "missing"]) == []


def finish(plan: Plan, path: str) -> None:
    """Write the result of a job as if it had run in 3600 seconds with 2 GiB."""
    job = plan.job(path)
    home = plan.results / (path.replace(".json", ".result.json") if job.kind == "pretraining" else path)
    home.parent.mkdir(parents=True, exist_ok=True)
    (plan.results / path).parent.mkdir(parents=True, exist_ok=True)
    (plan.results / path).write_text('{"files": {"x": {"size": 1048576}}}')
    if job.settings is not None:
        provenance = {"code": cost_table._code(job.kind), "seconds": 3600.0, "peak_memory_mib": 2048, "processor": "P"}
        metrics = {"training_seconds": 3600.0, "trained_parameters": 2**28}
        metrics["tasks"] = {task: {"items": 1, "positions": 1} for task in experiment().evaluation.downstream.tasks}
        if job.kind not in ("training", "pretraining"):
            del metrics["training_seconds"]
        result = {"result_version": 1, "experiment": job.kind, "settings": job.settings, "metrics": metrics}
        home.write_text(json.dumps(result | {"provenance": provenance}))


def plan_of(results: Path, settings: Experiment | None = None, recorded=(), cores: int = 2) -> Plan:
    return Plan(settings or experiment(), results, list(recorded), cores)


@pytest.fixture
def recorded(tmp_path):
    """A reference folder in which everything that HEADLINE needs took an hour."""
    plan = plan_of(tmp_path / "reference/laptop")
    for job in plan.all_of(HEADLINE):
        finish(plan, job.path)
    return tmp_path / "reference/laptop"


def test_a_plan_holds_what_the_files_need(recorded, tmp_path):
    found = plan_of(tmp_path / "results", recorded=[recorded]).all_of(HEADLINE)
    kinds = [job.kind for job in found]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        **{"perplexity": 2, "downstream": 1, "training": 1, "pretraining": 1},
        "fetch": 3 + 4,
    }
    assert not any(job.finished for job in found)


def test_hours_are_those_of_the_longest_chain_or_of_all_cores(recorded, tmp_path):
    start = cost_table.START / 3600
    assert 0 < start < 0.01
    for cores, expected in ((1, 5 * (1 + start)), (2, 3 * (1 + start)), (8, 3 * (1 + start))):
        plan = plan_of(tmp_path / "results", recorded=[recorded], cores=cores)
        work = [job for job in plan.all_of(HEADLINE) if job.kind != "fetch"]
        assert plan.hours(work) == pytest.approx((5 * (1 + start), expected))


def test_finished_jobs_are_not_counted_and_those_after_an_unfinished_one_are(recorded, tmp_path):
    plan = plan_of(tmp_path / "results", recorded=[recorded])
    for job in plan.all_of(HEADLINE):
        finish(plan, job.path)
    assert all(job.finished for job in plan_of(plan.results).all_of(HEADLINE))
    longer = changed("focus", phases=phases(("centroids", 300)))
    left = [job.path for job in plan_of(plan.results, longer).all_of(HEADLINE) if not job.finished]
    assert sorted(left) == sorted([*HEADLINE[:2], TRAINING])
    path = plan.results / TRAINING
    path.write_text(path.read_text().replace(cost_table._code("training"), "0" * 64))
    assert [job.path for job in plan_of(plan.results).all_of([TRAINING]) if not job.finished] == [TRAINING]


def test_all_that_a_job_writes_stands_for_it(tmp_path):
    plan = plan_of(tmp_path)
    log = TRAINING.replace("result.json", "log.jsonl")
    assert plan.job(log) is plan.job(TRAINING)
    assert plan.job(f"models/{MODEL}.log.jsonl") is plan.job(f"models/{MODEL}.json")


def test_answers_and_groups_have_settings_and_needs(tmp_path):
    groups = {"model": MODEL, "corpus": "austen", "method": "focus"}
    plan = plan_of(tmp_path, experiment(groups=groups))
    written = plan.job(f"generation/{MODEL}/austen/focus/hard-k2/seed0.json")
    assert set(written.needs) == {f"models/{MODEL}.json", "benchmarks/gsm8k.json", TRAINING}
    looked = plan.job(f"groups/{MODEL}/austen/focus/seed0.json")
    assert set(looked.needs) == {
        *(f"models/{MODEL}.json", "corpora/austen.json", "taggers/en-core-web-sm.json"),
        TRAINING,
    }
    assert plan.job("taggers/en-core-web-sm.json").kind == "fetch"
    assert (written.finished, looked.finished) == (False, False)
    for job in plan.all_of([written.path, looked.path]):
        finish(plan, job.path)
    assert all(job.finished for job in plan_of(tmp_path, plan.experiment).all_of([written.path, looked.path]))
    other = plan_of(tmp_path, experiment(groups=groups | {"windows": 3}))
    assert [job.path for job in other.all_of([written.path, looked.path]) if not job.finished] == [looked.path]


def test_kinds_that_nobody_taught_it_count_by_their_place_or_as_unknown(tmp_path):
    result = {"result_version": 1, "experiment": "new", "settings": {}, "metrics": {}}
    result |= {"provenance": {"seconds": 7.0, "peak_memory_mib": 3, "processor": "P"}}
    (tmp_path / "old/new").mkdir(parents=True)
    (tmp_path / "old/new/a.json").write_text(json.dumps(result))
    plan = plan_of(tmp_path / "results", recorded=[tmp_path / "old"])
    assert plan.job("new/a.json").estimate.seconds == 7.0
    assert plan.job("new/b.json").estimate is cost.UNKNOWN


def cells(page: str, name: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


def test_the_page_counts_shared_jobs_once_and_never_unknown_ones_as_nothing(recorded, tmp_path):
    exhibits = {"tables/a": HEADLINE, "figures/b": HEADLINE[2:], "tables/c": ["new/b.json"]}
    page = cost_table.text(experiment(), exhibits, tmp_path / "results", tmp_path / "reference", 2)
    assert cells(page, "tables/a") == ["12", "0", "5.01", "3.01", "2.00", "2.01", "5 same job, 7 downloads"]
    assert cells(page, "figures/b") == ["5", "0", "2.00", "2.00", "2.00", "1.00", "2 same job, 3 downloads"]
    assert cells(page, "tables/c") == ["1", "0", *["unknown"] * 4, "1 no record"]
    assert cells(page, "All of these") == [
        *("13", "0", "over 5.01", "over 3.01", "over 2.00", "over 2.01"),
        "5 same job, 1 no record, 7 downloads",
    ]
    assert "No record: new/b.json." in page


@pytest.mark.parametrize("has", [True, False])
def test_what_ran_in_bfloat16_takes_longer_on_a_processor_without_it(recorded, tmp_path, monkeypatch, has):
    for path in [*recorded.glob("training/**/result.json"), *recorded.glob("downstream/**/*.json")]:
        content = json.loads(path.read_text())
        content["provenance"]["dtype"] = "bfloat16"
        path.write_text(json.dumps(content))
    monkeypatch.setattr(cost_table, "multiplies_bfloat16", lambda device: has)
    hours = {
        job.kind: job.estimate.seconds / 3600
        for job in plan_of(tmp_path / "results", recorded=[recorded]).all_of(HEADLINE)
        if job.estimate.seconds
    }
    training, other = (1.0, 1.0) if has else (cost.WITHOUT_BFLOAT16[True], cost.WITHOUT_BFLOAT16[False])
    assert hours == {"training": training, "pretraining": 1.0, "perplexity": 1.0, "downstream": other}
    page = cost_table.text(experiment(), {"tables/a": HEADLINE}, tmp_path / "results", tmp_path / "reference", 2)
    assert ("which this one has not" in page) != has


def test_every_basis_of_a_prediction_has_a_name_on_the_page():
    assert set(cost_table.BASES) == {*cost.BASES, "shape", cost.UNKNOWN.basis}


def paper(*changes: str) -> Experiment:
    return scales.load([REPOSITORY / f"config/{name}.yaml" for name in ("config", "paper")], changes)


LLAMA = [f"perplexity/llama2-70b/pg19/{row}/seed0.json" for row in ("pretrained/full", "focus/soft")]


def test_what_no_record_tells_is_predicted_from_shape(tmp_path):
    plan = plan_of(tmp_path, paper())
    found = {job.path: job for job in plan.all_of(LLAMA)}
    training = "training/llama2-70b/pg19/focus/seed0/result.json"
    assert {path for path in found if path.startswith(("models", "corpora"))} < set(found)
    work = [*LLAMA, training]
    assert [found[path].estimate.basis for path in work] == ["shape"] * 3
    assert [found[path].estimate.gpus for path in work] == [2, 2, 2]
    seconds = [found[path].estimate.seconds + cost_table.START for path in work]
    held, cores, longest = plan.gpu_hours([found[path] for path in work])
    assert held == pytest.approx(2 * sum(seconds) / 3600)
    assert (cores, longest) == (0, pytest.approx((seconds[1] + seconds[2]) / 3600))
    assert found["models/llama2-70b.json"].estimate.disk == pytest.approx(2 * 68_976_648_192 / 2**20)


def test_records_of_a_processor_say_nothing_of_a_gpu_but_for_what_needs_none(tmp_path):
    experiment, path = paper(), LLAMA[0]
    job = evaluated(experiment, "perplexity", model="llama2-70b")
    job = job.model_copy(update={"corpus": "pg19"})
    for device, basis in (("cpu", "shape"), ("cuda", "like")):
        record = replace(make("perplexity", job, 777.0), device=device)
        plan = plan_of(tmp_path, experiment)
        plan.records = [record]
        assert plan.job(path).estimate.basis == basis
        assert (plan.job(path).estimate.seconds == 777.0) == (device == "cuda")
        assert plan.job(path).estimate.gpus == 2
    plan, path = plan_of(tmp_path, experiment), "bits/sinkhorn/t16/everything/seed0.json"
    bits = jobs.bits_job(experiment, "sinkhorn", 16, "everything", 0)
    timed = make("attention", experiment.speed.attention, forward=[{"length": 4096, "full_ms": 100.0}])
    plan.records = [timed, make("bits", bits)]
    assert (plan.job(path).estimate.basis, plan.job(path).estimate.gpus) == ("like", 0)
    assert plan.job("speed/attention.json").estimate.basis == "shape"


def test_the_page_of_a_scale_on_gpus_names_its_hardware_and_says_what_shapes_told(tmp_path):
    exhibits = {"tables/a": LLAMA, "bits": ["bits/softmax/t16/everything/seed0.json"], "tables/c": ["new/b.json"]}
    page = cost_table.text(paper(), exhibits, tmp_path / "results", tmp_path / "reference", 2)
    row = cells(page, "tables/a")
    assert (row[0], row[5], row[-1]) == ("5", "2", "3 shape alone, 2 downloads")
    assert float(row[2]) > 0.1 and row[3] == "-" and 2 * float(row[4]) < float(row[2]) + 0.02
    assert 128 < float(row[6]) < 144
    assert cells(page, "tables/c")[2:6] == ["unknown"] * 3 + ["0"]
    assert "for NVIDIA H100 80 GB (SXM): products at 35% of 989 TFLOP/s" in page
    other = cost_table.text(
        paper("hardware={name: another, memory: 40.0}"), exhibits, tmp_path / "results", tmp_path / "reference", 2
    )
    assert "for another: products" in other and cells(other, "tables/a")[5] == "4"


@pytest.mark.parametrize(("threads", "seconds", "working"), [(1, 50.0, 40.0), (2, 100.0, 80.0)])
def test_time_lost_to_a_busy_machine_does_not_count_for_one_thread(tmp_path, threads, seconds, working):
    origin = {"seconds": 100.0, "cpu_seconds": 50.0, "threads": threads, "peak_memory_mib": 1, "processor": "P"}
    result = {"result_version": 1, "experiment": "training", "settings": {}, "provenance": origin}
    (tmp_path / "result.json").write_text(json.dumps(result | {"metrics": {"training_seconds": 80.0}}))
    (record,) = cost.read([tmp_path])
    assert (record.seconds, record.working, record.starting) == (seconds, working, seconds - working)
