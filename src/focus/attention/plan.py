"""How the pairs of Focus attention are split into disjoint pieces (paper Appendix D, and 4.9 for k > 1).

    A  a *segment* is a set of queries with every key that shares a group with them, in order of time. With one group a
       token that is one causal attention for each group. With more, tokens of equal membership form one segment, whose
       keys are all tokens whose membership meets theirs: each pair is met once, however many groups it shares.
    S  sink keys of other segments.
    B  the *band*: keys at a distance of at most the window that neither share a segment nor are sinks.

A group in which no pair is farther apart than the window needs no segment: the band then takes its pairs. Padding is in
no piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from focus.attention.dense import MASKED
from focus.attention.reference import sink_keys
from focus.attention.tiles import TILE, Band, Segment, SinkBlock, distance_mask
from focus.errors import UserError

BAND_ROWS = 2048
SINK_ROWS = 4096
SHARED_ROWS = 1280
MAX_GROUPS_IN_BITS = 62


@dataclass(frozen=True)
class Labels:
    """Which pairs the segments hold: equal labels, or labels with a common bit. [B, Tk] each."""

    of_query: Tensor
    of_key: Tensor
    bits: bool

    def same(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries & keys) != 0 if self.bits else queries == keys

    def masked(self, queries: Tensor, keys: Tensor) -> Tensor:
        """MASKED where `same`, else zero; float32."""
        shape = torch.broadcast_shapes(queries.shape, keys.shape)
        mask = torch.empty(shape, dtype=torch.float32, device=queries.device)
        if self.bits:
            torch.ne(queries & keys, 0, out=mask)
        else:
            torch.eq(queries, keys, out=mask)
        return mask.mul_(MASKED)


@dataclass(frozen=True)
class Plan:
    """The disjoint pieces. Positions count over the Tk keys; the queries are those from `offset` on.

    `banded` says which sequences have a band; `sinks` are positions [B, S] with -1 for none; `blocked` bool [B, Tk] are
    keys that the band leaves to others (sinks, padding); `padding` bool [B, Tk] marks padding.
    """

    device: torch.device
    offset: int
    keys: int
    window: int
    sliding_window: int | None
    segments: list[Segment]
    banded: list[bool]
    labels: Labels | None
    sinks: Tensor | None
    blocked: Tensor | None
    padding: Tensor | None

    @property
    def longest(self) -> tuple[int, int]:
        """Most queries and most keys of a segment."""
        return max((len(s.rows) for s in self.segments), default=0), max(
            (len(s.keys) for s in self.segments), default=0
        )

    def bands(self) -> Iterator[Band]:
        """The bands of all sequences, a few thousand queries at a time."""
        for batch, banded in enumerate(self.banded):
            if banded:
                yield from self._bands(batch)

    def _bands(self, batch: int) -> Iterator[Band]:
        size = 32 if self.window <= 256 else 64 if self.window <= 1024 else 128
        back = -(-self.window // size) * size
        inner = min(max(self.offset, back), self.keys)
        yield from self._edge(batch, self.offset, inner)
        blocks = (self.keys - inner) // size
        step = max(1, BAND_ROWS * 160 // (size * (size + back)))
        for block in range(0, blocks, step):
            yield Band(batch, inner + block * size, min(step, blocks - block), size, back, self.offset)
        yield from self._edge(batch, inner + blocks * size, self.keys)

    def _edge(self, batch: int, start: int, stop: int) -> Iterator[Band]:
        for first in range(start, stop, TILE):
            yield Band(batch, first, 1, min(TILE, stop - first), min(self.window, first), self.offset)

    def band_mask(self, band: Band) -> Tensor:
        """[blocks or 1, 1, size, width], added to the scores."""
        mask = distance_mask(band.size, band.back, self.window, self.device)[None]
        if self.labels is not None:
            queries = self.labels.of_query[band.batch, band.positions].view(band.blocks, band.size, 1)
            keys = self.labels.of_key[band.batch, band.keys].unfold(0, band.width, band.size).unsqueeze(1)
            mask = self.labels.masked(queries, keys).add_(mask)
        if self.blocked is not None:
            blocked = self.blocked[band.batch, band.keys]
            if blocked.any():
                mask = mask.masked_fill(blocked.unfold(0, band.width, band.size).unsqueeze(1), MASKED)
        return mask.unsqueeze(1)

    def sink_blocks(self, beyond: int = -1) -> Iterator[SinkBlock]:
        """The sinks of all sequences, farther than `beyond` from a query, a few thousand queries at a time."""
        if self.sinks is None:
            return
        for batch, banded in enumerate(self.banded):
            if banded:
                for start in range(self.offset, self.keys, SINK_ROWS):
                    yield self._sink_block(batch, slice(start, min(start + SINK_ROWS, self.keys)), beyond)

    def _sink_block(self, batch: int, positions: slice, beyond: int) -> SinkBlock:
        keys = self.sinks[batch]
        distance = torch.arange(positions.start, positions.stop, device=self.device).unsqueeze(1) - keys
        masked = (distance <= beyond) | (keys < 0)
        if self.sliding_window is not None:
            masked |= distance >= self.sliding_window
        keys = keys.clamp(min=0)
        if self.labels is not None:
            of_query = self.labels.of_query[batch, positions].unsqueeze(1)
            masked |= self.labels.same(of_query, self.labels.of_key[batch, keys])
        mask = torch.zeros(masked.shape, device=self.device).masked_fill_(masked, MASKED)[None, None]
        return SinkBlock(batch, slice(positions.start - self.offset, positions.stop - self.offset), keys, mask)


def make_plan(
    queries: int,
    groups: Tensor,
    *,
    window: int,
    sinks: int | Tensor = 0,
    sliding_window: int | None = None,
    padding_mask: Tensor | None = None,
) -> Plan:
    """Split the mask of `focus_attention`; arguments as there, `queries` being Tq.

    Raises UserError for more than 62 groups in a bool membership with several groups a token.
    """
    batch, keys = groups.shape[:2]
    device, offset = groups.device, keys - queries
    if sliding_window is not None and sliding_window >= keys:
        sliding_window = None
    farthest = keys if sliding_window is None else sliding_window
    groups = single_groups(groups, padding_mask)
    positions = [
        torch.arange(keys, device=device) if padding_mask is None else padding_mask[b].nonzero()[:, 0]
        for b in range(batch)
    ]
    segments, labels = [], None
    if window < farthest - 1 or sliding_window is None:
        if window >= farthest - 1:
            groups, window = torch.zeros(batch, keys, dtype=torch.int64, device=device), 0
        split = _split_classes if groups.dim() == 3 else _split_groups
        segments, labels = split(groups, positions, offset, window, sliding_window)
    window = min(window, farthest - 1)
    banded = [True] * batch
    for segment in segments:
        b = segment.batch
        rows = int((positions[b] >= offset).sum())
        if segment.groups == 1 and len(segment.keys) == len(positions[b]) and len(segment.rows) == rows:
            banded[b] = False
    sink_tokens = None
    if window < farthest - 1 and any(banded):
        sink_tokens = sink_positions(sinks, padding_mask, batch, keys, device)
    blocked = None if padding_mask is None else ~padding_mask
    if sink_tokens is not None:
        is_sink = torch.zeros(batch, keys + 1, dtype=torch.bool, device=device)
        is_sink = is_sink.scatter_(1, sink_tokens % (keys + 1), True)[:, :keys]
        blocked = is_sink if blocked is None else blocked | is_sink
    return Plan(
        device=device,
        offset=offset,
        keys=keys,
        window=window,
        sliding_window=sliding_window,
        segments=segments,
        banded=banded,
        labels=labels,
        sinks=sink_tokens,
        blocked=blocked,
        padding=None if padding_mask is None else ~padding_mask,
    )


def single_groups(groups: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Membership as int [B, Tk] where that says the same: one group a token, or every pair of tokens shares one.

    The latter holds by the pigeonhole principle when each token joins more than half of the groups.
    """
    if groups.dim() == 2:
        return groups
    joined = groups.sum(dim=-1)
    real = torch.ones_like(joined, dtype=torch.bool) if padding_mask is None else padding_mask
    common = (groups | ~real.unsqueeze(-1)).all(dim=1).any(dim=-1)
    if bool(common.all()) or bool((2 * joined > groups.shape[-1])[real].all()):
        return torch.zeros_like(joined)
    if bool((joined == 1)[real].all()):
        return groups.int().argmax(dim=-1)
    return groups


