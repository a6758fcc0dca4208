"""The decisive probe of PAPER.md 4.1: a tiny model learns to predict independent fair bits under each balance.

No causal model can go below ln 2 nats a bit, so a lower held-out loss proves that the groups tell of later bits. With
trains "everything" the model starts from random weights; with "centroids" the model has first learnt, with full
attention, bits of which every other sequence holds as many ones as zeros, and is frozen: so it counts what it has seen,
and starts close to the floor, below which whatever the centroids let it see must take it.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from focus.checkpoint import Checkpoints, writing
from focus.jobs import BitsJob
from focus.leak_config import Trains
from focus.loss import token_losses
from focus.method_config import FocusSettings, Phase, Training
from focus.methods import METHODS, MethodKind
from focus.provenance import write_result
from focus.trainer import fit

FLOOR = math.log(2)
CALIBRATION_WINDOWS = 16
NOTHING = Training(phases=[])


class Bits:
    """Batches by number: `batches[n]` is int64 [batch_size, context], a function of the seed and n alone.

    Fair bits; with `even`, every other sequence holds as many ones as zeros (one less if the context is odd).
    """

    def __init__(self, context: int, batch_size: int, seed: str, *, even: bool = False):
        self.context, self.batch_size, self.seed, self.even = context, batch_size, seed, even

    def __getitem__(self, number: int) -> Tensor:
        key = hashlib.sha256(f"bits:{self.seed}:{number}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        bits = torch.randint(2, (self.batch_size, self.context), generator=generator)
        if self.even:
            ranks = torch.rand(bits.shape, generator=generator).argsort(dim=1)
            bits[::2] = (ranks[::2] < self.context // 2).long()
        return bits


def run(job: BitsJob, output: Path) -> None:
    """Train one model, measure it on fresh bits, and write the result."""
    started = time.time()
    adapter = job.training.adapter.model_copy(update={"balance": job.balance})
    model = build(job)
    base = None
    if job.trains == "centroids":
        learn(model, METHODS["full_finetuning"], job, "everything", even=True)
        base = measure(model, job)
    method, settings = METHODS["focus"], FocusSettings(kind="focus", label="", adapter=adapter, training=NOTHING)
    method.attach(model, settings, window=adapter.window, seed=job.seed)
    method.choose(model, "soft", None)
    learnt = learn(model, method, job, job.trains)
    found = measure(model, job)
    metrics = found | {
        "floor": FLOOR,
        "count_bound": count_bound(job.length),
        "sigmas_below_floor": (FLOOR - found["loss"]) / found["error"],
        "declared_causal": adapter.causal,
        "base": base,
        "trained_parameters": learnt["trained_parameters"],
    }
    with writing(output):
        write_result(
            output,
            experiment="bits",
            settings=job.model_dump(mode="json"),
            metrics=metrics,
            started=started,
            modules=["focus.random_bits"],
            backend=method.backend(model),
            dtype="float32",
        )


def build(job: BitsJob) -> GPT2LMHeadModel:
    """A GPT-2 over two tokens with random weights, which are the same for every balance."""
    settings = job.training
    shape = {"n_layer": settings.layers, "n_embd": settings.width, "n_head": settings.heads, "n_positions": job.length}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(job.seed)
    config = GPT2Config(
        vocab_size=2, initializer_range=settings.initial_std, tie_word_embeddings=False, **shape, **quiet
    )
    return GPT2LMHeadModel(config).eval()


def learn(model: GPT2LMHeadModel, method: MethodKind, job: BitsJob, trains: Trains, *, even: bool = False) -> dict:
    """Train in place, with the trainer of every other table, and return its metrics."""
    settings, size = job.training, max(1, job.training.batch_tokens // job.length)
    training = Training(
        phases=[Phase(trains=trains, steps=settings.steps, learning_rate=settings.learning_rate)],
        batch_size=size,
        calibration_windows=CALIBRATION_WINDOWS,
        checkpoint_every=settings.steps,
    )
    name = f"bits {job.balance} T={job.length} {'before' if even else trains}"
    batches = Bits(job.length, size, f"{job.seed}:{'even' if even else 'fair'}", even=even)
    with tempfile.TemporaryDirectory() as folder:
        store = Checkpoints(Path(folder), name)
        return fit(model, training, method, batches, dtype=torch.float32, seed=job.seed, store=store, name=name)


def measure(model: GPT2LMHeadModel, job: BitsJob) -> dict:
    """Mean loss of fresh bits in nats and its standard error over sequences; the first bit of each is not predicted."""
    size = max(1, job.training.batch_tokens // job.length)
    count = max(2, job.training.evaluation_tokens // job.length)
    batches = Bits(job.length, size, f"{job.seed}:held-out")
    losses = torch.cat([token_losses(model, batches[number]).mean(dim=1) for number in range(-(-count // size))])
    losses = losses[:count].double()
    return {
        "loss": losses.mean().item(),
        "error": losses.std().item() / math.sqrt(count),
        "sequences": count,
        "tokens": count * (job.length - 1),
    }


def count_bound(length: int) -> float:
    """Mean loss in nats of the bits 2 to `length` for whoever is told how many of a sequence's bits are 1, and no more.

    The bits have `length` ln 2 nats; their number of ones takes the entropy of a binomial distribution of them, and the
    first bit, which is not predicted, what is left of its own.
    """
    chances = [math.comb(length, ones) / 2**length for ones in range(length + 1)]
    number = -sum(chance * math.log(chance) for chance in chances if chance)
    first = sum(chance * _entropy(ones / length) for ones, chance in enumerate(chances))
    return (length * FLOOR - number - first) / (length - 1)


def _entropy(chance: float) -> float:
    return -sum(each * math.log(each) for each in (chance, 1 - chance) if each > 0)
