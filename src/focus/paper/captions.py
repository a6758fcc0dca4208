"""What stands around a table: what its rows were measured on, how they were trained, and what its columns mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from focus.config import Exhibit, Experiment
from focus.method_config import FocusConfig
from focus.paper import columns, gain, printed, rows, statistics
from focus.paper.formats import either, percent, sentence
from focus.paper.rows import Entry
from focus.probe import COLLAPSED

SYMBOLS = {"groups": "K", "window": "w", "routing_dim": "d_g", "temperature": "tau", "sinkhorn_iterations": "N"}
ALWAYS = (*SYMBOLS, "gate", "balance", "sinks")
LOSSES = ("entropy", "stop_gradient")
READ_BY = {
    "sinkhorn_iterations": ("sinkhorn", "prefix", "potentials"),
    "potential_momentum": ("potentials",),
    "balance_weight": LOSSES,
    "entropy_weight": LOSSES,
    "ema_momentum": ("ema",),
    "recluster_every": ("recluster",),
}
"""The balances that read a setting; all read the others."""


def measured_on(entries: list[Entry], manifest: dict) -> list[str]:
    """What a model's numbers were measured with, from the results themselves; and why rows are missing."""
    lines = [sentence(manifest["note"])] if manifest.get("note") else []
    measured = [entry for entry in entries if entry.runs]
    for place in dict.fromkeys(_place(entry) for entry in measured):
        lines.append(_held_out([entry for entry in measured if _place(entry) == place]))
    adapters = _adapters(measured)
    if adapters:
        lines.append("Adapters: " + "; ".join(adapters) + ".")
    trained = [line for entry in measured if (line := _trained(entry))]
    if trained:
        lines.append("Trained: " + "; ".join(dict.fromkeys(trained)) + ".")
    lines += dict.fromkeys(f"{entry.label}: {entry.reason}." for entry in entries if entry.reason)
    return lines


def notes(entries: list[Entry], exhibit: Exhibit, experiment: Experiment, root: Path) -> list[str]:
    """What holds for the whole page: the texts, the paper's setting, and what is shown."""
    corpora = dict.fromkeys(row.corpus or exhibit.corpus for row in exhibit.rows)
    texts = "; ".join(_text(root, corpus) for corpus in corpora)
    found = [f"Scale `{experiment.scale}`; text{'s' * (len(corpora) > 1)} {texts}.", *_papers(exhibit)]
    seeds = {
        len(entry.runs)
        for entry in entries
        if entry.runs and entry.first.results["perplexity"]["settings"]["settings"]["training"]
    }
    if seeds == {1}:
        found.append("One seed, so no spread over seeds.")
    elif seeds:
        found.append(
            "Over seeds, and seeds ±: standard deviation (number of seeds), nothing where nothing trains. Other values "
            "are means over seeds. The error of a ratio and the interval of a change hold what varies within a seed "
            "and the error of a mean of so many seeds."
        )
    found += _meanings(entries, exhibit)
    if exhibit.downstream:
        found.append(
            "Accuracy is length-normalised where lm-eval has it (not LAMBADA, TruthfulQA), as in the printed rows. "
            "± of an accuracy: standard error over items. Change against pretrained: in points, with its 95 % interval "
            "(Tango's paired score interval, or the exact conditional one where that is wider), items (+gained -lost), "
            "and the exact two-sided McNemar test's p (of several seeds, twice its mean). Where no scored position "
            "sees beyond the window, no item can change, whatever the groups."
        )
    return found


def _place(entry: Entry) -> tuple[str, int]:
    """The text and the context that a row with results was measured on."""
    return entry.corpus, entry.first.results["perplexity"]["metrics"]["context"]


