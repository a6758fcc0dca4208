"""Distillation: what a far pair counts for, groups that keep it, and runs that end the same when they are cut."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pydantic import ValidationError
from test_training import numbers, run
from tiny import CONTEXT, WINDOW, focus_method, make_world, tiny_model, train_job
from transformers import LlamaConfig, LlamaForCausalLM

from focus import adapter, distillation
from focus.distillation import even_potentials, far_pairs, fit_layer, kept_gain, observe_attention, pair_gains
from focus.distillation_config import Distillation
from focus.errors import UserError
from focus.method_config import FocusConfig, Phase, make_method
from focus.provenance import read_result

SMALL = {"windows": 3, "steps": 20, "batch_windows": 2}
GROUPS, TOKENS = 4, 48


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def tiny_llama():
    """Grouped queries: 4 heads read 2."""
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=24, vocab_size=257)).eval()


def composed(model, **config):
    return adapter.compose(model, FocusConfig(**{"groups": 4, "window": WINDOW, "sinks": 1} | config))


def tokens(seed=0, length=CONTEXT):
    return torch.randint(257, (1, length), generator=torch.Generator().manual_seed(seed))


def planted(windows=6, noise=0.3, seed=0):
    """Hidden states [N, T, 12] whose first four numbers tell a class, and weights of the far pairs within a class."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(GROUPS, (windows, TOKENS), generator=generator)
    hidden = noise * torch.randn(windows, TOKENS, 12, generator=generator)
    hidden[..., :GROUPS] += torch.nn.functional.one_hot(classes, GROUPS)
    far = far_pairs(TOKENS, WINDOW, 1, torch.device("cpu"))
    weights = (classes[:, :, None] == classes[:, None]) * far * torch.rand(windows, TOKENS, TOKENS, generator=generator)
    return hidden, weights, far


def fit(hidden, weights, far, **settings):
    return fit_layer(
        hidden,
        weights,
        far,
        Distillation(**{"steps": 120, "batch_windows": 3} | settings),
        groups=GROUPS,
        width=8,
        generator=torch.Generator().manual_seed(3),
    )


def share_kept(hidden, weights, fitted):
    """By plain loops over windows, on hard groups."""
    groups = ((hidden @ (fitted.centroids @ fitted.projection).T) + fitted.potentials).argmax(dim=-1)
    kept = sum(float(w[g[:, None] == g].sum()) for w, g in zip(weights, groups, strict=True))
    return kept / float(weights.sum()), groups


def test_the_objective_is_the_sum_over_pairs_of_gain_times_affinity():
    generator = torch.Generator().manual_seed(0)
    far = far_pairs(7, 2, 1, torch.device("cpu"))
    weights = torch.rand(2, 7, 7, generator=generator) * far
    assignment = torch.softmax(torch.randn(2, 7, 3, generator=generator), dim=-1)
    expected = 0.0
    for window in range(2):
        for i in range(7):
            for j in range(7):
                if i - j > 2 and j >= 1:
                    gain = float(weights[window, i, j] / weights[window].sum()) - 0.7 / 6
                    expected += gain * float(assignment[window, i] @ assignment[window, j]) / 2
                else:
                    assert not far[i, j]
    assert far.sum() == 6
    assert float(kept_gain(assignment, pair_gains(weights, far, 0.7))) == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_the_objective():
    generator = torch.Generator().manual_seed(0)
    gains = torch.randn(2, 5, 5, generator=generator, dtype=torch.float64)
    gains = gains + gains.transpose(1, 2)
    assignment = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda g: kept_gain(g, gains), (assignment,))


