"""The cache: folders that are whole or absent, described by the size and sha256 of every file, and their manifests.

It lies outside the workflow's outputs and is shared by all runs of a user. Everything is made in a temporary folder and
renamed, under a lock that dies with its process, so parallel jobs share the work and a cut leaves nothing to trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from focus.errors import UserError

RECORD = ".record.json"
MANIFEST_VERSION = 1
ALWAYS_HASHED = 32 * 2**20  # bytes: larger files are hashed only where nothing but the bytes themselves will do


def cache_root() -> Path:
    """$FOCUS_CACHE, or focus under $XDG_CACHE_HOME, or ~/.cache/focus."""
    explicit, base = os.environ.get("FOCUS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if explicit:
        return Path(explicit).expanduser().absolute()
    return (Path(base) if base else Path.home() / ".cache") / "focus"


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(folder: Path) -> dict[str, dict]:
    """{name: {"size": bytes, "sha256": hex}} of every file in a folder, sorted by name."""
    names = sorted(path.name for path in folder.iterdir() if path.name != RECORD)
    return {name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}


def damage(folder: Path, files: dict[str, dict], *, thorough: bool = False) -> str | None:
    """What first differs between a folder and its description, or None.

    Sizes are always compared, hashes for files below `ALWAYS_HASHED` or, if `thorough`, for all.
    """
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{path}: expected a file of {expected['size']} bytes, found none"
        size = path.stat().st_size
        if size != expected["size"]:
            return f"{path}: expected {expected['size']} bytes, got {size}"
        if thorough or size < ALWAYS_HASHED:
            got = sha256(path)
            if got != expected["sha256"]:
                return f"{path}: expected sha256 {expected['sha256']}, got {got}"
    return None


def built(location: str, make: Callable[[Path], dict], root: Path | None = None) -> dict:
    """The record {"files": describe(folder), **facts} of a folder of the cache, made when missing or damaged.

    `location` is relative to the cache; `make(folder)` fills an empty folder and returns the facts to keep.
    Raises UserError when the cache cannot be written.
    """
    target = (root or cache_root()) / location
    record = _record(target)
    if record is None:
        with locked(target):
            record = _record(target) or _make(target, make)
    return record


def read_manifest(path: Path) -> dict:
    """Read a manifest of a model, corpus or benchmark. Raises UserError when it is missing or not one."""
    try:
        manifest = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: expected a manifest, found none") from None
    except ValueError as error:
        raise UserError(f"{path}: expected a manifest in JSON, got {error}") from None
    version = manifest.get("manifest_version") if isinstance(manifest, dict) else None
    if version != MANIFEST_VERSION:
        raise UserError(f"{path}: expected manifest_version {MANIFEST_VERSION}, got {version}")
    return manifest


def cached(manifest_path: Path, manifest: dict, again: Callable[[str], dict]) -> Path:
    """The cache's folder of a manifest; when damaged, `again(name)` makes it anew. UserError as in `resolve`."""
    folder = cache_root() / manifest["folder"]
    if damage(folder, manifest["files"]):
        again(manifest["name"])
        problem = damage(folder, manifest["files"])
        if problem:
            raise UserError(f"{problem}; remove {manifest_path} to accept what {manifest['name']} is made into now")
    return folder


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of one path of the cache and, once alone, remove what cut attempts left beside it."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f".{target.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"waiting for another process that makes {target.name}", flush=True)
            lock.acquire()
        try:
            for leftover in target.parent.glob(f".{target.name}.part-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            yield
        finally:
            lock.release()


@contextmanager
def partial(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, removed on the way out whatever happens (but a kill)."""
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.part-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only folder and the like into a UserError that names the path."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and "No space left" not in str(error):  # safetensors has errors of its own
            raise
        where, reason = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or error
        raise UserError(
            f"{where}: cannot write to the cache ({reason}); free some space or let FOCUS_CACHE name another folder"
        ) from error


def _make(target: Path, make: Callable[[Path], dict]) -> dict:
    with partial(target) as folder:
        record = make(folder)
        record |= {"files": describe(folder)}
        (folder / RECORD).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        for path in folder.iterdir():
            path.chmod(0o644)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
        return record


def _record(target: Path) -> dict | None:
    try:
        record = json.loads((target / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return None if damage(target, record["files"], thorough=True) else record
