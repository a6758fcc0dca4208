"""The ways to keep groups even do what they say and survive interruptions; the probe that watches them counts right."""

import copy
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from test_training import CENTROIDS, EVERYTHING, numbers, run
from tiny import focus_method, make_world, tiny_model, train_job
from torch.nn.functional import normalize

from focus import FocusConfig, adapter, compose, load, probe, routing, save, switch, trainer
from focus.errors import UserError
from focus.loss import mean_loss
from focus.methods import METHODS
from focus.provenance import read_result
from focus.router import Router, Seen

SMALL = {"groups": 4, "window": 4, "routing_dim": 4, "sinks": 1, "top_k": 1}
BALANCES = ["sinkhorn", "prefix", "potentials", "softmax", "entropy", "stop_gradient", "ema", "recluster"]
TOKENS = torch.arange(2 * 24).reshape(2, 24) * 7 % 250
SHARES = st.lists(st.lists(st.floats(0.01, 1), min_size=4, max_size=4), min_size=2, max_size=9)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def composed(balance, **settings):
    model = compose(tiny_model(), FocusConfig(**SMALL, balance=balance, **settings)).train()
    switch(model, "soft")
    METHODS["focus"].parameters(model, "everything")
    return model


def router_of(balance, width=6, **settings):
    config = FocusConfig(**SMALL, balance=balance, **settings)
    return Router(config, width, torch.Generator().manual_seed(0)).train()


def tensors(model, name):
    return [getattr(router, name).detach().clone() for router in adapter.routers(model)]


def first_inputs(model):
    """What the first layer's router reads."""
    base = model.transformer
    return base.h[0].ln_1(base.wte(TOKENS) + base.wpe(torch.arange(TOKENS.shape[1])))


@given(SHARES, st.integers(1, 9))
def test_losses_on_uneven_groups_are_those_of_the_definition(rows, real):
    assignment = torch.tensor(rows, dtype=torch.float64)
    assignment /= assignment.sum(dim=1, keepdim=True)
    mask = torch.arange(len(rows)) < real
    kept = [row for row, keep in zip(assignment.tolist(), mask.tolist(), strict=True) if keep]
    means = [sum(row[k] for row in kept) / len(kept) for k in range(4)]
    shares = [sum(row.index(max(row)) == k for row in kept) / len(kept) for k in range(4)]
    balance = 4 * sum(f * p for f, p in zip(shares, means, strict=True)) - 1
    gap = math.log(4) + sum(p * math.log(p) for p in means)
    assert routing.balance_loss(assignment[None], mask[None]).item() == pytest.approx(balance, abs=1e-9)
    assert routing.entropy_gap(assignment[None], mask[None]).item() == pytest.approx(gap, abs=1e-9)
    assert gap >= -1e-9


def test_losses_are_nothing_for_even_groups_and_most_for_one():
    even, one = torch.eye(4)[None], torch.eye(4)[:1].expand(1, 4, 4)
    assert routing.balance_loss(even) == 0 and routing.entropy_gap(even).item() == pytest.approx(0, abs=1e-6)
    assert routing.balance_loss(one) == 3 and routing.entropy_gap(one).item() == pytest.approx(math.log(4), abs=1e-6)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
def test_either_loss_evens_the_groups(weights):
    router = router_of("entropy", balance_weight=weights[0], entropy_weight=weights[1], temperature=1.0)
    hidden = torch.randn(1, 200, 6, generator=torch.Generator().manual_seed(1)) + torch.tensor([3.0, 0, 0, 0, 0, 0])
    before = routing.dominance(router(hidden))
    optimiser = torch.optim.Adam(router.parameters(), lr=0.05)
    for _ in range(150):
        router.imbalance(Seen(router(hidden), None, None)).backward()
        optimiser.step()
        optimiser.zero_grad()
    assert before > 0.6
    assert routing.dominance(router(hidden)) < 0.4


