"""What must hold of every method put on a model, whatever it does to attention: causal, decodable, blind to padding."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor, **arguments) -> Tensor:
    """float32 [B, T, V] without a cache."""
    return model(tokens, use_cache=False, **arguments).logits


def check_later_tokens_change_nothing_earlier(
    model: PreTrainedModel, tokens: Tensor, other: Callable[[Tensor], Tensor], *, tolerance: float
) -> None:
    """tokens: int64 [1, 45]; `other` gives other tokens for its last ones."""
    expected = logits(model, tokens)
    for changed_from in (9, 30, 44):
        changed = tokens.clone()
        changed[0, changed_from:] = other(changed[0, changed_from:])
        got = logits(model, changed)
        torch.testing.assert_close(got[:, :changed_from], expected[:, :changed_from], atol=tolerance, rtol=0)
        assert not torch.allclose(got[:, changed_from], expected[:, changed_from])


@torch.no_grad()
def check_a_cache_scores_what_the_whole_text_scores(
    model: PreTrainedModel, tokens: Tensor, *, tolerance: float
) -> None:
    """Nine tokens are generated behind the tokens, int64 [1, 45], with padding before them."""
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), tokens], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    generated = model.generate(padded, attention_mask=mask, max_new_tokens=9, do_sample=False, output_logits=True,
                               return_dict_in_generate=True)  # fmt: skip
    assert generated.sequences.shape[1] == 58
    whole = logits(model, generated.sequences[:, 4:])
    for step, scored in enumerate(generated.logits):
        torch.testing.assert_close(scored[0], whole[0, 44 + step], atol=tolerance, rtol=tolerance)


def check_padding_on_either_side_changes_nothing(model: PreTrainedModel, tokens: Tensor, *, tolerance: float) -> None:
    """Of the tokens, int64 [1, T], the first 30 are read, beside a whole sequence of the batch."""
    alone = logits(model, tokens[:, :30])
    for place in (slice(5, 35), slice(0, 30)):
        padded, mask = torch.zeros(2, 35, dtype=torch.long), torch.zeros(2, 35, dtype=torch.long)
        padded[0, place], mask[0, place] = tokens[0, :30], 1
        padded[1], mask[1] = 3, 1
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        got = logits(model, padded, attention_mask=mask, position_ids=positions)[:1, place]
        torch.testing.assert_close(got, alone, atol=tolerance, rtol=tolerance)


def check_what_is_saved_comes_back(method, model: PreTrainedModel, settings, folder, base, tokens: Tensor, **shape):
    """`base` is what the restored method goes on; the scores are the same, bit for bit."""
    method.save(model, settings, folder)
    restored = method.restore(base, settings, folder, **shape).eval()
    assert torch.equal(logits(restored, tokens), logits(model, tokens))
