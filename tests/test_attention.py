"""Every way of computing Focus attention against the dense oracle in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from focus.attention import choose_backend, focus_attention, focus_attention_reference, plan, tiles
from focus.attention.reference import allowed_pairs
from focus.errors import UserError

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
WAYS = ["decomposed", "masked"]


def inputs(batch, heads, shared, queries, keys, width, *, dtype=torch.float64, device="cpu", token_major=False):
    """query, key, value with gradients, heads outermost in memory or tokens."""
    shapes = [(batch, heads * shared, queries, width), (batch, heads, keys, width), (batch, heads, keys, width)]
    tensors = []
    for b, h, t, d in shapes:
        x = torch.randn(b, t, h, d).transpose(1, 2) if token_major else torch.randn(b, h, t, d)
        tensors.append(x.to(device, dtype).requires_grad_())
    return tensors


def memberships(kind, batch, keys):
    """Groups of every kind that can occur."""
    many = torch.zeros(batch, keys, 6, dtype=torch.bool)
    return {
        "even": lambda: torch.randint(0, 4, (batch, keys)),
        "unbalanced": lambda: (torch.rand(batch, keys) * 1.3).long() * 5 - 2,
        "one": lambda: torch.full((batch, keys), 3),
        "each its own": lambda: torch.arange(keys).expand(batch, keys),
        "one-hot": lambda: torch.nn.functional.one_hot(torch.randint(0, 4, (batch, keys)), 5).bool(),
        "two of six": lambda: many.scatter(2, torch.rand(batch, keys, 6).topk(2).indices, True),
        "three of four": lambda: many[..., :4].scatter(2, torch.rand(batch, keys, 4).topk(3).indices, True),
        "any number, none too": lambda: torch.rand(batch, keys, 4) > 0.6,
    }[kind]()


KINDS = [
    "even",
    "unbalanced",
    "one",
    "each its own",
    "one-hot",
    "two of six",
    "three of four",
    "any number, none too",
]


def paddings(kind, keys):
    """Padding of two sequences: none, or the first left-padded and the second right-padded."""
    if kind == "none":
        return None
    real = torch.ones(2, keys, dtype=torch.bool)
    real[0, : keys // 3] = False
    real[1, keys - keys // 4 :] = False
    return real


def check(tensors, groups, way, tolerance=1e-11, **arguments):
    """Output, log-sum-exp and gradients equal the oracle's."""
    grad = torch.randn_like(tensors[0])
    results = []
    for backend in (way, "reference"):
        out, lse = focus_attention(*tensors, groups, backend=backend, return_lse=True, **arguments)
        results.append([out, lse.clamp(min=-1e9), *torch.autograd.grad(out, tensors, grad)])
    for name, ours, oracle in zip(("out", "lse", "query", "key", "value"), *results, strict=True):
        torch.testing.assert_close(ours, oracle, atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", ["none", "both"])
def test_every_membership_matches_the_oracle(device, way, kind, padding):
    torch.manual_seed(0)
    keys, groups, real = 150, memberships(kind, 2, 150).to(device), paddings(padding, 150)
    real = None if real is None else real.to(device)
    for queries in (keys, 37):
        tensors = inputs(2, 2, 2, queries, keys, 8, device=device)
        for window, sinks, sliding_window in ((0, 0, None), (16, 3, None), (7, 2, 40), (30, 1, 20), (keys, 0, None)):
            arguments = {"window": window, "sinks": sinks, "sliding_window": sliding_window, "padding_mask": real}
            check(tensors, groups, way, **arguments)


@pytest.mark.parametrize("way", WAYS)
def test_softcap_and_scale_match_the_oracle(way):
    torch.manual_seed(0)
    for kind in ("even", "two of six"):
        groups, real = memberships(kind, 2, 100), paddings("both", 100)
        tensors = inputs(2, 2, 2, 100, 100, 8)
        check(tensors, groups, way, window=9, sinks=2, softcap=3.0, scale=0.9, padding_mask=real)
        check(tensors, groups, way, window=9, sinks=torch.rand(2, 100) > 0.9, scale=0.2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_matches_the_oracle(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 10**6)))
    keys = draw(st.integers(1, 200))
    groups = memberships(draw(st.sampled_from(KINDS)), 2, keys)
    tensors = inputs(
        2,
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, keys)),
        keys,
        draw(st.sampled_from([4, 12])),
        token_major=draw(st.booleans()),
    )
    check(
        tensors,
        groups,
        draw(st.sampled_from(WAYS)),
        window=draw(st.integers(0, keys + 5)),
        sinks=draw(st.integers(0, 5)),
        sliding_window=draw(st.none() | st.integers(1, keys + 5)),
        padding_mask=draw(st.sampled_from([None, torch.rand(2, keys) > 0.2])),
        softcap=draw(st.sampled_from([None, 4.0])),
    )


