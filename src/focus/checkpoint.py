"""Checkpoints of a training run: one file, replaced whole, and a lock that a run holds while it lives."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from focus.errors import UserError

WRITE_FAILURES = ("PytorchStreamWriter", "inline_container", "I/O error", "No space left")
"""In the messages of torch and safetensors where a write failed; they raise no OSError."""


class Checkpoints:
    """The latest state of one run in `folder`, and the log of the run while it lives.

    A state with another fingerprint is not this run's and is ignored.
    """

    def __init__(self, folder: Path, fingerprint: str):
        self.path = Path(folder) / "latest.pt"
        self.log = Path(folder) / "log.jsonl"
        self.fingerprint = fingerprint

    def save(self, state: dict) -> None:
        """Write `state` (tensors and plain values) and rename it into place."""
        temporary = self.path.with_suffix(".tmp")
        try:
            with writing(self.path), open(temporary, "wb") as file:
                torch.save(state | {"fingerprint": self.fingerprint}, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        os.replace(temporary, self.path)

    def load(self) -> dict | None:
        """The latest state of this run, or None where there is none that can be read."""
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None
        except (RuntimeError, EOFError, UnpicklingError):
            print(f"{self.path}: starting again, because it is damaged", flush=True)
            return None
        return state if state["fingerprint"] == self.fingerprint else None

    def remove(self) -> None:
        """Forget the state, once the run's results are in place."""
        self.path.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[bool]:
    """Hold `folder` for this process alone; the system lets go when the process dies.

    Yields whether another process had to be waited for, which may have finished the work.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock")
        try:
            lock.acquire(timeout=0)
            waited = False
        except Timeout:
            print(f"waiting for another process that works in {folder}", flush=True)
            lock.acquire()
            waited = True
    try:
        yield waited
    finally:
        lock.release()


@contextmanager
def publishing(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` when the block ends well."""
    temporary = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(folder):
        temporary.mkdir(parents=True)
    try:
        with writing(folder):
            yield temporary
            for path in temporary.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one line that names `path`: a full disk, a read-only folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: expected to write it, got {error.strerror or error}") from error
    except (RuntimeError, SafetensorError) as error:
        if not any(sign in str(error) for sign in WRITE_FAILURES):
            raise
        cause = error.__context__
        reason = cause.strerror if isinstance(cause, OSError) else error
        raise UserError(f"{path}: expected to write it, got {reason}") from error
