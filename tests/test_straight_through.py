"""The straight-through estimate against its definition: a dense bias that is zero forward and lam * g_i . g_j back."""

import pytest
import torch

from focus.attention import focus_attention, straight_through_attention
from focus.attention.reference import allowed_pairs, dense_attention
from focus.errors import UserError


@pytest.mark.parametrize("backend", ["decomposed", "masked"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_forward_is_hard_and_the_gradient_is_that_of_the_bias(backend, top_k, padded):
    torch.manual_seed(0)
    length = 140
    tensors = [torch.randn(2, h, length, 6, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    assignment = torch.softmax(2 * torch.randn(2, length, 5, dtype=torch.float64), dim=-1).requires_grad_()
    groups = torch.zeros(2, length, 5, dtype=torch.bool).scatter(2, assignment.topk(top_k).indices, True)
    real = torch.arange(length) >= torch.tensor([[0], [30]]) if padded else None
    mask = {"window": 12, "sinks": 2, "padding_mask": real}
    ours = straight_through_attention(*tensors, groups, assignment, steepness=7.0, backend=backend, **mask)
    torch.testing.assert_close(ours, focus_attention(*tensors, groups, backend=backend, **mask), atol=1e-12, rtol=0)

    bias = 7.0 * assignment @ assignment.transpose(1, 2)
    exact = dense_attention(*tensors, allowed_pairs(length, groups, **mask), bias=bias - bias.detach())
    torch.testing.assert_close(ours, exact, atol=1e-12, rtol=0)
    grad = torch.randn_like(exact)
    inputs = [*tensors, assignment]
    for x, y in zip(*(torch.autograd.grad(out, inputs, grad) for out in (ours, exact)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-11, rtol=0)


def test_a_wrong_assignment_is_refused():
    x = torch.zeros(1, 1, 8, 4)
    with pytest.raises(UserError, match="assignment: expected"):
        straight_through_attention(x, x, x, torch.zeros(1, 8).long(), torch.zeros(1, 7, 3), steepness=1.0, window=2)
