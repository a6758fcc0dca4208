"""Whether trained groups see the future, and their gain without it (PAPER.md 4.1), from `focus leak measure`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas

from focus.errors import UserError
from focus.paper import layout, statistics
from focus.paper.formats import mean_over_seeds, number, percent, ratios, sentence
from focus.paper.layout import Grid
from focus.provenance import read_result, write_atomically

TITLE = "Whether the groups see the future, and what their gain is without it"
COLUMNS = [
    *("balance", "metric", "where", "value", "error", "text"),
    *("model", "corpus", "method", "seed", "device", "dtype", "code", "source"),
]
MODES = {"soft": "gate", "hard-k1": "hard k=1"}
CHANGES = {"token": "one later token", "rest": "the second half"}
TUNED = "more than the centroids was trained, so the gain over the pretrained model is not the groups' alone"
CERTAIN = 2.0
"""Standard errors by which a gain must differ from 0 to be one of which a share can survive."""


@dataclass(frozen=True)
class Share:
    """What is left of sinkhorn's gain over the pretrained model, with its paired error; or why there is no share."""

    value: float | None
    error: float | None
    reason: str | None = None


def load(paths: Sequence[Path]) -> list[tuple[dict, Path]]:
    """The results. Raises UserError when a file is missing or another kind of result."""
    found = [(read_result(path), path) for path in paths]
    for result, path in found:
        if result["experiment"] != "leak":
            raise UserError(f"{path}: expected the result of focus leak measure, got one of {result['experiment']}")
    return found


def write(paths: Sequence[Path], output_prefix: Path) -> None:
    """Write `output_prefix`.csv, .md, .html and .tex."""
    found = load(paths)
    rows: dict[tuple, list[dict]] = {}
    for result, _ in found:
        settings = result["settings"]
        rows.setdefault((settings["model"], settings["corpus"], settings["method"]), []).append(result)
    grids = [grid for results in rows.values() for grid in _grids(results)]
    notes = _notes([results[0] for results in rows.values()])
    write_atomically(Path(f"{output_prefix}.csv"), frame(found).to_csv(index=False))
    write_atomically(Path(f"{output_prefix}.md"), layout.markdown(TITLE, grids, notes))
    write_atomically(Path(f"{output_prefix}.html"), layout.page(TITLE, grids, notes))
    write_atomically(Path(f"{output_prefix}.tex"), layout.latex("leak", TITLE, grids, notes))


def share(result: dict, balance: str) -> Share:
    """What a balance keeps of the gain (in nats a token) that the same centroids have under sinkhorn.

    A ratio of sums over windows, or documents where there are enough: its error is the delta method's, from the paired
    differences. None where sinkhorn's perplexity is not CERTAIN standard errors below the pretrained model's, and where
    more than the centroids was trained, since the gain is then that of other weights too.
    """
    if _tuned(result):
        return Share(None, None, TUNED)
    base, balances = result["metrics"]["pretrained"]["windows"], result["metrics"]["balances"]
    gain = statistics.compare(balances["sinkhorn"]["windows"], base)
    if gain.error is None or gain.log + CERTAIN * gain.log_error >= 0:
        return Share(None, None, f"no gain: under sinkhorn {ratios([gain])[0]} times the pretrained perplexity")
    totals: dict = {}
    by_document = statistics.units(base) == "documents"
    pairs = zip(base, balances["sinkhorn"]["windows"], balances[balance]["windows"], strict=True)
    for place, (before, leaking, ours) in enumerate(pairs):
        unit = before["document"] if by_document else place
        whole, kept = totals.get(unit, (0.0, 0.0))
        totals[unit] = whole + before["loss_sum"] - leaking["loss_sum"], kept + before["loss_sum"] - ours["loss_sum"]
    total, count = sum(whole for whole, _ in totals.values()), len(totals)
    value = sum(kept for _, kept in totals.values()) / total
    residual = sum((kept - value * whole) ** 2 for whole, kept in totals.values())
    return Share(value, math.sqrt(residual * count / (count - 1)) / total)


