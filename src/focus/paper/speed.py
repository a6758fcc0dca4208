"""Table 6 and Table 7's speed column from the result of `focus bench attention`, beside the paper's for an H100."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas

from focus.errors import UserError
from focus.paper import layout, printed
from focus.paper.layout import Grid
from focus.paper.statistics import Measured
from focus.provenance import read_result, write_atomically

RESULT = "speed/attention.json"
METRICS = ("speedup", "cosine")
LEAST_MIB = 8
SECTIONS = ("forward", "backward", "unbalanced", "membership", "training", "decode", "decode_model", "memory")
KEYS = ("length", "groups", "top_k", "threads")
TITLES = {
    "table6": "Attention alone: Focus against full attention (the paper's Table 6)",
    "table7speed": "Several groups a token: pairs kept and speed (the paper's Table 7)",
}
COLUMNS = ["section", *KEYS, "metric", "value", "paper", "processor", "dtype", "backend", "code"]


def load(path: Path) -> dict:
    """The result of one run. Raises UserError when the file is missing or another kind of result."""
    result = read_result(path)
    if result["experiment"] != "attention":
        raise UserError(f"{path}: expected the result of focus bench attention, got one of {result['experiment']}")
    return result


def write(table: str, result_path: Path, output_prefix: Path) -> None:
    """Write `output_prefix`.csv, .md, .html and .tex. Raises UserError for a table other than those of TITLES."""
    result = load(result_path)
    title, grids, notes = _page(table, result)
    write_atomically(Path(f"{output_prefix}.csv"), _frame(table, result).to_csv(index=False))
    write_atomically(Path(f"{output_prefix}.md"), layout.markdown(title, grids, notes))
    write_atomically(Path(f"{output_prefix}.html"), layout.page(title, grids, notes))
    write_atomically(Path(f"{output_prefix}.tex"), layout.latex(table, title, grids, notes))


def text(table: str, result_path: Path) -> str:
    """The table as Markdown, for a terminal."""
    return layout.markdown(*_page(table, load(result_path)))


def measured(result: dict, metric: str, subject: str, shortest: int | None, longest: int | None) -> list[Measured]:
    """The cases of `subject` with between `shortest` and `longest` tokens, each named and with its error over rounds.

    The subject is section/K8, section/k2 (k groups a token) or section/all.
    """
    section, _, selected = subject.partition("/")
    found = []
    for row in result["metrics"].get(section, []):
        names = {"all", f"K{row['groups']}", f"k{row.get('top_k')}"}
        inside = (shortest or 0) <= row["length"] <= (longest or row["length"])
        if selected in names and inside and metric in row:
            name = f"K={row['groups']}, " + (f"k={row['top_k']}, " if "top_k" in row else "")
            name += f"{tokens(row['length'])}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
            error = row.get("speedup_error") if metric == "speedup" else None
            found.append(Measured(name, row[metric], error or 0.0))
    return found


def printed_speedup(groups: int, length: int) -> float | None:
    """Table 6's speed-up, or None where it has none."""
    return printed.rows_of("table6").get(f"table6.k{groups}", {}).get(str(length))


def printed_membership(model: str, groups: int, top_k: int) -> dict:
    """Table 7's row of a model ({} for other K than 4): speedup, pairs_kept in percent."""
    return printed.rows_of("table7").get(f"table7.{model}.k{top_k}", {}) if groups == 4 else {}


def tokens(length: int) -> str:
    """4096 as 4K, 1048576 as 1M; other lengths in full."""
    for unit, name in ((1024**2, "M"), (1024, "K")):
        if length % unit == 0:
            return f"{length // unit}{name}"
    return f"{length:,}"


def _page(table: str, result: dict) -> tuple[str, list[Grid], list[str]]:
    if table not in TITLES:
        raise UserError(f"table: expected one of {', '.join(TITLES)}, got {table}")
    grids = {"table6": _table6, "table7speed": _table7}[table](result["metrics"])
    return TITLES[table], grids, _notes(table, result)


def _table6(metrics: dict) -> list[Grid]:
    grids = []
    for section, title in (("forward", "Forward"), ("backward", "Forward and backward")):
        grids += [
            _against_full(title, threads, rows, paper=section == "forward")
            for threads, rows in _by_threads(metrics[section])
        ]
    if metrics["forward"]:
        grids.append(_parts(metrics["forward"]))
    grids += [_unbalanced(threads, rows) for threads, rows in _by_threads(metrics["unbalanced"])]
    grids += [_decode(threads, rows) for threads, rows in _by_threads(metrics["decode"])]
    grids += [_decode_model(threads, rows) for threads, rows in _by_threads(metrics["decode_model"])]
    grids += [_training(threads, rows) for threads, rows in _by_threads(metrics["training"])]
    return grids + ([_memory(metrics["memory"])] if metrics["memory"] else [])


