"""What the timings of attention share: the clock, random inputs, full attention, and how two lists of times compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from focus.errors import UserError


@dataclass(frozen=True)
class Place:
    """Where attention is timed, and in what numbers."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def named(cls, device: str, dtype: str) -> Place:
        """`device` auto is a GPU where there is one; `dtype` auto is bfloat16 there, as its kernels want, else float32.

        Raises UserError for cuda without a GPU.
        """
        found = torch.cuda.is_available()
        if device == "cuda" and not found:
            raise UserError("speed.device: expected a GPU for cuda, found none")
        place = torch.device("cuda" if found and device != "cpu" else "cpu")
        best = "bfloat16" if place.type == "cuda" else "float32"
        return cls(place, getattr(torch, best if dtype == "auto" else dtype))

    def clock(self, threads: int) -> Callable[[], float]:
        """Seconds, by the wall clock once the GPU has done its work; on a CPU as `clock_for`."""
        return _after_gpu if self.device.type == "cuda" else clock_for(threads)

    def inputs(self, heads: int, length: int, head_dim: int, seed: int, gradients: bool = False) -> list[Tensor]:
        """Query, key and value: [1, heads, length, head_dim] each, the same numbers everywhere but for rounding."""
        inputs = random_inputs(heads, length, head_dim, seed)
        return [each.to(self.device, self.dtype).requires_grad_(gradients) for each in inputs]


def clock_for(threads: int) -> Callable[[], float]:
    """The thread's own processor time for one thread, else the wall clock, in seconds."""
    return time.thread_time if threads == 1 else time.perf_counter


def _after_gpu() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def full_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Full causal attention by the kernel that PyTorch itself chooses: [B, H, T, D] each."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def random_inputs(heads: int, length: int, head_dim: int, seed: int) -> list[Tensor]:
    """Query, key and value on the CPU: float32 [1, heads, length, head_dim] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((1, heads, length, head_dim), generator=generator) for _ in range(3)]


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
