"""What Focus attention costs: time, its parts, memory and pairs kept, against full causal attention (T6, T7).

Both are timed in turn, so that a busy machine slows both, and a ratio is that of the smallest times. With one thread
the clock is the thread's own processor time, else the wall clock. Full attention is the kernel that PyTorch itself
chooses; what our tiling gains on full attention alone is reported beside it (`one_group`).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from focus.attention import (
    GroupedCache,
    choose_backend,
    focus_attention,
    soft_attention,
    straight_through_attention,
)
from focus.attention.decomposed import decomposed_attention
from focus.attention.flash import Pieces, choose_pieces
from focus.attention.plan import make_plan
from focus.benchmark_checks import cosine_to_reference, operation_limit, pairs_kept
from focus.benchmark_model import decode_model
from focus.benchmark_timing import Place, compare, full_attention
from focus.config import AttentionBenchmark
from focus.progress import Progress
from focus.provenance import write_result

WARM_UP = 1024
HIGH_WATER_MARK = Path("/proc/self/clear_refs")


def run(job: AttentionBenchmark, output: Path) -> None:
    """Measure everything `job` names and write one result; peak memory only where the system is Linux."""
    started = time.time()
    before = torch.get_num_threads()
    metrics: dict = {
        "forward": [],
        "backward": [],
        "unbalanced": [],
        "membership": [],
        "training": [],
        "decode": [],
        "decode_model": [],
        "memory": [],
    }
    place = _place(job)
    gpu = place.device.type == "cuda"
    memory_lengths = job.memory_lengths if gpu or HIGH_WATER_MARK.exists() else []
    counts = list(dict.fromkeys(threads or before for threads in (job.threads[:1] if gpu else job.threads)))
    cells = len(counts) * (
        len(job.lengths)
        + len(job.backward_lengths)
        + len(job.unbalanced_lengths)
        + len(job.membership_lengths)
        + len(job.training_lengths)
        + len(job.decode_lengths)
        + len(job.model_lengths)
    ) + (1 + len(job.groups)) * len(memory_lengths)
    progress = Progress("attention", cells)
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            _speed(job.model_copy(update={"seconds": 0.01}), WARM_UP, threads, backward=True)
            for length in job.lengths:
                metrics["forward"] += _speed(job, length, threads)
                progress.step()
            for length in job.unbalanced_lengths:
                metrics["unbalanced"].append(_unbalanced(job, length, threads))
                progress.step()
            for length in job.backward_lengths:
                metrics["backward"] += _speed(job, length, threads, backward=True)
                progress.step()
            for length in job.membership_lengths:
                metrics["membership"] += _membership(job, length, threads)
                progress.step()
            for length in job.training_lengths:
                metrics["training"] += [_training(job, length, groups, threads) for groups in job.groups]
                progress.step()
            for length in job.decode_lengths:
                metrics["decode"] += [_decode(job, length, groups, threads) for groups in job.groups]
                progress.step()
            for length in job.model_lengths:
                metrics["decode_model"] += [_decode_model(job, length, groups, threads) for groups in job.groups]
                progress.step()
        for length in memory_lengths:
            for groups in (None, *job.groups):
                metrics["memory"].append({"length": length, "groups": groups, "mib": _peak_memory(job, length, groups)})
                progress.step()
    finally:
        torch.set_num_threads(before)
    query, _, value = _inputs(job, max(job.lengths))
    write_result(
        output,
        experiment="attention",
        settings=job.model_dump(),
        metrics=metrics,
        started=started,
        modules=["focus.benchmark"],
        backend=choose_backend(query, value, _one_group(query)).split("/")[1],
        dtype=str(place.dtype).removeprefix("torch."),
        device=place.device.type,
    )


def _speed(job: AttentionBenchmark, length: int, threads: int, backward: bool = False) -> list[dict]:
    """Full attention and every K in turn; one row each K."""
    inputs = _inputs(job, length, backward)
    assigned = {k: _groups(job, length, [1 / k] * k) for k in job.groups}
    outputs: dict[int, Tensor] = {}

    def ours_with(k: int) -> Tensor:
        output = focus_attention(*inputs, assigned[k], window=job.window, backend="decomposed")
        outputs[k] = output.detach()
        return output

    runs = [lambda: full_attention(*inputs), *(lambda k=k: ours_with(k) for k in assigned)]
    if length <= job.one_group_up_to:
        runs.append(lambda: focus_attention(*inputs, _one_group(inputs[0]), window=0, backend="decomposed"))
    if backward:
        grad = torch.randn_like(inputs[0])
        runs = [lambda f=f: torch.autograd.grad(f(), inputs, grad) for f in runs]
    full, *ours = _times(runs, _place(job).clock(threads), job.seconds, backward)
    one_group = min(full) / min(ours.pop()) if length <= job.one_group_up_to else None
    rows = []
    for (k, groups), times in zip(assigned.items(), ours, strict=True):
        shares = [float((groups == g).float().mean()) for g in range(k)]
        row = _ratio(full, times, operation_limit(shares, job.window, length))
        row |= {"length": length, "groups": k, "threads": threads, "one_group": one_group}
        row["cosine"] = cosine_to_reference(*inputs, groups, outputs[k], job.window)
        rows.append(row if backward else row | {"parts": _parts(job, inputs, groups, threads)})
    return rows


def _unbalanced(job: AttentionBenchmark, length: int, threads: int) -> dict:
    inputs, groups = _inputs(job, length), _groups(job, length, job.shares)
    runs = [
        lambda: full_attention(*inputs),
        lambda: focus_attention(*inputs, groups, window=job.window, backend="decomposed"),
    ]
    full, ours = _times(runs, _place(job).clock(threads), job.seconds)
    row = _ratio(full, ours, operation_limit(job.shares, job.window, length))
    return row | {"length": length, "threads": threads, "bound": 1 / sum(p * p for p in job.shares)}


def _membership(job: AttentionBenchmark, length: int, threads: int) -> list[dict]:
    """T7's speed column: k = 1 ... K groups a token, drawn evenly."""
    inputs, rows = _inputs(job, length), []
    generator = torch.Generator().manual_seed(job.seed)
    order = torch.rand(1, length, job.membership_groups, generator=generator).argsort(dim=-1)
    members = {k: (order < k).to(inputs[0].device) for k in range(1, job.membership_groups + 1)}
    outputs: dict[int, Tensor] = {}

    def ours_with(k: int) -> None:
        outputs[k] = focus_attention(*inputs, members[k], window=job.window)

    runs = [lambda: full_attention(*inputs), *(lambda k=k: ours_with(k) for k in members)]
    full, *ours = _times(runs, _place(job).clock(threads), job.seconds)
    for (k, groups), times in zip(members.items(), ours, strict=True):
        kept, far = pairs_kept(groups, job.window)
        row = _ratio(full, times, 1 / kept)
        row |= {"length": length, "groups": job.membership_groups, "top_k": k, "threads": threads}
        row |= {"pairs_kept": kept, "far_pairs_kept": far, "paper": job.membership_groups / k}
        row["cosine"] = cosine_to_reference(*inputs, groups, outputs[k], job.window)
        rows.append(row | {"backend": choose_backend(inputs[0], inputs[2], groups)})
    return rows


