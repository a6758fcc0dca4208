"""The base model as it is."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from focus.config import Attention, Method
from focus.errors import UserError

TRAINING_ATTENTION: Attention = "full"


def attach(model: PreTrainedModel, settings: Method, *, window: int, seed: int) -> PreTrainedModel:
    """Nothing to attach."""
    return model


def parameters(model: PreTrainedModel, trains: str) -> list[Parameter]:
    """None; a phase is a mistake."""
    raise UserError(f"training: expected none for a method that has nothing to train, got a phase of {trains}")


def prepare(model: PreTrainedModel, batches: Iterable[Tensor]) -> None:
    """Nothing is estimated from data."""


def after_step(model: PreTrainedModel) -> None:
    """Nothing is estimated from data."""


def save(model: PreTrainedModel, settings: Method, folder: Path) -> None:
    """Nothing to save."""


def restore(model: PreTrainedModel, settings: Method, folder: Path, *, window: int) -> PreTrainedModel:
    """Nothing to restore."""
    return model


def choose(model: PreTrainedModel, attention: Attention, top_k: int | None) -> None:
    """Full attention is the only one."""
    if attention != "full":
        raise UserError(f"attention: expected full for a method without groups, got {attention}")


def observe(model: PreTrainedModel) -> AbstractContextManager[list[dict[str, float]]]:
    """No groups to watch."""
    return nullcontext([])


def pairs_kept(settings: Method, window: int, length: int) -> tuple[float, float]:
    """All of them."""
    return 1.0, 1.0


def decodes(settings: Method) -> bool:
    """Like the base model."""
    return True


def backend(model: PreTrainedModel) -> str:
    """transformers' name of the attention."""
    return model.config._attn_implementation
