"""Documents to windows: caching, determinism, even spread, and no document seen twice."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from focus.data import evaluation_windows, tokenise, training_batches
from focus.errors import UserError


class CountingTokenizer(PreTrainedTokenizerFast):
    calls = 0

    def __call__(self, *arguments, **settings):
        type(self).calls += 1
        return super().__call__(*arguments, **settings)


@pytest.fixture
def tokenizer():
    CountingTokenizer.calls = 0
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return CountingTokenizer(tokenizer_object=words)


def documents(*texts):
    return [SimpleNamespace(name=f"d{number}", text=text) for number, text in enumerate(texts)]


def test_tokens_come_from_the_cache_the_second_time(tokenizer, tmp_path):
    first = tokenise(documents("a b c", "c b"), tokenizer, tmp_path)
    again = tokenise(documents("a b c", "c b"), tokenizer, tmp_path)
    assert [ids.tolist() for ids in first] == [ids.tolist() for ids in again] == [[0, 1, 2], [2, 1]]
    assert tokenizer.calls == 2
    tokenise(documents("a b c", "c c"), tokenizer, tmp_path)
    assert tokenizer.calls == 4


def test_a_truncated_token_cache_is_made_anew(tokenizer, tmp_path):
    tokenise(documents("a b c"), tokenizer, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    assert tokenise(documents("a b c"), tokenizer, tmp_path)[0].tolist() == [0, 1, 2]
    assert tokenizer.calls == 2


def test_a_token_cache_that_cannot_be_written_names_its_path(tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        tokenise(documents("a"), tokenizer, tmp_path / "file")


def test_batches_depend_on_seed_and_number_alone():
    stream = [torch.arange(1000, dtype=torch.int32)]
    batches = training_batches(stream, 16, 3, seed=5, separator=1000)
    forward = [batches[number] for number in range(60)]
    fresh = training_batches(stream, 16, 3, seed=5, separator=1000)
    assert all(torch.equal(fresh[number], forward[number]) for number in (59, 0, 30))
    assert not torch.equal(training_batches(stream, 16, 3, seed=6, separator=1000)[0], forward[0])


def test_an_epoch_takes_each_token_at_most_once():
    batches = training_batches([torch.arange(1000, dtype=torch.int32)], 16, 1, seed=0, separator=1000)
    for epoch in range(3):
        seen = torch.cat([batches[epoch * batches.windows + place][0] for place in range(batches.windows)])
        assert len(seen.unique()) == len(seen) >= 1000 - 3 * 16


def test_documents_are_separated():
    parts = [torch.full((20,), 1, dtype=torch.int32), torch.full((20,), 2, dtype=torch.int32)]
    assert training_batches(parts, 4, 1, seed=0, separator=9).stream.tolist() == [1] * 20 + [9] + [2] * 20 + [9]


def test_too_little_training_text_is_refused():
    with pytest.raises(UserError, match="at least 32 tokens"):
        training_batches([torch.arange(20, dtype=torch.int32)], 16, 1, seed=0, separator=0)


def test_evaluation_windows_are_full_spread_and_score_each_token_once():
    texts = [("long", torch.arange(1000)), ("short", torch.arange(9)), ("other", torch.arange(2000, 2500))]
    windows = evaluation_windows(texts, context=10, windows=150)
    assert len(windows) == 150
    assert {window.document for window in windows} == {"long", "other"}
    assert torch.equal(torch.cat([window.tokens for window in windows[:100]]), torch.arange(1000))
    few = evaluation_windows(texts, context=10, windows=3)
    assert [(window.document, window.start) for window in few] == [("long", 250), ("long", 750), ("other", 250)]
    assert few[0].first == 1


def test_strided_windows_score_their_last_tokens():
    windows = evaluation_windows([("d", torch.arange(30))], context=10, windows=5, stride=5)
    assert [window.start for window in windows] == [0, 5, 10, 15, 20]
    scored = torch.cat([window.tokens[window.first :] for window in windows])
    assert torch.equal(scored, torch.arange(5, 30))


def test_more_windows_than_the_text_has_are_refused():
    with pytest.raises(UserError, match=r"perplexity.windows: expected at most 3.*got 4"):
        evaluation_windows([("d", torch.arange(30))], context=10, windows=4)
