"""The README's numbers are the committed reference run's, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
REFERENCE = ROOT / "results/reference/overnight"


def cells(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_nothing_is_left_to_fill_in():
    assert "`<" not in README


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_result_tables_are_the_reference_runs():
    section = README.split("## Results\n")[1].split("\n## ")[0]
    rows = [cells(line) for line in section.splitlines() if line.startswith("|")]
    pages = [*REFERENCE.glob("tables/*.md"), REFERENCE / "claims.md"]
    kept = [cells(line) for page in pages for line in page.read_text().splitlines() if line.startswith("|")]
    assert len(rows) > 5
    for row in rows:
        if set(row[1]) - set("-:"):
            assert row in kept, row
