"""Focus: learned groups gate the far pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from focus import adapter, distillation
from focus.distillation_config import Distillation
from focus.method_config import Attention, Method
from focus.methods.base import MethodKind
from focus.methods.full_finetuning import load_parameters, save_parameters


class Focus(MethodKind):
    """Learned groups gate the far pairs; the centroids train, and the base model where a phase says so."""

    def attach(self, model: PreTrainedModel, settings: Method, *, window: int, seed: int) -> PreTrainedModel:
        """Compose the untrained adapter, whose config already holds the model's window."""
        return adapter.compose(model, settings.adapter, seed)

    def training_attention(self, settings: Method) -> Attention:
        """The gate, or hard groups with a straight-through gradient."""
        return settings.training.attention

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """The routers' projections and centroids, or those and the base model's weights."""
        model.requires_grad_(trains == "everything")
        for router in adapter.routers(model):
            router.requires_grad_(True)
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def prepare(self, model: PreTrainedModel, batches: Iterable[Tensor]) -> None:
        """Calibrate the potentials, where there are any."""
        if model.focus_composition.config.balance == "potentials":
            adapter.calibrate(model, batches)

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
        """Centroids that keep the far attention of the model as it is."""
        return distillation.distil(model, settings, windows, seed=seed, done=done, name=name)

    def auxiliary(self, model: PreTrainedModel) -> AbstractContextManager[list[Tensor]]:
        """The losses on uneven groups, layer by layer, where the balance has any."""
        return adapter.auxiliary(model)

    def after_step(self, model: PreTrainedModel) -> None:
        """Let the potentials follow the routers, or the centroids their tokens."""
        adapter.update_potentials(model)
        adapter.move_centroids(model)

    def save(self, model: PreTrainedModel, settings: Method, folder: Path) -> None:
        """Write the adapter, and the base weights when a phase has trained them."""
        adapter.save(model, folder)
        if _trains_base(settings):
            save_parameters(_base(model), folder)

    def restore(self, model: PreTrainedModel, settings: Method, folder: Path, *, window: int) -> PreTrainedModel:
        """Load the base weights when a phase has trained them, then the adapter trained on them."""
        if _trains_base(settings):
            load_parameters(dict(model.named_parameters()), folder)
        return adapter.load(model, folder)

    def choose(self, model: PreTrainedModel, attention: Attention, top_k: int | None) -> None:
        """Switch between full, soft and hard attention."""
        adapter.switch(model, attention, top_k)

    def observe(self, model: PreTrainedModel) -> AbstractContextManager[list[dict[str, float]]]:
        """Dominance, confidence and pairs kept of each layer."""
        return adapter.observe(model)

    def groups(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """The largest group of each token."""
        return adapter.groups(model, tokens)

    def pairs_kept(self, settings: Method, window: int, length: int) -> None:
        """The groups decide."""

    def decodes(self, settings: Method) -> bool:
        """Where a token's groups depend on it alone."""
        return settings.adapter.per_token

    def backend(self, model: PreTrainedModel) -> str:
        """focus, the attention chosen and what last computed it, or what full attention runs."""
        composition = model.focus_composition
        if composition.attention == "full":
            return composition.implementation
        if composition.attention == "soft":
            return "focus soft, dense"
        ran = sorted({router.backend for router in adapter.routers(model) if router.backend})
        return ", ".join(["focus hard", *ran])


def _trains_base(settings: Method) -> bool:
    return any(phase.trains == "everything" and phase.steps for phase in settings.training.phases)


def _base(model: PreTrainedModel) -> dict[str, Tensor]:
    routers = {id(parameter) for router in adapter.routers(model) for parameter in router.parameters()}
    return {name: tensor for name, tensor in model.named_parameters() if id(tensor) not in routers}
