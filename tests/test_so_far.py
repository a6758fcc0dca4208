"""What an unfinished run shows of itself."""

from pathlib import Path

import pytest
from paper_results import experiment, write_results

from focus.errors import UserError
from focus.paper import so_far

CLAIMS = Path("config/claims.yaml")


def test_an_unfinished_run_shows_what_it_has(tmp_path):
    settings = experiment(seeds=[0, 1])
    write_results(tmp_path, settings, {f"focus/soft/{seed}": 0.1 for seed in (0, 1)})
    (tmp_path / "perplexity/smollm2-135m-instruct/austen/focus/soft/seed1.json").unlink()
    lines = list(so_far.write(settings, tmp_path, CLAIMS))
    assert "tables/headline: 4 of 4 rows begun, 3 with every seed" in lines
    assert "Focus, soft: seed 1 of 2 not run yet." in (tmp_path / "tables/headline.md").read_text()
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "claims.md").exists()


def test_a_run_without_results_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"expected results of the scale .*, found none"):
        list(so_far.write(experiment(), tmp_path, CLAIMS))
    assert not list(tmp_path.iterdir())
