"""Claims decided by any result file: a path with wildcards below the results of a scale, and a place in its JSON.

The path may hold {model}, {corpus} and {seed}, and * for anything else. The place is dotted: a name, a list's index,
`*` for every entry, [name=value] for the entries of a list that have it, [a.b] for a name with dots.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from focus.config import Experiment
from focus.errors import UserError
from focus.paper import groups, statistics
from focus.paper.claim import Claim, Source
from focus.paper.evidence import HERE, Evidence, empty_case, judged
from focus.paper.statistics import Measured
from focus.paper.verdicts import agreed
from focus.provenance import read_result

WILDCARDS = ("model", "corpus", "seed")
STEP = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")
REDUCE = {"mean": fmean, "min": min, "max": max}


def cases(claim: Claim, evidence: Evidence) -> list[dict]:
    """A case for each model and corpus with results of the run's models and seeds, or one that says what is missing."""
    found: dict[tuple, list[dict[str, str]]] = {}
    for match in matches(claim.source.result, evidence.root):
        model, corpus = match.get("model", HERE), match.get("corpus", "")
        if _covered(claim, evidence, match):
            found.setdefault((model, corpus), []).append(match)
    if not found:
        return [empty_case("", "", f"no {claim.source.result}")]
    return [_case(claim, evidence, model, corpus, each) for (model, corpus), each in found.items()]


def matches(pattern: str, root: Path) -> Iterator[dict[str, str]]:
    """The wildcards of every file that a pattern stands for, "path" beside them; "0", "1", ... are its asterisks."""
    parts = re.split(r"(\{\w+\}|\*)", pattern)
    unknown = [part for part in parts[1::2] if part != "*" and part[1:-1] not in WILDCARDS]
    if unknown:
        raise UserError(f"source: expected the wildcards {', '.join(WILDCARDS)}, got {unknown[0]} in {pattern}")
    names = iter(range(len(parts)))
    seen: set[str] = set()
    expression = ""
    for part in parts:
        if part == "*":
            expression += f"(?P<star{next(names)}>[^/]+)"
        elif part[:1] == "{" and part[1:-1] in seen:
            expression += f"(?P={part[1:-1]})"
        elif part[:1] == "{":
            seen.add(part[1:-1])
            expression += f"(?P<{part[1:-1]}>{r'[0-9]+' if part == '{seed}' else '[^/]+'})"
        else:
            expression += re.escape(part)
    for path in sorted(root.glob(re.sub(r"\{\w+\}", "*", pattern))):
        name = path.relative_to(root).as_posix()
        if match := re.fullmatch(expression, name):
            yield {key.removeprefix("star"): value for key, value in match.groupdict().items()} | {"path": name}


def look_up(content: object, key: str) -> list[tuple[str, object]]:
    """(name, value) of everything that a dotted place leads to; the name is made of what its asterisks stood for."""
    found: list[tuple[str, object]] = [("", content)]
    for bracketed, plain in STEP.findall(key):
        found = [each for name, value in found for each in _step(name, value, bracketed or plain, bool(bracketed))]
    return found


def _step(name: str, value: object, step: str, bracketed: bool) -> Iterator[tuple[str, object]]:
    if step == "*" and isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{name}, {key}" if name else str(key), each) for key, each in entries)
    elif bracketed and "=" in step:
        wanted, _, text = step.partition("=")
        for each in value if isinstance(value, list) else [value]:
            held = each.get(wanted) if isinstance(each, dict) else None
            if text in (map(str, held) if isinstance(held, list) else [str(held)]):
                yield name, each
    elif isinstance(value, list) and re.fullmatch(r"-?\d+", step) and -len(value) <= int(step) < len(value):
        yield name, value[int(step)]
    elif isinstance(value, dict) and step in value:
        yield name, value[step]


def _planned(known: Experiment, path: str) -> bool:
    """Whether this run makes a file of a measurement that has settings of its own; a changed one leaves old files."""
    measure, *rest = path.split("/")
    if measure == "bits":
        balance, length, trains = rest[:3]
        return known.bits is not None and (
            balance in known.bits.balances
            and length in [f"t{each}" for each in known.bits.lengths]
            and trains in known.bits.trains
        )
    if measure == "leak":
        rows = [(row.model, row.corpus, row.method) for row in known.leak.rows] if known.leak else []
        return tuple(rest[:3]) in rows
    if measure == "groups":
        settings = known.groups
        return settings is not None and rest[:3] == [settings.model, settings.corpus, settings.method]
    return measure != "speed" or known.speed is not None


