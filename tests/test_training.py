"""The trainer: losses without logits, schedules, and runs that end the same however often they are killed."""

import json
import math
import multiprocessing
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import byte_tokenizer, focus_method, make_world, tiny_model, train_job
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from focus import jobs, pretraining, scales, trainer, training
from focus.checkpoint import Checkpoints, writing
from focus.config import Pretraining
from focus.errors import UserError
from focus.jobs import PretrainJob
from focus.loss import mean_loss, token_losses
from focus.method_config import Phase, Training, make_method
from focus.models import load_model
from focus.precision import product_dtype
from focus.provenance import PACKAGE, read_result, sources

CENTROIDS = Phase(trains="centroids", steps=5, learning_rate=1e-2)
EVERYTHING = Phase(trains="everything", steps=4, learning_rate=1e-3)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def run(world, job, name):
    outputs = world.outputs(name)
    training.run(job, model=world.model, corpus=world.corpus, **outputs)
    return outputs


def numbers(outputs):
    """All that must not depend on interruptions: weights, log and metrics, without times."""
    weights = {path.name: path.read_bytes() for path in outputs["weights"].iterdir()}
    log = [json.loads(line) for line in outputs["log"].read_text().splitlines()]
    metrics = read_result(outputs["output"])["metrics"]
    for record in log:
        del record["seconds"]
    return weights, log, {key: value for key, value in metrics.items() if key != "training_seconds"}


def slowly(world, job, name):
    """Runs in a process of its own, to be killed."""
    quick = trainer.mean_loss

    def slow(*arguments):
        time.sleep(0.1)
        return quick(*arguments)

    trainer.mean_loss = slow
    run(world, job, name)


def start_slow_run(world, job, name):
    process = multiprocessing.get_context("spawn").Process(target=slowly, args=(world, job, name))
    process.start()
    return process


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def two_phases(**settings):
    return train_job(focus_method([CENTROIDS, EVERYTHING], checkpoint_every=2, **settings))


