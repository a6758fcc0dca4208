"""The exponential gate in the head dimension against its definition, dense."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from focus.attention.reference import causal_pairs, dense_attention, near_pairs, sink_keys
from focus.attention.soft import soft_attention
from focus.errors import UserError


def dense(query, key, value, assignment, *, steepness, window, sinks=0, scale=None, sliding_window=None, real=None):
    """score + lam * (g_i . g_j - 1) for pairs farther than the window whose key is no sink."""
    length, device = key.shape[2], key.device
    bias = steepness * (assignment @ assignment.transpose(1, 2) - 1)
    near = near_pairs(length, length, window, device) | sink_keys(length, sinks, real, device)[:, None]
    allowed = causal_pairs(length, length, sliding_window, real, device)
    return dense_attention(query, key, value, allowed, bias=bias.masked_fill(near, 0.0), scale=scale)


def inputs(length, heads=2, shared=2, width=6, groups=3):
    tensors = [
        torch.randn(2, heads * shared, length, width, dtype=torch.float64),
        torch.randn(2, heads, length, width, dtype=torch.float64),
        torch.randn(2, heads, length, width, dtype=torch.float64),
        torch.softmax(3 * torch.randn(2, length, groups, dtype=torch.float64), dim=-1),
    ]
    return [x.requires_grad_() for x in tensors]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_output_and_gradients_match_the_dense_gate(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 10**6)))
    length = draw(st.integers(1, 160))
    tensors = inputs(length, draw(st.integers(1, 2)), draw(st.integers(1, 3)), groups=draw(st.integers(1, 9)))
    real = draw(st.sampled_from([None, torch.rand(2, length) > 0.2]))
    arguments = {
        "steepness": draw(st.sampled_from([0.5, 10.0])),
        "window": draw(st.integers(0, length + 3)),
        "sinks": draw(st.sampled_from([0, 3, torch.rand(2, length) > 0.9])),
        "scale": draw(st.sampled_from([None, 0.7])),
        "sliding_window": draw(st.none() | st.integers(1, length + 3)),
    }
    grad = torch.randn_like(tensors[0])
    ours = soft_attention(*tensors, padding_mask=real, **arguments)
    exact = dense(*tensors, real=real, **arguments)
    torch.testing.assert_close(ours, exact, atol=1e-11, rtol=0)
    for x, y in zip(*(torch.autograd.grad(out, tensors, grad) for out in (ours, exact)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-10, rtol=0)


def test_single_precision_stays_close():
    torch.manual_seed(0)
    tensors = [x.detach() for x in inputs(600, width=32)]
    exact = dense(*tensors, steepness=10.0, window=20, sinks=2)
    for dtype, tolerance in ((torch.float32, 5e-6), (torch.bfloat16, 5e-2)):
        ours = soft_attention(
            *(x.to(dtype) for x in tensors[:3]), tensors[3].float(), steepness=10.0, window=20, sinks=2
        )
        assert ours.dtype == dtype
        assert (ours - exact).abs().max() < tolerance


class _LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside hold at once."""

    def __init__(self):
        super().__init__()
        self.storages, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return result


def test_memory_grows_linearly_from_1k_to_16k():
    most = {}
    for length in (1024, 16384):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3))
        assignment = torch.softmax(torch.randn(1, length, 4), dim=-1).requires_grad_()
        with _LiveBytes() as live:
            soft_attention(query, key, value, assignment, steepness=10.0, window=64, sinks=2).sum().backward()
        most[length] = live.most
    assert most[16384] <= 18 * most[1024]


def test_a_wrong_assignment_is_refused():
    x = torch.zeros(1, 1, 8, 4)
    with pytest.raises(UserError, match="assignment: expected"):
        soft_attention(x, x, x, torch.zeros(1, 7, 3), steepness=1.0, window=2)
