"""Cached decoding equals the full forward, and the memory follows whatever happens to the cache."""

import copy

import pytest
import torch
from test_adapter import FAMILIES, PER_TOKEN, SMALL, logits, padding, positions, tiny, tokens
from test_attention import DEVICES
from transformers import DynamicCache, StaticCache

from focus import FocusConfig, compose, switch
from focus.adapter import observe, routers
from focus.attention.flash import CpuFlash
from focus.errors import UserError
from focus.memory import GroupedMemory, Memory, memory_of

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


@pytest.mark.parametrize("balance", PER_TOKEN)
def test_every_balance_of_single_tokens_decodes(balance):
    model, ids = composed("gpt2", balance=balance), tokens()
    with torch.no_grad():
        for router in routers(model):
            router.potentials.copy_(torch.linspace(-1, 1, 4))
    by_one, _ = stepwise(model, ids, list(range(10, 24)))
    torch.testing.assert_close(by_one, logits(model, ids), **CLOSE)


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


@pytest.mark.parametrize(("balance", "others"), [("sinkhorn", "later"), ("prefix", "earlier")])
def test_a_balance_that_reads_other_tokens_cannot_decode_and_says_so(balance, others):
    model = composed("llama-gqa", balance=balance)
    with pytest.raises(
        UserError, match=rf"{balance} cannot decode .* depend on {others} tokens; expected balance potentials"
    ):
        model.generate(tokens(), max_new_tokens=2, attention_mask=torch.ones(2, 24))
    model.generate(tokens(), max_new_tokens=2, attention_mask=torch.ones(2, 24), use_cache=False)


def test_a_cache_filled_without_focus_is_refused():
    model = composed("llama-gqa", "full")
    _, cache = stepwise(model, tokens(), [])
    switch(model, "hard")
    with pytest.raises(UserError, match=r"expected the groups of all 25 tokens, got 1; .* start a new cache"):
        stepwise(model, tokens(length=1), [], cache=cache)


def grouped(cache):
    """For each layer, whether its keys lie in a grouped cache now."""
    return [isinstance(layer, GroupedMemory) and layer._grouped is not None for layer in cache.layers]


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", ["gpt2", "llama-gqa", "mistral", "gemma2"])
def test_hard_decoding_groups_its_keys(family, side, top_k):
    """Through one grouped layer each, a sliding window in the mask only, at any number of groups a token."""
    model, ids, cache = composed(family, top_k=top_k), tokens(), DynamicCache()
    mask = None if side is None else padding(side)
    full = logits(
        model, ids, **({} if mask is None else {"attention_mask": mask.long(), "position_ids": positions(mask)})
    )
    real = slice(None) if mask is None else mask
    got, _ = stepwise(model, ids, [3, 12, *range(13, 24)], mask, cache)
    assert grouped(cache) == [True] * 3
    torch.testing.assert_close(got[real], full[real], **CLOSE)


def test_a_step_reads_its_own_group_the_window_and_the_sinks(monkeypatch):
    model, ids, cache = composed("llama-gqa"), tokens(batch=1, length=60), DynamicCache()
    stepwise(model, ids[:, :-1], [40], cache=cache)
    read, forward = [], CpuFlash.forward

    def spy(self, query, key, *rest):
        read.append(key.shape[2])
        return forward(self, query, key, *rest)

    monkeypatch.setattr(CpuFlash, "forward", spy)
    with torch.no_grad():
        model(ids[:, -1:], cache=cache)
    expected = []
    for layer in cache.layers:
        groups = layer.assignments[0].argmax(-1)
        expected += [SMALL["window"] + 1 + SMALL["sinks"], int((groups == groups[-1]).sum())]
    assert read == expected
    assert all(layer.__dict__["keys"] is None for layer in cache.layers)


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
@pytest.mark.parametrize("side", [None, "left"])
def test_attention_may_change_while_decoding(family, side):
    """Keys move out of the groups and into new ones; a static cache, which is never grouped, says what is right."""
    model, ids = composed(family), tokens()
    mask = None if side is None else padding(side)
    modes = [("hard", 1), ("hard", 1), ("soft", None), ("hard", 2), ("hard", 1), ("soft", None)]
    caches = DynamicCache(), StaticCache(config=model.config, max_cache_len=40)
    results, seen = [[], []], []
    for step, (attention, top_k) in enumerate(modes):
        switch(model, attention, top_k)
        part = slice(4 * step, 4 * step + 4)
        for cache, outs in zip(caches, results, strict=True):
            arguments = {"position_ids": torch.arange(24)[None, part]}
            if mask is not None:
                arguments = {"attention_mask": mask[:, : part.stop].long(), "position_ids": positions(mask)[:, part]}
            with torch.no_grad():
                outs.append(model(ids[:, part], cache=cache, **arguments).logits)
        seen.append(all(grouped(caches[0])))
    assert seen == [False, True, False, True, True, False]
    real = slice(None) if mask is None else mask
    ours, plain = (torch.cat(outs, dim=1)[real] for outs in results)
    torch.testing.assert_close(ours, plain, **CLOSE)


