"""The commands `focus groups ...`: one thin command per rule, as in cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

groups = typer.Typer(no_args_is_help=True)

Job = Annotated[str, typer.Option(help="the job's settings as JSON (focus.jobs)")]
Model = Annotated[Path, typer.Option(help="the model's manifest")]
Corpus = Annotated[Path, typer.Option(help="the corpus's manifest")]
Trained = Annotated[Path | None, typer.Option(help="the folder of the method's trained weights")]
Analysed = Annotated[Path, typer.Option(help="the result of focus groups analyse")]
Output = Annotated[Path, typer.Option(help="the file to write")]
Prefix = Annotated[Path, typer.Option(help="the files to write, without their suffixes")]


@groups.command("analyse")
def groups_analyse(
    job: Job,
    model: Model,
    corpus: Corpus,
    tagger: Annotated[Path, typer.Option(help="the tagger's manifest")],
    output: Output,
    weights: Trained = None,
) -> None:
    """Find what a row's groups hold on held-out documents."""
    from focus import groups as analysis
    from focus.jobs import GroupsJob
    from focus.wording import parse

    manifests = {"model": model, "corpus": corpus, "tagger": tagger}
    analysis.run(parse(GroupsJob, job, "--job"), **manifests, weights=weights, output=output)


@groups.command("table")
def groups_table(result: Analysed, output: Prefix) -> None:
    """Write the table as CSV, Markdown, HTML and LaTeX."""
    from focus.paper import groups as exhibit

    exhibit.write(result, output)


@groups.command("figure")
def groups_figure(result: Analysed, output: Prefix) -> None:
    """Write shares and purity over the layers as PDF and PNG."""
    from focus.paper import groups_figure as exhibit

    exhibit.write(result, output)


@groups.command("page")
def groups_page(result: Analysed, output: Output) -> None:
    """Write a passage coloured by group as one HTML file."""
    from focus.paper import groups_page as exhibit

    exhibit.write(result, output)
