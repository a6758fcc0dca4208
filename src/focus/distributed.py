"""Training in several processes: each has a share of every batch and of every decoder layer's weights.

The decoder layers are sharded (FSDP2: a layer is whole only while it runs). Embeddings, head and what a method adds,
such as the float32 routers on a bfloat16 base, are whole in every process; their gradients are averaged. Shares are
equal, so that the averages are those of the whole batch. One process writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def size() -> int:
    """The processes of this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number; 0 is the one that writes."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def processes(count: int) -> Iterator[None]:
    """The process group of a launch (gloo, or nccl with a GPU each); only the first process prints. Nothing for one."""
    if count == 1:
        yield
        return
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    try:
        with ExitStack() as stack:
            if rank():
                stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            yield
    finally:
        dist.destroy_process_group()


def agreed(value: bool) -> bool:
    """What the first process says; the others wait for it."""
    if size() == 1:
        return value
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]


def shard(model: PreTrainedModel, base: Iterable[Tensor]) -> None:
    """Cut the weights of the decoder layers, in place; of the layers' parameters only those of `base` are cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    base = set(base)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = init_device_mesh(device.type, (size(),))
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        added = {parameter for parameter in layer.parameters() if parameter not in base}
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=added)
    model.to(device)


def gather(model: PreTrainedModel) -> None:
    """Make the model whole again, on the CPU of the first process, to be saved; elsewhere it can no longer be used."""
    if size() == 1:
        return
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                value = whole(parameter.detach())
                if rank() == 0:
                    setattr(module, name, nn.Parameter(value, requires_grad=parameter.requires_grad))


def share(batch: Tensor) -> Tensor:
    """This process's rows of a batch [B, T]."""
    return batch.chunk(size())[rank()]


def mean(value: float) -> float:
    """The average over the processes."""
    if size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / size()


@torch.no_grad()
def average(tensors: Iterable[Tensor | None]) -> None:
    """Average whole tensors over the processes, in place; parts of sharded ones are averaged already."""
    if size() == 1:
        return
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, DTensor) and tensor.is_floating_point():
            dist.all_reduce(tensor)
            tensor.div_(size())


def clip(parameters: Sequence[Tensor], largest: float) -> float:
    """Scale the gradients down to a norm of `largest` and return the norm before."""
    if size() == 1:
        return torch.nn.utils.clip_grad_norm_(parameters, largest).item()
    norms = []
    for group in _by_kind(parameters):
        norm = torch.nn.utils.get_total_norm([each.grad for each in group if each.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = torch.stack(norms).norm()
    for group in _by_kind(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, largest, norm, foreach=False)
    return norm.item()


def optimiser_groups(groups: Iterable[dict]) -> list[dict]:
    """The groups, with sharded and whole parameters apart."""
    return [group | {"params": part} for group in groups for part in _by_kind(group["params"])]


def _by_kind(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    parts = [[each for each in parameters if isinstance(each, DTensor) == sharded] for sharded in (False, True)]
    return [part for part in parts if part]


def whole(value: object) -> object:
    """`value` with every sharded tensor in it whole and on the CPU; all processes call it together."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, list) else value


def like(value: Tensor, place: Tensor) -> Tensor:
    """A whole tensor, cut as `place` is."""
    if not isinstance(place, DTensor) or value.dim() == 0:
        return value
    return distribute_tensor(value.to(place.device), place.device_mesh, place.placements)


def optimiser_state(saved: dict, optimiser: torch.optim.Optimizer) -> dict:
    """A saved state of the optimiser, cut as its parameters are."""
    places = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    cut = {key: {name: like(each, places[key]) for name, each in one.items()} for key, one in saved["state"].items()}
    return saved | {"state": cut}
