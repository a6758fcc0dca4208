"""Groups from k-means on hidden states, without any training: what the geometry of the model alone gives (4.8).

Each layer's clusters are those of the directions of its centred inputs under full attention, on training windows. The
nearest centroid of a token is the largest (h - mean) . c, so this is a Focus router whose W_g holds the centroids and
whose C is a multiple of the identity; what is the same for all tokens, and what makes the groups even, is in the
potentials, calibrated as those of any router. Gate, mask, cache and files are Focus's own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel

from focus import adapter
from focus.errors import UserError
from focus.method_config import Attention, Method
from focus.methods.focus import Focus
from focus.router import Router
from focus.routing import spherical_kmeans

DEVIATION = 0.25
"""Of a layer's scores over the tokens it was fitted to: at the default temperature, probabilities are neither 0 nor 1
and Sinkhorn converges in its 10 rounds."""


class KMeansGroups(Focus):
    """Focus with centroids from k-means; the base model trains, or nothing."""

    def attach(self, model: PreTrainedModel, settings: Method, *, window: int, seed: int) -> PreTrainedModel:
        """Compose routers with random centroids, which `prepare` replaces."""
        return adapter.compose(model, settings.adapter.model_copy(update={"window": window}), seed)

    def training_attention(self, settings: Method) -> Attention:
        """The mask of evaluation."""
        return "hard"

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """The base model's, for a phase of everything."""
        if trains != "everything":
            raise UserError(f"training.phases.trains: expected everything for kind kmeans_groups, got {trains}")
        return super().parameters(model, trains)

    def prepare(self, model: PreTrainedModel, batches: Iterable[Tensor]) -> None:
        """Fit every layer's centroids to what it reads under full attention, then calibrate the potentials.

        Draws from torch's own random numbers.
        """
        windows = list(batches)
        if not windows:
            raise UserError("training.calibration_windows: expected at least 1 for kind kmeans_groups, got 0")
        composition, training = model.focus_composition, model.training
        attention, top_k = composition.attention, composition.top_k
        layers = [module for module in model.modules() if isinstance(getattr(module, "focus", None), Router)]
        hooks = [layer.register_forward_pre_hook(_fit, with_kwargs=True) for layer in layers]
        adapter.switch(model, "full")
        model.eval()
        try:
            with torch.no_grad():
                model.base_model(input_ids=torch.cat(windows).to(model.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
            model.train(training)
            adapter.switch(model, attention, top_k)
        super().prepare(model, windows)


def _fit(layer: nn.Module, args: tuple, kwargs: dict) -> None:
    """Pre-hook of an attention module: fit its router to its inputs [B, T, d]."""
    router = layer.focus
    hidden = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).flatten(0, 1).float()
    centred = hidden - hidden.mean(dim=0)
    directions = nn.functional.normalize(centred, dim=-1)
    with torch.autocast(hidden.device.type, enabled=False):
        centroids = spherical_kmeans(directions, router.config.groups)
        deviation = (centred @ centroids.T).std().clamp(min=1e-6)
    router.projection.copy_(centroids)
    router.centroids.copy_(torch.eye(len(centroids)) * DEVIATION / deviation)