def group_bits(groups: Tensor) -> Tensor:
    """Membership bool [..., K], K <= 62, as the bits of an integer [...]: two tokens share a group when a & b != 0."""
    return (groups.long() << torch.arange(groups.shape[-1], device=groups.device)).sum(dim=-1)


def _split_groups(
    groups: Tensor, positions: list[Tensor], offset: int, window: int, sliding_window: int | None
) -> tuple[list[Segment], Labels | None]:
    """Segments for one group a token, groups int [B, Tk]."""
    segments = []
    of_query = torch.zeros(groups.shape, dtype=torch.int32, device=groups.device)
    of_key = torch.full_like(of_query, -1)
    for batch, real in enumerate(positions):
        ids, order = torch.sort(groups[batch, real], stable=True)
        order = real[order]
        counts = torch.unique_consecutive(ids, return_counts=True)[1]
        stops = counts.cumsum(0)
        spans = order[stops - 1] - order[stops - counts]
        spread = spans > window
        label = torch.arange(len(counts), dtype=torch.int32, device=groups.device)
        of_query[batch, order] = label.repeat_interleave(counts)
        of_key[batch, order] = torch.where(spread, label, -1).repeat_interleave(counts)
        spans = [
            (stop - count, stop)
            for stop, count, keep in zip(stops.tolist(), counts.tolist(), spread.tolist(), strict=True)
            if keep
        ]
        if offset or sliding_window is not None:
            for start, stop in spans:
                keys = order[start:stop]
                rows = keys[keys >= offset]
                if len(rows):
                    segments.append(Segment(batch, rows, keys, len(rows) == len(keys), sliding_window))
        else:
            segments += [_side_by_side(batch, order, some) for some in _alike(spans)]
    return segments, Labels(of_query, of_key, bits=False) if segments else None


