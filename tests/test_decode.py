"""Decoding through the grouped cache against the full forward, dense, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import DEVICES

from focus.attention import focus_attention_reference
from focus.attention.decode import GroupedCache
from focus.errors import UserError


def sequences(length, kind, batch=2, heads=2, shared=2, width=6):
    """query, key, value and groups of whole sequences."""
    query = torch.randn(batch, heads * shared, length, width, dtype=torch.float64)
    key, value = (torch.randn(batch, heads, length, width, dtype=torch.float64) for _ in range(2))
    groups = {
        "one of four": lambda: torch.randint(0, 4, (batch, length)),
        "each its own": lambda: torch.arange(length).expand(batch, length),
        "two of five": lambda: torch.rand(batch, length, 5).argsort(-1) < 2,
        "any number, none too": lambda: torch.rand(batch, length, 4) > 0.6,
    }[kind]()
    return query, key, value, groups


KINDS = ["one of four", "each its own", "two of five", "any number, none too"]


def fed(cache, tensors, sizes, real=None, start=0):
    """Feed chunks of the given sizes and join what comes out."""
    outs = []
    for size in sizes:
        part = slice(start, start + size)
        query, key, value = (x[:, :, part] for x in tensors[:3])
        outs.append(cache.attend(query, key, value, tensors[3][:, part], None if real is None else real[:, part]))
        start += size
    return torch.cat(outs, dim=2)


def assert_close(ours, exact):
    torch.testing.assert_close(ours, exact, atol=1e-11, rtol=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_split_into_chunks_equals_the_full_forward(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 10**6)))
    sizes = draw(st.lists(st.sampled_from([1, 1, 1, 2, 7, 30]), min_size=1, max_size=40))
    length = sum(sizes)
    tensors = sequences(length, draw(st.sampled_from(KINDS)), shared=draw(st.integers(1, 3)))
    real = draw(st.sampled_from([None, torch.arange(length) >= torch.tensor([[0], [length // 3]])]))
    mask = {
        "window": draw(st.integers(0, 20)),
        "sinks": draw(st.integers(0, 3)),
        "sliding_window": draw(st.none() | st.integers(1, 60)),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "scale": draw(st.sampled_from([None, 0.4])),
    }
    assert_close(
        fed(GroupedCache(**mask), tensors, sizes, real), focus_attention_reference(*tensors, **mask, padding_mask=real)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_long_after_the_short_store_was_cut(kind, device):
    torch.manual_seed(0)
    tensors = [x.to(device) for x in sequences(1500, kind, heads=1)]
    cache = GroupedCache(window=5, sinks=2)
    ours = fed(cache, tensors, [700, *[1] * 100, 600, *[1] * 100])
    assert_close(ours, focus_attention_reference(*tensors, window=5, sinks=2))
    assert cache.length == 1500
    assert all(row.near.count < 800 for row in cache.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_beams_are_reordered_and_grow_apart(kind):
    torch.manual_seed(0)
    tensors = sequences(60, kind, batch=3)
    index = torch.tensor([2, 0, 2])
    cache = GroupedCache(window=4, sinks=1)
    fed(cache, tensors, [30, 1, 1])
    cache.reorder(index)
    rest = sequences(8, kind, batch=3)
    rest = [*rest[:3], tensors[3][:, 32:40]]
    grown = [torch.cat([x[index][:, :, :32], y], dim=2) for x, y in zip(tensors[:3], rest[:3], strict=True)]
    groups = torch.cat([tensors[3][index][:, :32], rest[3]], dim=1)
    exact = focus_attention_reference(*grown, groups, window=4, sinks=1)
    assert_close(fed(cache, rest, [1] * 8), exact[:, :, 32:])


@pytest.mark.parametrize("kind", KINDS)
def test_cropped_tokens_are_forgotten(kind):
    torch.manual_seed(0)
    tensors = sequences(900, kind)
    real = torch.arange(900) >= torch.tensor([[0], [40]])
    cache = GroupedCache(window=9, sinks=2)
    fed(cache, tensors, [800, 1, 1], real)
    for length in (790, 200):
        cache.crop(length)
        assert cache.length == length
        other = [torch.cat([x[:, :, :length], torch.randn_like(x[:, :, :5])], dim=2) for x in tensors[:3]]
        whole = [*other, torch.cat([tensors[3][:, :length], tensors[3][:, 850:855]], dim=1)]
        seen = torch.cat([real[:, :length], torch.ones(2, 5, dtype=torch.bool)], dim=1)
        exact = focus_attention_reference(*whole, window=9, sinks=2, padding_mask=seen)
        assert_close(fed(cache, whole, [1] * 5, seen, start=length), exact[:, :, length:])


def test_nothing_is_read_before_it_is_written():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    try:
        tensors = sequences(200, "two of five")
        ours = fed(GroupedCache(window=5, sinks=2), tensors, [100, *[1] * 100])
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(ours, focus_attention_reference(*tensors, window=5, sinks=2))


def test_a_token_reads_its_own_group_only():
    """Keys of other groups, beyond the window and no sinks, may be anything."""
    torch.manual_seed(0)
    query, key, value, groups = sequences(200, "one of four", batch=1)
    groups[:, -1] = 0
    exact = focus_attention_reference(query, key, value, groups, window=3)[:, :, -1:]
    unread = (groups[0] != 0) & (torch.arange(200) < 196)
    key[:, :, unread] = float("nan")
    cache = GroupedCache(window=3)
    ours = fed(cache, (query, key, value, groups), [196, 1, 1, 1, 1])
    assert_close(ours[:, :, -1:], exact)


def test_groups_that_do_not_fit_are_refused():
    x = torch.zeros(1, 1, 8, 4)
    with pytest.raises(UserError, match="groups: expected"):
        GroupedCache(window=2).attend(x, x, x, torch.zeros(1, 7, dtype=torch.long))
