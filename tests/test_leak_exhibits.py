"""The tables and the figure of the leak, from results with known answers."""

import json
import math

import pandas
import pytest

from focus.errors import UserError
from focus.paper import bits, bits_figure, leak

PROVENANCE = {"code": "0" * 64, "device": "cpu", "dtype": "float32", "versions": {}}


def written(path, experiment, settings, metrics):
    known = {"kind": "k", "source": "s", "revision": "r", "licence": "MIT", "note": "stand-in: a model"}
    provenance = PROVENANCE | {"revisions": {"model": known, "corpus": known}}
    value = {"result_version": 1, "experiment": experiment, "settings": settings, "metrics": metrics}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value | {"provenance": provenance}))
    return path


def measured(losses, *, causal, change=0.0, dominance=0.4):
    windows = [{"document": "d", "start": 10 * n, "tokens": 10, "loss_sum": loss} for n, loss in enumerate(losses)]
    part = {"max_abs": change, "mean_kl": change / 100, "positions": 15}
    changes = {mode: {"token": part, "rest": part} for mode in ("soft", "hard-k1")}
    groups = {name: {"mean": dominance, "layers": [dominance, dominance]} for name in ("austen", "essays")}
    return {"windows": windows, "causal": causal, "declared_causal": causal, "changes": changes, "dominance": groups}


@pytest.fixture
def leaking(tmp_path):
    """Sinkhorn gains 5 and 3 nats on two windows, prefix half of each, softmax loses; with another seed on request."""

    def make(gain=(5.0, 3.0), seed=0):
        base = [30.0, 40.0]
        balances = {
            "sinkhorn": measured([30.0 - gain[0], 40.0 - gain[1]], causal=False, change=0.25),
            "prefix": measured([30.0 - gain[0] / 2, 40.0 - gain[1] / 2], causal=True),
            "softmax": measured([31.0, 42.0], causal=True, dominance=0.9),
        }
        metrics = {"pretrained": measured(base, causal=True), "balances": balances, "noise": 1e-3, "context": 10}
        adapter = {"groups": 4, "gate": "printed", "balance": "sinkhorn"}
        phases = [{"trains": "centroids", "steps": 7, "learning_rate": 1e-3}]
        settings = {"model": "m", "corpus": "austen", "method": "focus-paper", "seed": seed}
        settings |= {"settings": {"adapter": adapter, "training": {"phases": phases}}}
        settings |= {"model_settings": {"window": 4}, "leak": {"calibration_windows": 8}}
        return written(tmp_path / f"seed{seed}.json", "leak", settings, metrics | {"window": 4})

    return make


def lines_of(path):
    return [" ".join(line.split()) for line in path.read_text().splitlines()]


def test_what_later_tokens_change_and_what_survives(leaking, tmp_path):
    leak.write([leaking()], tmp_path / "leak")
    lines = lines_of(tmp_path / "leak.md")
    assert "| sinkhorn | 0.25 | 0.0025 | 0.25 | 0.0025 | 0.25 | 0.0025 | 0.25 | 0.0025 | no | no |" in lines
    assert "| prefix | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | yes | yes |" in lines
    assert any(line.startswith("| prefix |") and line.endswith("| 50.0 ± 0.0 % |") for line in lines)
    assert "| softmax | 90.0 % | 90.0 % | 90.0 % |" in lines
    table = pandas.read_csv(tmp_path / "leak.csv")
    share = table[table.metric == "share"].set_index("balance")
    assert share.value["prefix"] == pytest.approx(0.5)
    assert share.value["softmax"] == pytest.approx(-3 / 8)
    assert share.error["softmax"] == pytest.approx(math.sqrt(2 * (0.875**2 + 0.875**2)) / 8)
    for suffix in ("html", "tex"):
        assert "no balance" in (tmp_path / f"leak.{suffix}").read_text()


