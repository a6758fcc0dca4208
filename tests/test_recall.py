"""Needles and copies: exact places, an oracle that knows all, a window that cannot reach, the same inputs each time."""

import random
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tiny import WINDOW, byte_tokenizer, focus_method, make_world, row_settings, text
from transformers import GPT2Config, GPT2LMHeadModel

from focus.data import Window
from focus.errors import UserError
from focus.evaluation import recall
from focus.evaluation.reading import Reader
from focus.jobs import RecallJob
from focus.long_config import Recall
from focus.method_config import make_method
from focus.methods import METHODS
from focus.provenance import read_result

TOKENIZER = byte_tokenizer()
LENGTH, SIZE = 220, 20


def settings(**changes):
    known = {"lengths": [LENGTH], "depths": [0.0, 0.5, 1.0], "candidates": 4, "passage": SIZE, "precision": "float32"}
    return Recall(**known | changes)


def window(seed=0, length=LENGTH):
    return Window("d", 0, torch.tensor(TOKENIZER(text(seed, 600))["input_ids"])[:length], 0)


class Oracle:
    """Knows what was hidden or came before; keeps every input it is asked about."""

    def __init__(self):
        self.asked, self.read = [], []

    def answer(self, asked, answer):
        self.asked.append((asked, answer))
        *_, question = TOKENIZER.decode(asked).rpartition("\n")
        known = f"\n{question}{TOKENIZER.decode(answer)}.\n" in TOKENIZER.decode(asked)
        return (-0.1, True) if known else (-9.0, False)

    def logits(self, tokens, places):
        self.read.append(tokens)
        following = torch.cat([tokens[1:], tokens[2 * SIZE - 1 :][:1]])[places]
        return 50.0 * torch.nn.functional.one_hot(following, 257).float()


class Blind(Oracle):
    """Expects everything alike."""

    def answer(self, asked, answer):
        return -5.0, False

    def logits(self, tokens, places):
        return torch.zeros(len(places), 257)


@examples(max_examples=60, deadline=None)
@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=6),
)
def test_hidden_pieces_begin_where_said_and_leave_the_text_whole(size, pieces):
    filler = torch.arange(size)
    hidden = [torch.full((length,), 1000 + number) for number, (_, length) in enumerate(pieces)]
    joined, starts = recall.hide(filler, hidden, [depth for depth, _ in pieces])
    assert joined[joined < 1000].tolist() == filler.tolist()
    assert len(joined) == size + sum(map(len, hidden))
    for (depth, length), piece, start in zip(pieces, hidden, starts, strict=True):
        assert torch.equal(joined[start : start + length], piece)
        assert int((joined[:start] < 1000).sum()) == round(depth * size)


def test_every_needle_is_at_its_place_and_asked_for_at_the_end():
    oracle = Oracle()
    records = recall.needles(oracle, TOKENIZER, window(), settings(), random.Random(0))
    asked = [each for each in oracle.asked[:: settings().candidates]]
    inputs = {len(tokens) + len(answer) for tokens, answer in oracle.asked}
    assert max(inputs) == LENGTH
    for record, (tokens, number) in zip(records, asked, strict=True):
        sentence = TOKENIZER(f"\nThe secret number of {record['name']} is")["input_ids"]
        assert tokens[-len(sentence) :].tolist() == sentence
        start, place = record["start"], len(tokens) - record["distance"]
        assert tokens[start : start + len(sentence)].tolist() == sentence
        assert place == start + len(sentence)
        assert torch.equal(tokens[place : place + len(number)], number)
    assert [record["depth"] for record in records] == [0.0, 0.5, 1.0]
    assert records[0]["start"] == 0
    wrong = [answer for place, (_, answer) in enumerate(oracle.asked) if place % settings().candidates]
    assert not any(TOKENIZER.decode(answer) in TOKENIZER.decode(asked[0][0]) for answer in wrong)
    assert len({TOKENIZER.decode(answer) for _, answer in oracle.asked}) == len(oracle.asked)


def test_who_knows_all_has_all_right():
    found = recall.needles(Oracle(), TOKENIZER, window(), settings(), random.Random(0))
    (needles,) = recall.summaries("needle", LENGTH, found)
    assert (needles["accuracy"], needles["exact_match"], needles["correct"]) == (1.0, 1.0, [1, 1, 1])
    found = recall.copies(Oracle(), TOKENIZER, window(), settings(), random.Random(0))
    for copied in recall.summaries("copy", LENGTH, found):
        assert copied["accuracy"] == 1.0
        assert copied["second"] == pytest.approx(0.0, abs=1e-6)


def test_who_knows_nothing_has_nothing_right():
    found = recall.needles(Blind(), TOKENIZER, window(), settings(), random.Random(0))
    assert [(record["correct"], record["exact"]) for record in found] == [(0, 0)] * 3
    for copied in recall.copies(Blind(), TOKENIZER, window(), settings(), random.Random(0)):
        assert copied["second"] == pytest.approx(copied["first"])


def test_a_passage_comes_twice_at_the_said_distance():
    oracle = Oracle()
    records = recall.copies(oracle, TOKENIZER, window(), settings(), random.Random(0))
    assert [record["passage"] for record in records] == ["text", "random"]
    for record, tokens in zip(records, oracle.read, strict=True):
        first = SIZE
        again = first + record["distance"]
        assert torch.equal(tokens[first : first + SIZE - 1], tokens[again : again + SIZE - 1])
        assert again + SIZE == LENGTH == len(tokens) + 1
    written = window().tokens
    assert torch.equal(oracle.read[0][: LENGTH - SIZE], written[: LENGTH - SIZE])
    assert not torch.equal(oracle.read[1][SIZE : 2 * SIZE], written[SIZE : 2 * SIZE])
    assert 256 not in oracle.read[1]


