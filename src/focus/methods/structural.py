"""What the methods have in common that replace a model's attention by a sparse or linear one, without groups.

A method file writes one function: `attend`, or, for a method that is a mask, `allowed`, from which the exact attention
follows in blocks of queries, never holding an n x n array. Both serve training, batches with padding, and the last
tokens of a cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from focus.adapter import attention_layers
from focus.method_config import Method
from focus.methods.base import MethodKind
from focus.methods.full_finetuning import load_parameters, save_parameters
from focus.router import check_plain, mask_function

BLOCK = 256


class LayerState(nn.Module):
    """What one attention layer holds for its method; buffers registered here are saved with the weights."""

    def __init__(self, settings: Method, window: int):
        super().__init__()
        self.settings, self.window = settings, window
        self.observed: dict[str, float] | None = None
        self.backend: str | None = None  # of the last call


@dataclass(frozen=True)
class Call:
    """One call of a layer's attention.

    query [B, H, Tq, D], the last Tq of Tk positions; key, value [B, Hkv, Tk, D], H a multiple of Hkv, all of one dtype;
    padding_mask bool [B, Tk], True = real, or None; `sliding_window` is the layer's own (keys nearer than that).
    `forgotten` int64 [B] counts the real tokens before the first key, once a sliding layer's cache has dropped some.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    padding_mask: Tensor | None
    scale: float
    softcap: float | None
    sliding_window: int | None
    state: LayerState
    forgotten: Tensor | None = None

    @property
    def offset(self) -> int:
        """Position of the first query."""
        return self.key.shape[2] - self.query.shape[2]

    def positions(self) -> Tensor:
        """int64 [B, Tk]: each token's position among the real ones, which padding on the left does not move."""
        if self.padding_mask is None:
            positions = torch.arange(self.key.shape[2], device=self.key.device).expand(self.key.shape[0], -1)
        else:
            positions = self.padding_mask.long().cumsum(dim=1) - 1
        return (positions if self.forgotten is None else positions + self.forgotten.unsqueeze(1)).clamp(min=0)

    def visible(self, rows: slice) -> Tensor:
        """bool [B or 1, 1, n, Tk]: causal, real and within the layer's own window, for the queries `rows` (0 to Tq)."""
        queries = torch.arange(self.query.shape[2], device=self.key.device)[rows, None] + self.offset
        distance = queries - torch.arange(self.key.shape[2], device=self.key.device)
        seen = distance >= 0
        if self.sliding_window is not None:
            seen = seen & (distance < self.sliding_window)
        seen = seen[None, None]
        return seen if self.padding_mask is None else seen & self.padding_mask[:, None, None]

    def scores(self, rows: slice) -> Tensor:
        """Scaled, capped scores [B, H, n, Tk] of the queries `rows`, unmasked."""
        query = self.query[:, :, rows]
        shape = (query.shape[0], self.key.shape[1], -1, *query.shape[2:])
        scores = (query.reshape(shape) @ self.key[:, :, None].transpose(-1, -2)).flatten(1, 2) * self.scale
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def weighted(self, weights: Tensor) -> Tensor:
        """weights [B, H, n, Tk] times the values: [B, H, n, D]."""
        shape = (weights.shape[0], self.value.shape[1], -1, *weights.shape[2:])
        return (weights.reshape(shape) @ self.value[:, :, None]).flatten(1, 2)


class Structural(MethodKind, ABC):
    """A method that replaces attention; everything trains, or nothing. The model's attention dropout is left out."""

    name: str
    """The config's kind, and the name under which transformers finds the attention."""

    @abstractmethod
    def attend(self, call: Call) -> Tensor:
        """The attention of one call: [B, H, Tq, D], finite for padding."""

    def layer_state(self, settings: Method, *, window: int, heads: int, head_dim: int, generator) -> LayerState:
        """What a layer holds; `generator` (torch.Generator) makes what is random."""
        return LayerState(settings, window)

    def attach(self, model: PreTrainedModel, settings: Method, *, window: int, seed: int) -> PreTrainedModel:
        """Give each layer its state and replace the model's attention."""
        generator = torch.Generator().manual_seed(seed)
        for layer in attention_layers(model):
            heads = layer.config.num_attention_heads
            head_dim = getattr(layer, "head_dim", None) or layer.config.hidden_size // heads
            shape = {"heads": heads, "head_dim": head_dim}
            layer.structural = self.layer_state(settings, window=window, **shape, generator=generator)
            layer.structural.to(next(layer.parameters()).device).train(layer.training)
        AttentionInterface.register(self.name, self._attention)
        AttentionMaskInterface.register(self.name, _whole_mask)
        model.set_attn_implementation(self.name)
        return model

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """All of them."""
        return list(model.requires_grad_(True).parameters())

    def save(self, model: PreTrainedModel, settings: Method, folder: Path) -> None:
        """Write all parameters, and the buffers of the layers' states."""
        save_parameters(_tensors(model), folder)

    def restore(self, model: PreTrainedModel, settings: Method, folder: Path, *, window: int) -> PreTrainedModel:
        """Attach, and overwrite what `save` wrote."""
        self.attach(model, settings, window=window, seed=0)
        load_parameters(_tensors(model), folder)
        return model

    @contextmanager
    def observe(self, model: PreTrainedModel) -> Iterator[list[dict[str, float]]]:
        """Pairs kept of each layer, for methods whose data decide."""
        states = _states(model)
        for state in states:
            state.observed = {}
        try:
            yield [state.observed for state in states]
        finally:
            for state in states:
                state.observed = None

    def pairs_kept(self, settings: Method, window: int, length: int) -> None:
        """The data decide: what the layers observed tells."""

    def backend(self, model: PreTrainedModel) -> str:
        """The method's name, and what last computed it."""
        ran = sorted({state.backend for state in _states(model) if state.backend})
        return ", ".join([self.name, *ran])

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        check_plain(module, attention_mask, kwargs)
        forgotten = None
        if attention_mask is not None:
            dropped = max(attention_mask.shape[1] - key.shape[2], 0)
            if dropped:
                forgotten, attention_mask = attention_mask[:, :dropped].sum(dim=1), attention_mask[:, dropped:]
            key, value = key[:, :, : attention_mask.shape[1]], value[:, :, : attention_mask.shape[1]]
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        call = Call(query, key, value, attention_mask, scale, softcap, sliding_window, module.structural, forgotten)
        with torch.autocast(query.device.type, enabled=False):
            out = self.attend(call)
        return out.to(query.dtype).transpose(1, 2).contiguous(), None


class Masked(Structural):
    """A method that is a mask over the pairs; softmax over what it allows, exactly."""

    @abstractmethod
    def allowed(self, call: Call, rows: slice) -> Tensor:
        """bool, broadcastable to [B, H, n, Tk]: the pairs of the queries `rows` (0 to Tq) that the method reads.

        Later, padded and too distant keys may be included: they are taken out afterwards. A query always sees itself.
        """

    def attend(self, call: Call) -> Tensor:
        """In blocks of queries; products in the dtype of the inputs, softmax at least in float32."""
        self.count_pairs(call)
        call.state.backend, outputs = "masked, dense", []
        for rows in blocks_of(call):
            mask = self._mask(call, rows, call.visible(rows))
            scores = call.scores(rows)
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
            outputs.append(call.weighted(weights.to(call.value.dtype)))
        return torch.cat(outputs, dim=2)

    @torch.no_grad()
    def count_pairs(self, call: Call) -> None:
        """Tell the layer's observer, if there is one, the shares of pairs kept; no scores are made."""
        if call.state.observed is None:
            return
        kept = far_kept = every = far_every = 0
        for rows in blocks_of(call):
            visible = call.visible(rows)
            mask, far = self._mask(call, rows, visible), visible & _far(call, rows)
            shape = (call.query.shape[0], call.query.shape[1], *mask.shape[2:])
            kept += mask.expand(shape).sum().item()
            far_kept += (mask & far).expand(shape).sum().item()
            every += visible.expand(shape).sum().item()
            far_every += far.expand(shape).sum().item()
        call.state.observed["pairs_kept"] = kept / every if every else 1.0
        call.state.observed["far_pairs_kept"] = far_kept / far_every if far_every else 1.0

    def _mask(self, call: Call, rows: slice, visible: Tensor) -> Tensor:
        """bool, broadcastable to [B, H, n, Tk]: what the queries `rows` read."""
        return (self.allowed(call, rows) | _itself(call, rows)) & visible


def blocks_of(call: Call) -> list[slice]:
    """The queries of a call, BLOCK at a time."""
    length = call.query.shape[2]
    return [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


def _whole_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    **settings,
) -> Tensor | None:
    """As `mask_function`; when `kv_offset` keys have been dropped, with their columns in front: bool [B, past + Tq]."""
    mask = mask_function(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, **settings)
    length = int(q_offset) + q_length
    if not kv_offset:
        return mask
    if attention_mask is None:
        return torch.ones(batch_size, length, dtype=torch.bool, device=settings.get("device"))
    return attention_mask[:, :length]


def _itself(call: Call, rows: slice) -> Tensor:
    queries = torch.arange(call.query.shape[2], device=call.key.device)[rows, None] + call.offset
    return (queries == torch.arange(call.key.shape[2], device=call.key.device))[None, None]


def _far(call: Call, rows: slice) -> Tensor:
    queries = torch.arange(call.query.shape[2], device=call.key.device)[rows, None] + call.offset
    return (queries - torch.arange(call.key.shape[2], device=call.key.device) > call.state.window)[None, None]


def _states(model: PreTrainedModel) -> list[LayerState]:
    return [module for module in model.modules() if isinstance(module, LayerState)]


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    buffers = {
        f"{name}.{key}": tensor
        for name, module in model.named_modules()
        if isinstance(module, LayerState)
        for key, tensor in module.named_buffers()
    }
    return dict(model.named_parameters()) | buffers
