"""The window and tokens of one's own cluster (Routing Transformer, arXiv 2003.05997, section 4), made causal.

Each head has `clusters` unit centroids. A query and a key belong to the centroid with which their product is largest,
and a query sees, beyond the window, the `cluster_tokens` most recent keys of its cluster. The centroids follow the
normalised queries and keys of training by an exponential moving average: online spherical k-means.

Not as in the paper, and why:
- There a cluster takes the `w` tokens of the sequence nearest to it, which balances clusters but looks at later tokens.
  Here a token joins its nearest cluster, and the most recent members are read: causal, and as bounded.
- There causal models share queries and keys, and attention is between normalised ones. A pretrained model has its own
  queries and keys and their scale: both are clustered by the same centroids, and attention keeps its scores. They lie
  apart, so that many queries find few keys or none in their cluster: the share of far pairs kept tells.
- There some heads route and others are local. A pretrained model's heads all need both.
- A centroid moves towards the normalised mean of its new members, instead of their sum, and is normalised itself.

Before training, `prepare` fits the centroids to training windows by k-means, layer after layer. A method that does not
train has random unit centroids. Averages move after an optimiser step, by what the last forward pass of training saw,
so that recomputed activations count once; in evaluation nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot
from transformers import PreTrainedModel

from focus.method_config import Method
from focus.methods.structural import Call, LayerState
from focus.methods.tiled import Choice, Tiled, Tiles, band_tiles, block_tiles

ROUNDS = 10
BLOCK = 64


class Clusters(LayerState):
    """The buffer `centroids`, float32 [H, C, D], of length 1."""

    def __init__(self, settings: Method, window: int, heads: int, head_dim: int, generator: torch.Generator):
        super().__init__(settings, window)
        random = torch.randn(heads, settings.clusters, head_dim, generator=generator)
        self.register_buffer("centroids", normalize(random, dim=-1))
        self.fitting = False
        self._seen: Tensor | None = None

    def nearest(self, x: Tensor) -> Tensor:
        """x [B, H or Hkv, T, D] -> int64 [B, H, T]: the nearest centroid of each query head."""
        heads = x.shape[1]
        centroids = self.centroids.unflatten(0, (heads, -1)).flatten(1, 2)
        products = x.float() @ centroids.transpose(1, 2)
        return (
            products.unflatten(3, (-1, self.settings.clusters))
            .argmax(dim=-1)
            .transpose(2, 3)
            .flatten(1, 2)
            .contiguous()
        )

    @torch.no_grad()
    def fit(self, call: Call) -> None:
        """k-means over the queries and keys of a call, from the keys of tokens at even distances."""
        real = self._real(call).flatten().nonzero().squeeze(1)
        picks = real[torch.linspace(0, len(real) - 1, self.settings.clusters, device=real.device).long()]
        start = call.key.transpose(1, 2).flatten(0, 1)[picks].float().transpose(0, 1)
        shared = self.centroids.shape[0] // start.shape[0]
        self.centroids.copy_(normalize(start, dim=-1).repeat_interleave(shared, dim=0))
        for _ in range(ROUNDS):
            self._move(self._sums(call), 0.0)

    @torch.no_grad()
    def watch(self, call: Call) -> None:
        """Remember what a training forward saw; a later one replaces it."""
        self._seen = self._sums(call)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards what was seen last, once."""
        if self._seen is not None:
            self._move(self._seen, self.settings.decay)
            self._seen = None

    def _sums(self, call: Call) -> Tensor:
        """Sum of the normalised queries and keys nearest to each centroid: [H, C, D]."""
        real = self._real(call)
        return self._sum(call.query, real[:, call.offset :]) + self._sum(call.key, real)

    def _sum(self, x: Tensor, real: Tensor) -> Tensor:
        members = one_hot(self.nearest(x), self.settings.clusters).float() * real[:, None, :, None]
        members = members.unflatten(1, (x.shape[1], -1))
        return torch.einsum("bxgtc,bxtd->xgcd", members, normalize(x.float(), dim=-1)).flatten(0, 1)

    def _move(self, sums: Tensor, decay: float) -> None:
        """Towards the sums' directions; a centroid without members stays."""
        moved = normalize(decay * self.centroids + (1 - decay) * normalize(sums, dim=-1), dim=-1)
        self.centroids.copy_(torch.where(sums.norm(dim=-1, keepdim=True) > 0, moved, self.centroids))

    @staticmethod
    def _real(call: Call) -> Tensor:
        if call.padding_mask is None:
            return torch.ones(call.key.shape[0], call.key.shape[2], dtype=torch.bool, device=call.key.device)
        return call.padding_mask