def _held_out(entries: list[Entry]) -> str:
    """What the rows of one text and context were measured on."""
    run = entries[0].first
    results = [entry.first.results["perplexity"] for entry in entries]
    windows = sorted({result["settings"]["model_settings"]["window"] for result in results})
    kernels = sorted({f"{each['provenance']['dtype']} on {each['provenance']['device']}" for each in results})
    documents = sorted({window["document"] for window in run.windows})
    held_out = ", ".join(documents) if len(documents) <= 4 else f"{len(documents)} documents"
    metrics = run.results["perplexity"]["metrics"]
    return (
        f"On `{entries[0].corpus}`: context {metrics['context']}, window {either(windows)}, stride "
        f"{metrics['stride']}; {len(run.windows)} windows, {metrics['tokens']:,} tokens scored, from held-out "
        f"{held_out}; {either(kernels)}. Standard errors are over {statistics.units(run.windows)} "
        f"({len(documents)} held-out documents)."
    )


def _adapters(entries: list[Entry]) -> list[str]:
    """The settings that most adapters share, then for each row those in which it differs."""
    settings = {}
    for entry in entries:
        adapter = entry.first.results["perplexity"]["settings"]["settings"].get("adapter")
        if adapter is not None:
            settings[entry.method_label] = _read(adapter)
    most = {
        name: value
        for name in FocusConfig.model_fields
        for value, count in Counter(adapter[name] for adapter in settings.values() if name in adapter).most_common(1)
        if 2 * count > len(settings)
    }
    common = [value for name, value in most.items() if name in (*ALWAYS, *READ_BY) or value != _default(name)]
    lines = [", ".join(common)] if common else []
    for label, adapter in settings.items():
        own = [value for name, value in adapter.items() if value != most.get(name)]
        lines += [f"{label}: {', '.join(own)}"] if own else []
    return lines


def _read(adapter: dict) -> dict[str, str]:
    """The settings that an adapter of this balance reads, as shown; k is in a row's label."""
    known = {name: value for name, value in adapter.items() if name in FocusConfig.model_fields and name != "top_k"}
    return {
        name: _setting(name, value)
        for name, value in known.items()
        if adapter["balance"] in READ_BY.get(name, (adapter["balance"],))
    }


def _default(name: str) -> str:
    return _setting(name, FocusConfig.model_fields[name].default)


def _setting(name: str, value: float | str | list[str] | None) -> str:
    """A setting with its value: K=8, balance softmax, 4 sinks, centroids frozen, ..."""
    if name in SYMBOLS:
        return f"{SYMBOLS[name]}={value:g}"
    if name == "sinks":
        return f"{value or 'no'} sinks"
    if name == "frozen":
        return f"{' and '.join(value) or 'nothing'} frozen"
    if name == "detach_inputs":
        return f"inputs {'detached' if value else 'attached'}"
    return f"{name.replace('_', ' ')} {'by default' if value is None else value}"


def _trained(entry: Entry) -> str | None:
    """How a row was trained: steps, rate, tokens and seeds."""
    settings = entry.first.results["perplexity"]["settings"]["settings"]
    training = settings["training"]
    if training is None:
        return None
    name = entry.method_label
    phases = " then ".join(
        f"{phase['steps']} steps of {phase['trains']} at {phase['learning_rate']:g}"
        for phase in training["phases"]
        if phase["steps"]
    )
    distillation = training.get("distillation")
    if distillation:
        fitted = f"{distillation['steps']} steps a layer on the attention of {distillation['windows']} windows"
        phases = f"{fitted} then {phases}" if phases else fitted
    if not phases:
        return f"{name}: not at all"
    hard = f" through hard groups of k={settings['adapter']['top_k']}" if training["attention"] == "hard" else ""
    seeds = ", ".join(str(seed) for seed in entry.runs)
    return f"{name}: {phases}{hard}{_tokens(entry)}, seed{'s' * (len(entry.runs) > 1)} {seeds}"


def _tokens(entry: Entry) -> str:
    """The tokens that training read, which only its own result tells."""
    training = entry.first.results.get("training")
    if training is None:
        return ""
    context = training["settings"]["model_settings"]["context"]
    return f", {training['metrics']['tokens']:,} tokens in windows of {context}"