@pytest.mark.parametrize("gain", [(-1.0, -2.0), (0.0, 0.0), (5.0, -4.0)])
def test_without_a_gain_there_is_no_share(leaking, tmp_path, gain):
    path = leaking(gain)
    found = leak.share(leak.load([path])[0][0], "prefix")
    assert found.value is None and found.error is None
    assert found.reason.startswith("no gain: under sinkhorn ")
    leak.write([path], tmp_path / "leak")
    assert any(line.endswith("| no gain |") for line in lines_of(tmp_path / "leak.md"))
    table = pandas.read_csv(tmp_path / "leak.csv")
    assert table[table.metric == "share"].value.isna().all()


def test_a_model_trained_as_a_whole_has_no_share_of_the_groups(leaking, tmp_path):
    path = leaking()
    result = json.loads(path.read_text())
    result["settings"]["settings"]["training"] = {"phases": [{"trains": "everything", "steps": 3}]}
    path.write_text(json.dumps(result))
    assert leak.share(result, "prefix").value is None
    leak.write([path], tmp_path / "leak")
    assert "not the groups' alone. So no share of a gain can be told." in (tmp_path / "leak.md").read_text()
    assert any(line.startswith("| prefix |") and line.endswith("| - |") for line in lines_of(tmp_path / "leak.md"))


def test_several_seeds_make_one_row(leaking, tmp_path):
    leak.write([leaking(), leaking((7.0, 5.0), 1)], tmp_path / "leak")
    rows = [line for line in lines_of(tmp_path / "leak.md") if line.startswith("| prefix |")]
    assert len(rows) == 3
    assert "50.0 % ± 0.0 % (2)" in rows[1]


def bits_result(folder, balance, length, loss, *, trains="everything", seed=0, error=1e-3):
    training = {"layers": 2, "width": 32, "heads": 2, "steps": 9, "batch_tokens": 64, "learning_rate": 0.01}
    adapter = {"groups": 4, "window": 1, "temperature": 0.1, "gate": "log_sigmoid", "steepness": 10.0, "sinks": 0}
    settings = {"balance": balance, "length": length, "trains": trains, "seed": seed}
    settings |= {"training": training | {"evaluation_tokens": 640, "adapter": adapter}}
    metrics = {"loss": loss, "error": error, "floor": math.log(2), "count_bound": 0.6, "tokens": 600}
    metrics |= {"sigmas_below_floor": (math.log(2) - loss) / error, "declared_causal": balance != "sinkhorn"}
    metrics |= {"base": {"loss": 0.75, "error": 0.001} if trains == "centroids" else None}
    return written(folder / f"{balance}-{length}-{trains}-{seed}.json", "bits", settings, metrics)


def test_bits_below_the_floor_are_told_from_those_at_it(tmp_path):
    paths = [bits_result(tmp_path, "sinkhorn", 16, 0.5), bits_result(tmp_path, "sinkhorn", 16, 0.52, seed=1)]
    paths += [bits_result(tmp_path, "softmax", 16, math.log(2) - 0.003)]
    paths += [bits_result(tmp_path, "sinkhorn", 16, 0.7, trains="centroids")]
    bits.write(paths, tmp_path / "bits")
    lines = lines_of(tmp_path / "bits.md")
    assert "| sinkhorn | 16 | 0.5100 ± 0.0007, seeds ± 0.0141 (2) | +0.1831 | +173.1 | 0.6000 | yes | no |" in lines
    assert "| softmax | 16 | 0.6901 ± 0.0010 | +0.0030 | +3.0 | 0.6000 | not shown | yes |" in lines
    assert "| sinkhorn | 16 | 0.7000 ± 0.0010 | -0.0069 | -6.9 | 0.6000 | 0.7500 | not shown | no |" in lines
    table = pandas.read_csv(tmp_path / "bits.csv")
    assert table.below_floor.tolist() == [True, True, False, False]
    assert table.base_loss.dropna().tolist() == [0.75]
    for name in ("one", "two"):
        bits_figure.write(paths, tmp_path / name)
    for suffix in ("pdf", "png"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_another_kind_of_result_is_refused(leaking, tmp_path):
    other = bits_result(tmp_path, "softmax", 16, 0.7)
    with pytest.raises(UserError, match="expected the result of focus leak measure, got one of bits"):
        leak.load([other])
    with pytest.raises(UserError, match="expected the result of focus bits train, got one of leak"):
        bits.load([leaking()])
