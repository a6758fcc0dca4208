"""MagicPIG (arXiv 2410.16179): keys are sampled by locality-sensitive hashing, and their scores made up for the chance.

Each of L tables hashes queries and keys to K signs of random projections. A query reads the keys that fall into its
bucket in at least two tables, which happens with probability u = 1 - (1 - c)^L - L c (1 - c)^(L-1), c = p^K,
p = 1 - angle / pi; log u is taken off their scores. The first tokens and the most recent ones are read exactly.
Keys are centred before they are hashed, which leaves softmax as it is and spreads the angles.

The paper hashes after a whole prompt, centred by its mean, and decodes. Here every query of a text is treated as a
decoded one, so a key is centred by the mean of the keys up to it: the angles stay a function of the past. A layer with
a sliding window of its own has neither centre nor first tokens, since its cache forgets them. No layer is left dense
(the paper leaves two). Pairs are compared with each other instead of looked up in tables: the same choice, at a cost
that grows with the square of the length. The choice and u are constants to the gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from focus.method_config import Method
from focus.methods.selection import PairCounter, causal_blocks, distances
from focus.methods.structural import Call, LayerState, Structural

HASHED = 1024
CACHED = 1 << 19
FEW = 1e-3
SMALLEST = 1e-18


class MagicPIG(Structural):
    """Sampled keys, `settings.sinks` first and `settings.local` last ones."""

    name = "magicpig"

    def layer_state(self, settings: Method, *, window: int, heads: int, head_dim: int, generator) -> LayerState:
        """The projections float32 [D, L * K], shared by the heads."""
        state = LayerState(settings, window)
        planes = torch.randn(head_dim, settings.tables * settings.bits, generator=generator)
        state.register_buffer("planes", planes)
        return state

    def attend(self, call: Call) -> Tensor:
        """Collisions and all scores of some queries, softmax over what is read."""
        call.state.backend = "hashes, dense"
        settings = call.state.settings
        keys, codes = _hashed_keys(call)
        counter, outputs = PairCounter(call.state), []
        for block in causal_blocks(call):
            with torch.no_grad():
                exact, sampled = _choice(block, codes[..., : block.key.shape[2]])
                cosine = _cosines(block.query, keys[:, :, : block.key.shape[2]])[sampled]
                correction = torch.zeros(sampled.shape, dtype=cosine.dtype, device=cosine.device)
                correction[sampled] = log_probability(cosine, settings.bits, settings.tables)
            read = exact | sampled
            scores = (block.scores(slice(None)) - correction).masked_fill(~read, -torch.inf)
            outputs.append(block.weighted(scores.softmax(dim=-1).nan_to_num(0.0)))
            counter.add_mask(block, read)
        counter.report()
        return torch.cat(outputs[::-1], dim=2)


def log_probability(cosine: Tensor, bits: int, tables: int) -> Tensor:
    """log u for vectors at angles of these cosines; where collisions are rare by the first term of u's series."""
    one = (1 - torch.acos(cosine.clamp(-1, 1)) / math.pi) ** bits
    most = -torch.expm1((tables - 1) * torch.log1p(-one) + torch.log1p((tables - 1) * one))
    rare = tables * (tables - 1) / 2 * one**2
    return torch.where(tables * one < FEW, rare, most).clamp(min=SMALLEST).log()


def codes_of(vectors: Tensor, planes: Tensor, bits: int) -> Tensor:
    """The buckets [..., n, L] of vectors [..., n, D]: uint8 where that holds `bits` signs, else int16."""
    dtype = torch.uint8 if bits <= 8 else torch.int16
    powers = 2 ** torch.arange(bits, device=planes.device).to(dtype)
    codes = []
    for some in vectors.split(HASHED, dim=-2):
        signs = (some @ planes > 0).unflatten(-1, (-1, bits))
        codes.append((signs * powers).sum(dim=-1, dtype=dtype))
    return torch.cat(codes, dim=-2)


def collisions(queries: Tensor, keys: Tensor) -> Tensor:
    """In how many tables each pair falls into one bucket: [B, H, n, m] in the dtype of the codes.

    queries: codes [B, H, n, L]; keys: codes [B, Hkv, L, m]. In pieces that stay in the processor's cache.
    """
    batch, heads, rows, tables = queries.shape
    queries = queries.unflatten(1, (keys.shape[1], -1)).unsqueeze(-1)
    counts = torch.zeros(*queries.shape[:4], keys.shape[3], dtype=keys.dtype, device=keys.device)
    piece = max(1, CACHED // (batch * heads * keys.shape[3]))
    for start in range(0, rows, piece):
        some, mine = counts[:, :, :, start : start + piece], queries[:, :, :, start : start + piece]
        equal = torch.empty_like(some)
        for table in range(tables):
            some += torch.eq(mine[..., table, :], keys[:, :, None, None, table], out=equal)
    return counts.flatten(1, 2)


@torch.no_grad()
def _hashed_keys(call: Call) -> tuple[Tensor, Tensor]:
    """The keys as they are hashed, float32 or more [B, Hkv, Tk, D], and their codes [B, Hkv, L, Tk]."""
    settings, planes = call.state.settings, call.state.planes
    keys = call.key.to(torch.promote_types(call.key.dtype, torch.float32))
    if settings.centred and call.sliding_window is None:
        real = torch.ones(1, 1, keys.shape[2], 1, dtype=torch.float64, device=keys.device)
        if call.padding_mask is not None:
            real = call.padding_mask[:, None, :, None].double()
        mean = (keys.double() * real).cumsum(dim=2) / real.cumsum(dim=2).clamp(min=1)
        keys = keys - mean.to(keys.dtype)
    return keys, codes_of(keys, planes.to(keys.dtype), settings.bits).mT.contiguous()


def _choice(block: Call, codes: Tensor) -> tuple[Tensor, Tensor]:
    """What is read exactly, and what is sampled besides: bool [B or 1, 1, n, m] and [B, H, n, m]."""
    settings, visible = block.state.settings, block.visible(slice(None))
    exact = distances(block) < settings.local
    if block.sliding_window is None:
        exact = exact | (block.positions() < settings.sinks)[:, None, None]
    exact = exact & visible
    queries = codes_of(block.query, block.state.planes.to(block.query.dtype), settings.bits)
    return exact, (collisions(queries, codes) >= 2) & visible & ~exact


def _cosines(query: Tensor, keys: Tensor) -> Tensor:
    """Of the angles between queries [B, H, n, D] and keys [B, Hkv, m, D]: [B, H, n, m]."""
    query, keys = (torch.nn.functional.normalize(vectors, dim=-1) for vectors in (query, keys))
    return (query.unflatten(1, (keys.shape[1], -1)) @ keys.unsqueeze(2).mT).flatten(1, 2)
