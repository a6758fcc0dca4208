"""Fetching from a hub that cuts, corrupts, refuses, tires and forgets."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import pyarrow
import pytest
import torch
from hub import COMMIT, Hub, git_object
from pyarrow import parquet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from focus import benchmarks, corpora, hub, models

SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 9000 for n in (1, 2)}
FILES = SHARDS | {"config.json": b'{"a": 1}', "README.md": b"not wanted", "model.safetensors.index.json": b"{}"}
FETCH = """
import json, sys
from huggingface_hub import constants
from focus import hub
from focus.errors import UserError
from focus.sources import fetch
hub.FIRST_WAIT = 0.01
constants.DOWNLOAD_CHUNK_SIZE = 500
try:
    source = hub.HubFiles("some/model", sys.argv[1], json.loads(sys.argv[3]), tuple(json.loads(sys.argv[2])))
    print(fetch([source])[0])
except UserError as error:
    sys.exit(str(error))
"""
PATTERNS = ["*.safetensors", "*.json"]


@pytest.fixture
def served():
    with Hub("some/model", dict(FILES)) as found:
        yield found


def fetch(served, tmp_path, patterns=PATTERNS, pins=(), commit=COMMIT, **more):
    arguments = [commit, json.dumps(patterns), json.dumps(dict(pins))]
    return served.run(FETCH, *arguments, home=tmp_path / "hf", FOCUS_CACHE=str(tmp_path / "cache"), **more)


def folder(done) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


def whole(path) -> bool:
    wanted = {name for name in FILES if name != "README.md"}
    present = {file.name for file in path.iterdir() if not file.name.startswith(".")}
    return present == wanted and all((path / name).read_bytes() == FILES[name] for name in wanted)


def test_the_files_that_match_come_whole_and_are_fetched_once(served, tmp_path):
    assert whole(folder(fetch(served, tmp_path)))
    before = served.asked.copy()
    assert whole(folder(fetch(served, tmp_path)))
    assert served.asked == before


@pytest.mark.parametrize("fault", ["cut", 500, 503, 429, "corrupt"])
def test_what_passes_is_tried_again(served, tmp_path, fault):
    name = "model-00001-of-00002.safetensors"
    served.faults = {name: [fault], "config.json": [fault], "tree": [fault] if isinstance(fault, int) else []}
    assert whole(folder(fetch(served, tmp_path)))
    if fault == "cut":
        assert (name, 4500) in served.ranges


def test_a_file_that_stays_corrupt_is_named_and_not_kept(served, tmp_path):
    name = "model-00002-of-00002.safetensors"
    served.faults = {name: ["corrupt"] * 9}
    done = fetch(served, tmp_path)
    assert done.returncode == 1
    assert f"{name} has sha256" in done.stderr
    assert not list((tmp_path / "cache").rglob(f"{name}*"))


def test_a_pin_here_is_stronger_than_what_the_hub_says(served, tmp_path):
    done = fetch(served, tmp_path, pins={"config.json": "0" * 64})
    assert done.returncode == 1
    assert f"expected {'0' * 64}" in done.stderr


def test_pinned_files_need_no_list(served, tmp_path):
    pins = {name: hashlib.sha256(content).hexdigest() for name, content in SHARDS.items()}
    found = folder(fetch(served, tmp_path, patterns=[], pins=pins))
    assert {file.name for file in found.iterdir()} == set(SHARDS)
    assert not served.asked["tree"]


def test_a_killed_download_goes_on_where_it_ended(served, tmp_path):
    name = "model-00002-of-00002.safetensors"
    served.faults = {name: ["slow"]}
    environment = served.environment(tmp_path / "hf", FOCUS_CACHE=str(tmp_path / "cache"))
    command = [sys.executable, "-c", FETCH, COMMIT, json.dumps(PATTERNS), "{}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(part.stat().st_size for part in (tmp_path / "cache").rglob(f"{name}*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert whole(folder(fetch(served, tmp_path)))
    kept = max(first for path, first in served.ranges if path == name)
    assert kept > 0
    assert served.asked["model-00001-of-00002.safetensors"] == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token": "secret"}, "accept the licence on {endpoint}/some/model and set HF_TOKEN"),
        ({"gone": True}, "the commit is not in {endpoint}/some/model any more"),
        ({"faults": {"tree": [403]}}, "denies access to {endpoint}/some/model (status 403)"),
    ],
)
def test_what_does_not_pass_is_one_clear_line(served, tmp_path, change, expected):
    for key, value in change.items():
        setattr(served, key, value)
    done = fetch(served, tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert expected.format(endpoint=served.endpoint) in done.stderr
    assert served.asked["tree"] == 1


def test_a_token_opens_what_is_gated(served, tmp_path):
    served.token = "secret"
    assert whole(folder(fetch(served, tmp_path, HF_TOKEN="secret")))


def test_a_pattern_without_a_file_is_named(served, tmp_path):
    assert "no file like *.bin" in fetch(served, tmp_path, patterns=["*.bin"]).stderr


def test_offline_a_whole_cache_is_enough_and_an_empty_one_says_so(served, tmp_path):
    done = fetch(served, tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE is set and the cache lacks it" in done.stderr
    fetch(served, tmp_path)
    assert whole(folder(fetch(served, tmp_path, HF_HUB_OFFLINE="1")))


def test_a_folder_from_another_machine_serves_without_a_network(served, tmp_path):
    found = folder(fetch(served, tmp_path))
    archives = tmp_path / "archives"
    archives.mkdir()
    found.rename(archives / "some--model")
    done = fetch(served, tmp_path, HF_HUB_OFFLINE="1", FOCUS_ARCHIVES=str(archives))
    assert folder(done) == archives / "some--model"


def test_git_object_names_are_gits(tmp_path):
    (tmp_path / "file").write_bytes(b"content\n")
    named = subprocess.run(["git", "hash-object", tmp_path / "file"], check=True, capture_output=True, text=True)
    assert hub.git_object(tmp_path / "file") == named.stdout.strip() == git_object(b"content\n")


def test_every_source_of_the_registries_names_a_commit():
    entries = {**models.REGISTRY, **corpora.REGISTRY, **benchmarks.REGISTRY}
    sources = [source for entry in entries.values() for source in entry.sources if isinstance(source, hub.HubFiles)]
    assert len(sources) > 10
    for source in sources:
        assert re.fullmatch("[0-9a-f]{40}", source.revision), source
        assert source.patterns or source.pins


MODEL = """
import json, os, sys
from focus import hub, models
entry = models.ModelEntry((hub.HubFiles("some/model", sys.argv[1], patterns=("*.json", "model*.safetensors")),),
                          hub.copy_flat, "none", "")
