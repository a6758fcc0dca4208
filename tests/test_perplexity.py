"""Perplexity against the definition, and whole evaluation jobs of every kind of row."""

import math

import pytest
import torch
from tiny import CONTEXT, WINDOW, focus_method, make_world, row_settings, tiny_model, train_job

from focus import training
from focus.config import Perplexity
from focus.data import Window, evaluation_windows
from focus.errors import UserError
from focus.evaluation import perplexity as evaluation
from focus.jobs import PerplexityJob
from focus.method_config import Phase, make_method
from focus.provenance import read_result

CENTROIDS = Phase(trains="centroids", steps=2, learning_rate=1e-2)
PRETRAINED = make_method(kind="pretrained", label="pretrained")


def windows(stride=None, count=6):
    generator = torch.Generator().manual_seed(0)
    texts = [(name, torch.randint(0, 250, (200,), generator=generator)) for name in ("a", "b")]
    return evaluation_windows(texts, CONTEXT, count, stride)


@torch.no_grad()
def losses_by_definition(model, window):
    probabilities = torch.log_softmax(model(window.tokens[None]).logits[0].double(), dim=-1)
    positions = range(window.first, len(window.tokens))
    return sum(-probabilities[position - 1, window.tokens[position]].item() for position in positions)


@pytest.mark.parametrize("stride", [None, 10])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_losses_are_those_of_the_definition(stride, batch_size):
    model = tiny_model()
    metrics = evaluation.perplexity(model, windows(stride), batch_size=batch_size)
    expected = [losses_by_definition(model, window) for window in windows(stride)]
    assert [measured["loss_sum"] for measured in metrics["windows"]] == pytest.approx(expected, rel=1e-5)
    assert metrics["tokens"] == 6 * (stride or CONTEXT - 1)
    assert metrics["perplexity"] == pytest.approx(math.exp(sum(expected) / metrics["tokens"]), rel=1e-5)


def test_documents_sum_their_windows():
    metrics = evaluation.perplexity(tiny_model(), windows())
    assert [document["document"] for document in metrics["documents"]] == ["a", "b"]
    for document in metrics["documents"]:
        own = [measured for measured in metrics["windows"] if measured["document"] == document["document"]]
        assert document["tokens"] == sum(measured["tokens"] for measured in own) > 0
        assert document["loss_sum"] == pytest.approx(sum(measured["loss_sum"] for measured in own))


def test_a_loss_that_is_not_finite_is_refused():
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="a from token 0: expected a finite loss"):
        evaluation.perplexity(model, [Window("a", 0, torch.arange(8), 1)])


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def measure(world, settings, attention="full", top_k=None, weights=None):
    common = row_settings(settings)
    job = PerplexityJob.model_validate(
        common | {"attention": attention, "top_k": top_k, "perplexity": Perplexity(windows=4)}
    )
    output = world.folder / f"{settings.kind}-{attention}-{top_k}.json"
    evaluation.run(job, model=world.model, corpus=world.corpus, weights=weights, output=output)
    return read_result(output)


def test_a_base_model_reads_all_pairs(world):
    result = measure(world, PRETRAINED)
    metrics = result["metrics"]
    assert (metrics["pairs_kept"], metrics["far_pairs_kept"], metrics["trained_parameters"]) == (1.0, 1.0, 0)
    assert (metrics["context"], metrics["stride"], metrics["tokens"]) == (CONTEXT, CONTEXT, 4 * (CONTEXT - 1))
    assert {measured["document"] for measured in metrics["windows"]} == {"d2", "d5"}
    assert metrics["layers"] == []
    assert result["provenance"]["backend"] == "sdpa"
    assert result["provenance"]["revisions"]["corpus"]["revision"] == "sha256:0"


def test_a_window_reads_what_the_formula_says(world):
    metrics = measure(world, make_method(kind="window", label="window", sinks=2))["metrics"]
    far = sum(max(position - WINDOW, 0) for position in range(CONTEXT))
    sinks = sum(min(max(position - WINDOW, 0), 2) for position in range(CONTEXT))
    assert metrics["far_pairs_kept"] == pytest.approx(sinks / far)
    assert metrics["perplexity"] != measure(world, PRETRAINED)["metrics"]["perplexity"]


def test_focus_is_evaluated_with_its_trained_routers(world):
    settings = focus_method([CENTROIDS], {"sinks": 0})
    outputs = world.outputs("focus")
    training.run(train_job(settings), model=world.model, corpus=world.corpus, **outputs)
    measured = {
        key: measure(world, settings, *key, weights=outputs["weights"])["metrics"]
        for key in (("soft", None), ("hard", 1), ("hard", 2), ("hard", 4), ("full", None))
    }
    pretrained = measure(world, PRETRAINED)["metrics"]
    kept = [measured["hard", k]["far_pairs_kept"] for k in (1, 2, 4)]
    assert 0 < kept[0] < kept[1] < kept[2] == 1.0
    assert measured["soft", None]["pairs_kept"] == measured["full", None]["pairs_kept"] == 1.0
    assert measured["hard", 4]["perplexity"] == pytest.approx(pretrained["perplexity"], rel=1e-5)
    assert measured["full", None]["perplexity"] == pretrained["perplexity"]
    assert len({row["perplexity"] for row in measured.values()}) >= 4
    layers = measured["hard", 1]["layers"]
    assert len(layers) == 2
    assert all(layer.keys() == {"dominance", "confidence", "pairs_kept", "far_pairs_kept"} for layer in layers)
    assert measured["hard", 1]["trained_parameters"] == 2 * (16 * 4 + 4 * 4)


def test_a_trained_row_needs_its_weights(world):
    with pytest.raises(UserError, match="expected the folder of its trained weights"):
        measure(world, focus_method([CENTROIDS]), "soft")


def test_attention_a_method_lacks_is_refused(world):
    with pytest.raises(UserError, match="attention: expected full"):
        measure(world, PRETRAINED, "soft")
