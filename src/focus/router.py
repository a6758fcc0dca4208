"""The one module Focus adds to an attention layer, and the functions through which transformers calls it.

transformers hands an attention function queries, keys and values but not the hidden states, so a pre-hook of the
attention module passes them (and the cache, if any) to the module's router just before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from focus import routing
from focus.attention import choose_backend, focus_attention, straight_through_attention
from focus.attention.flash import choose_pieces
from focus.attention.plan import MAX_GROUPS_IN_BITS
from focus.errors import UserError
from focus.gates import gated_attention
from focus.memory import GroupedMemory, announce, memory_of
from focus.method_config import Attention, FocusConfig

IMPLEMENTATION = "focus"


class Seen(NamedTuple):
    """What a router did in one forward: assignment [B, T, K], padding_mask bool [B, T] or None, and the directions of
    the routing vectors [B, T, d_g] without gradients where the balance moves centroids towards them."""

    assignment: Tensor
    padding_mask: Tensor | None
    vectors: Tensor | None


class Router(nn.Module):
    """Assigns the tokens of one layer to groups and attends accordingly.

    projection [d_g, d], centroids [K, d_g] and potentials [K] are float32 whatever the model; those that gradients move
    are parameters, the others buffers. Of balance ema there is also projection_average [d_g, d], of recluster the
    number of steps taken.
    """

    def __init__(self, config: FocusConfig, width: int, generator: torch.Generator):
        super().__init__()
        self.config = config
        self.make_tensors(width, generator)
        self.attention: Attention = "hard"
        self.top_k = config.top_k
        self.observed: dict[str, float] | None = None
        self.backend: str | None = None  # of the last hard attention
        self.calibration: list[Tensor] | None = None
        self.seen: list[Seen] | None = None
        self.step_vectors: list[tuple[Tensor, Tensor]] = []
        self._received: tuple[Tensor, Cache | None] | None = None
        self._trained_on: tuple[Tensor, Tensor | None] | None = None

    def make_tensors(self, width: int, generator: torch.Generator) -> None:
        """Draw the projection and the centroids, and add what the balance keeps."""
        config = self.config
        deviation = config.projection_std or width**-0.5
        projection = torch.randn(config.routing_dim, width, generator=generator) * deviation
        centroids = torch.randn(config.groups, config.routing_dim, generator=generator) * config.centroid_std
        for name, tensor in (("projection", projection), ("centroids", centroids)):
            if name in config.learnt:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        self.register_buffer("potentials", torch.zeros(config.groups))
        if config.balance == "ema":
            self.register_buffer("projection_average", projection.clone())
        if config.balance == "recluster":
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Soft assignment: hidden [B, T, d], padding_mask bool [B, T] -> float32 [B, T, K], rows sum to 1."""
        hidden = hidden.to(self.centroids.device)
        if self.config.detach_inputs or self.config.balance == "stop_gradient":
            hidden = hidden.detach()
        projection = self._projection()
        assignment = self._assign(routing.scores(hidden, projection, self.centroids), padding_mask)
        if self.seen is not None:
            moves = self.config.balance in ("ema", "recluster")
            vectors = routing.vectors(hidden.detach(), projection.detach()) if moves else None
            self.seen.append(Seen(assignment, padding_mask, vectors))
        return assignment

    def _projection(self) -> Tensor:
        """The projection in use: for balance ema its moving average, with the gradient of the moving one."""
        if self.config.balance != "ema":
            return self.projection
        return self.projection_average + (self.projection - self.projection.detach())

    def _assign(self, scores: Tensor, padding_mask: Tensor | None) -> Tensor:
        config = self.config
        if config.balance == "sinkhorn":
            return routing.sinkhorn(
                scores,
                temperature=config.temperature,
                iterations=config.sinkhorn_iterations,
                padding_mask=padding_mask,
            )
        if config.balance == "prefix":
            return routing.prefix_sinkhorn(
                scores,
                temperature=config.temperature,
                iterations=config.sinkhorn_iterations,
                padding_mask=padding_mask,
            )
        if config.balance != "potentials":
            return routing.assign(scores, temperature=config.temperature)
        if self.calibration is not None:
            potentials = self._columns(scores, padding_mask)
            self.calibration.append(potentials.mean(dim=0))
            return routing.assign(scores, temperature=config.temperature, potentials=potentials)
        if self.training:
            self._trained_on = scores.detach(), padding_mask
        return routing.assign(scores, temperature=config.temperature, potentials=self.potentials)

    @torch.no_grad()
    def update_potentials(self) -> None:
        """Move the potentials towards the column potentials of the last training forward."""
        if self._trained_on is not None:
            target = self._columns(*self._trained_on).mean(dim=0)
            self.potentials.lerp_(target, 1 - self.config.potential_momentum)
            self._trained_on = None

    def imbalance(self, seen: Seen) -> Tensor | None:
        """The weighted losses on uneven groups, a scalar with gradients; None for a balance without any."""
        config = self.config
        if config.balance not in ("entropy", "stop_gradient"):
            return None
        return config.balance_weight * routing.balance_loss(
            seen.assignment, seen.padding_mask
        ) + config.entropy_weight * routing.entropy_gap(seen.assignment, seen.padding_mask)

    def gather(self, seen: Seen) -> None:
        """Keep what a training forward saw until `move_centroids`."""
        if seen.vectors is not None:
            real = ... if seen.padding_mask is None else seen.padding_mask
            groups = seen.assignment.detach().argmax(dim=-1)
            self.step_vectors.append((seen.vectors[real].flatten(0, -2), groups[real].flatten()))

    @torch.no_grad()
    def move_centroids(self) -> None:
        """After an optimiser step: balance ema lets the centroids follow the mean routing vector of their tokens (as in
        VQ-VAE, arXiv 1711.00937, app. A.1) and the projection in use follow the trained one; every `recluster_every`
        steps balance recluster puts k-means of the step's routing vectors in the centroids' place.

        Scores are dot products, so both work on directions, as Routing Transformer's k-means does (arXiv 2003.05997),
        and keep every centroid as long as an initial one is on average.
        """
        config = self.config
        length = config.centroid_std * config.routing_dim**0.5
        parts, self.step_vectors = self.step_vectors, []
        if config.balance == "recluster":
            self.steps += 1
            if parts and self.steps % config.recluster_every == 0:
                vectors = torch.cat([part[0] for part in parts])
                self.centroids.copy_(length * routing.spherical_kmeans(vectors, config.groups))
        elif config.balance == "ema" and parts:
            vectors, groups = (torch.cat(each) for each in zip(*parts, strict=True))
            target = routing.mean_directions(vectors, groups, self.centroids)
            moved = torch.lerp(target, functional.normalize(self.centroids, dim=-1), config.ema_momentum)
            self.centroids.copy_(length * functional.normalize(moved, dim=-1))
            self.projection_average.lerp_(self.projection, 1 - config.ema_momentum)

    def receive(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Pre-hook of the attention module: keep its hidden states and its cache for `attend`."""
        if self.attention != "full":
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
            self._received = hidden, cache
            if cache is not None:
                fits = self.top_k == 1 or self.config.groups <= MAX_GROUPS_IN_BITS
                announce(cache, module.layer_idx, hard=self.attention == "hard" and fits)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding_mask: Tensor | None,
        *,
        layer_idx: int,
        dropout: float,
        **settings,
    ) -> Tensor:
        """Soft or hard Focus attention: query [B, H, Tq, D], key and value [B, Hkv, Tk, D] -> [B, H, Tq, D].

        Hard attention has no dropout. While training, its gradient reaches the centroids straight through.
        `settings` are the scale, softcap and sliding_window of the model. padding_mask: bool [B, Tk].
        """
        (hidden, cache), self._received = self._received, None
        memory = None if cache is None else memory_of(cache, layer_idx)
        apart = memory is not None and memory.apart
        queries, keys = query.shape[2], key.shape[2] + (memory.get_seq_length() if apart else 0)
        if keys > queries and not self.config.per_token:
            others = "earlier" if self.config.causal else "later"
            raise UserError(
                f"balance: {self.config.balance} cannot decode with a cache, because its groups depend on {others} "
                "tokens; expected balance potentials (or softmax), or generate with use_cache=False"
            )
        new_mask = None if padding_mask is None else padding_mask[:, keys - queries :]
        assignment = self(hidden, new_mask)
        if apart:
            return self._decode(memory, query, key, value, assignment, padding_mask, settings)
        sinks = self.config.sinks
        if memory is not None:
            assignment, ordinals = memory.remember(assignment, new_mask, keys)
            if keys > queries:
                sinks = ordinals <= sinks
        settings |= {"window": self.config.window, "sinks": sinks, "padding_mask": padding_mask}
        if self.observed is not None:
            self._observe(assignment, sinks, padding_mask, settings["sliding_window"])
        if self.attention == "soft":
            gate = {"gate": self.config.gate, "steepness": self.config.steepness}
            return gated_attention(query, key, value, assignment, dropout=dropout, **gate, **settings)
        groups = self._groups(assignment)
        if self.training and assignment.requires_grad and keys == queries and settings["softcap"] is None:
            return self._train_hard(query, key, value, groups, assignment, settings)
        self.backend = choose_backend(
            query, value, groups, softcap=settings["softcap"], padding_mask=settings["padding_mask"]
        )
        return focus_attention(query, key, value, groups, **settings)

    def _train_hard(
        self, query: Tensor, key: Tensor, value: Tensor, groups: Tensor, assignment: Tensor, settings: dict
    ) -> Tensor:
        """Hard attention whose gradient reaches the centroids straight through."""
        self.backend = "straight-through"
        settings = {name: value for name, value in settings.items() if name != "softcap"}
        steepness = self.config.steepness
        return straight_through_attention(query, key, value, groups, assignment, steepness=steepness, **settings)

    def _decode(
        self,
        memory: GroupedMemory,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        assignment: Tensor,
        padding_mask: Tensor | None,
        settings: dict,
    ) -> Tensor:
        """Hard attention of new tokens through the grouped cache of their layer."""
        sinks = self.config.sinks
        form = {"group": self._groups, "top_k": self.top_k, "window": self.config.window, "sinks": sinks}
        out = memory.attend(query, key, value, assignment, padding_mask, **form, **settings)
        self.backend = f"grouped/{choose_pieces(query, value, scale=None, softcap=settings['softcap']).name}"
        if self.observed is not None:
            self._observe(memory.assignments, memory.ordinals <= sinks, padding_mask, settings["sliding_window"])
        return out

    def _groups(self, assignment: Tensor) -> Tensor:
        """int [B, T], or bool [B, T, K] with several groups a token."""
        return assignment.argmax(dim=-1) if self.top_k == 1 else routing.top_k_membership(assignment, self.top_k)

    def _columns(self, scores: Tensor, padding_mask: Tensor | None) -> Tensor:
        return routing.column_potentials(
            scores,
            temperature=self.config.temperature,
            iterations=self.config.sinkhorn_iterations,
            padding_mask=padding_mask,
        )

    @torch.no_grad()
    def _observe(
        self, assignment: Tensor, sinks: int | Tensor, padding_mask: Tensor | None, sliding_window: int | None
    ) -> None:
        top_k = self.top_k if self.attention == "hard" else self.config.top_k
        membership = routing.top_k_membership(assignment, top_k)
        confidence = assignment.amax(dim=-1)
        every, far = routing.pairs_kept(membership, self.config.window, sinks, padding_mask, sliding_window)
        self.observed.update(
            dominance=routing.dominance(assignment, padding_mask),
            confidence=(confidence if padding_mask is None else confidence[padding_mask]).mean().item(),
            pairs_kept=every,
            far_pairs_kept=far,
        )


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """What transformers calls instead of its own attention; returns ([B, Tq, H, D], None)."""
    router = getattr(module, "focus", None)
    if router is None:
        raise UserError(f"{type(module).__name__}: expected plain causal self-attention, got no router")
    check_plain(module, attention_mask, kwargs)
    if attention_mask is not None:
        key, value = key[:, :, : attention_mask.shape[1]], value[:, :, : attention_mask.shape[1]]
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    with torch.autocast(device, enabled=False):
        out = router.attend(
            query,
            key,
            value,
            attention_mask,
            layer_idx=module.layer_idx,
            dropout=dropout,
            scale=scaling,
            softcap=softcap,
            sliding_window=sliding_window,
        )
    return out.transpose(1, 2).contiguous(), None


def check_plain(module: nn.Module, attention_mask: Tensor | None, extra: dict) -> None:
    """UserError for what a replaced attention would leave out: `extra` arguments that add to scores, masks of pairs."""
    found = [name for name in ("s_aux", "position_bias") if extra.get(name) is not None]
    if found:
        raise UserError(f"{type(module).__name__}: expected plain causal self-attention, got {found}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UserError(
            f"attention_mask: expected 2 dimensions [batch, tokens], got shape {list(attention_mask.shape)}"
        )


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **_,
) -> Tensor | None:
    """The padding mask for the keys that hold a token: bool [B, n], or None when all `kv_length` of them are real.

    A static cache has room for more than n keys; the mask's width tells the attention function where to cut.
    """
    if use_vmap or (not allow_is_causal_skip and q_length > 1):
        raise UserError("attention: expected causal sequences, got packed ones or a mask of the model's own")
    length = int(q_offset) + q_length - kv_offset
    if attention_mask is not None:
        attention_mask = attention_mask[:, kv_offset : kv_offset + length]
        if attention_mask.shape[1] != length:
            raise UserError(
                f"attention_mask: expected {kv_offset + length} columns, past tokens included, "
                f"got {kv_offset + attention_mask.shape[1]}"
            )
    if length < kv_length and attention_mask is None:
        return torch.ones(batch_size, length, dtype=torch.bool, device=device)
    if attention_mask is not None and length == kv_length and attention_mask.all():
        return None
    return attention_mask


AttentionInterface.register(IMPLEMENTATION, attention_function)
AttentionMaskInterface.register(IMPLEMENTATION, mask_function)


def device_of(layer: nn.Module) -> torch.device:
    """Where a layer computes: where its weights are, or for weights kept on the CPU or a disk where accelerate brings
    them for each forward."""
    hooks = [hook for module in layer.modules() if (hook := getattr(module, "_hf_hook", None)) is not None]
    places = [place for hook in hooks if (place := getattr(hook, "execution_device", None)) is not None]
    return torch.device(places[0]) if places else next(layer.parameters()).device
