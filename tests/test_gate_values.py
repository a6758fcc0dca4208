"""Gate values: distributions against plain loops over pairs, and a whole job."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONTEXT, WINDOW, focus_method, make_world, row_settings, tiny_model, train_job

from focus import adapter, gate_values, training
from focus.config import Perplexity
from focus.data import Window
from focus.errors import UserError
from focus.jobs import PerplexityJob
from focus.method_config import FocusConfig, Phase
from focus.provenance import read_result

FORMULAS = {
    "printed": lambda a, lam: 1 / (1 + math.exp(-lam * a)),
    "centred": lambda a, lam: 1 / (1 + math.exp(-lam * (a - 0.5))),
    "log_sigmoid": lambda a, lam: 1 / (1 + math.exp(-lam * (a - 0.5))),
    "exponential": lambda a, lam: math.exp(lam * (a - 1)),
}


def random_assignment(tokens, groups, sharpness, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharpness * torch.randn(tokens, groups, generator=generator, dtype=torch.float64), dim=-1)


def pairs_by_loop(assignment, window, sinks):
    """Affinities of near and of far pairs, pair by pair."""
    near, far = [], []
    for i, own in enumerate(assignment.tolist()):
        for j, other in enumerate(assignment[: i + 1].tolist()):
            affinity = sum(a * b for a, b in zip(own, other, strict=True))
            if i - j <= window:
                near.append(affinity)
            elif j >= sinks:
                far.append(affinity)
    return near, far


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(4, 24),
    groups=st.integers(1, 5),
    window=st.integers(0, 26),
    sinks=st.integers(0, 3),
    sharpness=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 9),
)
def test_pairs_are_counted_by_affinity(tokens, groups, window, sinks, sharpness, seed):
    assignment = random_assignment(tokens, groups, sharpness, seed)
    counted = gate_values.by_affinity(assignment, window, sinks).numpy()
    for counts, affinities in zip(counted, pairs_by_loop(assignment, window, sinks), strict=True):
        assert counts.sum() == len(affinities)
        found = (np.repeat(np.arange(gate_values.BINS), counts) + 0.5) / gate_values.BINS
        assert found == pytest.approx(sorted(affinities), abs=0.51 / gate_values.BINS)


@pytest.mark.parametrize("gate", FORMULAS)
@pytest.mark.parametrize("steepness", [1.0, 10.0])
def test_a_distribution_is_that_of_a_plain_loop_over_pairs(gate, steepness):
    windows = [random_assignment(20, 3, 3.0, seed) for seed in range(3)]
    counts = np.stack([gate_values.by_affinity(each, 4, 1)[1].numpy() for each in windows])
    own = [[FORMULAS[gate](a, steepness) for a in pairs_by_loop(each, 4, 1)[1]] for each in windows]
    pooled = sorted(value for each in own for value in each)
    found = gate_values.summarise(counts, gate, steepness)
    near = {"abs": steepness * 1e-4}
    assert found["pairs"] == len(pooled) == 3 * (15 * 16 // 2 - 15)
    assert found["mean"] == pytest.approx(sum(pooled) / len(pooled), **near)
    means = [sum(each) / len(each) for each in own]
    middle = sum(means) / 3
    error = math.sqrt(sum((each - middle) ** 2 for each in means) / 2 / 3)
    assert found["mean_error"] == pytest.approx(error, **near)
    for level, value in found["quantiles"].items():
        assert value == pytest.approx(pooled[math.ceil(int(level) * len(pooled) / 100) - 1], **near)
    assert found["below_low"] == pytest.approx(sum(value < 0.1 for value in pooled) / len(pooled), abs=0.006)
    assert found["above_high"] == pytest.approx(sum(value > 0.9 for value in pooled) / len(pooled), abs=0.006)
    assert sum(found["histogram"]) == pytest.approx(1.0)
    middles = (np.arange(gate_values.HISTOGRAM) + 0.5) / gate_values.HISTOGRAM
    assert np.dot(found["histogram"], middles) == pytest.approx(found["mean"], abs=0.5 / gate_values.HISTOGRAM)


def test_one_hot_groups_put_every_gate_at_its_ends():
    assignment = torch.eye(2)[torch.tensor([0, 1] * 8)]
    counts = gate_values.by_affinity(assignment, 0, 0).numpy()
    for gate, low, high in (("printed", 0.5, 1.0), ("log_sigmoid", 0.0, 1.0), ("exponential", 0.0, 1.0)):
        far = gate_values.summarise(counts[1:], gate, 100.0)
        assert [far["quantiles"][level] for level in ("5", "95")] == pytest.approx([low, high], abs=0.01)
        assert gate_values.summarise(counts[:1], gate, 100.0)["mean"] == pytest.approx(1.0, abs=0.01)
        assert far["mean_error"] is None


def test_every_layer_and_window_is_counted_as_its_router_assigns():
    model = adapter.compose(tiny_model(), FocusConfig(groups=3, window=WINDOW, routing_dim=4, sinks=1), seed=1)
    adapter.switch(model, "soft")
    tokens = torch.randint(0, 250, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    windows = [Window("a", place, each, 1) for place, each in enumerate(tokens)]
    near, far = gate_values.count_pairs(model, windows, WINDOW, 1)
    assert near.shape == far.shape == (2, 2, gate_values.BINS)
    for place, each in enumerate(tokens):
        with adapter.watching(model) as layers, torch.no_grad():
            model(input_ids=each[None])
        for layer, (seen,) in enumerate(layers):
            expected = gate_values.by_affinity(seen.assignment[0], WINDOW, 1)
            assert np.array_equal(near[place, layer], expected[0]) and np.array_equal(far[place, layer], expected[1])
    with pytest.raises(UserError, match="gate: expected pairs that are gated, got none in 32 tokens"):
        gate_values.count_pairs(model, windows, CONTEXT, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gates")
    patch = pytest.MonkeyPatch()
    patch.setenv("FOCUS_CACHE", str(folder / "cache"))
    world = make_world(folder)
    method = focus_method([Phase(trains="centroids", steps=2, learning_rate=1e-2)], {"gate": "exponential"})
    training.run(train_job(method), model=world.model, corpus=world.corpus, **world.outputs("method"))
    yield world, method
    patch.undo()


def run(trained, attention, output, top_k=None):
    world, method = trained
    known = {"attention": attention, "top_k": top_k, "perplexity": Perplexity(windows=3)}
    job = PerplexityJob(**row_settings(method), **known)
    files = {"model": world.model, "corpus": world.corpus, "weights": world.outputs("method")["weights"]}
    gate_values.run(job, **files, output=output)


def test_a_job_writes_what_the_gate_gives(trained, tmp_path):
    for name in ("first", "second"):
        run(trained, "soft", tmp_path / f"{name}.json")
    result, again = (read_result(tmp_path / f"{name}.json") for name in ("first", "second"))
    metrics = result["metrics"]
    assert metrics == again["metrics"]
    assert (result["experiment"], metrics["gate"], metrics["steepness"]) == ("gates", "exponential", 10.0)
    beyond = CONTEXT - WINDOW - 1
    assert metrics["far"]["pairs"] == 3 * 2 * (beyond * (beyond + 1) // 2 - beyond)
    assert metrics["near"]["pairs"] == 3 * 2 * (CONTEXT * (CONTEXT + 1) // 2 - beyond * (beyond + 1) // 2)
    assert len(metrics["layers"]) == 2 and len(metrics["windows"]) == 3
    for pairs in ("near", "far"):
        by_layer = [layer[f"{pairs}_mean"] for layer in metrics["layers"]]
        assert metrics[pairs]["mean"] == pytest.approx(sum(by_layer) / 2)
        assert metrics[pairs]["mean_error"] > 0


def test_a_row_without_a_gate_is_refused(trained, tmp_path):
    with pytest.raises(UserError, match="attention: expected soft, since nothing else has a gate, got hard"):
        run(trained, "hard", tmp_path / "hard.json", top_k=1)
    assert not (tmp_path / "hard.json").exists()
