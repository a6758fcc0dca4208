"""The published shapes of the models that the paper names, and how many parameters a shape has.

From the config.json of each model's repository; a test counts the same with transformers' own classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shape:
    """A decoder: `kind` says which matrices, biases and norms a layer has; `feedforward` is its inner width."""

    kind: Literal["gpt2", "llama", "qwen2", "olmo2"]
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    feedforward: int
    positions: int = 0
    softcap: bool = False

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all values."""
        return self.width // self.heads * self.key_heads

    @property
    def parameters(self) -> int:
        """All weights: embeddings (those of GPT-2 serve as the last matrix too), layers and the last norm."""
        if self.kind == "gpt2":
            return (self.vocabulary + self.positions) * self.width + self.layers * self._gpt2_layer + 2 * self.width
        return 2 * self.vocabulary * self.width + self.layers * self._llama_layer + self.width

    @property
    def _gpt2_layer(self) -> int:
        matrices = 4 * self.width**2 + 2 * self.width * self.feedforward
        return matrices + 9 * self.width + self.feedforward

    @property
    def _llama_layer(self) -> int:
        matrices = 2 * self.width * (self.width + self.key_width) + 3 * self.width * self.feedforward
        biases = self.width + 2 * self.key_width if self.kind == "qwen2" else 0
        query_and_key_norms = self.width + self.key_width if self.kind == "olmo2" else 0
        return matrices + biases + query_and_key_norms + 2 * self.width


SHAPES = {
    "gpt2-124m": Shape("gpt2", 50257, 768, 12, 12, 12, 3072, positions=1024),
    "gpt2-774m": Shape("gpt2", 50257, 1280, 36, 20, 20, 5120, positions=1024),
    "gpt2-1.5b": Shape("gpt2", 50257, 1600, 48, 25, 25, 6400, positions=1024),
    "mistral-7b": Shape("llama", 32000, 4096, 32, 32, 8, 14336),
    "qwen2.5-7b": Shape("qwen2", 152064, 3584, 28, 28, 4, 18944),
    "olmo2-7b": Shape("olmo2", 100352, 4096, 32, 32, 32, 11008),
    "llama2-13b": Shape("llama", 32000, 5120, 40, 40, 40, 13824),
    "llama2-70b": Shape("llama", 32000, 8192, 80, 64, 8, 28672),
}
