"""The decisive probe: no causal balance predicts fair bits, and Sinkhorn over the sequence does."""

import itertools
import math

import pytest
import torch

from focus import random_bits
from focus.jobs import BitsJob
from focus.leak_config import BitsTraining
from focus.method_config import READS, FocusConfig
from focus.provenance import read_result

LENGTH = 8
SHAPE = {"layers": 1, "width": 16, "heads": 2}
SMALL = SHAPE | {"steps": 200, "learning_rate": 1e-2, "batch_tokens": 512, "evaluation_tokens": 32768}
ADAPTER = FocusConfig(groups=2, window=0, sinks=0, routing_dim=4, recluster_every=10)


def job(balance, trains="everything", **settings):
    training = BitsTraining(adapter=ADAPTER, **SMALL | settings)
    return BitsJob(balance=balance, length=LENGTH, trains=trains, seed=0, training=training)


def learnt(folder, *arguments, **settings):
    path = folder / "result.json"
    random_bits.run(job(*arguments, **settings), path)
    return read_result(path)["metrics"]


@pytest.mark.parametrize("balance", [name for name in READS if FocusConfig(balance=name).causal])
def test_a_balance_called_causal_stays_at_the_floor(tmp_path, balance):
    metrics = learnt(tmp_path, balance)
    assert metrics["declared_causal"]
    assert metrics["loss"] > math.log(2) - 4 * metrics["error"] - 1e-6
    assert metrics["loss"] < 0.72


def test_sinkhorn_over_the_sequence_goes_below_the_floor(tmp_path):
    metrics = learnt(tmp_path, "sinkhorn")
    assert not metrics["declared_causal"]
    assert metrics["sigmas_below_floor"] > 10
    assert metrics["loss"] < math.log(2) - 0.02


def test_the_frozen_model_only_counts_what_it_has_seen(tmp_path):
    metrics = learnt(tmp_path, "softmax", "centroids", steps=20)
    assert metrics["base"]["loss"] > math.log(2) - 4 * metrics["base"]["error"]
    assert metrics["trained_parameters"] == 16 * 4 + 2 * 4


def test_bits_are_a_function_of_seed_and_number():
    one, other = random_bits.Bits(6, 3, "0:fair"), random_bits.Bits(6, 3, "1:fair")
    assert torch.equal(one[4], random_bits.Bits(6, 3, "0:fair")[4])
    assert not torch.equal(one[4], one[5])
    assert not torch.equal(one[4], other[4])
    many = random_bits.Bits(100, 200, "0:fair")[0].double()
    assert many.mean().item() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(20000))
    even = random_bits.Bits(7, 200, "0:even", even=True)[0].sum(dim=1)
    assert (even[::2] == 3).all()
    assert even[1::2].double().var().item() == pytest.approx(7 / 4, rel=0.5)


@pytest.mark.parametrize("length", [2, 3, 9])
def test_what_the_number_of_ones_tells_is_the_loss_over_all_sequences(length):
    sequences = list(itertools.product([0, 1], repeat=length))
    total = 0.0
    for bits in sequences:
        for place in range(1, length):
            left = sum(bits[place:]) / (length - place)
            total -= math.log(left if bits[place] else 1 - left)
    assert random_bits.count_bound(length) == pytest.approx(total / len(sequences) / (length - 1))
