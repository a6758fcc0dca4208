"""What this machine has, which attention it would run, whether that is exact and fast here, and which scale fits."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from focus.attention import focus_attention, focus_attention_reference
from focus.attention.api import choose_backend
from focus.benchmark_timing import full_attention
from focus.cache import cache_root
from focus.precision import product_dtype
from focus.provenance import processor

GIB = 2**30
HEADS, HEAD_DIM, WINDOW, GROUPS = 4, 64, 128, 8
CHECKED = 1000
"""Tokens of the check, no multiple of any block, so that ragged edges are met."""
ALLOWED = 2.0
"""Times the error of PyTorch's own attention in the same precision."""
TIMED = (1024, 4096, 16384)
NEEDS = {
    "smoke": (2, 1, 0),
    "laptop": (6, 10, 0),
    "overnight": (6, 12, 0),
    "paper, GPT-2": (43, 40, 29),
    "paper, 7B models": (16, 120, 30),
    "paper, LLaMA-2 70B": (16, 290, 140),
}
"""GiB of memory, of free disk, and of GPU memory over all GPUs; those of paper as `focus cost --scale paper` has them.

GPT-2 fine-tunes 1.5B and reads OpenWebText, which is what takes the memory.
"""


def run(seconds: float) -> Iterator[tuple[str, bool]]:
    """Lines to print, each with whether it is well; the timing takes about `seconds`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from ((line, True) for line in machine())
    for dtype in dict.fromkeys((torch.float32, product_dtype("auto", device))):
        yield from exactness(device, dtype)
    yield from speed(device, product_dtype("auto", device) if device.type == "cuda" else torch.float32, seconds)
    yield from fits(_memory_gib(), shutil.disk_usage(_existing(cache_root())).free / GIB, _gpu_gib())


def machine() -> Iterator[str]:
    """Processor, memory, GPUs and versions."""
    yield f"processor    {processor()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB of memory"
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        capability = f"compute capability {found.major}.{found.minor}"
        yield f"GPU {number}        {found.name}, {found.total_memory / GIB:.0f} GiB, {capability}"
    if not torch.cuda.device_count():
        yield "GPU          none that torch can use"
    packages = {name: _version(name) for name in ("torch", "transformers", "flash-attn", "snakemake")}
    yield f"versions     Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in packages.items())
    yield f"cache        {cache_root()}, {shutil.disk_usage(_existing(cache_root())).free / GIB:.0f} GiB free"


def exactness(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, bool]]:
    """Compare grouped attention with the dense definition in float64, and that with PyTorch's own error."""
    query, key, value = _inputs(CHECKED, device, dtype)
    groups = torch.randint(0, GROUPS, (1, CHECKED), generator=torch.Generator().manual_seed(1)).to(device)
    wide = [each.double() for each in (query, key, value)]
    exact = focus_attention_reference(*wide, groups, window=WINDOW)
    full_exact = focus_attention_reference(*wide, torch.zeros_like(groups), window=WINDOW)
    ours = focus_attention(query, key, value, groups, window=WINDOW, backend="decomposed")
    error = (ours.double() - exact).abs().max().item()
    usual = (full_attention(query, key, value).double() - full_exact).abs().max().item()
    name = f"{device.type}, {str(dtype).removeprefix('torch.')}"
    yield f"backend      {name}: {choose_backend(query, value, groups)}", True
    well = error <= ALLOWED * usual
    yield f"exactness    {name}: error {error:.1e}, full attention's own {usual:.1e}: {_said(well)}", well


def speed(device: torch.device, dtype: torch.dtype, seconds: float) -> Iterator[tuple[str, bool]]:
    """Time grouped against full attention, in turn, at a few lengths; a length that would take too long is left out."""
    for length in TIMED:
        inputs = _inputs(length, device, dtype)
        groups = torch.randint(0, GROUPS, (1, length), generator=torch.Generator().manual_seed(2)).to(device)
        runs = [
            lambda inputs=inputs: full_attention(*inputs),
            lambda inputs=inputs, groups=groups: focus_attention(*inputs, groups, window=WINDOW, backend="decomposed"),
        ]
        until = time.perf_counter() + seconds / len(TIMED)
        times: list[list[float]] = [[], []]
        for run in runs:
            _clock(run, device)
        while not times[0] or time.perf_counter() < until:
            for taken, run in zip(times, runs, strict=True):
                taken.append(_clock(run, device))
        full, ours = (min(each) for each in times)
        said = f"{1e3 * ours:.2f} ms against {1e3 * full:.2f} ms of full attention, {full / ours:.2f} times as fast"
        yield f"speed        {length} tokens, K={GROUPS}: {said}", True


def fits(memory: float, disk: float, gpu: float) -> Iterator[tuple[str, bool]]:
    """Which scales these GiB of memory, free disk and GPU memory are enough for."""
    for scale, needs in NEEDS.items():
        names = ("memory", "free disk", "GPU memory")
        short = [
            f"{needed} GiB of {name} ({has:.0f} here)"
            for name, needed, has in zip(names, needs, (memory, disk, gpu), strict=True)
            if has < needed
        ]
        yield f"scale        {scale}: {'needs ' + ', '.join(short) if short else 'fits'}", True


def _clock(run, device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _inputs(length: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(3)]


def _said(well: bool) -> str:
    return "exact" if well else f"WRONG, expected at most {ALLOWED:g} times as much"


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB


def _gpu_gib() -> float:
    return sum(torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())) / GIB


def _existing(path):
    return next(each for each in (path, *path.parents) if each.exists())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