models.REGISTRY["tiny"] = entry
manifest = sys.argv[2]
if os.environ["HF_HUB_OFFLINE"] == "0":
    open(manifest, "w").write(json.dumps(models.fetch_model("tiny")))
model, tokenizer = models.load_model(manifest)
print(sum(parameter.numel() for parameter in model.parameters()), tokenizer("a b")["input_ids"])
"""


def test_a_sharded_model_comes_from_the_hub_and_loads_offline(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "tiny", max_shard_size="8KB")
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "tiny")
    files = {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 1
    with Hub("some/model", files) as served:
        arguments = [COMMIT, str(tmp_path / "tiny.json")]
        cache = {"FOCUS_CACHE": str(tmp_path / "cache"), "home": tmp_path / "hf"}
        first = served.run(MODEL, *arguments, **cache)
        assert first.returncode == 0, first.stderr
        asked = served.asked.copy()
        second = served.run(MODEL, *arguments, **cache, HF_HUB_OFFLINE="1")
        assert served.asked == asked
    expected = f"{sum(parameter.numel() for parameter in model.parameters())} [0, 1]"
    assert first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1] == expected


def parquet_bytes(**columns) -> bytes:
    buffer = BytesIO()
    parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


CORPUS = """
import dataclasses, json, sys
from focus import corpora, hub
name, commit, manifest = sys.argv[1:]
entry = corpora.REGISTRY[name]
source = dataclasses.replace(entry.sources[0], repository="some/texts", revision=commit)
corpora.REGISTRY[name] = dataclasses.replace(entry, sources=(source,))
open(manifest, "w").write(json.dumps(corpora.fetch_corpus(name)))
found = {split: [[d.name, d.text] for d in corpora.documents(manifest, split)] for split in ("train", "held_out")}
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        (
            "pg19",
            {
                "data/train-00000-of-00002-abc.parquet": {"short_book_title": ["T"], "url": ["u"], "text": ["one"]},
                "data/test-00000-of-00001-abc.parquet": {"short_book_title": ["H"], "url": ["v"], "text": ["two"]},
            },
            {"train": [["T (u)", "one"]], "held_out": [["H (v)", "two"]]},
        ),
        (
            "wikitext103",
            {
                "wikitext-103-raw-v1/train-00000-of-00001.parquet": {
                    "text": ["", " = A = \n", " x \n", " = = Part = = \n", " y \n", " = B = \n", " z \n"]
                },
                "wikitext-103-raw-v1/test-00000-of-00001.parquet": {"text": [" = C = \n", " w \n"]},
            },
            {
                "train": [["A (train 1)", " = A = \n x \n = = Part = = \n y \n"], ["B (train 2)", " = B = \n z \n"]],
                "held_out": [["C (held_out 1)", " = C = \n w \n"]],
            },
        ),
    ],
)
def test_the_papers_texts_become_documents_of_their_own_splits(tmp_path, name, files, expected):
    with Hub("some/texts", {k: parquet_bytes(**v) for k, v in files.items()}, repo_type="dataset") as served:
        done = served.run(
            CORPUS, name, COMMIT, str(tmp_path / "c.json"), home=tmp_path / "hf", FOCUS_CACHE=str(tmp_path / "cache")
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected
