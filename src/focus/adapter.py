"""Put Focus on a transformers model, choose its attention, calibrate, watch, save, load, and take it off again.

    model = compose(model, FocusConfig(groups=4))     # in place; base weights frozen, routers train
    switch(model, "soft")                             # the gate of training; "hard" groups; "full" is the base model
    decompose(model)                                  # the base model, bit for bit

Works on any decoder whose layers call transformers' attention interface. Nothing of the model's code is copied.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from focus.errors import UserError
from focus.identity import Base, identify
from focus.method_config import OWN_STATE, Attention, Balance, FocusConfig
from focus.provenance import write_atomically
from focus.router import IMPLEMENTATION, Router, Seen, device_of
from focus.wording import mistake

ADAPTER_VERSION = 2
BEFORE_IDENTITY = 1
"""The version that said nothing of the base model."""
SETTINGS, TENSORS = "focus.json", "focus.safetensors"


@dataclass
class Composition:
    """What compose changed, so that decompose can undo it, and which attention is on."""

    config: FocusConfig
    implementation: str
    requires_grad: dict[str, bool]
    hooks: list[RemovableHandle]
    attention: Attention = "hard"
    top_k: int | None = None


def compose(
    model: PreTrainedModel, config: FocusConfig | Mapping, seed: int = 0, router: type[Router] = Router
) -> PreTrainedModel:
    """Add a router to every self-attention layer of `model`, in place, freeze the base, and switch to hard attention.

    `config` may be a mapping of a FocusConfig's settings; `seed` determines the initial projections and centroids, or
    whatever else a `router` of another class draws. Returns the same model. Raises UserError, before the model is
    touched, for settings that are none, a model that already has Focus, or one whose attention cannot be replaced.
    """
    config = _checked(config, "config")
    layers = attention_layers(model)
    generator = torch.Generator().manual_seed(seed)
    composition = Composition(
        config=config,
        implementation=model.config._attn_implementation,
        requires_grad={name: parameter.requires_grad for name, parameter in model.named_parameters()},
        hooks=[],
    )
    model.requires_grad_(False)
    for layer in layers:
        layer.focus = router(config, layer.config.hidden_size, generator).to(device_of(layer)).train(layer.training)
        composition.hooks.append(layer.register_forward_pre_hook(layer.focus.receive, with_kwargs=True))
    model.focus_composition = composition
    switch(model, "hard")
    return model


def _checked(config: object, where: str) -> FocusConfig:
    """The config, made of its settings where it is a mapping of them."""
    if isinstance(config, FocusConfig):
        return config
    if not isinstance(config, Mapping):
        raise UserError(f"{where}: expected a FocusConfig or a mapping of its settings, got {type(config).__name__}")
    try:
        return FocusConfig.model_validate(dict(config))
    except ValidationError as error:
        raise UserError(f"{where}: {mistake(error, FocusConfig).line}") from None


def decompose(model: PreTrainedModel) -> PreTrainedModel:
    """Take Focus off, in place: the base model's modules, parameters, gradient flags and attention as they were."""
    composition = _composition(model)
    for hook in composition.hooks:
        hook.remove()
    for layer in [module for module in model.modules() if isinstance(getattr(module, "focus", None), Router)]:
        del layer.focus
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(composition.requires_grad[name])
    model.set_attn_implementation(composition.implementation)
    del model.focus_composition
    return model


def switch(model: PreTrainedModel, attention: Attention, top_k: int | None = None) -> None:
    """Choose "full" (the base model's own attention), "soft" (the training gate) or "hard" (groups, `top_k` a token).

    `top_k` belongs to hard attention; None means the config's. Hard attention ignores the model's attention dropout.
    """
    composition = _composition(model)
    groups = composition.config.groups
    if attention not in ("full", "soft", "hard"):
        raise UserError(f"attention: expected full, soft or hard, got {attention!r}")
    if top_k is not None and (attention != "hard" or not 1 <= top_k <= groups):
        raise UserError(f"top_k: expected 1 to {groups} and attention hard, got {top_k} and {attention}")
    composition.attention, composition.top_k = attention, top_k
    for router in routers(model):
        router.attention, router.top_k = attention, top_k or composition.config.top_k
    model.set_attn_implementation(composition.implementation if attention == "full" else IMPLEMENTATION)


def routers(model: PreTrainedModel) -> list[Router]:
    """The routers in layer order."""
    _composition(model)
    return [module for module in model.modules() if isinstance(module, Router)]


@contextmanager
def observe(model: PreTrainedModel) -> Iterator[list[dict[str, float]]]:
    """Within the context, every forward refreshes one dict per layer, in layer order.

    dominance: share of the tokens whose group is the fullest; confidence: mean largest probability; pairs_kept and
    far_pairs_kept: see `focus.routing.pairs_kept`, for the top_k in force (the config's under soft attention).
    Full attention leaves the dicts empty.
    """
    watched = routers(model)
    for router in watched:
        router.observed = {}
    try:
        yield [router.observed for router in watched]
    finally:
        for router in watched:
            router.observed = None


