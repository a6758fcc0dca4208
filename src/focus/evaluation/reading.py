"""Reading many sequences that begin alike: what two of them share is read once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import signature

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from focus.errors import UserError


class Reader:
    """A model that reads one sequence after another and keeps in its cache what the next has in common with the last.

    Sequences sorted by their tokens share the most. One that shares less than half of its tokens is read whole, through
    the attention that whole sequences have. So is each without `caches` (where groups depend on later tokens).
    `products` is entered around every forward.
    """

    def __init__(self, model: PreTrainedModel, *, products: Callable[[], AbstractContextManager], caches: bool = True):
        self.model, self.products, self.caches = model, products, caches
        self.tokens_read = 0
        named = signature(model.forward).parameters
        self._argument = "cache" if "cache" in named else "past_key_values"  # transformers renames it
        self._cache, self._held = DynamicCache(), torch.empty(0, dtype=torch.long)

    @torch.no_grad()
    def logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        """What follows the tokens (int64 [n]) at `places` (int64 [m], rising): [m, V].

        Raises UserError where that is not finite.
        """
        known = self._rewind(tokens, int(places[0])) if self.caches else 0
        new = tokens[known:].to(self.model.device)
        cache = {self._argument: self._cache, "use_cache": True} if self.caches else {"use_cache": False}
        kept = (places - known).to(self.model.device)
        with self.products():
            logits = self.model(input_ids=new[None], logits_to_keep=kept, **cache).logits
        self._held = tokens
        self.tokens_read += len(new)
        if not logits.isfinite().all():
            raise UserError(f"{len(tokens)} tokens: expected finite logits, got infinity or none")
        return logits[0]

    def answer(self, asked: Tensor, answer: Tensor) -> tuple[float, bool]:
        """The `likelihood` of the tokens `answer` after the tokens `asked`, int64 [m] and [n], none empty."""
        tokens = torch.cat([asked, answer[:-1]])
        return likelihood(self.logits(tokens, torch.arange(len(asked) - 1, len(tokens))), answer)

    def _rewind(self, tokens: Tensor, most: int) -> int:
        """Leave in the cache the tokens that it shares with the first `most` of `tokens`, and return how many."""
        length = min(len(self._held), most)
        differ = (self._held[:length] != tokens[:length]).nonzero()
        shared = int(differ[0]) if len(differ) else length
        if 2 * shared < len(tokens):
            self._cache, shared = DynamicCache(), 0
        elif shared < len(self._held):
            self._cache.crop(shared - len(self._held))
        return shared


def likelihood(logits: Tensor, target: Tensor) -> tuple[float, bool]:
    """Log-probability of the tokens `target` (int64 [n]) under logits [n, V], and whether each is the likeliest."""
    log_probabilities = torch.log_softmax(logits.float(), dim=-1).cpu()
    greedy = bool((log_probabilities.argmax(dim=-1) == target).all())
    return float(log_probabilities.gather(1, target[:, None]).sum()), greedy
