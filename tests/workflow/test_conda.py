"""`--sdm conda` with real rules of the smoke scale, from a channel made here.

Real: the environment files, the lock and the post-deploy scripts, unchanged; Snakemake's side; the solver, the
installer and the packages' formats, by py-rattler; pip, which resolves and installs the lock and the package; the
rules, which run in what came of it. Stood in for: the `conda` program (conda/shim.py) and what the channel's packages
and the lock's wheels hold (conda_channel.py). Whether conda-forge has the versions asked for is not tested.
"""

import json
import os
import subprocess
from pathlib import Path

import conda_channel
import pytest
from conftest import ROOT, Checkout
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

CONDA = ("--profile", "profiles/conda", "--configfile", "config/smoke.yaml")
MODEL = "results/smoke/models/tiny-gpt2.json"
CORPUS = "results/smoke/corpora/austen.json"
INSTALLED = """
import importlib.metadata, json
print(json.dumps({each.name: each.version for each in importlib.metadata.distributions()}))
"""


@pytest.fixture(scope="module")
def conda(tmp_path_factory):
    """A checkout whose smoke scale has fetched a text and pretrained its model in a conda environment.

    The `focus` on PATH is a broken one: only an environment's own, before it there, can have made the results.
    """
    checkout = Checkout(tmp_path_factory.mktemp("conda"), stub=False)
    commands = tmp_path_factory.mktemp("commands")
    (commands / "focus").write_text("#!/bin/sh\necho not the focus of an environment >&2\nexit 1\n")
    (commands / "focus").chmod(0o755)
    variables = conda_channel.build(tmp_path_factory.mktemp("channels"), sorted((ROOT / "envs").glob("*.yaml")))
    before = os.pathsep.join(map(str, [Path(__file__).parent / "conda/bin", commands]))
    checkout.environment |= variables | {"PATH": f"{before}{os.pathsep}{checkout.environment['PATH']}"}
    checkout.run(MODEL, *CONDA)
    return checkout


def environments(checkout) -> list[Path]:
    return [path.with_suffix("") for path in (checkout.folder / ".conda").glob("*.env_setup_done")]


def listed(checkout, environment: Path) -> list[str]:
    """The packages that conda says it holds, by their files' names."""
    command = ["conda", "list", "--explicit", "--prefix", environment]
    lines = subprocess.check_output(command, env=checkout.environment, text=True).splitlines()
    return [line.rpartition("/")[2] for line in lines[1:]]


def test_the_rules_ran_in_the_environment_without_pythonpath(conda):
    (made,) = environments(conda)
    lines = Path(conda.environment["CONDA_STARTED"]).read_text().splitlines()
    ran = [
        (prefix, path, argv[2]) for prefix, path, argv in map(json.loads, lines) if argv[1] == str(made / "bin/focus")
    ]
    assert ran == [(str(made), None, "fetch"), (str(made), None, "pretrain")]
    assert conda.environment["PYTHONPATH"]
    result = json.loads((conda.folder / MODEL).with_suffix(".result.json").read_text())
    assert result["provenance"]["argv"][1] == "pretrain"
    assert json.loads((conda.folder / CORPUS).read_text())


def test_the_environment_holds_what_its_file_and_the_lock_name_and_the_package(conda):
    (made,) = environments(conda)
    assert made.with_suffix(".yaml").read_text() == (ROOT / "envs/cpu.yaml").read_text()
    assert listed(conda, made) == ["pip-24.3.1-0.tar.bz2", "python-3.11.11-0.tar.bz2"]
    python = [made / "bin/python", "-I", "-c"]
    installed = {
        canonicalize_name(name): version
        for name, version in json.loads(subprocess.check_output([*python, INSTALLED])).items()
    }
    for line in (ROOT / "envs/requirements.lock").read_text().splitlines():
        pin = Requirement(line)
        assert pin.specifier.contains(installed.pop(canonicalize_name(pin.name)))
    assert set(installed) == {"pip", "focus-attention"}
    where = subprocess.check_output([*python, "import focus; print(focus.__file__)"], text=True)
    assert Path(where.strip()) == conda.folder / "src/focus/__init__.py"


def test_a_package_that_does_not_exist_is_named_before_any_job(conda):
    file = conda.folder / "envs/cpu.yaml"
    before = file.read_text()
    file.write_text(before + "  - no-such-package=1.0\n")
    try:
        output = conda.run(CORPUS, *CONDA, "--forcerun", "fetch_corpus", code=1)
    finally:
        file.write_text(before)
    assert "Could not create conda environment" in output
    assert "no-such-package" in output
    assert "Traceback" not in output
    assert len(environments(conda)) == 1


def test_the_config_chooses_the_other_environment_which_does_without_flash_attention(conda):
    """The lock's own requirements were resolved in the first environment; here pip takes the lock as it is."""
    conda.environment["PIP_NO_DEPS"] = "1"
    before = set(environments(conda))
    try:
        conda.run(MODEL, *CONDA, "--config", "environment=cuda", "--conda-create-envs-only")
    finally:
        del conda.environment["PIP_NO_DEPS"]
    (made,) = set(environments(conda)) - before
    assert made.with_suffix(".yaml").read_text() == (ROOT / "envs/cuda.yaml").read_text()
    assert "cuda-nvcc-12.6-0.tar.bz2" in listed(conda, made)
    assert not list(made.glob("lib/python3.*/site-packages/flash_attn*"))
    assert list(made.glob("lib/python3.*/site-packages/focus_attention-*.dist-info"))
