"""Models without published weights: a GPT-2 of any size, trained from scratch on the corpora's training documents."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from focus.cache import cache_root
from focus.checkpoint import Checkpoints, exclusive, publishing, writing
from focus.config import Pretraining
from focus.corpora import documents
from focus.data import tokenise, training_batches
from focus.jobs import PretrainJob
from focus.method_config import Phase, Training
from focus.methods.full_finetuning import FullFinetuning
from focus.models import fetch_model, load_tokenizer, resolve, revision_of, trained_manifest
from focus.precision import product_dtype
from focus.provenance import digest, write_atomically, write_result
from focus.trainer import fingerprint, finished, fit

METHOD = FullFinetuning()


def run(
    job: PretrainJob, *, corpora: list[Path], weights: Path, log: Path, checkpoints: Path, output: Path, result: Path
) -> None:
    """Train a model and write its weights and tokenizer (a folder), its manifest (beside the folder), log and result.

    corpora: manifests, of which all training documents are read; checkpoints: a folder that only runs of this job
    share, where the log grows while the job runs.
    """
    started = time.time()
    settings, code = job.model_dump(mode="json"), digest(["focus.pretraining"])
    revisions = {path.stem: revision_of(path) for path in corpora}
    training = _training(job.pretraining)
    with exclusive(checkpoints) as waited:
        if waited and finished(result, [weights, log, output], settings, code):
            return
        fetched = fetch_model(job.model)
        revisions["tokenizer"] = {key: fetched[key] for key in ("source", "revision")}
        tokenizer = load_tokenizer(job.model)
        texts = [
            ids for path in corpora for ids in tokenise(documents(path, "train"), tokenizer, cache_root() / "tokens")
        ]
        batches = training_batches(
            texts, job.pretraining.context, training.batch_size, job.seed, separator=tokenizer.eos_token_id
        )
        model = new_model(job.pretraining, len(tokenizer), tokenizer.eos_token_id, job.seed)
        dtype = product_dtype(job.precision, model.device)
        store = Checkpoints(checkpoints, fingerprint(settings, code, revisions, dtype, model.device))
        metrics = fit(
            model,
            training,
            METHOD,
            batches,
            dtype=dtype,
            seed=job.seed,
            store=store,
            name=f"pretraining {job.model}",
        )
        with publishing(weights) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        with writing(log):
            write_atomically(log, store.log.read_bytes())
        with writing(output):
            manifest = trained_manifest(job.model, weights, output, metrics["trained_parameters"])
            write_atomically(output, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
            write_result(
                result,
                experiment="pretraining",
                settings=settings,
                metrics=metrics,
                started=started,
                modules=["focus.pretraining"],
                revisions=revisions,
                backend=METHOD.backend(model),
                dtype=str(dtype).removeprefix("torch."),
                device=model.device.type,
            )
        resolve(output)
        store.remove()


def new_model(settings: Pretraining, vocabulary: int, end: int, seed: int) -> PreTrainedModel:
    """An untrained GPT-2 without dropout, float32, on the GPU if there is one; `end` is the id of its end token."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end,
        eos_token_id=end,
    )
    return GPT2LMHeadModel(config).to("cuda" if torch.cuda.is_available() else "cpu")


def _training(settings: Pretraining) -> Training:
    return Training(
        phases=[Phase(trains="everything", steps=settings.steps, learning_rate=settings.learning_rate)],
        batch_size=settings.batch_size,
        accumulation=settings.accumulation,
        warmup=settings.warmup,
        clip=settings.clip,
        weight_decay=settings.weight_decay,
        calibration_windows=0,
        checkpoint_every=settings.checkpoint_every,
    )
