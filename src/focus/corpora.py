"""The registry of texts: where each comes from, under what licence, and how it becomes clean documents.

A document belongs to one split for good, so what is trained on is never evaluated on.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from focus import cleaning
from focus.cache import MANIFEST_VERSION, built, cached, read_manifest
from focus.errors import UserError
from focus.hub import HubFiles
from focus.provenance import digest
from focus.sources import DebianPackage, PackageArchive, Source, fetch, member, members

Split = Literal["train", "held_out"]
SHORTEST = 2000  # characters below which a page is a stub
HELD_OUT_PART = 5  # one document in five is held out


@dataclass(frozen=True)
class Document:
    """One text: its name is unique in its corpus; an empty line ends a paragraph."""

    name: str
    text: str
    split: Split


@dataclass(frozen=True)
class CorpusEntry:
    """One corpus; `read(source)` yields its documents."""

    sources: tuple[Source, ...]
    read: Callable[[Path], Iterator[Document]]
    licence: str
    note: str


NOVELS = {
    "emma": ("Emma", "train"),
    "mansfieldpark": ("Mansfield Park", "train"),
    "northangerabbey": ("Northanger Abbey", "held_out"),
    "persuasion": ("Persuasion", "held_out"),
    "prideprejudice": ("Pride and Prejudice", "train"),
    "sensesensibility": ("Sense and Sensibility", "train"),
}


def _austen(source: Path) -> Iterator[Document]:
    for key, lines in _r_data(source, "*/janeaustenr/data/Rdata").items():
        title, split = NOVELS[key]
        end = lines.index("A NOTE ON THE TEXT") if "A NOTE ON THE TEXT" in lines else len(lines)
        yield Document(title, cleaning.unwrap(lines[:end]), split)


def _r_data(source: Path, stem: str) -> dict[str, list[str]]:
    """The character vectors of an R package: an index of (offset, length) pairs into a file of compressed values, each
    with its size in 4 bytes first."""
    import rdata

    def value(serialised: bytes):
        return rdata.conversion.convert(rdata.parser.parse_data(serialised, extension=".rds"))

    index = value(gzip.decompress(member(source, f"{stem}.rdx")))
    data = member(source, f"{stem}.rdb")
    texts = {}
    for name, (offset, length) in index["variables"].items():
        lines = value(zlib.decompress(data[int(offset) + 4 : int(offset) + int(length)]))
        texts[str(name)] = [str(line) for line in lines]
    return texts


def _wikipedia(source: Path) -> Iterator[Document]:
    dump = bz2.decompress(member(source, "*/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"))
    root = ElementTree.fromstring(dump)
    space = root.tag.partition("}")[0] + "}"
    for page in root.iter(f"{space}page"):
        if page.findtext(f"{space}ns") != "0" or page.find(f"{space}redirect") is not None:
            continue
        title = page.findtext(f"{space}title")
        text = cleaning.wikitext(page.findtext(f"{space}revision/{space}text") or "")
        if len(text) >= SHORTEST:
            yield Document(title, f"{title}\n\n{text}", _split(title))


def _essays(source: Path) -> Iterator[Document]:
    for path, content in members(source, "*/doc/anarchism/markdown/*.md*"):
        name = Path(path).name.partition(".")[0]
        if not re.fullmatch(r"sec[A-J]\d+", name):  # the introductions and appendices repeat the sections
            continue
        text = cleaning.markdown((gzip.decompress(content) if path.endswith(".gz") else content).decode())
        if len(text) >= SHORTEST:
            yield Document(name, text, _split(name))


def _books(source: Path) -> Iterator[Document]:
    """PG-19 keeps its own split."""
    for split, pattern in (("train", "data/train-*.parquet"), ("held_out", "data/test-*.parquet")):
        for row in _rows(source, pattern, ["short_book_title", "url", "text"]):
            yield Document(f"{row['short_book_title']} ({row['url']})", row["text"], split)


def _articles(source: Path) -> Iterator[Document]:
    """WikiText keeps one line a row; a line " = Title = " begins an article."""
    for split, pattern in (("train", "*/train-*.parquet"), ("held_out", "*/test-*.parquet")):
        title, lines, number = "", [], 0
        for row in [*_rows(source, pattern, ["text"]), {"text": " = End = \n"}]:
            heading = re.fullmatch(r" = ([^=]+) = \n", row["text"])
            if heading:
                if title:
                    yield Document(f"{title} ({split} {number})", "".join(lines), split)
                title, lines, number = heading[1], [], number + 1
            lines.append(row["text"])


def _pages(source: Path) -> Iterator[Document]:
    for number, row in enumerate(_rows(source, "plain_text/train-*.parquet", ["text"])):
        yield Document(f"page {number:07}", row["text"], _split(f"page {number:07}"))


def _rows(source: Path, pattern: str, columns: list[str]) -> Iterator[dict]:
    """The rows of the parquet files that match, file by file in the order of their names."""
    from pyarrow import parquet

    for file in sorted(source.glob(pattern)):
        for batch in parquet.ParquetFile(file).iter_batches(columns=columns):
            yield from batch.to_pylist()


def _split(name: str) -> Split:
    return "held_out" if int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_PART == 0 else "train"


REGISTRY = {
    "austen": CorpusEntry(
        sources=(
            DebianPackage(
                "r-cran-janeaustenr",
                "1.0.0-1",
                "r-cran-janeaustenr_1.0.0-1_all.deb",
                "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
            ),
        ),
        read=_austen,
        licence="public domain",
        note="stand-in for PG-19: six novels by Jane Austen, two of them held out",
    ),
    "wikipedia": CorpusEntry(
        sources=(
            PackageArchive(
                "gensim",
                "4.4.0",
                "gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
                "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
                tags=(
                    "--platform=manylinux_2_28_x86_64",
                    "--python-version=3.11",
                    "--implementation=cp",
                    "--abi=cp311",
                ),
            ),
        ),
        read=_wikipedia,
        licence="CC BY-SA 3.0",
        note="stand-in for WikiText-103: articles of the English Wikipedia of 2016, one in five held out",
    ),
    "essays": CorpusEntry(
        sources=(
            DebianPackage(
                "anarchism",
                "15.3-3",
                "anarchism_15.3-3_all.deb",
                "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
            ),
        ),
        read=_essays,
        licence="GPL-2",
        note="stand-in for OpenWebText: sections of An Anarchist FAQ, one in five held out",
    ),
}


REGISTRY |= {
    "pg19": CorpusEntry(
        sources=(
            HubFiles(
                "emozilla/pg19",
                "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8",
                patterns=("data/train-00000-of-*.parquet", "data/test-*.parquet"),
                repo_type="dataset",
            ),
        ),
        read=_books,
        licence="Apache-2.0",
        note="PG-19: the first part of its training books, and all test books",
    ),
    "wikitext103": CorpusEntry(
        sources=(
            HubFiles(
                "Salesforce/wikitext",
                "b08601e04326c79dfdd32d625aee71d232d685c3",
                patterns=("wikitext-103-raw-v1/train-*.parquet", "wikitext-103-raw-v1/test-*.parquet"),
                repo_type="dataset",
            ),
        ),
        read=_articles,
        licence="CC BY-SA 3.0",
        note="WikiText-103, raw",
    ),
    "openwebtext": CorpusEntry(
        sources=(
            HubFiles(
                "Skylion007/openwebtext",
                "79d93d786212f7344586290adb811d4ae6a1762c",
                patterns=("plain_text/train-000[01]?-of-*.parquet",),
                repo_type="dataset",
            ),
        ),
        read=_pages,
        licence="CC0-1.0",
        note="OpenWebText: the first twenty of its 80 parts, one page in five held out",
    ),
}
"""The paper's own texts. Twenty parts of OpenWebText hold some 2.2 billion tokens, what training from scratch reads."""