def test_terms_are_the_weighted_losses_of_each_layer_and_of_one_forward():
    model = composed("entropy", balance_weight=0.3, entropy_weight=0.7)
    for _ in range(2):
        with adapter.auxiliary(model) as terms:
            mean_loss(model, TOKENS)
        assert len(terms) == 2
    hidden = first_inputs(model)
    assignment = adapter.routers(model)[0](hidden)
    expected = 0.3 * routing.balance_loss(assignment) + 0.7 * routing.entropy_gap(assignment)
    assert terms[0].item() == pytest.approx(expected.item(), rel=1e-4)
    for balance in ("softmax", "potentials", "sinkhorn", "ema", "recluster"):
        with adapter.auxiliary(composed(balance)) as terms:
            pass
        assert terms == []


def gradients(balance, checkpointing=False):
    """Of the auxiliary loss alone, by parameter, and how often the routers ran."""
    model, calls = composed(balance), []
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for router in adapter.routers(model):
        router.register_forward_hook(lambda *_: calls.append(1))
    with adapter.auxiliary(model) as terms:
        loss = mean_loss(model, TOKENS)
    (0 * loss + sum(terms)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, len(calls)


def test_stop_gradient_keeps_the_routers_gradient_from_the_layers_below():
    (entropy, _), (stopped, _) = gradients("entropy"), gradients("stop_gradient")
    for name in entropy:
        router = ".focus." in name
        below = not name.startswith(("transformer.h.1.", "transformer.ln_f.")) or ".h.1.ln_1." in name
        assert (entropy[name].abs().max() > 0) == (router or below), name
        assert (stopped[name].abs().max() > 0) == router, name
    model = composed("stop_gradient")
    first = adapter.routers(model)[0]
    first.imbalance(Seen(first(first_inputs(model)), None, None)).backward()
    for name, parameter in first.named_parameters():
        got = stopped[f"transformer.h.0.attn.focus.{name}"]
        torch.testing.assert_close(got, parameter.grad, atol=1e-7, rtol=1e-4)


def test_checkpointing_activations_changes_no_auxiliary_gradient():
    (plain, once), (saving, twice) = gradients("entropy"), gradients("entropy", checkpointing=True)
    assert (once, twice) == (2, 4)
    for name in plain:
        torch.testing.assert_close(saving[name], plain[name], atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("balance", ["softmax", "potentials", "sinkhorn"])
@pytest.mark.parametrize("detach", [False, True])
def test_detached_inputs_pass_no_gradient_down(balance, detach):
    router = router_of(balance, detach_inputs=detach)
    hidden = torch.randn(1, 9, 6, requires_grad=True)
    (router(hidden) ** 2).sum().backward()
    assert router.centroids.grad.abs().max() > 0
    assert (hidden.grad is None) == detach


@pytest.mark.parametrize("frozen", [["centroids"], ["projection"], ["centroids", "projection"]])
def test_what_is_frozen_stays_and_the_rest_trains(frozen):
    model = composed("softmax", frozen=frozen)
    before = {name: tensors(model, name) for name in ("centroids", "projection")}
    optimiser = torch.optim.SGD(METHODS["focus"].parameters(model, "everything"), lr=1.0)
    mean_loss(model, TOKENS).backward()
    optimiser.step()
    for name, was in before.items():
        stays = [torch.equal(*pair) for pair in zip(was, tensors(model, name), strict=True)]
        assert stays == [name in frozen] * 2


def test_settings_that_contradict_one_another_are_refused():
    for balance in ("ema", "recluster"):
        with pytest.raises(ValidationError, match=f"frozen must leave out centroids, which balance {balance} moves"):
            FocusConfig(balance=balance, frozen=["centroids"])
    for nothing in ({"frozen": ["centroids", "projection"]}, {"balance": "ema", "frozen": ["projection"]}):
        with pytest.raises(ValidationError, match=r"adapter.frozen: expected something that a phase of centroids"):
            focus_method([CENTROIDS, EVERYTHING], nothing)
        assert focus_method([EVERYTHING], nothing)


def test_ema_centroids_follow_their_tokens_without_gradients():
    router = router_of("ema", ema_momentum=0.75)
    assert set(dict(router.named_parameters())) == {"projection"}
    hidden = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[True] * 3, [False] * 2 + [True]])
    centroids, first = router.centroids.clone(), router.projection.detach().clone()
    router.seen = []
    (router(hidden, mask) ** 2).sum().backward()
    assert router.projection.grad.abs().max() > 0
    router.gather(router.seen[0])
    with torch.no_grad():
        router.projection.add_(1.0)
    router.move_centroids()
    routed = hidden[mask] @ first.T
    groups = (routed @ centroids.T).argmax(dim=1)
    assert 1 < len(groups.unique()) < 4
    for k in range(4):
        mine = normalize(routed[groups == k], dim=1).sum(dim=0)
        old = centroids[k] / centroids[k].norm()
        expected = 0.75 * old + 0.25 * mine / mine.norm() if (groups == k).any() else old
        torch.testing.assert_close(router.centroids[k], 0.5 * expected / expected.norm())
    torch.testing.assert_close(router.projection_average, first + 0.25)
    torch.testing.assert_close(
        router(hidden), torch.softmax(hidden @ (first + 0.25).T @ router.centroids.T / 0.1, dim=-1)
    )
    moved = router.centroids.clone()
    router.move_centroids()
    assert torch.equal(router.centroids, moved)


