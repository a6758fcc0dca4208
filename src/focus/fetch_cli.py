"""The commands `focus fetch ...`: one thin command per rule, as in cli.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

fetch = typer.Typer(no_args_is_help=True)

Output = Annotated[Path, typer.Option(help="the file to write")]


@fetch.command("model")
def fetch_model(name: str, output: Output) -> None:
    """A pretrained model."""
    from focus import models

    _write_manifest(output, models.fetch_model(name))


@fetch.command("corpus")
def fetch_corpus(name: str, output: Output) -> None:
    """A text, cut into documents."""
    from focus import corpora

    _write_manifest(output, corpora.fetch_corpus(name))


@fetch.command("benchmark")
def fetch_benchmark(name: str, output: Output) -> None:
    """The items of a downstream task."""
    from focus import benchmarks

    _write_manifest(output, benchmarks.fetch_benchmark(name))


@fetch.command("tagger")
def fetch_tagger(name: str, output: Output) -> None:
    """A part-of-speech tagger."""
    from focus import taggers

    _write_manifest(output, taggers.fetch_tagger(name))


def _write_manifest(path: Path, manifest: dict) -> None:
    from focus.provenance import write_atomically

    write_atomically(path, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
