"""Methods that replace attention: their papers' masks, causal, decodable, trainable; long inputs as short ones."""

from dataclasses import replace

import pytest
import replacement
import structural_oracle
import torch
from safetensors.torch import load_file
from tiny import WINDOW, make_world, row_settings, tiny_model, train_job
from transformers import LlamaConfig, LlamaForCausalLM

from focus import trainer, training
from focus.attention.reference import dense_attention
from focus.config import Perplexity
from focus.errors import UserError
from focus.evaluation import perplexity as evaluation
from focus.jobs import PerplexityJob
from focus.method_config import Phase, Training, make_method
from focus.methods import METHODS, bigbird, routing_transformer, s2, structural, tiled
from focus.methods.structural import Call
from focus.provenance import read_result

SETTINGS = {
    "longformer": {"global_tokens": 3, "global_stride": 5},
    "bigbird": {"block": 3, "random_blocks": 2, "global_blocks": 1},
    "routing_transformer": {"clusters": 3, "cluster_tokens": 4, "decay": 0.5},
    "s2": {"stride": 3, "block": 2},
    "moba": {"block": 5, "top_k": 3},
    "quest": {"page": 3, "pages": 4},
}
KINDS = list(SETTINGS)
COUNTED = ["longformer", "bigbird"]
TOKENS = torch.arange(45)[None] * 7 % 250
EVERYTHING = Phase(trains="everything", steps=1, learning_rate=1e-3)


def settings_of(kind, **changes):
    return make_method(kind=kind, label=kind, **(SETTINGS[kind] | changes))


