"""The commands `focus leak ...` and `focus bits ...`: one thin command per rule, as in cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

leak = typer.Typer(no_args_is_help=True)
bits = typer.Typer(no_args_is_help=True)

Job = Annotated[str, typer.Option(help="the job's settings as JSON (focus.jobs)")]
Model = Annotated[Path, typer.Option(help="the model's manifest")]
Corpus = Annotated[Path, typer.Option(help="the corpus's manifest")]
Trained = Annotated[Path, typer.Option(help="the folder of the method's trained weights")]
Output = Annotated[Path, typer.Option(help="the file to write")]
Prefix = Annotated[Path, typer.Option(help="the files to write, without their suffixes")]


@leak.command("measure")
def leak_measure(
    job: Job,
    model: Model,
    corpus: Corpus,
    weights: Trained,
    output: Output,
    others: Annotated[list[Path] | None, typer.Argument(help="manifests of the job's other corpora")] = None,
) -> None:
    """Measure one row's trained centroids under each balance."""
    from focus import leak as measure
    from focus.jobs import LeakJob

    manifests = {"model": model, "corpus": corpus, "others": others or []}
    measure.run(LeakJob.model_validate_json(job), **manifests, weights=weights, output=output)


@leak.command("table")
def leak_table(results: list[Path], output: Prefix) -> None:
    """Write the table as CSV, Markdown, HTML and LaTeX."""
    from focus.paper import leak as exhibit

    exhibit.write(results, output)


@bits.command("train")
def bits_train(job: Job, output: Output) -> None:
    """Learn random bits under one balance, and measure the loss on fresh ones."""
    from focus import random_bits
    from focus.jobs import BitsJob

    random_bits.run(BitsJob.model_validate_json(job), output)


@bits.command("table")
def bits_table(results: list[Path], output: Prefix) -> None:
    """Write the table as CSV, Markdown, HTML and LaTeX."""
    from focus.paper import bits as exhibit

    exhibit.write(results, output)


@bits.command("figure")
def bits_figure(results: list[Path], output: Prefix) -> None:
    """Write the loss over the length as PDF and PNG."""
    from focus.paper import bits_figure as exhibit

    exhibit.write(results, output)