@dataclass(frozen=True)
class Routing:
    """Keys sorted by cluster, then time: order int64 [B, H, Tk]; a query reads the places first <= p < last of it.

    first, last: int64 [B, H, Tq].
    """

    order: Tensor
    first: Tensor
    last: Tensor


class RoutingTransformer(Tiled):
    """Near keys, and recent ones of the query's cluster."""

    name = "routing_transformer"

    def layer_state(self, settings: Method, *, window: int, heads: int, head_dim: int, generator) -> Clusters:
        """Random centroids."""
        return Clusters(settings, window, heads, head_dim, generator)

    def attend(self, call: Call) -> Tensor:
        """Attention; and while training, what the centroids need."""
        if call.state.fitting:
            call.state.fit(call)
        elif call.state.training and torch.is_grad_enabled():
            call.state.watch(call)
        return super().attend(call)

    def allowed(self, call: Call, rows: slice) -> Tensor:
        """bool [B, H, n, Tk]."""
        queries = torch.arange(call.query.shape[2], device=call.key.device)[rows, None] + call.offset
        near = queries - torch.arange(call.key.shape[2], device=call.key.device) <= call.state.window
        routing = self.plan(call)
        place = routing.order.argsort(dim=-1).unsqueeze(2)
        return near | (
            (place >= routing.first[:, :, rows].unsqueeze(3)) & (place < routing.last[:, :, rows].unsqueeze(3))
        )

    @torch.no_grad()
    def plan(self, call: Call) -> Routing:
        """Who reads whom beyond the window."""
        state, keys, device = call.state, call.key.shape[2], call.key.device
        cluster, step = state.nearest(call.key), keys + 1
        if call.padding_mask is not None:
            cluster = cluster.masked_fill(~call.padding_mask.unsqueeze(1), state.settings.clusters)
        ranked = (cluster * step + torch.arange(keys, device=device)).sort(dim=-1).values
        start = state.nearest(call.query) * step
        beyond = (torch.arange(call.offset, keys, device=device) - state.window).clamp(min=0)
        last = torch.searchsorted(ranked, start + beyond)
        first = torch.maximum(torch.searchsorted(ranked, start), last - state.settings.cluster_tokens)
        return Routing(ranked % step, first, last)

    def tiles(self, call: Call, plan: Routing, rows: slice) -> list[Tiles]:
        """The window, and the blocks of the sorted keys that hold a query's members."""
        first, last = plan.first[:, :, rows], plan.last[:, :, rows]
        touched = (call.state.settings.cluster_tokens - 1) // BLOCK + 2
        blocks = (first // BLOCK).unsqueeze(-1) + torch.arange(touched, device=first.device)
        blocks = torch.where(blocks * BLOCK < last.unsqueeze(-1), blocks, -1)
        blocks = torch.where((last > first).unsqueeze(-1), blocks, -1)
        choice = Choice(blocks, bounds=(first, last))
        return [band_tiles(call, rows, call.state.window), block_tiles(call, rows, choice, plan.order, BLOCK)]

    def prepare(self, model: PreTrainedModel, batches: Iterable[Tensor]) -> None:
        """Fit every layer's centroids in one forward pass, those of lower layers first."""
        windows, training, states = list(batches), model.training, _clusters(model)
        if not windows:
            return
        model.eval()
        for state in states:
            state.fitting = True
        try:
            with torch.no_grad():
                model.base_model(input_ids=torch.cat(windows).to(model.device), use_cache=False)
        finally:
            model.train(training)
            for state in states:
                state.fitting = False

    def after_step(self, model: PreTrainedModel) -> None:
        """Move the centroids."""
        for state in _clusters(model):
            state.update()


def _clusters(model: PreTrainedModel) -> list[Clusters]:
    return [module for module in model.modules() if isinstance(module, Clusters)]