def fetch_corpus(name: str) -> dict:
    """Put a corpus into the cache as documents.jsonl and return its manifest, with what each split holds."""
    if name not in REGISTRY:
        raise UserError(f"corpus: expected one of {', '.join(sorted(REGISTRY))}, got {name}")
    corpus = REGISTRY[name]

    def make(folder: Path) -> dict:
        path, source = fetch(corpus.sources)
        texts = sorted(corpus.read(path), key=lambda document: document.name)
        lines = [json.dumps(asdict(document), ensure_ascii=False) for document in texts]
        (folder / "documents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return {"source": str(source), "revision": source.revision, "splits": _count(texts)}

    location = f"corpora/{name}-{digest(['focus.corpora'])[:8]}"
    return {
        "manifest_version": MANIFEST_VERSION,
        "name": name,
        "kind": "corpus",
        "folder": location,
        "licence": corpus.licence,
        "note": corpus.note,
        **built(location, make),
    }


def documents(manifest_path: Path, split: Split) -> list[Document]:
    """One split of a corpus, by name. A damaged cache is mended or named, as in `cache.cached`."""
    if split not in ("train", "held_out"):
        raise UserError(f"split: expected train or held_out, got {split}")
    folder = cached(manifest_path, read_manifest(manifest_path), fetch_corpus)
    with open(folder / "documents.jsonl", encoding="utf-8") as file:
        return [document for line in file if (document := Document(**json.loads(line))).split == split]


def _count(texts: list[Document]) -> dict:
    return {
        split: {
            "documents": sum(document.split == split for document in texts),
            "characters": sum(len(document.text) for document in texts if document.split == split),
        }
        for split in ("train", "held_out")
    }
