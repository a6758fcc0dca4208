"""What a shape alone predicts, against what the committed runs measured and against counts by hand."""

from math import ceil, exp, log
from statistics import median

import pytest
from paper_results import REPOSITORY
from paper_results import experiment as default

from focus import cost, jobs, prediction, scales
from focus.hardware import CORE, GPU, Hardware
from focus.paper.shapes import OTHERS, SHAPES, gpt2_shape

LAPTOP = REPOSITORY / "results/reference/laptop"
RECORDS = cost.read([LAPTOP])
MODELS = ("smollm2-135m-instruct", "gpt2-mini")
KNOWN = SHAPES | OTHERS
KNOWN |= {
    record.settings["model"]: gpt2_shape(record.settings["pretraining"])
    for record in RECORDS
    if record.kind == "pretraining"
}


def predicted(record, hardware=CORE):
    """What a record's job was to take; where it wrote answers, which may end early, with their length in hindsight."""
    settings = record.settings
    if record.kind == "generation":
        written = ceil(record.metrics["new_tokens"] / record.metrics["items"])
        settings = settings | {"generation": settings["generation"] | {"max_new_tokens": written}}
    return prediction.predict(record.kind, settings, KNOWN, hardware, gpu=False)


def computing(model):
    """The records of a model that a shape can predict, but for trainings without a step."""
    return [
        record
        for record in RECORDS
        if record.settings.get("model") == model
        and record.kind in prediction.PASSES
        and "reason" not in record.metrics
        and (
            record.kind != "training"
            or record.metrics["steps"]
            or record.settings["settings"]["training"].get("distillation")
        )
    ]


def ratios(records, hardware):
    return [predicted(record, hardware).seconds / record.seconds for record in records]


def fitted(records) -> Hardware:
    """The hardware whose rates give these records their seconds in the middle: by halving, as time falls with rate."""
    low, high = 0.01, 100.0
    for _ in range(30):
        middle = exp((log(low) + log(high)) / 2)
        rates = {"bfloat16_tflops": CORE.bfloat16_tflops * middle, "float32_tflops": CORE.float32_tflops * middle}
        found = CORE.model_copy(update=rates)
        low, high = (low, middle) if median(ratios(records, found)) < 1 else (middle, high)
    return found


@pytest.mark.parametrize(("model", "other"), [MODELS, MODELS[::-1]])
def test_rates_fitted_on_one_model_predict_the_other_within_a_factor_of_two(model, other):
    """In the middle of each kind of job within 2; of single jobs, which shared two cores with others, nine in ten
    within 2.5."""
    hardware, records = fitted(computing(model)), computing(other)
    assert len(records) > 20
    for kind in {record.kind for record in records}:
        assert 0.5 < median(ratios([record for record in records if record.kind == kind], hardware)) < 2, kind
    within = [1 / 2.5 < ratio < 2.5 for ratio in ratios(records, hardware)]
    assert sum(within) > 0.9 * len(within)


def test_the_default_core_is_what_the_records_fit():
    hardware = fitted(computing(MODELS[0]) + computing(MODELS[1]))
    assert 0.5 < hardware.bfloat16_tflops / CORE.bfloat16_tflops < 2


@pytest.mark.parametrize("model", MODELS)
def test_memory_of_every_recorded_job_within_a_factor_of_one_and_a_half(model):
    for record in computing(model):
        assert 1 / 1.5 < predicted(record).host / record.memory < 1.5, record.path


def test_requests_are_as_long_as_recorded():
    for record in RECORDS:
        for task, measured in record.metrics.get("tasks", {}).items() if record.kind == "downstream" else ():
            requests, tokens = prediction.REQUESTS[task]
            assert requests == pytest.approx(measured["requests"] / measured["items"], rel=0.2)
            assert tokens == pytest.approx(measured["positions"] / measured["requests"], rel=0.25)
    prompts = [r.metrics["positions"] / r.metrics["items"] for r in RECORDS if r.kind == "generation"]
    assert prompts == pytest.approx([prediction.PROMPT] * len(prompts), rel=0.25)


@pytest.fixture(scope="module")
def paper():
    return scales.load([REPOSITORY / f"config/{name}.yaml" for name in ("config", "paper")])


def on_gpu(kind, job, hardware=GPU):
    return prediction.predict(kind, job.model_dump(mode="json"), KNOWN, hardware, gpu=True)


def training(paper, model="llama2-70b", method="focus", **changes):
    job = jobs.train_job(paper, model, "pg19", method, 0)
    return job.model_copy(update={"model_settings": job.model_settings.model_copy(update=changes)})


