"""Sequences that begin alike are read once, and come out as if each were read alone."""

from contextlib import nullcontext

import pytest
import torch
from tiny import WINDOW, focus_method, tiny_model

from focus.errors import UserError
from focus.evaluation.reading import Reader, likelihood
from focus.method_config import make_method
from focus.methods import METHODS

METHOD_SETTINGS = {
    "pretrained": make_method(kind="pretrained", label="x"),
    "window": make_method(kind="window", label="x", sinks=2),
    "k=1": focus_method([], {"top_k": 1}),
    "k=2": focus_method([], {"top_k": 2}),
    "sinkhorn": focus_method([], {"balance": "sinkhorn"}),
}


def attached(name):
    settings, model = METHOD_SETTINGS[name], tiny_model()
    METHODS[settings.kind].attach(model, settings, window=WINDOW, seed=3)
    return model, METHODS[settings.kind].decodes(settings)


def sequences():
    """A long one, then ones that leave it late, early, in the middle, and one that is all other."""
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(0, 256, (90,), generator=generator)
    found = [long]
    for shared in (80, 88, 20, 60, 0, 90):
        found.append(torch.cat([long[:shared], torch.randint(0, 256, (12,), generator=generator)]))
    return found


@pytest.mark.parametrize("name", METHOD_SETTINGS)
def test_what_is_kept_changes_nothing(name):
    model, caches = attached(name)
    reader = Reader(model, products=nullcontext, caches=caches)
    for tokens in sequences():
        places = torch.tensor([len(tokens) - 9, len(tokens) - 4, len(tokens) - 1])
        with torch.no_grad():
            alone = model(input_ids=tokens[None], use_cache=False).logits[0, places]
        torch.testing.assert_close(reader.logits(tokens, places), alone, atol=2e-5, rtol=1e-4)


def test_only_what_is_new_is_read():
    model, _ = attached("k=1")
    reader, (long, *_) = Reader(model, products=nullcontext), sequences()
    counts = []
    for tokens, first in ((long, 80), (long, 80), (torch.cat([long[:85], long[:3]]), 84), (long[:40], 39)):
        before = reader.tokens_read
        reader.logits(tokens, torch.arange(first, len(tokens)))
        counts.append(reader.tokens_read - before)
    assert counts == [90, 10, 4, 1]


def test_a_beginning_of_less_than_half_is_not_kept():
    model, _ = attached("pretrained")
    reader, (long, *_) = Reader(model, products=nullcontext), sequences()
    reader.logits(long, torch.tensor([89]))
    reader.logits(torch.cat([long[:30], long[:31]]), torch.tensor([60]))
    assert reader.tokens_read == 90 + 61


def test_what_is_no_number_is_refused():
    model, _ = attached("pretrained")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    with pytest.raises(UserError, match="5 tokens: expected finite logits"):
        Reader(model, products=nullcontext).logits(torch.arange(5), torch.tensor([4]))


def test_likelihoods_are_the_sums_of_log_probabilities():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]])
    probabilities = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    expected = float((probabilities[0, 0] * probabilities[1, 1]).log())
    assert likelihood(logits, torch.tensor([0, 1])) == (pytest.approx(expected), False)
    assert likelihood(logits, torch.tensor([0, 2]))[1]


def test_an_answer_is_what_the_whole_sequence_says():
    model, _ = attached("window")
    asked, answer = torch.arange(40), torch.tensor([7, 9, 11])
    with torch.no_grad():
        logits = model(input_ids=torch.cat([asked, answer])[None], use_cache=False).logits[0]
    expected = torch.log_softmax(logits[39:42], dim=-1).gather(1, answer[:, None]).sum()
    score, greedy = Reader(model, products=nullcontext).answer(asked, answer)
    assert score == pytest.approx(float(expected), abs=1e-4)
    assert greedy == bool((logits[39:42].argmax(dim=-1) == answer).all())
