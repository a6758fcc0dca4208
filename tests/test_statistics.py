import math
from functools import cache
from itertools import product
from statistics import fmean, stdev

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_results import scored
from scipy.stats import binom, binomtest

from focus.errors import UserError
from focus.paper import statistics
from focus.paper.statistics import Flips, Ratio


def test_perplexity_and_its_error_on_equal_windows():
    losses = [2.0, 2.5, 3.5]
    windows = [{"document": "b", "tokens": 10, "loss_sum": 10 * loss} for loss in losses]
    value, error = statistics.perplexity(windows)
    assert value == pytest.approx(math.exp(numpy.mean(losses)))
    assert error == pytest.approx(value * numpy.std(losses, ddof=1) / math.sqrt(3))


def test_windows_count_by_their_tokens():
    windows = [{"document": "b", "tokens": 30, "loss_sum": 30.0}, {"document": "b", "tokens": 10, "loss_sum": 50.0}]
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
    assert (combined.spread, combined.seeds) == (pytest.approx(stdev([math.exp(0.1), math.exp(0.3)])), 2)
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


@pytest.mark.parametrize("flipped", range(9))
def test_the_p_value_counts_the_signs_that_are_as_uneven(flipped):
    totals = [abs(sum(signs)) for signs in product((-1, 1), repeat=flipped)]
    for gained in range(flipped + 1):
        uneven = abs(2 * gained - flipped)
        share = sum(total >= uneven for total in totals) / len(totals)
        assert Flips(gained, flipped - gained, 20).p_value == pytest.approx(share)


def score_limit(gained, lost, items):
    """Upper limit of Tango's interval, with the constrained likelihood maximised on a grid."""
    differences = numpy.linspace(-1, 1, 401)[:, None]
    losing = numpy.linspace(0, 1, 2001)[None]
    shares = [losing + differences, losing, 1 - 2 * losing - differences]
    likelihood = numpy.zeros((401, 2001))
    for count, share in zip((gained, lost, items - gained - lost), shares, strict=True):
        likelihood += numpy.where(share < -1e-9, -1e9, count * numpy.log(numpy.maximum(share, 1e-300)))
    best = losing[0, likelihood.argmax(axis=1)]
    differences = differences[:, 0]
    variance = items * (2 * best + differences - differences**2)
    accepted = (gained - lost - items * differences) ** 2 <= 1.959964**2 * variance + 1e-9
    return differences[accepted].max()


def conditional_limit(gained, lost, items):
    """Upper limit from the exact chance of as few gains, by brute force over chances."""
    chances = numpy.linspace(0, 1, 2001)
    tail = sum(
        math.comb(gained + lost, count) * chances**count * (1 - chances) ** (gained + lost - count)
        for count in range(gained + 1)
    )
    return (2 * chances[tail >= 0.025].max() - 1) * (gained + lost) / items


@pytest.mark.parametrize("items", [4, 9])
def test_intervals_are_those_of_brute_force(items):
    for gained, lost in product(range(items + 1), repeat=2):
        if gained + lost <= items:
            expected = max(score_limit(gained, lost, items), conditional_limit(gained, lost, items))
            assert Flips(gained, lost, items).high == pytest.approx(expected, abs=0.006)
            assert Flips(lost, gained, items).low == pytest.approx(-expected, abs=0.006)


@given(st.integers(1, 3000), st.data())
def test_intervals_hold_the_change_and_leave_out_zero_only_where_the_test_does(items, data):
    gained = data.draw(st.integers(0, min(items, 40)))
    lost = data.draw(st.integers(0, min(items - gained, 40)))
    flips = Flips(gained, lost, items)
    assert -1 <= flips.low <= flips.change <= flips.high <= 1
    if flips.low > 0 or flips.high < 0:
        assert flips.p_value < 0.05


def test_no_flip_at_all_still_leaves_a_width():
    """About 4 in n, as the rule of three has it for two sides."""
    flips = Flips(0, 0, 100)
    assert flips.high == pytest.approx(1.959964**2 / (100 + 1.959964**2), rel=1e-5)
    assert flips.low == -flips.high
    assert Flips(0, 0, 1000).high < flips.high / 9


@cache
def interval(gained, lost, items):
    flips = Flips(gained, lost, items)
    return flips.low, flips.high


