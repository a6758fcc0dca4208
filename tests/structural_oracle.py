"""Which pairs a method that replaces attention reads, as plain loops over positions, written from its definition."""

import torch

BITS = 0xFFFFFFFF


def allowed_pairs(settings, window, query, key, real, state):
    """bool [B, H, Tq, Tk] of real queries; query [B, H, Tq, D], key [B, Hkv, Tk, D], real bool [B, Tk]."""
    batch, heads, queries, _ = query.shape
    keys, shared = key.shape[2], heads // key.shape[1]
    mask = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    for b in range(batch):
        places = [j for j in range(keys) if real[b, j]]
        for h in range(heads):
            k = key[b, h // shared, places]
            for p, j in enumerate(places):
                row = j - (keys - queries)
                if row >= 0:
                    near = {other for other in range(p + 1) if j - places[other] <= window}
                    seen = READS[settings.kind](settings, window, p, query[b, h, row], k[: p + 1], h, state, near)
                    for other in near | seen if settings.kind in WINDOWED else seen:
                        mask[b, h, row, places[other]] = True
    return mask


def _longformer(settings, window, p, q, k, h, state, near):
    def is_global(position):
        return position % settings.global_stride == 0 and position // settings.global_stride < settings.global_tokens

    return set(range(p + 1)) if is_global(p) else {j for j in range(p) if is_global(j)}


def _mix(x):
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & BITS
    return x ^ (x >> 16)


def _bigbird(settings, window, p, q, k, h, state, near):
    size, row, first = settings.block, p // settings.block, settings.global_blocks
    candidates = [c for c in range(first, row) if row * size - (c * size + size - 1) > window]
    number = _mix(_mix(_mix(int(state.seed)) ^ h) ^ row)
    drawn = []
    for turn in range(settings.random_blocks):
        last = len(candidates) - settings.random_blocks + turn
        if last >= 0:
            pick = _mix(number ^ turn) % (last + 1)
            drawn.append(last if pick in drawn else pick)
    blocks = set(range(first)) | {candidates[number] for number in drawn}
    return {j for j in range(p + 1) if j // size in blocks}


def _routing(settings, window, p, q, k, h, state, near):
    centroids = state.centroids[h].to(q.dtype)

    def cluster(x):
        return int((centroids @ x).argmax())

    members = [j for j in range(p + 1) if j not in near and cluster(k[j]) == cluster(q)]
    return set(members[-settings.cluster_tokens :])


def _s2(settings, window, p, q, k, h, state, near):
    shard = h % settings.stride
    return {j for j in range(p + 1) if j // settings.block % settings.stride == shard}


def _best(size, count, p, score):
    own = p // size
    ranked = sorted(range(own), key=score, reverse=True)
    blocks = {own, *ranked[: count - 1]}
    return {j for j in range(p + 1) if j // size in blocks}


def _moba(settings, window, p, q, k, h, state, near):
    size = settings.block
    return _best(size, settings.top_k, p, lambda c: float(q @ k[c * size : (c + 1) * size].mean(dim=0)))


def _quest(settings, window, p, q, k, h, state, near):
    size = settings.page

    def bound(c):
        page = k[c * size : (c + 1) * size]
        return sum(float(max(q[d] * page[:, d].min(), q[d] * page[:, d].max())) for d in range(len(q)))

    return _best(size, settings.pages, p, bound)


WINDOWED = {"longformer", "bigbird", "routing_transformer", "s2"}
READS = {
    "longformer": _longformer,
    "bigbird": _bigbird,
    "routing_transformer": _routing,
    "s2": _s2,
    "moba": _moba,
    "quest": _quest,
}
