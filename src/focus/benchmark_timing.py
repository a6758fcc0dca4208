"""What the timings of attention share: the clock, random inputs, full attention, and how two lists of times compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def clock_for(threads: int) -> Callable[[], float]:
    """The thread's own processor time for one thread, else the wall clock, in seconds."""
    return time.thread_time if threads == 1 else time.perf_counter


def full_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Full causal attention by the kernel that PyTorch itself chooses: [B, H, T, D] each."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def random_inputs(heads: int, length: int, head_dim: int, seed: int, gradients: bool = False) -> list[Tensor]:
    """Query, key and value: float32 [1, heads, length, head_dim] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, heads, length, head_dim)
    return [torch.randn(shape, generator=generator, requires_grad=gradients) for _ in range(3)]


def compare(full: list[float], ours: list[float]) -> dict:
    """How many times faster `ours` is, from seconds of the same rounds: the ratio of the smallest, and over rounds."""
    rounds = sorted(f / o for f, o in zip(full, ours, strict=True))
    return {
        "speedup": min(full) / min(ours),
        "speedup_median": statistics.median(rounds),
        "speedup_range": [rounds[0], rounds[-1]],
        "speedup_error": statistics.stdev(rounds) / len(rounds) ** 0.5 if len(rounds) > 1 else None,
        "repeats": len(rounds),
    }
