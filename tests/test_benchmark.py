"""The attention benchmark on tiny lengths: its counts against the dense mask, and a whole run."""

import pytest
import torch

from focus.attention import focus_attention
from focus.attention.reference import allowed_pairs
from focus.benchmark import run
from focus.benchmark_checks import cosine_to_reference, operation_limit, pairs_kept
from focus.benchmark_timing import Place
from focus.config import AttentionBenchmark
from focus.errors import UserError
from focus.provenance import read_result


@pytest.mark.parametrize("length", [100, 256, 700])
def test_pairs_kept_counts_the_mask(length):
    torch.manual_seed(0)
    for groups in (torch.randint(0, 4, (1, length)), torch.rand(1, length, 4) > 0.6):
        kept, far = pairs_kept(groups, 20)
        mask = allowed_pairs(length, groups, window=20)[0]
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
        assert kept == pytest.approx(float(mask.sum() / (distance >= 0).sum()))
        assert far == pytest.approx(float(mask[distance > 20].sum() / (distance > 20).sum()))


@pytest.mark.parametrize("length", [5, 700])
def test_the_cosine_sees_a_wrong_output(length):
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, 2, length, 8).unbind()
    groups = torch.randint(0, 4, (1, length))
    exact = focus_attention(*inputs, groups, window=20)
    assert cosine_to_reference(*inputs, groups, exact, 20) == pytest.approx(1.0, abs=1e-6)
    wrong = exact.clone()
    wrong[:, 1, -1] *= -1
    assert cosine_to_reference(*inputs, groups, wrong, 20) == pytest.approx(-1.0, abs=1e-6)


def test_inputs_are_timed_where_and_in_what_is_named(tmp_path):
    job = {"lengths": [256], "groups": [2], "heads": 1, "head_dim": 8, "window": 16, "seconds": 0.01}
    run(AttentionBenchmark(**job, device="cpu", dtype="bfloat16"), tmp_path / "attention.json")
    result = read_result(tmp_path / "attention.json")
    assert (result["provenance"]["device"], result["provenance"]["dtype"]) == ("cpu", "bfloat16")
    assert result["metrics"]["forward"][0]["cosine"] == pytest.approx(1.0, abs=1e-3)
    there = torch.cuda.is_available()
    assert Place.named("auto", "auto").dtype == (torch.bfloat16 if there else torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line():
    with pytest.raises(UserError, match="expected a GPU for cuda, found none"):
        Place.named("cuda", "auto")


def test_operation_limit_is_the_appendix_formula():
    assert operation_limit([1 / 8] * 8, 128, 1024) == pytest.approx(1 / (1 / 8 + 1 / 4))
    assert operation_limit([0.4, 0.3, 0.2, 0.1], 0, 1024) == pytest.approx(1 / 0.3)
    assert operation_limit([1.0], 128, 1024) == 1.0


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_run_reports_every_table(tmp_path, device):
    job = AttentionBenchmark(
        device=device,
        lengths=[512, 1024],
        backward_lengths=[512],
        unbalanced_lengths=[512],
        membership_lengths=[512],
        memory_lengths=[1024],
        decode_lengths=[512],
        decode_steps=3,
        model={"layers": 2, "heads": 2, "key_heads": 1, "head_dim": 8, "vocabulary": 11},
        model_lengths=[300],
        model_steps=3,
        training_lengths=[512],
        heads=1,
        head_dim=8,
        window=16,
        seconds=0.01,
    )
    run(job, tmp_path / "attention.json")
    result = read_result(tmp_path / "attention.json")
    metrics = result["metrics"]
    assert (result["provenance"]["backend"] == "cpu-flash") == (device == "cpu")
    assert result["provenance"]["device"] == device
    tolerance = 1e-6 if device == "cpu" else 1e-3
    assert [(r["length"], r["groups"]) for r in metrics["forward"]] == [(512, 4), (512, 8), (1024, 4), (1024, 8)]
    for row in metrics["forward"]:
        assert row["speedup"] == pytest.approx(row["full_ms"] / row["focus_ms"])
        assert row["share_of_limit"] == pytest.approx(row["speedup"] / row["limit"])
        assert row["cosine"] == pytest.approx(1.0, abs=tolerance)
        assert set(row["parts"]) == {"sort", "groups", "band", "merge"}
        assert all(value > 0 for value in row["parts"].values())
    assert metrics["unbalanced"][0]["bound"] == pytest.approx(1 / 0.3)
    assert [(r["length"], r["groups"]) for r in metrics["decode"]] == [(512, 4), (512, 8)]
    assert [(r["length"], r["groups"]) for r in metrics["decode_model"]] == [(300, 4), (300, 8)]
    for row in metrics["decode_model"]:
        assert row["speedup"] == pytest.approx(row["full_ms"] / row["focus_ms"])
        assert 0 < row["full_cache_ms"] < row["full_ms"]
        assert row["focus_first_ms"] > 0
    assert all(row["soft_ms"] > 0 and row["straight_through_ms"] > 0 for row in metrics["training"])
    kept = [row["pairs_kept"] for row in metrics["membership"]]
    assert kept == sorted(kept)
    assert kept[2:] == [1.0, 1.0]
    assert all(row["backend"].startswith("full/") for row in metrics["membership"][2:])
    assert [row["paper"] for row in metrics["membership"]] == pytest.approx([4, 2, 4 / 3, 1])
    assert {row["groups"] for row in metrics["memory"]} == {None, 4, 8}
