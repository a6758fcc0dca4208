"""LoRA against the merged matrices, its printed sizes, and whole jobs that leave the base alone and resume."""

import json
import warnings

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from tiny import make_world, row_settings, tiny_model, train_job
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from focus import trainer, training
from focus.config import Perplexity
from focus.errors import UserError
from focus.evaluation import perplexity as evaluation
from focus.evaluation.rows import load_row
from focus.jobs import PerplexityJob
from focus.method_config import Phase, Training, make_method
from focus.methods import METHODS
from focus.models import load_model
from focus.provenance import read_result

TOKENS = torch.arange(40)[None] * 7 % 250
LORA = METHODS["lora"]
PHASE = Phase(trains="lora", steps=5, learning_rate=1e-2)


def settings(rank=2, phases=(PHASE,), checkpoint_every=2, **keys):
    schedule = Training(phases=list(phases), checkpoint_every=checkpoint_every)
    return make_method(kind="lora", label="LoRA", rank=rank, training=schedule, **keys)


def llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=250, num_key_value_heads=2)).eval()


def attached(model, chosen=None, seed=0):
    return LORA.attach(model, chosen or settings(), window=4, seed=seed)


def moved(model, chosen=None):
    """With an update that is not zero."""
    attached(model, chosen)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in LORA.parameters(model, "lora"):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model, tokens=TOKENS):
    return model(tokens, use_cache=False).logits


@pytest.mark.parametrize(
    ("make", "shape", "rank", "printed"),
    [
        (GPT2LMHeadModel, GPT2Config, 4, 147_456),
        (GPT2LMHeadModel, GPT2Config, 16, 589_824),
        (MistralForCausalLM, MistralConfig, 4, 1_703_936),
    ],
)
def test_sizes_are_those_that_the_paper_prints(make, shape, rank, printed):
    with torch.device("meta"):
        model = make(shape())
    attached(model, settings(rank)).requires_grad_(True)
    parameters = LORA.parameters(model, "lora")
    assert sum(parameter.numel() for parameter in parameters) == printed
    assert {id(each) for each in model.parameters() if each.requires_grad} == {id(each) for each in parameters}


@pytest.mark.parametrize("make", [tiny_model, llama])
def test_an_untrained_update_changes_nothing_and_wraps_in_place(make):
    base, model = make(), make()
    state = torch.random.get_rng_state()
    with warnings.catch_warnings(action="error"):
        assert attached(model) is model
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits(model), logits(base))


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (6, 3.0)])
@pytest.mark.parametrize("make", [tiny_model, llama])
def test_the_update_is_a_product_added_to_the_matrices(make, alpha, scale):
    model, merged, count = moved(make(), settings(alpha=alpha)), make(), 0
    update = dict(model.named_parameters())
    with torch.no_grad():
        for name, matrix in merged.named_parameters():
            stem = name.removesuffix(".weight")
            if f"{stem}.lora_A.default.weight" in update:
                product = update[f"{stem}.lora_B.default.weight"] @ update[f"{stem}.lora_A.default.weight"]
                matrix.add_(product.T if make is tiny_model else product, alpha=scale)
                count += 1
    assert count == (2 if make is tiny_model else 4)
    torch.testing.assert_close(logits(model), logits(merged), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(model), logits(make()), atol=1e-2)


def test_the_seed_decides_the_start():
    starts = [LORA.parameters(attached(tiny_model(), seed=seed), "lora")[0] for seed in (0, 0, 1)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_generation_continues_with_what_the_model_scores_and_sees_no_future():
    model = moved(tiny_model())
    generated = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=8, do_sample=False)
    for position in range(40, generated.shape[1]):
        assert logits(model, generated[:, :position])[0, -1].argmax() == generated[0, position]
    changed = TOKENS.clone()
    changed[0, 30] = 200
    same = (logits(model, changed) == logits(model))[0].all(dim=-1)
    assert same[:30].all()
    assert not same[30:].any()


@pytest.mark.parametrize("make", [tiny_model, llama])
def test_what_is_saved_comes_back_here_and_in_peft(make, tmp_path):
    chosen = settings(alpha=6)
    model = moved(make(), chosen)
    LORA.save(model, chosen, tmp_path)
    assert torch.equal(logits(LORA.restore(make(), chosen, tmp_path, window=4)), logits(model))
    assert torch.equal(logits(PeftModel.from_pretrained(make(), tmp_path)), logits(model))
    assert {key.rsplit(".", 2)[1] for key in load_file(tmp_path / "adapter_model.safetensors")} == {"lora_A", "lora_B"}


