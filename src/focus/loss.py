"""Next-token losses of causal language models, without ever holding all logits.

With vocabularies of 50,000 entries the logits cost more than a small model's layers. They are made in pieces whose rows
fit a processor's cache, and the gradients of the piece follow at once, so that nothing is computed twice.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

PLAIN_HEADS = frozenset({"gpt2", "llama", "mistral", "olmo2", "qwen2"})
"""Model types whose logits are hidden states times one matrix and nothing else; others take the ordinary way."""

GEMM_ROWS = 512
SOFTMAX_ROWS = 8


def mean_loss(model, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each next token, in nats: tokens int64 [B, T] -> float32 scalar with gradients."""
    if model.config.model_type not in PLAIN_HEADS:
        return _logit_losses(model, tokens).mean()
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    weight = model.get_output_embeddings().weight
    return _HeadLoss.apply(hidden.flatten(0, 1), weight, tokens[:, 1:].flatten())


@torch.no_grad()
def token_losses(model, tokens: Tensor, *, first: int = 1) -> Tensor:
    """Cross entropy of the tokens from position `first` on, in nats: int64 [B, T] -> float32 [B, T - first]."""
    if model.config.model_type not in PLAIN_HEADS:
        return _logit_losses(model, tokens)[:, first - 1 :]
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, first - 1 : -1]
    weight = model.get_output_embeddings().weight
    dtype = _product_dtype(hidden)
    weight, rows = weight.to(dtype), hidden.flatten(0, 1).to(dtype)
    losses = [
        cross_entropy((part @ weight.T).float(), labels, reduction="none")
        for part, labels in zip(
            rows.split(GEMM_ROWS), tokens[:, first:].flatten().to(rows.device).split(GEMM_ROWS), strict=True
        )
    ]
    return torch.cat(losses).reshape(len(tokens), -1)


class _HeadLoss(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T`; the gradients are made in the forward pass.

    hidden [N, d], weight [V, d], labels int64 [N] -> float32 scalar. Products take autocast's dtype,
    softmax float32.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        dtype, labels = _product_dtype(hidden), labels.to(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = weight.to(dtype)
            hidden_gradient = torch.empty_like(hidden)
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
            total = hidden.new_zeros((), dtype=torch.float32)
            for start in range(0, len(hidden), GEMM_ROWS):
                rows = slice(start, start + GEMM_ROWS)
                part = hidden[rows].to(dtype)
                logits = part @ matrix.T
                total += _softmax_minus_target(logits, labels[rows])
                hidden_gradient[rows] = logits @ matrix
                if weight_gradient is not None:
                    weight_gradient += logits.T @ part
        ctx.gradients = hidden_gradient, weight_gradient
        ctx.count, ctx.weight_dtype = len(hidden), weight.dtype
        return total / len(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden_gradient, weight_gradient = ctx.gradients
        scale = gradient / ctx.count
        hidden_gradient = (hidden_gradient * scale).to(hidden_gradient.dtype)
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * scale).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None


def _softmax_minus_target(logits: Tensor, labels: Tensor) -> Tensor:
    """Turn logits [n, V] in place into their gradients softmax - onehot(labels); return the sum of the losses.

    The log-sum-exp comes from the largest entry, whose probability is at least 1/V and never underflows.
    """
    total = logits.new_zeros((), dtype=torch.float32)
    for rows, targets in zip(logits.split(SOFTMAX_ROWS), labels[:, None].split(SOFTMAX_ROWS), strict=True):
        target = rows.gather(1, targets)[:, 0].float()
        probabilities = torch.softmax(rows, dim=-1, dtype=torch.float32)
        total += (rows.amax(dim=-1).float() - probabilities.amax(dim=-1).log() - target).sum()
        probabilities.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=torch.float32))
        rows.copy_(probabilities)
    return total


def _product_dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def _logit_losses(model, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    labels = tokens[:, 1:].to(logits.device)
    return cross_entropy(logits.transpose(1, 2), labels, reduction="none")
