"""What a token costs a whole model while it generates: full attention with transformers' cache, and hard Focus."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from focus.adapter import compose, switch
from focus.benchmark_timing import Place
from focus.config import ModelShape
from focus.memory import memory_of
from focus.method_config import FocusConfig


class _TimedCache(DynamicCache):
    """Adds up the time that keeping new keys and values takes."""

    def __init__(self, clock: Callable[[], float]):
        super().__init__()
        self.clock, self.seconds = clock, 0.0

    def update(self, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start = self.clock()
        result = super().update(*args, **kwargs)
        self.seconds += self.clock() - start
        return result


def decode_model(
    shape: ModelShape, length: int, groups: int, *, window: int, steps: int, seed: int, place: Place, threads: int
) -> dict:
    """Milliseconds a token, with `length` random tokens cached and both models taking turns.

    full_cache_ms is the part of full_ms in which transformers copies the whole cache to append one token; Focus's first
    token, which sorts the cache into groups, is apart in focus_first_ms.
    """
    model, clock = _model(shape, length + steps + 1, groups, window).to(place.device, place.dtype), place.clock(threads)
    generator = torch.Generator().manual_seed(seed)
    caches = {name: _filled(shape, length, groups, generator, place, clock) for name in ("full", "hard")}
    times: dict[str, list[float]] = {name: [] for name in caches}
    kept: dict[str, list[float]] = {name: [] for name in caches}
    with torch.no_grad():
        for step in range(steps + 1):
            token = torch.randint(shape.vocabulary, (1, 1), generator=generator).to(place.device)
            position = torch.tensor([[length + step]], device=place.device)
            for name, cache in caches.items():
                switch(model, name)
                cache.seconds = 0.0
                start = clock()
                model(token, cache=cache, position_ids=position)
                times[name].append(clock() - start)
                kept[name].append(cache.seconds)
    full, ours = (statistics.median(times[name][1:]) for name in caches)
    return {
        "length": length,
        "groups": groups,
        "threads": threads,
        "full_ms": full * 1e3,
        "full_cache_ms": statistics.median(kept["full"][1:]) * 1e3,
        "focus_ms": ours * 1e3,
        "focus_first_ms": times["hard"][0] * 1e3,
        "speedup": full / ours,
    }


def _model(shape: ModelShape, length: int, groups: int, window: int) -> PreTrainedModel:
    width = shape.heads * shape.head_dim
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=length,
    )
    return compose(LlamaForCausalLM(config).eval(), FocusConfig(groups=groups, window=window))


def _filled(
    shape: ModelShape,
    length: int,
    groups: int,
    generator: torch.Generator,
    place: Place,
    clock: Callable[[], float],
) -> _TimedCache:
    cache = _TimedCache(clock)
    size = (1, shape.key_heads, length, shape.head_dim)
    for layer in range(shape.layers):
        kept = [torch.randn(size, generator=generator).to(place.device, place.dtype) for _ in range(2)]
        cache.update(*kept, layer)
        assignment = torch.rand(1, length, groups, generator=generator).to(place.device)
        memory_of(cache, layer).note(assignment / assignment.sum(-1, keepdim=True), None)
    return cache
