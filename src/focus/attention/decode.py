"""Decoding with keys and values kept by group: a new token reads its own groups, the last w tokens and the sinks.

Tokens of equal membership lie together in memory, in order of time, so that what a token's groups hold is a few slices
(one for k = 1) that are read without a copy. The sinks and the last tokens are kept once more, in a short store.
"""

from __future__ import annotations

import torch
from torch import Tensor

from focus.attention.api import focus_attention
from focus.attention.decomposed import merge
from focus.attention.dense import MASKED
from focus.attention.flash import Pieces, check_shapes, choose_pieces
from focus.attention.plan import MAX_GROUPS_IN_BITS, group_bits
from focus.errors import UserError

CHUNK = 256


class GroupedCache:
    """The keys and values of one layer, for a batch of sequences that grow by the same number of tokens."""

    def __init__(
        self,
        *,
        window: int,
        sinks: int = 0,
        scale: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
    ):
        """Arguments as in `focus_attention`."""
        self.window, self.sinks, self.scale, self.softcap = window, sinks, scale, softcap
        self.sliding_window = sliding_window
        self.rows: list[_Sequence] = []

    @property
    def length(self) -> int:
        """Tokens held for each sequence, padding included."""
        return self.rows[0].length if self.rows else 0

    @property
    def batch(self) -> int:
        """Sequences held."""
        return len(self.rows)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, groups: Tensor, real: Tensor | None = None) -> Tensor:
        """Add n tokens and return their attention [B, H, n, D], zero for padding; not differentiable.

        query: [B, H, n, D]; key, value: [B, Hkv, n, D]; groups: int [B, n] or bool [B, n, K], the same kind each time;
        real: bool [B, n], False = padding. Raises UserError for shapes that do not fit.
        """
        check_shapes(query, key, value)
        if groups.shape[:2] != (len(query), query.shape[2]) or query.shape[2] != key.shape[2]:
            raise UserError(
                f"groups: expected [{len(query)}, {query.shape[2]}] for as many keys, "
                f"got {list(groups.shape)} and {key.shape[2]} keys"
            )
        pieces = choose_pieces(query, value, scale=self.scale, softcap=self.softcap)
        with torch.no_grad():
            if not self.rows and query.shape[2] > 1:
                self.fill(key, value, groups, real)
                return focus_attention(
                    query,
                    key,
                    value,
                    groups,
                    window=self.window,
                    sinks=self.sinks,
                    scale=self.scale,
                    softcap=self.softcap,
                    sliding_window=self.sliding_window,
                    padding_mask=real,
                )
            labels = self._labels(groups)
            out = torch.empty_like(query)
            for start in range(0, query.shape[2], CHUNK):
                r = slice(start, min(start + CHUNK, query.shape[2]))
                for b, row in enumerate(self.rows):
                    mask = None if real is None else real[b, r]
                    row.add(key[b, :, r], value[b, :, r], labels[b, r], mask)
                    out[b, :, r] = row.attend(query[b, :, r], labels[b, r], mask, pieces)
        return out

    def fill(self, key: Tensor, value: Tensor, groups: Tensor, real: Tensor | None = None) -> None:
        """Add tokens without attending; arguments as in `attend`."""
        labels = self._labels(groups)
        for b, row in enumerate(self.rows):
            row.add(key[b], value[b], labels[b], None if real is None else real[b])

    def plain(self) -> tuple[Tensor, Tensor]:
        """The keys and values [B, Hkv, length, D] in order of time, zero for padding."""
        rows = [row.plain() for row in self.rows]
        return torch.stack([key for key, _ in rows]), torch.stack([value for _, value in rows])

    def _labels(self, groups: Tensor) -> Tensor:
        """Groups as int [B, n], several a token as bits; makes the sequences of a new cache."""
        bits = groups.dim() == 3
        if bits and groups.shape[-1] > MAX_GROUPS_IN_BITS:
            raise UserError(
                f"groups: expected at most {MAX_GROUPS_IN_BITS} with several a token, got {groups.shape[-1]}"
            )
        if not self.rows:
            self.rows = [_Sequence(self, bits) for _ in range(len(groups))]
        return group_bits(groups) if bits else groups

    def reorder(self, index: Tensor) -> None:
        """Sequence i becomes what sequence index[i] was (beam search, repetition, selection)."""
        chosen = index.tolist()
        self.rows = [self.rows[i].copy() if i in chosen[:n] else self.rows[i] for n, i in enumerate(chosen)]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for row in self.rows:
            row.crop(length)


