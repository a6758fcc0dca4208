"""What an unfinished run shows of itself."""

import json
import re
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
    for page in ("report.html", "report.md", "claims.md"):
        text = (tmp_path / page).read_text()
        assert re.search(r"The run is not finished: \d+ of \d+ rows lack a seed or a measurement", text)


def test_a_run_without_results_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"expected results of the scale .*, found none"):
        list(so_far.write(experiment(), tmp_path, CLAIMS))
    assert not list(tmp_path.iterdir())


def test_a_result_with_other_settings_is_no_row_of_this_scale(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    path = tmp_path / "perplexity/smollm2-135m-instruct/austen/focus/soft/seed0.json"
    result = json.loads(path.read_text())
    result["settings"]["settings"]["training"]["phases"][0]["steps"] += 1
    path.write_text(json.dumps(result))
    lines = list(so_far.write(settings, tmp_path, CLAIMS))
    assert "tables/headline: 3 of 4 rows begun, 3 with every seed" in lines
    assert (
        f"no {path.relative_to(tmp_path)} with this scale's settings" in (tmp_path / "tables/headline.md").read_text()
    )


def test_dominance_over_steps_is_drawn_for_the_methods_whose_logs_are_there(tmp_path):
    settings = experiment()
    write_results(tmp_path, settings)
    (line,) = (line for line in so_far.write(settings, tmp_path, CLAIMS) if line.startswith("figures/dominance"))
    assert line == "figures/dominance: no results yet"
    figure = settings.figures["dominance"]
    for row in figure.rows[:2]:
        log = tmp_path / "training" / figure.models[0] / figure.corpus / row.method / "seed0/log.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        probe = {"layers": [{"dominance": 0.2, "stability": 1.0}], "ends_phase": True}
        log.write_text(json.dumps({"step": 1, "phase": "everything", "probe": probe}) + "\n")
    (line,) = (line for line in so_far.write(settings, tmp_path, CLAIMS) if line.startswith("figures/dominance"))
    assert line == "figures/dominance: 2 curves from the logs of training"
    assert (tmp_path / "figures/dominance.png").exists()