def test_a_run_interrupted_by_an_error_ends_with_the_same_numbers(world, monkeypatch):
    expected = numbers(run(world, two_phases(), "whole"))
    quick = trainer.mean_loss
    for steps_before_failure in (3, 2, 3):
        calls = iter(range(steps_before_failure))

        def failing(*arguments, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return quick(*arguments)

        monkeypatch.setattr(trainer, "mean_loss", failing)
        with pytest.raises(KeyboardInterrupt):
            run(world, two_phases(), "cut")
    monkeypatch.setattr(trainer, "mean_loss", quick)
    assert numbers(run(world, two_phases(), "cut")) == expected
    assert len(expected[1]) == 9
    assert {record["phase"] for record in expected[1]} == {"centroids", "everything"}


def test_a_run_killed_twice_ends_with_the_same_numbers(world):
    expected = numbers(run(world, two_phases(), "whole"))
    log = world.outputs("cut")["checkpoints"] / "log.jsonl"
    for steps in (3, 6):
        process = start_slow_run(world, two_phases(), "cut")
        wait_for(lambda steps=steps: log.exists() and len(log.read_text().splitlines()) >= steps)
        process.kill()
        process.join()
    assert not world.outputs("cut")["output"].exists()
    assert numbers(run(world, two_phases(), "cut")) == expected


def test_a_second_process_waits_for_the_first_and_keeps_its_work(world, monkeypatch, capsys):
    process = start_slow_run(world, two_phases(), "shared")
    outputs = world.outputs("shared")
    wait_for((outputs["checkpoints"] / "log.jsonl").exists)
    monkeypatch.setattr(trainer, "mean_loss", lambda *arguments: pytest.fail("trained again"))
    run(world, two_phases(), "shared")
    assert process.exitcode in (0, None)
    assert "waiting for another process" in capsys.readouterr().out
    assert read_result(outputs["output"])["metrics"]["steps"] == 9
    process.join()


def test_a_checkpoint_of_other_settings_is_ignored(world, monkeypatch):
    other = train_job(focus_method([CENTROIDS, EVERYTHING], checkpoint_every=2, clip=0.5))
    expected = numbers(run(world, other, "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(training, "publishing", None)
        with pytest.raises(TypeError):
            run(world, two_phases(), "reused")
    assert (world.outputs("reused")["checkpoints"] / "latest.pt").exists()
    assert numbers(run(world, other, "reused")) == expected


@pytest.mark.parametrize("kept", [0, 300, -100])
def test_a_damaged_checkpoint_starts_the_run_again(world, monkeypatch, capsys, kept):
    expected = numbers(run(world, two_phases(), "whole"))
    with monkeypatch.context() as patch:
        patch.setattr(training, "publishing", None)
        with pytest.raises(TypeError):
            run(world, two_phases(), "damaged")
    path = world.outputs("damaged")["checkpoints"] / "latest.pt"
    path.write_bytes(path.read_bytes()[:kept])
    assert numbers(run(world, two_phases(), "damaged")) == expected
    assert "starting again, because it is damaged" in capsys.readouterr().out


def test_training_reads_no_held_out_document(world, monkeypatch):
    read, tokenise = [], training.tokenise

    def remember(documents, *arguments):
        read.extend(document.name for document in documents)
        return tokenise(documents, *arguments)

    monkeypatch.setattr(training, "tokenise", remember)
    run(world, train_job(focus_method([CENTROIDS])), "separate")
    assert read == ["d0", "d1", "d3", "d4"]


def test_only_what_a_phase_trains_is_written(world):
    centroids = run(world, train_job(focus_method([CENTROIDS])), "centroids")
    assert sorted(path.name for path in centroids["weights"].iterdir()) == ["focus.json", "focus.safetensors"]
    assert read_result(centroids["output"])["metrics"]["trained_parameters"] == 2 * (16 * 4 + 4 * 4)
    both = run(world, two_phases(), "both")
    base = load_file(both["weights"] / "base.safetensors")
    before = dict(tiny_model().named_parameters())
    assert base.keys() == before.keys()
    assert not any(torch.equal(base[name], before[name]) for name in base)


def test_training_through_hard_groups_runs_the_engine_and_moves_the_centroids(world):
    saved = {}
    for attention in ("soft", "hard"):
        outputs = run(world, train_job(focus_method([CENTROIDS], attention=attention)), attention)
        saved[attention] = load_file(outputs["weights"] / "focus.safetensors")
    assert read_result(outputs["output"])["provenance"]["backend"] == "focus hard, straight-through"
    assert not any(torch.equal(saved["soft"][name], saved["hard"][name]) for name in saved["soft"])


def test_from_scratch_forgets_the_models_own_weights(world):
    still = [EVERYTHING.model_copy(update={"learning_rate": 1e-12, "steps": 1})]
    outputs = run(world, train_job(focus_method(still, from_scratch=True)).model_copy(update={"seed": 5}), "scratch")
    saved, own = load_file(outputs["weights"] / "base.safetensors"), dict(tiny_model().named_parameters())
    matrices = [name for name in saved if saved[name].dim() == 2]
    assert matrices
    assert all((saved[name] - own[name]).abs().max() > 1e-3 for name in matrices)


def test_no_steps_still_calibrate_the_potentials(world):
    outputs = run(world, train_job(focus_method([CENTROIDS.model_copy(update={"steps": 0})])), "untrained")
    saved = load_file(outputs["weights"] / "focus.safetensors")
    assert any(tensor.abs().max() > 0.01 for name, tensor in saved.items() if name.endswith("potentials"))
    assert read_result(outputs["output"])["metrics"]["trained_parameters"] == 0
    trained = load_file(run(world, train_job(focus_method([CENTROIDS])), "trained")["weights"] / "focus.safetensors")
    assert not any(torch.equal(saved[name], trained[name]) for name in saved)


def test_the_log_tells_loss_dominance_and_far_pairs(world):
    outputs = run(world, train_job(focus_method([CENTROIDS])), "logged")
    log = [json.loads(line) for line in outputs["log"].read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5]
    assert all(record["loss"] > 0 and record["gradient_norm"] > 0 for record in log)
    for record in (log[0], log[-1]):
        assert len(record["layers"]) == 2
        assert all(0.25 <= layer["dominance"] <= 1 for layer in record["layers"])
        assert all(0 < layer["far_pairs_kept"] < layer["pairs_kept"] < 1 for layer in record["layers"])


def test_accumulation_equals_a_larger_batch(world):
    large = run(world, train_job(focus_method([CENTROIDS, EVERYTHING], {"balance": "softmax"}, batch_size=2)), "large")
    split = focus_method([CENTROIDS, EVERYTHING], {"balance": "softmax"}, accumulation=2)
    parts = run(world, train_job(split), "parts")
    for name in ("focus.safetensors", "base.safetensors"):
        expected, got = load_file(large["weights"] / name), load_file(parts["weights"] / name)
        for key in expected:
            torch.testing.assert_close(got[key], expected[key], atol=2e-4, rtol=0)


def test_gradient_checkpointing_changes_nothing(world):
    plain = run(world, two_phases(), "plain")
    saving = run(world, two_phases().model_copy(update={"model_settings": checkpointing()}), "saving")
    expected = load_file(plain["weights"] / "focus.safetensors")
    got = load_file(saving["weights"] / "focus.safetensors")
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], atol=1e-5, rtol=0)


def checkpointing():
    return two_phases().model_settings.model_copy(update={"gradient_checkpointing": True})


def test_full_finetuning_learns_the_text(world):
    settings = make_method(
        kind="full_finetuning",
        label="full",
        training=Training(phases=[Phase(trains="everything", steps=40, learning_rate=1e-2)], batch_size=2),
    )
    metrics = read_result(run(world, train_job(settings), "full")["output"])["metrics"]
    assert metrics["first_loss"] == pytest.approx(math.log(257), abs=0.3)
    assert metrics["final_loss"] < 3.5
    assert metrics["tokens"] == 40 * 2 * 32


def test_a_loss_that_is_not_finite_stops_the_run(world, monkeypatch):
    monkeypatch.setattr(trainer, "mean_loss", lambda *arguments: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(
        UserError, match=r"training step 1: expected a finite loss, got nan; lower phases.learning_rate"
    ):
        run(world, two_phases(), "nan")
    assert not world.outputs("nan")["output"].exists()


def test_a_gradient_that_is_not_finite_stops_the_run_and_is_in_no_checkpoint(world, monkeypatch):
    quick, calls = trainer.mean_loss, iter(range(3))

    def overflowing(*arguments):
        loss = quick(*arguments)
        if next(calls, None) is None:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    job = train_job(focus_method([EVERYTHING], checkpoint_every=1))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "mean_loss", overflowing)
        with pytest.raises(UserError, match=r"training step 4: expected a finite gradient norm, got (nan|inf); lower"):
            run(world, job, "steep")
    saved = torch.load(world.outputs("steep")["checkpoints"] / "latest.pt")
    assert saved["state"]["step"] == 3
    assert all(tensor.isfinite().all() for tensor in saved["tensors"].values())
    assert numbers(run(world, job, "steep")) == numbers(run(world, job, "whole"))


def test_the_checkpoint_outlives_every_output(world, monkeypatch):
    job, outputs = two_phases(), world.outputs("whole")
    remove, present = Checkpoints.remove, []

    def look(store):
        present.extend(outputs[name].exists() for name in ("weights", "log", "output"))
        assert store.path.exists()
        remove(store)

    monkeypatch.setattr(Checkpoints, "remove", look)
    run(world, job, "whole")
    assert present == [True, True, True]
    assert not (outputs["checkpoints"] / "latest.pt").exists()


def test_a_checkpoint_belongs_to_a_dtype_a_device_and_a_number_of_threads(monkeypatch):
    def of(dtype=torch.float32, device="cpu", threads=1):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return trainer.fingerprint({}, "code", {}, dtype, torch.device(device))

    assert of() == of()
    assert len({of(), of(dtype=torch.bfloat16), of(device="cuda"), of(threads=2)}) == 4


def test_only_failures_to_write_become_one_line():
    full = OSError(28, "No space left on device")
    for error in (full, RuntimeError("PytorchStreamWriter failed writing file data/0")):
        with (
            pytest.raises(UserError, match=r"^out: expected to write it, got (No space|Pytorch)"),
            writing(Path("out")),
        ):
            raise error
    with pytest.raises(RuntimeError, match="share memory"), writing(Path("out")):
        raise RuntimeError("Some tensors share memory")


def test_pretraining_does_not_depend_on_focus_code():
    names = {path.relative_to(PACKAGE).as_posix() for path in sources("focus.pretraining")}
    focus_code = {"adapter.py", "router.py", "memory.py", "gates.py", "attention/reference.py"}
    assert "trainer.py" in names
    assert not names & focus_code
    assert not [name for name in names if name.startswith("attention/")]
    assert focus_code < {path.relative_to(PACKAGE).as_posix() for path in sources("focus.training")}


def test_a_renamed_method_trains_and_evaluates_nothing_again():
    base = Path(__file__).parents[1] / "config" / "config.yaml"

    def made(*overrides):
        experiment = scales.load([base], overrides)
        place = (experiment, "gpt2-mini", "austen", "focus")
        rows = [make(*place, "hard-k2", 0) for make in (jobs.perplexity_job, jobs.downstream_job)]
        return [jobs.train_job(*place, 0), *rows]

    assert made("methods={focus: {label: Other name}}") == made()
    assert all(
        job != before for job, before in zip(made("methods={focus: {adapter: {sinks: 9}}}"), made(), strict=True)
    )


def test_a_full_disk_names_the_file_and_leaves_no_half_checkpoint(world):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    job = train_job(focus_method([EVERYTHING]))
    run(world, train_job(focus_method([CENTROIDS.model_copy(update={"steps": 0})])), "fills the token cache")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match=r"latest\.pt: expected to write it, got File too large"):
            run(world, job, "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in world.outputs("full")["checkpoints"].iterdir()} == {"lock", "log.jsonl"}


def test_learning_rate_rises_then_falls_as_a_cosine():
    phase = Phase(trains="everything", steps=100, learning_rate=2.0)
    rates = [trainer.learning_rate(phase, 0.1, step) for step in range(100)]
    assert rates[0] == pytest.approx(2 / 11)
    assert rates[10] == 2.0 == max(rates)
    assert rates[55] == pytest.approx(1.0)
    assert rates[99] < 0.01
    assert trainer.learning_rate(phase, 0.0, 0) == 2.0


def llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=300, num_key_value_heads=1, tie_word_embeddings=False))


