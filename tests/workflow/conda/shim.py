"""What Snakemake asks of `conda`, answered by py-rattler's solver and installer, with channels from $CONDA_CHANNELS."""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

import rattler
import yaml
from rattler.exceptions import SolverError

ROOT = Path(__file__).parent
COMMANDS = ("--version", "info", "config", "create", "clean", "list")


def main(arguments: list[str]) -> None:
    options = dict(itertools.pairwise(arguments))
    match [each for each in arguments if each in COMMANDS]:
        case ["--version"]:
            print("conda 24.7.1")
        case ["info"]:
            print(json.dumps({"conda_prefix": str(ROOT), "platform": str(rattler.Subdir.current())}))
        case ["config"]:
            print(json.dumps({"get": {"channel_priority": "strict"}}))
        case ["create"]:
            environment = yaml.safe_load(Path(options["--file"]).read_text())
            leave(asyncio.run(create(environment, Path(options["--prefix"]))))
        case ["clean"]:
            pass  # the cache is the channel's, which the test removes
        case ["list"]:
            print("@EXPLICIT")
            for record in sorted(Path(options["--prefix"], "conda-meta").glob("*.json")):
                print(json.loads(record.read_text())["url"])
        case _:
            raise SystemExit(f"conda: no stand-in for {' '.join(arguments)}")


async def create(environment: dict, prefix: Path) -> str | None:
    """Solve what an environment file names and install it at `prefix`; the reason when nothing solves."""
    folder = Path(os.environ["CONDA_CHANNELS"])
    channels = [rattler.Channel((folder / name).as_uri()) for name in environment["channels"]]
    try:
        records = await rattler.solve(channels, environment["dependencies"])
    except SolverError as error:
        return f"conda: {error}"
    await rattler.install(records, prefix, cache_dir=folder / "cache", show_progress=False)
    return None


def leave(reason: str | None) -> None:
    """End at once: threads of rattler's may still run, and would abort an interpreter that ends as usual."""
    print(reason or "", end="", file=sys.stderr, flush=True)
    os._exit(1 if reason else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
