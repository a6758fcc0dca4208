from itertools import combinations
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from focus.errors import UserError
from focus.paper import arithmetic
from focus.paper.shapes import SHAPES

KNOWN = {
    "gpt2-124m": 124_439_808,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
}
"""Parameters as the models' own pages count them."""


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_as_published(name):
    assert SHAPES[name].parameters == KNOWN[name]


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_as_transformers_counts_them(name):
    """On the meta device, which holds no weights."""
    import torch
    import transformers

    shape = SHAPES[name]
    common = {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.kind == "gpt2"}
    if shape.kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads, n_positions=shape.positions, **common
        )
        kind = transformers.GPT2LMHeadModel
    else:
        classes = {"llama": "Llama", "qwen2": "Qwen2", "olmo2": "Olmo2"}[shape.kind]
        config = getattr(transformers, f"{classes}Config")(
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            intermediate_size=shape.feedforward,
            **common,
        )
        kind = getattr(transformers, f"{classes}ForCausalLM")
    with torch.device("meta"):
        assert sum(weight.numel() for weight in kind(config).parameters()) == shape.parameters


@pytest.mark.parametrize(
    ("function", "arguments", "value"),
    [
        ("centroid_parameters", {"model": "gpt2-124m", "groups": 4, "routing_dim": 16}, 148_224),
        ("layer_parameters", {"model": "gpt2-124m", "groups": 4, "routing_dim": 16}, 12_352),
        ("centroid_parameters", {"model": "mistral-7b", "groups": 2, "routing_dim": 16}, 2_098_176),
        ("lora_on_attention_input", {"model": "gpt2-124m", "rank": 4}, 147_456),
        ("lora_on_attention_input", {"model": "gpt2-124m", "rank": 16}, 589_824),
        ("lora_on_query_and_value", {"model": "mistral-7b", "rank": 4}, 1_703_936),
        ("queries_a_key", {"model": "llama2-13b"}, 1),
        ("queries_a_key", {"model": "llama2-70b"}, 8),
        ("models_with_softcap", {}, 0),
        ("shared_group_percent", {"groups": 4, "top_k": 2}, 500 / 6),
        ("speed_of_group_calls", {"groups": 4, "top_k": 2}, 1),
        ("speed_limit", {"pairs_kept": "table7.gpt2_124m.k2.pairs_kept"}, 100 / 60),
        ("speed_limit_with_window", {"groups": 8, "tokens": 2**20, "window": 128}, 1 / (1 / 8 + 256 / 2**20)),
        ("percent_change", {"value": "table7.gpt2_124m.k4.perplexity", "reference": 42.8}, 100 * (47.2 / 42.8 - 1)),
        ("difference", {"value": 41.3, "reference": 42.8}, -1.5),
        ("smallest", {"numbers": ["table5.gpt2_124m.full.perplexity", 30.5]}, 30.5),
        ("largest", {"numbers": ["table5.gpt2_124m.full.perplexity", 30.5]}, 31.4),
    ],
)
def test_formulas(function, arguments, value):
    assert isclose(arithmetic.call(function, arguments), value)


@given(groups=st.integers(2, 8), data=st.data())
def test_shared_groups_by_counting_pairs_of_memberships(groups, data):
    top_k = data.draw(st.integers(1, groups))
    chosen = [set(each) for each in combinations(range(groups), top_k)]
    shared = [len(one & two) for one in chosen for two in chosen]
    known = {"groups": groups, "top_k": top_k}
    assert isclose(
        arithmetic.call("shared_group_percent", known), 100 * sum(count > 0 for count in shared) / len(shared)
    )
    twice = 100 * sum(count > 1 for count in shared) / len(shared)
    assert isclose(arithmetic.call("shared_two_groups_percent", known), twice, abs_tol=1e-9)
    assert arithmetic.call("least_shared_groups", known) == min(shared)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("guess", {}, "function: expected one of"),
        ("queries_a_key", {}, "arguments of queries_a_key: expected model, got none"),
        ("queries_a_key", {"model": "gpt5"}, "model: expected one of gpt2-124m"),
        ("speed_limit", {"pairs_kept": "table7.gpt2_124m.k2.nothing"}, "expected a printed number"),
    ],
)
def test_what_cannot_be_computed_is_refused(function, arguments, message):
    with pytest.raises(UserError, match=message):
        arithmetic.call(function, arguments)
