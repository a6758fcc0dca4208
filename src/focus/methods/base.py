"""What a compared method is: how it changes a model, what trains, what is saved, which attention it runs.

The functions here do what a method without anything of its own does; a method file overrides what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from focus.distillation_config import Distillation
from focus.errors import UserError
from focus.method_config import Attention, Method


class MethodKind:
    """One kind of method. All functions change the model in place; `window` is the model's w."""

    def attach(self, model: PreTrainedModel, settings: Method, *, window: int, seed: int) -> PreTrainedModel:
        """Put the untrained method onto a base model."""
        return model

    def training_attention(self, settings: Method) -> Attention:
        """The attention a model trains with, for `choose`."""
        return "full"

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """The parameters of a phase ("centroids" or "everything"); these alone require gradients from here on."""
        raise UserError(f"training: expected none for a method that has nothing to train, got a phase of {trains}")

    def prepare(self, model: PreTrainedModel, batches: Iterable[Tensor]) -> None:
        """Before the first step: set what is estimated from data (int64 [B, T] each) and not trained."""

    def distil(
        self,
        model: PreTrainedModel,
        settings: Distillation,
        windows: Iterable[Tensor],
        *,
        seed: int,
        done: int,
        name: str,
    ) -> Iterator[dict]:
        """Before the first step: fit layer by layer to what the model itself does in `windows` (int64 [1, T] each).

        Begins with layer `done` and yields a record, to be kept with the run, after each.
        """
        raise UserError("training.distillation: expected null for a method without groups")

    def auxiliary(self, model: PreTrainedModel) -> AbstractContextManager[list[Tensor]]:
        """Around each forward of a training step: once left, the scalars to add to that forward's loss.

        Only what runs inside counts, so the recomputing of activation checkpointing adds nothing.
        """
        return nullcontext([])

    def after_step(self, model: PreTrainedModel) -> None:
        """After each optimiser step: move what is estimated from data."""

    def save(self, model: PreTrainedModel, settings: Method, folder: Path) -> None:
        """Write into an existing folder what training changed."""

    def restore(self, model: PreTrainedModel, settings: Method, folder: Path, *, window: int) -> PreTrainedModel:
        """Put what `save` wrote onto a base model."""
        return self.attach(model, settings, window=window, seed=0)

    def choose(self, model: PreTrainedModel, attention: Attention, top_k: int | None) -> None:
        """Choose the attention of a row."""
        if attention != "full":
            raise UserError(f"attention: expected full for a method without groups, got {attention}")

    def observe(self, model: PreTrainedModel) -> AbstractContextManager[list[dict[str, float]]]:
        """Per-layer statistics, refreshed by each forward; an empty list for methods without groups."""
        return nullcontext([])

    def groups(self, model: PreTrainedModel, tokens: Tensor) -> Tensor | None:
        """The group of each token (int64 [B, T] input ids) in every layer, int64 [L, B, T]; None without groups."""
        return None

    def pairs_kept(self, settings: Method, window: int, length: int) -> tuple[float, float] | None:
        """Shares of causal pairs, and of those farther than the window, that attention reads in a sequence of `length`.

        None where the data decide; then the per-layer statistics tell.
        """
        return 1.0, 1.0

    def decodes(self, settings: Method) -> bool:
        """Whether the method can generate with a cache."""
        return True

    def backend(self, model: PreTrainedModel) -> str:
        """The attention that runs, as results report it."""
        return model.config._attn_implementation
