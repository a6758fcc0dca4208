"""Scales: config files laid over one another and checked before any job.

An error is one line that names file and key. Later files win key by key, as in `snakemake --configfile`; lists are
replaced whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import yaml
from pydantic import ValidationError

from focus import corpora, models
from focus.config import Experiment
from focus.errors import UserError
from focus.paper import printed
from focus.wording import among, instead, mistake

COMMAND_LINE = "--config"
BASE = Path("config/config.yaml")
"""What every other scale is laid over, as the Snakefile does, in the folder that a run starts in."""
# The workflow's own rules and targets; each table and figure becomes a target beside them.
RULES = {
    *("all", "tables", "figures", "table", "figure", "claims", "report_page", "reference", "cost"),
    *("speed", "table6", "table7speed", "bench_attention", "bench_methods", "speed_table", "speed_figure"),
    *("groups", "fetch_tagger", "groups_analysis", "groups_table", "groups_figure", "groups_page"),
    *("fetch_model", "fetch_corpus", "fetch_benchmark", "pretrain", "train", "perplexity", "downstream"),
    *("generation", "train_everything", "gate_values"),
    *("leak", "leak_measure", "leak_table", "bits", "bits_train", "bits_table", "bits_figure"),
    *("long_inputs", "recall_tests"),
}


def load(files: list[Path], overrides: Sequence[str] = ()) -> Experiment:
    """The experiment that `files`, one over the other, and the command line's `overrides` (`key=YAML`) describe.

    Raises UserError with one line, `file: key: what is wrong`, naming the file that set the key.
    """
    layers = [(str(path), read(path)) for path in files]
    layers += [
        (COMMAND_LINE, {key: _parse(COMMAND_LINE, text)}) for key, text in (each.split("=", 1) for each in overrides)
    ]
    settings: dict = {}
    for _, layer in layers:
        settings = _merge(settings, layer)
    if isinstance(settings.get("methods"), Mapping):
        settings["methods"] = {name: _inherit(name, settings["methods"], layers) for name in settings["methods"]}
    try:
        experiment = Experiment.model_validate(settings)
    except ValidationError as error:
        found = mistake(error, Experiment)
        raise UserError(f"{_home(found.key, layers)}: {found.line}") from None
    for key, problem in chain.from_iterable(check(experiment) for check in CHECKS):
        raise UserError(f"{_home(key, layers)}: {key}: {problem}")
    return experiment


def layered(files: Sequence[Path]) -> list[Path]:
    """The files as `snakemake --configfile` lays them: over config/config.yaml, where this folder has one.

    Raises UserError for a scale that is no whole one where there is none.
    """
    if BASE.exists() and not any(path.exists() and path.samefile(BASE) for path in files[:1]):
        return [BASE, *files]
    required = {name for name, field in Experiment.model_fields.items() if field.is_required()}
    if not BASE.exists() and (lacking := sorted(required - read(files[0]).keys())):
        raise UserError(
            f"{files[0]}: expected a whole scale, or {BASE} in this folder to lay it over, got neither: it lacks "
            f"{', '.join(lacking)}; type this in the repository's folder, or name the whole scale first"
        )
    return list(files)


def read(path: Path) -> dict:
    """One config file as a mapping. Raises UserError when it is missing, is not YAML, or sets a key twice."""
    try:
        content = _parse(path, Path(path).read_text())
    except OSError as error:
        raise UserError(f"{path}: expected a config file, got {error.strerror}") from None
    if not isinstance(content, dict):
        got = "nothing but comments" if content is None else type(content).__name__
        raise UserError(f"{path}: expected a mapping of keys, got {got}")
    return content


def schema() -> str:
    """The JSON schema of a whole scale, as the text of config/schema.json."""
    described = Experiment.model_json_schema()
    methods = described["properties"]["methods"]
    inherited = {
        "type": "object",
        "required": ["like"],
        "properties": {"like": {"type": "string", "description": "another method, whose settings these are laid over"}},
    }
    for pattern, method in methods["patternProperties"].items():
        methods["patternProperties"][pattern] = {"anyOf": [method, inherited]}
    return json.dumps(described, indent=2) + "\n"


def _parse(origin: Path | str, text: str):
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        line, column = error.problem_mark.line + 1, error.problem_mark.column + 1
        raise UserError(f"{origin}: expected YAML, line {line}, column {column}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{origin}: expected YAML, got {' '.join(str(error).split())}") from None


class _UniqueKeys(yaml.SafeLoader):
    """A loader that refuses a mapping with the same key twice, which YAML would settle silently."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.YAMLError(f"the key {key} twice, again in line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _merge(base, over):
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    return {**base, **{key: _merge(base.get(key), value) for key, value in over.items()}}


def _inherit(name: str, methods: Mapping, layers: list[tuple[str, Mapping]], below: tuple[str, ...] = ()) -> dict:
    """A method's settings laid over those of the method that its key `like` names."""
    method = methods[name]
    if not isinstance(method, Mapping) or "like" not in method:
        return method
    parent, own = method["like"], {key: value for key, value in method.items() if key != "like"}
    key = f"methods.{name}.like"
    if not isinstance(parent, str) or parent not in methods or parent == name:
        raise UserError(f"{_home(key, layers)}: {key}: expected another method's name, {instead(parent, methods)}")
    if parent in below:
        raise UserError(f"{_home(key, layers)}: {key}: expected a chain that ends, got {parent}, which leads back here")
    return _merge(_inherit(parent, methods, layers, (name, *below)), own)