def _table7(metrics: dict) -> list[Grid]:
    header = ["Tokens", "Groups", "Pairs kept", "Far pairs kept", "Paper's pairs: GPT-2", "Mistral", "Bound"]
    header += ["Speed-up", "Range", "Paper's speed-up", "How"]
    grids = []
    for threads, rows in _by_threads(metrics["membership"]):
        lines = []
        for row in rows:
            paper = [printed_membership(name, row["groups"], row["top_k"]) for name in ("gpt2_124m", "mistral_7b")]
            line = [tokens(row["length"]), f"{row['top_k']} of {row['groups']}"]
            line += [_percent(row["pairs_kept"]), _percent(row["far_pairs_kept"])]
            line += [f"{each['pairs_kept']} %" if each else "-" for each in paper]
            line += [_times(row["limit"]), _times(row["speedup"]), _range(row)]
            lines.append([*line, f"{paper[0]['speedup']:.1f}" if paper[0] else "-", row["backend"].split("/")[0]])
        grids.append(Grid(_threads("Forward", threads), header, lines, text=0))
    return grids


def _against_full(title: str, threads: int, rows: list[dict], *, paper: bool) -> Grid:
    header = ["Tokens", "K", "Full, ms", "Focus, ms", "Speed-up", "Range", "Limit", "Reached"]
    header += ["Paper, H100"] * paper + ["Cosine"]
    lines = []
    for row in rows:
        line = [tokens(row["length"]), str(row["groups"]), _amount(row["full_ms"]), _amount(row["focus_ms"])]
        line += [_times(row["speedup"]), _range(row), _times(row["limit"]), f"{100 * row['share_of_limit']:.0f} %"]
        printed_value = printed_speedup(row["groups"], row["length"])
        line += ["-" if printed_value is None else f"{printed_value:.1f}"] * paper
        lines.append([*line, f"{row['cosine']:.4f}"])
    return Grid(_threads(title, threads), header, lines, text=0)


def _parts(rows: list[dict]) -> Grid:
    first = rows[0]["threads"]
    names = {"sort": "Sorting", "groups": "Inside groups", "band": "Window", "merge": "Moving and merging"}
    lines = []
    for row in rows:
        if row["threads"] == first:
            total = sum(row["parts"].values())
            shares = (_percent(row["parts"][name] / total) for name in names)
            lines.append([tokens(row["length"]), str(row["groups"]), *shares])
    return Grid(_threads("Where the forward time goes", first), ["Tokens", "K", *names.values()], lines, text=0)


def _unbalanced(threads: int, rows: list[dict]) -> Grid:
    lines = [
        [tokens(row["length"]), _times(row["speedup"]), _range(row), _times(row["limit"]), _times(row["bound"])]
        for row in rows
    ]
    header = ["Tokens", "Speed-up", "Range", "Limit", "Limit without window"]
    return Grid(_threads("Unequal groups, forward", threads), header, lines, text=0)


def _decode(threads: int, rows: list[dict]) -> Grid:
    lines = []
    for row in rows:
        line = [tokens(row["length"]), str(row["groups"]), _amount(row["full_us"]), _amount(row["focus_us"])]
        lines.append([*line, _times(row["speedup"]), _times(row["limit"])])
    header = ["Tokens held", "K", "Full, µs", "Focus, µs", "Speed-up", "Limit"]
    return Grid(_threads("One token more, attention alone", threads), header, lines, text=0)


def _decode_model(threads: int, rows: list[dict]) -> Grid:
    names = ("full_ms", "full_cache_ms", "focus_ms", "focus_first_ms")
    lines = [
        [tokens(row["length"]), str(row["groups"]), *(_amount(row[name]) for name in names), _times(row["speedup"])]
        for row in rows
    ]
    header = ["Tokens held", "K", "Full, ms", "of it growing the cache", "Focus, ms", "Focus's first", "Speed-up"]
    return Grid(_threads("One token more, a whole model", threads), header, lines, text=0)


def _training(threads: int, rows: list[dict]) -> Grid:
    names = ("full_ms", "soft_ms", "straight_through_ms")
    lines = [
        [
            tokens(row["length"]),
            str(row["groups"]),
            *(_amount(row[name]) for name in names),
            _times(row["straight_through_speedup"]),
        ]
        for row in rows
    ]
    header = ["Tokens", "K", "Full, ms", "Soft gate, ms", "Through hard groups, ms", "Speed-up of the last"]
    return Grid(_threads("A step that trains centroids", threads), header, lines, text=0)