def test_frozen_weights_in_bfloat16_need_as_many_gpus_as_hold_them(paper):
    """70B: 128.5 GiB of weights, on GPUs of 72 usable GiB two; with less memory more."""
    found = on_gpu("training", training(paper))
    assert 128.5 < found.device / 1024 < 140
    assert found.gpus == 2
    small = on_gpu("training", training(paper), GPU.model_copy(update={"memory": 24.0}))
    assert small.gpus == ceil(found.device / 1024 / (24 * GPU.usable))
    assert small.seconds == found.seconds


def test_training_everything_holds_gradients_and_averages_and_checkpointing_saves(paper):
    frozen, moving = (training(paper, "gpt2-1.5b", name) for name in ("focus", "full-finetuning"))
    weight = SHAPES["gpt2-1.5b"].parameters * 4 / 2**20
    more = on_gpu("training", moving).device - on_gpu("training", frozen).device
    assert more == pytest.approx(3 * weight, rel=0.1)
    plain = frozen.model_copy(
        update={"model_settings": frozen.model_settings.model_copy(update={"gradient_checkpointing": False})}
    )
    with_all, saved = on_gpu("training", plain), on_gpu("training", frozen)
    assert with_all.device > saved.device + 10_000
    assert with_all.seconds < saved.seconds


def test_processes_share_weights_and_windows_and_each_loads_the_model(paper):
    job = jobs.train_job(paper, "mistral-7b-from-scratch", "openwebtext", "scratch", 0)
    assert job.settings.training.batch_size == 64
    alone, together = (
        on_gpu(
            "training",
            job.model_copy(update={"model_settings": job.model_settings.model_copy(update={"processes": n})}),
        )
        for n in (1, 8)
    )
    assert together.gpus == 8
    assert together.seconds == pytest.approx(alone.seconds / 8, rel=0.01)
    assert together.host == 8 * alone.host
    weights = SHAPES["mistral-7b"].parameters * (4 + 2 + 12) / 2**20
    assert weights < together.device < 1.2 * alone.device
    tokens = sum(phase.steps for phase in job.settings.training.phases) * 64 * job.settings.training.accumulation * 1024
    assert tokens == pytest.approx(2e9, rel=0.001)


def test_operations_of_large_models_decide_and_launches_of_small_ones(paper):
    """7B, everything frozen but centroids, checkpointed: 3 forward passes of 2 operations a weight and token."""
    steps = paper.methods["focus-paper"].training.phases[0].steps
    job = training(paper, "mistral-7b", "focus-paper")
    slow = GPU.model_copy(update={"bfloat16_tflops": 98.9, "bandwidth": 1e9})
    least = 3 * 2 * 7.1e9 * 1024 * steps / slow.rate("bfloat16")
    assert least < on_gpu("training", job, slow).seconds < 1.3 * least
    small, quick = training(paper, "gpt2-124m", "focus-paper"), GPU.model_copy(update={"bfloat16_tflops": 1e6})
    assert on_gpu("training", small, quick).seconds > 3 * 12 * steps * GPU.launch / 1e3
    assert on_gpu("training", small, quick).seconds > 0.7 * on_gpu("training", small).seconds


def test_time_grows_with_steps_windows_and_items(paper):
    def seconds(evaluation):
        changed = paper.model_dump(mode="json") | {"evaluation": paper.evaluation.model_dump(mode="json") | evaluation}
        settings = type(paper).model_validate(changed)
        make = {"perplexity": jobs.perplexity_job, "downstream": jobs.downstream_job}[next(iter(evaluation))]
        job = make(settings, "gpt2-124m", "pg19", "pretrained", "full", 0)
        found = on_gpu(next(iter(evaluation)), job)
        return found.seconds - GPU.start - SHAPES["gpt2-124m"].parameters * 4 / 1e9

    once, twice = (seconds({"perplexity": {"windows": count, "batch_size": 8}}) for count in (256, 512))
    assert twice == pytest.approx(2 * once)
    few, many = (seconds({"downstream": {"tasks": {"piqa": count}}}) for count in (100, 300))
    assert many == pytest.approx(3 * few)


def test_a_cache_waits_for_written_answers_and_every_token_reads_all_weights(paper):
    job = jobs.generation_job(paper, "mistral-7b", "pg19", "pretrained", "full", 0)
    plan = job.generation
    found = on_gpu("generation", job, GPU.model_copy(update={"launch": 0.0}))
    reading = plan.items * plan.max_new_tokens * 14.48e9 / GPU.bytes_a_second
    assert reading < found.seconds < 1.2 * reading
    longer = job.model_copy(update={"generation": plan.model_copy(update={"context": 2 * plan.context})})
    cached = 2 * 32 * 1024 * 2 * plan.context / 2**20
    assert on_gpu("generation", longer).device - found.device == pytest.approx(prediction.FRAGMENTS * cached)


