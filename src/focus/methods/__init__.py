"""The compared methods: one file each, all with the functions of `MethodKind`, found by the config's `kind`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from focus.config import Attention, Method
from focus.methods import focus, full_finetuning, pretrained, window


class MethodKind(Protocol):
    """What a method file offers. All change the model in place; `window` is the model's w."""

    TRAINING_ATTENTION: Attention
    """The attention a model trains with, for `choose`."""

    attach: Callable[..., PreTrainedModel]
    """attach(model, settings, *, window, seed): put the untrained method onto a base model."""

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """The parameters of a phase ("centroids" or "everything"); these alone require gradients from here on."""

    def prepare(self, model: PreTrainedModel, batches: Iterable[Tensor]) -> None:
        """Before the first step: set what is estimated from data (int64 [B, T] each) and not trained."""

    def after_step(self, model: PreTrainedModel) -> None:
        """After each optimiser step: move what is estimated from data."""

    def save(self, model: PreTrainedModel, settings: Method, folder: Path) -> None:
        """Write into an existing folder what training changed."""

    restore: Callable[..., PreTrainedModel]
    """restore(model, settings, folder, *, window): put what `save` wrote onto a base model."""

    def choose(self, model: PreTrainedModel, attention: Attention, top_k: int | None) -> None:
        """Choose the attention of a row."""

    def observe(self, model: PreTrainedModel) -> AbstractContextManager[list[dict[str, float]]]:
        """Per-layer statistics, refreshed by each forward; an empty list for methods without groups."""

    def pairs_kept(self, settings: Method, window: int, length: int) -> tuple[float, float] | None:
        """Shares of causal pairs, and of those farther than the window, that attention reads in a sequence of `length`.

        None where the data decide; then the per-layer statistics tell.
        """

    def decodes(self, settings: Method) -> bool:
        """Whether the method can generate with a cache."""

    def backend(self, model: PreTrainedModel) -> str:
        """The attention that runs, as results report it."""


METHODS: dict[str, MethodKind] = {
    "pretrained": pretrained,
    "full_finetuning": full_finetuning,
    "window": window,
    "focus": focus,
}
