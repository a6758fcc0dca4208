"""What the repository keeps of a run: tables, figures, claims, manifests and results, without weights.

Of logs only those of trainings with probes, from which the figure of dominance is drawn.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from focus.errors import UserError

KEPT = (
    "claims.*",
    "report.*",
    "tables/*",
    "figures/*",
    "models/*.json",
    "corpora/*.json",
    "benchmarks/*.json",
    "training/**/result.json",
    "perplexity/**/*.json",
    "gates/**/*.json",
    "downstream/**/*.json",
    "generation/**/*.json",
    "long_inputs/**/*.json",
    "recall/**/*.json",
    "speed/*.json",
    "taggers/*.json",
    "groups/**/*.json",
    "leak/**/*.json",
    "bits/**/*.json",
)
LARGEST = 1 << 20


def keep(results: Path, reference: Path) -> list[Path]:
    """Replace the folder `reference` by the small files of `results`; return them, relative to it.

    Raises UserError, before anything is replaced, when there is nothing to keep or a file is over 1 MiB.
    """
    files = {path for pattern in KEPT for path in Path(results).glob(pattern) if path.is_file()}
    files = sorted(files | {path for path in Path(results).glob("training/**/log.jsonl") if _probed(path)})
    if not files:
        raise UserError(f"{results}: expected the results of a run, found none")
    for path in files:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path}: expected at most {LARGEST} bytes to keep, got {path.stat().st_size}")
    shutil.rmtree(reference, ignore_errors=True)
    kept = [path.relative_to(results) for path in files]
    for path in kept:
        target = Path(reference) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(results) / path, target)
    return kept


def _probed(log: Path) -> bool:
    """Whether a training's log holds looks at its groups."""
    return '"probe":' in log.read_text()
