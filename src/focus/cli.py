"""The `focus` command: one thin command per rule of the workflow.

Progress goes to standard output, diagnostics to standard error. What the user can mend prints one line and
exits with 2.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from focus import fetch_cli, groups_cli, leak_cli
from focus.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config = typer.Typer(no_args_is_help=True)
app.add_typer(fetch_cli.fetch, name="fetch", help="Fetch a registry entry into the cache and write its manifest.")
bench = typer.Typer(no_args_is_help=True)
app.add_typer(bench, name="bench", help="Time attention; write the tables and the figure of such a result.")
app.add_typer(
    groups_cli.groups,
    name="groups",
    help="Look into the groups of a row; write the table, figure and page of a result.",
)
app.add_typer(leak_cli.leak, name="leak", help="Measure whether trained groups see the future; write the table.")
app.add_typer(leak_cli.bits, name="bits", help="Learn random bits; write the table and the figure of such results.")
app.add_typer(config, name="config", help="Check config files, print their schema.")

Job = Annotated[str, typer.Option(help="the job's settings as JSON (focus.jobs)")]
Scale = Annotated[str, typer.Option(help="the scale's settings as JSON (focus.config.Experiment)")]
Results = Annotated[Path, typer.Option(help="the scale's folder of results")]
Model = Annotated[Path, typer.Option(help="the model's manifest")]
Corpus = Annotated[Path, typer.Option(help="the corpus's manifest")]
Weights = Annotated[Path, typer.Option(help="the folder to write weights to")]
Trained = Annotated[Path | None, typer.Option(help="the folder of the method's trained weights")]
Log = Annotated[Path, typer.Option(help="the JSONL log, one line a step")]
Checkpoints = Annotated[Path, typer.Option(help="the folder a killed run resumes from")]
Output = Annotated[Path, typer.Option(help="the file to write")]
Timed = Annotated[Path, typer.Option(help="the result of focus bench attention")]
Prefix = Annotated[Path, typer.Option(help="the files to write, without their suffixes")]


def main() -> None:
    """Run the command line; turn the user's mistakes into one line and exit code 2."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app(prog_name="focus")
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        _fail(f"{error.filename or 'a file'}: expected to write or read it, got: {error.strerror}")


def _fail(line: str) -> None:
    print(f"focus: error: {line}", file=sys.stderr)
    sys.exit(2)


@app.command()
def pretrain(
    corpora: list[Path], job: Job, weights: Weights, log: Log, checkpoints: Checkpoints, output: Output, result: Output
) -> None:
    """Train a model from scratch on the manifests CORPORA; write its manifest and result."""
    from focus import pretraining
    from focus.jobs import PretrainJob

    pretraining.run(
        _settings(PretrainJob, job),
        corpora=corpora,
        weights=weights,
        log=log,
        checkpoints=checkpoints,
        output=output,
        result=result,
    )


@app.command()
def train(
    job: Job, model: Model, corpus: Corpus, weights: Weights, log: Log, checkpoints: Checkpoints, output: Output
) -> None:
    """Train one method on one model and corpus."""
    from focus import launch, training
    from focus.jobs import TrainJob

    settings = _settings(TrainJob, job)
    code = launch.launch(settings)
    if code is not None:
        sys.exit(code)
    training.run(
        settings,
        model=model,
        corpus=corpus,
        weights=weights,
        log=log,
        checkpoints=checkpoints,
        output=output,
    )


@app.command()
def perplexity(job: Job, model: Model, corpus: Corpus, output: Output, weights: Trained = None) -> None:
    """Measure one row's perplexity on held-out documents."""
    from focus.evaluation import perplexity as evaluation
    from focus.jobs import PerplexityJob

    evaluation.run(_settings(PerplexityJob, job), model=model, corpus=corpus, weights=weights, output=output)


@app.command("gate-values")
def gate_values(job: Job, model: Model, corpus: Corpus, output: Output, weights: Trained = None) -> None:
    """Measure what one row's soft gate gives to near and to far pairs of held-out documents."""
    from focus import gate_values as measurement
    from focus.jobs import PerplexityJob

    measurement.run(_settings(PerplexityJob, job), model=model, corpus=corpus, weights=weights, output=output)


@app.command()
def downstream(benchmarks: list[Path], job: Job, model: Model, output: Output, weights: Trained = None) -> None:
    """Measure one row on the tasks whose manifests are BENCHMARKS, each named after its task."""
    from focus.evaluation import downstream as evaluation
    from focus.jobs import DownstreamJob

    evaluation.run(
        _settings(DownstreamJob, job),
        model=model,
        benchmarks={path.stem: path for path in benchmarks},
        weights=weights,
        output=output,
    )


