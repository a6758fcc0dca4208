"""Whether groups see the future, measured on trained centroids: changed later tokens, balances, and a whole job."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONTEXT, WINDOW, focus_method, make_world, row_settings, tiny_model, train_job

from focus import adapter, leak, routing, training
from focus.adapter import compose, rebalance, switch
from focus.data import Window
from focus.errors import UserError
from focus.jobs import LeakJob
from focus.leak_config import LeakMeasure
from focus.method_config import READS, FocusConfig, Phase
from focus.provenance import read_result

MOVING = {"groups": 4, "window": 2, "routing_dim": 4, "sinks": 1, "centroid_std": 1.0}


def windows(count=2, seed=0, length=24):
    generator = torch.Generator().manual_seed(seed)
    return [Window("d", number, torch.randint(256, (length,), generator=generator), 1) for number in range(count)]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 90), st.sampled_from([1, 2, 10]), st.booleans())
def test_a_row_of_prefix_sinkhorn_is_the_last_of_sinkhorn_over_its_prefix(seed, length, iterations, padded):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, length, generator=generator) < 0.8 if padded else None
    how = {"temperature": 0.2, "iterations": iterations}
    got = routing.prefix_sinkhorn(scores, **how, padding_mask=mask)
    for end in range(1, length + 1):
        part = None if mask is None else mask[:, :end]
        expected = routing.sinkhorn(scores[:, :end], **how, padding_mask=part)[:, -1]
        real = slice(None) if mask is None else mask[:, end - 1]
        torch.testing.assert_close(got[:, end - 1][real], expected[real], rtol=0, atol=1e-9)


def test_prefix_sinkhorn_has_the_gradient_of_the_oracle_and_never_looks_ahead():
    scores = torch.randn(1, 70, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    how = {"temperature": 0.2, "iterations": 5}
    weights = torch.arange(3.0)
    whole = routing.prefix_sinkhorn(scores, **how)
    rows = torch.stack([routing.sinkhorn(scores[:, : end + 1], **how)[:, -1] for end in range(70)], dim=1)
    got, expected = (torch.autograd.grad((each * weights).sum(), scores)[0] for each in (whole, rows))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
    changed = scores.detach().clone()
    changed[:, 40:] = 5.0
    assert torch.equal(routing.prefix_sinkhorn(changed, **how)[:, :40], whole[:, :40])


def test_prefix_sinkhorn_survives_sharp_scores():
    scores = 60 * torch.randn(1, 50, 4, generator=torch.Generator().manual_seed(2))
    got = routing.prefix_sinkhorn(scores, temperature=0.05, iterations=10)
    assert got.isfinite().all()
    torch.testing.assert_close(got.sum(dim=-1), torch.ones(1, 50))


def test_what_a_balance_reads_is_what_its_router_reads():
    """A changed token moves its own row alone, rows from it on, or all rows."""
    for balance, reads in READS.items():
        router = adapter.routers(compose(tiny_model(), FocusConfig(**MOVING, balance=balance)))[0].eval()
        hidden = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(3))
        changed = hidden.clone()
        changed[:, 6] += 1.0
        with torch.no_grad():
            moved = (router(hidden) != router(changed)).any(dim=-1)[0]
        assert moved[6]
        assert moved[:6].any() == (reads == "sequence"), balance
        assert moved[7:].any() == (reads != "token"), balance
        config = FocusConfig(balance=balance)
        assert (config.causal, config.per_token) == (reads != "sequence", reads == "token")


def test_the_default_balance_is_causal_and_decodes():
    assert FocusConfig().balance == "potentials"
    assert FocusConfig().causal and FocusConfig().per_token


@pytest.mark.parametrize("balance", sorted(READS))
def test_changed_tokens_move_earlier_logits_under_sinkhorn_alone(balance):
    model = compose(tiny_model(), FocusConfig(**MOVING, balance=balance))
    for mode in ("soft", "hard"):
        switch(model, mode)
        found = leak.changes(model, windows())
        assert found["rest"]["positions"] == 24
        for part in found.values():
            assert (part["max_abs"] > leak.NOISE and part["mean_kl"] > 0) == (balance == "sinkhorn"), (mode, part)
            assert part["mean_kl"] >= 0


def test_the_divergence_is_that_of_both_distributions():
    model = compose(tiny_model(), FocusConfig(**MOVING, balance="sinkhorn"))
    switch(model, "soft")
    one, other = windows()
    found = leak.changes(model, [one, other])["rest"]
    total = 0.0
    for own, next_one in ((one, other), (other, one)):
        swapped = torch.cat([own.tokens[:12], next_one.tokens[12:]])
        with torch.no_grad():
            both = [model(input_ids=ids[None]).logits[0, :12].double() for ids in (own.tokens, swapped)]
        before, after = (logits.softmax(dim=-1) for logits in both)
        total += (before * (before / after).log()).sum().item()
    assert found["mean_kl"] == pytest.approx(total / 24, rel=1e-3)


def test_rebalancing_is_composing_with_another_balance():
    model = compose(tiny_model(), FocusConfig(**MOVING, balance="sinkhorn"))
    ids = windows(1)[0].tokens[None]
    for balance in ("prefix", "softmax", "potentials", "sinkhorn"):
        rebalance(model, balance)
        fresh = compose(tiny_model(), FocusConfig(**MOVING, balance=balance))
        with torch.no_grad():
            assert torch.equal(model(ids).logits, fresh(ids).logits)
    with pytest.raises(UserError, match="balance: expected none of ema, recluster to change between, got ema"):
        rebalance(model, "ema")


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def test_a_whole_job(world):
    method = focus_method([Phase(trains="centroids", steps=2, learning_rate=1e-2)], {"balance": "sinkhorn"})
    trained = world.outputs("focus")
    training.run(train_job(method), model=world.model, corpus=world.corpus, **trained)
    measure = LeakMeasure(windows=4, changed_windows=2, corpora=["austen"], other_windows=4, calibration_windows=2)
    row = row_settings(method)
    output = world.folder / "leak.json"
    places = {"model": world.model, "corpus": world.corpus, "others": [world.corpus]}
    leak.run(LeakJob(**row, leak=measure), **places, weights=trained["weights"], output=output)
    metrics = read_result(output)["metrics"]
    assert (metrics["context"], metrics["window"]) == (CONTEXT, WINDOW)
    assert list(metrics["balances"]) == sorted(measure.balances)
    for balance, found in metrics["balances"].items():
        assert found["causal"] == found["declared_causal"] == (balance != "sinkhorn")
        assert len(found["windows"]) == 4 == len(metrics["pretrained"]["windows"])
        assert 0.25 <= found["dominance"]["austen"]["mean"] <= 1
    different = {found["perplexity"] for found in metrics["balances"].values()}
    assert len(different) == 4
