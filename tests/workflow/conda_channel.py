"""A conda channel and a wheel house made from the running environment, for tests without a network.

Every package that envs/*.yaml name is there, under the version they ask for; what it holds is stood in for: `python`
is a copy of the running interpreter's program with links to its standard library, `pip` a copy of the running pip, any
other is empty. The wheels have the metadata and the commands of what is installed here, and no code: Python finds that
through a folder of links, which leaves out the package itself and all metadata, so that pip installs both anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import rattler
import yaml
from packaging.utils import canonicalize_name
from rattler.index import index_fs

LIBRARY = f"lib/python3.{sys.version_info.minor}"
PACKAGES = f"{LIBRARY}/site-packages"
SITE = Path(sysconfig.get_path("purelib"))
NOT_LINKED = ("*.dist-info", "*.pth", "__pycache__", "focus", "pip")

# Read by each interpreter as it starts: its prefix, its PYTHONPATH and its command line go to $CONDA_STARTED.
RECORD_START = """import json, os, sys
if "CONDA_STARTED" in os.environ:
    with open(os.environ["CONDA_STARTED"], "a") as file:
        file.write(json.dumps([sys.prefix, os.environ.get("PYTHONPATH"), sys.orig_argv]) + "\\n")
"""

Entries = dict[str, "bytes | Path"]
"""What a package holds: by name, a file's content or where a link points."""


def build(folder: Path, environments: list[Path]) -> dict[str, str]:
    """Make the channel conda-forge and the wheel house in `folder`; return the variables that point there."""
    platform = folder / "conda-forge" / str(rattler.Subdir.current())
    platform.mkdir(parents=True)
    contents = {"python": _python(folder), "pip": _pip()}
    for environment in environments:
        for pin in yaml.safe_load(environment.read_text())["dependencies"]:
            name, version = pin.split("=")
            _package(platform, name, version, contents.get(name, {}))
    asyncio.run(index_fs(folder / "conda-forge"))
    (folder / "wheels").mkdir()
    for distribution in distributions(path=[str(SITE)]):
        if canonicalize_name(distribution.name) not in ("focus-attention", "pip"):
            _wheel(folder / "wheels", distribution)
    return {
        "CONDA_CHANNELS": str(folder),
        "CONDA_STARTED": str(folder / "started.jsonl"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder / "wheels"),
    }


def _python(folder: Path) -> Entries:
    links = folder / "running"
    links.mkdir()
    for path in SITE.iterdir():
        if not any(map(path.match, NOT_LINKED)):
            (links / path.name).symlink_to(path)
    library = [path for path in Path(sysconfig.get_path("stdlib")).iterdir() if path.name != "site-packages"]
    return {
        f"bin/python3.{sys.version_info.minor}": Path(sys.executable).resolve().read_bytes(),
        "bin/python3": Path(f"python3.{sys.version_info.minor}"),
        "bin/python": Path("python3"),
        **{f"{LIBRARY}/{path.name}": path for path in library},
        f"{PACKAGES}/running.pth": f"{links}\n".encode(),
        f"{PACKAGES}/sitecustomize.py": RECORD_START.encode(),
    }


def _pip() -> Entries:
    files = [path for part in ("pip", "pip-*.dist-info") for path in SITE.glob(f"{part}/**/*") if path.is_file()]
    return {
        f"{PACKAGES}/{path.relative_to(SITE)}": path.read_bytes() for path in files if "__pycache__" not in path.parts
    }


def _package(platform: Path, name: str, version: str, entries: Entries) -> None:
    """Write one package in conda's first format: a tar with its files, their list and its index entry."""
    index = {"name": name, "version": version, "build": "0", "build_number": 0, "depends": [], "subdir": platform.name}
    paths = [
        {"_path": path, "path_type": "softlink" if isinstance(content, Path) else "hardlink"}
        | ({} if isinstance(content, Path) else {"sha256": hashlib.sha256(content).hexdigest()})
        for path, content in sorted(entries.items())
    ]
    about = {"info/index.json": index, "info/paths.json": {"paths": paths, "paths_version": 1}}
    with tarfile.open(platform / f"{name}-{version}-0.tar.bz2", "w:bz2", compresslevel=1) as archive:
        for path, content in {**{key: json.dumps(each).encode() for key, each in about.items()}, **entries}.items():
            member = tarfile.TarInfo(path)
            member.mode = 0o755 if path.startswith("bin/") else 0o644
            if isinstance(content, Path):
                member.type, member.linkname = tarfile.SYMTYPE, str(content)
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def _wheel(folder: Path, distribution: Distribution) -> None:
    """Write a wheel with the metadata (less the long description) and entry points of what is installed, no more."""
    name = f"{canonicalize_name(distribution.name).replace('-', '_')}-{distribution.version}"
    files = {
        "METADATA": distribution.read_text("METADATA").split("\n\n")[0] + "\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": distribution.read_text("entry_points.txt") or "",
    }
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for file, content in files.items():
            wheel.writestr(f"{name}.dist-info/{file}", content)
        record = [f"{name}.dist-info/{file},," for file in [*files, "RECORD"]]
        wheel.writestr(f"{name}.dist-info/RECORD", "\n".join(record))
