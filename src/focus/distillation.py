"""Centroids that keep the frozen model's own attention, layer by layer, without a backward pass through the model.

The model reads some training windows once, with full attention. Each layer then gets, by itself, the groups that keep
as much of the weight of its far pairs as they can, at a price for each pair kept:

    maximise  sum_ij (W_ij / sum W  -  price * F_ij / sum F) g_i . g_j

F marks the far pairs (beyond the window, not to a sink), W holds what each of them counts for, and g are the
assignments. With price 1 this is Newman's modularity (arXiv physics/0602124) of the attention graph: groups that know
nothing of W get 0, however uneven. The paper trains centroids on the language model's loss alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from focus import adapter
from focus.attention.reference import causal_pairs, near_pairs, sink_keys
from focus.distillation_config import Distillation, PairWeight
from focus.errors import UserError
from focus.progress import Progress
from focus.router import check_plain, mask_function

TEACHER = "focus_teacher"
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense")
BETAS = (0.9, 0.95)
WARMUP_STEPS = 10
CENTROID_STD = 0.5
RIDGE = 10.0
BALANCING_STEPS = 60


@dataclass(frozen=True)
class Lesson:
    """What one layer of the frozen model did in one window.

    hidden: bfloat16 [T, d], what its router sees; weights: bfloat16 [T, T], those of far pairs that sum to 1, else 0.
    """

    hidden: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Fitted:
    """The router of one layer: projection [d_g, d], centroids [K, d_g] and potentials [K], so that a token's assignment
    is softmax(C W_g h + potentials); and the shares of the weights and of the far pairs that its hard groups keep."""

    projection: Tensor
    centroids: Tensor
    potentials: Tensor
    kept: float
    pairs: float


def distil(
    model: PreTrainedModel, settings: Distillation, windows: Iterable[Tensor], *, seed: int, done: int, name: str
) -> Iterator[dict]:
    """Fit the routers of a composed `model` in place, from layer `done` on, and yield a record after each.

    windows: int64 [1, T] each. A layer depends on the frozen model, the windows and (seed, layer) alone. Raises
    UserError for windows without any far pair.
    """
    routers = adapter.routers(model)
    if done == len(routers):
        return
    progress = Progress(f"{name}: reading", settings.windows)
    lessons: list[list[Lesson]] = [[] for _ in routers]
    for window in windows:
        for number, lesson in enumerate(observe_attention(model, window, settings.pair_weight)):
            if number >= done:
                lessons[number].append(lesson)
        progress.step()
    progress = Progress(f"{name}: layers", len(routers), done=done)
    for number in range(done, len(routers)):
        router, config = routers[number], routers[number].config
        hidden = torch.stack([lesson.hidden for lesson in lessons[number]]).float()
        weights = torch.stack([lesson.weights for lesson in lessons[number]])
        lessons[number] = []
        generator = torch.Generator().manual_seed(seed * 10_007 + number)
        far = far_pairs(hidden.shape[1], config.window, config.sinks, hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            fitted = fit_layer(
                hidden, weights, far, settings, groups=config.groups, width=config.routing_dim, generator=generator
            )
        with torch.no_grad():
            router.projection.copy_(fitted.projection)
            router.centroids.copy_(fitted.centroids * config.temperature)
            router.potentials.copy_(fitted.potentials)
        progress.step(kept=fitted.kept, pairs=fitted.pairs)
        yield {"layer": number, "kept_weight": fitted.kept, "kept_far_pairs": fitted.pairs}


def fit_layer(
    hidden: Tensor,
    weights: Tensor,
    far: Tensor,
    settings: Distillation,
    *,
    groups: int,
    width: int,
    generator: torch.Generator,
) -> Fitted:
    """The groups of one layer: hidden [N, T, d], weights [N, T, T] of far pairs, far bool [T, T].

    Adam on W_g and C over whitened hidden states. The assignment is balanced by column potentials of the windows of
    each step, and sharpens as the temperature falls; the last potentials make the hard groups of all windows even.
    """
    device = hidden.device
    gains = pair_gains(weights, far, settings.pair_price)
    mean, whitening = _whitening(hidden.flatten(0, 1))
    inputs = (hidden - mean) @ whitening
    projection = _drawn(width, inputs.shape[-1], inputs.shape[-1] ** -0.5, generator, device)
    centroids = _drawn(groups, width, CENTROID_STD, generator, device)
    optimiser = torch.optim.Adam([projection, centroids], lr=settings.learning_rate, betas=BETAS)
    potentials = torch.zeros(groups, device=device)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(settings.steps):
        if len(order) < min(settings.batch_windows, len(inputs)):
            order = torch.randperm(len(inputs), generator=generator)
        chosen, order = order[: settings.batch_windows], order[settings.batch_windows :]
        share = step / settings.steps
        for group in optimiser.param_groups:
            rising = min(1.0, (step + 1) / WARMUP_STEPS)
            group["lr"] = settings.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * share))
        logits = inputs[chosen] @ (centroids @ projection).T / _temperature(settings, share)
        potentials = _balanced(logits.detach().flatten(0, 1), potentials)
        loss = -kept_gain(torch.softmax(logits + potentials, dim=-1), gains[chosen])
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    with torch.no_grad():
        projection = projection @ whitening.T
        centroids = centroids / settings.last_temperature
        logits = hidden @ (centroids @ projection).T
        potentials = even_potentials(logits.flatten(0, 1))
        members = one_hot((logits + potentials).argmax(dim=-1), groups).to(hidden.dtype)
        kept, pairs = _share_kept(members, weights.float()), _share_kept(members, far.to(hidden.dtype))
    return Fitted(projection, centroids, potentials, kept, pairs)


def pair_gains(weights: Tensor, far: Tensor, price: float) -> Tensor:
    """What keeping a pair gains: the weights [N, T, T] as shares of each window's, less the price of a far pair.

    Made symmetric, because both tokens of a pair need the other's group: [N, T, T] -> float32 [N, T, T].
    """
    gains = weights.float()
    gains = gains / gains.sum(dim=(1, 2), keepdim=True).clamp(min=1e-30) - price * far / far.sum()
    return gains + gains.transpose(1, 2)


def kept_gain(assignment: Tensor, gains: Tensor) -> Tensor:
    """Mean over windows of half the sum over pairs of gain * (g_i . g_j): [N, T, K], symmetric [N, T, T] -> scalar."""
    return _KeptGain.apply(assignment, gains)


class _KeptGain(torch.autograd.Function):
    """The gradient by g of g.Gg / 2 is Gg for a symmetric G, which the value needs anyway."""

    @staticmethod
    def forward(ctx, assignment: Tensor, gains: Tensor) -> Tensor:
        pulled = gains @ assignment
        ctx.save_for_backward(pulled)
        return 0.5 * (pulled * assignment).sum() / len(gains)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (pulled,) = ctx.saved_tensors
        return gradient * pulled / len(pulled), None


def far_pairs(length: int, window: int, sinks: int, device: torch.device) -> Tensor:
    """Pairs that only groups can keep: bool [T, T]. Raises UserError when there are none."""
    far = causal_pairs(length, length, None, None, device) & ~near_pairs(length, length, window, device)
    far = (far & ~sink_keys(length, sinks, None, device)[:, None])[0]
    if not far.any():
        raise UserError(
            f"training.distillation: expected a context with pairs farther than the window ({window}) and past the "
            f"sinks ({sinks}), got {length} tokens"
        )
    return far


def even_potentials(logits: Tensor) -> Tensor:
    """Potentials that make the hard groups even: logits [N, K] -> [K], centred, so argmax(logits + potentials) is."""
    groups = logits.shape[-1]
    potentials = _balanced(logits, torch.zeros(groups, device=logits.device), steps=3)
    size = logits.std().clamp(min=1e-6)
    for step in range(BALANCING_STEPS):
        counts = torch.bincount((logits + potentials).argmax(dim=-1), minlength=groups).float()
        surplus = (counts * groups / len(logits)).clamp(min=0.05).log()
        potentials = potentials - size * max(0.9**step, 0.01) * surplus
    return potentials - potentials.mean()


@torch.no_grad()
def observe_attention(model: PreTrainedModel, window: Tensor, pair_weight: PairWeight) -> list[Lesson]:
    """What each layer of a composed model does with full attention in one window of input ids [1, T]."""
    observed: dict[int, Lesson] = {}
    layers = [module for module in model.modules() if isinstance(getattr(module, "focus", None), nn.Module)]
    hooks = [
        layer.register_forward_pre_hook(_Notebook(layer, pair_weight, observed).open, with_kwargs=True)
        for layer in layers
    ]
    composition, training = model.focus_composition, model.training
    attention, top_k = composition.attention, composition.top_k
    adapter.switch(model, "full")
    model.set_attn_implementation(TEACHER)
    model.eval()
    try:
        model.base_model(input_ids=window.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            layer.__dict__.pop("focus_notebook", None)
        model.train(training)
        adapter.switch(model, attention, top_k)
    return [observed[layer.layer_idx] for layer in layers]


class _Notebook:
    """Hands a layer's hidden states to the teacher's attention, and keeps what comes of it."""

    def __init__(self, layer: nn.Module, pair_weight: PairWeight, observed: dict[int, Lesson]):
        self.pair_weight, self.observed = pair_weight, observed
        self.hidden: Tensor | None = None
        layer.__dict__["focus_notebook"] = self

    def open(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def teacher_attention(
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
    """Full attention of one window, head by head, that writes down what each far pair counts for."""
    check_plain(module, attention_mask, kwargs)
    notebook, config = module.focus_notebook, module.focus.config
    length, device, given = query.shape[2], query.device, query.dtype
    with torch.autocast(device.type, enabled=False):
        query, key, value = (tensor[0].float() for tensor in (query, key, value))
        pairs = causal_pairs(length, length, sliding_window, None, device)[0]
        hidden_pairs = torch.zeros(length, length, device=device).masked_fill(~pairs, float("-inf"))
        far = far_pairs(length, config.window, config.sinks, device) & pairs
        shared = len(query) // len(key)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        projections = _output_projections(module, len(query)) if notebook.pair_weight != "mass" else None
        total, outs = torch.zeros(length, length, device=device), []
        for head in range(len(query)):
            keys, values = key[head // shared], value[head // shared]
            scores = (query[head] * scale) @ keys.T
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.softmax(scores.add_(hidden_pairs), dim=-1)
            out = weights @ values
            outs.append(out)
            if projections is not None:
                squared = squared_distances(out @ projections[head], values @ projections[head])
                weights = weights * squared.sqrt_() if notebook.pair_weight == "output" else weights.square_() * squared
            total += weights
        total = total * far
        notebook.observed[module.layer_idx] = Lesson(
            notebook.hidden[0].to(torch.bfloat16), (total / total.sum().clamp(min=1e-30)).to(torch.bfloat16)
        )
        return torch.stack(outs, dim=1)[None].to(given), None


def squared_distances(left: Tensor, right: Tensor) -> Tensor:
    """Squared distances of all rows: [n, d], [m, d] -> [n, m], at least 0."""
    products = left @ right.T
    return products.mul_(-2).add_(left.square().sum(-1)[:, None]).add_(right.square().sum(-1)).clamp_(min=0)


def _output_projections(module: nn.Module, heads: int) -> Tensor:
    """A square root of W_O of each head, float32 [H, D, D]: rows through it are as far apart as through W_O."""
    for name in OUTPUT_PROJECTIONS:
        layer = getattr(module, name, None)
        if layer is not None:
            matrix = layer.weight.float() if type(layer).__name__ == "Conv1D" else layer.weight.float().T
            matrix = matrix.reshape(heads, -1, matrix.shape[-1])
            gram = matrix @ matrix.transpose(1, 2)
            values, vectors = torch.linalg.eigh(gram)
            return vectors * values.clamp(min=0).sqrt()[:, None]
    raise UserError(
        f"training.distillation.pair_weight: expected mass for {type(module).__name__}, whose output projection is "
        f"none of {', '.join(OUTPUT_PROJECTIONS)}"
    )


def _temperature(settings: Distillation, share: float) -> float:
    return settings.first_temperature * (settings.last_temperature / settings.first_temperature) ** share


def _balanced(logits: Tensor, potentials: Tensor, steps: int = 3) -> Tensor:
    """Potentials [K], nearer to those that make the mean of softmax(logits + potentials) even over logits [N, K]."""
    for _ in range(steps):
        potentials = potentials - torch.log(torch.softmax(logits + potentials, dim=-1).mean(dim=0).clamp(min=1e-9))
    return potentials - potentials.mean()


def _whitening(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [d] of hidden [N, d], and a symmetric [d, d] that evens out the variances of what is left, 1 on average.

    RIDGE times the median variance is added first, so that directions which hardly vary stay small.
    """
    mean = hidden.mean(dim=0)
    centred = hidden - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(hidden))
    values = values.clamp(min=0)
    raised = values + RIDGE * values.median() + 1e-6 * values.max() + 1e-12
    size = (values / raised).mean().sqrt().clamp(min=1e-6)
    return mean, (vectors * raised.rsqrt()) @ vectors.T / size


def _drawn(rows: int, columns: int, deviation: float, generator: torch.Generator, device: torch.device) -> Tensor:
    drawn = torch.randn(rows, columns, generator=generator) * deviation
    return drawn.to(device).requires_grad_(True)


def _share_kept(members: Tensor, weights: Tensor) -> float:
    """Of the weights [N, T, T] or [T, T], the share between members [N, T, K] of one group, over all windows."""
    kept = (members * (weights @ members)).sum()
    return float(kept / (weights.sum() if weights.dim() == 3 else weights.sum() * len(members)))


AttentionInterface.register(TEACHER, teacher_attention)
AttentionMaskInterface.register(TEACHER, mask_function)
