"""One learned number a layer: the scores of far pairs are multiplied by it, and no group is involved (4.8).

Far pairs are those that Focus gates: farther than the window, and not to a sink. The scale starts at 1, where the
attention is the base model's. Below 1 it flattens what a query sees of its far past, above 1 it sharpens that. Whatever
perplexity so few numbers can win, grouping did not win.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from focus.errors import UserError
from focus.method_config import Method
from focus.methods.full_finetuning import load_parameters, save_parameters
from focus.methods.structural import Call, LayerState, Structural, blocks_of

TENSORS = "scales.safetensors"


class Scaled(LayerState):
    """The parameter `scale`, float32 [1]."""

    def __init__(self, settings: Method, window: int):
        super().__init__(settings, window)
        self.scale = nn.Parameter(torch.ones(1))


class FarScale(Structural):
    """Full attention whose far scores a learned number scales; the base is frozen."""

    name = "far_scale"

    def layer_state(self, settings: Method, *, window: int, heads: int, head_dim: int, generator) -> Scaled:
        """A scale of 1."""
        return Scaled(settings, window)

    def attend(self, call: Call) -> Tensor:
        """In blocks of queries; products in the dtype of the inputs, softmax at least in float32."""
        call.state.backend, outputs = "dense", []
        for rows in blocks_of(call):
            scores = call.scores(rows)
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            scores = scores * torch.where(_far(call, rows), call.state.scale, 1.0).to(scores.dtype)
            weights = scores.masked_fill(~call.visible(rows), -torch.inf).softmax(dim=-1).nan_to_num(0.0)
            outputs.append(call.weighted(weights.to(call.value.dtype)))
        return torch.cat(outputs, dim=2)

    def pairs_kept(self, settings: Method, window: int, length: int) -> tuple[float, float]:
        """All."""
        return 1.0, 1.0

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """The scales."""
        if trains != "scales":
            raise UserError(f"training.phases.trains: expected scales for kind far_scale, got {trains}")
        model.requires_grad_(False)
        return [scale.requires_grad_(True) for scale in _scales(model).values()]

    def save(self, model: PreTrainedModel, settings: Method, folder: Path) -> None:
        """Write the scales alone."""
        save_parameters(_scales(model), folder, TENSORS)

    def restore(self, model: PreTrainedModel, settings: Method, folder: Path, *, window: int) -> PreTrainedModel:
        """Attach, and overwrite the scales."""
        self.attach(model, settings, window=window, seed=0)
        load_parameters(_scales(model), folder, TENSORS)
        return model


def _far(call: Call, rows: slice) -> Tensor:
    """bool [B, 1, n, Tk]: pairs farther apart than the window whose key is no sink."""
    queries = torch.arange(call.query.shape[2], device=call.key.device)[rows, None] + call.offset
    beyond = queries - torch.arange(call.key.shape[2], device=call.key.device) > call.state.window
    return (beyond & (call.positions() >= call.state.settings.sinks).unsqueeze(1)).unsqueeze(1)


def _scales(model: PreTrainedModel) -> dict[str, Parameter]:
    states = [module for module in model.modules() if isinstance(module, Scaled)]
    return {f"layers.{number}.scale": state.scale for number, state in enumerate(states)}
