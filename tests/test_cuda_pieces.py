"""The CUDA pieces without a device: what they hand to PyTorch's operators, and the arithmetic around these.

Kernels that compute what the CUDA ones are documented to compute, and refuse what those refuse, stand in on the CPU.
They say nothing about the CUDA kernels themselves.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from focus.attention import flash, focus_attention_reference
from focus.attention.decomposed import decomposed_attention
from focus.attention.dense import MASKED, Dense
from focus.attention.flash import CudaEfficient, CudaFlash, FlashAttn, choose_pieces
from focus.attention.masked import masked_attention
from focus.attention.plan import make_plan


def plain(query, key, value, added=None, causal=False, scale=None, softcap=None):
    """Attention and lse in float64; added [N, H, Tq, Tk]."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(shared, dim=1) for x in (key, value))
    scores = query.double() @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if added is not None:
        scores = scores + added.double()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value, lse, scores, value


def plain_backward(grad, query, key, value, out, lse, **arguments):
    """Gradients with the weights exp(scores - lse) and grad . out of the whole attention, as flash kernels do."""
    shared, scale, softcap = query.shape[1] // key.shape[1], arguments["scale"], arguments.get("softcap")
    _, _, scores, values = plain(query, key, value, **arguments)
    keys = key.double().repeat_interleave(shared, dim=1)
    weights = torch.exp(scores - lse.double().unsqueeze(-1))
    inner = (grad.double() * out.double()).sum(-1, keepdim=True)
    slope = weights * (grad.double() @ values.mT - inner) * scale
    if softcap is not None:
        slope = slope * (1 - torch.where(scores.isfinite(), scores / softcap, 0.0) ** 2)
    of_keys = (slope.mT @ query.double(), weights.mT @ grad.double())
    of_keys = [x.unflatten(1, (-1, shared)).sum(2) for x in of_keys]
    return [x.to(query.dtype) for x in (slope @ keys, *of_keys)]


def fits_flash(query, key, value, causal):
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.shape[3] % 8 == 0
    assert query.shape[3] <= 256
    assert all(x.stride(3) == 1 for x in (query, key, value))
    assert not causal or query.shape[2] == key.shape[2]


def flash_forward(query, key, value, dropout=0.0, causal=False, debug=False, *, scale=None):
    fits_flash(query, key, value, causal)
    out, lse, *_ = plain(query, key, value, causal=causal, scale=scale)
    empty = query.new_empty(0)
    shape = query.shape[2], key.shape[2]
    return out.to(query.dtype), lse.float(), None, None, *shape, empty, empty, empty


def flash_backward(
    grad, query, key, value, out, lse, seq_q, seq_k, max_q, max_k, dropout, causal, seed, offset, *, scale=None
):
    fits_flash(query, key, value, causal)
    assert (max_q, max_k, dropout, seq_q, seq_k) == (query.shape[2], key.shape[2], 0.0, None, None)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    return tuple(plain_backward(grad, query, key, value, out, lse, causal=causal, scale=scale))


def fits_efficient(query, key, value, bias):
    assert query.dtype in (torch.float32, torch.bfloat16, torch.float16)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert query.shape[3] % 8 == 0
    assert all(x.stride(3) == 1 and x.stride(2) % 8 == 0 for x in (query, key, value))
    if bias is not None:
        assert bias.dtype == query.dtype
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.stride(3) == 1
        assert all(step % 8 == 0 for step in bias.stride()[:3])
        assert bias.isfinite().all()


def efficient_forward(query, key, value, bias, compute_lse, dropout=0.0, causal=False, *, scale=None):
    fits_efficient(query, key, value, bias)
    assert compute_lse
    out, lse, *_ = plain(query, key, value, bias, causal, scale)
    out = out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.nn.functional.pad(lse.float(), (0, -lse.shape[2] % 32), value=torch.inf)
    return out, lse, query.new_empty((), dtype=torch.long), query.new_empty((), dtype=torch.long)


def efficient_backward(
    grad, query, key, value, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None
):
    fits_efficient(query, key, value, bias)
    assert list(wanted) == [True, True, True, False]
    assert lse.shape[2] % 32 == 0
    assert lse.is_contiguous()
    assert out.transpose(1, 2).is_contiguous()
    grads = plain_backward(
        grad, query, key, value, out, lse[:, :, : query.shape[2]], added=bias, causal=causal, scale=scale
    )
    return *grads, None


@pytest.fixture
def stand_ins():
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_flash_attention", flash_forward, "CPU", allow_override=True)
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU", allow_override=True)
    library.impl("_scaled_dot_product_efficient_attention", efficient_forward, "CPU", allow_override=True)
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU", allow_override=True)
    yield
    library._destroy()


@pytest.fixture
def flash_attn(monkeypatch):
    """A package with the functions and parameters of flash-attn 2.7."""

    def forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        fits_flash(query, key, value, causal)
        out, lse, *_ = plain(query, key, value, None, causal, softmax_scale, softcap)
        return out.to(q.dtype).transpose(1, 2), lse.float(), None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        arguments = {"causal": causal, "scale": softmax_scale, "softcap": softcap}
        for target, grad in zip((dq, dk, dv), plain_backward(*tensors, softmax_lse, **arguments), strict=True):
            target.copy_(grad.transpose(1, 2))

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface._wrapped_flash_attn_forward, interface._wrapped_flash_attn_backward = forward, backward
    package.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    flash._flash_attn.cache_clear()
    yield
    flash._flash_attn.cache_clear()


