"""The whole reproduction on one page, from result files alone: HTML that needs no network, Markdown and LaTeX.

What the page says is computed here from claims.json, the tables, the figures and the results they name; what is missing
is left out or listed as not run. How it looks is in templates/.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
from base64 import b64encode
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from focus.config import Experiment
from focus.errors import UserError
from focus.paper import claims_page, layout, report_claims, report_exhibits
from focus.paper.report_exhibits import Figure, Table
from focus.paper.report_sources import Sources
from focus.provenance import write_atomically

PAPERS_FIGURES = ("quality", "tradeoff", "dominance", "speed", "groups")
"""What figures of the paper's own content show; those of other kinds are ours."""
SHORTLIST = 7
"""Claims of each kind on top of the page before the rest is folded away."""
LARGEST = 800_000
"""Bytes of the page that the pictures may fill up to: the repository keeps no file over 1 MiB."""
TEMPLATES = {".html": "page.html.j2", ".md": "page.md.j2", ".tex": "page.tex.j2"}


def write(
    results: Path,
    output_prefix: Path,
    *,
    experiment: Experiment | None = None,
    captions: Path | None = None,
    config_files: tuple[str, ...] = (),
) -> None:
    """Write `output_prefix`.html, .md and .tex from what the folder `results` of one scale holds.

    `experiment` gives the figures their titles, `captions` is the folder of their texts, `config_files` are what the
    commands name after --configfile. Raises UserError when the folder has neither claims, tables nor figures.
    """
    folder = Path(output_prefix).parent
    if not folder.is_dir():
        raise UserError(f"{folder}: expected a folder to write the page to, found none")
    shown = content(Path(results), experiment, captions, config_files)
    figures = shown["figures"] + shown["our_figures"]
    report_exhibits.draw(figures, LARGEST - len(_rendered(TEMPLATES[".html"], shown).encode()))
    for suffix, template in TEMPLATES.items():
        write_atomically(Path(f"{output_prefix}{suffix}"), _rendered(template, shown))


def content(
    root: Path, experiment: Experiment | None, captions: Path | None, config_files: tuple[str, ...] = ()
) -> dict:
    """All that the templates show."""
    sources = Sources(root)
    verdicts = _claims(root)
    tables = report_exhibits.tables(root, sources)
    figures = _figures(root, tables, experiment, captions)
    if not (verdicts["claims"] or tables or figures):
        raise UserError(f"{root}: expected claims.json, tables or figures of a run, found none")
    claims = report_claims.views(verdicts["claims"], sources, {table.name: table.results for table in tables})
    papers = [claim for claim in claims if claim["origin"] == "paper"]
    measured_first = sorted(papers, key=lambda claim: not any(case["results"] for case in claim["cases"]))
    stand_ins = _stand_ins(root)
    scale = verdicts["scale"] or (experiment.scale if experiment else root.resolve().name)
    return {
        "scale": scale,
        "claims": papers,
        "questions": report_claims.answers(verdicts["questions"], claims),
        "controls": [claim for claim in claims if claim["origin"] != "paper"],
        "counts": report_claims.counts(papers),
        "control_counts": report_claims.counts([claim for claim in claims if claim["origin"] != "paper"]),
        "resting": " ".join(filter(None, [_resting(papers), verdicts["state"]])),
        "signs": report_claims.VERDICTS,
        "meanings": report_claims.MEANINGS,
        "contradicted": [claim for claim in measured_first if claim["verdict"] == "contradicted"],
        "holding": [claim for claim in measured_first if claim["verdict"] in ("reproduced", "within tolerance")],
        "shortlist": SHORTLIST,
        "places": list(dict.fromkeys(place for claim in claims for place in claim["places"])),
        "tables": [table for table in tables if not table.ours],
        "our_tables": [table for table in tables if table.ours],
        "figures": [figure for figure in figures if not figure.ours],
        "our_figures": [figure for figure in figures if figure.ours],
        "groups_page": "figures/groups.html" if (root / "figures/groups.html").exists() else "",
        "not_run": _not_run(claims, tables),
        "stand_ins": stand_ins,
        "notes": {each["name"]: each["note"] for each in stand_ins if each["kind"] == "model"},
        "summary": sources.summary(),
        "command": lambda targets: command(targets, scale, config_files),
        "provenance": _packed(sources.embedded()),
    }


def command(targets: list[str], scale: str, config_files: tuple[str, ...]) -> str:
    """What a shell runs to make these targets; result files are given by their path below the scale's folder."""
    named = [f"results/{scale}/{name}" if "/" in name else name for name in targets]
    files = ["--configfile", *config_files] if config_files else []
    return shlex.join(["snakemake", "--cores", "all", *named, *files])