class _Store:
    """Keys and values [Hkv, n, D] with their positions and labels [n], in buffers that double when full."""

    def __init__(self):
        self.count = 0
        self.buffers: list[Tensor] | None = None

    def append(self, *new: Tensor) -> None:
        count = self.count + new[2].shape[0]
        if self.buffers is None or count > self.buffers[2].shape[0]:
            room = max(64, count + count // 4, 2 * self.count)
            old = self.read()
            self.buffers = [_roomy(x, room) for x in new]
            if self.count:
                for buffer, x in zip(self.buffers, old, strict=True):
                    _part(buffer, 0, self.count).copy_(x)
        for buffer, x in zip(self.buffers, new, strict=True):
            _part(buffer, self.count, count).copy_(x)
        self.count = count

    def read(self, first: int = 0) -> list[Tensor]:
        """Views of key, value, positions and labels from the `first` on."""
        return [_part(buffer, first, self.count) for buffer in self.buffers] if self.buffers else []

    def positions(self) -> Tensor:
        """A view of the positions."""
        return self.buffers[2].narrow(0, 0, self.count)

    def keep(self, index: Tensor) -> None:
        kept = [x.index_select(x.dim() // 3, index) for x in self.read()]
        self.count = 0
        self.append(*kept)

    def copy(self) -> _Store:
        other = _Store()
        if self.count:
            other.append(*self.read())
        return other


class _Sequence:
    """One sequence: a store for each membership that occurred, and one of the sinks and the last tokens."""

    def __init__(self, cache: GroupedCache, bits: bool):
        self.cache, self.bits, self.length = cache, bits, 0
        self.stores: dict[int, _Store] = {}
        self.near = _Store()

    def add(self, key: Tensor, value: Tensor, labels: Tensor, real: Tensor | None) -> None:
        self.empty = key[:, :0], value[:, :0]
        positions = torch.arange(self.length, self.length + len(labels), device=key.device)
        self.length += len(labels)
        tokens = [key, value, positions, labels]
        if real is not None and not real.all():
            index = real.nonzero()[:, 0]
            tokens = [x.index_select(x.dim() // 3, index) for x in tokens]
        present = tokens[3].tolist()
        if len(set(present)) == 1:
            self.stores.setdefault(present[0], _Store()).append(*tokens)
        else:
            for label in set(present):
                index = (tokens[3] == label).nonzero()[:, 0]
                self.stores.setdefault(label, _Store()).append(*(x.index_select(x.dim() // 3, index) for x in tokens))
        if present:
            self.near.append(*tokens)
        self._trim()

    def attend(self, query: Tensor, labels: Tensor, real: Tensor | None, pieces: Pieces) -> Tensor:
        """[H, n, D] for the tokens added last."""
        positions = torch.arange(self.length - len(labels), self.length, device=query.device)
        present = labels.tolist()
        if len(present) == 1 and real is None:
            return self._attend(query, positions, present[0], pieces)
        out = torch.zeros_like(query)
        skipped = [False] * len(present) if real is None else (~real).tolist()
        for label in {x for x, skip in zip(present, skipped, strict=True) if not skip}:
            rows = [i for i, (x, skip) in enumerate(zip(present, skipped, strict=True)) if x == label and not skip]
            if len(rows) == len(present):
                out = self._attend(query, positions, label, pieces)
            else:
                index = torch.tensor(rows, device=query.device)
                out[:, index] = self._attend(query[:, index], positions[index], label, pieces)
        return out

    def _attend(self, query: Tensor, positions: Tensor, label: int, pieces: Pieces) -> Tensor:
        """[H, n, D] for queries that share one membership."""
        first = int(positions[0])
        newest = first == self.length - 1
        key, value, at, of_key = self._near(first - self.cache.window)
        heads, count, width = query.shape
        shared = heads // len(key)
        grouped = query.reshape(1, len(key), shared * count, width)
        masked = ((of_key & label) != 0 if self.bits else of_key == label).unsqueeze(0)
        if not newest or self.cache.sliding_window is not None:
            masked = masked | self._outside(positions, at)
        total, lse = pieces.forward(grouped, key[None], value[None], _added(masked, shared))
        high = lse.dtype
        total = total.to(high)
        for store in self._meeting(label):
            merge(total, lse, *self._inside(grouped, positions, shared, store, pieces, newest))
        return total.view(heads, count, -1).to(query.dtype)

    def _outside(self, positions: Tensor, at: Tensor) -> Tensor:
        """[n, m] bool: later than the query, or neither in the window nor a sink. None is, for the newest token."""
        distance = positions.unsqueeze(1) - at
        beyond = distance > self.cache.window
        beyond[:, : self.cache.sinks] = False
        if self.cache.sliding_window is not None:
            beyond |= distance >= self.cache.sliding_window
        return beyond | (distance < 0)

    def _near(self, oldest: int) -> list[Tensor]:
        """Key, value, positions and labels of the sinks and of the tokens from position `oldest` on."""
        sinks = self.cache.sinks
        first = max(int(torch.searchsorted(self.near.positions(), oldest)), sinks)
        if first <= sinks:
            return self.near.read()
        late = self.near.read(first)
        if not sinks:
            return late
        stored = self.near.read()
        return [torch.cat([_part(x, 0, sinks), y], dim=x.dim() // 3) for x, y in zip(stored, late, strict=True)]

    def _meeting(self, label: int) -> list[_Store]:
        """The stores of the memberships that share a group with this one."""
        if not self.bits:
            return [self.stores[label]]
        return [store for other, store in self.stores.items() if other & label]

    def _inside(
        self, grouped: Tensor, positions: Tensor, shared: int, store: _Store, pieces: Pieces, newest: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention to one store's tokens up to each query; `newest` says that no token is later than the queries."""
        first, window = 0, self.cache.sliding_window
        if window is not None:
            first = int(torch.searchsorted(store.positions(), positions[0] - window, right=True))
        key, value, at, _ = store.read(first)
        if key.shape[1] == 0:
            return torch.zeros_like(grouped), torch.full_like(grouped[..., 0], MASKED)
        added = None
        if not newest and (at[-1] > positions[0] or (window is not None and len(positions) > 1)):
            distance = positions.unsqueeze(1) - at
            masked = distance < 0 if window is None else (distance < 0) | (distance >= window)
            added = _added(masked, shared)
        return pieces.forward(grouped, key[None], value[None], added)

    def copy(self) -> _Sequence:
        other = _Sequence(self.cache, self.bits)
        other.length, other.near, other.empty = self.length, self.near.copy(), self.empty
        other.stores = {label: store.copy() for label, store in self.stores.items()}
        return other

    def plain(self) -> list[Tensor]:
        stores = [store.read() for store in self.stores.values()]
        whole = [x.new_zeros(x.shape[0], self.length, x.shape[2]) for x in self.empty]
        for *tokens, positions, _ in stores:
            for x, part in zip(whole, tokens, strict=True):
                x.index_copy_(1, positions, part)
        return whole

    def crop(self, length: int) -> None:
        self.length = max(0, min(self.length, length))
        for label, store in list(self.stores.items()):
            store.count = int(torch.searchsorted(store.positions(), length))
            if store.count == 0:
                del self.stores[label]
        self.near = _Store()
        if self.stores:
            tokens = [
                torch.cat(parts, dim=parts[0].dim() // 3)
                for parts in zip(*(store.read() for store in self.stores.values()), strict=True)
            ]
            order = tokens[2].argsort()
            self.near.append(*(x.index_select(x.dim() // 3, order) for x in tokens))
            self._trim()

    def _trim(self) -> None:
        """Keep the sinks and at least the last window + CHUNK tokens of the short store."""
        sinks, wanted = self.cache.sinks, self.cache.window + CHUNK
        if self.near.count > sinks + 2 * wanted:
            last = torch.arange(self.near.count - wanted, self.near.count, device=self.near.buffers[2].device)
            self.near.keep(torch.cat([torch.arange(sinks, device=last.device), last]))


def _added(masked: Tensor, shared: int) -> Tensor:
    """[n, m] bool -> [1, 1, shared * n, m], added to the scores of `shared` heads one after the other."""
    added = torch.mul(masked, MASKED)
    return (added.repeat(shared, 1) if shared > 1 else added)[None, None]


def _roomy(x: Tensor, room: int) -> Tensor:
    with torch.inference_mode(False):  # a cache may leave the mode that it was filled in
        return x.new_empty(x.shape[0], room, x.shape[2]) if x.dim() == 3 else x.new_empty(room)


def _part(x: Tensor, start: int, stop: int) -> Tensor:
    return x.narrow(x.dim() // 3, start, stop - start)