def test_full_attention_goes_on_from_grouped_keys():
    model, ids, caches = composed("llama-gqa"), tokens(), [DynamicCache(), DynamicCache()]
    stepwise(model, ids[:, :20], [9], cache=caches[0])
    for layer, source in enumerate(caches[0].layers):
        caches[1].update(source.keys.clone(), source.values.clone(), layer)
    stepwise(model, ids[:, :1], [], cache=copy.deepcopy(caches[0]))
    switch(model, "full")
    with torch.no_grad():
        ours, plain = (model(ids[:, 20:], cache=cache).logits for cache in caches)
    assert torch.equal(ours, plain)
    switch(model, "hard")
    for _ in range(6):
        with torch.no_grad(), pytest.raises(UserError, match=r"expected the groups of all 25 tokens, got 21; "):
            model(ids[:, :1], cache=caches[0])


@pytest.mark.parametrize("change", ["crop", "reorder", "repeat", "select", "copy"])
def test_grouped_keys_follow_the_cache_without_leaving_their_groups(change):
    model, ids, cache = composed("llama-gqa", top_k=2), tokens(), DynamicCache()
    stepwise(model, ids[:, :18], [7, 17], cache=cache)
    rows, start = [0, 1], 18
    if change == "crop":
        cache.crop(-5)
        start = 13
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        rows = [1, 0]
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
        rows = [0, 0, 1, 1]
    elif change == "select":
        cache.batch_select_indices(torch.tensor([False, True]))
        rows = [1]
    else:
        other, cache = cache, copy.deepcopy(cache)
        stepwise(model, tokens(seed=8), [], cache=other)
    assert grouped(cache) == [True] * 3
    assert cache.get_seq_length() == start
    with torch.no_grad():
        rest = model(ids[rows, start:], cache=cache, position_ids=torch.arange(start, 24)[None]).logits
    torch.testing.assert_close(rest, logits(model, ids)[rows, start:], **CLOSE)


def test_gradients_flow_through_a_continued_cache():
    model, ids, cache = composed("llama-gqa"), tokens(), DynamicCache()
    stepwise(model, ids[:, :18], [7], cache=cache)
    weight = model.model.layers[0].self_attn.v_proj.weight.requires_grad_()
    rest = model(ids[:, 18:], cache=cache).logits
    torch.testing.assert_close(rest, logits(model, ids)[:, 18:], **CLOSE)
    assert torch.autograd.grad(rest.sum(), weight)[0].abs().sum() > 0


def test_a_cache_filled_in_inference_mode_serves_outside_of_it():
    model, ids, cache = composed("llama-gqa"), tokens(), DynamicCache()
    with torch.inference_mode():
        stepwise(model, ids[:, :18], [7, 12], cache=cache)
    with torch.no_grad():
        rest = model(ids[:, 18:], cache=cache).logits
    torch.testing.assert_close(rest, logits(model, ids)[:, 18:], **CLOSE)


def test_what_is_observed_does_not_depend_on_grouping():
    model, ids = composed("llama-gqa", top_k=2), tokens()
    results = []
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=40)):
        with observe(model) as layers:
            stepwise(model, ids, [7, 23], cache=cache)
            results.append([dict(layer) for layer in layers])
            assert all(router.backend.startswith("grouped/") == (len(results) == 1) for router in routers(model))
    assert results[0] == results[1]


@pytest.mark.parametrize("steps", [[], [7]])
def test_a_mask_that_changes_its_mind_is_refused(steps):
    model, ids, cache = composed("llama-gqa"), tokens(), DynamicCache()
    stepwise(model, ids[:, :20], steps, cache=cache)
    with torch.no_grad():
        with pytest.raises(UserError, match=r"expected the \[20, 20\] past .*got \[20, 13\]"):
            model(ids[:, 20:21], cache=cache, attention_mask=padding("left")[:, :21].long())
        rest = model(ids[:, 20:], cache=cache).logits
    torch.testing.assert_close(rest, logits(model, ids)[:, 20:], **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma2"])
def test_decoding_on_every_device_and_under_autocast(device, dtype, family):
    model, ids, cache = composed(family).to(device), tokens().to(device), DynamicCache()
    with torch.autocast(device, dtype, enabled=dtype != torch.float32), torch.no_grad():
        full = model(ids, use_cache=False).logits.float()
        pieces = [model(ids[:, part], cache=cache).logits for part in (slice(0, 9), slice(9, 10), slice(10, 24))]
    assert grouped(cache) == [True] * 3
    close = (torch.cat(pieces, dim=1).float() - full).abs().mean() / full.abs().mean()
    assert close < (1e-4 if dtype == torch.float32 else 0.05)
