"""A tiny model, tokenizer and corpus as real manifests, for tests that train and evaluate in seconds."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from focus.cache import describe
from focus.config import ModelSettings
from focus.jobs import TrainJob
from focus.method_config import FocusConfig, Method, Phase, Training, make_method
from focus.models import MANIFEST_VERSION, trained_manifest

CONTEXT, WINDOW = 32, 4


@dataclass
class World:
    """Paths of a folder that `make_world` has filled."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "tiny-gpt2.json"

    @property
    def corpus(self) -> Path:
        return self.folder / "austen.json"

    def outputs(self, name: str) -> dict[str, Path]:
        """The paths a training run writes to."""
        base = self.folder / name
        return {
            "weights": base / "weights",
            "log": base / "log.jsonl",
            "checkpoints": base / "checkpoints",
            "output": base / "result.json",
        }


def make_world(folder: Path) -> World:
    """Write model, tokenizer and corpus; $FOCUS_CACHE must be folder / "cache"."""
    world = World(folder)
    weights = folder / "tiny-gpt2"
    tiny_model().save_pretrained(weights)
    byte_tokenizer().save_pretrained(weights)
    write_json(world.model, trained_manifest("tiny-gpt2", weights, world.model, 1))
    texts = folder / "cache" / "corpora" / "fake"
    texts.mkdir(parents=True)
    documents = [
        {"name": f"d{number}", "text": text(number, 600), "split": "held_out" if number % 3 == 2 else "train"}
        for number in range(6)
    ]
    (texts / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    manifest = {"folder": "corpora/fake", "files": describe(texts), "kind": "corpus", "name": "austen"}
    write_json(world.corpus, manifest_of(manifest))
    return world


def manifest_of(values: dict) -> dict:
    """`values` with what every manifest needs."""
    provenance = {"source": "made up", "revision": "sha256:0", "licence": "none", "note": "for tests"}
    return {"manifest_version": MANIFEST_VERSION} | provenance | values


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value))


def text(seed: int, length: int) -> str:
    """Sentences of few words, so that a model has something to learn."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "ran"]
    source = random.Random(seed)
    return " ".join(source.choice(words) for _ in range(length // 4))


def tiny_model(seed: int = 0) -> GPT2LMHeadModel:
    """A random GPT-2 of two layers over bytes."""
    torch.manual_seed(seed)
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 256, "vocab_size": 257}
    return GPT2LMHeadModel(GPT2Config(**shape, **quiet, bos_token_id=256, eos_token_id=256)).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>")


def focus_method(phases: list[Phase], adapter: dict | None = None, **training) -> Method:
    """Kind focus, small."""
    config = FocusConfig(**{"groups": 4, "top_k": 2, "window": WINDOW, "routing_dim": 4, "sinks": 1} | (adapter or {}))
    return make_method(kind="focus", label="Focus", adapter=config, training=Training(phases=phases, **training))


def train_job(settings: Method, *, seed: int = 0, **model_settings) -> TrainJob:
    """A float32 training job of the tiny world."""
    return TrainJob(
        model="tiny-gpt2",
        model_settings=ModelSettings(context=CONTEXT, window=WINDOW, **model_settings),
        corpus="austen",
        method="method",
        settings=settings,
        seed=seed,
        precision="float32",
    )


def row_settings(settings: Method, **model_settings) -> dict:
    """What an evaluation job of the tiny world shares with its training job."""
    return train_job(settings, **model_settings).model_dump(exclude={"precision"})
