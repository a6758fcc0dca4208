"""Where the numbers of the page come from: every result file that it names, once, small enough to travel with it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from focus.provenance import RESULT_VERSION

LEFT_OUT = ("argv",)  # the job's settings once more, with paths of one machine


class Sources:
    """The result files below a folder; `number(path)` registers one for the page and gives its place there."""

    def __init__(self, root: Path):
        self.root = Path(root)
        self.numbers: dict[str, int] = {}
        self.shared: dict[str, int] = {}

    @cached_property
    def results(self) -> dict[str, dict]:
        """{path below the folder: result without its metrics}, for every result file, sorted."""
        found = {}
        for path in sorted(self.root.rglob("*.json")):
            name = path.relative_to(self.root).as_posix()
            try:
                result = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(result, dict) and result.get("result_version") == RESULT_VERSION and "provenance" in result:
                found[name] = {key: result.get(key) for key in ("experiment", "settings", "provenance")}
        return found

    def number(self, path: str) -> int | None:
        """The place of a result in the page's list, or None when the folder holds no such result."""
        if path not in self.results:
            return None
        return self.numbers.setdefault(path, len(self.numbers))

    def places(self, paths) -> list[int]:
        """The places of those of these results that exist, each once."""
        found = (self.number(path) for path in dict.fromkeys(paths))
        return [number for number in found if number is not None]

    def like(self, line: dict[str, str]) -> list[str]:
        """The results that a CSV line without a path can be from: same code and, where it names them, same settings."""
        wanted = {key: line[key] for key in ("model", "corpus", "method", "seed") if line.get(key)}
        return [
            path
            for path, result in self.results.items()
            if result["provenance"].get("code") == line.get("code")
            and all(str(result["settings"].get(key)) == value for key, value in wanted.items())
        ]

    def embedded(self) -> dict:
        """The registered results: an object that several share stands once in `shared`, {"$": place} where it was."""
        results = [self._small(path) for path in self.numbers]
        return {"results": results, "shared": [json.loads(text) for text in self.shared]}

    def summary(self) -> dict:
        """What all result files of the folder say together: machine, devices, dtypes, versions, seeds, times."""
        each = [(result["provenance"], result["settings"]) for result in self.results.values()]

        def values(key: str, where: int = 0) -> list[str]:
            found = (pair[where].get(key) for pair in each)
            return sorted({str(value) for value in found if value is not None and not isinstance(value, dict)})

        versions = {name: {} for provenance, _ in each for name in provenance.get("versions", {})}
        for name in versions:
            versions[name] = sorted({provenance["versions"].get(name, "?") for provenance, _ in each})
        return {
            "count": len(each),
            "processors": values("processor"),
            "devices": values("device"),
            "dtypes": values("dtype"),
            "codes": values("code"),
            "models": values("model", 1),
            "seeds": sorted(values("seed", 1), key=lambda seed: (len(seed), seed)),
            "versions": versions,
            "hours": sum(provenance.get("seconds") or 0 for provenance, _ in each) / 3600,
            "written": self._written(),
        }

    def _written(self) -> list[str]:
        """The first and last day of the results: as they record it, else as the file system has it."""
        recorded = [each["provenance"].get("finished") for each in self.results.values()]
        if not recorded or not all(recorded):
            times = [(self.root / path).stat().st_mtime for path in self.results]
            recorded = [datetime.fromtimestamp(time, UTC).isoformat() for time in times]
        days = sorted(time[:10] for time in recorded)
        return list(dict.fromkeys([days[0], days[-1]])) if days else []

    def _small(self, path: str) -> dict:
        result = self.results[path]
        provenance = {key: value for key, value in result["provenance"].items() if key not in LEFT_OUT}
        parts = {"settings": result["settings"] or {}, "provenance": provenance}
        small = {name: {key: self._share(value) for key, value in part.items()} for name, part in parts.items()}
        return {"path": path, "experiment": result["experiment"]} | small

    def _share(self, value):
        if not isinstance(value, dict | list) or not value:
            return value
        text = json.dumps(value, sort_keys=True)
        return {"$": self.shared.setdefault(text, len(self.shared))}
