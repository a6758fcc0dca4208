"""The figure of dominance is drawn from training logs alone: the right curves, phases and panels, the same bytes."""

import json

import matplotlib.pyplot as plt
import pytest
from paper_results import experiment as default_experiment
from pydantic import ValidationError

from focus.config import Experiment
from focus.errors import UserError
from focus.paper import dominance

TRAINING = {
    "phases": [
        {"trains": "centroids", "steps": 4, "learning_rate": 0.01},
        {"trains": "everything", "steps": 6, "learning_rate": 0.01},
    ],
    "probe_every": 2,
}
ADAPTERS = {
    "balanced": {"balance": "entropy"},
    "plain": {"balance": "softmax", "groups": 4},
    "no-drift": {"balance": "entropy", "frozen": ["centroids"]},
    "detached": {"balance": "entropy", "detach_inputs": True},
}


def experiment(rows=tuple(ADAPTERS), **training):
    settings = default_experiment().model_dump()
    settings |= {"seeds": [0, 1], "tables": {}, "models": ["gpt2-mini"]}
    for name, adapter in ADAPTERS.items():
        label = name.capitalize()
        method = {"kind": "focus", "label": label, "adapter": adapter, "training": TRAINING | training}
        settings["methods"][name] = method
    figure = {"title": "Dominance", "corpus": "austen", "shows": "dominance", "rows": [{"method": m} for m in rows]}
    settings["figures"] = {"dominance": figure}
    return Experiment.model_validate(settings)


def write_logs(root, rows=tuple(ADAPTERS)):
    """Two layers that are 0.1 apart, around 0.1 more a step and 0.02 more for the second seed."""
    for number, method in enumerate(rows):
        for seed in (0, 1):
            folder = root / f"training/gpt2-mini/austen/{method}/seed{seed}"
            folder.mkdir(parents=True)
            records = []
            for step in range(1, 11):
                record = {"step": step, "phase": "centroids" if step <= 4 else "everything", "loss": 3.0}
                if step % 2 == 0:
                    middle = 0.1 * step / 2 + 0.01 * number + 0.02 * seed
                    layers = [{"dominance": middle + change, "stability": 1.0} for change in (-0.05, 0.05)]
                    record["probe"] = {"steps": 2, "ends_phase": step in (4, 10), "layers": layers}
                records.append(record)
            (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_curves_are_means_over_layers_and_seeds(tmp_path):
    settings = experiment()
    write_logs(tmp_path)
    found = dominance.lines(settings.figures["dominance"], settings, tmp_path)
    assert [line.label for line in found] == ["Balanced", "Plain", "No-drift", "Detached"]
    assert [line.isolates for line in found] == [False, False, True, True]
    expected = [(2 * n, 0.1 * n + 0.02, 0.1 * n + 0.01, 0.1 * n + 0.03) for n in range(1, 6)]
    for got, want in zip(found[1].curve, expected, strict=True):
        assert got == pytest.approx(want)
    assert found[0].phases == [(4, "everything")]


def test_closed_paths_have_a_panel_beside_the_same_balance(tmp_path, monkeypatch):
    settings = experiment()
    write_logs(tmp_path)
    drawn = []
    monkeypatch.setattr(dominance, "save", lambda canvas, prefix: drawn.append(canvas))
    dominance.write("dominance", settings.figures["dominance"], settings, tmp_path, tmp_path / "out")
    ways, paths = drawn[0].axes
    assert "ways to keep groups even" in ways.get_title() and "paths closed" in paths.get_title()
    curves = [[line for line in axes.lines if len(line.get_xdata()) == 5] for axes in (ways, paths)]
    assert [len(each) for each in curves] == [2, 3]
    assert list(curves[1][0].get_ydata()) == list(curves[0][0].get_ydata())
    flat = {line.get_ydata()[0] for line in ways.lines if list(line.get_xdata()) == [0, 1]}
    assert flat == {1 / 8, 1 / 4, 0.9}
    assert [text.get_text().strip() for text in ways.texts] == ["everything"]
    plt.close(drawn[0])


def test_files_are_whole_and_the_same_each_time(tmp_path):
    settings = experiment()
    write_logs(tmp_path)
    for name in ("first", "second"):
        dominance.write("dominance", settings.figures["dominance"], settings, tmp_path, tmp_path / name)
    for suffix, magic in (("pdf", b"%PDF"), ("png", b"\x89PNG")):
        first = (tmp_path / f"first.{suffix}").read_bytes()
        assert first.startswith(magic)
        assert first == (tmp_path / f"second.{suffix}").read_bytes()
    assert not plt.get_fignums()


def test_what_is_missing_is_named(tmp_path):
    settings = experiment()
    exhibit = settings.figures["dominance"]
    with pytest.raises(UserError, match=r"seed0/log.jsonl: expected the training log of Balanced, found none"):
        dominance.write("dominance", exhibit, settings, tmp_path, tmp_path / "out")
    write_logs(tmp_path)
    log = tmp_path / "training/gpt2-mini/austen/plain/seed1/log.jsonl"
    log.write_text(json.dumps({"step": 1, "loss": 3.0}) + "\n")
    with pytest.raises(UserError, match=r"plain/seed1/log.jsonl: expected probes of Plain, found none"):
        dominance.write("dominance", exhibit, settings, tmp_path, tmp_path / "out")
    elsewhere = exhibit.model_copy(update={"models": ["smollm2-135m-instruct"]})
    with pytest.raises(UserError, match=r"figures.dominance.models: expected one that this run covers"):
        dominance.write("dominance", elsewhere, settings, tmp_path, tmp_path / "out")


def test_only_figures_of_probed_methods_show_dominance():
    for rows, training in ((["pretrained"], {}), (["plain"], {"probe_every": 0})):
        with pytest.raises(ValidationError, match=r"figures.dominance.rows.0.method: expected one of kind focus with"):
            experiment(rows, **training)
    settings = experiment().model_dump()
    settings["tables"] = {"table8": settings["figures"]["dominance"]}
    with pytest.raises(ValidationError, match=r"tables\.table8\.shows: belongs to figures and only there"):
        Experiment.model_validate(settings)
