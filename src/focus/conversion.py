"""Published weights and tokenizers in other formats, turned into the folders that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path

from focus.errors import UserError

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's token type of special tokens


def llama_from_gguf(gguf: Path, folder: Path) -> None:
    """Write a Llama held in a GGUF file as float32 safetensors, config and tokenizer into `folder`.

    Quantised tensors are expanded to the values they stand for. GGUF keeps the rotary pairs of the query and key
    projections side by side, transformers half a head apart; the rows are put back.
    Raises UserError for another architecture or a tensor without a known name.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf)
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise UserError(f"{gguf}: expected architecture llama, got {architecture}")
    config = _llama_config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        *layer, kind, suffix = tensor.name.split(".")
        if kind not in TENSORS or suffix != "weight":
            raise UserError(f"{gguf}: expected tensors of a Llama, got {tensor.name}")
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
        if kind in heads:
            rows, columns = values.shape
            pairs = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
            values = pairs.swapaxes(1, 2).reshape(rows, columns)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{TENSORS[kind]}.weight"] = values
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    _tokenizer_from_gguf(reader, folder)


def gpt2_tokenizer(vocabulary: bytes, merges: bytes, folder: Path) -> None:
    """Write GPT-2's tokenizer, given its vocabulary (JSON) and its merges (text), into `folder`."""
    ranks = [tuple(line.split()) for line in merges.decode().splitlines()[1:] if line]
    _write_tokenizer(folder, json.loads(vocabulary), ranks, special=["<|endoftext|>"], settings={}, digits=False)


def _value(reader, key: str):
    field = reader.get_field(key)
    if field is None:
        raise UserError(f"GGUF file: expected the key {key}, found none")
    return field.contents()


def _llama_config(reader) -> dict:
    def value(key: str):
        return _value(reader, f"llama.{key}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "vocab_size": value("vocab_size"),
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("embedding_length") // value("attention.head_count"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": round(value("attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": value("rope.freq_base"),
    }


def _tokenizer_from_gguf(reader, folder: Path) -> None:
    """GGUF names the pre-tokenizer only; SmolLM's is GPT-2's with every digit a token of its own."""
    flavour = _value(reader, "tokenizer.ggml.pre")
    if flavour != "smollm":
        raise UserError(f"GGUF file: expected the pre-tokenizer smollm, got {flavour}")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    kinds = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    settings = {
        f"{name}_token": tokens[_value(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    } | {"chat_template": _value(reader, "tokenizer.chat_template")}
    _write_tokenizer(
        folder,
        {token: index for index, token in enumerate(tokens)},
        merges,
        special=[token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL],
        settings=settings,
        digits=True,
    )


def _write_tokenizer(
    folder: Path, vocabulary: dict[str, int], merges: list[tuple], *, special: list[str], settings: dict, digits: bool
) -> None:
    """Byte-level BPE; `digits` splits numbers into single digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    defaults = {f"{name}_token": special[0] for name in ("bos", "eos", "unk")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **defaults | settings).save_pretrained(folder)
