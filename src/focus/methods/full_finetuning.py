"""Full attention, all weights trained."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from focus.errors import UserError
from focus.method_config import Method
from focus.methods.base import MethodKind

WEIGHTS = "base.safetensors"


class FullFinetuning(MethodKind):
    """The model's own attention; every parameter trains, tied ones once."""

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """All of them."""
        if trains != "everything":
            raise UserError(f"training.phases.trains: expected everything for a method without centroids, got {trains}")
        return list(model.requires_grad_(True).parameters())

    def save(self, model: PreTrainedModel, settings: Method, folder: Path) -> None:
        """Write all parameters."""
        save_parameters(dict(model.named_parameters()), folder)

    def restore(self, model: PreTrainedModel, settings: Method, folder: Path, *, window: int) -> PreTrainedModel:
        """Overwrite all parameters."""
        load_parameters(dict(model.named_parameters()), folder)
        return model


def save_parameters(named: dict[str, Tensor], folder: Path, file: str = WEIGHTS) -> None:
    """Write parameters by name into one safetensors file."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}, folder / file)


@torch.no_grad()
def load_parameters(named: dict[str, Tensor], folder: Path, file: str = WEIGHTS) -> None:
    """Copy saved values into parameters; UserError unless names and shapes are the same on both sides."""
    path = folder / file
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: expected trained weights, got {error}") from None
    for name in sorted(named.keys() | saved.keys()):
        expected = list(named[name].shape) if name in named else "no such tensor"
        got = list(saved[name].shape) if name in saved else "none"
        if expected != got:
            raise UserError(f"{path}: {name}: expected {expected} for this model, got {got}")
        named[name].copy_(saved[name])
