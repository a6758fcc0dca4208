"""The selecting methods against their definitions in plain loops; these and linear attention in calls and on models."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selection_calls import (
    CASES,
    SETTINGS,
    assert_same,
    attend,
    full_attention,
    key_head,
    loop,
    make_call,
    score,
    settings_of,
    softmax,
    state_of,
    tiny_llama,
    visible_keys,
    weighted,
)
from tiny import WINDOW, make_world, row_settings, tiny_model

from focus.config import Perplexity
from focus.errors import UserError
from focus.evaluation import perplexity as evaluation
from focus.jobs import PerplexityJob
from focus.method_config import Phase, Training
from focus.methods import METHODS, magicpig, performer, selection
from focus.methods.magicpig import codes_of, collisions, log_probability
from focus.methods.selection import nearest_top
from focus.provenance import read_result

KINDS = list(SETTINGS)
SELECTING = [kind for kind in KINDS if kind != "performer"]
MODELS = {"gpt2": tiny_model, "llama": tiny_llama}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks and chunks a call, of sizes that do not divide its length."""
    monkeypatch.setattr(selection, "ROWS", 16)
    monkeypatch.setattr(performer, "CHUNK", 10)
    monkeypatch.setattr(magicpig, "CACHED", 500)
    monkeypatch.setattr(magicpig, "HASHED", 10)


def cases_of(kind):
    return [case for case in CASES if kind != "performer" or not {"softcap", "sliding_window"} & case.keys()]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 14))
def test_of_equal_scores_the_nearest_are_taken(values, count):
    index = nearest_top(torch.tensor([values, values[::-1]], dtype=torch.float32), count)
    for row, ordered in zip(index, (values, values[::-1]), strict=True):
        best = sorted(range(len(values)), key=lambda place: (-ordered[place], -place))[:count]
        assert sorted(row.tolist()) == sorted(best)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracle_reads_the_keys_of_largest_weight(case):
    call = make_call("oracle_top_k", **case)

    def one(row, head, position, visible):
        scores = {key: score(call, row, head, position, key) for key in visible}
        best = sorted(visible, key=lambda key: (scores[key], key), reverse=True)[:6]
        return weighted(call, row, head, softmax({key: scores[key] for key in best}))

    assert_same(call, attend(call), loop(call, one))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_oracle_of_all_tokens_is_full_attention(case):
    call = make_call("oracle_top_k", tokens=37, **case)
    assert_same(call, attend(call), full_attention(call))


def guesses_by_definition(call, row, head, position, visible, components):
    """The guessed weights of one query, and the sizes of components summed over the heads that share its key head."""
    heads = [other for other in range(call.query.shape[1]) if key_head(call, other) == key_head(call, head)]
    number = position - call.offset
    sizes = sum(call.query[row, other, number].abs() for other in heads)
    chosen = sorted(range(len(sizes)), key=lambda component: -sizes[component])[:components]
    weights = {}
    for other in heads:
        query = call.query[row, other, number]
        part = torch.zeros_like(query)
        part[chosen] = query[chosen]
        coverage = float(part.abs().sum() / query.abs().sum())
        hot = part / math.sqrt(coverage)
        weights[other] = softmax({key: score(call, row, other, position, key, hot) for key in visible})
    return weights


