"""The groups a token joins: pairs kept, the bound they set, measured speed and perplexity, one row for each k.

Even, independent groups are counted exactly. A speed-up over full attention is at most one over the share of pairs
kept; the paper prints K / k, which no mask that it describes allows (Table 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from pathlib import Path

import pandas

from focus.config import Exhibit, Experiment
from focus.errors import UserError
from focus.paper import captions, layout, printed, rows, speed, statistics
from focus.paper.formats import mean_over_seeds, paper_number, paper_ratio, percent, ratios
from focus.paper.layout import Grid
from focus.paper.rows import Entry
from focus.provenance import write_atomically

PAPERS = {"gpt2_124m": "GPT-2 124M", "mistral_7b": "Mistral 7B"}
"""The models of the paper's Table 7."""
PAPERS_GROUPS = 4


@dataclass(frozen=True)
class Sweep:
    """One method on one model: its hard rows with results by k."""

    model: str
    label: str
    groups: int
    by_k: dict[int, Entry]

    def far(self, top_k: int) -> list[float]:
        """The share of far pairs kept with each seed; none where that k was not run."""
        if top_k not in self.by_k:
            return []
        return self.by_k[top_k].over_seeds(lambda run: run.results["perplexity"]["metrics"]["far_pairs_kept"])

    def far_if_even(self, top_k: int) -> float | None:
        """What even, independent groups keep of them, with this row's context, window and sinks."""
        if top_k not in self.by_k:
            return None
        result = self.by_k[top_k].first.results["perplexity"]
        adapter, length = result["settings"]["settings"]["adapter"], result["metrics"]["context"]
        return even_pairs(self.groups, top_k, length=length, window=adapter["window"], sinks=adapter["sinks"])[1]


def even_share(groups: int, top_k: int) -> float:
    """The chance that two tokens share a group when each joins `top_k` of `groups`, evenly and independently.

    1 - C(K - k, k) / C(K, k): the second token must choose all its groups among those the first left out. It is 1 for
    k > K / 2, for any groups whatever (pigeonhole). Raises UserError unless 1 <= k <= K.
    """
    if not 1 <= top_k <= groups:
        raise UserError(f"top_k: expected 1 to {groups}, got {top_k}")
    return 1 - comb(groups - top_k, top_k) / comb(groups, top_k)


def even_pairs(groups: int, top_k: int, *, length: int, window: int, sinks: int = 0) -> tuple[float, float]:
    """Expected shares of all causal pairs and of the far ones that such groups keep, window and sinks included."""
    beyond = max(length - window - 1, 0)
    far, every = beyond * (beyond + 1) // 2, length * (length + 1) // 2
    if not far:
        return 1.0, 1.0
    to_sinks = sum(max(beyond - sink, 0) for sink in range(sinks))
    kept = to_sinks + (far - to_sinks) * even_share(groups, top_k)
    return (every - far + kept) / every, kept / far


def calls_limit(groups: int, top_k: int) -> float:
    """Times faster than full attention when each group is one causal call on its k T / K tokens: K / k^2."""
    return groups / top_k**2


def printed_limit(model: str, groups: int, top_k: int) -> float | None:
    """The bound that the paper's own share of pairs kept sets, or None where it prints none."""
    kept = speed.printed_membership(model, groups, top_k).get("pairs_kept")
    return None if kept is None else 100 / kept


def write(
    table: str,
    exhibit: Exhibit,
    experiment: Experiment,
    results_root: Path,
    output_prefix: Path,
    *,
    partial: bool = False,
) -> None:
    """Write `output_prefix`.csv, .md, .html and .tex from the rows' results and the timing of attention alone.

    Raises UserError when a result is missing, unless `partial`: then its cells are dashes and a line says why.
    """
    entries = rows.gather(exhibit, experiment, results_root, partial=partial)
    found, timed = sweeps(entries, experiment), speed.load(Path(results_root) / speed.RESULT)
    groups = one_number_of_groups(found, f"tables.{table}")
    grids = []
    for model in exhibit.models or experiment.models:
        mine, beside = [each for each in found if each.model == model], [e for e in entries if e.model == model]
        about = captions.measured_on(beside, rows.manifest(results_root, "models", model))
        name = rows.display_name(results_root, model)
        grids.append(_pairs(f"{name}: far pairs kept", groups, mine, about))
        grids.append(_speed(f"{name}: bounds on any speed-up, and speed", groups, mine, timed))
        grids.append(_perplexity(f"{name}: perplexity over the pretrained model's", groups, mine, entries))
    notes = captions.notes(entries, exhibit, experiment, results_root) + _notes(groups, timed)
    write_atomically(Path(f"{output_prefix}.csv"), frame(entries, found, timed).to_csv(index=False))
    write_atomically(Path(f"{output_prefix}.md"), layout.markdown(exhibit.title, grids, notes))
    write_atomically(Path(f"{output_prefix}.html"), layout.page(exhibit.title, grids, notes))
    write_atomically(Path(f"{output_prefix}.tex"), layout.latex(table, exhibit.title, grids, notes))