@app.command()
def generate(benchmark: Path, job: Job, model: Model, output: Output, weights: Trained = None) -> None:
    """Let one row answer the items of the manifest BENCHMARK."""
    from focus.evaluation import generation as evaluation
    from focus.jobs import GenerationJob

    evaluation.run(_settings(GenerationJob, job), model=model, benchmark=benchmark, weights=weights, output=output)


@app.command("long-inputs")
def long_inputs(
    benchmarks: list[Path], job: Job, model: Model, corpus: Corpus, output: Output, weights: Trained = None
) -> None:
    """Measure one row on the tasks whose manifests are BENCHMARKS, each item behind other tokens."""
    from focus.evaluation import long_inputs as evaluation
    from focus.jobs import LongInputsJob

    evaluation.run(
        _settings(LongInputsJob, job),
        model=model,
        corpus=corpus,
        benchmarks={path.stem: path for path in benchmarks},
        weights=weights,
        output=output,
    )


@app.command()
def recall(job: Job, model: Model, corpus: Corpus, output: Output, weights: Trained = None) -> None:
    """Measure what one row recalls from far back."""
    from focus.evaluation import recall as evaluation
    from focus.jobs import RecallJob

    evaluation.run(_settings(RecallJob, job), model=model, corpus=corpus, weights=weights, output=output)


@app.command()
def table(name: str, scale: Scale, results: Results, output: Prefix) -> None:
    """Write a table as CSV, Markdown and LaTeX from result files."""
    from importlib import import_module

    from focus.config import TABLE_MODULES, Experiment

    experiment = _settings(Experiment, scale, "--scale")
    exhibit = experiment.tables[name]
    import_module(TABLE_MODULES[exhibit.shows]).write(name, exhibit, experiment, results, output)


@app.command()
def figure(name: str, scale: Scale, results: Results, output: Prefix) -> None:
    """Write a figure as PDF and PNG from result files or training logs."""
    from importlib import import_module

    from focus.config import FIGURE_MODULES, Experiment

    experiment = _settings(Experiment, scale, "--scale")
    exhibit = experiment.figures[name]
    import_module(FIGURE_MODULES[exhibit.shows]).write(name, exhibit, experiment, results, output)


@app.command()
def claims(
    claims_file: Path,
    scale: Scale,
    results: Results,
    output: Output,
    markdown: Output,
    partial: Annotated[bool, typer.Option("--partial", help="a missing result is a claim not run, no error")] = False,
) -> None:
    """Give each claim of CLAIMS_FILE its verdict, from result files."""
    from focus.config import Experiment
    from focus.paper import claims as verdicts

    verdicts.write(claims_file, _settings(Experiment, scale, "--scale"), results, output, markdown, partial=partial)


@app.command()
def report(
    results: Path,
    output: Prefix,
    scale: Annotated[str, typer.Option(help="the scale's settings as JSON, for the figures' titles")] = "",
    captions: Annotated[Path | None, typer.Option(help="the folder of the figures' texts")] = None,
    configfile: Annotated[list[str], typer.Option(help="what the page's commands name after --configfile")] = (),
) -> None:
    """Put the verdicts, figures and tables of RESULTS on one page: HTML, Markdown and LaTeX."""
    from focus.config import Experiment
    from focus.paper import report as page

    experiment = Experiment.model_validate_json(scale) if scale else None
    page.write(results, output, experiment=experiment, captions=captions, config_files=tuple(configfile))


@app.command("so-far")
def so_far(files: Annotated[list[Path] | None, typer.Argument(help="laid over config/config.yaml")] = None) -> None:
    """Write the tables, figures, verdicts and page of an unfinished run in this folder from the results it has."""
    from focus import scales
    from focus.paper import so_far as unfinished

    experiment = scales.load(scales.layered([scales.BASE, *(files or [])]))
    results, claims_file, captions = (
        Path("results") / experiment.scale,
        Path("config/claims.yaml"),
        Path("workflow/report"),
    )
    for line in unfinished.write(experiment, results, claims_file, captions):
        print(line)


@app.command()
def reference(results: Path, folder: Path) -> None:
    """Replace FOLDER by what the repository keeps of RESULTS."""
    from focus.paper.reference import keep

    print(f"{folder}: {len(keep(results, folder))} files kept")


@app.command()
def compare(first: Path, second: Path) -> None:
    """Say whether two folders of results (results/SCALE) hold the same tables, figures and numbers; exit 1 if not."""
    from focus import compare as comparing

    found = comparing.compare(first, second)
    print(found.text(), end="")
    if found.differences:
        raise typer.Exit(1)