def gemma():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Gemma2ForCausalLM(Gemma2Config(**shape, vocab_size=300, num_key_value_heads=1, head_dim=8))


@pytest.mark.parametrize("make", [tiny_model, llama, gemma])
def test_loss_and_gradients_are_those_of_the_logits(make):
    model = make().double()
    tokens = torch.randint(0, 250, (2, 23))
    expected = model(input_ids=tokens, labels=tokens).loss
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    (3 * mean_loss(model, tokens)).backward()
    assert mean_loss(model, tokens).item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 3 * gradients[name], atol=1e-6, rtol=1e-4)
    losses = token_losses(model, tokens, first=5)
    assert losses.shape == (2, 18)
    every = token_losses(model, tokens)
    torch.testing.assert_close(losses, every[:, 4:])
    assert every.mean().item() == pytest.approx(expected.item(), rel=1e-5)


def test_unlikely_targets_keep_their_loss():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(2000)
    tokens = torch.randint(0, 250, (1, 40))
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    assert expected > 100
    assert mean_loss(model, tokens).item() == pytest.approx(expected, rel=1e-5)


def test_a_frozen_head_still_passes_gradients_down():
    model = tiny_model().requires_grad_(False)
    model.transformer.ln_f.weight.requires_grad_(True)
    mean_loss(model, torch.randint(0, 250, (1, 20))).backward()
    assert model.transformer.ln_f.weight.grad.abs().sum() > 0
    assert model.lm_head.weight.grad is None


