"""Random numbers that depend on what is hashed and on nothing else, whatever is computed together."""

from __future__ import annotations

from torch import Tensor

BITS = 0xFFFFFFFF


def mixed(x: Tensor) -> Tensor:
    """A 32-bit mix of x in int64."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & BITS
    return x ^ (x >> 16)
