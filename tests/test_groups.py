"""What the groups hold: purity and its baselines, parts of speech by characters, far pairs, and a whole job."""

import json
import re
from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONTEXT, WINDOW, byte_tokenizer, focus_method, make_world, row_settings, tiny_model, train_job

from focus import adapter, groups, purity, taggers, training
from focus.config import GroupsSettings
from focus.corpora import Document
from focus.data import Window
from focus.errors import UserError
from focus.jobs import GroupsJob
from focus.method_config import FocusConfig
from focus.provenance import read_result
from focus.taggers import Word

SIZE = (3, 4)
LABELLED = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=40)


def words(text):
    """A tagger whose tag is the word itself."""
    return [Word(match.start(), match.end(), match.group()) for match in re.finditer(r"\w+|[^\w\s]", text)]


def table_of(labelled):
    own, other = (np.array(column) for column in zip(*labelled, strict=True))
    return purity.contingency(own[None], other, SIZE)


@given(LABELLED)
def test_purity_is_the_share_in_each_groups_commonest_category(labelled):
    own = [Counter(category for each, category in labelled if each == group) for group in range(3)]
    expected = sum(max(counted.values(), default=0) for counted in own) / len(labelled)
    assert purity.purity(table_of(labelled))[0] == pytest.approx(expected)


@given(LABELLED)
def test_information_is_the_sum_of_three_entropies(labelled):
    def entropy(values):
        shares = np.array(list(Counter(values).values())) / len(labelled)
        return -(shares * np.log2(shares)).sum()

    expected = entropy([g for g, _ in labelled]) + entropy([c for _, c in labelled]) - entropy(labelled)
    assert purity.information(table_of(labelled))[0] == pytest.approx(expected, abs=1e-9)


def drawn(trial, layers=1, tokens=60):
    generator = np.random.default_rng(1000 + trial)
    return generator.integers(0, 3, (layers, tokens)), generator.integers(0, 4, tokens)


def test_p_values_of_random_groups_are_uniform():
    found = []
    for trial in range(300):
        own, categories = drawn(trial)
        null = purity.shuffled(own, categories, SIZE, 49, trial)
        observed = purity.information(purity.contingency(own, categories, SIZE))
        found.append(purity.p_values(observed, null.information)[0])
    assert np.mean(found) == pytest.approx(0.5, abs=0.06)
    for level in (0.1, 0.5, 0.9):
        assert np.mean(np.array(found) <= level) == pytest.approx(level, abs=0.09)


def test_the_p_value_of_the_best_layer_counts_the_choice():
    chosen, alone = [], []
    for trial in range(150):
        own, categories = drawn(trial, layers=8)
        observed = purity.purity(purity.contingency(own, categories, SIZE))
        null = purity.shuffled(own, categories, SIZE, 49, trial).purity
        best = int(purity.excess(observed, null).argmax())
        chosen.append(purity.chosen_p_value(observed, null, best))
        alone.append(purity.p_values(observed, null)[best])
    assert np.mean(np.array(chosen) <= 0.1) == pytest.approx(0.1, abs=0.07)
    assert np.mean(np.array(alone) <= 0.1) > 0.3


def test_planted_structure_is_found():
    categories = np.arange(120) % 4
    own = np.minimum(categories, 2)[None]
    null = purity.shuffled(own, categories, SIZE, 199, 0)
    table = purity.contingency(own, categories, SIZE)
    assert purity.purity(table)[0] == 0.75
    assert purity.information(table)[0] == pytest.approx(1.5)
    assert purity.p_values(purity.purity(table), null.purity)[0] == 1 / 200
    assert null.purity.max() < 0.5


def test_shuffling_keeps_the_groups_sizes():
    own, categories = drawn(0, layers=2)
    one_group_each = np.zeros_like(categories)
    null = purity.shuffled(own, one_group_each, (3, 1), 5, 0)
    assert (null.purity == 1.0).all()
    dealt = purity.shuffled(np.zeros_like(own), categories, (1, 4), 5, 0)
    assert dealt.purity == pytest.approx(np.full((5, 2), Counter(categories.tolist()).most_common(1)[0][1] / 60))


def test_groups_drawn_by_token_beat_shuffling_but_not_their_own_baseline():
    beside_shuffled, beside_their_like = [], []
    for trial in range(60):
        generator = np.random.default_rng(trial)
        tokens = generator.integers(0, 20, 400)
        categories, own = tokens % 4, generator.integers(0, 3, 20)[tokens][None]
        observed = purity.purity(purity.contingency(own, categories, SIZE))
        shuffled = purity.shuffled(own, categories, SIZE, 49, trial)
        beside_shuffled.append(purity.p_values(observed, shuffled.purity)[0])
        by_token = purity.by_token(own, tokens, categories, SIZE, 49, trial)
        beside_their_like.append(purity.p_values(observed, by_token.purity)[0])
    assert np.mean(np.array(beside_shuffled) == 1 / 50) > 0.9
    assert 0.35 < np.mean(beside_their_like) < 0.65


