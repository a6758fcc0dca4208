"""Several processes: the same numbers as one, sharded weights, a run that is killed and resumes, clear refusals."""

import json
import re
import subprocess
import sys

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file
from tiny import focus_method, make_world, tiny_model, train_job
from transformers import LlamaConfig, LlamaForCausalLM

from focus import adapter, cli, compose, training
from focus.loss import mean_loss
from focus.method_config import FocusConfig, Phase
from focus.provenance import read_result

CENTROIDS = Phase(trains="centroids", steps=4, learning_rate=1e-2)
EVERYTHING = Phase(trains="everything", steps=3, learning_rate=1e-3)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return make_world(tmp_path)


def job(phases, processes, settings=None, **model_settings):
    settings = focus_method(phases, batch_size=4, checkpoint_every=2, **(settings or {}))
    return train_job(settings, processes=processes, **model_settings)


def command(world, job, name):
    options = {"job": job.model_dump_json(), "model": world.model, "corpus": world.corpus, **world.outputs(name)}
    return [sys.executable, "-m", "focus.cli", "train", *(f"--{key}={value}" for key, value in options.items())]


def train(world, job, name, start=None):
    """The focus command itself; `start` is Python that each process runs before it."""
    line = command(world, job, name)
    if start is not None:
        line[1:3] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--", start]
    return subprocess.run(line, check=False, capture_output=True, text=True, timeout=900)


def outcome(world, name):
    outputs = world.outputs(name)
    log = [json.loads(line) for line in outputs["log"].read_text().splitlines()]
    weights = {}
    for path in sorted(outputs["weights"].glob("*.safetensors")):
        weights |= load_file(path)
    return log, weights, read_result(outputs["output"])["metrics"]


def alone(world, job):
    training.run(job, model=world.model, corpus=world.corpus, **world.outputs("one"))
    return outcome(world, "one")


def same(one, many):
    for name in ("loss", "gradient_norm", "learning_rate"):
        expected = torch.tensor([record[name] for record in one[0]])
        torch.testing.assert_close(torch.tensor([record[name] for record in many[0]]), expected, rtol=2e-5, atol=1e-6)
    assert one[1].keys() == many[1].keys()
    for name, tensor in one[1].items():
        torch.testing.assert_close(many[1][name], tensor, rtol=1e-4, atol=2e-5)
    assert one[2]["trained_parameters"] == many[2]["trained_parameters"]


@pytest.mark.parametrize(
    "phases, settings",
    [([CENTROIDS], {"accumulation": 2}), ([EVERYTHING], {"from_scratch": True})],
    ids=["centroids", "scratch"],
)
def test_two_processes_train_as_one_does(world, phases, settings):
    done = train(world, job(phases, 2, settings, gradient_checkpointing=True), "two")
    assert done.returncode == 0, done.stderr
    same(alone(world, job(phases, 1, settings)), outcome(world, "two"))


CUT = """
import os, sys
from focus import cli, trainer
real, calls = trainer._step, iter(range(6))
def step(*arguments):
    if next(calls, None) is None:
        os._exit(9)
    return real(*arguments)
trainer._step = step
cli.main()
"""


def test_processes_that_die_resume_and_end_as_one_process_does(world, tmp_path):
    """They die in the second phase, after a checkpoint with sharded moments."""
    settings = job([CENTROIDS, EVERYTHING], 2)
    script = tmp_path / "cut.py"
    script.write_text(CUT)
    assert train(world, settings, "cut", str(script)).returncode != 0
    assert not world.outputs("cut")["output"].exists()
    resumed = train(world, settings, "cut")
    assert resumed.returncode == 0, resumed.stderr
    # One process may be ended while the other still writes the checkpoint of step 6.
    assert len(re.findall("resuming after step [46]", resumed.stdout)) == 1
    same(alone(world, job([CENTROIDS, EVERYTHING], 1)), outcome(world, "cut"))


@pytest.mark.parametrize(
    "processes, environment, expected",
    [
        (3, {}, "training.batch_size: expected a multiple of model_settings.processes (3), got 4"),
        (2, {"WORLD_SIZE": "4", "RANK": "0"}, "WORLD_SIZE: expected model_settings.processes (2) or 1, got 4"),
        (2, {"WORLD_SIZE": "4", "RANK": "1"}, None),
    ],
)
def test_a_wrong_launch_is_one_line(world, monkeypatch, capsys, processes, environment, expected):
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", ["focus", *command(world, job([CENTROIDS], processes), "wrong")[3:]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (f"focus: error: {expected}\n" if expected else "")


def test_the_routers_of_a_bfloat16_base_are_float32_and_train():
    model = compose(tiny_model().to(torch.bfloat16), FocusConfig(groups=4, window=4, routing_dim=4))
    adapter.switch(model, "soft")
    mean_loss(model, torch.arange(64)[None]).backward()
    for name, parameter in model.named_parameters():
        router = ".focus." in name
        assert parameter.dtype == (torch.float32 if router else torch.bfloat16)
        assert (parameter.grad is not None) == router
        assert not router or parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_focus_works_on_layers_that_accelerate_has_placed(tmp_path, attention):
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **shape)).eval()
    placed = LlamaForCausalLM(plain.config).eval()
    placed.load_state_dict(plain.state_dict())
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    placed = dispatch_model(placed, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert any(parameter.is_meta for parameter in placed.parameters())
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = []
    for model in (plain, placed):
        compose(model, FocusConfig(groups=4, window=4, routing_dim=4))
        adapter.switch(model, attention)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    torch.testing.assert_close(logits[1], logits[0])