@pytest.mark.parametrize("flipping", [0.03, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("gaining", [0.0, 0.2, 0.5])
def test_every_outcome_weighed_intervals_hold_the_truth_95_times_in_100(flipping, gaining):
    truth, held = flipping * (2 * gaining - 1), 0.0
    for flipped in range(31):
        for gained in range(flipped + 1):
            low, high = interval(gained, flipped - gained, 30)
            if low <= truth <= high:
                held += binom.pmf(flipped, 30, flipping) * binom.pmf(gained, flipped, gaining)
    assert held >= 0.95


def test_drawn_intervals_hold_the_truth_and_are_no_wider_than_need_be():
    draws = numpy.random.default_rng(0).multinomial(200, [0.08, 0.05, 0.87], 1500)
    held = fmean(low <= 0.03 <= high for low, high in (interval(int(a), int(b), 200) for a, b, _ in draws))
    assert 0.94 <= held <= 0.985


def test_one_seed_changes_by_its_own_interval():
    flips = Flips(3, 9, 200)
    change = statistics.mean_change([flips])
    assert change == pytest.approx((flips.change, flips.low, flips.high, 3, 9, flips.p_value))


def test_seeds_widen_the_interval_of_a_change():
    seeds = [Flips(6, 2, 100), Flips(4, 4, 100), Flips(5, 3, 100)]
    change = statistics.mean_change(seeds)
    between = 4.302653 * numpy.std([0.04, 0.0, 0.02], ddof=1) / math.sqrt(3)
    within = math.sqrt(numpy.mean([(each.high - each.change) ** 2 for each in seeds]))
    assert change.high - change.value == pytest.approx(math.hypot(within, between))
    assert change.value == pytest.approx(0.02)
    assert (change.gained, change.lost) == (5, 3)
    assert change.p_value == 1.0
    surer = statistics.mean_change([Flips(20, 2, 100), Flips(18, 3, 100)])
    assert surer.p_value == pytest.approx(Flips(20, 2, 100).p_value + Flips(18, 3, 100).p_value)


def test_drawn_changes_over_seeds_hold_the_truth():
    """Seeds that differ in truth, on the same items, half of which flip or not with all seeds alike."""
    generator, held = numpy.random.default_rng(1), []
    for _ in range(150):
        shared = generator.random(150)
        flips = []
        for tilt in generator.normal(0, 0.015, 3):
            item = numpy.where(numpy.arange(150) < 75, shared, generator.random(150))
            gained, lost = int((item < 0.06 + tilt).sum()), int((item > 0.94 + tilt).sum())
            flips.append(Flips(gained, lost, 150))
        change = statistics.mean_change(flips)
        held.append(change.low <= 0 <= change.high)
    assert fmean(held) >= 0.95


def test_errors_are_over_documents_where_there_are_enough():
    def windows(documents, of):
        return [
            {"document": f"d{d}", "start": w, "tokens": 10, "loss_sum": 10 * of(d, w)}
            for d in range(documents)
            for w in range(3)
        ]

    def base(document, window):
        return 3.0

    def ours(document, window):
        return 3.0 + 0.1 * (document % 2) + 0.01 * window

    for documents, unit in ((4, "windows"), (5, "documents")):
        pair = windows(documents, ours), windows(documents, base)
        assert statistics.units(pair[0]) == unit
        differences = numpy.array([[ours(d, w) - 3.0 for w in range(3)] for d in range(documents)])
        parts = differences.mean(axis=1) if unit == "documents" else differences.ravel()
        error = numpy.std(parts, ddof=1) / math.sqrt(len(parts))
        assert statistics.compare(*pair).log_error == pytest.approx(error)
        assert statistics.compare(*pair).log == pytest.approx(differences.mean())
        value, value_error = statistics.perplexity(pair[0])
        assert value_error == pytest.approx(value * error)


def test_uneven_documents_count_by_their_tokens():
    generator = numpy.random.default_rng(0)
    sizes = [1, 2, 3, 4, 5, 6, 7, 8]
    base, ours, sums = [], [], []
    for document, size in enumerate(sizes):
        shift = generator.normal(0.1, 0.05)
        base += [{"document": str(document), "start": w, "tokens": 10, "loss_sum": 30.0} for w in range(size)]
        ours += [
            {"document": str(document), "start": w, "tokens": 10, "loss_sum": 30 + 10 * shift} for w in range(size)
        ]
        sums.append(10 * size * shift)
    tokens = 10 * numpy.array(sizes)
    mean = sum(sums) / sum(tokens)
    expected = math.sqrt(8 / 7 * ((numpy.array(sums) - mean * tokens) ** 2).sum()) / sum(tokens)
    assert statistics.compare(ours, base).log_error == pytest.approx(expected)


def test_accuracy_error_is_lm_evals():
    share, error = statistics.accuracy([1, 0, 1, 1])
    assert share == 0.75
    assert error == pytest.approx(numpy.std([1, 0, 1, 1], ddof=1) / 2)