CASES = [
    (CudaEfficient(0.3), torch.float32, 1e-5),
    (CudaEfficient(), torch.float16, 4e-3),
    (CudaFlash(0.3), torch.bfloat16, 3e-2),
    (CudaFlash(), torch.float16, 4e-3),
    (FlashAttn(0.3, 2.0), torch.bfloat16, 3e-2),
]


@pytest.mark.parametrize(("pieces", "dtype", "tolerance"), CASES)
@pytest.mark.parametrize("kind", ["whole", "causal", "causal, more keys", "masked", "masked by block"])
@pytest.mark.parametrize("width", [8, 12])
def test_pieces_equal_dense_ones(pieces, dtype, tolerance, kind, width, stand_ins, flash_attn):
    """Forward, and backward given the output and lse of a larger attention."""
    torch.manual_seed(0)
    keys = 37 if kind == "causal" else 45
    query, key, value = (torch.randn(3, h, t, width).to(dtype) for h, t in ((4, 37), (2, keys), (2, keys)))
    mask, causal = None, kind.startswith("causal")
    if kind.startswith("masked"):
        masked = torch.rand(3 if "block" in kind else 1, 1, 37, keys) > 0.5
        masked[:, :, 5] = True
        mask = torch.zeros(masked.shape).masked_fill_(masked, MASKED)
    dense = Dense(pieces.scale, pieces.softcap)
    out, lse = pieces.forward(query, key, value, mask, causal)
    exact, exact_lse = dense.forward(query.double(), key.double(), value.double(), mask, causal)
    seen = exact_lse > -1e4
    assert (lse[~seen] < -1e4).all()
    assert seen.any()
    torch.testing.assert_close(lse[seen].double(), exact_lse[seen], atol=tolerance, rtol=0)
    torch.testing.assert_close(out[seen].double(), exact[seen], atol=tolerance, rtol=0)
    grad, whole = torch.randn_like(query), torch.randn_like(query)
    whole_lse = torch.where(seen, exact_lse, 0.0).float() + torch.rand(lse.shape)
    ours = pieces.backward(grad, query, key, value, whole, whole_lse, mask, causal)
    high = (x.double() for x in (grad, query, key, value, whole, whole_lse))
    for x, y, like in zip(ours, dense.backward(*high, mask, causal), (query, key, value), strict=True):
        assert x.shape == like.shape
        torch.testing.assert_close(x.double(), y, atol=tolerance * y.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("pieces", "dtype", "tolerance"), [CASES[0], (CudaFlash(0.3), torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("kind", ["one", "several"])
@pytest.mark.parametrize("way", ["decomposed", "masked"])
@pytest.mark.parametrize("shared", [1, 2])
def test_whole_attention_through_them_equals_the_oracle(pieces, dtype, tolerance, kind, way, shared, stand_ins):
    torch.manual_seed(0)
    groups = torch.randint(0, 3, (2, 300)) if kind == "one" else torch.rand(2, 300, 5).argsort(-1) < 2
    low = [torch.randn(2, h, 300, 16).to(dtype).requires_grad_() for h in (2 * shared, 2, 2)]
    high = [x.detach().double().requires_grad_() for x in low]
    real = torch.arange(300) >= torch.tensor([[0], [40]])
    mask = {"window": 20, "sinks": 2, "padding_mask": real}
    exact = focus_attention_reference(*high, groups, **mask, scale=0.3)
    if way == "masked":
        ours = masked_attention(*low, groups, pieces, **mask)[0]
    else:
        ours = decomposed_attention(*low, make_plan(300, groups, **mask), pieces)[0]
    assert ours.dtype == dtype
    grad = torch.randn_like(exact)
    results = [
        [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))] for out, inputs in ((ours, low), (exact, high))
    ]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x.double(), y, atol=tolerance * y.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("pieces", "dtype", "_"), CASES[:4])
@pytest.mark.parametrize("masked", [False, True])
def test_the_operators_for_cuda_take_what_they_are_given(pieces, dtype, _, masked):
    """Tensors without memory run the operators' schemas and shape rules, not their kernels."""
    query, key, value = (torch.empty(3, h, 40, 12, dtype=dtype, device="meta") for h in (4, 2, 2))
    mask = torch.empty(1, 1, 40, 40, device="meta") if masked else None
    out, lse = pieces.forward(query, key, value, mask, not masked)
    grads = pieces.backward(out, query, key, value, out, lse, mask, not masked)
    assert (out.shape, out.dtype) == (query.shape, dtype)
    assert (lse.shape, lse.dtype) == (query.shape[:3], torch.float32)
    for x, like in zip(grads, (query, key, value), strict=True):
        assert (x.shape, x.dtype) == (like.shape, dtype)


def test_the_choice_by_device_dtype_width_and_cap(flash_attn, monkeypatch):
    def name(device, dtype, width=64, softcap=None):
        with FakeTensorMode():
            x = torch.empty(1, 1, 1, width, dtype=dtype, device=device)
            return choose_pieces(x, x, scale=None, softcap=softcap).name

    for low in (torch.bfloat16, torch.float16):
        assert name("cuda", low) == "cuda-flash"
        assert name("cuda", low, width=320) == "cuda-efficient"
        assert name("cuda", low, softcap=5.0) == "flash-attn"
    assert name("cuda", torch.float32) == "cuda-efficient"
    assert name("cuda", torch.float64) == name("cuda", torch.float32, softcap=5.0) == "dense"
    assert name("cpu", torch.bfloat16) == "cpu-flash"
    assert name("cpu", torch.bfloat16, softcap=5.0) == "dense"
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash._flash_attn.cache_clear()
    assert name("cuda", torch.bfloat16, softcap=5.0) == "dense"