def rebalance(model: PreTrainedModel, balance: Balance) -> None:
    """Let every router use another balance from here on, its projection, centroids and potentials unchanged.

    Raises UserError for ema and recluster, to which other tensors belong.
    """
    composition = _composition(model)
    for name in (composition.config.balance, balance):
        if name in OWN_STATE:
            raise UserError(f"balance: expected none of {', '.join(sorted(OWN_STATE))} to change between, got {name}")
    composition.config = composition.config.model_copy(update={"balance": balance})
    for router in routers(model):
        router.config = composition.config


@torch.no_grad()
def calibrate(model: PreTrainedModel, batches: Iterable[Tensor | Mapping[str, Tensor]]) -> None:
    """Set the potentials to the mean column potentials of Sinkhorn over `batches` of input ids [B, T].

    A batch may also be a mapping, of which input_ids and attention_mask (True or 1 = real) are read.

    The model runs with soft attention, each layer balanced by the batch's own column potentials, so that every layer
    sees the hidden states that balanced layers below it give. Raises UserError unless balance is potentials, and for
    batches of anything else.
    """
    composition = _composition(model)
    if composition.config.balance != "potentials":
        raise UserError(f"balance: expected potentials to calibrate, got {composition.config.balance}")
    attention, top_k, training = composition.attention, composition.top_k, model.training
    calibrated = routers(model)
    for router in calibrated:
        router.calibration = []
    switch(model, "soft")
    model.eval()
    try:
        for batch in batches:
            inputs = {name: tensor.to(model.device) for name, tensor in _inputs(batch).items()}
            model(**inputs, use_cache=False)
        for router in calibrated:
            if router.calibration:
                router.potentials.copy_(torch.stack(router.calibration).mean(dim=0))
    finally:
        for router in calibrated:
            router.calibration = None
        model.train(training)
        switch(model, attention, top_k)


def _inputs(batch: object) -> dict[str, Tensor]:
    """What the model reads of a batch: its input_ids, and its attention_mask where it has one."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    inputs = {name: given[name] for name in ("input_ids", "attention_mask") if given.get(name) is not None}
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 2 or tensor.is_floating_point():
            got = type(tensor).__name__
            got += f" of shape {list(tensor.shape)} and {tensor.dtype}" if isinstance(tensor, Tensor) else ""
            raise UserError(f"batches: {name}: expected a tensor of whole numbers [B, T], got {got}")
    if "input_ids" not in inputs:
        raise UserError(f"batches: expected tensors [B, T] or mappings with input_ids, got one with {', '.join(given)}")
    return inputs


@contextmanager
def auxiliary(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Around the forward of a training step: gives, once the context is left, each layer's loss on uneven groups.

    Keeps what ema and recluster need, too. What runs outside, such as the recomputing of activation checkpointing
    (which must be the non-reentrant one), neither adds a loss nor is kept.
    """
    terms: list[Tensor] = []
    with watching(model) as layers:
        yield terms
    for router, seen in zip(routers(model), layers, strict=True):
        for each in seen:
            router.gather(each)
            term = router.imbalance(each)
            terms += [] if term is None else [term]