def test_a_token_takes_the_tag_of_the_word_with_its_first_character():
    text = "Hé  café, 😀 un"
    encoded = byte_tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)
    tags = groups.align(text, encoded["offset_mapping"], words)
    assert tags == [*["Hé"] * 3, "SPACE", "SPACE", *["café"] * 5, ",", "SPACE", *["😀"] * 4, "SPACE", "un", "un"]
    assert groups.align(text, [(2, 6), (6, 10), (8, 12)], words) == ["café", "café", ","]
    assert groups.align("a b", [(0, 1), (1, 3)], lambda _: [Word(0, 1, "A")]) == ["A", "X"]


@given(st.text(alphabet="ab é,😀\n", max_size=30), st.data())
def test_alignment_is_that_of_a_search(text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    spans = list(pairwise(cuts))
    expected = []
    for start, end in spans:
        first = next((place for place in range(start, end) if not text[place].isspace()), None)
        cover = [word.tag for word in words(text) if first is not None and word.start <= first < word.end]
        expected.append("SPACE" if first is None else cover[0])
    assert groups.align(text, spans, words) == expected


def test_a_window_is_tagged_within_whole_paragraphs():
    text = "before\n\nwonderful things\n\nafter"
    encoded = groups.tokenise(Document("d", text, "held_out"), byte_tokenizer())
    seen = []

    def tag(part):
        seen.append(part)
        return words(part)

    start, end = text.index("derful"), text.index("ngs")
    window = Window("d", start, encoded.ids[start:end], 1)
    assert groups.tags_of(encoded, window, tag) == [*["wonderful"] * 6, "SPACE", *["things"] * 3]
    assert seen == ["\n\nwonderful things"]
    whole = Window("d", 0, encoded.ids, 1)
    assert groups.tags_of(encoded, whole, tag)[-5:] == ["after"] * 5


def test_far_pairs_are_those_of_a_search():
    assignment = torch.softmax(4 * torch.randn(14, 3, generator=torch.Generator().manual_seed(0)), dim=1).numpy()
    tokens = [" the", "The", "x", " y", "the", "cat", "sat", "x ", "on", "mat", "a", "b", "Y", "sat"]
    kinds = ["D", "D", "N", "N", "D", "N", "V", "N", "P", "N", "D", "N", "N", "V"]
    found = groups.far_pairs(assignment, tokens, kinds, window=3, count=5)
    every = [(i, j) for i, j in combinations(range(14), 2) if j - i > 3]
    every.sort(key=lambda pair: -float(assignment[pair[0]].astype("d") @ assignment[pair[1]].astype("d")))
    assert [(pair["a_position"], pair["b_position"]) for pair in found["pairs"]] == every[:5]
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [
        (tokens[i].strip(), tokens[j].strip()) for i, j in every[:5]
    ]
    assert all(pair["distance"] == pair["b_position"] - pair["a_position"] > 3 for pair in found["pairs"])
    same = [(i, j) for i, j in every if tokens[i].strip().lower() == tokens[j].strip().lower()]
    assert found["chance"]["same_word"] == pytest.approx(len(same) / len(every))
    assert found["listed"]["same_word"] == len(set(same) & set(every[:5])) / 5
    assert found["listed"]["same_category"] == sum(kinds[i] == kinds[j] for i, j in every[:5]) / 5
    assert found["strong"]["same_category"] == float(kinds[every[0][0]] == kinds[every[0][1]])


def test_without_far_pairs_nothing_is_said():
    found = groups.far_pairs(np.full((4, 2), 0.5), ["a"] * 4, ["N"] * 4, window=3, count=5)
    assert found == {"pairs": [], "listed": None, "strong": None, "chance": None}


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_assignments_are_the_routers(attention):
    model = adapter.compose(tiny_model(), FocusConfig(groups=4, window=WINDOW, routing_dim=4), seed=1)
    adapter.switch(model, attention)
    generator = torch.Generator().manual_seed(0)
    windows = [Window("d", 0, torch.randint(0, 250, (CONTEXT,), generator=generator), 1) for _ in range(2)]
    found = groups.assign(model, windows)
    hidden = []
    for layer in model.transformer.h:
        layer.attn.register_forward_pre_hook(
            lambda _, args, kwargs: hidden.append((args or (kwargs["hidden_states"],))[0]), with_kwargs=True
        )
    with torch.no_grad():
        model(windows[1].tokens[None])
        expected = [router(states)[0] for router, states in zip(adapter.routers(model), hidden, strict=True)]
    for layer, assignment in enumerate(expected):
        assert found.groups[layer, CONTEXT:].tolist() == assignment.argmax(dim=1).tolist()
        assert found.confidence[layer, CONTEXT:] == pytest.approx(assignment.amax(dim=1).numpy(), rel=1e-5)
    assert found.ids.tolist() == torch.cat([window.tokens for window in windows]).tolist()
    assert found.first.argmax(axis=2).tolist() == found.groups[:, :CONTEXT].tolist()
    assert all(router.seen is None for router in adapter.routers(model))


def test_assignments_that_are_not_finite_are_refused():
    model = adapter.compose(tiny_model(), FocusConfig(groups=4, window=WINDOW, routing_dim=4))
    with torch.no_grad():
        adapter.routers(model)[1].centroids[0, 0] = float("nan")
    with pytest.raises(UserError, match="d from token 3: expected finite assignments"):
        groups.assign(model, [Window("d", 3, torch.arange(8), 1)])


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A world with an untrained adapter, and its job."""
    monkeypatch.setenv("FOCUS_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    (world.folder / "tagger.json").write_text(world.corpus.read_text())
    monkeypatch.setattr(groups, "load_tagger", lambda _: words)
    method = focus_method([], {"groups": 5, "top_k": 1})
    training.run(train_job(method), model=world.model, corpus=world.corpus, **world.outputs("focus"))
    settings = GroupsSettings(
        model="tiny-gpt2", corpus="austen", method="method", windows=4, shuffles=30, passage_tokens=20, pairs=6
    )
    job = GroupsJob(**row_settings(method), attention="hard", top_k=1, groups=settings)

    def run(name):
        paths = {"model": world.model, "corpus": world.corpus, "tagger": world.folder / "tagger.json"}
        groups.run(job, **paths, weights=world.outputs("focus")["weights"], output=tmp_path / name)
        return read_result(tmp_path / name)

    return run


def test_a_whole_job_counts_every_token_and_repeats(job):
    first, second = job("first.json"), job("second.json")
    metrics = first["metrics"]
    assert metrics == second["metrics"]
    assert metrics["tokens"] == 4 * CONTEXT
    assert len(metrics["layers"]) == 2
    for layer in metrics["layers"]:
        assert len(layer["groups"]) == 5
        assert sum(group["share"] for group in layer["groups"]) == pytest.approx(1)
        assert sum(group["share"] * (group["purity"] or 0) for group in layer["groups"]) == pytest.approx(
            layer["purity"]
        )
        assert sum(group["share"] * (group["confidence"] or 0) for group in layer["groups"]) == pytest.approx(
            layer["confidence"], rel=1e-5
        )
        for group in layer["groups"]:
            if group["top"]:
                assert group["categories"][group["category"]] == pytest.approx(group["purity"], abs=1e-4)
                assert sum(group["categories"].values()) == pytest.approx(1, abs=1e-2)
        assert len(layer["far"]["pairs"]) == 6
        assert layer["shuffled"]["purity"] < layer["purity"]
    assert first["provenance"]["revisions"]["tagger"]["spacy"]
    assert first["provenance"]["backend"].startswith("focus")


def test_the_passage_is_the_text_itself(job):
    metrics = job("result.json")["metrics"]
    passage = metrics["passage"]
    assert metrics["windows"][0] == {"document": passage["document"], "start": passage["start"]}
    shown = "".join(passage["pieces"])
    assert len(passage["pieces"]) == len(passage["categories"]) == len(shown) == 20
    assert {category for category in passage["categories"] if category != "SPACE"} & set(shown.split())
    for layer in range(2):
        assert all(0 <= int(number) < 5 for number in passage["groups"][layer].split())
        assert len(passage["confidence"][layer].split()) == 20


def test_an_unknown_tagger_is_named():
    with pytest.raises(UserError, match="tagger: expected one of en-core-web-sm, got brill"):
        taggers.fetch_tagger("brill")


def test_the_real_tagger_reads_english(tmp_path):
    path = tmp_path / "tagger.json"
    path.write_text(json.dumps(taggers.fetch_tagger("en-core-web-sm")))
    text = "She had walked with Henry to the old café, “Bath”.\n\nHe has two dogs."
    found = {text[word.start : word.end]: word.tag for word in taggers.load_tagger(path)(text)}
    expected = {"She": "PRON", "had": "AUX", "walked": "VERB", "to": "ADP", "the": "DET", "old": "ADJ", "café": "NOUN"}
    expected |= {",": "PUNCT", "“": "PUNCT", "Henry": "PROPN", "has": "VERB", "two": "NUM", "\n\n": "SPACE"}
    assert {word: found[word] for word in expected} == expected
