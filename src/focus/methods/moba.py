"""Mixture of block attention (MoBA, arXiv 2502.13189, section 2.2).

Each query of each head sees its own block, causally, and of the complete blocks before it the `top_k - 1` whose mean
key has the largest product with it. As in the authors' code the own block counts among the `top_k`. The choice has no
parameters; it is not differentiable, so a model learns to live with it through the attention inside the blocks.

Simplified: every layer is sparse, while the paper keeps some layers full, or trains with full attention at the end. In
a model with rotary positions, means are taken over rotated keys, as there.
"""

from __future__ import annotations

from torch import Tensor

from focus.method_config import Method
from focus.methods.best_blocks import BestBlocks


class Moba(BestBlocks):
    """The own block and those with the best mean key."""

    name = "moba"

    def size(self, settings: Method) -> int:
        """The setting `block`."""
        return settings.block

    def count(self, settings: Method) -> int:
        """The setting `top_k`."""
        return settings.top_k

    def summarise(self, blocks: Tensor) -> Tensor:
        """The mean key."""
        return blocks.float().mean(dim=3) if blocks.dtype.itemsize < 4 else blocks.mean(dim=3)

    def probe(self, query: Tensor) -> Tensor:
        """The query itself."""
        return query
