"""The controls beside learned groups: a scale for far pairs, groups that nothing learns, groups from k-means."""

import pytest
import replacement
import torch
from paper_results import experiment
from tiny import WINDOW, make_world, row_settings, tiny_model, train_job
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from focus import adapter, training
from focus.attention.reference import dense_attention
from focus.config import Perplexity, Row
from focus.errors import UserError
from focus.evaluation import perplexity as evaluation
from focus.jobs import PerplexityJob
from focus.method_config import Phase, Training, make_method
from focus.methods import METHODS, far_scale, fixed_groups, structural
from focus.methods.structural import Call
from focus.provenance import read_result

TOKENS = torch.arange(45)[None] ** 2 * 7 % 60 + 1
EVERYTHING = Phase(trains="everything", steps=2, learning_rate=1e-3)
SCALES = Phase(trains="scales", steps=4, learning_rate=0.1)
FIT = Training(phases=[], calibration_windows=2)
BY = ["position", "token", "random"]
BITS = 0xFFFFFFFF


def far(**changes):
    return make_method(kind="far_scale", label="far", sinks=2, training=Training(phases=[SCALES]), **changes)


def fixed(by, **changes):
    return make_method(kind="fixed_groups", label=by, **({"by": by, "sinks": 2} | changes))


def kmeans(**changes):
    return make_method(kind="kmeans_groups", label="k-means", **({"sinks": 2, "training": FIT} | changes))


CONTROLS = {"far": far(), "k-means": kmeans()} | {by: fixed(by) for by in BY}
CONTROLS |= {"k-means, k=2": kmeans(top_k=2), "random, k=2": fixed("random", top_k=2)}


SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 257, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def tiny_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def tiny_mistral():
    """Every layer looks back 11 tokens, and its cache holds no more."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=11)).eval()


MODELS = {"gpt2": tiny_model, "llama": tiny_llama, "mistral": tiny_mistral}


def attached(settings, model="gpt2", seed=0):
    """With sharp weights, so that attention matters, a scale of 1/2, and centroids that are fitted."""
    network, method = MODELS[model](), METHODS[settings.kind]
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "attn" in name and parameter.dim() == 2:
                parameter.mul_(8)
    method.attach(network, settings, window=WINDOW, seed=seed)
    for module in network.modules():
        if isinstance(module, far_scale.Scaled):
            module.scale.data.fill_(0.5)
    if settings.kind == "kmeans_groups":
        torch.manual_seed(0)
        method.prepare(network, iter([TOKENS, TOKENS + 3]))
    return network


def logits(model, tokens=TOKENS, **arguments):
    return replacement.logits(model, tokens, **arguments)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CONTROLS)
def test_later_tokens_change_nothing_earlier(name, model):
    model = attached(CONTROLS[name], model)
    replacement.check_later_tokens_change_nothing_earlier(model, TOKENS, lambda tokens: tokens + 100, tolerance=1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CONTROLS)
def test_a_cache_scores_what_the_whole_text_scores(name, model):
    settings = CONTROLS[name]
    model = attached(settings, model)
    assert METHODS[settings.kind].decodes(settings)
    replacement.check_a_cache_scores_what_the_whole_text_scores(model, TOKENS, tolerance=1e-4)


@pytest.mark.parametrize("name", CONTROLS)
def test_padding_on_either_side_changes_nothing(name):
    model = attached(CONTROLS[name], "llama")
    replacement.check_padding_on_either_side_changes_nothing(model, TOKENS, tolerance=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", [far(), kmeans(top_k=4), fixed("token", top_k=4)], ids=lambda each: each.kind)
def test_what_prunes_nothing_is_the_base_model(settings, model):
    base = MODELS[model]()
    ours = METHODS[settings.kind].attach(MODELS[model](), settings, window=WINDOW, seed=0)
    torch.testing.assert_close(logits(ours), logits(base), atol=1e-5, rtol=1e-5)


CALLS = [
    {},
    {"padding": True},
    {"queries": 7, "padding": True, "sliding_window": 15},
    {"queries": 1, "softcap": 1.5},
    {"key_heads": 4, "softcap": 2.0, "padding": True},
]


@pytest.mark.parametrize("shape", CALLS, ids=str)
def test_far_scores_alone_are_scaled(shape, monkeypatch):
    monkeypatch.setattr(structural, "BLOCK", 16)
    torch.manual_seed(0)
    keys, queries, sinks, window = 41, shape.get("queries", 41), 2, 4
    state = far_scale.Scaled(far(), window).double()
    state.scale.data.fill_(0.7)
    query = torch.randn(2, 4, queries, 6, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, shape.get("key_heads", 2), keys, 6).double().requires_grad_() for _ in range(2))
    real = torch.ones(2, keys, dtype=torch.bool)
    if "padding" in shape:
        real[0, :9] = real[1, 36:] = False
    padding, softcap, sliding = (
        real if "padding" in shape else None,
        shape.get("softcap"),
        shape.get("sliding_window"),
    )
    out = METHODS["far_scale"].attend(Call(query, key, value, padding, 0.3, softcap, sliding, state))

    allowed, scaled = (torch.zeros(2, queries, keys, dtype=torch.bool) for _ in range(2))
    for b in range(2):
        first = [j for j in range(keys) if real[b, j]][:sinks]
        for row in range(queries):
            i = keys - queries + row
            for j in range(i + 1):
                allowed[b, row, j] = bool(real[b, j]) and (sliding is None or i - j < sliding)
                scaled[b, row, j] = i - j > window and j not in first
    factor = torch.where(scaled, state.scale, 1.0)
    oracle = dense_attention(query, key, value, allowed, factor=factor, scale=0.3, softcap=softcap)
    seen = real[:, None, keys - queries :, None]
    torch.testing.assert_close(out * seen, oracle * seen, atol=1e-9, rtol=0)
    grad, tensors = torch.randn_like(oracle) * seen, (query, key, value, state.scale)
    for x, y in zip(*(torch.autograd.grad(each, tensors, grad) for each in (out, oracle)), strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=0)


def mix(x):
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & BITS
    return x ^ (x >> 16)


def groups_by_hand(seed, tokens, by, groups, k):
    """The groups of each token, by the definition: the k largest of its random numbers."""
    found = []
    for position, token in enumerate(tokens):
        place, word = mix(mix(seed) ^ position), mix(mix(seed) ^ token)
        key = {"position": place, "token": word, "random": mix(place ^ token)}[by]
        numbers = [mix(key ^ group) for group in range(groups)]
        found.append(set(sorted(range(groups), key=lambda group: -numbers[group])[:k]))
    return found


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("by", BY)
@torch.no_grad()
def test_fixed_groups_are_hashes_and_decide_the_pairs(by, k):
    settings = fixed(by, top_k=k)
    model = attached(settings)
    with adapter.watching(model) as layers, METHODS[settings.kind].observe(model) as observed:
        model(TOKENS, use_cache=False)
    for router, seen, watched in zip(adapter.routers(model), layers, observed, strict=True):
        expected = groups_by_hand(int(router.seed), TOKENS[0].tolist(), by, 4, k)
        shares = seen[0].assignment[0]
        assert [set(row.topk(k).indices.tolist()) for row in shares] == expected
        torch.testing.assert_close(shares.sum(dim=-1), torch.ones(45))
        far_pairs = [(i, j) for i in range(45) for j in range(i) if i - j > WINDOW]
        kept = sum(j < 2 or bool(expected[i] & expected[j]) for i, j in far_pairs)
        assert watched["far_pairs_kept"] == pytest.approx(kept / len(far_pairs))


@pytest.mark.parametrize("by", BY)
def test_fixed_groups_are_even_and_independent(by):
    places, words = (
        torch.arange(4000)[None],
        torch.randint(50000, (1, 4000), generator=torch.Generator().manual_seed(0)),
    )
    members = [
        fixed_groups.draw(torch.tensor([seed]), places, words, by, 4)[0].argsort(dim=-1)[:, 2:] for seed in (5, 6)
    ]
    for pair in members:
        assert torch.bincount(pair.flatten(), minlength=4).float().div(8000).sub(0.25).abs().max() < 0.02
    assert (members[0][:, 1] == members[1][:, 1]).float().mean() == pytest.approx(0.25, abs=0.03)
    one = torch.zeros(4000, 4, dtype=torch.bool).scatter(1, members[0], True)
    shared = (one[:2000] & one[2000:]).any(dim=1).float().mean()
    assert shared == pytest.approx(5 / 6, abs=0.03)


def test_what_decides_fixed_groups():
    seed, places = torch.tensor([9]), torch.arange(50)[None]
    words = torch.arange(50)[None] % 5
    moved = {by: [fixed_groups.draw(seed, places, w, by, 4) for w in (words, words + 7)] for by in BY}
    assert torch.equal(*moved["position"])
    assert not torch.equal(*moved["token"]) and not torch.equal(*moved["random"])
    token, random = moved["token"][0][0], moved["random"][0][0]
    assert all(torch.equal(token[i], token[i % 5]) for i in range(50))
    assert len(random.unique(dim=0)) == 50
    other = fixed_groups.draw(seed + 1, places, words, "token", 4)
    assert not torch.equal(other[0], token)
    first, second = (int(router.seed) for router in adapter.routers(attached(fixed("token"))))
    assert first != second != int(adapter.routers(attached(fixed("token"), seed=1))[0].seed)


def test_fixed_groups_come_off_and_refuse_what_has_no_groups():
    method, model = METHODS["fixed_groups"], tiny_model()
    base = logits(model)
    method.attach(model, fixed("token"), window=WINDOW, seed=0)
    assert not torch.allclose(logits(model), base, atol=1e-4)
    with pytest.raises(UserError, match="input_ids: expected token ids"):
        model(inputs_embeds=torch.zeros(1, 3, 16))
    for attention in ("soft", "full"):
        with pytest.raises(UserError, match=f"attention: expected hard .* got {attention}"):
            method.choose(model, attention, None)
    with pytest.raises(UserError, match="expected everything for kind fixed_groups, got centroids"):
        method.parameters(model, "centroids")
    assert torch.equal(logits(adapter.decompose(model)), base)
    model(inputs_embeds=torch.zeros(1, 3, 16))


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_k_means_is_of_what_the_layers_read_under_full_attention(model):
    base, ours = MODELS[model](), attached(kmeans(), model)
    base.load_state_dict({name: value for name, value in ours.state_dict().items() if "focus" not in name})
    inputs = []
    for layer in adapter.attention_layers(base):
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(kwargs.get("hidden_states", args[0] if args else None)),
            with_kwargs=True,
        )
    logits(base, torch.cat([TOKENS, TOKENS + 3]))
    for router, hidden in zip(adapter.routers(ours), inputs, strict=True):
        centred = hidden.flatten(0, 1) - hidden.flatten(0, 1).mean(dim=0)
        units = torch.nn.functional.normalize(centred, dim=-1)
        centroids = router.projection
        nearest = [int((centroids @ unit).argmax()) for unit in units]
        assert len(set(nearest)) == 4
        for group in range(4):
            members = units[[index for index, found in enumerate(nearest) if found == group]]
            torch.testing.assert_close(torch.nn.functional.normalize(members.sum(dim=0), dim=0), centroids[group])
        scores = router.centroids @ centroids @ centred.T
        assert [int(each) for each in scores.argmax(dim=0)] == nearest
        assert scores.std() == pytest.approx(0.25, rel=1e-3)


@torch.no_grad()
def test_groups_of_k_means_are_even_on_what_they_were_fitted_to():
    method, model = METHODS["kmeans_groups"], attached(kmeans(), "llama")
    text = torch.randint(257, (1, 200), generator=torch.Generator().manual_seed(1))
    method.prepare(model, iter([text]))
    method.choose(model, "soft", None)
    largest = []
    for _ in ("calibrated", "without potentials"):
        with method.observe(model) as layers:
            model(text, use_cache=False)
        largest.append(max(layer["dominance"] for layer in layers))
        for router in adapter.routers(model):
            router.potentials.zero_()
    assert largest[0] < 0.35 and largest[1] > largest[0]
    assert torch.equal(logits(attached(kmeans(), "llama", seed=3)), logits(attached(kmeans(), "llama")))
    with pytest.raises(UserError, match="calibration_windows: expected at least 1"):
        METHODS["kmeans_groups"].prepare(model, iter([]))
    with pytest.raises(UserError, match="expected everything for kind kmeans_groups"):
        METHODS["kmeans_groups"].parameters(model, "centroids")


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def measured(world, settings, weights, attention, top_k):
    choice = {"attention": attention, "top_k": top_k, "perplexity": Perplexity(windows=2)}
    output = world.folder / "row.json"
    job = PerplexityJob.model_validate(row_settings(settings) | choice)
    evaluation.run(job, model=world.model, corpus=world.corpus, weights=weights, output=output)
    return read_result(output)["metrics"]


TRAINED = {
    "far": far(),
    "fixed": fixed("random", training=Training(phases=[EVERYTHING])),
    "k-means": kmeans(),
    "k-means tuned": kmeans(training=Training(phases=[EVERYTHING])),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_control_is_saved_and_measured(name, world):
    settings, outputs = TRAINED[name], world.outputs("run")
    training.run(train_job(settings, seed=5), model=world.model, corpus=world.corpus, **outputs)
    trained = read_result(outputs["output"])["metrics"]["trained_parameters"]
    every = sum(parameter.numel() for parameter in tiny_model().parameters())
    assert trained == {"far": 2, "k-means": 0}.get(name, every)
    size = sum(file.stat().st_size for file in outputs["weights"].iterdir())
    assert (size > 4 * every) == (trained == every)
    choice = ("full", None) if name == "far" else ("hard", 2)
    metrics = measured(world, settings, outputs["weights"], *choice)
    assert metrics["trained_parameters"] == trained
    assert (metrics["far_pairs_kept"] == 1) == (name == "far")
    if name != "far":
        assert 0.5 < metrics["far_pairs_kept"] < 1
        assert measured(world, settings, outputs["weights"], "hard", 4)["far_pairs_kept"] == 1


def test_what_is_saved_comes_back_whatever_the_seed(tmp_path):
    for number, settings in enumerate(TRAINED.values()):
        method, model = METHODS[settings.kind], attached(settings, seed=7)
        folder = tmp_path / str(number)
        folder.mkdir()
        if settings.training.phases:
            with torch.no_grad():
                for parameter in method.parameters(model, settings.training.phases[0].trains):
                    parameter.add_(0.01)
        base = tiny_model()
        base.load_state_dict(
            {key: value for key, value in model.state_dict().items() if "focus" not in key and "structural" not in key}
        )
        replacement.check_what_is_saved_comes_back(method, model, settings, folder, base, TOKENS, window=WINDOW)


@pytest.mark.parametrize("name", ["far", "fixed"])
def test_only_what_a_phase_trains_gets_gradients(name):
    settings = TRAINED[name]
    method, model = METHODS[settings.kind], attached(settings)
    parameters = method.parameters(model.train(), settings.training.phases[0].trains)
    assert {id(each) for each in model.parameters() if each.requires_grad} == {id(each) for each in parameters}
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in parameters)


def test_rows_with_an_attention_that_a_control_lacks_are_refused():
    settings = experiment()
    methods = settings.methods | {"fixed": fixed("token"), "far": far()}
    settings = settings.model_copy(update={"methods": methods})
    settings._check_row(Row(method="fixed", attention="hard", top_k=2), "tables.x.rows.0")
    for row, kinds in (
        ({"method": "fixed"}, "expected hard for kind fixed_groups, got full"),
        ({"method": "fixed", "attention": "hard", "top_k": 5}, r"top_k: expected at most groups \(4\), got 5"),
        ({"method": "far", "attention": "soft"}, "expected full for kind far_scale, got soft"),
    ):
        with pytest.raises(ValueError, match=kinds):
            settings._check_row(Row(**row), "tables.x.rows.0")
    with pytest.raises(ValueError, match="training of kind kmeans_groups: expected settings"):
        make_method(kind="kmeans_groups", label="x")
    with pytest.raises(ValueError, match="top_k must be at most groups"):
        fixed("token", top_k=5)