def _training(job: AttentionBenchmark, length: int, groups: int, threads: int) -> dict:
    """Forward and backward with the assignment's gradient: the soft gate in O(T) memory, and straight through."""
    inputs = _inputs(job, length, gradients=True)
    generator = torch.Generator().manual_seed(job.seed + 3)
    drawn = torch.randn(1, length, groups, generator=generator).to(inputs[0].device)
    assignment = torch.softmax(4 * drawn, dim=-1).requires_grad_()
    hard = assignment.argmax(dim=-1)
    grad = torch.randn_like(inputs[0])
    common = {"steepness": 10.0, "window": job.window}
    runs = [
        lambda: torch.autograd.grad(full_attention(*inputs), inputs, grad),
        lambda: torch.autograd.grad(soft_attention(*inputs, assignment, **common), [*inputs, assignment], grad),
        lambda: torch.autograd.grad(
            straight_through_attention(*inputs, hard, assignment, backend="decomposed", **common),
            [*inputs, assignment],
            grad,
        ),
    ]
    full, soft, through = (
        min(times) * 1e3 for times in _times(runs, _place(job).clock(threads), job.seconds, backward=True)
    )
    row = {"length": length, "groups": groups, "threads": threads, "full_ms": full}
    return row | {"soft_ms": soft, "straight_through_ms": through, "straight_through_speedup": full / through}


def _decode(job: AttentionBenchmark, length: int, groups: int, threads: int) -> dict:
    """One token at a time after `length` tokens: a flat cache read in full against the grouped cache.

    The flat cache is not even grown, which in a model costs one more copy of it a token.
    """
    place = _place(job)
    clock = place.clock(threads)
    _, key, value = _inputs(job, length)
    cache = GroupedCache(window=job.window)
    cache.fill(key, value, _groups(job, length, [1 / groups] * groups))
    generator = torch.Generator().manual_seed(job.seed + 2)
    full, ours = [], []
    with torch.inference_mode():
        for _ in range(job.decode_steps):
            token = [torch.randn(1, job.heads, 1, job.head_dim, generator=generator).to(key) for _ in range(3)]
            group = torch.randint(0, groups, (1, 1), generator=generator).to(place.device)
            start = clock()
            scaled_dot_product_attention(token[0], key, value)
            middle = clock()
            cache.attend(*token, group)
            full.append(middle - start)
            ours.append(clock() - middle)
    return {
        "length": length,
        "groups": groups,
        "threads": threads,
        "full_us": statistics.median(full) * 1e6,
        "focus_us": statistics.median(ours) * 1e6,
        "speedup": statistics.median(full) / statistics.median(ours),
        "limit": 1 / min(1.0, 1 / groups + job.window / length),
    }