@pytest.mark.parametrize("limit", [128, 6144])
def test_long_groups_match_the_oracle_in_tiles_and_in_one_call(limit, monkeypatch):
    monkeypatch.setattr(tiles, "CAUSAL_KERNEL", limit)
    torch.manual_seed(0)
    tensors = inputs(1, 1, 2, 1300, 1300, 8)
    check(tensors, torch.randint(0, 2, (1, 1300)), "decomposed", window=70, sinks=2)


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("counts", [(1030, 1020), (2300,), (600, 330, 70, 65, 64, 3)])
def test_blocks_at_once_match_the_oracle(counts, token_major):
    """Whole blocks of a group share calls, here with full and with broken last blocks at both sizes."""
    torch.manual_seed(0)
    groups = torch.cat([torch.full((n,), i) for i, n in enumerate(counts)])
    groups = groups[torch.randperm(len(groups))][None]
    tensors = inputs(1, 2, 2, groups.shape[1], groups.shape[1], 4, token_major=token_major)
    check(tensors, groups, "decomposed", window=5, sinks=2)


@pytest.mark.parametrize("counts", [(40, 40, 40), (64, 63, 1, 2), (300, 290, 257, 256, 240), (130, 20, 129, 65)])
def test_groups_side_by_side_match_the_oracle(counts, monkeypatch):
    """Groups of about one length share a segment: the copies that fill up the shorter ones reach no result."""
    monkeypatch.setattr(plan, "SHARED_ROWS", 2000)
    torch.manual_seed(0)
    groups = torch.cat([torch.full((n,), i) for i, n in enumerate(counts)])
    groups = torch.stack([groups[torch.randperm(len(groups))] for _ in range(2)])
    segments = plan.make_plan(groups.shape[1], groups, window=3).segments
    assert max(segment.groups for segment in segments) > 1
    assert sum(segment.queries for segment in segments) <= groups.numel()
    for padding in ("none", "both"):
        tensors = inputs(2, 2, 2, groups.shape[1], groups.shape[1], 4)
        real = paddings(padding, groups.shape[1])
        check(tensors, groups, "decomposed", window=3, sinks=2, padding_mask=real)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["even", "two of six"])
@pytest.mark.parametrize("way", WAYS)
def test_error_is_at_most_twice_that_of_plain_attention(device, dtype, kind, way):
    """Against float64 on the same rounded inputs; plain attention is the worse of two of PyTorch's ways."""
    torch.manual_seed(0)
    groups = memberships(kind, 2, 700).to(device)
    low = inputs(2, 2, 2, 700, 700, 32, dtype=dtype, device=device)
    high = [x.detach().double().requires_grad_() for x in low]
    grad = torch.randn_like(low[0])
    allowed = allowed_pairs(700, groups, window=20, sinks=2)[:, None]

    def results(out, tensors):
        return [out, *torch.autograd.grad(out, tensors, grad.to(out.dtype))]

    exact = results(focus_attention_reference(*high, groups, window=20, sinks=2), high)
    ours = results(focus_attention(*low, groups, window=20, sinks=2, backend=way), low)
    plain = []
    fused = SDPBackend.FLASH_ATTENTION if device == "cpu" else SDPBackend.EFFICIENT_ATTENTION
    shared = 1 if device == "cpu" else 2
    for backend in (SDPBackend.MATH, fused):
        with sdpa_kernel(backend):
            tensors = [low[0], *(x.repeat_interleave(shared, dim=1) for x in low[1:])]
            out = scaled_dot_product_attention(*tensors, attn_mask=allowed, enable_gqa=shared == 1)
            plain.append(results(out, low))
    for x, o, *p in zip(exact, ours, *plain, strict=True):
        assert o.dtype == dtype
        for size in (torch.max, torch.mean):
            assert size((o - x).abs()) <= 2 * max(size((y - x).abs()) for y in p)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_autocast_lowers_no_precision_and_dtypes_may_differ(way, softcap):
    torch.manual_seed(0)
    query, key, value = inputs(1, 1, 2, 200, 200, 8, dtype=torch.float32)
    value = value.detach().bfloat16().requires_grad_()
    arguments = {"window": 9, "sinks": 2, "softcap": softcap, "backend": way}
    groups = memberships("even", 1, 200)
    exact = focus_attention(query.double(), key.double(), value.double(), groups, **arguments)
    grads = torch.autograd.grad(exact.sum(), (query, key))
    with torch.autocast("cpu", torch.bfloat16):
        ours = focus_attention(query, key, value, groups, **arguments)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() < 5e-6
    for x, y in zip(torch.autograd.grad(ours.sum(), (query, key)), grads, strict=True):
        assert (x - y).abs().max() < 5e-5


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_read_before_it_is_written(way):
    torch.manual_seed(0)
    tensors = inputs(2, 1, 2, 300, 300, 8)
    torch.use_deterministic_algorithms(True)
    try:
        for kind in KINDS:
            groups = memberships(kind, 2, 300)
            check(tensors, groups, way, window=20, sinks=2, padding_mask=paddings("both", 300))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_nothing_earlier(way, kind):
    torch.manual_seed(0)
    groups = memberships(kind, 1, 200)
    query, key, value = inputs(1, 2, 1, 200, 200, 8, dtype=torch.float32)
    before = focus_attention(query, key, value, groups, window=10, sinks=2, backend=way)
    groups = groups.clone()
    groups[:, 150:] = groups[:, 150:].flip(1)
    changed = [torch.cat([x[:, :, :150], torch.randn(1, 2, 50, 8)], dim=2) for x in (query, key, value)]
    after = focus_attention(*changed, groups, window=10, sinks=2, backend=way)
    torch.testing.assert_close(before[:, :, :150], after[:, :, :150], atol=1e-6, rtol=0)


