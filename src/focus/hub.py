"""Files of a model hub's repository at one commit: listed, fetched in parts that resume, each checked, kept whole.

The client of the hub accepts a corrupt file of the right size, does not try a server's error again and forgets what it
had when it is killed; so it is asked for single ranges of single files here, and every byte is hashed.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from focus.cache import sha256
from focus.errors import UserError
from focus.provenance import write_atomically

LISTING = ".listing.json"
PART = ".incomplete"
TRIES = 5
FIRST_WAIT = 1.0
"""Seconds before the second try of a request; each further wait is twice as long."""


class Unreachable(Exception):
    """Why one source gave nothing; the next one is tried."""


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository at `revision`, 40 hexadecimal digits of a commit, whose paths match a pattern.

    `pins` gives the sha256 of the files for which it is known here. The others are checked against what the hub says of
    that commit: sha256 of large files, git's object name of small ones. Without patterns the pinned files are meant.
    """

    repository: str
    revision: str
    pins: dict[str, str] = field(default_factory=dict, hash=False)
    patterns: tuple[str, ...] = ()
    repo_type: str = "model"

    def __str__(self) -> str:
        return f"hub {self.repository} at {self.revision}"

    @property
    def location(self) -> str:
        """Folder of the files inside the cache."""
        return f"hub/{self.provided}-{self.revision[:12]}"

    @property
    def provided(self) -> str:
        """What a user puts into FOCUS_ARCHIVES: a folder with the files, copied from another machine's cache."""
        return self.repository.replace("/", "--")

    def damage(self, path: Path) -> str | None:
        """What is wrong with a copy of the files, or None. Everything is hashed."""
        listing = self._listed(path)
        if listing is None:
            return f"no list of files {path.name}/{LISTING}"
        for name, expected in listing.items():
            if not (path / name).is_file():
                return f"no file {path.name}/{name}"
            if problem := wrong(path / name, expected):
                return f"{path.name}/{problem}"
        return None

    def download(self, target: Path) -> None:
        """Put the files into `target`, going on where an earlier attempt ended. Raises Unreachable or UserError."""
        print(f"fetching {self}", flush=True)
        target.mkdir(parents=True, exist_ok=True)
        listing = self._listed(target) or self._list(target)
        total = sum(entry.get("size") or 0 for entry in listing.values())
        done = 0
        for name, expected in listing.items():
            file = target / name
            if not file.is_file() or wrong(file, expected):
                file.unlink(missing_ok=True)
                self._fetch(name, file, expected)
            done += file.stat().st_size
            print(f"fetching {self}: {name} done, {done / 1e9:.2f} of {max(total, done) / 1e9:.2f} GB", flush=True)

    def _listed(self, path: Path) -> dict[str, dict] | None:
        """{path: {"sha256" or "git": hex, "size": bytes}} as pinned, or as kept beside the files; None for neither."""
        if not self.patterns:
            return {name: {"sha256": pin} for name, pin in sorted(self.pins.items())}
        try:
            kept = json.loads((path / LISTING).read_text())
        except (OSError, ValueError):
            return None
        return kept["files"] if kept["revision"] == self.revision and kept["patterns"] == list(self.patterns) else None

    def _list(self, target: Path) -> dict[str, dict]:
        from huggingface_hub import HfApi

        def ask() -> list:
            return list(
                HfApi().list_repo_tree(
                    self.repository, revision=self.revision, repo_type=self.repo_type, recursive=True
                )
            )

        files = {}
        for entry in self._try(ask, "its list of files"):
            if getattr(entry, "size", None) is None or not any(matches(entry.path, each) for each in self.patterns):
                continue
            known = self.pins.get(entry.path) or (entry.lfs.sha256 if entry.lfs else None)
            files[entry.path] = ({"sha256": known} if known else {"git": entry.blob_id}) | {"size": entry.size}
        missing = [pattern for pattern in self.patterns if not any(matches(path, pattern) for path in files)]
        if missing:
            raise Unreachable(f"no file like {missing[0]} in it")
        listing = {"revision": self.revision, "patterns": list(self.patterns), "files": dict(sorted(files.items()))}
        write_atomically(target / LISTING, json.dumps(listing, indent=2) + "\n")
        return listing["files"]

    def _fetch(self, name: str, file: Path, expected: dict) -> None:
        """One file, from where its part ends; a whole one that is wrong is fetched anew once."""
        part = file.with_name(f"{file.name}{PART}")
        part.parent.mkdir(parents=True, exist_ok=True)
        for again in (True, False):
            if not part.is_file() or wrong(part, expected):
                self._try(lambda: self._stream(name, part, expected.get("size")), name)
            problem = wrong(part, expected, name)
            if problem is None:
                os.replace(part, file)
                return
            part.unlink()
            if not again:
                raise Unreachable(problem)

    def _stream(self, name: str, part: Path, size: int | None) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.repository, name, revision=self.revision, repo_type=self.repo_type)
        with open(part, "ab", buffering=0) as stream:
            have = stream.tell()
            if size is None or have > size:
                stream.truncate(0)
                have = 0
            if size is None or have < size:
                http_get(url, stream, resume_size=have, headers=build_hf_headers(), expected_size=size)

    def _try(self, ask: Callable, what: str):
        """What `ask()` returns, tried again with longer and longer waits where waiting can help."""
        wait = FIRST_WAIT
        for left in reversed(range(TRIES)):
            try:
                return ask()
            except Exception as error:  # the client raises errors of several libraries
                if getattr(error, "errno", None) == errno.ENOSPC:
                    raise
                reason, passing = self._explain(error)
                if not passing or not left:
                    raise Unreachable(reason) from error
                print(f"fetching {self}: {what}: {reason}; trying again in {wait:g} s", flush=True)
                time.sleep(wait)
                wait *= 2

    def _explain(self, error: Exception) -> tuple[str, bool]:
        """An error in one line, and whether it may pass by itself."""
        from huggingface_hub import constants
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        page = f"{constants.ENDPOINT}/{'datasets/' * (self.repo_type == 'dataset')}{self.repository}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set and the cache lacks it; fetch it where there is a network", False
        if isinstance(error, GatedRepoError):
            return f"access is granted on request: accept the licence on {page} and set HF_TOKEN to your token", False
        if isinstance(error, RevisionNotFoundError):
            return f"the commit is not in {page} any more", False
        if isinstance(error, EntryNotFoundError):
            return f"no such file at that commit of {page}", False
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
            return f"the hub denies access to {page} (status {status}); if it is yours to see, set HF_TOKEN", False
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (lines or [type(error).__name__])[0], status is None or status >= 500 or status in (408, 429)


