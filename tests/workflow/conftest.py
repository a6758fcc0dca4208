"""A copy of the workflow in a folder of its own, run by the environment's Snakemake."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("Snakefile", "workflow", "profiles", "config", "envs", "src", "README.md", "pyproject.toml")


def rows(experiment) -> set[tuple]:
    """(model, corpus, method, variant, seed) of every row whose perplexity a table or figure shows."""
    return {
        row
        for exhibit in [*experiment.tables.values(), *experiment.figures.values()]
        if exhibit.shows != "dominance"
        for row in rows_of(experiment, exhibit)
    }


def trained(experiment) -> set[tuple]:
    """(model, corpus, method, seed) of everything that is trained."""
    exhibits = [*experiment.tables.values(), *experiment.figures.values()]
    cells = {(row[0], row[1], row[2], row[4]) for exhibit in exhibits for row in rows_of(experiment, exhibit)}
    groups = experiment.groups
    if groups and groups.model in experiment.models:
        cells.add((groups.model, groups.corpus, groups.method, experiment.seeds_of(groups.model, groups.method)[0]))
    for row in experiment.leak.rows if experiment.leak else []:
        if row.model in experiment.models:
            seeds = experiment.seeds_of(row.model, row.method)
            cells |= {(row.model, row.corpus, row.method, seed) for seed in seeds}
    return {cell for cell in cells if experiment.methods[cell[2]].training}


def rows_of(experiment, exhibit) -> set[tuple]:
    """(model, corpus, method, variant, seed) of every row of one table or figure."""
    return {
        (model, row.corpus or exhibit.corpus, row.method, row.variant, seed)
        for model in experiment.models
        if model in (exhibit.models or experiment.models)
        for row in exhibit.rows
        for seed in experiment.seeds_of(model, row.method)
    }


class Checkout:
    """A working copy; `stub` puts a `focus` command that only writes its outputs before the real one.

    `options` are Snakemake's in every run.
    """

    def __init__(self, folder: Path, stub: bool, options: tuple[str, ...] = ("--cores", "2")):
        self.folder = folder
        self.options = options
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            elif source.exists():
                shutil.copy(source, folder / part)
        commands = [Path(__file__).parent / "stub"] * stub + [Path(sys.executable).parent]
        path = os.pathsep.join([*map(str, commands), os.environ["PATH"]])
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": str(folder / "src")}

    def start(self, *arguments: str, **options) -> subprocess.Popen:
        """Start Snakemake, by default on all tests' cores; both streams in one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", *self.options, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def run(self, *arguments: str, code: int = 0, timeout: float = 2400) -> str:
        """Run Snakemake to its end; return what it printed."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=timeout)
        assert process.returncode == code, output
        return output

    def planned(self, *arguments: str) -> dict[str, int]:
        """How many jobs of each rule a run would start."""
        lines = self.run(*arguments, "--dry-run", "--quiet", "rules").splitlines()
        pairs = [line.split() for line in lines]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit() and pair[0] != "total"}


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path, stub=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A checkout whose laptop scale has run to its end with the stub."""
    checkout = Checkout(tmp_path_factory.mktemp("finished"), stub=True)
    checkout.run()
    return checkout


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A checkout that runs the real commands."""
    return Checkout(tmp_path_factory.mktemp("real"), stub=False)