@pytest.mark.parametrize("make", [tiny_model, tiny_llama])
@pytest.mark.parametrize("pair_weight", ["mass", "output", "squared_output"])
def test_what_a_far_pair_counts_for(make, pair_weight):
    base = make()
    base.set_attn_implementation("eager")
    ids = tokens()
    with torch.no_grad():
        probabilities = base(ids, output_attentions=True).attentions
    model = composed(make())
    seen = {}
    layers = [module for module in model.modules() if hasattr(module, "focus")]
    for layer in layers:
        values = getattr(layer, "v_proj", None) or layer.c_attn
        values.register_forward_hook(
            lambda m, a, out, key=layer.layer_idx: seen.update({key: out[0, :, -16:].detach()})
        )
    lessons = observe_attention(model, ids, pair_weight)
    for layer, lesson, weights in zip(layers, lessons, probabilities, strict=True):
        heads = weights.shape[1]
        key_heads = 2
        size = 16 // heads
        values = seen[layer.layer_idx][:, -key_heads * size :].reshape(CONTEXT, key_heads, size)
        matrix = layer.o_proj.weight.T if hasattr(layer, "o_proj") else layer.c_proj.weight
        expected = torch.zeros(CONTEXT, CONTEXT)
        for head in range(heads):
            written = values[:, head // (heads // key_heads)] @ matrix[head * size : (head + 1) * size]
            mean = weights[0, head] @ written
            for i in range(CONTEXT):
                for j in range(1, max(1, i - WINDOW)):
                    far = float((written[j] - mean[i]).norm())
                    weight = float(weights[0, head, i, j])
                    expected[i, j] += {
                        "mass": weight,
                        "output": weight * far,
                        "squared_output": (weight * far) ** 2,
                    }[pair_weight]
        torch.testing.assert_close(lesson.weights.float(), expected / expected.sum(), rtol=0.02, atol=1e-6)


def test_the_model_is_read_as_it_is_and_left_as_it_was():
    base, model, ids = tiny_llama(), composed(tiny_llama()), tokens()
    adapter.switch(model, "hard", 2)
    before = model(ids).logits
    inputs = []
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda m, a, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )
    expected = base(ids, output_hidden_states=True).hidden_states[1]
    lessons = observe_attention(model, ids, "mass")
    assert torch.equal(model(ids).logits, before)
    torch.testing.assert_close(inputs[0], base.model.layers[1].input_layernorm(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lessons[1].hidden, inputs[0][0].to(torch.bfloat16))
    assert model.focus_composition.attention == "hard" and model.focus_composition.top_k == 2


def test_planted_groups_are_found_and_kept():
    hidden, weights, far = planted()
    fitted = fit(hidden, weights, far)
    kept, groups = share_kept(hidden, weights, fitted)
    assert fitted.kept == pytest.approx(kept, abs=1e-5)
    untrained, _ = share_kept(hidden, weights, fit(hidden, weights, far, steps=1))
    assert kept > 0.85
    assert untrained < 0.5
    fresh_hidden, fresh_weights, _ = planted(seed=9)
    assert share_kept(fresh_hidden, fresh_weights, fitted)[0] > 0.8
    shares = torch.bincount(groups.flatten(), minlength=GROUPS) / groups.numel()
    assert shares.max() < 0.3
    assert fitted.pairs < 0.32


def test_groups_stay_even_where_one_large_group_would_keep_most():
    hidden, weights, far = planted(noise=1.0)
    weights = far.float().expand_as(weights) + 0.05 * weights
    _, groups = share_kept(hidden, weights, fit(hidden, weights, far))
    shares = torch.bincount(groups.flatten(), minlength=GROUPS) / groups.numel()
    assert shares.max() < 0.3


@examples(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.floats(0.01, 30.0), st.integers(2, 8))
def test_last_potentials_make_hard_groups_even(seed, scale, groups):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * (torch.randn(2048, groups, generator=generator) + torch.randn(groups, generator=generator))
    potentials = even_potentials(logits)
    shares = torch.bincount((logits + potentials).argmax(dim=-1), minlength=groups) / len(logits)
    assert (shares * groups - 1).abs().max() < 0.1
    assert float(potentials.mean()) == pytest.approx(0, abs=1e-4 * scale)


def test_a_window_that_is_all_near_is_refused():
    with pytest.raises(UserError, match=r"expected a context with pairs farther than the window \(8\)"):
        far_pairs(8, 8, 0, torch.device("cpu"))


def test_distilled_groups_are_causal():
    model = composed(tiny_llama())
    windows = [tokens(seed) for seed in range(3)]
    records = list(distillation.distil(model, Distillation(**SMALL), windows, seed=0, done=0, name="test"))
    assert [record["layer"] for record in records] == [0, 1]
    adapter.switch(model, "hard")
    changed = tokens(7).clone()
    changed[0, -4:] = (changed[0, -4:] + 5) % 257
    with torch.no_grad():
        assert torch.equal(model(tokens(7)).logits[:, :-4], model(changed).logits[:, :-4])


def distilled(phases=(), **settings):
    config = {"top_k": 1, "balance": "potentials"}
    return train_job(focus_method(list(phases), config, distillation=SMALL | settings, checkpoint_every=2))


def test_a_run_writes_what_each_layer_keeps(world):
    outputs = run(world, distilled(), "whole")
    metrics = read_result(outputs["output"])["metrics"]
    log = [json.loads(line) for line in outputs["log"].read_text().splitlines()]
    assert [record["layer"] for record in log] == [0, 1]
    assert metrics["kept_weight"] == pytest.approx(sum(record["kept_weight"] for record in log) / 2)
    assert metrics["kept_weight"] > metrics["kept_far_pairs"]
    assert metrics["steps"] == 0 and metrics["tokens"] == 3 * CONTEXT
    assert metrics["trained_parameters"] == 2 * (4 * 16 + 4 * 4)


@pytest.mark.parametrize("phases", [(), (Phase(trains="centroids", steps=3, learning_rate=1e-2),)])
def test_a_run_cut_between_layers_ends_with_the_same_numbers(world, monkeypatch, phases):
    job = distilled(phases)
    expected = numbers(run(world, job, "whole"))
    whole = distillation.fit_layer
    calls = []

    def failing(*arguments, **settings):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments, **settings)

    monkeypatch.setattr(distillation, "fit_layer", failing)
    with pytest.raises(KeyboardInterrupt):
        run(world, job, "cut")
    assert numbers(run(world, job, "cut")) == expected
    assert len(calls) == 3
    assert len(expected[1]) == 2 + 3 * len(phases)


def test_settings_that_cannot_be_distilled_are_refused():
    training = {"phases": [], "distillation": SMALL}
    with pytest.raises(ValidationError, match=r"expected adapter\.balance potentials"):
        focus_method([], {"balance": "sinkhorn"}, distillation=SMALL)
    with pytest.raises(ValidationError, match=r"training\.distillation belongs to kind focus"):
        make_method(kind="lora", label="LoRA", rank=2, training=training)
    assert focus_method([], distillation={}).training.distillation == Distillation()
