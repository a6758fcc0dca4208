"""From documents to token windows: tokenising with a cache, training batches by number, evaluation windows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from focus.errors import UserError
from focus.provenance import write_atomically


def tokenise(documents: Sequence, tokenizer, cache: Path) -> list[Tensor]:
    """Token ids of each document, int32 [n], without special tokens.

    documents: anything with `name` and `text`; tokenizer: a fast tokenizer. The ids are kept in the folder `cache`
    under a name made from the tokenizer and the texts; a damaged file is made anew.
    """
    path = cache / f"{_digest(documents, tokenizer)}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            ids = _read(path, len(documents))
            if ids is None:
                ids = [_encode(document.text, tokenizer) for document in documents]
                write_atomically(path, save({str(number): document for number, document in enumerate(ids)}))
    except OSError as error:
        raise UserError(f"{path}: expected to write a token cache, got {error.strerror or error}") from error
    return ids


class TrainingBatches:
    """Batches by number: `batches[n]` is int64 [batch_size, context], a function of the seed and n alone.

    The documents are joined into one stream, `separator` after each. An epoch cuts the stream at a random offset into
    windows that do not overlap, and takes them in random order.
    """

    def __init__(self, documents: Sequence[Tensor], context: int, batch_size: int, seed: int, separator: int):
        end = torch.tensor([separator], dtype=torch.int32)
        self.stream = torch.cat([part for document in documents for part in (document, end)])
        self.context, self.batch_size, self.seed = context, batch_size, seed
        self.windows = len(self.stream) // context - 1
        self.epoch, self.starts = -1, torch.empty(0)
        if self.windows < 1:
            raise UserError(
                f"training text: expected at least {2 * context} tokens for a context of {context}, "
                f"got {len(self.stream)}"
            )

    def __getitem__(self, number: int) -> Tensor:
        first = number * self.batch_size
        return torch.stack([self._window(first + place) for place in range(self.batch_size)])

    def _window(self, number: int) -> Tensor:
        epoch, place = divmod(number, self.windows)
        if epoch != self.epoch:
            self.epoch, self.starts = epoch, self._starts(epoch)
        start = int(self.starts[place])
        return self.stream[start : start + self.context].long()

    def _starts(self, epoch: int) -> Tensor:
        key = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        offset = torch.randint(self.context, (1,), generator=generator)
        return torch.randperm(self.windows, generator=generator) * self.context + offset


def training_batches(
    documents: Sequence[Tensor], context: int, batch_size: int, seed: int, *, separator: int
) -> TrainingBatches:
    """Training batches over the tokens of each document, see `TrainingBatches`."""
    return TrainingBatches(documents, context, batch_size, seed, separator)


@dataclass(frozen=True)
class Window:
    """Part of a document: `tokens` int64 [context], of which those from position `first` on are scored."""

    document: str
    start: int
    tokens: Tensor
    first: int


def evaluation_windows(
    documents: Sequence[tuple[str, Tensor]],
    context: int,
    windows: int,
    stride: int | None = None,
    *,
    settings: str = "perplexity",
) -> list[Window]:
    """`windows` windows spread evenly over the documents, given as (name, token ids).

    Windows start at multiples of `stride` (null means the context) within a document and are always full; the last
    `stride` tokens of each are scored, but never its first, which has no context. A document shorter than the context
    has none. `settings` is where the config sets these, for errors.
    """
    stride = stride or context
    if stride > context:
        raise UserError(f"{settings}.stride: expected at most the context ({context}), got {stride}")
    places = [(name, start, ids) for name, ids in documents for start in range(0, len(ids) - context + 1, stride)]
    if len(places) < windows:
        raise UserError(
            f"{settings}.windows: expected at most {len(places)}, the held-out text's number at a context of "
            f"{context} and a stride of {stride}, got {windows}"
        )
    chosen = [places[(2 * number + 1) * len(places) // (2 * windows)] for number in range(windows)]
    first = max(context - stride, 1)
    return [Window(name, start, ids[start : start + context].long(), first) for name, start, ids in chosen]


def batched(windows: Sequence[Window], batch_size: int) -> Iterator[Sequence[Window]]:
    """The windows in groups of at most `batch_size`, in order."""
    for start in range(0, len(windows), batch_size):
        yield windows[start : start + batch_size]


def _encode(text: str, tokenizer) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int32)


def _digest(documents: Sequence, tokenizer) -> str:
    total = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    for document in documents:
        total.update(json.dumps([document.name, document.text]).encode())
    return total.hexdigest()


def _read(path: Path, count: int) -> list[Tensor] | None:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return None
    return [tensors[str(number)] for number in range(count)] if len(tensors) == count else None
