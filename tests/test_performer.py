"""Linear attention by random features: the estimate, its chunked sums, and what keeps them in range."""

from dataclasses import replace

import pytest
import torch
from selection_calls import CASES as ALL_CASES
from selection_calls import assert_same, attend, full_attention, make_call, real_queries

from focus.attention.reference import causal_pairs
from focus.errors import UserError
from focus.methods import performer
from focus.methods.performer import log_features, orthogonal_directions

CASES = [case for case in ALL_CASES if not {"softcap", "sliding_window"} & case.keys()]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks a call, of a size that does not divide its length."""
    monkeypatch.setattr(performer, "CHUNK", 10)


def test_directions_are_orthogonal_and_as_long_as_normal_vectors():
    directions = orthogonal_directions(1600, 16, torch.Generator().manual_seed(0))
    products = directions[:16] @ directions[:16].T
    torch.testing.assert_close(products, products.diagonal().diag(), atol=1e-4, rtol=0)
    assert directions.square().sum(dim=1).mean().item() == pytest.approx(16, rel=0.05)
    assert directions.mean(dim=0).abs().max() < 5 / 1600**0.5
    assert orthogonal_directions(20, 16, torch.Generator().manual_seed(0)).shape == (20, 16)


def test_the_kernel_is_estimated_without_bias():
    generator = torch.Generator().manual_seed(0)
    query, key = 0.5 * torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    estimates = []
    for _ in range(400):
        directions = orthogonal_directions(64, 8, generator).double()
        features = [log_features(vectors, directions).exp() for vectors in (query, key)]
        estimates.append(features[0] @ features[1].T / 64)
    estimates = torch.stack(estimates)
    errors = (estimates.mean(dim=0) - (query @ key.T).exp()) / (estimates.std(dim=0) / 400**0.5)
    assert errors.abs().max() < 4.5


def linear_by_definition(call):
    """The features' attention as a matrix of all pairs, and its output."""
    root, directions = call.scale**0.5, call.state.directions.double()
    shared = call.query.shape[1] // call.key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (call.key, call.value))
    features = [log_features(vectors * root, directions).exp() for vectors in (call.query, key)]
    pairs = causal_pairs(call.query.shape[2], call.key.shape[2], None, call.padding_mask, "cpu").unsqueeze(1)
    weights = (features[0] @ features[1].mT) * pairs
    return weights @ value / weights.sum(dim=-1, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunked_sums_are_the_naive_ones(case):
    call = make_call("performer", **case)
    assert_same(call, attend(call), linear_by_definition(call))


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_gradients_of_chunked_sums_are_the_naive_ones(padding):
    call = make_call("performer", padding=padding)
    wanted = torch.randn(call.query.shape, dtype=torch.float64) * real_queries(call)[:, None, :, None]
    gradients = []
    for function in (attend, linear_by_definition):
        tensors = [tensor.clone().requires_grad_() for tensor in (call.query, call.key, call.value)]
        out = function(replace(call, **dict(zip(("query", "key", "value"), tensors, strict=True))))
        gradients.append(torch.autograd.grad((out * wanted).sum(), tensors))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


def test_many_features_approach_softmax():
    errors = []
    for features in (8, 4096):
        call = make_call("performer", features=features, spread=0.7)
        errors.append((attend(call) - full_attention(call)).square().mean().item())
    assert errors[1] < errors[0] / 20 and errors[1] < 1e-3


def test_large_keys_leave_no_query_without_an_answer():
    call = make_call("performer", spread=30.0)
    single = {name: getattr(call, name).float().requires_grad_() for name in ("query", "key", "value")}
    out = attend(replace(call, **single))
    torch.testing.assert_close(out[:, :, 0], single["value"].repeat_interleave(2, dim=1)[:, :, 0])
    assert out.isfinite().all() and out.abs().max() <= single["value"].abs().max() + 1e-4
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), list(single.values())))


@pytest.mark.parametrize("name", ["softcap", "sliding_window"])
def test_performer_refuses_what_a_kernel_cannot_do(name):
    with pytest.raises(UserError, match=f"kind performer: expected a model whose attention has no {name}, got 9"):
        attend(make_call("performer", **{name: 9}))