def test_every_job_of_the_paper_scale_is_predicted(paper):
    kinds = {"training": jobs.train_job(paper, "gemma2-9b", "pg19", "focus", 0)}
    row = ("gemma2-9b", "pg19", "focus", "soft", 0)
    for kind in ("perplexity", "gate_values", "downstream", "generation", "long_inputs", "recall"):
        kinds[kind.removesuffix("_values") if kind != "gate_values" else "gates"] = getattr(jobs, f"{kind}_job")(
            paper, *row
        )
    kinds["groups"] = jobs.groups_job(paper)
    kinds["leak"] = jobs.leak_job(paper, "gpt2-124m", "pg19", "focus-paper", 0)
    assert {*kinds, "pretraining"} == {*prediction.PASSES}
    for kind, job in kinds.items():
        found = on_gpu(kind, job)
        assert found.gpus >= 1 and found.seconds > GPU.start and found.host > prediction.HOST, kind


def test_unknown_kinds_and_models_are_not_guessed(paper):
    job = training(paper).model_dump(mode="json")
    assert prediction.predict("training", job | {"model": "gpt5"}, KNOWN, GPU, gpu=True) is None
    assert prediction.predict("bits", {}, KNOWN, GPU, gpu=True) is None
    speed = default().speed.attention.model_dump(mode="json")
    assert prediction.predict("attention", speed, KNOWN, CORE, gpu=False) is None
    assert prediction.predict("attention", speed | {"device": "cpu"}, KNOWN, GPU, gpu=True) is None


def test_recorded_timings_take_their_cases_and_little_more():
    for record in cost.read(folder for folder in LAPTOP.parent.iterdir()):
        if record.kind == "attention":
            cases = cost.AMOUNT["attention"][0](record.settings, record)
            assert 0.5 < prediction.BESIDE_CASES * cases / record.seconds < 2


def test_timings_on_a_gpu_take_their_settings_seconds_or_one_call(paper):
    """4 heads of 64: full attention at a million tokens is 2 * 256 * 2^40 operations."""
    base = {"lengths": [1024], "groups": [4], "heads": 4, "head_dim": 64, "seconds": 5.0, "threads": [0]}
    speed = type(paper.speed.attention)(**base)
    least = on_gpu("attention", speed)
    assert (least.seconds, least.gpus) == (GPU.start + 7.5, 1)
    slow = GPU.model_copy(update={"bfloat16_tflops": 1.0, "utilisation": 1.0})
    longest = on_gpu("attention", speed.model_copy(update={"lengths": [2**20]}), slow)
    assert longest.seconds == pytest.approx(GPU.start + 1.5 * 1.25 * 2 * 256 * 2**40 / 1e12)
    assert longest.device > least.device + 16 * 2**20 * 256 * 2 / 2**20
    methods = jobs.methods_job(paper)
    assert GPU.start < on_gpu("methods", methods).seconds < GPU.start + len(methods.rows) * methods.seconds


def test_every_published_model_has_a_shape_and_a_size():
    from focus.models import PUBLISHED, REGISTRY

    drawn = {name for name, entry in REGISTRY.items() if entry.drawn}
    assert set(prediction.PUBLISHED_BYTES) == {*PUBLISHED, *drawn} <= set(KNOWN)
    assert {prediction.download(name) for name in drawn} == {0}
    assert prediction.download("mistral-7b") == pytest.approx(14.48e9 / 2**20, rel=0.01)
    assert prediction.download("pg19") and prediction.download("austen") is None


def test_a_scale_names_its_hardware():
    assert default().machine == CORE
    assert default(environment="cuda").machine == GPU
    named = default(hardware={"name": "another", "memory": 40.0}).machine
    assert (named.name, named.memory, named.utilisation) == ("another", 40.0, GPU.utilisation)


def test_a_repeated_job_asks_for_more_and_never_for_less_than_the_least():
    found = prediction.Prediction(seconds=3600.0, host=10_000.0, disk=1.0)
    assert [prediction.minutes_asked(found, attempt) for attempt in (1, 2, 3)] == [180, 360, 540]
    assert [prediction.memory_asked(found, 3000, attempt) for attempt in (1, 2, 3)] == [12_000, 18_000, 27_000]
    assert (prediction.memory_asked(found, 50_000), prediction.memory_asked(None, 3000)) == (50_000, 3000)
    assert (prediction.minutes_asked(None), prediction.minutes_asked(None, 2)) == (15, 30)