def paddings(kind, keys):
    if kind == "none":
        return None
    real = torch.ones(2, keys, dtype=torch.bool)
    real[0, : keys // 4] = False
    real[1, keys - keys // 5 :] = False
    if kind == "holes":
        real[0, keys // 2] = real[1, 3:5] = False
    return real


def make_call(kind, *, keys=41, queries=None, padding="none", heads=4, key_heads=2, width=6, window=4, **changes):
    """A call with gradients in float64, and its mask by the oracle."""
    torch.manual_seed(0)
    settings, queries = settings_of(kind), queries or keys
    shape = {"window": window, "heads": heads, "head_dim": width}
    state = METHODS[kind].layer_state(settings, **shape, generator=torch.Generator().manual_seed(1))
    query = torch.randn(2, queries, heads, width, dtype=torch.float64).transpose(1, 2).requires_grad_()
    key, value = (torch.randn(2, key_heads, keys, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    real = paddings(padding, keys)
    call = Call(query, key, value, real, 0.3, changes.get("softcap"), changes.get("sliding_window"), state.eval())
    whole = torch.ones(2, keys, dtype=torch.bool) if real is None else real
    with torch.no_grad():
        mask = structural_oracle.allowed_pairs(settings, window, query, key, whole, state)
    if call.sliding_window is not None:
        distance = torch.arange(keys)[keys - queries :, None] - torch.arange(keys)
        mask &= distance < call.sliding_window
    return call, mask, whole[:, None, keys - queries :, None]


def by_oracle(call, mask):
    shared = call.query.shape[1] // call.key.shape[1]
    heads = [
        dense_attention(
            call.query[:, h : h + 1],
            call.key[:, h // shared : h // shared + 1],
            call.value[:, h // shared : h // shared + 1],
            mask[:, h],
            scale=call.scale,
            softcap=call.softcap,
        )
        for h in range(call.query.shape[1])
    ]
    return torch.cat(heads, dim=1)


def assert_same(ours, oracle, real, call):
    grad = torch.randn_like(oracle) * real
    torch.testing.assert_close(ours * real, oracle * real, atol=1e-9, rtol=0)
    tensors = (call.query, call.key, call.value)
    for x, y in zip(torch.autograd.grad(ours, tensors, grad), torch.autograd.grad(oracle, tensors, grad), strict=True):
        torch.testing.assert_close(x, y, atol=1e-9, rtol=0)


def use_the_long_way(monkeypatch):
    monkeypatch.setattr(tiled, "SHORTEST_TILED", 1)
    monkeypatch.setattr(s2, "SHORTEST_DECOMPOSED", 1)
    monkeypatch.setattr(tiled, "ROWS", 16)
    monkeypatch.setattr(tiled, "BAND_TILE", 8)
    monkeypatch.setattr(tiled, "SMALLEST_TILE", 2)
    monkeypatch.setattr(routing_transformer, "BLOCK", 4)


CASES = [
    {},
    {"padding": "both"},
    {"padding": "holes", "softcap": 2.0},
    {"queries": 7, "padding": "both", "sliding_window": 15},
    {"queries": 1, "softcap": 1.5},
    {"heads": 3, "key_heads": 3, "sliding_window": 11},
    {"heads": 6, "key_heads": 1, "window": 0},
    {"window": 50},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("way", ["short", "long"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_the_oracles(kind, way, case, monkeypatch):
    monkeypatch.setattr(structural, "BLOCK", 16)
    if way == "long":
        use_the_long_way(monkeypatch)
    call, mask, real = make_call(kind, **case)
    out = METHODS[kind].attend(call)
    assert out.isfinite().all()
    assert_same(out, by_oracle(call, mask), real, call)


def saved_by(attend, call):
    """The output, and the numbers of elements of the tensors kept for the backward pass."""
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return attend(call), sizes


@pytest.mark.parametrize("kind", ["bigbird", "routing_transformer", "s2", "moba", "quest"])
def test_long_inputs_are_never_dense_though_their_pairs_are_counted(kind):
    short, _, _ = make_call(kind, keys=50)
    METHODS[kind].attend(short)
    assert short.state.backend == "masked, dense"
    long = torch.randn(1, 4, tiled.SHORTEST_TILED + 5, 6)
    tensors = [part.clone().requires_grad_() for part in (long, long[:, :2], long[:, 2:])]
    call = replace(short, **dict(zip(("query", "key", "value"), tensors, strict=True)))
    with torch.no_grad():
        expected = structural.Masked.attend(METHODS[kind], call)
    plain, sizes = saved_by(METHODS[kind].attend, call)
    call.state.observed = {}
    observed, observed_sizes = saved_by(METHODS[kind].attend, call)
    assert call.state.backend == ("decomposed/cpu-flash" if kind == "s2" else "tiles/cpu-flash")
    assert observed_sizes == sizes and max(sizes) <= 4 * long.numel()
    assert 0 < call.state.observed["far_pairs_kept"] < call.state.observed["pairs_kept"] < 1
    assert torch.equal(observed, plain)
    torch.testing.assert_close(observed, expected, atol=1e-5, rtol=0)
    grads = [torch.autograd.grad(out.square().sum(), tensors) for out in (plain, observed)]
    assert all(torch.equal(x, y) and x.abs().sum() > 0 for x, y in zip(*grads, strict=True))


@pytest.mark.parametrize("way", ["short", "long"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_near(kind, way, monkeypatch):
    call, _, _ = make_call(kind, keys=30)
    low = replace(call, **{name: getattr(call, name).detach().bfloat16() for name in ("query", "key", "value")})
    exact = replace(low, **{name: getattr(low, name).float() for name in ("query", "key", "value")})
    expected = METHODS[kind].attend(exact)
    if way == "long":
        use_the_long_way(monkeypatch)
    out = METHODS[kind].attend(low)
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).abs().mean() < 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "length"), [(4, 41), (0, 17), (30, 25), (7, 1)])
def test_pairs_kept_are_counted(kind, window, length):
    call, mask, _ = make_call(kind, keys=length, window=window)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    far = distance > window
    pairs = (distance >= 0).sum() * mask.shape[0] * mask.shape[1]
    expected = mask.sum() / pairs, (mask & far).sum() / (far.sum() * mask.shape[0] * mask.shape[1]) if far.any() else 1
    counted = METHODS[kind].pairs_kept(call.state.settings, window, length)
    assert (counted is not None) == (kind in COUNTED)
    if counted is None:
        call.state.observed = {}
        METHODS[kind].attend(call)
        counted = call.state.observed["pairs_kept"], call.state.observed["far_pairs_kept"]
    assert counted == pytest.approx(tuple(map(float, expected)))


def tiny_llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**shape, **ends, vocab_size=257, num_key_value_heads=2)).eval()


MODELS = {"gpt2": tiny_model, "llama": tiny_llama}


def attached(kind, model="gpt2", seed=0, **changes):
    return METHODS[kind].attach(MODELS[model](), settings_of(kind, **changes), window=WINDOW, seed=seed)


def logits(model, tokens=TOKENS, **arguments):
    return replacement.logits(model, tokens, **arguments)


@pytest.mark.parametrize("way", ["short", "long"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_nothing_earlier(kind, model, way, monkeypatch):
    if way == "long":
        use_the_long_way(monkeypatch)
    base, model = MODELS[model](), attached(kind, model)
    assert not torch.allclose(logits(model), logits(base), atol=1e-4)
    replacement.check_later_tokens_change_nothing_earlier(
        model, TOKENS, lambda tokens: (tokens + 100) % 250, tolerance=1e-6
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_scores_what_the_whole_text_scores(kind, model):
    model = attached(kind, model)
    assert METHODS[kind].decodes(settings_of(kind))
    replacement.check_a_cache_scores_what_the_whole_text_scores(model, TOKENS, tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_changes_nothing(kind):
    replacement.check_padding_on_either_side_changes_nothing(attached(kind, "llama"), TOKENS, tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_be_left_out_is_refused(kind):
    model, pairs = attached(kind), torch.zeros(1, 1, 45, 45)
    with pytest.raises(UserError, match=r"attention_mask: expected 2 dimensions .* got shape \[1, 1, 45, 45\]"):
        logits(model, attention_mask=pairs)
    tensor = torch.randn(1, 2, 8, 8)
    with pytest.raises(UserError, match=r"GPT2Attention: expected plain causal self-attention, got \['s_aux'\]"):
        METHODS[kind]._attention(model.transformer.h[0].attn, tensor, tensor, tensor, None, s_aux=torch.ones(2))


@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_the_weights_and_what_is_saved_comes_back(kind, tmp_path):
    method = METHODS[kind]
    settings = settings_of(kind, training=Training(phases=[EVERYTHING]))
    model = method.attach(tiny_model(), settings, window=WINDOW, seed=5).train()
    method.prepare(model, iter([TOKENS, TOKENS + 3]))
    parameters = method.parameters(model, "everything")
    optimiser = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in parameters)
        optimiser.step()
        optimiser.zero_grad()
        method.after_step(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    model.eval()
    replacement.check_what_is_saved_comes_back(
        method, model, settings, tmp_path, tiny_model(seed=3), TOKENS, window=WINDOW
    )


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def measured(world, settings, weights=None):
    job = row_settings(settings) | {"attention": "full", "top_k": None, "perplexity": Perplexity(windows=2)}
    output = world.folder / "row.json"
    job = PerplexityJob.model_validate(job)
    evaluation.run(job, model=world.model, corpus=world.corpus, weights=weights, output=output)
    return read_result(output)["metrics"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_reports_the_pairs_that_are_read(kind, world):
    metrics = measured(world, settings_of(kind))
    assert 0 < metrics["far_pairs_kept"] < metrics["pairs_kept"] < 1
    assert len(metrics["layers"]) == 2
    if kind != "longformer":
        layers = [layer["far_pairs_kept"] for layer in metrics["layers"]]
        assert metrics["far_pairs_kept"] == pytest.approx(sum(layers) / 2)


def test_a_run_interrupted_by_an_error_ends_with_the_same_centroids(world, monkeypatch):
    phase = Phase(trains="everything", steps=4, learning_rate=1e-3)
    settings = settings_of("routing_transformer", training=Training(phases=[phase], checkpoint_every=1))
    job, files = train_job(settings), {"model": world.model, "corpus": world.corpus}
    whole, cut = world.outputs("whole"), world.outputs("cut")
    training.run(job, **files, **whole)
    quick, calls = trainer.mean_loss, iter(range(2))

    def failing(*arguments):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return quick(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "mean_loss", failing)
        with pytest.raises(KeyboardInterrupt):
            training.run(job, **files, **cut)
    training.run(job, **files, **cut)
    ours, expected = (load_file(outputs["weights"] / "base.safetensors") for outputs in (cut, whole))
    assert sum("centroids" in name for name in ours) == 2
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    untrained = measured(world, settings_of("routing_transformer"))
    assert measured(world, settings, whole["weights"])["perplexity"] < untrained["perplexity"]


def test_a_longer_text_only_adds_rows_to_random_blocks():
    settings = settings_of("bigbird", random_blocks=3)
    rows = torch.arange(40)[None]
    limit = (rows - 4).clamp(min=0)
    seeds = [torch.tensor([number]) for number in (3, 4)]
    long, other = (bigbird.draw(seed, rows, limit, 8, settings) for seed in seeds)
    assert torch.equal(bigbird.draw(seeds[0], rows[:, :20], limit[:, :20], 8, settings), long[:, :, :20])
    assert not torch.equal(long, other)
    for head in range(8):
        for row in range(40):
            drawn = [block for block in long[0, head, row].tolist() if block >= 0]
            assert len(set(drawn)) == len(drawn) == min(max(row - 4, 0), 3)
            assert all(1 <= block < 1 + row - 4 for block in drawn)
    counts = torch.bincount(long[0, :, 30:].flatten(), minlength=37)[1:27]
    assert counts.min() > 0


def test_random_blocks_differ_between_layers_and_with_the_seed():
    seeds = {int(state.seed) for seed in (0, 1) for state in attached("bigbird", seed=seed).modules()
             if isinstance(state, bigbird.Drawn)}  # fmt: skip
    assert len(seeds) == 4


def test_a_page_bound_is_one():
    quest = METHODS["quest"]
    torch.manual_seed(0)
    keys, query = torch.randn(2, 3, 5, 4, 6), torch.randn(2, 3, 7, 6)
    bounds = quest.probe(query) @ quest.summarise(keys).transpose(-1, -2)
    scores = torch.einsum("bhid,bhnsd->bhins", query, keys)
    assert (scores.amax(dim=-1) <= bounds + 1e-5).all()
    one = quest.probe(query) @ quest.summarise(keys[:, :, :, :1]).transpose(-1, -2)
    torch.testing.assert_close(one, scores[..., 0])


def clusters(model):
    return [module for module in model.modules() if isinstance(module, routing_transformer.Clusters)]


def centroids(model):
    return torch.stack([state.centroids for state in clusters(model)]).clone()


def test_centroids_move_once_a_step_and_only_in_training():
    method = METHODS["routing_transformer"]
    moved = []
    for checkpointing in (False, True):
        model = attached("routing_transformer")
        start = centroids(model)
        logits(model)
        model(TOKENS, use_cache=False)
        method.after_step(model)
        assert torch.equal(centroids(model), start)
        model.train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        assert torch.equal(centroids(model), start)
        method.after_step(model)
        moved.append(centroids(model))
        method.after_step(model)
        assert torch.equal(centroids(model), moved[-1])
        assert not torch.equal(moved[-1], start)
        torch.testing.assert_close(moved[-1].norm(dim=-1), torch.ones(2, 2, 3))
    assert torch.equal(*moved)


def test_a_centroid_moves_towards_its_members():
    call, _, _ = make_call("routing_transformer", padding="both", heads=2, key_heads=1)
    state, real = call.state, call.padding_mask
    before = state.centroids.clone()
    state.watch(call)
    state.update()
    for head in range(2):
        sums = torch.zeros(3, 6)
        for b in range(2):
            for t in range(41):
                for x in (call.query[b, head, t], call.key[b, 0, t]) if real[b, t] else ():
                    unit = (x / x.norm()).float()
                    sums[(before[head] @ unit).argmax()] += unit
        expected = 0.5 * before[head] + 0.5 * sums / sums.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(state.centroids[head], expected / expected.norm(dim=-1, keepdim=True))


def test_preparing_fits_the_centroids_to_the_data():
    method = METHODS["routing_transformer"]
    model = attached("routing_transformer").train()
    model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("logits were made"))
    before = centroids(model)
    method.prepare(model, iter([]))
    assert torch.equal(centroids(model), before)
    method.prepare(model, iter([TOKENS, TOKENS + 5]))
    assert model.training
    fitted = centroids(model)
    method.prepare(model, iter([TOKENS, TOKENS + 5]))
    assert torch.equal(centroids(model), fitted)

    def closeness(directions):
        found = []

        def watch(module, call):
            units = torch.nn.functional.normalize(call.key, dim=-1)
            found.append((units @ module.centroids.transpose(1, 2)).amax(dim=-1).mean())

        for state, values in zip(clusters(model), directions, strict=True):
            state.centroids.copy_(values)
            state.fitting, state.fit = True, lambda call, state=state: watch(state, call)
        model.base_model(TOKENS, use_cache=False)
        for state in clusters(model):
            state.fitting = False
            del state.fit
        return torch.stack(found)

    assert (closeness(fitted) > closeness(before)).all()
