"""Fetching from a hub that cuts, corrupts, refuses, tires and forgets."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub import COMMIT, Hub, git_object

from focus import hub

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
