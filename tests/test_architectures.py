"""Every attention architecture of the paper's models, tiny and random, through whole jobs.

Each has what makes its family odd: heads whose width is not the model's, few keys, query and key norms, biases, sliding
and interleaved layers, softcaps, tied embeddings.
"""

import pytest
import torch
import transformers as hf
from tiny import CONTEXT, byte_tokenizer, focus_method, make_world, row_settings, train_job, write_json

from focus import training
from focus.config import Perplexity
from focus.evaluation import perplexity
from focus.evaluation.rows import load_row
from focus.jobs import PerplexityJob
from focus.method_config import Phase, Training, make_method
from focus.models import load_model, trained_manifest
from focus.provenance import read_result

SHAPE = {"vocab_size": 257, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3}
SHAPE |= {"max_position_embeddings": 256, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
MANY = SHAPE | {"num_attention_heads": 6}
CONFIGS = {
    "gpt2": hf.GPT2Config(
        vocab_size=257, n_embd=24, n_layer=3, n_head=3, n_positions=256, bos_token_id=256, eos_token_id=256
    ),
    "mistral, sliding": hf.MistralConfig(**MANY, num_key_value_heads=2, head_dim=8, sliding_window=9),
    "qwen2.5, biases": hf.Qwen2Config(**MANY, num_key_value_heads=1, tie_word_embeddings=False),
    "olmo2, norms": hf.Olmo2Config(**MANY, num_key_value_heads=6),
    "llama, all keys": hf.LlamaConfig(**MANY, num_key_value_heads=6),
    "llama, few keys": hf.LlamaConfig(**MANY, num_key_value_heads=2, tie_word_embeddings=True),
    "gemma2": hf.Gemma2Config(
        **MANY,
        num_key_value_heads=3,
        head_dim=8,
        sliding_window=9,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=5.0,
    ),
}
FOCUS = focus_method([Phase(trains="centroids", steps=2, learning_rate=1e-2)], {"top_k": 1})
LORA = make_method(
    kind="lora",
    label="LoRA",
    rank=2,
    training=Training(phases=[Phase(trains="lora", steps=2, learning_rate=1e-2)]),
)


@pytest.fixture(scope="module", params=CONFIGS)
def world(request, tmp_path_factory):
    """The tiny world with a model of one family in place of its own, a run of each method, and the base's weights."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOCUS_CACHE", str(folder / "cache"))
        made = make_world(folder)
        torch.manual_seed(0)
        weights = folder / "family"
        model = hf.AutoModelForCausalLM.from_config(CONFIGS[request.param])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and "embed" not in name and "wte" not in name:
                    parameter.mul_(6)
        model.save_pretrained(weights)
        byte_tokenizer().save_pretrained(weights)
        write_json(made.model, trained_manifest("tiny-gpt2", weights, made.model, 1))
        for name, settings in (("focus", FOCUS), ("lora", LORA)):
            training.run(train_job(settings), model=made.model, corpus=made.corpus, **made.outputs(name))
        yield made


def evaluated(world, settings, weights, attention="full", top_k=None):
    job = PerplexityJob(
        **row_settings(settings), attention=attention, top_k=top_k, perplexity=Perplexity(windows=4, batch_size=2)
    )
    output = world.folder / f"{settings.kind}-{attention}-{top_k}.json"
    perplexity.run(job, model=world.model, corpus=world.corpus, weights=weights, output=output)
    return job, read_result(output)["metrics"]


@torch.no_grad()
def logits(model, tokens):
    return model(tokens, use_cache=False).logits


def prompt(length=20):
    return torch.randint(0, 250, (2, length), generator=torch.Generator().manual_seed(3))


def test_centroids_train_alone_and_count_as_their_shape_says(world):
    metrics = read_result(world.outputs("focus")["output"])["metrics"]
    config = FOCUS.adapter
    assert metrics["trained_parameters"] == 3 * config.routing_dim * (24 + config.groups)
    assert metrics["steps"] == 2


def test_rows_are_evaluated_soft_and_hard_and_full_membership_is_the_base(world):
    weights = world.outputs("focus")["weights"]
    pretrained = make_method(kind="pretrained", label="Pretrained")
    base = evaluated(world, pretrained, None)[1]["loss"]
    losses = {
        key: evaluated(world, FOCUS, weights, *key)[1]["loss"] for key in (("soft", None), ("hard", 1), ("hard", 4))
    }
    assert losses["hard", 4] == pytest.approx(base, rel=1e-4)
    assert abs(losses["hard", 1] - base) > 1e-4
    assert abs(losses["soft", None] - base) > 1e-5


def test_a_saved_row_comes_back_writes_through_its_cache_and_sees_no_future(world):
    job, _ = evaluated(world, FOCUS, world.outputs("focus")["weights"], "hard", 1)
    model, again = (load_row(job, world.model, world.outputs("focus")["weights"]).model for _ in range(2))
    tokens = prompt()
    assert torch.equal(logits(model, tokens), logits(again, tokens))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    written = model.generate(tokens, use_cache=True, **options)
    assert torch.equal(written, model.generate(tokens, use_cache=False, **options))
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % 250
    assert torch.equal(logits(model, tokens)[:, :15], logits(model, changed)[:, :15])


def test_lora_trains_and_comes_back(world):
    outputs = world.outputs("lora")
    base, _ = load_model(world.model)
    job, metrics = evaluated(world, LORA, outputs["weights"])
    model = load_row(job, world.model, outputs["weights"]).model
    assert metrics["trained_parameters"] == read_result(outputs["output"])["metrics"]["trained_parameters"] > 0
    difference = (logits(model, prompt(CONTEXT)) - logits(base, prompt(CONTEXT))).abs().max()
    assert 0 < difference < 1