def _alike(spans: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs (start, stop) of about one length, as many at once as fit in SHARED_ROWS."""
    some: list[tuple[int, int]] = []
    for start, stop in sorted(spans, key=lambda span: span[0] - span[1]):
        if some:
            longest = some[0][1] - some[0][0]
            if longest - (stop - start) > TILE or (len(some) + 1) * longest > SHARED_ROWS:
                yield some
                some = []
        some.append((start, stop))
    if some:
        yield some


def _side_by_side(batch: int, order: Tensor, spans: list[tuple[int, int]]) -> Segment:
    """One segment of whole groups, given where they lie in `order`, the longest first."""
    if len(spans) == 1:
        tokens = order[slice(*spans[0])]
        return Segment(batch, tokens, tokens, True, None)
    lengths = [stop - start for start, stop in spans]
    starts, last = (torch.tensor(x, device=order.device).unsqueeze(1) for x in ([a for a, _ in spans], lengths))
    within = torch.minimum(torch.arange(lengths[0], device=order.device), last - 1)
    tokens = order[starts + within].flatten()
    return Segment(batch, tokens, tokens, True, None, tuple(lengths))


def _split_classes(
    groups: Tensor, positions: list[Tensor], offset: int, window: int, sliding_window: int | None
) -> tuple[list[Segment], Labels]:
    """Segments for several groups a token, groups bool [B, Tk, K]: one for each membership that occurs."""
    if groups.shape[-1] > MAX_GROUPS_IN_BITS:
        raise UserError(f"groups: expected at most {MAX_GROUPS_IN_BITS} with several a token, got {groups.shape[-1]}")
    segments = []
    bits = group_bits(groups)
    for batch, real in enumerate(positions):
        classes, of_token = torch.unique(bits[batch, real], return_inverse=True)
        for index, members in enumerate(classes.tolist()):
            rows = real[of_token == index]
            rows = rows[rows >= offset]
            if members and len(rows):
                keys = real[((classes & members) != 0)[of_token]]
                segments.append(Segment(batch, rows, keys, len(rows) == len(keys), sliding_window))
    return segments, Labels(bits, bits, bits=True)


def sink_positions(
    sinks: int | Tensor, padding_mask: Tensor | None, batch: int, keys: int, device: torch.device
) -> Tensor | None:
    """[B, S] positions of the sinks, -1 where a sequence has fewer; None without sinks."""
    if isinstance(sinks, int) and sinks == 0:
        return None
    mask = sink_keys(keys, sinks, padding_mask, device)
    most = int(mask.sum(dim=1).max())
    if most == 0:
        return None
    order = torch.where(mask, torch.arange(keys, device=device), keys).sort(dim=1).values[:, :most]
    return torch.where(order == keys, -1, order).expand(batch, -1)
