"""The lock, pyproject, the conda environments and the container recipes describe one and the same environment."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from focus.config import Experiment

ROOT = Path(__file__).parents[1]
ENVS = ROOT / "envs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = ["cpu", "cuda"]


def locked() -> dict[str, Version]:
    lines = (ENVS / "requirements.lock").read_text().split("\n")
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for pin in pins:
        assert re.fullmatch(r"==[^*]+", str(pin.specifier)), f"{pin} is no exact version"
    assert len({canonicalize_name(pin.name) for pin in pins}) == len(pins)
    return {canonicalize_name(pin.name): Version(str(pin.specifier)[2:]) for pin in pins}


EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    "wanted", [*PROJECT["dependencies"], *EXTRAS["cluster"], *EXTRAS["develop"]], ids=lambda each: each
)
def test_the_lock_holds_what_the_package_asks_for(wanted):
    requirement = Requirement(wanted)
    assert requirement.specifier.contains(locked()[canonicalize_name(requirement.name)], prereleases=True)


def test_flash_attention_is_pinned_and_never_in_the_lock():
    (pin,) = (ENVS / "flash.txt").read_text().split()
    assert Requirement(pin).name in PROJECT["optional-dependencies"]["flash"]
    assert re.fullmatch(r"==[\d.post]+", str(Requirement(pin).specifier))
    assert "flash-attn" not in locked()


@pytest.mark.parametrize("name", CONDA)
def test_conda_gives_a_pinned_python_and_pip_gives_the_lock_and_the_package(name):
    environment = yaml.safe_load((ENVS / f"{name}.yaml").read_text())
    pins = dict(each.split("=", 1) for each in environment["dependencies"])
    assert PROJECT["requires-python"] == ">=3.11,<3.12"
    assert pins["python"].startswith("3.11.")
    assert all(pins.values())
    script = (ENVS / f"{name}.post-deploy.sh").read_text()
    assert "--requirement envs/requirements.lock" in script
    assert "--no-deps --no-build-isolation --editable ." in script
    assert ("flash" in script) == (name == "cuda")


def test_every_environment_that_a_config_can_name_is_one_of_these():
    assert list(get_args(Experiment.model_fields["environment"].annotation)) == CONDA
    assert {path.name for path in ENVS.glob("*.yaml")} == {f"{name}.yaml" for name in CONDA}
    assert {path.name for path in ENVS.glob("*.sh")} == {f"{name}.post-deploy.sh" for name in CONDA}


def test_what_every_machine_gets_is_pinned_where_snakemake_must_obey():
    """Of a pin file that does not install it only warns, and then solves the environment file: so there is none."""
    assert not list(ENVS.glob("*.pin.txt"))
    pins = [yaml.safe_load((ENVS / f"{name}.yaml").read_text())["dependencies"] for name in CONDA]
    assert set(pins[0]) <= set(pins[1])
    assert all(re.fullmatch(r"[a-z]+=\d+\.\d+\.\d+", pin) for pin in pins[0])


@pytest.mark.parametrize("recipe", ["Dockerfile", "apptainer.def"])
def test_a_container_has_the_same_python_and_the_same_lock(recipe):
    text = (ENVS / recipe).read_text()
    python = dict(each.split("=", 1) for each in yaml.safe_load((ENVS / "cpu.yaml").read_text())["dependencies"])[
        "python"
    ]
    assert f"python:{python}-" in text
    assert "requirements.lock" in text
    assert "--editable ." in text


def test_every_rule_that_runs_the_package_names_the_environment_of_the_config():
    for file in (ROOT / "workflow/rules").glob("*.smk"):
        rules = re.split(r"\n(?=\s*rule\b)", file.read_text())
        for rule in rules:
            if "shell:" in rule:
                assert re.search(r"conda:\s+ENVIRONMENT\b", rule), f"{file.name}: {rule[:60]}"