def _memory(rows: list[dict]) -> Grid:
    """A ratio only where full attention takes LEAST_MIB, since small allocations reuse what the process holds."""
    full = {row["length"]: row["mib"] for row in rows if row["groups"] is None}
    lines = [
        [
            tokens(row["length"]),
            str(row["groups"]),
            f"{full[row['length']]:,.0f}",
            f"{row['mib']:,.0f}",
            _times(row["mib"] / full[row["length"]]) if full[row["length"]] >= LEAST_MIB else "-",
        ]
        for row in rows
        if row["groups"]
    ]
    return Grid("Peak memory, forward, 1 thread", ["Tokens", "K", "Full, MiB", "Focus, MiB", "Ratio"], lines, text=0)


def _notes(table: str, result: dict) -> list[str]:
    settings, origin = result["settings"], result["provenance"]
    model = settings["model"]
    notes = [
        f"Measured on {origin['processor']} with PyTorch {origin['versions']['torch']}, {origin['dtype']}, "
        f"H={settings['heads']}, D={settings['head_dim']}, w={settings['window']}, random inputs and groups, kernel "
        f"{origin['backend']}; full attention is the causal kernel that PyTorch chooses.",
        "Both sides are timed in turn. A speed-up is the ratio of the smallest times (processor time for one thread, "
        "else the wall clock); its range is that over rounds, a dash where there was one round.",
    ]
    if table == "table6":
        metrics = result["metrics"]
        explained = {
            "forward": [
                "Limit: what counting pairs allows (Appendix D), 1 / (sum of squared group shares + 2w/n). Times are "
                "not comparable with the paper's, which are from an H100; ratios are shown beside its own.",
                "Cosine: the smallest similarity to the dense definition in float64, over heads and sampled positions.",
            ],
            "decode": [
                "Decoding: median time of one token's attention, keys and values held flat against held by group."
            ],
            "decode_model": [
                f"The whole model has random weights, {model['layers']} layers, {model['heads']} heads of "
                f"{model['head_dim']} and {model['key_heads']} for keys; its first token sorts the cache into groups."
            ],
        }
        return [*notes, *(note for section, of_it in explained.items() if metrics[section] for note in of_it)]
    return [
        *notes,
        "Bound: one over the share of pairs kept, which no exact implementation passes. The paper's speed-ups are K/k.",
        "Groups are drawn evenly. Two tokens share one of k > K/2 groups always: then all pairs are kept, and full "
        "attention is called once (how: full). Masked: the kernel's own mask is faster than a split.",
    ]


def _frame(table: str, result: dict) -> pandas.DataFrame:
    """One line per case and metric in full precision; times in ms or µs as the metric's name says, shares 0 to 1."""
    sections = ["membership"] if table == "table7speed" else [name for name in SECTIONS if name != "membership"]
    origin = {name: result["provenance"][name] for name in ("processor", "dtype", "backend", "code")}
    lines = []
    for section in sections:
        for row in result["metrics"][section]:
            known = {"section": section} | {key: row.get(key) for key in KEYS} | origin
            for metric, value in _numbers(row):
                lines.append(known | {"metric": metric, "value": value, "paper": _printed(section, row, metric)})
    frame = pandas.DataFrame(lines, columns=COLUMNS)
    return frame.astype(dict.fromkeys(KEYS, "Int64"))


def _numbers(row: dict) -> Iterator[tuple[str, float]]:
    for metric, value in row.items():
        if metric == "parts":
            yield from ((f"{name}_ms", part) for name, part in value.items())
        elif metric == "speedup_range":
            yield from zip(("speedup_least", "speedup_most"), value, strict=True)
        elif metric not in (*KEYS, "paper", "backend") and value is not None:
            yield metric, value


def _printed(section: str, row: dict, metric: str) -> float | None:
    if section == "forward" and metric == "speedup":
        return printed_speedup(row["groups"], row["length"])
    if section == "forward" and metric == "cosine":
        return printed.number("table6.cosine")
    if section == "membership" and metric == "speedup":
        return printed_membership("gpt2_124m", row["groups"], row["top_k"]).get("speedup")
    return None


def _by_threads(rows: list[dict]) -> list[tuple[int, list[dict]]]:
    counts = dict.fromkeys(row["threads"] for row in rows)
    return [(count, [row for row in rows if row["threads"] == count]) for count in counts]


def _threads(title: str, count: int) -> str:
    return f"{title}, {count} thread{'s' * (count > 1)}"


def _times(value: float) -> str:
    return f"{value:.2f}"


def _range(row: dict) -> str:
    low, high = row["speedup_range"]
    return f"{low:.2f} to {high:.2f}" if row["repeats"] > 1 else "-"


def _amount(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