def matches(path: str, pattern: str) -> bool:
    """Whether a path inside a repository is like a shell pattern, whose `*` stays within one folder."""
    return path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern)


def wrong(path: Path, expected: dict, name: str | None = None) -> str | None:
    """What differs between a file and its entry in a list, or None."""
    name = name or path.name
    size = path.stat().st_size
    if expected.get("size") not in (None, size):
        return f"{name} has {size} bytes, expected {expected['size']}"
    kind, known = ("sha256", expected["sha256"]) if "sha256" in expected else ("git object name", expected["git"])
    got = sha256(path) if kind == "sha256" else git_object(path)
    return None if got == known else f"{name} has {kind} {got}, expected {known}"


def git_object(path: Path) -> str:
    """The name that git gives to a file's content: sha1 over its size and bytes."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def copy_flat(source: Path, folder: Path) -> None:
    """Put a fetched repository's files into `folder`, as further names of the same bytes where the disk allows it.

    Raises UserError for two files of the same name in different folders.
    """
    for file in sorted(source.rglob("*")):
        if not file.is_file() or file.name.startswith(".") or file.name.endswith(PART):
            continue
        target = folder / PurePosixPath(file.name)
        if target.exists():
            raise UserError(f"{source}: expected file names once, got {file.name} twice")
        try:
            os.link(file, target)
        except OSError:
            target.write_bytes(file.read_bytes())
