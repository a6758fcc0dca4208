"""Which base model an adapter was trained on: what is saved beside it, and what must and should agree when it loads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from focus.strict import Count, Strict

SAMPLED = 64
"""Values of each parameter that the fingerprint reads."""


class Base(Strict):
    """A base model: its shape, where its weights came from, and a digest of a sample of them."""

    architecture: str
    layers: Count
    width: Count
    name: str | None
    revision: str | None
    fingerprint: str

    @property
    def shape(self) -> str:
        """The class, layers and width, without which an adapter does not fit."""
        return f"{self.architecture} of {self.layers} layers and width {self.width}"


@torch.no_grad()
def identify(model: PreTrainedModel, layers: int, width: int, added: Iterable[Tensor] = ()) -> Base:
    """The base model of `model`, which has so many attention layers; `added` are parameters that are not the base's."""
    name = model.config._name_or_path or None
    return Base(
        architecture=type(model).__name__,
        layers=layers,
        width=width,
        name=None if name is None or Path(name).exists() or Path(name).is_absolute() else name,
        revision=getattr(model.config, "_commit_hash", None),
        fingerprint=_fingerprint(model, {id(tensor) for tensor in added}),
    )


def _fingerprint(model: PreTrainedModel, added: set[int]) -> str:
    """sha256 over names, shapes and evenly spaced values, in bfloat16 so that the dtype they are held in is none of it.

    Of parameters kept elsewhere (device meta) only names and shapes count.
    """
    total = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if id(parameter) in added:
            continue
        total.update(f"{name} {list(parameter.shape)}\n".encode())
        if not parameter.is_meta:
            step = max(1, parameter.numel() // SAMPLED)
            sample = parameter.detach().reshape(-1)[::step][:SAMPLED]
            total.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return f"sha256:{total.hexdigest()}"