def test_auto_precision_follows_the_processor(monkeypatch):
    cpu = torch.device("cpu")
    for flag in ("avx512_bf16", "amx_bf16"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flag=flag: {flag: True})
        assert product_dtype("auto", cpu) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    assert product_dtype("auto", cpu) == torch.float32
    assert product_dtype("bfloat16", cpu) == torch.bfloat16


def test_pretraining_writes_a_model_that_loads_and_has_learnt(world, monkeypatch):
    tokenizer = {"source": "bytes", "revision": "sha256:1"}
    monkeypatch.setattr(pretraining, "load_tokenizer", lambda name: byte_tokenizer())
    monkeypatch.setattr(pretraining, "fetch_model", lambda name: tokenizer | {"folder": "models/bytes"})
    settings = Pretraining(
        corpora=["austen"], steps=40, learning_rate=1e-2, batch_size=2, context=32, layers=2, width=16, heads=2
    )
    job = PretrainJob(model="tiny-gpt2", pretraining=settings, seed=0, precision="float32")
    base = world.folder / "models"
    manifest = base / "tiny-gpt2.json"
    pretraining.run(
        job,
        corpora=[world.corpus],
        weights=base / "tiny-gpt2",
        log=base / "tiny-gpt2.log.jsonl",
        checkpoints=base / "checkpoints",
        output=manifest,
        result=base / "tiny-gpt2.result.json",
    )
    result = read_result(base / "tiny-gpt2.result.json")
    metrics = result["metrics"]
    assert result["provenance"]["revisions"]["tokenizer"] == tokenizer
    assert metrics["final_loss"] < 3.5 < metrics["first_loss"]
    model, tokenizer = load_model(manifest)
    tokens = tokenizer("the cat sat on a mat and the", return_tensors="pt")["input_ids"]
    assert token_losses(model, tokens).mean() < 3.5
    assert len((base / "tiny-gpt2.log.jsonl").read_text().splitlines()) == 40
