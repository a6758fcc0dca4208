import fcntl
import functools
import os
import re
import sys
from pathlib import Path

from focus import jobs, prediction, scales, warm
from focus.config import FIGURE_MODULES, TABLE_MODULES
from focus.errors import UserError
from focus.provenance import digest, write_atomically


def load_experiment():
    """The checked scale; a mistake in a config file ends the run here, in one line, with exit code 2."""
    files = [Path("config/config.yaml"), *config_files()]
    try:
        return scales.load(files, workflow.config_settings.config_args)
    except UserError as error:
        end(error)


def config_files():
    """What --configfile names, relative to this folder where it is inside."""
    files = workflow.config_settings.configfiles
    return [Path(str(file).removeprefix(f"{Path.cwd()}/")) for file in files]


def hold_run_lock():
    """Share a lock with every living run in this folder; drop Snakemake's own locks when there is no other.

    Snakemake's locks outlive a killed process. This one ends with its process, so whoever gets it alone knows that
    those found are stale.
    """
    Path(".snakemake").mkdir(exist_ok=True)
    lock = open(".snakemake/run.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for stale in Path(".snakemake/locks").glob("*.lock"):
            stale.unlink()
    except BlockingIOError:
        pass
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def check_writable(folder):
    """End the run with one line when results cannot be written."""
    parent = next(path for path in [folder, *folder.parents] if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        end(
            f"{parent}: expected a folder to write results to, got what cannot be written"
        )


def end(message):
    print(f"focus: error: {message}", file=sys.stderr)
    sys.exit(2)


experiment = load_experiment()
if workflow.is_main_process:
    check_writable(Path("results", experiment.scale))
    RUN_LOCK = hold_run_lock()


# Nothing here has a benchmark directive. Snakemake would read all pages of every job twice a second, a tenth of two cores'
# time; results record their own seconds and memory.
# Every job but the timing of attention takes one thread: the order of additions, and so every digit of a result, then does not depend on --cores.
# Rows run side by side instead.
pathvars:
    results=f"results/{experiment.scale}",


# Logits are hundreds of MiB. glibc would return them to the system and fault them in anew with each window or step, which
# takes an eighth of a job's time.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))


# Importing torch and transformers takes six seconds, a quarter of a run of small jobs: here they are forked from a process
# that has done so once. Jobs on a GPU or another machine import for themselves.
onstart:
    if (
        workflow.is_main_process
        and workflow.local_exec
        and not ON_GPU
        and sys.platform == "linux"
    ):
        warm.start()


# A job waits while the memory it needs is taken, unless the command line names another amount.
if "mem_mb" not in workflow.global_resources:
    workflow.register_resource(
        "mem_mb", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    )


# What `--sdm conda` builds for the rules, relative to their files.
ENVIRONMENT = f"../../envs/{experiment.environment}.yaml"


def alternatives(names):
    """A regular expression for exactly these names; for none, one that matches nothing."""
    return "|".join(map(re.escape, names)) or "(?!)"


def identifier(name):
    return re.sub(r"\W", "_", name)


def in_results(path, wildcards):
    """A path below the scale's results that is neither input nor output."""
    return f"results/{experiment.scale}/{path.format(**wildcards)}"


@functools.cache
def code(*modules):
    """A file with the digest of these modules' source: as input, it reruns a rule exactly when that changes.

    The sources themselves, dozens for each job, would keep Snakemake busy.
    """
    stamp = Path(".snakemake/code", "-".join(modules))
    content = digest(list(modules)) + "\n"
    if workflow.is_main_process and not (
        stamp.exists() and stamp.read_text() == content
    ):
        write_atomically(stamp, content)
    return str(stamp)


wildcard_constraints:
    model=alternatives(experiment.model_settings),
    method=alternatives(experiment.methods),
    corpus=r"[^/]+",
    task=r"[^/]+",
    variant=r"[^/]+",
    table=alternatives(experiment.tables),
    figure=alternatives(experiment.figures),
    seed=r"\d+",


# Exhibits: the tables and figures that show at least one of the run's models.


def exhibit_models(exhibit):
    return [
        model
        for model in experiment.models
        if model in (exhibit.models or experiment.models)
    ]


def exhibit_slice(kind, name):
    """The experiment cut down to what one table or figure shows, so that other settings leave it alone."""
    exhibit = getattr(experiment, kind)[name]
    models = exhibit_models(exhibit)
    return experiment.model_copy(
        update={
            "models": models,
            "model_settings": {
                model: experiment.model_settings[model] for model in models
            },
            "methods": {
                row.method: experiment.methods[row.method] for row in exhibit.rows
            },
            "speed": None,
            "groups": None,
            "hardware": None,
            "keep_weights": "all",
            "leak": None,
            "bits": None,
            "tables": {},
            "figures": {},
            kind: {name: exhibit.model_copy(update={"models": models})},
        }
    )


# Snakemake's own report fails on a file that no run has made yet.
REPORTING = any(argument.startswith("--report") for argument in sys.argv)


def there(files):
    """These files; while Snakemake makes its report those that exist, so that it shows what a partial run has made."""
    if not REPORTING:
        return files
    folder = f"results/{experiment.scale}"
    found = [path for path in files if Path(path.replace("<results>", folder)).exists()]
    if not found:
        end(
            f"--report: expected tables, figures or claims in {folder}, found none: run the workflow first"
        )
    return found


def exhibit_files(kind, name):
    suffixes = {"tables": ("csv", "md", "html", "tex"), "figures": ("pdf", "png")}[kind]
    return [f"<results>/{kind}/{name}.{suffix}" for suffix in suffixes]


def row_results(kind, name, models=None):
    """The result files that the rows of a table or figure are made of; dominance is drawn from training logs alone."""
    exhibit = getattr(experiment, kind)[name]
    return [
        f"<results>/{measure}/{model}/{row.corpus or exhibit.corpus}/{row.method}/{row.variant}/seed{seed}.json"
        for model in exhibit_models(exhibit)
        if model in (models or experiment.models)
        for row in exhibit.rows
        for measure in exhibit.measures
        + ["gates"] * (exhibit.shows == "gates" and row.attention == "soft")
        for seed in experiment.seeds_of(model, row.method)
    ]


def exhibit_results(kind, name):
    """What a table or figure is made from: its rows' results, how they were trained, and what they ran on."""
    exhibit = getattr(experiment, kind)[name]
    models = exhibit_models(exhibit)
    trained = [
        f"<results>/training/{model}/{corpus}/{method}/seed{seed}/{file}"
        for model in models
        for method, corpus in sorted(
            {(row.method, row.corpus or exhibit.corpus) for row in exhibit.rows}
        )
        if experiment.methods[method].training
        for seed in experiment.seeds_of(model, method)
        for file in ["result.json"] + ["log.jsonl"] * (exhibit.shows == "dominance")
    ]
    manifests = [f"<results>/models/{model}.json" for model in models]
    return [
        *row_results(kind, name),
        *trained,
        *manifests,
        *(
            f"<results>/corpora/{corpus}.json"
            for corpus in sorted({row.corpus or exhibit.corpus for row in exhibit.rows})
        ),
        *[METHODS_RESULT] * (exhibit.shows == "tradeoff"),
        *[SPEED_RESULT] * (exhibit.shows == "topk"),
    ]


EXHIBITS = [
    (kind, name)
    for kind in ("tables", "figures")
    for name, exhibit in getattr(experiment, kind).items()
    if experiment.made(exhibit)
]
HEADLINE = {
    tuple(path.split("/")[2:5])
    for kind, name in EXHIBITS
    if name == "headline"
    for path in row_results(kind, name)
}


def headline_first(wildcards):
    """Priority of a row's jobs: the headline's rows come before the others."""
    return int((wildcards.model, wildcards.corpus, wildcards.method) in HEADLINE)


def weights_of(wildcards):
    """The weights a row is evaluated with; none for a method that does not train."""
    if experiment.methods[wildcards.method].training is None:
        return []
    return "<results>/training/{model}/{corpus}/{method}/seed{seed}/weights"


# What a job asks for, predicted from the shape of its model (focus.prediction). What a profile repeats asks for more.
ON_GPU = experiment.environment == "cuda"
SHAPES = prediction.shapes(experiment)


def job_of(make):
    """A function of the wildcards that cuts a rule's job from the experiment; `make` is one of focus.jobs."""

    def job(wildcards):
        numbers = {
            key: int(value)
            for key, value in dict(wildcards).items()
            if key in ("seed", "length")
        }
        return make(experiment, **(dict(wildcards) | numbers))

    return job


def predicted(kind, job):
    """A function of the wildcards that predicts a rule's job, once; None for what nothing is known of."""

    @functools.cache
    def known(**names):
        settings = job(names).model_dump(mode="json")
        return prediction.predict(
            kind, settings, SHAPES, experiment.machine, gpu=ON_GPU
        )

    return lambda wildcards: known(**dict(wildcards))


def memory(kind, job, least):
    """MiB, at least `least`, and more on each attempt."""
    found = predicted(kind, job)
    return lambda wildcards, attempt: prediction.memory_asked(
        found(wildcards), least, attempt
    )


def gpus(kind, job):
    """GPUs, 0 where the environment is cpu; one for each process that trains."""
    found = predicted(kind, job)
    return lambda wildcards: (found(wildcards) or prediction.NOTHING).gpus


def runtime(kind, job):
    """Minutes, and more on each attempt."""
    found = predicted(kind, job)
    return lambda wildcards, attempt: prediction.minutes_asked(
        found(wildcards), attempt
    )


def hours(count):
    """Minutes of a job that no shape predicts, and as much again on each attempt."""
    return lambda wildcards, attempt: 60 * count * attempt


train_job = job_of(jobs.train_job)
perplexity_job = job_of(jobs.perplexity_job)
gate_values_job = job_of(jobs.gate_values_job)
downstream_job = job_of(jobs.downstream_job)
generation_job = job_of(jobs.generation_job)
long_inputs_job = job_of(jobs.long_inputs_job)
recall_job = job_of(jobs.recall_job)
leak_job = job_of(jobs.leak_job)
pretrain_job = job_of(jobs.pretrain_job)


def recorded_exhibits():
    """The result files behind each table and figure, relative to the scale's folder."""
    exhibits = {
        f"{kind}/{name}": exhibit_results(kind, name) for kind, name in EXHIBITS
    }
    if experiment.speed:
        exhibits["speed"] = [SPEED_RESULT]
    if GROUPS:
        exhibits["groups"] = [GROUPS_RESULT]
    if LEAK:
        exhibits["leak"] = LEAK_RESULTS
    if BITS:
        exhibits["bits"] = BITS_RESULTS
    return {
        name: [path.removeprefix("<results>/") for path in paths]
        for name, paths in exhibits.items()
    }


def show_cost(log):
    """Print what is left to run and what it will take, and keep that in `log`."""
    from focus import cost_table

    page = cost_table.text(
        experiment,
        recorded_exhibits(),
        results=Path("results", experiment.scale),
        reference=Path("results/reference"),
        cores=len(os.sched_getaffinity(0)),
    )
    Path(log).write_text(page)
    print(page, end="")
