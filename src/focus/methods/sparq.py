"""SparQ attention (arXiv 2312.04985): scores guessed from the largest components of the query choose the keys to read.

Each query keeps the r components of largest size and guesses softmax((q_r . k_r) / sqrt(D |q_r|_1 / |q|_1)) from them.
It reads the keys of largest guess, the most recent ones always among them, exactly. With mean reallocation the guessed
weight alpha of the keys read decides how much of the mean value is mixed in: alpha * out + (1 - alpha) * mean.
Where query heads share a key head they share components and keys: |q| and the guesses are summed over them (the paper
leaves mean reallocation out there; here it is a setting).

The paper decodes token by token after an exact prompt; here every query of a text is treated as a decoded one, and the
mean is that of the values up to it. Components that are not read are set to zero, which gives the same numbers but none
of the saved memory traffic. The guess is a constant to the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from focus.errors import UserError
from focus.method_config import Method
from focus.methods.selection import PairCounter, attend_to, causal_blocks, distances, nearest_top
from focus.methods.structural import Call, LayerState, Structural

SMALLEST = 1e-12


class SparQ(Structural):
    """Each query reads `settings.tokens` keys, its own counted, `settings.local` of them the most recent."""

    name = "sparq"

    def layer_state(self, settings: Method, *, window: int, heads: int, head_dim: int, generator) -> LayerState:
        """Nothing but the settings; UserError when a query has too few components."""
        if settings.components > head_dim:
            raise UserError(
                f"components of kind sparq: expected at most the head size of the model, {head_dim}, "
                f"got {settings.components}"
            )
        return LayerState(settings, window)

    def attend(self, call: Call) -> Tensor:
        """Guesses for some queries, then attention over the chosen keys."""
        call.state.backend = "scores, gathered"
        settings = call.state.settings
        counter, outputs = PairCounter(call.state), []
        means = running_mean(call) if settings.mean_reallocation else None
        for block in causal_blocks(call):
            with torch.no_grad():
                guesses = guessed_weights(block, settings.components)
                index, read = _choice(block, guesses.sum(dim=2))
            out = attend_to(block, index, read)
            counter.add(block, index, read)
            if means is not None:
                shared = index.unsqueeze(2).expand(-1, -1, guesses.shape[2], -1, -1)
                alpha = guesses.gather(-1, shared).sum(dim=-1, keepdim=True)
                first = block.offset - call.offset
                mean = means[:, :, first : first + out.shape[2]].unsqueeze(2)
                out = torch.lerp(mean, out.unflatten(1, guesses.shape[1:3]), alpha).flatten(1, 2)
            outputs.append(out)
        counter.report()
        return torch.cat(outputs[::-1], dim=2)


def guessed_weights(block: Call, components: int) -> Tensor:
    """The guessed weights [B, Hkv, H/Hkv, n, m] of all keys, zero for those that are not visible."""
    query = block.query.unflatten(1, (block.key.shape[1], -1))
    sizes = query.abs()
    chosen = sizes.sum(dim=2, keepdim=True).topk(components).indices.expand(*query.shape[:-1], -1)
    part = torch.zeros_like(query).scatter(-1, chosen, query.gather(-1, chosen))
    coverage = part.abs().sum(dim=-1, keepdim=True) / sizes.sum(dim=-1, keepdim=True).clamp(min=SMALLEST)
    scores = part @ block.key.unsqueeze(2).mT * (block.scale / coverage.clamp(min=SMALLEST).sqrt())
    if block.softcap is not None:
        scores = block.softcap * torch.tanh(scores / block.softcap)
    visible = block.visible(slice(None)).unsqueeze(1)
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).nan_to_num(0.0)


def running_mean(call: Call) -> Tensor:
    """The mean of the values that each query may see: [B, Hkv, Tq, D], in float32 at least."""
    real = torch.ones(1, 1, call.key.shape[2], 1, dtype=torch.float64, device=call.key.device)
    if call.padding_mask is not None:
        real = call.padding_mask[:, None, :, None].double()
    sums, counts = (call.value.double() * real).cumsum(dim=2), real.cumsum(dim=2)
    if call.sliding_window is not None:
        sums, counts = (_without_earlier(total, call.sliding_window) for total in (sums, counts))
    mean = (sums / counts.clamp(min=1))[:, :, call.offset :]
    return mean.to(torch.promote_types(call.value.dtype, torch.float32))


def _choice(block: Call, guesses: Tensor) -> tuple[Tensor, Tensor]:
    """For guesses [B, Hkv, n, m] the indices of the keys, and which of them are visible: [B, Hkv, n, tokens] each."""
    settings = block.state.settings
    order = guesses.masked_fill(distances(block) < settings.local, torch.inf)
    order = order.masked_fill(~block.visible(slice(None)), -torch.inf)
    index = nearest_top(order, settings.tokens)
    return index, order.gather(-1, index) > -torch.inf


def _without_earlier(total: Tensor, window: int) -> Tensor:
    """Running sums over the last `window` entries, from running sums over all."""
    return total - pad(total, (0, 0, window, 0))[:, :, : total.shape[2]]
