"""LoRA (arXiv 2106.09685): a low-rank update beside frozen matrices of attention, through the library peft.

The paper that we reproduce names neither the matrices nor alpha. Its parameter counts settle the matrices: 147K at r=4
on GPT-2 is c_attn of all layers, 1.7M on Mistral is q_proj and v_proj. The update is (alpha / r) B A; alpha is r unless
set, so that the scale is 1 at every rank and the learning rate alone says how fast it moves. No dropout, no biases.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from focus.errors import UserError
from focus.method_config import Method
from focus.methods.base import MethodKind
from focus.methods.full_finetuning import load_parameters, save_parameters

NAME = "default"
PREFIX = "base_model.model."
SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class Lora(MethodKind):
    """Full attention with a trained low-rank update; the model stays what it is, with peft's layers in it."""

    def attach(self, model: PreTrainedModel, settings: Method, *, window: int, seed: int) -> PreTrainedModel:
        """Wrap the target matrices, in place; B is 0, so that nothing changes yet, and `seed` determines A.

        The base is frozen; the update is float32 even on a base of 16 bits. Raises UserError for targets that the model
        does not have, or that are no matrices of its layers.
        """
        from peft import LoraConfig
        from peft.functional import cast_adapter_dtype, inject_adapter_in_model

        found = _targets(model, settings)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.rank if settings.alpha is None else settings.alpha,
            lora_dropout=0.0,
            target_modules=list(found),
            fan_in_fan_out=any(found.values()),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, adapter_name=NAME)
        cast_adapter_dtype(model, NAME)
        return model

    def parameters(self, model: PreTrainedModel, trains: str) -> list[Parameter]:
        """Every A and B."""
        if trains != "lora":
            raise UserError(f"training.phases.trains: expected lora for kind lora, got {trains}")
        model.requires_grad_(False)
        return [parameter.requires_grad_(True) for parameter in _update(model).values()]

    def save(self, model: PreTrainedModel, settings: Method, folder: Path) -> None:
        """Write the update alone as peft does, so that PeftModel.from_pretrained reads it too."""
        save_parameters(_update(model), folder, TENSORS)
        config = model.peft_config[NAME].to_dict()
        (folder / SETTINGS).write_text(json.dumps(config, indent=2, sort_keys=True, default=sorted) + "\n")

    def restore(self, model: PreTrainedModel, settings: Method, folder: Path, *, window: int) -> PreTrainedModel:
        """Attach, and overwrite A and B."""
        self.attach(model, settings, window=window, seed=0)
        load_parameters(_update(model), folder, TENSORS)
        return model


def _targets(model: PreTrainedModel, settings: Method) -> dict[str, bool]:
    """The last part of the names of the matrices that get an update, and whether they are stored transposed."""
    names = settings.targets or (["c_attn"] if model.config.model_type == "gpt2" else ["q_proj", "v_proj"])
    modules: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        modules.setdefault(name.rpartition(".")[2], []).append(module)
    missing = [name for name in names if name not in modules]
    if missing:
        raise UserError(f"methods.targets: expected modules of {type(model).__name__}, got {', '.join(missing)}")
    head = model.get_output_embeddings()
    for name in names:
        if not all(isinstance(module, (nn.Linear, Conv1D)) and module is not head for module in modules[name]):
            raise UserError(
                f"methods.targets: expected matrices of the layers of {type(model).__name__} (Linear or Conv1D, "
                f"not the output embedding), got {name}, a {type(modules[name][0]).__name__}"
            )
    return {name: isinstance(modules[name][0], Conv1D) for name in names}


def _update(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every A [r, inputs] and B [outputs, r] under the name that peft's files give it."""
    return {
        PREFIX + name.replace(f".{NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }
