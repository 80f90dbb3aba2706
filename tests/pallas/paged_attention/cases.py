"""Sequences in pages, and what attention to them is, token by token, in float64."""

import numpy as np

PAGE, KV_HEADS = 16, 2


def drawn(lengths, *, heads, h, width=1, layers=2, page=PAGE, seed=0, spare=3):
    """Queries `[g, w, k, r, h]`, keys and values in pages, pages of each sequence.

    What belongs to nobody is no number; behind its last page a sequence names any.
    """
    rng = np.random.default_rng(seed)
    counts = [-(-length // page) for length in lengths]
    pages, most = sum(counts) + spare, max(counts) + 1
    order = rng.permutation(pages)
    rows = rng.integers(-5, 2 * pages, (len(lengths), most)).astype(np.int32)
    keys = np.full((layers, pages, page, KV_HEADS, h), np.nan)
    values = np.full((layers, pages, page, KV_HEADS, h), np.inf)
    at = 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rows[i, :count] = order[at : at + count]
        at += count
        for slot in range(length):
            place = rows[i, slot // page], slot % page
            keys[:, *place] = rng.normal(size=(layers, KV_HEADS, h))
            values[:, *place] = rng.normal(size=(layers, KV_HEADS, h))
    q = rng.normal(size=(len(lengths), width, KV_HEADS, heads // KV_HEADS, h))
    return q, keys, values, rows


def truth(q, keys, values, layer, rows, sees, *, scale, soft_cap=None, sinks=None):
    """Output, log-partition and what each token gave to each slot, slot by slot.

    Args:
        q: Queries.
        keys: Of all layers.
        values: Likewise.
        layer: Which.
        rows: Pages of each group.
        sees: Of a group and one of its tokens, the slots that it sees.
        scale: Of the products.
        soft_cap: Bound of the logits.
        sinks: One more logit of each query head.
    """
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    groups, width, kv_heads, ratio, _ = q.shape
    page = keys.shape[2]
    out = np.zeros((*q.shape[:4], values.shape[-1]))
    lse = np.full(q.shape[:4], -np.inf)
    mass = np.zeros((groups, width, kv_heads, rows.shape[1] * page))
    for g, w, k, r in np.ndindex(groups, width, kv_heads, ratio):
        slots = sees(g, w)
        where = [(layer, rows[g, slot // page], slot % page, k) for slot in slots]
        logits = np.asarray([scale * q[g, w, k, r] @ keys[at] for at in where])
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        more = [] if sinks is None else [sinks[k, r]]
        total = np.sum(np.exp(np.concatenate([logits, more])))
        if total:
            lse[g, w, k, r] = np.log(total)
        for slot, at, logit in zip(slots, where, logits, strict=True):
            out[g, w, k, r] += np.exp(logit) / total * values[at]
            mass[g, w, k, slot] += np.exp(logit) / total
    return out, lse, mass
