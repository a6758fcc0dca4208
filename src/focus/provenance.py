"""Result files: one JSON each, with where its numbers come from, written to a temporary name and renamed.

Also the digest of the package's source, and the list of source files that a module depends on, which the workflow
gives its rules as input so that a changed file reruns exactly the rules that use it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

from focus.errors import UserError

RESULT_VERSION = 1
PACKAGE = Path(__file__).parent
REPORTED_PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval", "numpy", "peft", "snakemake")


def write_result(
    path: Path,
    *,
    experiment: str,
    settings: dict,
    metrics: dict,
    started: float,
    modules: list[str],
    revisions: dict | None = None,
    backend: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
) -> None:
    """Write one result.

    `experiment` is the kind of job (training, perplexity, ...); `settings` the job after defaults; `started` the value
    of `time.time()` when it began; `modules` the names of the focus modules whose source the digest covers; `revisions`
    what the models and data read were pinned to; `backend` the attention really used.
    """
    result = {
        "result_version": RESULT_VERSION,
        "experiment": experiment,
        "settings": settings,
        "metrics": metrics,
        "provenance": {
            "code": digest(modules),
            "versions": {name: version(name) for name in REPORTED_PACKAGES} | {"python": platform.python_version()},
            "revisions": revisions or {},
            "device": device,
            "processor": processor(),
            "threads": _threads(),
            "dtype": dtype,
            "backend": backend,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.time() - started, 1),
            "cpu_seconds": round(_cpu_seconds(), 1),
            "peak_memory_mib": _peak_memory_mib(),
            "argv": ["focus", *sys.argv[1:]],
        },
    }
    write_atomically(path, json.dumps(result, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_result(path: Path) -> dict:
    """Read one result. Raises UserError when the file is missing, is not JSON, or has another version."""
    try:
        result = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: expected a result file, found none") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: expected JSON, got {error}") from None
    if result.get("result_version") != RESULT_VERSION:
        raise UserError(f"{path}: expected result_version {RESULT_VERSION}, got {result.get('result_version')}")
    return result


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` beside `path`, sync it, and rename it there: a cut leaves the old file or none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sources(*modules: str) -> list[Path]:
    """The source files behind the named focus modules: their own and, step by step, those they import from focus."""
    found: set[Path] = set()
    queue = list(modules)
    while queue:
        name = queue.pop()
        path = _source(name)
        if path is None or path in found:
            continue
        found.add(path)
        queue += _imports(path.read_text())
    return sorted(found)


def digest(modules: list[str]) -> str:
    """sha256 over the source files behind the named modules."""
    total = hashlib.sha256()
    for path in sources(*modules):
        total.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def processor() -> str:
    """The processor's name as the system gives it, with its family and model where those are told.

    Virtual machines shorten the name: processors of one name differ several times in speed.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in about:
        return platform.processor() or platform.machine()
    kind = [f"{key.removeprefix('cpu ')} {about[key]}" for key in ("cpu family", "model") if key in about]
    return about["model name"] + (f" ({', '.join(kind)})" if kind else "")


def _peak_memory_mib() -> int:
    """The system counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)


def _cpu_seconds() -> float:
    """Of this process and those it waited for, imports included."""
    return sum(os.times()[:4])


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else None


def _source(module: str) -> Path | None:
    parts = module.split(".")
    if parts[0] != "focus":
        return None
    base = PACKAGE.joinpath(*parts[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists() and path != PACKAGE / "__init__.py":
            return path
    return None


@cache
def _imports(source: str) -> list[str]:
    """The modules that a source text may import; cached, as parsing is slow and most rules ask for the same files."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