def _unregistered(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """(key, problem) for every model and corpus in use that its registry does not hold as the config takes it."""
    used, known = {}, models.REGISTRY
    for model in experiment.models:
        pretraining = experiment.model_settings[model].pretraining
        key = f"model_settings.{model}.pretraining"
        if model not in known:
            yield (
                "models",
                f"expected a model of the registry ({among(known)}), {instead(model, known)}",
            )
        elif known[model].trained and pretraining is None:
            yield key, "expected settings, since no weights of this model are published, got null"
        elif pretraining is not None and not known[model].trained:
            yield key, "expected null, since the registry has this model's weights, got settings"
        elif pretraining is not None:
            used |= {f"{key}.corpora.{number}": corpus for number, corpus in enumerate(pretraining.corpora)}
    for kind in ("tables", "figures"):
        used |= {f"{kind}.{name}.corpus": exhibit.corpus for name, exhibit in getattr(experiment, kind).items()}
    if experiment.groups is not None:
        used["groups.corpus"] = experiment.groups.corpus
    if experiment.leak is not None:
        used |= {f"leak.rows.{number}.corpus": row.corpus for number, row in enumerate(experiment.leak.rows)}
        used |= {f"leak.corpora.{number}": corpus for number, corpus in enumerate(experiment.leak.corpora)}
    known = corpora.REGISTRY
    for key, corpus in used.items():
        if corpus not in known:
            yield key, f"expected a corpus of the registry ({among(known)}), {instead(corpus, known)}"


def _untrained(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """(key, problem) for every row that would take the weights of a model that has none."""
    drawn = [model for model in experiment.models if models.REGISTRY[model].drawn]
    for kind in ("tables", "figures"):
        for name, exhibit in getattr(experiment, kind).items():
            for model in drawn:
                if model not in (exhibit.models or experiment.models):
                    continue
                for number, row in enumerate(exhibit.rows):
                    training = experiment.methods[row.method].training
                    if training is None or not training.from_scratch:
                        expected = f"expected a method that trains from scratch, since {model} has no weights"
                        yield f"{kind}.{name}.rows.{number}.method", f"{expected}, got {row.method}"


def _misplaced(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """(key, problem) for every key a file gives that another key decides; jobs, written in full, may hold both."""
    if experiment.scale == "reference":
        yield "scale", "expected another name, since results/reference holds the committed runs, got reference"
    for name, method in experiment.methods.items():
        if method.kind == "focus" and "window" in method.adapter.model_fields_set:
            yield f"methods.{name}.adapter.window", "comes from the method's window or the model's, leave it out here"
    if experiment.bits and "balance" in experiment.bits.adapter.model_fields_set:
        yield "bits.adapter.balance", "comes from bits.balances, leave it out here"


def _exhibits(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """(key, problem) for every table and figure whose name is a rule's or whose printed rows do not exist."""
    for kind in ("tables", "figures"):
        for name, exhibit in getattr(experiment, kind).items():
            if name in RULES or name.startswith("model_"):
                yield f"{kind}.{name}", f"expected a name that no rule or target of the workflow has, got {name}"
            for number, row in enumerate(exhibit.rows):
                try:
                    row.paper is None or printed.row(row.paper)
                except UserError as error:
                    yield f"{kind}.{name}.rows.{number}.paper", str(error).removeprefix("paper: ")


def _too_long(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """(key, problem) for every context of more tokens than its model has positions, and answers that fill them."""
    answer = experiment.evaluation.generation.max_new_tokens
    for model in experiment.models:
        settings = experiment.model_settings[model]
        positions = models.REGISTRY[model].positions or settings.pretraining.context
        expected = f"expected at most the {positions} positions of {model}"
        if settings.context > positions:
            yield f"model_settings.{model}.context", f"{expected}, got {settings.context}"
        for kind in ("tables", "figures"):
            for name, exhibit in getattr(experiment, kind).items():
                if model not in (exhibit.models or experiment.models):
                    continue
                for number, row in enumerate(exhibit.rows):
                    if (row.context or 0) > positions:
                        yield f"{kind}.{name}.rows.{number}.context", f"{expected}, got {row.context}"
                if exhibit.generation and answer >= positions:
                    expected = f"expected less than the {positions} positions of {model}, which {kind}.{name} shows"
                    yield "evaluation.generation.max_new_tokens", f"{expected}, got {answer}"


CHECKS = (_unregistered, _misplaced, _exhibits, _too_long, _untrained)
"""In this order: the later ones look up what the earlier ones found to be there."""


def _home(key: str, layers: list[tuple[str, Mapping]]) -> str:
    """The layer that set `key`: the last of those that hold the most of its path; the first if none holds any."""
    depths = [_depth(settings, key) for _, settings in layers]
    if not max(depths):
        return layers[0][0]
    return layers[len(depths) - 1 - depths[::-1].index(max(depths))][0]


def _depth(settings, key: str) -> int:
    """How many characters of the dotted `key` lead to something in `settings`; names may hold dots themselves.

    In a list all of them do, since a list replaces that of earlier layers whole.
    """
    if isinstance(settings, list):
        return len(key)
    if not isinstance(settings, Mapping):
        return 0
    depths = [
        len(str(name)) + _depth(value, key[len(str(name)) + 1 :])
        for name, value in settings.items()
        if f"{key}.".startswith(f"{name}.")
    ]
    return max(depths, default=0)
