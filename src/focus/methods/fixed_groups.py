"""Hard groups that nothing has learned: what any grouping gives, beside which learned grouping must stand (4.8).

A group is a hash of the layer's seed and of the token's position, of its id ("token"), or of both ("random", another
group at each occurrence). All else is hard Focus: window, sinks, memberships, engine, cache. Groups differ between
layers, so that what one layer separates meets in another. They depend on a token and on how many real ones precede it,
so they are causal and decode. When every weight trains, it does so through the same mask.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from focus import adapter
from focus.errors import UserError
from focus.memory import memory_of
from focus.method_config import Attention, Method
from focus.methods.focus import Focus
from focus.methods.full_finetuning import load_parameters, save_parameters
from focus.methods.hashing import BITS, mixed
from focus.router import Router, Seen

SEEDS = "seeds.safetensors"


class FixedRouter(Router):
    """Assigns by hashing. The buffer `seed`, int64 [1], decides all of a layer's groups; nothing has gradients."""

    def make_tensors(self, width: int, generator: torch.Generator) -> None:
        """Draw the seed."""
        self.register_buffer("seed", torch.randint(BITS, (1,), generator=generator))
        self.by = "random"
        self.tokens: Tensor | None = None
        self.past: Tensor | int = 0

    def read(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Pre-hook of the model below the head: keep its input ids [B, T]."""
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None and self.attention != "full":
            raise UserError("input_ids: expected token ids, by which tokens are grouped, got embeddings alone")
        self.tokens = tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding_mask: Tensor | None, **settings) -> Tensor:
        """As `Router.attend`, from the position that the cache has come to."""
        cache = self._received[1]
        ordinals = None if cache is None else memory_of(cache, settings["layer_idx"]).ordinals
        self.past = 0 if ordinals is None else ordinals[:, -1:]
        return super().attend(query, key, value, padding_mask, **settings)

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """float32 [B, T, K], random shares of 1: the k largest are k different groups, each as likely as the others."""
        tokens = self.tokens.to(hidden.device)
        real = torch.ones_like(tokens) if padding_mask is None else padding_mask.long()
        positions = (real.cumsum(dim=1) - 1 + self.past).clamp(min=0)
        shares = draw(self.seed, positions, tokens, self.by, self.config.groups)
        if self.seen is not None:
            self.seen.append(Seen(shares, padding_mask, None))
        return shares


class FixedGroups(Focus):
    """Hard groups without any learning; the base model trains, or nothing."""

    def attach(self, model: PreTrainedModel, settings: Method, *, window: int, seed: int) -> PreTrainedModel:
        """Compose routers that hash, `seed` deciding how."""
        config = settings.adapter.model_copy(update={"window": window, "balance": "softmax"})
        adapter.compose(model, config, seed, FixedRouter)
        for router in adapter.routers(model):
            router.by = settings.by
            hook = model.base_model.register_forward_pre_hook(router.read, with_kwargs=True)
            model.focus_composition.hooks.append(hook)
        return model

    def training_attention(self, settings: Method) -> Attention:
        """The mask of evaluation."""
        return "hard"

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """The base model's, for a phase of everything."""
        if trains != "everything":
            raise UserError(f"training.phases.trains: expected everything for kind fixed_groups, got {trains}")
        return super().parameters(model, trains)

    def save(self, model: PreTrainedModel, settings: Method, folder: Path) -> None:
        """Write the seeds, and all parameters."""
        save_parameters(_seeds(model), folder, SEEDS)
        save_parameters(dict(model.named_parameters()), folder)

    def restore(self, model: PreTrainedModel, settings: Method, folder: Path, *, window: int) -> PreTrainedModel:
        """Attach, and overwrite what `save` wrote."""
        self.attach(model, settings, window=window, seed=0)
        load_parameters(_seeds(model), folder, SEEDS)
        load_parameters(dict(model.named_parameters()), folder)
        return model

    def choose(self, model: PreTrainedModel, attention: Attention, top_k: int | None) -> None:
        """Hard attention with `top_k` groups a token."""
        if attention != "hard":
            raise UserError(f"attention: expected hard for groups that are fixed, got {attention}")
        super().choose(model, attention, top_k)


def draw(seed: Tensor, positions: Tensor, tokens: Tensor, by: str, groups: int) -> Tensor:
    """A random share of each group, float32 [B, T, K]: positions, tokens int64 [B, T]; rows sum to 1."""
    place, word = mixed(mixed(seed) ^ positions), mixed(mixed(seed) ^ tokens)
    key = {"position": place, "token": word, "random": mixed(place ^ tokens)}[by]
    numbers = mixed(key.unsqueeze(-1) ^ torch.arange(groups, device=key.device)).float() + 1
    return numbers / numbers.sum(dim=-1, keepdim=True)


def _seeds(model: PreTrainedModel) -> dict[str, Tensor]:
    return {f"layers.{number}.seed": router.seed for number, router in enumerate(adapter.routers(model))}
