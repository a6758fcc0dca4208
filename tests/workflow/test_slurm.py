"""The workflow through a real SLURM of one machine, with profiles/slurm.

The whole smoke scale takes ten minutes of every core, a job's time limit and a timing minutes of waiting; they run when
asked:

    FOCUS_WHOLE_SLURM=1 pytest tests/workflow/test_slurm.py
"""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import slurm_cluster
import yaml
from conftest import ROOT, Checkout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ASKED = pytest.mark.skipif("FOCUS_WHOLE_SLURM" not in os.environ, reason="takes minutes: set FOCUS_WHOLE_SLURM=1")

# A machine of its own needs no patience with a shared file system or a busy controller.
PROFILE = ("--profile", "profiles/slurm", "--slurm-init-seconds-before-status-checks", "8", "--latency-wait", "10")
SMOKE = ("--configfile", "config/smoke.yaml")
# Long enough to be cancelled in the middle, with a checkpoint after every few steps.
LONGER = ("--config", "model_settings={tiny-gpt2: {pretraining: {steps: 120, checkpoint_every: 5}}}")

GPU = """\
rule all:
    input: "with.txt", "without.txt"

rule on_gpu:
    output: "with.txt"
    resources: gpu=1
    shell: "echo devices ${{CUDA_VISIBLE_DEVICES-none}} > {output}"

rule on_cpu:
    output: "without.txt"
    resources: gpu=0
    shell: "echo devices ${{CUDA_VISIBLE_DEVICES-none}} > {output}"
"""

# The first try sleeps until SLURM ends it; each notes the limit it was given.
LATE = """\
rule late:
    output: "late.txt"
    log: "late.log"
    resources: runtime=lambda wildcards, attempt: attempt
    shell: "squeue --noheader --jobs $SLURM_JOB_ID --format %l >> limits.txt; echo tried >> {log};"
           " [ $(wc -l < limits.txt) = 2 ] && touch {output} || sleep 600"
"""


@pytest.fixture(scope="module")
def slurm():
    """The folder of a SLURM that lives as long as this module's tests."""
    try:
        slurm_cluster.install()
    except slurm_cluster.NoSlurm as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    with slurm_cluster.running() as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(slurm, tmp_path_factory):
    """A checkout whose real commands run through that SLURM."""
    return Checkout(tmp_path_factory.mktemp("cluster"), stub=False, options=PROFILE)


@pytest.fixture
def small(slurm, tmp_path):
    """A checkout for a Snakefile of a test's own."""
    return Checkout(tmp_path, stub=False, options=PROFILE)


def jobs(slurm: Path) -> list[dict[str, str]]:
    """What SLURM noted of every job that has ended, in their order."""
    lines = (slurm / "jobs.txt").read_text().splitlines()
    return [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]


def sent(printed: str) -> list[str]:
    """The rules of the jobs that Snakemake gave to SLURM."""
    return sorted(re.findall(r"has been submitted with SLURM jobid \d+ \(log: .*/rule_(\w+)/", printed))


def test_only_jobs_that_ask_for_a_gpu_get_one(small):
    (small.folder / "Snakefile").write_text(GPU)
    small.run()
    assert (small.folder / "with.txt").read_text() == "devices 0\n"
    assert (small.folder / "without.txt").read_text() == "devices none\n"


def test_rules_ask_for_gpus_by_the_name_that_the_executor_reads():
    for file in (ROOT / "workflow/rules").glob("*.smk"):
        assert not re.search(r"^\s+(gpus|nvidia_gpu)=", file.read_text(), re.MULTILINE), f"{file.name}: expected gpu="


@ASKED
def test_a_job_that_ran_out_of_time_is_tried_again_with_more(small, slurm):
    (small.folder / "Snakefile").write_text(LATE)
    before = len(jobs(slurm)) if (slurm / "jobs.txt").exists() else 0
    printed = small.run()
    assert "SLURM status is: 'TIMEOUT'" in printed
    assert (small.folder / "limits.txt").read_text().split() == ["1:00", "2:00"]
    assert [job["JobState"] for job in jobs(slurm)[before:]] == ["TIMEOUT", "COMPLETED"]


def test_a_cancelled_job_is_reported_and_the_next_run_carries_on(cluster):
    """The fetched text before it is no SLURM job."""
    manifest = "results/smoke/models/tiny-gpt2.json"
    log = cluster.folder / "results/smoke/checkpoints/models/tiny-gpt2/log.jsonl"
    process = cluster.start(manifest, *SMOKE, *LONGER, "--retries", "0")
    while not log.exists() or len(log.read_text().splitlines()) < 11:  # the tenth step's checkpoint is written by then
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    subprocess.run(["scancel", "--user=root"], check=True)
    printed, _ = process.communicate(timeout=900)
    assert process.returncode == 1
    assert "SLURM status is: 'CANCELLED'" in printed
    assert "Error in rule pretrain" in printed
    assert sent(printed) == ["pretrain"]
    assert not (cluster.folder / manifest).exists()
    kept = log.read_text().splitlines()[:10]

    cluster.run(manifest, *SMOKE, *LONGER)
    lines = (cluster.folder / manifest).with_suffix(".log.jsonl").read_text().splitlines()
    assert lines[:10] == kept  # with their seconds, so they were not made again


def test_rows_run_through_it_and_downloads_and_tables_stay_at_home(cluster):
    table = "results/smoke/tables/longcontext.md"
    printed = cluster.run(table, *SMOKE, *LONGER)
    assert "| Focus" in (cluster.folder / table).read_text()
    assert sent(printed) == ["perplexity", "perplexity", "train"]
    assert cluster.planned(table, *SMOKE, *LONGER) == {}


@ASKED
def test_timings_take_a_node_for_themselves(cluster, slurm):
    """Though this job asks for one core."""
    printed = cluster.run("table6", *SMOKE, *LONGER, "--set-threads", "bench_attention=1")
    assert sent(printed) == ["bench_attention"]
    assert jobs(slurm)[-1]["ProcCnt"] == str(len(os.sched_getaffinity(0)))


@ASKED
def test_the_whole_smoke_scale_runs_through_it(cluster, slurm):
    cluster.run(*SMOKE, timeout=2700)
    assert {job["JobState"] for job in jobs(slurm)} <= {"COMPLETED", "CANCELLED", "TIMEOUT"}
    assert (cluster.folder / "results/smoke/report.html").stat().st_size
    assert cluster.planned(*SMOKE) == {}


def test_the_profile_keeps_what_everyone_has():
    """A profile replaces nothing of profiles/default by less, and does not choose account or partition for its user."""
    default, profile = (
        yaml.safe_load((ROOT / f"profiles/{name}/config.yaml").read_text()) for name in ("default", "slurm")
    )
    assert default.items() <= profile.items()
    assert profile["retries"] >= 1
    assert not {"slurm_account", "slurm_partition"} & set(profile["default-resources"])