def frame(found: Sequence[tuple[dict, Path]]) -> pandas.DataFrame:
    """Every measure of every balance as a tidy frame in full precision; shares are of 1, changes in logits and nats."""
    lines = []
    for result, path in found:
        settings, provenance = result["settings"], result["provenance"]
        origin = {name: settings[name] for name in ("model", "corpus", "method", "seed")} | {"source": str(path)}
        origin |= {name: provenance[name] for name in ("device", "dtype", "code")}
        base = result["metrics"]["pretrained"]["windows"]
        value, error = statistics.perplexity(base)
        lines.append(origin | {"balance": "pretrained", "metric": "perplexity", "value": value, "error": error})
        for balance, measured in result["metrics"]["balances"].items():
            lines += [origin | {"balance": balance} | line for line in _measures(result, balance, measured)]
    return pandas.DataFrame(lines, columns=COLUMNS)


def _measures(result: dict, balance: str, measured: dict) -> list[dict]:
    value, error = statistics.perplexity(measured["windows"])
    ratio = statistics.compare(measured["windows"], result["metrics"]["pretrained"]["windows"])
    survives = share(result, balance)
    lines = [
        {"metric": "causal", "value": float(measured["causal"])},
        {"metric": "declared_causal", "value": float(measured["declared_causal"])},
        {"metric": "perplexity", "value": value, "error": error},
        {"metric": "ratio_to_pretrained", "value": ratio.value, "error": ratio.error},
        {"metric": "share", "value": survives.value, "error": survives.error, "text": survives.reason},
    ]
    for mode, changed in measured["changes"].items():
        for change, values in changed.items():
            where = f"{mode} {change}"
            lines += [{"metric": name, "where": where, "value": values[name]} for name in ("max_abs", "mean_kl")]
    return lines + [
        {"metric": "dominance", "where": corpus, "value": groups["mean"]}
        for corpus, groups in measured["dominance"].items()
    ]


def _grids(results: list[dict]) -> list[Grid]:
    settings = results[0]["settings"]
    name = f"{settings['model']}, {settings['method']}"
    return [_seen(name, results), _gain(name, results), _dominance(name, results)]


def _seen(name: str, results: list[dict]) -> Grid:
    header = ["Balance"]
    header += [f"{CHANGES[change]}, {MODES[mode]}: {what}" for mode in MODES for change in CHANGES for what in PARTS]
    lines = []
    for balance in results[0]["metrics"]["balances"]:
        measured = [result["metrics"]["balances"][balance] for result in results]
        line = [balance]
        for mode in MODES:
            for change in CHANGES:
                parts = [each["changes"][mode][change] for each in measured]
                line += [small(max(part["max_abs"] for part in parts)), small(max(part["mean_kl"] for part in parts))]
        lines.append([*line, _agreed([each["causal"] for each in measured]), _agreed([measured[0]["declared_causal"]])])
    positions = results[0]["metrics"]["balances"]["sinkhorn"]["changes"]["soft"]
    compared = " and ".join(f"{positions[change]['positions']:,} ({CHANGES[change]})" for change in CHANGES)
    said = (
        f"Logits of earlier positions when one token of a window's second half becomes another, or all of it another "
        f"text's: the largest change, and the mean KL divergence in nats; {compared} positions. Causal: no change "
        f"above {results[0]['metrics']['noise']:g}, which rounding explains. Of several seeds the largest."
    )
    return Grid(f"{name}: what later tokens change", [*header, "Causal", "Declared"], lines, [said])


PARTS = ("max", "KL")