def _covered(claim: Claim, evidence: Evidence, match: dict[str, str]) -> bool:
    """Whether a file is of a model and seed of this run, and of what the claim is about."""
    known, model = evidence.experiment, match.get("model")
    if not _planned(known, match["path"]):
        return False
    if model is not None and (model not in known.models or (claim.only_models and model not in claim.only_models)):
        return False
    if "corpus" in match and claim.only_corpora and match["corpus"] not in claim.only_corpora:
        return False
    return "seed" not in match or int(match["seed"]) in _seeds(claim, evidence, model)


def _seeds(claim: Claim, evidence: Evidence, model: str | None) -> list[int]:
    known = evidence.experiment
    seeds = (known.model_settings[model].seeds if model in known.model_settings else None) or known.seeds
    if claim.source.result.startswith("bits/") and known.bits is not None:
        seeds = known.bits.seeds or seeds
    return seeds if claim.source.seeds == "all" else seeds[:1]


def _case(claim: Claim, evidence: Evidence, model: str, corpus: str, found: list[dict[str, str]]) -> dict:
    """The verdict on one model and corpus, seed by seed, on the seeds of which every file is there."""
    case, seeds, results, wanted = empty_case(model, corpus, ""), {}, [], _seeds(claim, evidence, model)
    by_seed: dict[str, list[Measured]] = {}
    comparable = True
    present = {match["path"] for match in found}
    seeded = found if "seed" in found[0] else []
    paths = {str(seed): [_path(claim.source, match | {"seed": str(seed)}) for match in seeded] for seed in wanted}
    missing = {
        seed: absent for seed, each in paths.items() if (absent := [path for path in each if path not in present])
    }
    if len(missing) == len(wanted):
        return case | {"reason": f"no {missing[str(wanted[0])][0]}"}
    for match in [each for each in found if each.get("seed") not in missing]:
        read = _lists if claim.paired else _numbers
        first = read(claim.source, match, evidence.root)
        other = _beside(claim.against, match, evidence.root) if claim.against else match
        second = read(claim.against, other, evidence.root) if claim.against else None
        if isinstance(first, str) or isinstance(second, str):
            return case | {"reason": first if isinstance(first, str) else second}
        results += [match["path"]] + ([_path(claim.against, other)] if claim.against else [])
        comparable = comparable and _comparable(claim, model, corpus, evidence.root / match["path"])
        by_seed.setdefault(match.get("seed", ""), []).extend(_compared(claim, first, second, match))
    for seed, measured in sorted(by_seed.items()):
        seeds[seed] = judged(claim, measured, comparable)
    verdict = agreed([each["verdict"] for each in seeds.values()], "seeds")
    return case | {"verdict": verdict, "seeds": seeds, "results": list(dict.fromkeys(results))}


def _compared(claim: Claim, first: list, second: list | None, match: dict[str, str]) -> Iterator[Measured]:
    """The numbers, or their changes against the reference's: paired, in percent, or as differences."""
    if second is not None and len(second) not in (1, len(first)):
        where = f"{match['path']}: against"
        raise UserError(f"{where}: expected one value of {claim.against.key} or {len(first)}, got {len(second)}")
    others = second * len(first) if second and len(second) == 1 else second or [None] * len(first)
    for one, other in zip(first, others, strict=True):
        value, error = _change(claim, one, other) if other else one[1:]
        names = [value for key, value in match.items() if key.isdigit()] + [one[0]]
        yield Measured(", ".join(filter(None, names)), value, error)


def _change(claim: Claim, one: tuple, other: tuple) -> tuple[float, float]:
    """The change and its standard error; of unpaired numbers the errors in quadrature."""
    if claim.paired:
        return _paired(one[1], other[1])
    factor = 100 / other[1] if claim.percent else 1.0
    error = math.hypot(one[2], other[2] * (one[1] / other[1] if claim.percent else 1.0))
    return factor * (one[1] - other[1]), abs(factor) * error