@pytest.mark.parametrize("reallocation", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sparq_is_its_algorithm(case, reallocation):
    call = make_call("sparq", mean_reallocation=reallocation, **case)

    def one(row, head, position, visible):
        guesses = guesses_by_definition(call, row, head, position, visible, components=3)
        totals = {key: sum(weights[key] for weights in guesses.values()) for key in visible}
        best = sorted(visible, key=lambda key: (position - key < 2, totals[key]), reverse=True)[:6]
        exact = weighted(call, row, head, softmax({key: score(call, row, head, position, key) for key in best}))
        alpha = sum(guesses[head][key] for key in best) if reallocation else 1.0
        mean = weighted(call, row, head, {key: 1 / len(visible) for key in visible})
        return alpha * exact + (1 - alpha) * mean

    assert_same(call, attend(call), loop(call, one))


def test_sparq_that_guesses_exactly_is_the_oracle():
    same = {"heads": 3, "key_heads": 3}
    guessing = make_call("sparq", components=8, local=0, mean_reallocation=False, **same)
    assert_same(guessing, attend(guessing), attend(make_call("oracle_top_k", **same)))


def test_reallocation_of_everything_is_full_attention_when_nothing_is_left_out():
    call = make_call("sparq", tokens=37, components=3)
    assert_same(call, attend(call), full_attention(call))


def test_sparq_refuses_more_components_than_there_are():
    with pytest.raises(UserError, match="components of kind sparq: expected at most the head size of the model, 8"):
        METHODS["sparq"].attach(tiny_model(), settings_of("sparq", components=9), window=WINDOW, seed=0)
    with pytest.raises(ValueError, match=r"local must be at most tokens \(6\), got 7"):
        settings_of("sparq", local=7)


def chance(match, tables):
    return 1 - (1 - match) ** tables - tables * match * (1 - match) ** (tables - 1)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_magicpig_is_its_algorithm(case, centred):
    call = make_call("magicpig", centred=centred, **case)
    planes = call.state.planes.double().T.reshape(12, 3, 8)
    far = call.sliding_window is not None

    def buckets(vector):
        return [tuple((table @ vector > 0).tolist()) for table in planes]

    @cache
    def hashed(row, shared, key):
        vector = call.key[row, shared, key]
        if centred and not far:
            earlier = [other for other in range(key + 1) if call.padding_mask is None or call.padding_mask[row, other]]
            vector = vector - call.key[row, shared, earlier].mean(dim=0)
        return vector, buckets(vector)

    def one(row, head, position, visible):
        query, scores = call.query[row, head, position - call.offset], {}
        mine = buckets(query)
        first = (
            [] if far else [key for key in range(37) if call.padding_mask is None or call.padding_mask[row, key]][:2]
        )
        for key in visible:
            exact = score(call, row, head, position, key)
            if position - key < 3 or key in first:
                scores[key] = exact
                continue
            vector, theirs = hashed(row, key_head(call, head), key)
            if sum(a == b for a, b in zip(mine, theirs, strict=True)) >= 2:
                cosine = float(query @ vector / query.norm() / vector.norm())
                scores[key] = exact - math.log(chance((1 - math.acos(cosine) / math.pi) ** 3, 12))
        return weighted(call, row, head, softmax(scores))

    assert_same(call, attend(call), loop(call, one))


def test_keys_are_sampled_as_often_as_the_correction_says():
    generator = torch.Generator().manual_seed(0)
    query, key, trials = torch.randn(1, 8, generator=generator), torch.randn(40, 8, generator=generator), 2000
    counts = torch.zeros(40)
    for _ in range(trials):
        planes = torch.randn(8, 20 * 4, generator=generator)
        codes = codes_of(key, planes, 4).T.contiguous()[None, None]
        counts += collisions(codes_of(query, planes, 4)[None, None], codes)[0, 0, 0] >= 2
    expected = log_probability(torch.cosine_similarity(query, key), bits=4, tables=20).exp()
    assert expected.min() < 0.1 and expected.max() > 0.9
    errors = (counts / trials - expected) / (expected * (1 - expected) / trials).sqrt()
    assert errors.abs().max() < 4.5


@given(st.floats(-0.99, 1.0), st.integers(1, 12), st.integers(2, 255))
def test_the_chance_of_a_sample_is_the_binomial_one(cosine, bits, tables):
    match = (1 - math.acos(cosine) / math.pi) ** bits
    one = [math.comb(tables, hits) * match**hits * (1 - match) ** (tables - hits) for hits in range(2, tables + 1)]
    expected = math.log(max(math.fsum(one), magicpig.SMALLEST))
    got = log_probability(torch.tensor(cosine, dtype=torch.float64), bits, tables).item()
    assert got == pytest.approx(expected, abs=2e-3)


def test_many_tables_approach_full_attention():
    settings = {"bits": 4, "sinks": 0, "local": 1, "heads": 2, "key_heads": 2}
    errors = []
    for tables in (4, 40, 250):
        call = make_call("magicpig", tables=tables, **settings)
        errors.append((attend(call) - full_attention(call)).square().mean().item())
    assert errors[0] > 4 * errors[1] > 16 * errors[2]
    assert errors[2] < 1e-3


def test_the_correction_takes_the_bias_of_sampling_away():
    call = make_call("magicpig", heads=1, key_heads=1, tables=40, bits=4, sinks=0, local=1, spread=0.5)
    total, plain = torch.zeros_like(call.query), torch.zeros_like(call.query)
    for seed in range(200):
        sampled = replace(call, state=state_of("magicpig", call.state.settings, 8, seed=seed))
        total += attend(sampled) / 200
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(magicpig, "log_probability", lambda cosine, bits, tables: torch.zeros_like(cosine))
            plain += attend(sampled) / 200
    bias, uncorrected = ((mean - full_attention(call)).square().mean() for mean in (total, plain))
    assert bias < uncorrected / 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_queries_alone_give_the_last_rows(kind):
    for case in cases_of(kind):
        call = make_call(kind, **(case | {"queries": 37}))
        whole = attend(call)
        for last in (1, 20):
            got = attend(replace(call, query=call.query[:, :, -last:]))
            torch.testing.assert_close(got, whole[:, :, -last:])


@pytest.mark.parametrize("kind", SELECTING)
def test_a_cache_that_forgot_what_a_sliding_layer_cannot_see_serves(kind):
    call = make_call(kind, sliding_window=11)
    got = attend(replace(call, query=call.query[:, :, -1:], key=call.key[:, :, -11:], value=call.value[:, :, -11:]))
    torch.testing.assert_close(got, attend(call)[:, :, -1:])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_and_reach_every_input(kind):
    call = make_call(kind, padding="left")
    tensors = [tensor.float().requires_grad_() for tensor in (call.query, call.key, call.value)]
    out = attend(replace(call, **dict(zip(("query", "key", "value"), tensors, strict=True))))
    for grad in torch.autograd.grad((out**2).sum(), tensors):
        assert grad.isfinite().all() and grad.abs().sum() > 0


@pytest.mark.parametrize("case", [{}, {"padding": "left"}, {"sliding_window": 11}], ids=str)
def test_the_pairs_read_are_counted(case):
    call = make_call("oracle_top_k", **case)
    call.state.observed = {}
    attend(call)
    kept, every = 0, 0
    for row in range(2):
        for position in range(37):
            kept += min(6, len(visible_keys(call, row, position)))
            every += len(visible_keys(call, row, position))
    assert call.state.observed["pairs_kept"] == pytest.approx(kept / every)


@pytest.mark.parametrize("kind", SELECTING)
def test_far_pairs_are_those_beyond_the_window(kind):
    changed = {"sparq": {"tokens": 3, "local": 3}, "oracle_top_k": {"tokens": 37}}.get(
        kind, {"sinks": 0, "bits": 15, "tables": 2}
    )
    call = make_call(kind, **changed)
    call.state.observed = {}
    attend(call)
    expected = {"sparq": 0.0, "oracle_top_k": 1.0}.get(kind, pytest.approx(0, abs=1e-3))
    assert call.state.observed["far_pairs_kept"] == expected
    assert 0 < call.state.observed["pairs_kept"] <= 1


@torch.no_grad()
def logits(model, tokens, **arguments):
    return model(tokens, use_cache=False, **arguments).logits


def attached(kind, model, **changed):
    return METHODS[kind].attach(model, settings_of(kind, **changed), window=WINDOW, seed=0)


TOKENS = torch.arange(45)[None] * 7 % 250


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODELS)
def test_later_tokens_change_nothing_earlier(kind, family):
    model = attached(kind, MODELS[family]())
    changed = TOKENS.clone()
    changed[0, 30] = 200
    before, after = logits(model, TOKENS), logits(model, changed)
    torch.testing.assert_close(after[:, :30], before[:, :30], atol=1e-6, rtol=0)
    assert not torch.allclose(after[:, 30], before[:, 30], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(kind, family, side):
    model = attached(kind, MODELS[family]())
    place = slice(7, 52) if side == "left" else slice(0, 45)
    padded, mask = torch.zeros(2, 52, dtype=torch.long), torch.ones(2, 52, dtype=torch.long)
    mask[0] = 0
    padded[0, place], mask[0, place], padded[1] = TOKENS[0], 1, torch.arange(52)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    got = logits(model, padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(got[0, place], logits(model, TOKENS)[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], logits(model, padded[1:])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", MODELS)
def test_generating_with_a_cache_gives_what_scoring_gives(kind, family):
    model = attached(kind, MODELS[family]())
    assert METHODS[kind].decodes(settings_of(kind))
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    result = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **options)
    scored = logits(model, result.sequences)
    torch.testing.assert_close(torch.stack(result.logits, dim=1), scored[:, 44:-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_little(kind):
    model = attached(kind, tiny_llama())
    expected = logits(model, TOKENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = logits(model, TOKENS).float()
    assert (got - expected).abs().mean() < 0.02 * expected.abs().mean() + 0.005


@pytest.mark.parametrize("kind", ["magicpig", "performer"])
def test_what_is_random_follows_the_seed_and_is_saved(kind, tmp_path):
    method, settings = METHODS[kind], settings_of(kind)
    model = method.attach(tiny_model(), settings, window=WINDOW, seed=3)
    method.save(model, settings, tmp_path)
    restored = method.restore(tiny_model(), settings, tmp_path, window=WINDOW)
    assert torch.equal(logits(restored, TOKENS), logits(model, TOKENS))
    assert not torch.allclose(logits(attached(kind, tiny_model()), TOKENS), logits(model, TOKENS))


@pytest.mark.parametrize("kind", SELECTING)
def test_a_selection_does_not_train(kind):
    phase = Phase(trains="everything", steps=1, learning_rate=1e-3)
    with pytest.raises(ValueError, match=f"training of kind {kind}: expected null, got one of everything"):
        settings_of(kind, training=Training(phases=[phase]))


def test_a_result_tells_the_pairs_that_were_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    kept = {}
    for kind in ("oracle_top_k", "performer"):
        row = {"attention": "full", "top_k": None, "perplexity": Perplexity(windows=2)}
        job = PerplexityJob(**row_settings(settings_of(kind)), **row)
        evaluation.run(job, model=world.model, corpus=world.corpus, weights=None, output=tmp_path / f"{kind}.json")
        metrics = read_result(tmp_path / f"{kind}.json")["metrics"]
        kept[kind] = metrics["pairs_kept"], metrics["far_pairs_kept"]
    length = row_settings(settings_of("oracle_top_k"))["model_settings"]["context"]
    every = length * (length + 1) / 2
    assert kept["oracle_top_k"][0] == pytest.approx(sum(min(6, place + 1) for place in range(length)) / every, rel=1e-6)
    assert 0 < kept["oracle_top_k"][1] < 1
    assert kept["performer"] == (1.0, 1.0)