def _resting(papers: list[dict]) -> str:
    return claims_page.resting(papers) if any(claim["same_as"] for claim in papers) else ""


def _claims(root: Path) -> dict:
    """The verdicts of the run, or none yet. Raises UserError when the file is no such file."""
    path = root / "claims.json"
    if not path.exists():
        return {"scale": "", "state": "", "claims": [], "questions": []}
    try:
        found = json.loads(path.read_text())
        claims = [claim for claim in found["claims"] if claim["id"]]
        about = {"scale": found["scale"], "state": found.get("state", ""), "questions": found.get("questions", [])}
        return about | {"claims": claims}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: expected the verdicts of focus claims, got {type(error).__name__}: {error}") from None


def _figures(root: Path, tables: list[Table], experiment: Experiment | None, captions: Path | None) -> list[Figure]:
    paths = sorted(root.glob("figures/*.png"), key=lambda path: report_exhibits.natural(path.stem))
    ours = {table.name: table.ours for table in tables}
    titles = {table.name: table.title for table in tables}
    found = []
    for path in paths:
        exhibit = experiment.figures.get(path.stem) if experiment else None
        shows = exhibit.shows if exhibit else path.stem
        title = exhibit.title if exhibit else titles.get(path.stem, path.stem.replace("_", " ").capitalize())
        about = _caption(path.stem, experiment, captions)
        own = ours.get(path.stem, shows not in PAPERS_FIGURES and not path.stem.startswith("figure"))
        found.append(Figure(path, path.stem, title, about, own))
    return found


def _caption(name: str, experiment: Experiment | None, captions: Path | None) -> str:
    """The text that Snakemake's report gives the figure too: of its own name, else that of all figures."""
    if captions is None or experiment is None:
        return ""
    path = Path(captions) / (f"{name}.rst" if (Path(captions) / f"{name}.rst").exists() else "figure.rst")
    if not path.exists() or (path.stem == "figure" and name not in experiment.figures):
        return ""
    known = {"config": experiment.model_dump(), "wildcards": {"figure": name}}
    return " ".join(Environment(autoescape=False).from_string(path.read_text()).render(snakemake=known).split())


def _not_run(claims: list[dict], tables: list[Table]) -> list[dict]:
    """Why something was not run, and what: claims, and rows of tables."""
    found: dict[str, dict] = {}

    def add(reason: str, kind: str, name: str) -> None:
        names = found.setdefault(reason, {"claims": [], "rows": []})[kind]
        if name not in names:
            names.append(name)

    for claim in claims:
        if claim["verdict"] == "not run":
            for reason in claim["why_not"] or ["no reason recorded"]:
                add(reason, "claims", claim["id"])
    for table in tables:
        for row, reason in table.not_run:
            add(reason, "rows", row)
        for grid in table.grids:
            for cells in grid.rows:
                if not table.not_run and any(cell.text == "not run" for cell in cells):
                    add(" ".join(grid.lines) or "not run", "rows", f"{cells[0].text} ({table.name})")
    return [{"reason": reason} | what for reason, what in found.items()]


def _stand_ins(root: Path) -> list[dict]:
    """The note of every manifest of a model, text or task: what it is and what it stands in for."""
    found = []
    for kind, label in (("models", "model"), ("corpora", "text"), ("benchmarks", "task"), ("taggers", "tagger")):
        for path in sorted(root.glob(f"{kind}/*.json")):
            manifest = json.loads(path.read_text())
            if isinstance(manifest, dict) and manifest.get("note"):
                keys = ("name", "note", "licence", "source")
                found.append({"kind": label} | {key: str(manifest.get(key) or "") for key in keys})
    return found


def _rendered(template: str, shown: dict) -> str:
    """A filled template. What it passes through the filter `folded` becomes a place that the browser fills.

    These parts travel packed at its end, a tenth of their size: rules and tables, which are closed at first.
    """
    environment, parts = _environment(), []

    def folded(text: str) -> Markup:
        parts.append(str(text))
        return Markup(f'<div data-folded="{len(parts) - 1}"></div>\n')

    environment.filters["folded"] = folded
    return environment.get_template(template).render(shown, all_folded=lambda: _packed(parts))


def _packed(data: dict | list) -> str:
    """JSON, packed with gzip for the browser to unpack: base64 holds nothing that could end or turn into markup."""
    text = json.dumps(data, separators=(",", ":"), sort_keys=True)
    return b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("focus.paper"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"prose": _prose, "slug": _slug, "cell": _cell, "tex": layout.escape}
    return environment


def _prose(text: str) -> Markup:
    """Escaped text; backquoted names become code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _slug(text: str) -> str:
    """A name as part of an id or a class."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def _cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
