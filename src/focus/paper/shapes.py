"""The published shapes of the models that the paper names and of those we add, and how many parameters a shape has.

From the config.json of each model's repository; a test counts the same with transformers' own classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shape:
    """A decoder: `kind` says which matrices, biases and norms a layer has; `feedforward` is its inner width.

    `head_size` is 0 where it is the width over the heads; `tied`: the embeddings serve as the last matrix too.
    """

    kind: Literal["gpt2", "llama", "qwen2", "olmo2", "gemma2"]
    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    feedforward: int
    positions: int = 0
    softcap: bool = False
    head_size: int = 0
    tied: bool = False

    @property
    def query_width(self) -> int:
        """Width of all queries, and of what attention gives."""
        return self.heads * (self.head_size or self.width // self.heads)

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all values."""
        return self.query_width // self.heads * self.key_heads

    @property
    def parameters(self) -> int:
        """All weights: embeddings (those of GPT-2 serve as the last matrix too), layers and the last norm."""
        if self.kind == "gpt2":
            return (self.vocabulary + self.positions) * self.width + self.layers * self._gpt2_layer + 2 * self.width
        embeddings = (2 - self.tied) * self.vocabulary * self.width
        return embeddings + self.layers * self._llama_layer + self.width

    @property
    def layer_matrices(self) -> int:
        """The weights of one layer that every token is multiplied with."""
        attention = 2 * self.width * (self.query_width + self.key_width)
        return attention + (2 if self.kind == "gpt2" else 3) * self.width * self.feedforward

    @property
    def _gpt2_layer(self) -> int:
        return self.layer_matrices + 9 * self.width + self.feedforward

    @property
    def _llama_layer(self) -> int:
        biases = self.query_width + 2 * self.key_width if self.kind == "qwen2" else 0
        query_and_key_norms = self.query_width + self.key_width if self.kind == "olmo2" else 0
        norms = (4 if self.kind == "gemma2" else 2) * self.width
        return self.layer_matrices + biases + query_and_key_norms + norms


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
"""The models that the paper names."""

OTHERS = {
    "mistral-7b-instruct": SHAPES["mistral-7b"],
    "mistral-7b-from-scratch": SHAPES["mistral-7b"],
    "gemma2-9b": Shape("gemma2", 256000, 3584, 42, 16, 8, 14336, softcap=True, head_size=256, tied=True),
    "smollm2-135m-instruct": Shape("llama", 49152, 576, 30, 9, 3, 1536, tied=True),
}
"""Further models of the registry, but for those that a rule trains."""


def gpt2_shape(plan: dict) -> Shape:
    """The shape that the settings `Pretraining` describe; all of these models have GPT-2's vocabulary."""
    width, heads = plan["width"], plan["heads"]
    vocabulary = SHAPES["gpt2-124m"].vocabulary
    return Shape("gpt2", vocabulary, width, plan["layers"], heads, heads, 4 * width, positions=plan["context"])
