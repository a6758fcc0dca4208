"""What every compared method's attention costs at long contexts, against full attention, all in one run (Figure 1).

Each method runs the code that its quality rows run, forward, with one thread, on random inputs; learned parts are as
initialised, and Focus's groups are drawn evenly. Full attention and the methods take turns, so that a busy machine
slows both; a ratio is that of the smallest times over the rounds in which both ran.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from focus.attention import choose_backend, focus_attention, soft_attention
from focus.benchmark_timing import Place, compare, full_attention
from focus.config import variant_of
from focus.jobs import MethodsJob, TimedRow
from focus.methods import METHODS
from focus.methods.structural import Call, LayerState, Structural
from focus.progress import Progress
from focus.provenance import write_result

SHORTEST = 1024
QUADRATIC = "not run: quadratic memory"


@dataclass
class Case:
    """One attention at one length: the rows that run it, as method/variant, and seconds so far.

    `how` names what ran, `reason` says why nothing did.
    """

    row: TimedRow
    rows: list[str]
    how: str = ""
    reason: str = ""
    state: LayerState | None = None
    times: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)


def run(job: MethodsJob, output: Path) -> None:
    """Time every method at every length of `job` and write one result."""
    started, before = time.time(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        write_result(
            output,
            experiment="methods",
            settings=job.model_dump(mode="json"),
            metrics={"cases": _measure(job)},
            started=started,
            modules=["focus.benchmark_methods"],
            dtype=str(_place(job).dtype).removeprefix("torch."),
            device=_place(job).device.type,
        )
    finally:
        torch.set_num_threads(before)


def distinct(rows: list[TimedRow]) -> dict[str, list[TimedRow]]:
    """Rows by the attention they run, which training does not change: rows with the same are timed once."""
    found: dict[str, list[TimedRow]] = {}
    for row in rows:
        found.setdefault(_identity(row), []).append(row)
    return found


def _identity(row: TimedRow) -> str:
    settings = row.settings
    if isinstance(METHODS[settings.kind], Structural):
        return json.dumps(settings.model_dump(exclude={"label", "training"}), sort_keys=True)
    if row.attention == "full":
        return "full"
    adapter = settings.adapter
    parts = [row.attention, adapter.groups, adapter.window, adapter.sinks]
    if row.attention == "hard":
        return json.dumps([*parts, row.top_k])
    return json.dumps([*parts, adapter.gate, adapter.steepness])


def _measure(job: MethodsJob) -> list[dict]:
    """One dictionary a length and case; shorter lengths, untold, come first and say what the longer ones will need."""
    groups, results = distinct(job.rows), []
    ladder = _ladder(job.lengths)
    progress = Progress("methods", len(ladder) * len(groups))
    earlier: dict[str, list[tuple[int, float]]] = {identity: [] for identity in groups}
    for length in ladder:
        cases = {
            identity: Case(rows[0], [f"{row.method}/{variant_of(row.attention, row.top_k)}" for row in rows])
            for identity, rows in groups.items()
        }
        _take_turns(job, length, cases, earlier, rounds=job.rounds if length in job.lengths else 1)
        for identity, case in cases.items():
            if case.times:
                earlier[identity].append((length, min(case.times)))
            if length in job.lengths:
                results.append(_reported(case, length))
        progress.step(len(cases))
    return results


def _place(job: MethodsJob) -> Place:
    return Place.named(job.device, job.dtype)


def _ladder(lengths: list[int]) -> list[int]:
    """The lengths and, by quarters down from the shortest, those before it."""
    steps, length = sorted(set(lengths)), min(lengths) // 4
    while length >= SHORTEST:
        steps.insert(0, length)
        length //= 4
    return steps


def _take_turns(
    job: MethodsJob, length: int, cases: dict[str, Case], earlier: dict[str, list[tuple[int, float]]], rounds: int
) -> None:
    """Up to `rounds` rounds of full attention and each case that has time left; fills `times` and `full` of the cases.

    A case whose first call alone is expected to take longer than the job allows gets a reason instead.
    """
    place = _place(job)
    clock, inputs = place.clock(1), place.inputs(job.heads, length, job.head_dim, job.seed)
    calls = {identity: call for identity, case in cases.items() if (call := _call(case, job, inputs)) is not None}
    for identity in list(calls):
        needed = expected(earlier[identity], length)
        if needed > job.seconds:
            cases[identity].reason = f"not run: expected to take {needed:.0f} s, allowed are {job.seconds:g}"
            del calls[identity]
    with torch.inference_mode():
        for _ in range(rounds):
            calls = {
                identity: call
                for identity, call in calls.items()
                if sum(times := cases[identity].times) + max(times, default=0.0) <= job.seconds
            }
            if not calls:
                return
            start = clock()
            full_attention(*inputs)
            full = clock() - start
            for identity, call in list(calls.items()):
                case, start = cases[identity], clock()
                try:
                    call()
                except RuntimeError as error:
                    if "can't allocate memory" not in str(error) and not isinstance(error, torch.OutOfMemoryError):
                        raise
                    case.reason = "not run: needs more memory than the machine has"
                    del calls[identity]
                    continue
                case.times.append(clock() - start)
                case.full.append(full)


def expected(earlier: list[tuple[int, float]], length: int) -> float:
    """Seconds a call will take, from (length, seconds) of shorter ones; growth between linear and quadratic."""
    if not earlier:
        return 0.0
    last, seconds = earlier[-1]
    power = 2.0
    if len(earlier) > 1:
        before, less = earlier[-2]
        power = min(max(math.log(seconds / less) / math.log(last / before), 1.0), 2.0)
    return seconds * (length / last) ** power


def _call(case: Case, job: MethodsJob, inputs: list[Tensor]) -> Callable[[], Tensor] | None:
    """What one call of the case's attention is; None, with `how` or `reason` set, where there is none to time."""
    row, length = case.row, inputs[0].shape[2]
    kind, settings = METHODS[row.settings.kind], row.settings
    if isinstance(kind, Structural):
        shape = {"window": settings.window, "heads": job.heads, "head_dim": job.head_dim}
        generator = torch.Generator().manual_seed(job.seed)
        case.how, case.state = kind.name, kind.layer_state(settings, **shape, generator=generator).to(inputs[0]).eval()
        call = Call(*inputs, None, job.head_dim**-0.5, None, None, case.state)
        return lambda: kind.attend(call)
    if row.attention == "full":
        case.how = "full attention"
        return None
    adapter = settings.adapter
    generator = torch.Generator().manual_seed(job.seed + 1)
    drawn = torch.rand(1, length, adapter.groups, generator=generator).to(inputs[0].device)
    common = {"window": adapter.window, "sinks": adapter.sinks}
    if row.attention == "soft":
        case.how = "focus soft"
        if adapter.gate != "exponential":
            case.reason = QUADRATIC
            return None
        assignment = torch.softmax(4 * drawn, dim=-1)
        return lambda: soft_attention(*inputs, assignment, steepness=adapter.steepness, **common)
    order = drawn.argsort(dim=-1)
    groups = order[..., 0] if row.top_k == 1 else order < row.top_k
    case.how = f"focus hard, {choose_backend(inputs[0], inputs[2], groups)}"
    return lambda: focus_attention(*inputs, groups, **common)


def _reported(case: Case, length: int) -> dict:
    """Full attention is once as fast as itself, by definition."""
    result = {"length": length, "rows": case.rows, "how": case.how, "reason": case.reason or None}
    if case.state is not None and case.state.backend:
        result["how"] = f"{case.how}, {case.state.backend}"
    if not case.times:
        by_definition = {"speedup": 1.0, "speedup_range": [1.0, 1.0]} if case.how == "full attention" else {}
        return result | by_definition
    counted = METHODS[case.row.settings.kind].pairs_kept(case.row.settings, case.row.settings.window, length)
    result["pairs_kept"] = None if counted is None else counted[0]
    return result | {"full_ms": min(case.full) * 1e3, "ms": min(case.times) * 1e3} | compare(case.full, case.times)
