"""Pages by an upper bound of their scores (Quest, arXiv 2406.10774, section 3).

Of each page, the smallest and the largest value of every channel over its keys are kept. No key of the page has a
larger product with a query q than the sum over channels of max(q_d * smallest_d, q_d * largest_d). Each query of each
head sees its own page and the `pages - 1` complete pages before it whose bound is largest.

Simplified: the paper leaves the first two layers full, and reads all keys while the prompt is processed; here every
query of every layer selects, so that scoring a text tests what generating it would do. With shared key heads, each
query head chooses pages for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.method_config import Method
from focus.methods.best_blocks import BestBlocks


class Quest(BestBlocks):
    """The own page and those that can score highest."""

    name = "quest"

    def size(self, settings: Method) -> int:
        """The setting `page`."""
        return settings.page

    def count(self, settings: Method) -> int:
        """The setting `pages`."""
        return settings.pages

    def summarise(self, blocks: Tensor) -> Tensor:
        """The largest, then the smallest value of each channel."""
        return torch.cat([blocks.amax(dim=3), blocks.amin(dim=3)], dim=-1)

    def probe(self, query: Tensor) -> Tensor:
        """The positive part of the query, then the negative one: the product is the bound."""
        return torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)