@app.command()
def cost(
    files: Annotated[list[Path] | None, typer.Argument(help="laid over config/config.yaml")] = None,
    scale: Annotated[str | None, typer.Option(help="a file of config/ by its name: paper, overnight, smoke")] = None,
    output: Annotated[Path | None, typer.Option(help="keep the page in this file too")] = None,
) -> None:
    """Print what a run in this folder has left to do, and its hours, memory and disk: `snakemake cost`, and no more."""
    import subprocess

    from focus import scales
    from focus.provenance import write_atomically

    files = [*(files or []), *([scales.BASE.with_name(f"{scale}.yaml")] if scale else [])]
    scales.load(scales.layered([scales.BASE, *files]))
    command = [sys.executable, "-m", "snakemake", "cost", "--cores", "1"]
    command += ["--configfile", *map(str, files)] if files else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
        raise typer.Exit(done.returncode)
    print(done.stdout, end="")
    if output:
        write_atomically(output, done.stdout)


@app.command()
def doctor(seconds: Annotated[float, typer.Option(min=0.01, help="time for the small benchmark")] = 60.0) -> None:
    """Say what this machine has, which attention runs on it, whether it is exact and fast, and which scales fit."""
    from focus import doctor as examination

    results = []
    for line, well in examination.run(seconds):
        print(line, flush=True)
        results.append(well)
    if not all(results):
        raise typer.Exit(1)


@bench.command("attention")
def bench_attention(
    length: Annotated[list[int], typer.Option(min=1, help="tokens; give it again for more lengths")] = (),
    groups: Annotated[list[int], typer.Option(min=1, help="K; give it again for more")] = (),
    window: Annotated[int | None, typer.Option(min=0, help="w")] = None,
    threads: Annotated[list[int], typer.Option(min=0, help="0 means all; give it again for more")] = (),
    seconds: Annotated[float | None, typer.Option(min=0.01, help="time for each case")] = None,
    job: Annotated[str, typer.Option(help="settings as JSON (focus.config.AttentionBenchmark)")] = "",
    output: Annotated[Path | None, typer.Option(help="keep the result in this file")] = None,
) -> None:
    """Time Focus attention against full attention on this machine; without a job, print the ratios.

    Without options: 1K, 4K and 16K tokens, K=4 and 8, one thread, a minute. Options win over the job's settings.
    """
    import tempfile

    from focus import benchmark
    from focus.config import AttentionBenchmark
    from focus.paper import speed

    given = {"lengths": length, "groups": groups, "window": window, "threads": threads, "seconds": seconds}
    given = {key: value for key, value in given.items() if value not in (None, [], ())}
    run = _settings(AttentionBenchmark, job or "{}")
    run = _settings(AttentionBenchmark, run.model_copy(update=given).model_dump_json())
    if not job:
        run = run.model_copy(update={"memory_lengths": [max(run.lengths)]})
    with tempfile.TemporaryDirectory() as folder:
        path = output or Path(folder) / "attention.json"
        benchmark.run(run, path)
        if not job:
            print(speed.text("table6", path))


@bench.command("methods")
def bench_methods(job: Job, output: Output) -> None:
    """Time the attention of every compared method against full attention on this machine."""
    from focus import benchmark_methods
    from focus.jobs import MethodsJob

    benchmark_methods.run(_settings(MethodsJob, job), output)


@bench.command("table")
def bench_table(name: str, result: Timed, output: Prefix) -> None:
    """Write table6 or table7speed as CSV, Markdown, HTML and LaTeX."""
    from focus.paper import speed

    speed.write(name, result, output)


@bench.command("figure")
def bench_figure(result: Timed, output: Prefix) -> None:
    """Write the speed-up over context as PDF and PNG."""
    from focus.paper import speed_figure

    speed_figure.write(result, output)


@config.command()
def check(files: list[Path]) -> None:
    """Check FILES, one laid over the other and all over config/config.yaml, as a run with --configfile does."""
    from focus import scales

    files = scales.layered(files)
    experiment = scales.load(files)
    print(f"{experiment.scale}: the settings of {' + '.join(map(str, files))} are valid")


@config.command()
def schema() -> None:
    """Print the JSON schema of a scale."""
    from focus import scales

    print(scales.schema(), end="")


@config.command()
def explain(readme: Path) -> None:
    """Make the key tables of README anew."""
    from focus import explain as tables
    from focus.provenance import write_atomically

    write_atomically(readme, tables.page(readme.read_text()))


def _settings(model, text: str, option: str = "--job"):
    """What a JSON text says of a settings model."""
    from focus.wording import parse

    return parse(model, text, option)


if __name__ == "__main__":
    main()