class _LargestTensor(TorchDispatchMode):
    """Records the most elements any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["even", "two of six"])
def test_no_array_grows_with_the_square_of_the_length(way, kind):
    torch.manual_seed(0)
    tensors, groups = inputs(1, 1, 1, 4096, 4096, 16, dtype=torch.float32), memberships(kind, 1, 4096)
    with _LargestTensor() as seen:
        focus_attention(*tensors, groups, window=64, sinks=2, backend=way).sum().backward()
    assert seen.largest <= 4096 * 160


def test_the_backend_is_chosen_and_named():
    query, _, value = inputs(1, 1, 1, 4096, 4096, 8)
    names = {kind: choose_backend(query, value, memberships(kind, 1, 4096)) for kind in KINDS}
    assert names["even"] == names["one-hot"] == names["two of six"] == "decomposed/cpu-flash"
    assert names["three of four"] == "full/cpu-flash"
    assert choose_backend(query[:, :, :8], value, memberships("three of four", 1, 4096)) == "full/cpu-flash"
    assert choose_backend(query[:, :, :8], value, memberships("even", 1, 4096)) == "masked/cpu-flash"
    assert choose_backend(query[:, :, :2000], value, memberships("two of six", 1, 4096)) == "masked/cpu-flash"
    assert choose_backend(query, value, memberships("even", 1, 4096), softcap=1.0) == "decomposed/dense"
    nearly_all = torch.rand(1, 4096, 5) > 0.3
    assert choose_backend(query, value, nearly_all) == "masked/cpu-flash"


def test_joining_more_than_half_of_the_groups_is_full_attention():
    torch.manual_seed(0)
    tensors = inputs(1, 2, 1, 600, 600, 8)
    full = scaled_dot_product_attention(*tensors, is_causal=True)
    out = focus_attention(*tensors, memberships("three of four", 1, 600), window=3)
    torch.testing.assert_close(out, full, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": torch.zeros(1, 9, dtype=torch.long)}, "groups: expected"),
        ({"backend": "fast"}, "backend: expected one of"),
        ({"key": torch.zeros(1, 3, 10, 4)}, "query heads"),
        ({"value": torch.zeros(1, 2, 9, 4)}, "expected query"),
    ],
)
def test_errors_say_what_was_expected(change, message):
    arguments = {
        "query": torch.zeros(1, 2, 10, 4),
        "key": torch.zeros(1, 2, 10, 4),
        "value": torch.zeros(1, 2, 10, 4),
        "groups": torch.zeros(1, 10, dtype=torch.long),
        "window": 2,
    } | change
    if "key" in change:
        arguments["value"] = change["key"]
    with pytest.raises(UserError, match=message):
        focus_attention(**arguments)
