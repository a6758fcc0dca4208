import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from focus.attention import focus_attention_reference
from focus.attention.reference import causal_pairs, dense_attention, near_pairs, sink_keys
from focus.gates import gate_terms, gated_attention

GATES = ["printed", "centred", "log_sigmoid", "exponential"]


def inputs(batch=2, heads=4, shared=2, queries=9, keys=9, width=8, groups=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = normal(batch, heads, queries, width)
    key, value = normal(batch, heads // shared, keys, width), normal(batch, heads // shared, keys, width)
    assignment = torch.softmax(2 * normal(batch, keys, groups).double(), dim=-1)
    return query, key, value, assignment


def by_definition(query, key, value, assignment, *, gate, steepness, window, sinks, padding_mask=None, **settings):
    """The gate's terms over far pairs, handed to the oracle's dense attention."""
    queries, keys = query.shape[2], key.shape[2]
    affinity = assignment[:, keys - queries :] @ assignment.transpose(1, 2)
    factor, bias = gate_terms(affinity, gate, steepness)
    sink = sink_keys(keys, sinks, padding_mask, query.device)
    untouched = near_pairs(queries, keys, window, query.device) | sink[:, None]
    pairs = causal_pairs(queries, keys, settings.pop("sliding_window", None), padding_mask, query.device)
    if factor is not None:
        factor = torch.where(untouched, 1.0, factor)
    if bias is not None:
        bias = torch.where(untouched, 0.0, bias)
    return dense_attention(query, key, value, pairs, factor=factor, bias=bias, **settings)


def test_terms_are_the_four_readings():
    affinity = torch.tensor([[[0.0, 0.5, 1.0]]], dtype=torch.float64)
    lam = 10.0
    sigmoid = torch.sigmoid
    for gate, factor, bias in [
        ("printed", sigmoid(lam * affinity), None),
        ("centred", sigmoid(lam * (affinity - 0.5)), None),
        ("log_sigmoid", None, torch.log(sigmoid(lam * (affinity - 0.5)))),
        ("exponential", None, lam * (affinity - 1)),
    ]:
        got = gate_terms(affinity, gate, lam)
        torch.testing.assert_close(got, (factor, bias))
    with pytest.raises(ValueError, match=r"gate: expected .* got 'other'"):
        gate_terms(affinity, "other", lam)


def test_the_printed_gate_prunes_nothing_and_log_sigmoid_does():
    unrelated = torch.zeros(1, 1, 1)
    assert gate_terms(unrelated, "printed", 10.0)[0].item() == 0.5
    assert gate_terms(unrelated, "log_sigmoid", 200.0)[1].exp().item() < 1e-40


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize("queries", [9, 1, 4])
def test_gated_attention_is_the_definition(gate, softcap, padded, queries):
    query, key, value, assignment = inputs(queries=queries)
    mask = None
    if padded:
        position = torch.arange(9).expand(2, 9)
        mask = position >= torch.tensor([[0], [4]]) if padded == "left" else position < torch.tensor([[9], [6]])
    common = {"gate": gate, "steepness": 10.0, "window": 2, "sinks": 1, "softcap": softcap, "scale": 0.3}
    common |= {"sliding_window": 6, "padding_mask": mask}
    got = gated_attention(query, key, value, assignment, **common)
    torch.testing.assert_close(got, by_definition(query, key, value, assignment, **common))


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    shared=st.integers(1, 3),
    keys=st.integers(1, 20),
    window=st.integers(0, 22),
    sinks=st.integers(0, 3),
    gate=st.sampled_from(GATES),
    data=st.data(),
)
def test_any_shape(batch, shared, keys, window, sinks, gate, data):
    queries = data.draw(st.integers(1, keys))
    tensors = inputs(batch, 2 * shared, shared, queries, keys)
    common = {"gate": gate, "steepness": 5.0, "window": window, "sinks": sinks}
    torch.testing.assert_close(gated_attention(*tensors, **common), by_definition(*tensors, **common))


@pytest.mark.parametrize("gate", GATES)
def test_gradients_are_the_definitions(gate):
    mask = torch.arange(9).expand(2, 9) >= torch.tensor([[0], [3]])
    common = {"gate": gate, "steepness": 10.0, "window": 2, "sinks": 1, "padding_mask": mask}
    grads = []
    for function in (gated_attention, by_definition):
        tensors = [tensor.requires_grad_() for tensor in inputs()]
        grads.append(torch.autograd.grad(function(*tensors, **common).pow(2).sum(), tensors))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)
    assert grads[0][3].abs().max() > 0


def test_a_steep_log_sigmoid_gate_on_one_hot_groups_is_hard_attention():
    query, key, value, _ = inputs()
    groups = torch.randint(3, (2, 9), generator=torch.Generator().manual_seed(1))
    soft = gated_attention(
        query,
        key,
        value,
        torch.eye(3, dtype=torch.float64)[groups],
        gate="log_sigmoid",
        steepness=2e3,
        window=2,
        sinks=1,
    )
    torch.testing.assert_close(soft, focus_attention_reference(query, key, value, groups, window=2, sinks=1))


def test_sinks_may_be_marked():
    tensors = inputs()
    marked = torch.zeros(2, 9, dtype=torch.bool)
    marked[:, :2] = True
    common = {"gate": "exponential", "steepness": 3.0, "window": 1}
    torch.testing.assert_close(
        gated_attention(*tensors, sinks=marked, **common), gated_attention(*tensors, sinks=2, **common)
    )


@pytest.mark.parametrize("gate", GATES)
def test_low_precision_keeps_the_gate_in_float32(gate):
    query, key, value, assignment = inputs(dtype=torch.bfloat16)
    common = {"gate": gate, "steepness": 10.0, "window": 2, "sinks": 0}
    got = gated_attention(query, key, value, assignment.float(), **common)
    expected = by_definition(query.double(), key.double(), value.double(), assignment, **common)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.03)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(
            gated_attention(query.float(), key.float(), value.float(), assignment.float(), **common), got
        )


def test_dropout_drops_weights():
    tensors = inputs()
    common = {"gate": "exponential", "steepness": 3.0, "window": 1, "sinks": 0}
    torch.manual_seed(0)
    assert not torch.equal(gated_attention(*tensors, dropout=0.5, **common), gated_attention(*tensors, **common))