def test_recluster_moves_the_centroids_at_the_right_steps_only():
    model = composed("recluster", recluster_every=2)
    torch.manual_seed(0)
    changes = []
    for step in range(7):
        before = tensors(model, "centroids")
        for part in range(2):
            with adapter.auxiliary(model):
                mean_loss(model, TOKENS + step + part)
        METHODS["focus"].after_step(model)
        after = tensors(model, "centroids")
        changes.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
        assert all(router.step_vectors == [] for router in adapter.routers(model))
    assert changes == [[step in (2, 4, 6)] * 2 for step in range(1, 8)]
    for centroids in tensors(model, "centroids"):
        torch.testing.assert_close(centroids.norm(dim=1), torch.full((4,), 0.25 * 4**0.5))


@pytest.mark.parametrize("seed", range(5))
def test_kmeans_finds_separate_clusters_and_repeats_itself(seed):
    generator = torch.Generator().manual_seed(seed)
    truth = normalize(torch.eye(6)[:4] + 0.1, dim=1)
    labels = torch.arange(400) % 4
    points = normalize(truth[labels] + 0.05 * torch.randn(400, 6, generator=generator), dim=1)
    torch.manual_seed(seed)
    found = routing.spherical_kmeans(points, 4)
    nearest = (truth @ found.T).argmax(dim=1)
    assert sorted(nearest.tolist()) == [0, 1, 2, 3]
    for k, near in enumerate(nearest):
        torch.testing.assert_close(found[near], normalize(points[labels == k].mean(dim=0), dim=0))
    torch.manual_seed(seed)
    assert torch.equal(routing.spherical_kmeans(points, 4), found)
    few = routing.spherical_kmeans(points[:1].expand(3, 6), 4)
    torch.testing.assert_close(few, points[:1].expand(4, 6))


@pytest.mark.parametrize("balance", ["ema", "recluster", "entropy"])
def test_every_balance_is_saved_and_loaded(tmp_path, balance):
    model = composed(balance, recluster_every=1)
    with adapter.auxiliary(model):
        mean_loss(model, TOKENS)
    METHODS["focus"].after_step(model)
    save(model, tmp_path)
    loaded = load(tiny_model(), tmp_path)
    for ours, theirs in zip(adapter.routers(model), adapter.routers(loaded), strict=True):
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        assert all(torch.equal(ours.state_dict()[name], theirs.state_dict()[name]) for name in ours.state_dict())


def probed(balance="softmax", **training):
    adapter_settings = {"balance": balance, "recluster_every": 2, "ema_momentum": 0.5, "top_k": 1}
    phases = [CENTROIDS, EVERYTHING]
    return train_job(focus_method(phases, adapter_settings, checkpoint_every=2, **training))