def _text(root: Path, corpus: str) -> str:
    note = rows.manifest(root, "corpora", corpus).get("note")
    return f"`{corpus}`" + (f" ({note.rstrip('.')})" if note else "")


def _papers(exhibit: Exhibit) -> Iterator[str]:
    """The setting of each printed table that the rows stand beside, as far as the paper gives it."""
    for name in dict.fromkeys(row.paper.partition(".")[0] for row in exhibit.rows if row.paper):
        paper = printed.printed()[name]
        known = [f"{paper['model']} on {paper['corpus']}"]
        known += [f"{key} {paper[key]}" for key in ("context", "window") if paper[key] is not None]
        known += [f"{paper['steps']} steps"] if paper["steps"] else []
        yield (
            f"The paper's numbers ({paper['place']}) are from {', '.join(known)}: other models and text, so compare "
            "changes and orderings, not perplexities."
        )


def _meanings(entries: list[Entry], exhibit: Exhibit) -> Iterator[str]:
    """What the columns shown mean."""
    if "perplexity" in exhibit.columns:
        yield (
            f"± of a perplexity: standard error over documents where at least {statistics.ENOUGH} are held out, else "
            "over windows."
        )
    if "ratio" in exhibit.columns:
        yield (
            "Ratio: our perplexity over that of the row named, same text and context; its standard error comes from "
            "differences paired by document or window. Paper's ratio: over the printed row that it is compared with."
        )
    if "far_pairs" in exhibit.columns:
        yield (
            "Far pairs kept: of the causal pairs farther apart than the window, the share attended, sinks included. "
            "The soft gate weighs every pair and computes all."
        )
    if "gain" in exhibit.columns:
        yield (
            "Of the gain: which part of what learned grouping changes in log perplexity a row reaches, errors paired. "
            "Hard groups: from the window with sinks to the first row of trained centroids with as many groups a "
            "token. Other rows: from pretrained to the soft gate with trained centroids; no gain where that is not "
            f"below by {gain.SURE:g} standard errors."
        )
    if "absorption" in exhibit.columns:
        yield (
            "Lead of learned groups: the row's perplexity over that of the groups learned through hard attention, "
            "fine-tuned if the row is. Change of the lead: that of a fine-tuned row over that of the same row before; "
            "1 leaves the lead as it was, less takes from it. All windows paired."
        )
    if "dominance" in exhibit.columns:
        yield f"Largest group: the share of the tokens in it, mean over layers, {_counted_on(entries)}"
    if "stability" in exhibit.columns:
        yield "Stability: the share of those tokens that at the last look kept the group of the look before."
    if "training_time" in exhibit.columns:
        yield "Training: wall time of one thread, without loading the model."
    if "collapse" in exhibit.columns:
        yield (
            f"Collapsed at step: the first look at which the largest group held more than {percent(COLLAPSED)} of the "
            f"tokens, mean over layers; looks are {_looks(entries)}. Of several seeds: the mean over those that "
            "collapsed (how many of how many)."
        )


def _counted_on(entries: list[Entry]) -> str:
    if columns.probed(entries):
        windows = {each["probe_windows"] for each in _trainings(entries)}
        return (
            f"over the first {' or '.join(map(str, sorted(windows)))} training windows together, after the last step."
        )
    return "of each held-out window alone, mean over windows."


def _looks(entries: list[Entry]) -> str:
    every = sorted({each["probe_every"] for each in _trainings(entries) if each["probe_every"]})
    return f"{either(every)} steps apart and at the end of each phase" if every else "not taken here"


def _trainings(entries: list[Entry]) -> list[dict]:
    """The training settings of the rows that have groups and results."""
    found = [
        entry.first.results["perplexity"]["settings"]["settings"]
        for entry in entries
        if entry.runs and entry.kind == "focus"
    ]
    return [settings["training"] for settings in found if settings["training"]]
