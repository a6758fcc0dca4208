import copy
import hashlib
import json
import re
import warnings

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import focus
from focus import FocusConfig, adapter, compose, decompose, load, save, switch
from focus.errors import UserError
from focus.gates import gated_attention
from focus.routing import column_potentials, dominance, pairs_kept, top_k_membership

SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
GQA = SHAPE | {"num_key_value_heads": 2}
CONFIGS = {
    "gpt2": hf.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2, pad_token_id=0
    ),
    "llama-mha": hf.LlamaConfig(**SHAPE, num_key_value_heads=4),
    "llama-gqa": hf.LlamaConfig(**GQA),
    "mistral": hf.MistralConfig(**GQA, sliding_window=9),
    "qwen2": hf.Qwen2Config(**GQA, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "olmo2": hf.Olmo2Config(**GQA),
    "gemma2": hf.Gemma2Config(
        **GQA,
        head_dim=8,
        sliding_window=9,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=5.0,
    ),
}
FAMILIES = list(CONFIGS)
PER_TOKEN = ["potentials", "softmax", "entropy", "stop_gradient", "ema", "recluster"]
SMALL = {"groups": 4, "window": 4, "routing_dim": 5, "sinks": 2}


def tiny(family, dtype=torch.float32, seed=0):
    """A random model with weights large enough that attention matters, in eval mode."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "wte" not in name:
                parameter.mul_(6)
    return model.to(dtype).eval()


def tokens(batch=2, length=24, seed=0):
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side, length=24):
    position = torch.arange(length).expand(2, length)
    return position >= torch.tensor([[0], [7]]) if side == "left" else position < torch.tensor([[length], [length - 7]])


def positions(mask):
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


@torch.no_grad()
def logits(model, ids, **arguments):
    return model(ids, use_cache=False, **arguments).logits


def weights_digest(model):
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if ".focus." not in name:
            total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_adapter_at_full_membership_changes_nothing(family, side):
    model, ids = tiny(family), tokens()
    arguments, real = {}, slice(None)
    if side:
        real = padding(side)
        arguments = {"attention_mask": real.long(), "position_ids": positions(real)}
    before = logits(model, ids, **arguments)
    compose(model, FocusConfig(**SMALL))
    switch(model, "full")
    assert torch.equal(logits(model, ids, **arguments), before)
    switch(model, "hard", top_k=4)
    torch.testing.assert_close(logits(model, ids, **arguments)[real], before[real], rtol=1e-4, atol=1e-4)
    switch(model, "hard", top_k=1)
    assert (logits(model, ids, **arguments)[real] - before[real]).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_attends_as_defined(family, attention, monkeypatch):
    """What a layer returns is the definition applied to its queries, keys, values and router."""
    model, ids = compose(tiny(family), FocusConfig(**SMALL, top_k=2)), tokens()
    switch(model, attention)
    calls = []
    router_type = type(adapter.routers(model)[0])
    attend = router_type.attend

    def spy(self, query, key, value, padding_mask, **settings):
        hidden = self._received[0]
        out = attend(self, query, key, value, padding_mask, **settings)
        calls.append((self, hidden, query, key, value, settings, out))
        return out

    monkeypatch.setattr(router_type, "attend", spy)
    logits(model, ids)
    assert len(calls) == 3
    for layer, (router, hidden, query, key, value, settings, out) in enumerate(calls):
        assert settings["layer_idx"] == layer
        assignment = torch.softmax((hidden @ router.projection.T @ router.centroids.T) / 0.1, dim=-1)
        common = {"window": 4, "sinks": 2, "scale": settings["scale"], "softcap": settings["softcap"]}
        common["sliding_window"] = settings["sliding_window"]
        if attention == "soft":
            expected = gated_attention(query, key, value, assignment, gate="log_sigmoid", steepness=10.0, **common)
        else:
            membership = top_k_membership(assignment, 2)
            expected = focus.attention.focus_attention_reference(query, key, value, membership, **common)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    windows = [call[5]["sliding_window"] for call in calls]
    expected = {"mistral": [9, 9, 9], "qwen2": [None, 9, 9], "gemma2": [9, None, 9]}
    assert windows == expected.get(family, [None] * 3)
    assert {call[5]["softcap"] for call in calls} == ({1.5} if family == "gemma2" else {None})


@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("balance", [*PER_TOKEN, "prefix", "sinkhorn"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(balance, attention, side):
    model, ids = compose(tiny("llama-gqa"), FocusConfig(**SMALL, balance=balance)), tokens()
    switch(model, attention)
    mask = padding(side)
    padded = logits(model, ids, attention_mask=mask.long(), position_ids=positions(mask))
    for row in range(2):
        alone = logits(model, ids[row][mask[row]][None])[0]
        torch.testing.assert_close(padded[row][mask[row]], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("balance", [*PER_TOKEN, "prefix", "sinkhorn"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_only_sinkhorn_sees_the_future(family, balance, attention):
    model, ids = compose(tiny(family), FocusConfig(**SMALL, balance=balance)), tokens()
    switch(model, attention)
    changed = ids.clone()
    changed[:, -6:] = tokens(seed=1)[:, -6:]
    difference = (logits(model, ids) - logits(model, changed))[:, :-6].abs().max()
    assert difference > 1e-3 if balance == "sinkhorn" else difference == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_decompose_restores_the_base(family):
    model, ids = tiny(family), tokens()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    before, names = logits(model, ids), list(model.state_dict())
    digest, implementation = weights_digest(model), model.config._attn_implementation
    attributes = set(vars(model))
    compose(model, FocusConfig(**SMALL))
    assert all(parameter.requires_grad == (".focus." in name) for name, parameter in model.named_parameters())
    assert model.config._attn_implementation != implementation
    assert decompose(model) is model
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [
        name for name, parameter in model.named_parameters() if parameter is frozen
    ]
    assert model.config._attn_implementation == implementation
    assert (weights_digest(model), list(model.state_dict()), set(vars(model))) == (digest, names, attributes)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("balance", ["potentials", "sinkhorn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_moves_the_routers_alone(family, balance, attention):
    if attention == "hard" and tiny(family).config.model_type == "gemma2":
        pytest.skip("a straight-through gradient knows no softcap")
    model, ids = compose(tiny(family), FocusConfig(**SMALL, balance=balance)), tokens()
    switch(model, attention)
    digest = weights_digest(model)
    before = [tensor.clone() for router in adapter.routers(model) for tensor in router.parameters()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and parameter.grad.abs().max() > 0) == (".focus." in name)
    optimizer.step()
    after = [tensor for router in adapter.routers(model) for tensor in router.parameters()]
    assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert weights_digest(model) == digest


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_gives_the_same_gradients_and_potentials(family):
    gradients, potentials = [], []
    for checkpointing in (False, True):
        model = compose(tiny(family), FocusConfig(**SMALL)).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        switch(model, "soft")
        if checkpointing:
            model.activation_checkpointing_enable()
        model(tokens(), labels=tokens()).loss.backward()
        adapter.update_potentials(model)
        gradients.append([tensor.grad for router in adapter.routers(model) for tensor in router.parameters()])
        potentials.append([router.potentials for router in adapter.routers(model)])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert all(torch.equal(*pair) for pair in zip(*potentials, strict=True))
    assert potentials[0][0].abs().max() > 0


@pytest.mark.parametrize("attention", ["soft", "hard"])
@pytest.mark.parametrize("family", ["gpt2", "llama-gqa", "gemma2"])
def test_low_precision_keeps_the_router_in_float32(family, attention):
    """Of bfloat16 Focus is at most twice as far from float32 as the base model in bfloat16 is."""
    for autocast in (False, True):
        errors = {}
        for where in ("base", "focus"):
            exact = tiny(family)
            model = copy.deepcopy(exact) if autocast else tiny(family, torch.bfloat16)
            for each in (exact, model) if where == "focus" else ():
                compose(each, FocusConfig(**SMALL, top_k=4))
                switch(each, attention)
                assert {parameter.dtype for router in adapter.routers(each) for parameter in router.parameters()} == {
                    torch.float32
                }
            expected = logits(exact, tokens())
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                errors[where] = (logits(model, tokens()) - expected).abs().mean()
        assert 0 < errors["focus"] <= 2 * errors["base"]


def test_the_seed_decides_the_initial_weights():
    first, again, other = (
        adapter.routers(compose(tiny("gpt2"), FocusConfig(groups=4), seed=seed))[1] for seed in (1, 1, 2)
    )
    assert torch.equal(first.projection, again.projection) and torch.equal(first.centroids, again.centroids)
    assert not torch.equal(first.projection, other.projection)
    assert first.projection.std().item() == pytest.approx(32**-0.5, rel=0.2)


def test_observe_follows_each_forward():
    model = compose(tiny("llama-gqa"), FocusConfig(**SMALL, top_k=2))
    keys = {"dominance", "confidence", "pairs_kept", "far_pairs_kept"}
    with adapter.observe(model) as layers:
        logits(model, tokens())
        hard = copy.deepcopy(layers)
        switch(model, "hard", top_k=4)
        logits(model, tokens())
        everything = copy.deepcopy(layers)
        switch(model, "hard", top_k=1)
        logits(model, tokens())
        single = copy.deepcopy(layers)
    assert [set(layer) for layer in hard] == [keys] * 3
    assert all(layer["pairs_kept"] == layer["far_pairs_kept"] == 1.0 for layer in everything)
    assert all(one["far_pairs_kept"] < two["far_pairs_kept"] for one, two in zip(single, hard, strict=True))
    router = adapter.routers(model)[0]
    assignment = router(model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens())))
    kept = pairs_kept(top_k_membership(assignment, 1), window=4, sinks=2)
    assert (single[0]["pairs_kept"], single[0]["far_pairs_kept"]) == kept
    assert single[0]["dominance"] == dominance(assignment)
    assert single[0]["confidence"] == pytest.approx(assignment.amax(dim=-1).mean().item())
    assert all(0.25 <= layer["dominance"] <= 1 and 0.25 <= layer["confidence"] <= 1 for layer in hard)
    logits(model, tokens(seed=3))
    assert layers == single


def test_calibration_evens_the_groups():
    model = compose(tiny("llama-gqa"), FocusConfig(**SMALL)).train()
    switch(model, "hard", top_k=2)
    batches = [tokens(length=48, seed=seed) for seed in range(4)]
    spread = []
    for calibrated in (False, True):
        if calibrated:
            adapter.calibrate(model, batches)
        with adapter.observe(model) as layers:
            logits(model, tokens(length=48, seed=9))
        spread.append(sum(layer["dominance"] for layer in layers))
    assert spread[1] < spread[0]
    assert model.training and model.focus_composition.attention == "hard" and model.focus_composition.top_k == 2
    first = adapter.routers(model)[0].requires_grad_(False)
    hidden = [model.model.layers[0].input_layernorm(model.model.embed_tokens(batch)) for batch in batches]
    scores = [each @ first.projection.T @ first.centroids.T for each in hidden]
    columns = [column_potentials(each, temperature=0.1, iterations=10).mean(dim=0) for each in scores]
    torch.testing.assert_close(first.potentials, torch.stack(columns).mean(dim=0), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="balance: expected potentials"):
        adapter.calibrate(compose(tiny("gpt2"), FocusConfig(balance="softmax")), batches)


def test_potentials_follow_training_by_their_momentum():
    model = compose(tiny("llama-gqa"), FocusConfig(**SMALL, potential_momentum=0.75))
    switch(model, "soft")
    logits(model, tokens())
    adapter.update_potentials(model)
    routers = adapter.routers(model)
    assert all(router.potentials.abs().max() == 0 for router in routers)
    model.train()
    logits(model, tokens())
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens()))
    scores = hidden @ routers[0].projection.T @ routers[0].centroids.T
    target = column_potentials(scores, temperature=0.1, iterations=10).mean(dim=0)
    adapter.update_potentials(model)
    adapter.update_potentials(model)
    torch.testing.assert_close(routers[0].potentials, 0.25 * target)


def test_save_and_load(tmp_path):
    config = FocusConfig(**SMALL, gate="exponential", top_k=2)
    model = compose(tiny("qwen2"), config, seed=3)
    adapter.calibrate(model, [tokens()])
    save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["focus.json", "focus.safetensors"]
    settings = json.loads((tmp_path / "focus.json").read_text())
    assert list(settings["config"]) == sorted(settings["config"]) and settings["adapter_version"] == 2
    for target in (tiny("qwen2"), compose(tiny("qwen2"), FocusConfig(groups=2))):
        loaded = load(target, tmp_path)
        assert loaded.focus_composition.config == config
        assert torch.equal(logits(loaded, tokens()), logits(model, tokens()))
        assert adapter.routers(loaded)[0].projection.requires_grad
        assert torch.equal(logits(decompose(loaded), tokens()), logits(tiny("qwen2"), tokens()))


def test_load_names_what_is_wrong_and_leaves_the_model(tmp_path):
    save(compose(tiny("qwen2"), FocusConfig(**SMALL)), tmp_path)
    deeper = hf.LlamaForCausalLM(hf.LlamaConfig(**(GQA | {"num_hidden_layers": 4})))
    wider = hf.LlamaForCausalLM(hf.LlamaConfig(**(GQA | {"hidden_size": 64})))
    settings, tensors = tmp_path / "focus.json", tmp_path / "focus.safetensors"
    good, weights = settings.read_text(), load_file(tensors)
    trained_on = r"focus.json: base: .* trained on, Qwen2ForCausalLM of 3 layers and width 32, got LlamaForCausalLM"
    for version, model, message in [
        (2, deeper, f"{trained_on} of 4 layers and width 32"),
        (2, wider, f"{trained_on} of 3 layers and width 64"),
        (2, tiny("llama-gqa"), f"{trained_on} of 3 layers and width 32"),
        (1, deeper, r"layers.3.centroids: expected \[4, 5\] for this model, got none"),
        (1, wider, r"layers.0.projection: expected \[5, 64\] for this model, got \[5, 32\]"),
    ]:
        settings.write_text(good if version == 2 else first_version(good))
        with pytest.raises(UserError, match=message):
            load(model, tmp_path)
        assert not hasattr(model, "focus_composition")
    for text, message in [
        (good.replace('"adapter_version": 2', '"adapter_version": 7'), "adapter_version: expected 1 or 2, got 7"),
        (good.replace('"layers": 3', '"layers": 0'), "focus.json: base: layers: expected at least 1, got 0"),
        (good.replace('"base": {', '"bass": {'), "focus.json: base: expected a mapping of keys, got null"),
        (good.replace('"groups": 4', '"groups": "four"'), r"config: groups: .*got 'four'"),
        (good[:30], "focus.json: expected JSON"),
        ("[]", "adapter_version: expected 1 or 2, got None"),
    ]:
        settings.write_text(text)
        with pytest.raises(UserError, match=message):
            load(tiny("qwen2"), tmp_path)
    settings.write_text(good)
    save_file({name: tensor + 1 for name, tensor in weights.items()}, tensors)
    with pytest.raises(UserError, match=r"focus.safetensors: expected sha256"):
        load(tiny("qwen2"), tmp_path)
    tensors.unlink()
    with pytest.raises(UserError, match=r"focus.safetensors: expected a saved adapter, found no such file"):
        load(tiny("qwen2"), tmp_path)


def first_version(text: str) -> str:
    """The settings of an adapter as they were written before they named the base model."""
    settings = {key: value for key, value in json.loads(text).items() if key != "base"}
    return json.dumps(settings | {"adapter_version": 1})


def test_other_weights_are_warned_of_and_the_same_ones_are_not(tmp_path):
    model = compose(tiny("qwen2"), FocusConfig(**SMALL))
    save(model, tmp_path)
    path = tmp_path / "focus.json"
    assert json.loads(path.read_text())["base"]["name"] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for same in (tiny("qwen2"), tiny("qwen2", torch.bfloat16), compose(tiny("qwen2"), FocusConfig(groups=2))):
            load(same, tmp_path)
    changed = tiny("qwen2")
    changed.lm_head.weight.data += 0.5
    for other in (tiny("qwen2", seed=1), changed):
        with pytest.warns(UserWarning, match=r"focus.json: base: the adapter was trained on other weights \(no name\)"):
            load(other, tmp_path)
        assert hasattr(other, "focus_composition")
    path.write_text(first_version(path.read_text()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tiny("qwen2", seed=1), tmp_path)


def test_a_name_and_its_revision_are_kept_and_a_path_is_not(tmp_path):
    model = compose(tiny("gpt2"), FocusConfig(**SMALL))
    for name, expected in (("some/model", "some/model"), (str(tmp_path), None), ("/gone/away", None)):
        model.config._name_or_path, model.config._commit_hash = name, "abc"
        save(model, tmp_path)
        base = json.loads((tmp_path / "focus.json").read_text())["base"]
        assert (base["name"], base["revision"]) == (expected, "abc")
    model.config._name_or_path = "some/model"
    save(model, tmp_path)
    with pytest.warns(UserWarning, match=r"\(some/model at abc\) than the model has \(no name\)"):
        load(tiny("gpt2", seed=1), tmp_path)


def test_settings_may_come_as_a_mapping():
    model = compose(tiny("gpt2"), SMALL)
    assert model.focus_composition.config == FocusConfig(**SMALL)
    for config, message in [
        ({"groups": 4, "top_k": 5}, r"^config: top_k must be at most groups \(4\), got 5$"),
        ({"windw": 4}, r"^config: windw: there is no such key; did you mean window\?$"),
        ({"groups": "4"}, r"^config: groups: expected a valid integer, got '4'$"),
        (4, r"^config: expected a FocusConfig or a mapping of its settings, got int$"),
        (None, r"^config: expected a FocusConfig or a mapping of its settings, got NoneType$"),
    ]:
        bare = tiny("gpt2")
        with pytest.raises(UserError, match=message):
            compose(bare, config)
        assert not hasattr(bare, "focus_composition")


def test_calibration_reads_tokenizers_batches_and_their_padding():
    mask = padding("left")
    potentials = []
    for batch in (
        tokens(),
        {"input_ids": tokens()},
        {"input_ids": tokens(), "attention_mask": torch.ones(2, 24).long(), "labels": None},
        hf.BatchEncoding({"input_ids": tokens(), "attention_mask": mask.long()}),
        hf.BatchEncoding({"input_ids": torch.where(mask, tokens(), 3), "attention_mask": mask.long()}),
    ):
        model = compose(tiny("llama-gqa"), FocusConfig(**SMALL))
        adapter.calibrate(model, [batch])
        potentials.append(torch.stack([router.potentials for router in adapter.routers(model)]))
    plain, named, unpadded, padded, refilled = potentials
    assert torch.equal(plain, named) and torch.equal(plain, unpadded)
    assert torch.equal(padded, refilled) and not torch.allclose(plain, padded)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("text", "input_ids: expected a tensor of whole numbers [B, T], got str"),
        ([1, 2], "input_ids: expected a tensor of whole numbers [B, T], got list"),
        ({"input_ids": [[1, 2]]}, "input_ids: expected a tensor of whole numbers [B, T], got list"),
        (torch.zeros(3).long(), "input_ids: expected a tensor of whole numbers [B, T], got Tensor of shape [3] and"),
        (torch.zeros(1, 3), "got Tensor of shape [1, 3] and torch.float32"),
        ({"ids": tokens()}, "expected tensors [B, T] or mappings with input_ids, got one with ids"),
        ({"input_ids": tokens(), "attention_mask": 1}, "attention_mask: expected a tensor of whole numbers"),
    ],
)
def test_batches_that_are_none_are_named(batch, message):
    model = compose(tiny("gpt2"), FocusConfig(**SMALL))
    with pytest.raises(UserError, match=f"^batches: .*{re.escape(message)}"):
        adapter.calibrate(model, [batch])
    assert model.focus_composition.attention == "hard"
    assert not any(router.calibration for router in adapter.routers(model))


def test_misuse_is_named():
    model = tiny("gpt2")
    with pytest.raises(UserError, match="got a bare GPT2LMHeadModel"):
        switch(model, "soft")
    compose(model, FocusConfig(**SMALL))
    with pytest.raises(UserError, match="already has Focus"):
        compose(model, FocusConfig(**SMALL))
    with pytest.raises(UserError, match="attention: expected full, soft or hard, got 'dense'"):
        switch(model, "dense")
    with pytest.raises(UserError, match="top_k: expected 1 to 4 and attention hard, got 5 and hard"):
        switch(model, "hard", top_k=5)
    with pytest.raises(UserError, match=r"top_k: .*got 1 and soft"):
        switch(model, "soft", top_k=1)
    with pytest.raises(UserError, match=r"attention_mask: expected 2 dimensions .* \[1, 1, 4, 4\]"):
        logits(model, tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4))
    with pytest.raises(UserError, match="packed"):
        logits(model, tokens(1, 4), position_ids=torch.tensor([[0, 1, 0, 1]]))
    crossed = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, add_cross_attention=True))
    with pytest.raises(UserError, match="causal self-attention only, got GPT2LMHeadModel with add_cross_attention"):
        compose(crossed, FocusConfig(**SMALL))
    with pytest.raises(UserError, match="expected a transformers PreTrainedModel, got Linear"):
        compose(torch.nn.Linear(2, 2), FocusConfig(**SMALL))
