"""Random calls of the selecting methods, and attention over chosen keys by plain loops, for their tests."""

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from focus.attention.reference import causal_pairs, dense_attention
from focus.method_config import make_method
from focus.methods import METHODS
from focus.methods.structural import Call

SETTINGS = {
    "oracle_top_k": {"tokens": 6},
    "sparq": {"tokens": 6, "local": 2, "components": 3, "mean_reallocation": True},
    "magicpig": {"tables": 12, "bits": 3, "sinks": 2, "local": 3},
    "performer": {"features": 40},
}
CASES = [
    {},
    {"padding": "left"},
    {"padding": "right"},
    {"queries": 5},
    {"softcap": 1.5},
    {"sliding_window": 11},
    {"heads": 3, "key_heads": 3, "queries": 11, "padding": "left"},
]


def settings_of(kind, **changed):
    return make_method(kind=kind, label=kind, **(SETTINGS[kind] | changed))


def state_of(kind, settings, head_dim, heads=4, seed=0, window=3):
    generator = torch.Generator().manual_seed(seed)
    return METHODS[kind].layer_state(settings, window=window, heads=heads, head_dim=head_dim, generator=generator)


def make_call(kind, *, queries=37, keys=37, heads=4, key_heads=2, dim=8, padding=None, seed=0, spread=1.0, **arguments):
    """A float64 call of two sequences; padding "left" or "right" hides nine tokens of the second one."""
    changed = {key: arguments.pop(key) for key in list(arguments) if key not in ("softcap", "sliding_window")}
    generator = torch.Generator().manual_seed(seed)
    query = spread * torch.randn(2, heads, queries, dim, generator=generator, dtype=torch.float64)
    key = spread * torch.randn(2, key_heads, keys, dim, generator=generator, dtype=torch.float64)
    value = torch.randn(2, key_heads, keys, dim, generator=generator, dtype=torch.float64)
    mask = None
    if padding is not None:
        mask = torch.ones(2, keys, dtype=torch.bool)
        mask[1, slice(0, 9) if padding == "left" else slice(keys - 9, keys)] = False
    arguments = {"softcap": None, "sliding_window": None} | arguments
    state = state_of(kind, settings_of(kind, **changed), dim, heads)
    return Call(query, key, value, mask, dim**-0.5, state=state, **arguments)


def attend(call):
    settings = call.state.settings
    return METHODS[settings.kind].attend(call)


def full_attention(call):
    pairs = causal_pairs(call.query.shape[2], call.key.shape[2], call.sliding_window, call.padding_mask, "cpu")
    scaling = {"scale": call.scale, "softcap": call.softcap}
    return dense_attention(call.query, call.key, call.value, pairs, **scaling)


def visible_keys(call, row, position):
    """The keys that a query at `position` of sequence `row` may read."""
    first = 0 if call.sliding_window is None else max(0, position - call.sliding_window + 1)
    return [key for key in range(first, position + 1) if call.padding_mask is None or call.padding_mask[row, key]]


def key_head(call, head):
    return head // (call.query.shape[1] // call.key.shape[1])


def score(call, row, head, position, key, query=None):
    query = call.query[row, head, position - call.offset] if query is None else query
    raw = call.scale * float(query @ call.key[row, key_head(call, head), key])
    return raw if call.softcap is None else call.softcap * math.tanh(raw / call.softcap)


def softmax(scores):
    """{key: score} to {key: weight}."""
    top = max(scores.values())
    exponentials = {key: math.exp(value - top) for key, value in scores.items()}
    total = sum(exponentials.values())
    return {key: value / total for key, value in exponentials.items()}


def weighted(call, row, head, weights):
    values = call.value[row, key_head(call, head)]
    return sum(weight * values[key] for key, weight in weights.items())


def loop(call, attend_one):
    """The output of a call from `attend_one(row, head, position, visible)`; zero where nothing is visible."""
    out = torch.zeros_like(call.query)
    for row in range(call.query.shape[0]):
        for head in range(call.query.shape[1]):
            for number in range(call.query.shape[2]):
                position = number + call.offset
                visible = visible_keys(call, row, position)
                if visible:
                    out[row, head, number] = attend_one(row, head, position, visible)
    return out


def real_queries(call):
    """bool [B, Tq]: the queries that are no padding."""
    if call.padding_mask is None:
        return torch.ones(call.query.shape[0], call.query.shape[2], dtype=torch.bool)
    return call.padding_mask[:, call.offset :]


def assert_same(call, got, expected, **tolerances):
    """Equal for real queries, finite for padding."""
    assert got.shape == call.query.shape
    assert got.isfinite().all()
    real = real_queries(call)
    torch.testing.assert_close(got.transpose(1, 2)[real], expected.transpose(1, 2)[real], **tolerances)


def tiny_llama():
    """A random Llama of two layers with two query heads a key head."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=257, num_key_value_heads=2, max_position_embeddings=256)
    return LlamaForCausalLM(config).eval()