def sweeps(entries: list[Entry], experiment: Experiment) -> list[Sweep]:
    """The hard rows by model and method, in the order of the config."""
    found: dict[tuple, Sweep] = {}
    for entry in entries:
        if entry.row.attention == "hard":
            groups = experiment.methods[entry.row.method].adapter.groups
            sweep = found.setdefault(
                (entry.model, entry.row.method), Sweep(entry.model, entry.method_label, groups, {})
            )
            if entry.runs:
                sweep.by_k[entry.row.top_k] = entry
    return list(found.values())


def one_number_of_groups(found: list[Sweep], where: str) -> int:
    """K of all hard rows. Raises UserError where there is none, or more than one."""
    groups = sorted({sweep.groups for sweep in found})
    if len(groups) != 1:
        raise UserError(f"{where}.rows: expected hard rows that all have the same K, got K of {groups}")
    return groups[0]


def timings(timed: dict, groups: int) -> dict[int, dict[int, dict]]:
    """{tokens: {k: timed case}} of attention alone with k of `groups` groups a token, at the first thread count."""
    cases = [row for row in timed["metrics"]["membership"] if row["groups"] == groups]
    first = [row for row in cases if row["threads"] == cases[0]["threads"]]
    lengths = sorted({row["length"] for row in first})
    return {length: {row["top_k"]: row for row in first if row["length"] == length} for length in lengths}


def frame(entries: list[Entry], found: list[Sweep], timed: dict) -> pandas.DataFrame:
    """The rows' tidy frame, and below it what is counted and timed for each k; `variant` holds the k of a line."""
    groups, lines = found[0].groups, []
    for sweep, k, entry in [(each, k, entry) for each in found for k, entry in each.by_k.items()]:
        known = {"model": entry.model, "corpus": entry.corpus, "row": entry.label, "method": entry.row.method}
        known |= {"variant": entry.row.variant, "metric": "far_pairs_kept_if_even"}
        lines.append(known | {"value": sweep.far_if_even(k)})
    for k in range(1, groups + 1):
        known = {"row": f"Even groups, {k} of {groups}", "variant": f"hard-k{k}"}
        share = even_share(groups, k)
        numbers = {"far_pairs_kept": share, "bound": 1 / share, "group_calls_bound": calls_limit(groups, k)}
        lines += [known | {"metric": metric, "value": value} for metric, value in numbers.items()]
        for model, name in PAPERS.items():
            paper = speed.printed_membership(model, groups, k)
            values = {"pairs_kept": paper.get("pairs_kept"), "speedup": paper.get("speedup")}
            values["bound_of_its_pairs"] = printed_limit(model, groups, k)
            where = known | {"row": f"Paper: {name}, {k} of {groups}", "paper_row": f"table7.{model}.k{k}"}
            lines += [where | {"metric": metric, "paper": value} for metric, value in values.items() if paper]
        for length, cases in timings(timed, groups).items():
            case = cases.get(k, {})
            where = known | {"row": f"Attention alone, {length} tokens", "result": speed.RESULT}
            for metric, key in (("speedup", "speedup"), ("bound", "limit"), ("far_pairs_kept", "far_pairs_kept")):
                lines += [where | {"metric": metric, "value": case[key]}] if case else []
    extra = pandas.DataFrame(lines, columns=rows.COLUMNS).astype({"seed": "Int64"})
    return pandas.concat([rows.frame(entries), extra])


def _pairs(title: str, groups: int, found: list[Sweep], about: list[str]) -> Grid:
    header = [
        "Groups",
        "Even groups",
        *(cell for sweep in found for cell in (sweep.label, "if even")),
        *(f"Paper: {name}" for name in PAPERS.values()),
    ]
    lines = []
    for k in range(1, groups + 1):
        line = [f"{k} of {groups}", percent(even_share(groups, k))]
        for sweep in found:
            even = sweep.far_if_even(k)
            line += [mean_over_seeds(sweep.far(k), percent), "-" if even is None else percent(even)]
        papers = (speed.printed_membership(model, groups, k).get("pairs_kept") for model in PAPERS)
        lines.append([*line, *(f"{paper_number(kept)} %" if kept is not None else "-" for kept in papers)])
    return Grid(title, header, lines, about)