@torch.no_grad()
def groups(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Each token's largest group in every layer, in evaluation mode: input ids [B, T] -> int64 [L, B, T]."""
    training = model.training
    if _composition(model).attention == "full":
        raise UserError("attention: expected soft or hard to look at groups, got full")
    model.eval()
    try:
        with watching(model) as layers:
            model.base_model(input_ids=tokens.to(model.device), use_cache=False)
    finally:
        model.train(training)
    return torch.stack([seen[-1].assignment.argmax(dim=-1).cpu() for seen in layers])


@contextmanager
def watching(model: PreTrainedModel) -> Iterator[list[list[Seen]]]:
    """Within the context every forward appends what it did to its layer's list."""
    watched = routers(model)
    for router in watched:
        router.seen = []
    try:
        yield [router.seen for router in watched]
    finally:
        for router in watched:
            router.seen = None


def move_centroids(model: PreTrainedModel) -> None:
    """After a training step: what balance ema and recluster do to the centroids. Does nothing for other balances."""
    for router in routers(model):
        router.move_centroids()


def update_potentials(model: PreTrainedModel) -> None:
    """After a training step: move each layer's potentials towards what the last training forward saw.

    The config's potential_momentum is the share kept. Does nothing for other balances.
    """
    for router in routers(model):
        router.update_potentials()


def save(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the adapter alone: focus.safetensors, then focus.json, each whole or not at all."""
    composition = _composition(model)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _tensors(model).items()}
    data = dump_tensors(tensors)
    settings = {
        "adapter_version": ADAPTER_VERSION,
        "base": _base(model).model_dump(),
        "config": composition.config.model_dump(),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    try:
        write_atomically(Path(folder) / TENSORS, data)
        write_atomically(Path(folder) / SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise UserError(f"{folder}: expected to write the adapter there, got: {error.strerror}") from None


@torch.no_grad()
def load(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Put the adapter saved in `folder` onto `model` (in place of any that is there) with hard attention.

    Raises UserError, before the model is touched, for a missing or damaged file, an unknown version, or an adapter of
    a model of another class or shape. Warns where only the weights are others than those it was trained on.
    """
    config, tensors, trained_on = _read(Path(folder))
    if trained_on is not None:
        _compare(trained_on, _base(model), Path(folder) / SETTINGS)
    layers = [layer for layer in model.modules() if _is_causal_self_attention(layer)]
    shapes = {}
    for number, layer in enumerate(layers):
        expected = Router(config, layer.config.hidden_size, torch.Generator()).state_dict()
        shapes |= {f"layers.{number}.{name}": tensor.shape for name, tensor in expected.items()}
    for name in sorted(shapes.keys() | tensors.keys()):
        expected = list(shapes[name]) if name in shapes else "no such tensor"
        got = list(tensors[name].shape) if name in tensors else "none"
        if expected != got:
            raise UserError(f"{Path(folder) / TENSORS}: {name}: expected {expected} for this model, got {got}")
    if hasattr(model, "focus_composition"):
        decompose(model)
    compose(model, config)
    for name, tensor in _tensors(model).items():
        tensor.copy_(tensors[name])
    return model


def _base(model: PreTrainedModel) -> Base:
    """The base model under `model`, whether it has Focus on it or not."""
    layers = [layer for layer in model.modules() if _is_causal_self_attention(layer)]
    if not layers:
        raise UserError(f"model: expected one with causal self-attention layers, got {type(model).__name__}")
    added = [each for router in model.modules() if isinstance(router, Router) for each in router.parameters()]
    return identify(model, len(layers), layers[0].config.hidden_size, added)


def _compare(trained_on: Base, base: Base, path: Path) -> None:
    """Refuse another class or shape; warn of other weights."""
    if trained_on.shape != base.shape:
        raise UserError(
            f"{path}: base: expected a model like the one it was trained on, {trained_on.shape}, got {base.shape}"
        )
    if trained_on.fingerprint != base.fingerprint:
        names = [" at ".join(filter(None, (each.name, each.revision))) or "no name" for each in (trained_on, base)]
        warnings.warn(
            f"{path}: base: the adapter was trained on other weights ({names[0]}) than the model has ({names[1]}): "
            "its groups may not suit them",
            stacklevel=3,
        )


def _read(folder: Path) -> tuple[FocusConfig, dict[str, Tensor], Base | None]:
    """The config, the tensors, and the base model, None in a file written before it was recorded."""
    path, data_path = folder / SETTINGS, folder / TENSORS
    try:
        settings, data = json.loads(path.read_text()), data_path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: expected a saved adapter, found no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected JSON, got {error}") from None
    version = settings.get("adapter_version") if isinstance(settings, dict) else None
    if version not in (BEFORE_IDENTITY, ADAPTER_VERSION):
        raise UserError(f"{path}: adapter_version: expected {BEFORE_IDENTITY} or {ADAPTER_VERSION}, got {version}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != settings.get("sha256"):
        raise UserError(f"{data_path}: expected sha256 {settings.get('sha256')} as {SETTINGS} says, got {digest}")
    try:
        base = None if version == BEFORE_IDENTITY else Base.model_validate(settings.get("base"))
    except ValidationError as error:
        raise UserError(f"{path}: base: {mistake(error, Base).line}") from None
    try:
        return _checked(settings.get("config"), f"{path}: config"), load_tensors(data), base
    except SafetensorError as error:
        raise UserError(f"{data_path}: expected safetensors, got {error}") from None


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        f"layers.{number}.{name}": tensor.detach()
        for number, router in enumerate(routers(model))
        for name, tensor in router.state_dict().items()
    }


def _composition(model: PreTrainedModel) -> Composition:
    if not hasattr(model, "focus_composition"):
        raise UserError(f"model: expected one that compose or load put Focus on, got a bare {type(model).__name__}")
    return model.focus_composition


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The causal self-attention modules of a bare model; UserError where its attention cannot be replaced."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model: expected a transformers PreTrainedModel, got {name}")
    if hasattr(model, "focus_composition"):
        raise UserError(f"model: expected a bare {name}, got one that already has Focus; decompose it first")
    for key in ("is_encoder_decoder", "add_cross_attention", "attention_chunk_size"):
        if getattr(model.config, key, None):
            raise UserError(f"model: expected a decoder with causal self-attention only, got {name} with {key}")
    layers = [module for module in model.modules() if _is_causal_self_attention(module)]
    if not layers or not model._can_set_attn_implementation():
        raise UserError(f"model: expected attention layers that call transformers' attention interface, got {name}")
    return layers


def _is_causal_self_attention(module: nn.Module) -> bool:
    return getattr(module, "layer_idx", None) is not None and getattr(module, "is_causal", False)