def _decode_model(job: AttentionBenchmark, length: int, groups: int, threads: int) -> dict:
    arguments = {"window": job.window, "steps": job.model_steps, "seed": job.seed, "place": _place(job)}
    return decode_model(job.model, length, groups, **arguments, threads=threads)


def _ratio(full: list[float], ours: list[float], limit: float) -> dict:
    """Milliseconds, the speed-up of the smallest times, its spread over rounds, and its share of `limit`."""
    compared = compare(full, ours)
    return {
        "full_ms": min(full) * 1e3,
        "full_median_ms": statistics.median(full) * 1e3,
        "focus_ms": min(ours) * 1e3,
        "focus_median_ms": statistics.median(ours) * 1e3,
        **compared,
        "limit": limit,
        "share_of_limit": compared["speedup"] / limit,
    }


class _Timed:
    """Pieces that add up the time spent inside the kernel."""

    def __init__(self, pieces: Pieces, clock: Callable[[], float]):
        self.pieces, self.clock, self.seconds = pieces, clock, 0.0
        self.scale, self.softcap, self.working_dtype = pieces.scale, pieces.softcap, pieces.working_dtype

    def forward(self, *arguments) -> tuple[Tensor, Tensor]:
        start = self.clock()
        result = self.pieces.forward(*arguments)
        self.seconds += self.clock() - start
        return result


def _parts(job: AttentionBenchmark, inputs: list[Tensor], groups: Tensor, threads: int) -> dict:
    """Milliseconds of sorting, of the kernel inside groups (A) and in the band (B), and of all moving and merging."""
    clock = _place(job).clock(threads)
    query, key, value = inputs
    start = clock()
    plan = make_plan(query.shape[2], groups, window=job.window)
    parts = {"sort": clock() - start, "merge": 0.0}
    halves = {
        "groups": dataclasses.replace(plan, banded=[False]),
        "band": dataclasses.replace(plan, segments=[]),
    }
    for name, half in halves.items():
        pieces = _Timed(choose_pieces(query, value, scale=None, softcap=None), clock)
        start = clock()
        with torch.inference_mode():
            decomposed_attention(query, key, value, half, pieces)
        parts["merge"] += clock() - start - pieces.seconds
        parts[name] = pieces.seconds
    return {name: seconds * 1e3 for name, seconds in parts.items()}


def _times(
    runs: list[Callable], clock: Callable[[], float], seconds: float, backward: bool = False
) -> list[list[float]]:
    """Seconds of each run, all in turn, as often as `seconds` allow; first once without timing if that is cheap."""
    results: list[list[float]] = [[] for _ in runs]
    with torch.inference_mode(not backward):
        begin = time.monotonic()
        for times, f in zip(results, runs, strict=True):
            start = clock()
            f()
            times.append(clock() - start)
        once = time.monotonic() - begin
        repeats = min(25, int(seconds / once))
        if repeats >= 2:
            results = [[] for _ in runs]
            for _ in range(repeats):
                for times, f in zip(results, runs, strict=True):
                    start = clock()
                    f()
                    times.append(clock() - start)
    return results


def _place(job: AttentionBenchmark) -> Place:
    return Place.named(job.device, job.dtype)


def _inputs(job: AttentionBenchmark, length: int, gradients: bool = False) -> list[Tensor]:
    return _place(job).inputs(job.heads, length, job.head_dim, job.seed, gradients)


def _one_group(query: Tensor) -> Tensor:
    return torch.zeros(1, query.shape[2], dtype=torch.long, device=query.device)


def _groups(job: AttentionBenchmark, length: int, shares: list[float]) -> Tensor:
    """[1, T] groups drawn with the given shares."""
    generator = torch.Generator().manual_seed(job.seed + 1)
    drawn = torch.multinomial(torch.tensor(shares), length, replacement=True, generator=generator)
    return drawn[None].to(_place(job).device)


def _peak_memory(job: AttentionBenchmark, length: int, groups: int | None) -> float:
    """MiB that inputs, output and work take at most, in a process of its own; groups None means full attention.

    Of the GPU's memory where that is the place.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_memory, (job, length, groups))


def _measure_memory(job: AttentionBenchmark, length: int, groups: int | None) -> float:
    torch.set_num_threads(1)

    def attend(length: int) -> None:
        inputs = _inputs(job, length)
        with torch.inference_mode():
            if groups is None:
                full_attention(*inputs)
            else:
                assigned = _groups(job, length, [1 / groups] * groups)
                focus_attention(*inputs, assigned, window=job.window, backend="decomposed")

    attend(1024)
    if _place(job).device.type == "cuda":
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attend(length)
        return (torch.cuda.max_memory_allocated() - base) / 2**20
    HIGH_WATER_MARK.write_text("5")
    base = _memory("VmRSS")
    attend(length)
    return (_memory("VmHWM") - base) / 1024


def _memory(field: str) -> int:
    """KiB of memory the process holds now (VmRSS), or held at most since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
