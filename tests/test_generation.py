"""Cached decoding equals the full forward, and the memory follows whatever happens to the cache."""

import pytest
import torch
from test_adapter import FAMILIES, SMALL, logits, padding, positions, tiny, tokens
from transformers import DynamicCache, StaticCache

from focus import FocusConfig, compose, switch
from focus.errors import UserError
from focus.memory import Memory, memory_of

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def composed(family, attention="hard", **settings):
    model = compose(tiny(family), FocusConfig(**SMALL, **settings))
    switch(model, attention)
    return model


@torch.no_grad()
def stepwise(model, ids, steps, mask=None, cache=None):
    """Logits of a forward cut at `steps` (positions where a new call begins), through one cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    place = torch.arange(ids.shape[1]).expand_as(ids) if mask is None else positions(mask)
    pieces = []
    for start, stop in zip([0, *steps], [*steps, ids.shape[1]], strict=True):
        arguments = {} if mask is None else {"attention_mask": mask[:, :stop].long()}
        piece = model(ids[:, start:stop], cache=cache, position_ids=place[:, start:stop], **arguments)
        pieces.append(piece.logits)
    return torch.cat(pieces, dim=1), cache


@pytest.mark.parametrize("balance", ["potentials", "softmax"])
@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_decoding_equals_the_full_forward(family, side, attention, balance):
    model, ids = composed(family, attention, balance=balance), tokens()
    mask = None if side is None else padding(side)
    full = logits(
        model, ids, **({} if mask is None else {"attention_mask": mask.long(), "position_ids": positions(mask)})
    )
    by_one, _ = stepwise(model, ids, list(range(10, 24)), mask)
    in_pieces, _ = stepwise(model, ids, [3, 12, 13, 20], mask)
    real = slice(None) if mask is None else mask
    torch.testing.assert_close(by_one[real], full[real], **CLOSE)
    torch.testing.assert_close(in_pieces[real], full[real], **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_serves_too(family):
    model, ids = composed(family), tokens()
    cache = StaticCache(config=model.config, max_cache_len=40)
    got, _ = stepwise(model, ids, list(range(5, 24)), cache=cache)
    torch.testing.assert_close(got, logits(model, ids), **CLOSE)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_with_a_cache_equals_generate_without(family, attention, arguments):
    model, ids, mask = composed(family, attention, top_k=2), tokens(), padding("left")
    ids = ids.masked_fill(~mask, 0)
    common = {
        "attention_mask": mask.long(),
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        **arguments,
    }
    cached = model.generate(ids, use_cache=True, **common)
    assert cached.shape[1] == 36
    assert torch.equal(cached, model.generate(ids, use_cache=False, **common))
    switch(model, "full")
    assert not torch.equal(cached, model.generate(ids, use_cache=True, **common))


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma2"])
def test_the_memory_follows_the_cache(family):
    model, ids = composed(family), tokens()
    full = logits(model, ids)

    def after(steps, change, rows):
        _, cache = stepwise(model, ids[:, :18], steps)
        change(cache)
        with torch.no_grad():
            rest = model(ids[rows, 18:], cache=cache, position_ids=torch.arange(18, 24)[None]).logits
        torch.testing.assert_close(rest, full[rows, 18:], **CLOSE)

    after([7], lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0])
    after([7], lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1])
    after([7], lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma2"])
def test_cropped_tokens_are_forgotten(family):
    model, ids = composed(family), tokens()
    other = torch.cat([ids[:, :15], tokens(seed=5)[:, 15:19]], dim=1)
    cache = DynamicCache(config=model.config)
    stepwise(model, other[:, :2], [], cache=cache)
    cache.activate_past_recording()
    with torch.no_grad():
        model(other[:, 2:], cache=cache)
        cache.crop(-4)
        rest = model(ids[:, 15:], cache=cache).logits
    torch.testing.assert_close(rest, logits(model, ids)[:, 15:], **CLOSE)


def test_a_reset_cache_starts_anew():
    model = composed("mistral")
    _, cache = stepwise(model, tokens(seed=4), [8])
    cache.reset()
    got, _ = stepwise(model, tokens(), [8], cache=cache)
    torch.testing.assert_close(got, logits(model, tokens()), **CLOSE)


def test_a_sliding_layer_remembers_no_more_than_its_keys():
    model = composed("gemma2")
    _, cache = stepwise(model, tokens(), list(range(4, 24)))
    assert all(isinstance(layer, Memory) for layer in cache.layers)
    lengths = [memory_of(cache, layer).assignments.shape[1] for layer in range(3)]
    assert lengths == [layer.keys.shape[2] for layer in cache.layers] == [8, 24, 8]


def test_sinkhorn_cannot_decode_and_says_so():
    model = composed("llama-gqa", balance="sinkhorn")
    with pytest.raises(
        UserError, match=r"sinkhorn cannot decode .* depend on later tokens; expected balance potentials"
    ):
        model.generate(tokens(), max_new_tokens=2, attention_mask=torch.ones(2, 24))
    model.generate(tokens(), max_new_tokens=2, attention_mask=torch.ones(2, 24), use_cache=False)


def test_a_cache_filled_without_focus_is_refused():
    model = composed("llama-gqa", "full")
    _, cache = stepwise(model, tokens(), [])
    switch(model, "hard")
    with pytest.raises(UserError, match=r"expected the groups of all 25 tokens, got 1; .* start a new cache"):
        stepwise(model, tokens(length=1), [], cache=cache)
