"""The smoke scale end to end with the real commands: killed twice on the way, then whole."""

import hashlib
import json
import os
import signal
import time

import pytest
from conftest import rows

from focus import scales

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4000)]

SMOKE = ("--configfile", "config/smoke.yaml")
# Long enough to be killed in the middle, with a checkpoint after every few steps.
LONGER = "model_settings={tiny-gpt2: {pretraining: {steps: 120, checkpoint_every: 5}}}"
MODEL = "results/{}/models/tiny-gpt2.json"


def kill_in_training(checkout, after, *, orphan):
    """Start the whole smoke scale; SIGKILL it once the pretraining log is longer than `after` lines.

    With `orphan` only Snakemake dies and its jobs go on, as after an out-of-memory kill; else all of them die. Returns
    the log's length at that moment.
    """
    log = checkout.folder / "results/smoke/checkpoints/models/tiny-gpt2/log.jsonl"
    process = checkout.start(*SMOKE, "--config", LONGER, start_new_session=True)
    while (steps := log.read_text().count("\n") if log.exists() else 0) <= after:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    if orphan:
        os.kill(process.pid, signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return steps


@pytest.fixture(scope="module")
def smoke(real):
    """The checkout after two kills and a run to the end, and what that run printed."""
    steps = kill_in_training(real, 10, orphan=False)
    assert not (real.folder / MODEL.format("smoke")).exists()
    kill_in_training(real, steps + 5, orphan=True)
    real.printed = real.run(*SMOKE, "--config", LONGER)
    return real


def test_a_run_killed_twice_carries_on_and_ends_with_the_same_weights(smoke):
    smoke.run(MODEL.format("uninterrupted"), *SMOKE, "--config", LONGER, "scale=uninterrupted")
    digests, losses = set(), set()
    for scale in ("smoke", "uninterrupted"):
        manifest = smoke.folder / MODEL.format(scale)
        digests.add(hashlib.sha256((manifest.with_suffix("") / "model.safetensors").read_bytes()).hexdigest())
        losses.add(json.loads(manifest.with_suffix(".result.json").read_text())["metrics"]["final_loss"])
        steps = [json.loads(line)["step"] for line in manifest.with_suffix(".log.jsonl").read_text().splitlines()]
        assert steps == sorted(set(steps))
    assert len(digests) == 1
    assert len(losses) == 1


def test_every_exhibit_is_there(smoke):
    results = smoke.folder / "results/smoke"
    tables = scales.load([smoke.folder / "config/config.yaml", smoke.folder / SMOKE[1]]).tables
    for name in (*tables, "table6", "table7speed"):
        for suffix in ("csv", "md", "tex"):
            assert (results / f"tables/{name}.{suffix}").stat().st_size
    for name in ("headline", "quality", "speed"):
        assert (results / f"figures/{name}.pdf").read_bytes().startswith(b"%PDF")
        assert (results / f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((results / "claims.json").read_text())


def test_every_result_says_where_it_comes_from(smoke):
    results = smoke.folder / "results/smoke"
    experiment = scales.load([smoke.folder / "config/config.yaml", smoke.folder / SMOKE[1]])
    found = {
        tuple(file.relative_to(results).with_suffix("").parts[1:]) for file in results.glob("perplexity/**/*.json")
    }
    assert found == {(*row[:4], f"seed{row[4]}") for row in rows(experiment)}
    for file in [*results.glob("perplexity/**/*.json"), *results.glob("downstream/**/*.json")]:
        result = json.loads(file.read_text())
        assert result["provenance"]["revisions"]["model"]
        assert result["provenance"]["threads"] == 1
        assert str(smoke.folder) not in file.read_text()


def test_progress_is_printed_and_logged(smoke):
    line = "training tiny-gpt2 focus [####################]"
    log = smoke.folder / "results/smoke/logs/training/tiny-gpt2/austen/focus/seed0.log"
    assert line in smoke.printed
    assert line in log.read_text()
    assert "train focus on tiny-gpt2 (austen, seed 0)" in smoke.printed


def test_nothing_is_left_to_do(smoke):
    assert smoke.planned(*SMOKE, "--config", LONGER) == {}


def test_the_report_shows_exhibits_with_captions(smoke):
    smoke.run(*SMOKE, "--config", LONGER, "--report", "report.html")
    report = (smoke.folder / "report.html").read_text()
    for name in ("Tables", "Figures", "Claims", "quality.png", "table1.html", "claims.html", "table6.html"):
        assert name in report


def test_a_truncated_model_is_named_and_spoils_no_result(smoke):
    weights = smoke.folder / "results/smoke/models/tiny-gpt2/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    row = "results/smoke/perplexity/tiny-gpt2/austen/pretrained/full/seed0.json"
    output = smoke.run(row, *SMOKE, "--config", LONGER, "--forcerun", "perplexity", code=1)
    assert f"model.safetensors: expected {len(whole)} bytes, got {len(whole) - 100}" in output
    assert not (smoke.folder / row).exists()
    weights.write_bytes(whole)
    smoke.run(row, *SMOKE, "--config", LONGER)