def _speed(title: str, groups: int, found: list[Sweep], timed: dict) -> Grid:
    cases = timings(timed, groups)
    header = ["Groups", "Bound, even groups", *(f"Bound, {sweep.label}" for sweep in found)]
    header += [f"Bound of the paper's pairs: {name}" for name in PAPERS.values()]
    header += [f"{groups} calls of kT/{groups} tokens"]
    header += [cell for length in cases for cell in (f"Measured at {speed.tokens(length)}", "its bound")]
    lines = []
    for k in range(1, groups + 1):
        line = [f"{k} of {groups}", f"{1 / even_share(groups, k):.2f}"]
        line += [mean_over_seeds([1 / kept for kept in sweep.far(k)], "{:.2f}".format) for sweep in found]
        limits = (printed_limit(model, groups, k) for model in PAPERS)
        line += ["-" if limit is None else f"{limit:.2f}" for limit in limits]
        line.append(f"{calls_limit(groups, k):.2f}")
        for length in cases:
            case = cases[length].get(k)
            line += [f"{case['speedup']:.2f}", f"{case['limit']:.2f}"] if case else ["-", "-"]
        lines.append([*line, paper_number(speed.printed_membership("gpt2_124m", groups, k).get("speedup"))])
    return Grid(title, [*header, "Paper's speed-up"], lines)


def _perplexity(title: str, groups: int, found: list[Sweep], entries: list[Entry]) -> Grid:
    header = ["Groups", "Keeps every pair, whatever the groups", *(sweep.label for sweep in found)]
    header += [f"Paper: {name}" for name in PAPERS.values()]
    columns = [ratios([change(sweep, k, entries) for k in range(1, groups + 1)]) for sweep in found]
    lines = []
    for k in range(1, groups + 1):
        line = [f"{k} of {groups}", "yes" if even_share(groups, k) == 1 else "no"]
        line += [column[k - 1] for column in columns]
        lines.append([*line, *(paper_ratio(printed_change(model, groups, k)) for model in PAPERS)])
    return Grid(title, header, lines)


def change(sweep: Sweep, top_k: int, entries: list[Entry]) -> statistics.Ratio | None:
    """Perplexity over the pretrained row's, or None where that k or the pretrained row has no result."""
    entry = sweep.by_k.get(top_k)
    base = rows.reference(entries, entry) if entry else None
    return entry.against(base) if base else None


def printed_change(model: str, groups: int, top_k: int) -> float | None:
    """The paper's perplexity with k groups over its pretrained model's, or None where it prints none."""
    paper = speed.printed_membership(model, groups, top_k)
    return paper["perplexity"] / printed.baseline(f"table7.{model}.k{top_k}")["perplexity"] if paper else None


def _notes(groups: int, timed: dict) -> list[str]:
    settings, origin = timed["settings"], timed["provenance"]
    threads = next((row["threads"] for row in timed["metrics"]["membership"]), 1)
    half = groups // 2 + 1
    notes = [
        f"Even groups: each token joins k of {groups} groups, evenly and independently, so two tokens share one with "
        f"probability 1 - C({groups}-k,k)/C({groups},k). If even: the same with the row's sinks, kept in any case. "
        "More than that is kept where groups are uneven, or some pairs of groups are joined more often than others.",
        "Bound: one over the share of far pairs kept, which a long context approaches; no exact implementation of the "
        "mask passes it. Of measured cases: one over the share of all pairs kept at that length.",
        f"{groups} calls of kT/{groups} tokens, one a group, cost k^2/{groups} of full attention, so they are "
        f"{groups}/k^2 times faster and count pairs that share several groups more than once. The paper's speed-ups "
        f"are {groups}/k.",
        f"From k={half} on any two tokens share a group (pigeonhole), whatever was learned: with frozen weights the "
        "pretrained perplexity returns exactly, and nothing is saved.",
        f"Measured: attention alone, forward, {threads} thread{'s' * (threads > 1)} of {origin['processor']}, "
        f"{origin['dtype']}, H={settings['heads']}, D={settings['head_dim']}, w={settings['window']}, random groups. A "
        "speed above its bound where every pair is kept: our tiling of full attention against PyTorch's kernel.",
    ]
    if groups == PAPERS_GROUPS:
        whole, base = (printed.number(f"table7.gpt2_124m.{row}.perplexity") for row in (f"k{groups}", "pretrained"))
        notes.append(
            f"k={groups} is full attention, so with frozen weights it has the pretrained perplexity; for GPT-2 the "
            f"paper prints {whole} there against {base} pretrained."
        )
    return notes