@pytest.mark.parametrize("balance", BALANCES)
def test_an_interrupted_run_ends_with_the_same_numbers(world, monkeypatch, balance):
    job = probed(balance, probe_every=3, probe_windows=2, accumulation=2)
    expected = numbers(run(world, job, "whole"))
    quick = trainer.mean_loss
    for forwards in (7, 6):
        calls = iter(range(forwards))

        def failing(*arguments, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return quick(*arguments)

        monkeypatch.setattr(trainer, "mean_loss", failing)
        with pytest.raises(KeyboardInterrupt):
            run(world, job, "cut")
    monkeypatch.setattr(trainer, "mean_loss", quick)
    assert numbers(run(world, job, "cut")) == expected
    assert len(expected[1]) == 9


@pytest.mark.parametrize("balance", ["entropy", "ema"])
def test_accumulation_equals_a_larger_batch(world, balance):
    large, parts = (
        run(world, probed(balance, **{size: 2}), size)["weights"] / "focus.safetensors"
        for size in ("batch_size", "accumulation")
    )
    got = load_file(parts)
    for key, expected in load_file(large).items():
        torch.testing.assert_close(got[key], expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("balance", ["entropy", "ema", "recluster"])
def test_checkpointing_activations_changes_nothing(world, balance):
    job = probed(balance)
    saving = job.model_settings.model_copy(update={"gradient_checkpointing": True})
    plain = run(world, job, "plain")["weights"] / "focus.safetensors"
    again = run(world, job.model_copy(update={"model_settings": saving}), "saving")["weights"] / "focus.safetensors"
    got = load_file(again)
    for key, expected in load_file(plain).items():
        torch.testing.assert_close(got[key], expected, atol=1e-5, rtol=0)


def test_the_log_keeps_the_auxiliary_loss_apart(world):
    loss, extra = {}, {}
    for balance in ("softmax", "entropy"):
        log = run(world, probed(balance), balance)["log"].read_text().splitlines()
        first = json.loads(log[0])
        loss[balance], extra[balance] = first["loss"], first.get("auxiliary_loss")
    assert loss["softmax"] == loss["entropy"]
    assert extra["softmax"] is None and 0 < extra["entropy"] < 2 * (0.01 * 3 + 0.01 * math.log(4))


def test_a_step_follows_the_gradient_of_both_losses(world, monkeypatch):
    quick, started = trainer.mean_loss, []

    def remember(model, batch):
        started.append((copy.deepcopy(model) if not started else None, batch))
        return quick(model, batch)

    monkeypatch.setattr(trainer, "mean_loss", remember)
    settings = {"balance": "entropy", "balance_weight": 0.5, "entropy_weight": 0.25, "top_k": 1}
    job = train_job(focus_method([EVERYTHING], settings, accumulation=2))
    first = json.loads(run(world, job, "run")["log"].read_text().splitlines()[0])
    model = started[0][0]
    total = added = 0
    for _, batch in started[:2]:
        assignments = []
        handles = [
            router.register_forward_hook(lambda *call, to=assignments: to.append(call[2]))
            for router in adapter.routers(model)
        ]
        total += model(batch, labels=batch).loss / 2
        added += sum(routing.balance_loss(each) + routing.entropy_gap(each) / 2 for each in assignments) / 4
        for handle in handles:
            handle.remove()
    (total + added).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert first["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert first["auxiliary_loss"] == pytest.approx(added.item(), rel=1e-4)
    assert first["gradient_norm"] == pytest.approx(norm.item(), rel=1e-3)


@given(st.integers(1, 3), st.integers(1, 8), st.data())
def test_dominance_and_stability_count_tokens(layers, tokens, data):
    groups = st.lists(st.integers(0, 3), min_size=2 * tokens, max_size=2 * tokens)
    now, before = (data.draw(st.lists(groups, min_size=layers, max_size=layers)) for _ in range(2))
    shaped = [torch.tensor(each, dtype=torch.int16).reshape(layers, 2, tokens) for each in (now, before)]
    look = probe.look(*shaped, steps=5, ends_phase=True)
    assert (look["steps"], look["ends_phase"]) == (5, True)
    for layer, new, old in zip(look["layers"], now, before, strict=True):
        assert layer["dominance"] == pytest.approx(max(new.count(k) for k in range(4)) / len(new))
        kept = sum(a == b for a, b in zip(new, old, strict=True))
        assert layer["stability"] == pytest.approx(kept / len(new))


def record(step, dominances, phase="centroids", ends=False):
    layers = [{"dominance": value, "stability": 1 - value} for value in dominances]
    return {"step": step, "phase": phase, "probe": {"steps": 2, "ends_phase": ends, "layers": layers}}


def test_the_metrics_name_the_step_of_collapse_and_each_phases_end():
    records = [
        record(2, [0.3, 0.5], ends=True),
        {"step": 3, "phase": "everything"},
        record(4, [0.99, 0.7], "everything"),
        record(6, [0.99, 0.83], "everything"),
        record(7, [0.5, 0.6], "everything", ends=True),
    ]
    found = probe.summary(records)
    assert found["collapse_step"] == 6
    assert (found["dominance"], found["stability"]) == pytest.approx((0.55, 0.45))
    assert [(phase["trains"], phase["step"], phase["dominance"]) for phase in found["phases"]] == [
        ("centroids", 2, 0.4),
        ("everything", 7, 0.55),
    ]
    assert found["phases"][1]["layers"] == records[-1]["probe"]["layers"]
    assert probe.summary(records[:3])["collapse_step"] is None
    assert probe.summary(records[1:2]) == {}


def test_a_probe_looks_at_the_right_steps_and_changes_no_weight(world):
    weights, log, metrics = numbers(run(world, probed(probe_every=3, probe_windows=2), "probed"))
    assert {line["step"]: line["probe"]["steps"] for line in log if "probe" in line} == {3: 3, 5: 2, 6: 1, 9: 3}
    assert [(phase["trains"], phase["step"]) for phase in metrics["phases"]] == [("centroids", 5), ("everything", 9)]
    assert metrics["collapse_step"] is None and metrics["dominance"] == metrics["phases"][1]["dominance"]
    plain, _, without = numbers(run(world, probed(), "plain"))
    assert plain == weights
    assert without.keys() == metrics.keys() - {"dominance", "stability", "collapse_step", "phases"}


def test_stability_is_since_the_look_before(world, monkeypatch):
    first, second = torch.zeros(2, 1, 4), torch.tensor([0.0, 0, 1, 1]).expand(2, 1, 4)
    looks = iter([first, second, second, first, first])
    monkeypatch.setattr(type(METHODS["focus"]), "groups", lambda *_: next(looks).long())
    _, log, _ = numbers(run(world, probed(probe_every=3, probe_windows=1), "scripted"))
    layers = [line["probe"]["layers"] for line in log if "probe" in line]
    assert [[layer["stability"] for layer in look] for look in layers] == [[0.5] * 2, [1.0] * 2, [0.5] * 2, [1.0] * 2]
    assert [look[0]["dominance"] for look in layers] == [0.5, 0.5, 1.0, 1.0]
    assert next(looks, None) is None


def test_a_probe_sees_the_groups_that_hard_attention_forms():
    model = composed("softmax")
    assert METHODS["pretrained"].groups(tiny_model(), TOKENS) is None
    found = METHODS["focus"].groups(model, TOKENS)
    assert model.training and found.shape == (2, 2, 24)
    hidden = first_inputs(model)
    router = adapter.routers(model)[0]
    assert torch.equal(found[0], (hidden @ router.projection.T @ router.centroids.T).argmax(dim=-1))
    switch(model, "full")
    with pytest.raises(UserError, match="attention: expected soft or hard to look at groups, got full"):
        adapter.groups(model, TOKENS)


def test_a_method_without_groups_is_trained_unprobed(world):
    full = focus_method([EVERYTHING]).model_dump() | {"kind": "full_finetuning"}
    del full["adapter"]
    full["training"] |= {"probe_every": 2}
    job = probed()
    outputs = run(world, job.model_validate(job.model_dump() | {"settings": full}), "full")
    assert "dominance" not in read_result(outputs["output"])["metrics"]