def _paired(ours: list, reference: list) -> tuple[float, float]:
    """The change of scored windows' perplexity in percent, of items' losses in nats, of right items in points."""
    if ours and isinstance(ours[0], dict):
        ratio = statistics.compare(ours, reference)
        return 100 * (ratio.value - 1), 100 * (ratio.error or 0.0)
    if any(isinstance(each, float) for each in ours):
        change, error = statistics.paired(ours, reference)
        return change, error or 0.0
    flips = statistics.flips(ours, reference)
    return 100 * flips.change, 100 * max(flips.error, 1 / flips.items)


def _beside(source: Source, match: dict[str, str], root: Path) -> dict[str, str]:
    """The wildcards of a reference's file: its seed is the same, or the only one that it has."""
    seeds = [each["seed"] for each in matches(_path(source, match | {"seed": "{seed}"}), root) if "seed" in each]
    return match | {"seed": seeds[0]} if len(seeds) == 1 else match


def _path(source: Source, match: dict[str, str]) -> str:
    """The source's path with the wildcards of another's file."""
    stars = iter(match[key] for key in sorted((key for key in match if key.isdigit()), key=int))
    filled = re.sub(r"\{(\w+)\}", lambda wildcard: match.get(wildcard[1], wildcard[0]), source.result)
    return re.sub(r"\*", lambda _: next(stars, "*"), filled)


def _content(source: Source, match: dict[str, str], root: Path) -> dict | str:
    """The JSON of a source's file, or why there is none."""
    path = root / _path(source, match)
    if not path.exists():
        return f"no {_path(source, match)}"
    result = read_result(path)
    return result | ({"best": _best_layer(result["metrics"])} if result["experiment"] == "groups" else {})


def _numbers(source: Source, match: dict[str, str], root: Path) -> list[Measured] | str:
    """The numbers that a source names in one file, or why there are none."""
    content = _content(source, match, root)
    if isinstance(content, str):
        return content
    values = look_up(content, source.key)
    numbers = [(name, value) for name, value in values if _number(value)]
    if not numbers or len(numbers) < len(values):
        return f"{_path(source, match)} has no number {source.key}"
    if source.over:
        numbers = [("", REDUCE[source.over]([value for _, value in numbers]))]
    errors = [value for _, value in look_up(content, source.error)] if source.error else [0.0] * len(numbers)
    if len(errors) != len(numbers) or not all(each is None or _number(each) for each in errors):
        return f"{_path(source, match)} has no number {source.error} for each {source.key}"
    return [
        Measured(name, source.factor * value, abs(source.factor) * (error or 0.0))
        for (name, value), error in zip(numbers, errors, strict=True)
    ]


def _lists(source: Source, match: dict[str, str], root: Path) -> list[tuple[str, list]] | str:
    """The lists of windows or items, or the tasks, that a source names in one file, or why there are none.

    `over: all` makes them one list.
    """
    content = _content(source, match, root)
    if isinstance(content, str):
        return content
    values = look_up(content, source.key)
    values = [(name, statistics.scored(each) if _is_task(each) else each) for name, each in values]
    if source.over == "all":
        values = [("", [one for _, value in values for one in (value if isinstance(value, list) else [value])])]
    found = [(name, value) for name, value in values if isinstance(value, list) and value]
    if any(isinstance(value[0], float) and len(value) == 1 for _, value in found):
        return f"{_path(source, match)} has one item of {source.key}, so its change has no error"
    return found or f"{_path(source, match)} has no list {source.key}"


def _is_task(value: object) -> bool:
    return isinstance(value, dict) and "correct" in value


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _best_layer(metrics: dict) -> dict:
    """What the table of groups shows of its layer, as shares, and the p-values that count the choice of the layer."""
    layer = metrics["layers"][metrics["best"]["layer"]]
    smallest, largest = groups.shares(layer)
    known = {"smallest_share": smallest, "largest_share": largest, "p_values": metrics["best"]["p_values"]}
    return layer | known | {"most": {category: groups.most(layer, category) for category in groups.CATEGORIES}}


def _comparable(claim: Claim, model: str, corpus: str, path: Path) -> bool:
    if claim.kind != "value":
        return True
    if model != HERE:
        return model in claim.models and corpus in claim.corpora
    processor = read_result(path)["provenance"]["processor"].lower()
    return any(name in processor for name in claim.models)