def _gain(name: str, results: list[dict]) -> Grid:
    def line(label: str, found: list[list[dict]], base: list[list[dict]] | None, left: list[Share]) -> list[str]:
        own = [statistics.perplexity(windows) for windows in found]
        shown = number(*own[0]) if len(own) == 1 else mean_over_seeds([value for value, _ in own], number)
        ratio = "-"
        if base:
            pairs = zip(found, base, strict=True)
            ratio = ratios([statistics.combine([statistics.compare(ours, other) for ours, other in pairs])])[0]
        return [label, shown, ratio, _survives(left) if left else "-"]

    base = [result["metrics"]["pretrained"]["windows"] for result in results]
    lines = [line("pretrained", base[:1], None, [])]
    for balance in results[0]["metrics"]["balances"]:
        found = [result["metrics"]["balances"][balance]["windows"] for result in results]
        lines.append(line(balance, found, base, [share(result, balance) for result in results]))
    windows = base[0]
    reasons = dict.fromkeys(reason for result in results if (reason := share(result, "sinkhorn").reason))
    said = [
        f"Held-out perplexity under the gate: {len(windows)} windows of {results[0]['metrics']['context']} tokens; "
        f"errors over {statistics.units(windows)}, of ratios paired. Share: of the gain in nats a token that the same "
        "centroids have under sinkhorn.",
        *(f"{sentence(reason)} So no share of a gain can be told." for reason in reasons),
    ]
    return Grid(f"{name}: the gain", ["Balance", "Perplexity", "Ratio to pretrained", "Share of the gain"], lines, said)


def _tuned(result: dict) -> bool:
    """Whether the method trains more of the model than its groups."""
    phases = result["settings"]["settings"]["training"]["phases"]
    return any(phase["steps"] and phase["trains"] != "centroids" for phase in phases)


def _survives(left: list[Share]) -> str:
    known = [each for each in left if each.value is not None]
    if any(each.reason == TUNED for each in left):
        return "-"
    if len(known) < len(left):
        return "no gain" if not known else f"no gain in {len(left) - len(known)} of {len(left)} seeds"
    if len(known) == 1:
        return f"{100 * known[0].value:.1f} ± {100 * known[0].error:.1f} %"
    return mean_over_seeds([each.value for each in known], percent)


def _dominance(name: str, results: list[dict]) -> Grid:
    balances = results[0]["metrics"]["balances"]
    corpora = list(balances["sinkhorn"]["dominance"])
    lines = []
    for balance in balances:
        found = [result["metrics"]["balances"][balance]["dominance"] for result in results]
        line = [mean_over_seeds([each[corpus]["mean"] for each in found], percent) for corpus in corpora]
        worst = [max(layer for corpus in corpora for layer in each[corpus]["layers"]) for each in found]
        lines.append([balance, *line, mean_over_seeds(worst, percent)])
    groups = results[0]["settings"]["settings"]["adapter"]["groups"]
    said = (
        f"Share of a window's tokens in its fullest group under the gate, mean over held-out windows and layers; even "
        f"is {percent(1 / groups)}. Trained on `{results[0]['settings']['corpus']}`."
    )
    return Grid(f"{name}: the largest group", ["Balance", *corpora, "Worst layer and text"], lines, [said])


def _agreed(values: list[bool]) -> str:
    return "yes" if all(values) else "no" if not any(values) else "in some seeds"


def small(value: float) -> str:
    """Two digits, whatever the size; 0 is exactly 0."""
    return "0" if value == 0 else f"{value:.2g}"


def _notes(results: list[dict]) -> list[str]:
    notes = []
    for result in results:
        settings, revisions = result["settings"], result["provenance"]["revisions"]
        adapter, leak = settings["settings"]["adapter"], settings["leak"]
        phases = [phase for phase in settings["settings"]["training"]["phases"] if phase["steps"]]
        trained = " then ".join(f"{phase['steps']} steps of {phase['trains']}" for phase in phases) or "not trained"
        potentials = (
            "learnt in training"
            if adapter["balance"] == "potentials"
            else f"calibrated on {leak['calibration_windows']} training windows, as a moving average over them would be"
        )
        notes.append(
            f"`{settings['model']}`: {sentence(revisions['model']['note'])} `{settings['method']}`: "
            f"K={adapter['groups']}, w={settings['model_settings']['window']}, gate {adapter['gate']}, trained under "
            f"balance {adapter['balance']} on `{settings['corpus']}` ({trained}). Frozen potentials: {potentials}. "
            f"{result['provenance']['dtype']} on {result['provenance']['device']}."
        )
    notes.append(
        "Projection and centroids are the same in every row; only the balance changes. sinkhorn: over the sequence, as "
        "the paper has it; prefix: over the tokens up to each, which is causal; potentials: sinkhorn's column scale, "
        "frozen; softmax: no balance. Once trained, entropy, stop_gradient and recluster assign as softmax does."
    )
    return notes
