"""Every method offers the protocol; the window is exact; what is saved comes back."""

import warnings
from typing import get_args

import pytest
import torch
from tiny import WINDOW, focus_method, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from focus.attention.reference import causal_pairs, near_pairs, sink_keys
from focus.errors import UserError
from focus.method_config import KINDS, Balance, Method, Phase, Training, make_method
from focus.methods import METHODS

TOKENS = torch.arange(40)[None] * 7 % 250
EVERYTHING = Phase(trains="everything", steps=1, learning_rate=1e-3)
METHOD_CLASSES = dict(zip(KINDS, get_args(get_args(Method)[0]), strict=True))
SETTINGS = {
    "pretrained": make_method(kind="pretrained", label="pretrained"),
    "window": make_method(kind="window", label="window", sinks=2),
    "full_finetuning": make_method(kind="full_finetuning", label="full", training=Training(phases=[EVERYTHING])),
    "focus": focus_method([EVERYTHING]),
}


@torch.no_grad()
def logits(model, tokens=TOKENS, **arguments):
    return model(tokens, use_cache=False, **arguments).logits


def attached(kind, settings=None, window=WINDOW, model=None):
    model = model or tiny_model()
    return METHODS[kind].attach(model, settings or SETTINGS[kind], window=window, seed=0)


def test_every_kind_of_the_config_is_here():
    assert METHODS.keys() == set(KINDS)


SMALL = {
    **{"longformer": {"global_tokens": 2}, "bigbird": {"block": 4}, "routing_transformer": {"clusters": 4}},
    **{"s2": {"block": 4}, "moba": {"block": 8, "top_k": 2}, "quest": {"page": 4, "pages": 2}},
    **{"oracle_top_k": {"tokens": 8}, "sparq": {"tokens": 8, "local": 2, "components": 2}, "magicpig": {"tables": 9}},
    "fixed_groups": {"by": "token"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_changes_what_is_random_before_training_and_nothing_else(kind):
    if METHOD_CLASSES[kind].NEEDS_TRAINING:
        pytest.skip("repeated for each seed in any case")
    settings = make_method(kind=kind, label=kind, **SMALL.get(kind, {}))
    first, second = (
        logits(METHODS[kind].attach(tiny_model().eval(), settings, window=4, seed=seed)) for seed in (0, 1)
    )
    assert torch.equal(first, second) != settings.RANDOM


def test_a_window_as_long_as_the_text_changes_nothing():
    torch.testing.assert_close(logits(attached("window", window=40)), logits(tiny_model()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [0, 1])
def test_what_lies_beyond_the_window_is_seen_only_through_sinks(sinks):
    model = attached("window", make_method(kind="window", label="window", sinks=sinks))
    changed = TOKENS.clone()
    changed[0, 0] = 200
    difference = (logits(model, changed) - logits(model)).abs().amax(dim=-1)[0]
    reach = 2 * WINDOW
    assert (difference[: reach + 1] > 0).all()
    assert (difference[reach + 1 :] > 0).all() == bool(sinks)
    assert (difference[reach + 1 :] == 0).all() != bool(sinks)


def test_padding_on_either_side_changes_nothing_for_a_window():
    model = attached("window")
    alone = logits(model, TOKENS[:, :20])
    for side in ("left", "right"):
        place = slice(5, 25) if side == "left" else slice(0, 20)
        padded, mask = torch.zeros(1, 25, dtype=torch.long), torch.zeros(1, 25, dtype=torch.long)
        padded[:, place], mask[:, place] = TOKENS[:, :20], 1
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        got = logits(model, padded, attention_mask=mask, position_ids=positions)[:, place]
        torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-5)


def test_a_window_generates_what_it_scores():
    model = attached("window")
    generated = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=12, do_sample=False)
    for position in range(40, 52):
        assert logits(model, generated[:, :position])[0, -1].argmax() == generated[0, position]


def test_a_window_works_with_grouped_heads_under_autocast():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=250, num_key_value_heads=2)).eval()
    expected = logits(model)
    attached("window", window=40, model=model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(logits(model).float(), expected, atol=0.02, rtol=0.05)


@pytest.mark.parametrize(("window", "sinks", "length"), [(4, 0, 20), (4, 3, 20), (0, 1, 5), (10, 2, 8), (3, 9, 8)])
def test_pairs_kept_are_those_of_the_mask(window, sinks, length):
    every = causal_pairs(length, length, None, None, "cpu")
    near = near_pairs(length, length, window, "cpu")
    kept = every & (near | sink_keys(length, sinks, None, "cpu")[:, None])
    far = every & ~near
    expected = kept.sum() / every.sum(), (kept & far).sum() / far.sum() if far.any() else 1.0
    settings = make_method(kind="window", label="window", sinks=sinks)
    assert METHODS["window"].pairs_kept(settings, window, length) == pytest.approx(tuple(map(float, expected)))


def test_only_sinkhorn_over_the_sequence_or_over_prefixes_cannot_decode():
    for balance in get_args(Balance):
        method = focus_method([EVERYTHING], {"balance": balance})
        assert METHODS["focus"].decodes(method) == (balance not in ("sinkhorn", "prefix"))


@pytest.mark.parametrize("kind", ["full_finetuning", "focus"])
def test_what_is_saved_comes_back(kind, tmp_path):
    method, settings = METHODS[kind], SETTINGS[kind]
    model = attached(kind)
    with torch.no_grad():
        for number, parameter in enumerate(method.parameters(model, "everything")):
            parameter.add_(0.01 * (number + 1))
    method.save(model, settings, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = method.restore(tiny_model(seed=0), settings, tmp_path, window=WINDOW)
    assert torch.equal(logits(restored), logits(model))
    assert not torch.allclose(logits(restored), logits(attached(kind)))


def test_weights_of_another_model_are_refused(tmp_path):
    method = METHODS["full_finetuning"]
    method.save(tiny_model(), SETTINGS["full_finetuning"], tmp_path)
    other = tiny_model()
    other.resize_token_embeddings(260)
    with pytest.raises(
        UserError, match=r"transformer.wte.weight: expected \[260, 16\] for this model, got \[257, 16\]"
    ):
        method.restore(other, SETTINGS["full_finetuning"], tmp_path, window=WINDOW)
    (tmp_path / "base.safetensors").unlink()
    with pytest.raises(UserError, match=r"base.safetensors: expected trained weights"):
        method.restore(tiny_model(), SETTINGS["full_finetuning"], tmp_path, window=WINDOW)


def test_phases_that_a_method_does_not_have_are_refused():
    with pytest.raises(UserError, match="expected everything"):
        METHODS["full_finetuning"].parameters(tiny_model(), "centroids")
    with pytest.raises(UserError, match="expected none"):
        METHODS["pretrained"].parameters(tiny_model(), "everything")


def test_centroid_phases_leave_the_base_frozen():
    model = attached("focus")
    parameters = METHODS["focus"].parameters(model, "centroids")
    assert len(parameters) == 4
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in parameters}
    assert len(METHODS["focus"].parameters(model, "everything")) == len(list(model.parameters()))
