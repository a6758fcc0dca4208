import math

import numpy
import pytest
from paper_results import scored
from scipy.stats import binomtest

from focus.errors import UserError
from focus.paper import statistics
from focus.paper.statistics import Flips, Ratio


def test_perplexity_and_its_error_on_equal_windows():
    losses = [2.0, 2.5, 3.5]
    windows = [{"tokens": 10, "loss_sum": 10 * loss} for loss in losses]
    value, error = statistics.perplexity(windows)
    assert value == pytest.approx(math.exp(numpy.mean(losses)))
    assert error == pytest.approx(value * numpy.std(losses, ddof=1) / math.sqrt(3))


def test_windows_count_by_their_tokens():
    windows = [{"tokens": 30, "loss_sum": 30.0}, {"tokens": 10, "loss_sum": 50.0}]
    assert statistics.perplexity(windows)[0] == pytest.approx(math.exp(80 / 40))


def test_a_constant_shift_is_a_ratio_without_error():
    ratio = statistics.compare(scored(0.1, uneven=0.0), scored(0.0))
    assert ratio.value == pytest.approx(math.exp(0.1))
    assert ratio.error == pytest.approx(0.0, abs=1e-12)


def test_pairing_removes_what_windows_share():
    """Against the error of the differences alone; unpaired it would be ten times larger."""
    ours, base = scored(0.02, windows=24), scored(0.0, windows=24)
    differences = [(a["loss_sum"] - b["loss_sum"]) / a["tokens"] for a, b in zip(ours, base, strict=True)]
    ratio = statistics.compare(ours, base)
    assert ratio.log_error == pytest.approx(numpy.std(differences, ddof=1) / math.sqrt(24))
    value, error = statistics.perplexity(ours)
    assert ratio.log_error < error / value / 10


def test_error_matches_the_bootstrap():
    generator = numpy.random.default_rng(0)
    sizes = generator.integers(50, 150, 400)
    base = [{"document": "b", "start": i, "tokens": int(n), "loss_sum": 3.0 * n} for i, n in enumerate(sizes)]
    ours = [
        window | {"loss_sum": window["loss_sum"] + generator.normal(0.1, 0.2) * window["tokens"]} for window in base
    ]
    sums = numpy.array([a["loss_sum"] - b["loss_sum"] for a, b in zip(ours, base, strict=True)])
    draws = generator.integers(0, 400, (2000, 400))
    bootstrap = numpy.std(sums[draws].sum(1) / sizes[draws].sum(1))
    assert statistics.compare(ours, base).log_error == pytest.approx(bootstrap, rel=0.1)


@pytest.mark.parametrize("change", [{"document": "other"}, {"start": 7}, {"tokens": 99}])
def test_other_windows_are_refused(change):
    other = scored()
    other[3] = other[3] | change
    with pytest.raises(UserError, match="same windows"):
        statistics.compare(scored(), other)


def test_seeds_add_their_spread():
    combined = statistics.combine([Ratio(0.1, 0.03), Ratio(0.3, 0.03)])
    assert combined.log == pytest.approx(0.2)
    assert combined.log_error == pytest.approx(math.sqrt(0.03**2 + numpy.var([0.1, 0.3], ddof=1) / 2))
    assert statistics.combine([Ratio(0.1, 0.03)]) == Ratio(0.1, pytest.approx(0.03))
    assert statistics.spread([1.0]) is None
    assert statistics.spread([1.0, 3.0]) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (3, 9), (5, 5), (0, 8), (11, 2)])
def test_mcnemar_equals_scipys_binomial(gained, lost):
    expected = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert Flips(gained, lost, 40).p_value == pytest.approx(expected)


def test_flips_and_their_error():
    ours, base = [1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 1, 0]
    flips = statistics.flips(ours, base)
    assert (flips.gained, flips.lost, flips.items) == (1, 2, 6)
    differences = numpy.array(ours) - numpy.array(base)
    assert flips.change == pytest.approx(differences.mean())
    assert flips.error == pytest.approx(differences.std() / math.sqrt(6))
    with pytest.raises(UserError, match="same items"):
        statistics.flips(ours, base[:-1])


def test_accuracy_error_is_lm_evals():
    share, error = statistics.accuracy([1, 0, 1, 1])
    assert share == 0.75
    assert error == pytest.approx(numpy.std([1, 0, 1, 1], ddof=1) / 2)