def test_losses_of_copies_are_the_models_own():
    model = one_layer()
    reader = Reader(model, products=nullcontext)
    record, _ = recall.copies(reader, TOKENIZER, window(), settings(), random.Random(0))
    tokens = torch.cat([window().tokens[: LENGTH - SIZE], window().tokens[SIZE : 2 * SIZE]])
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(input_ids=tokens[None]).logits[0, :-1], tokens[1:], reduction="none"
        )
    assert record["first"] == pytest.approx(float(losses[SIZE : 2 * SIZE - 1].mean()), abs=1e-4)
    assert record["second"] == pytest.approx(float(losses[LENGTH - SIZE :].mean()), abs=1e-4)


def one_layer():
    torch.manual_seed(0)
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 256, "vocab_size": 257, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(**shape, **quiet)).eval()


@pytest.mark.parametrize("method", ["pretrained", "window"])
def test_a_window_in_one_layer_recalls_nothing_beyond_it(method):
    """With one layer a token's expectations depend on the tokens in its window alone, so hidden ones change nothing."""
    kind = make_method(kind=method, label="x")
    sizes = {"needle": [], "copy": []}
    for changed in (False, True):
        model = one_layer()
        METHODS[method].attach(model, kind, window=WINDOW, seed=0)
        reader = Reader(model, products=nullcontext)
        text_window = window()
        if changed:
            text_window.tokens[: LENGTH - 3 * SIZE] = torch.randint(0, 255, (LENGTH - 3 * SIZE,))
        found = recall.needles(reader, TOKENIZER, text_window, settings(depths=[0.1, 0.6]), random.Random(0))
        sizes["needle"].append([record["loss"] for record in found])
        tokens = torch.cat([text_window.tokens[: LENGTH - SIZE], window().tokens[SIZE : 2 * SIZE]])
        places = torch.arange(LENGTH - SIZE + WINDOW, LENGTH)
        sizes["copy"].append(reader.logits(tokens, places).flatten().tolist())
    same = {name: first == pytest.approx(second, abs=1e-4) for name, (first, second) in sizes.items()}
    assert same == {"needle": method == "window", "copy": method == "window"}


@pytest.fixture
def tiny_world(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    return make_world(tmp_path)


def measure(world, method, attention="full", top_k=None, weights=None, seed=0, **changes):
    job = RecallJob.model_validate(
        row_settings(method) | {"attention": attention, "top_k": top_k, "seed": seed, "recall": settings(**changes)}
    )
    output = world.folder / f"{method.kind}{seed}.json"
    recall.run(job, model=world.model, corpus=world.corpus, weights=weights, output=output)
    return read_result(output)


def test_rows_and_seeds_meet_the_same_inputs(tiny_world):
    small = {"lengths": [180, LENGTH], "depths": [0.2, 0.7], "windows": 2, "candidates": 3}
    first = measure(tiny_world, make_method(kind="pretrained", label="x"), **small)
    again = measure(tiny_world, make_method(kind="pretrained", label="x"), seed=7, **small)
    other = measure(tiny_world, make_method(kind="window", label="x", sinks=1), **small)
    assert first["metrics"] == again["metrics"]
    for one, two in zip(first["metrics"]["needle"], other["metrics"]["needle"], strict=True):
        assert one["loss"] != two["loss"]
        for key in ("document", "name", "start", "distance"):
            assert [item[key] for item in one["items"]] == [item[key] for item in two["items"]]
    assert [(each["length"], len(each["items"])) for each in first["metrics"]["needle"]] == [(180, 4), (LENGTH, 4)]
    assert [(each["length"], each["passage"], len(each["items"])) for each in first["metrics"]["copy"]] == [
        *((180, "text", 2), (180, "random", 2), (LENGTH, "text", 2), (LENGTH, "random", 2))
    ]
    assert first["metrics"]["needle"][0]["items"][0]["name"] != first["metrics"]["needle"][1]["items"][0]["name"]


def test_hard_groups_run_through_the_engine(tiny_world):
    method = focus_method([])
    folder = tiny_world.folder / "weights"
    folder.mkdir()
    from focus.models import load_model

    model, _ = load_model(tiny_world.model)
    METHODS["focus"].attach(model, method, window=WINDOW, seed=0)
    METHODS["focus"].save(model, method, folder)
    result = measure(tiny_world, method, "hard", 1, folder, depths=[0.5], passages=["random"])
    assert result["provenance"]["backend"].startswith("focus hard, ")
    assert result["metrics"]["copy"][0]["passage"] == "random"


def test_lengths_that_cannot_be_are_refused(tiny_world):
    method = make_method(kind="pretrained", label="x")
    with pytest.raises(UserError, match=r"recall.lengths: expected at most the 256 positions of tiny-gpt2, got 300"):
        measure(tiny_world, method, lengths=[300])
    with pytest.raises(UserError, match=r"recall.lengths: expected at least the \d+ tokens of the hidden sentences"):
        measure(tiny_world, method, lengths=[100], tests=["needle"])
    with pytest.raises(ValueError, match=r"lengths must be at least three passages \(60\), got 50"):
        settings(lengths=[50])
    with pytest.raises(ValueError, match="digits must give each depth 10 numbers of its own, got 2"):
        settings(digits=2, candidates=10, depths=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
