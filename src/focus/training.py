"""Train one method on one model and corpus."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import torch

from focus import distributed
from focus.cache import cache_root
from focus.checkpoint import Checkpoints, exclusive, publishing, writing
from focus.corpora import documents
from focus.data import tokenise, training_batches
from focus.errors import UserError
from focus.jobs import TrainJob
from focus.methods import METHODS
from focus.models import load_model, revision_of
from focus.precision import product_dtype
from focus.provenance import digest, write_atomically, write_result
from focus.trainer import fingerprint, finished, fit


def run(job: TrainJob, *, model: Path, corpus: Path, weights: Path, log: Path, checkpoints: Path, output: Path) -> None:
    """Train one method and write its weights (a folder), its log (JSONL) and its result (JSON).

    model, corpus: manifests; checkpoints: a folder that only runs of this job share, where the log grows while the job
    runs. A second process with the same folder waits for the first; the processes of one launch work together.
    """
    started = time.time()
    training = job.settings.training
    if training is None:
        raise UserError(f"method {job.method}: expected one with training, got kind {job.settings.kind}")
    settings, code = job.model_dump(mode="json"), digest(["focus.training"])
    revisions = {"model": revision_of(model), "corpus": revision_of(corpus)}
    count = job.model_settings.processes
    with distributed.processes(count), exclusive(checkpoints) if distributed.rank() == 0 else nullcontext() as waited:
        if distributed.agreed(waited and finished(output, [weights, log], settings, code)):
            return
        method = METHODS[job.settings.kind]
        placement = job.model_settings.placement if count == 1 else "cpu"
        network, tokenizer = load_model(model, job.model_settings.dtype, placement)
        if training.from_scratch:
            torch.manual_seed(job.seed)
            kind, config, device = type(network), network.config, network.device
            del network  # two large models at a time would not fit
            network = kind(config).to(device).eval()
        texts = tokenise(documents(corpus, "train"), tokenizer, cache_root() / "tokens")
        batches = training_batches(
            texts,
            job.model_settings.context,
            training.batch_size,
            job.seed,
            separator=tokenizer.eos_token_id,
        )
        base = list(network.parameters())
        method.attach(network, job.settings, window=job.model_settings.window, seed=job.seed)
        method.choose(network, method.training_attention(job.settings), None)
        if job.model_settings.gradient_checkpointing:
            network.activation_checkpointing_enable({"use_reentrant": False})
        if count > 1:
            distributed.shard(network, base)
        device = network.device
        dtype = product_dtype(job.precision, device)
        store = Checkpoints(checkpoints, fingerprint(settings, code, revisions, dtype, device))
        metrics = fit(
            network,
            training,
            method,
            batches,
            dtype=dtype,
            seed=job.seed,
            store=store,
            name=f"training {job.model} {job.method}",
        )
        distributed.gather(network)
        if distributed.rank() > 0:
            return
        with publishing(weights) as folder:
            method.save(network, job.settings, folder)
        with writing(log):
            write_atomically(log, store.log.read_bytes())
        with writing(output):
            write_result(
                output,
                experiment="training",
                settings=settings,
                metrics=metrics,
                started=started,
                modules=["focus.training"],
                revisions=revisions,
                backend=method.backend(network),
                dtype=str(dtype).removeprefix("torch."),
                device=device.type,
            )
        store.remove()
