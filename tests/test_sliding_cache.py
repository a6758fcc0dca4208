"""Layers with a sliding window of their own, whose cache drops old keys: decoding gives what the whole text gives."""

import pytest
import torch
from tiny import WINDOW
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from focus.errors import UserError
from focus.method_config import make_method
from focus.methods import METHODS

SETTINGS = {
    "window": {"sinks": 9},
    "longformer": {"global_tokens": 7, "global_stride": 5},
    "bigbird": {"block": 3, "random_blocks": 2, "global_blocks": 1},
    "routing_transformer": {"clusters": 3, "cluster_tokens": 4},
    "s2": {"stride": 3, "block": 2},
    "oracle_top_k": {"tokens": 6},
    "sparq": {"tokens": 6, "local": 2, "components": 3, "mean_reallocation": True},
    "magicpig": {"tables": 12, "bits": 3, "sinks": 2, "local": 3},
}
BLOCKS = {"moba": {"block": 5, "top_k": 2}, "quest": {"page": 3, "pages": 2}}
PROMPT = torch.arange(30)[None] * 7 % 250 + 1


def attached(kind):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    size = {"vocab_size": 257, "num_key_value_heads": 2, "sliding_window": 11, "initializer_range": 0.3}
    model = MistralForCausalLM(MistralConfig(**shape, **ends, **size)).eval()
    settings = make_method(kind=kind, label=kind, **(SETTINGS | BLOCKS)[kind])
    return METHODS[kind].attach(model, settings, window=WINDOW, seed=0)


@torch.no_grad()
def logits(model, tokens, **arguments):
    return model(tokens, use_cache=False, **arguments).logits


def generate(model, tokens, mask, **options):
    options |= {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    result = model.generate(tokens, attention_mask=mask, **options)
    return result.sequences, torch.stack(result.logits, dim=1)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_generating_gives_what_scoring_gives(kind, cache):
    model = attached(kind)
    sequences, got = generate(model, PROMPT, torch.ones_like(PROMPT), cache_implementation=cache)
    torch.testing.assert_close(got, logits(model, sequences)[:, 29:-1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", [4, 24])
@pytest.mark.parametrize("kind", SETTINGS)
def test_padding_on_the_left_changes_nothing(kind, padding):
    model = attached(kind)
    tokens, mask = PROMPT.repeat(2, 1), torch.ones(2, 30, dtype=torch.long)
    tokens[0, :padding] = mask[0, :padding] = 0
    sequences, got = generate(model, tokens, mask)
    for row, first in enumerate((padding, 0)):
        scored = logits(model, sequences[row : row + 1, first:])[0, 29 - first : -1]
        torch.testing.assert_close(got[row], scored, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", SETTINGS)
@torch.no_grad()
def test_a_prompt_in_pieces_gives_what_the_whole_gives(kind):
    model = attached(kind)
    cache, pieces = DynamicCache(config=model.config), PROMPT.split([5, 14, 1, 10], dim=1)
    got = torch.cat([model(piece, cache=cache).logits for piece in pieces], dim=1)
    torch.testing.assert_close(got, logits(model, PROMPT), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_choice_among_blocks_needs_the_keys_that_were_dropped(kind):
    model = attached(kind)
    with pytest.raises(UserError, match=f"kind {kind}: expected a cache that holds the keys .* window of 11"):
        generate(model, PROMPT, torch.ones_like(PROMPT))
    for options in ({"use_cache": False}, {"cache": DynamicCache()}):
        sequences, got = generate(model, PROMPT, torch.ones_like(PROMPT), **options)
        torch.testing.assert_close(got, logits(model, sequences)[:, 29:-1], atol=2e-4, rtol=1e-4)