def test_files_do_not_depend_on_the_order_of_sets(tmp_path):
    names = ["v_proj", "up_proj", "q_proj", "o_proj", "k_proj", "gate_proj", "down_proj"]
    LORA.save(attached(llama(), settings(targets=names)), settings(targets=names), tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["target_modules"] == sorted(names)


def test_an_update_is_float32_on_a_base_of_sixteen_bits():
    model = attached(tiny_model().bfloat16())
    assert {parameter.dtype for parameter in LORA.parameters(model, "lora")} == {torch.float32}
    assert logits(model).dtype == torch.bfloat16


def test_other_updates_models_and_phases_are_refused(tmp_path):
    LORA.save(attached(tiny_model()), settings(), tmp_path)
    with pytest.raises(UserError, match=r"c_attn.lora_A.weight: expected \[3, 16\] for this model, got \[2, 16\]"):
        LORA.restore(tiny_model(), settings(rank=3), tmp_path, window=4)
    with pytest.raises(UserError, match=r"methods.targets: expected modules of GPT2LMHeadModel, got v_proj"):
        attached(tiny_model(), settings(targets=["c_attn", "v_proj"]))
    for target, kind in (("lm_head", "Linear"), ("embed_tokens", "Embedding"), ("self_attn", "LlamaAttention")):
        with pytest.raises(UserError, match=f"methods.targets: expected matrices .* got {target}, a {kind}$"):
            attached(llama(), settings(targets=["q_proj", target]))
    with pytest.raises(UserError, match="expected lora for kind lora, got everything"):
        LORA.parameters(attached(tiny_model()), "everything")
    with pytest.raises(ValidationError, match="expected phases that train lora, got one of everything"):
        settings(phases=[Phase(trains="everything", steps=1, learning_rate=1.0)])
    with pytest.raises(ValidationError, match="training of kind lora: expected settings, got null"):
        make_method(kind="lora", label="LoRA", rank=2)


def test_other_targets_can_be_named():
    model = attached(llama(), settings(targets=["o_proj"]))
    wrapped = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert wrapped == {f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)}


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def run(world, job, name):
    outputs = world.outputs(name)
    training.run(job, model=world.model, corpus=world.corpus, **outputs)
    return outputs


def test_a_trained_update_leaves_the_base_alone_and_is_evaluated(world):
    long = settings(phases=[Phase(trains="lora", steps=60, learning_rate=5e-2)], checkpoint_every=60)
    outputs = run(world, train_job(long), "lora")
    files = {path.name: path.stat().st_size for path in outputs["weights"].iterdir()}
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    count = 2 * 2 * (16 + 48)
    assert files["adapter_model.safetensors"] < 4 * count + 1000
    metrics = read_result(outputs["output"])["metrics"]
    assert metrics["final_loss"] < metrics["first_loss"]
    assert metrics["trained_parameters"] == count
    row = PerplexityJob(
        **row_settings(long), attention="full", top_k=None, perplexity=Perplexity(windows=6, batch_size=3)
    )
    loaded = load_row(row, world.model, outputs["weights"])
    assert loaded.trained_parameters == count
    plain, now = load_model(world.model)[0], dict(loaded.model.named_parameters())
    for name, parameter in plain.named_parameters():
        place = name if name in now else name.replace("c_attn.", "c_attn.base_layer.")
        assert torch.equal(now[place], parameter), name
    assert not torch.allclose(logits(loaded.model), logits(plain))
    result = world.folder / "row.json"
    evaluation.run(row, model=world.model, corpus=world.corpus, weights=outputs["weights"], output=result)
    measured = read_result(result)["metrics"]
    assert (measured["trained_parameters"], measured["far_pairs_kept"]) == (count, 1.0)


def test_an_interrupted_run_ends_with_the_same_numbers(world, monkeypatch):
    def numbers(outputs):
        losses = [record["loss"] for record in map(json.loads, outputs["log"].read_text().splitlines())]
        return losses, {path.name: path.read_bytes() for path in outputs["weights"].iterdir()}

    expected = numbers(run(world, train_job(settings()), "whole"))
    quick, calls = trainer.mean_loss, iter(range(3))

    def failing(*arguments):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return quick(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer, "mean_loss", failing)
        run(world, train_job(settings()), "cut")
    assert torch.load(world.outputs("cut")["checkpoints"] / "latest.pt")["state"]["step"] == 2
    assert numbers(run(world, train_job(settings()), "cut")) == expected
    assert len(expected[0]) == 5
