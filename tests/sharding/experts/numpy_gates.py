"""Gates as loops over tokens, in float64: the truth."""

import itertools

import numpy as np


def softmax(x, axis=-1):
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(values, k):
    """Numbers of the k highest, the lowest number first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def topk(
    logits,
    *,
    k,
    score="softmax",
    renormalise=False,
    scale=1.0,
    groups=0,
    kept_groups=0,
    group_score="max",
    bias=None,
):
    """Of one token: `{expert: weight}`."""
    scores = softmax(logits) if score == "softmax" else sigmoid(logits)
    ranked = scores + (0 if bias is None else bias)
    if groups:
        parts = ranked.reshape(groups, -1)
        if group_score == "max":
            values = [max(part) for part in parts]
        else:
            values = [sum(sorted(part)[-2:]) for part in parts]
        kept = best(values, kept_groups)
        size = parts.shape[1]
        ranked = np.array([v if i // size in kept else -np.inf for i, v in enumerate(ranked)])
    chosen = best(ranked, k)
    total = sum(scores[i] for i in chosen) if renormalise else 1.0
    return {i: scores[i] / total * scale for i in chosen}


def after_softmax(logits, *, k):
    """gpt-oss: the softmax of the chosen logits."""
    chosen = best(logits, k)
    return dict(zip(chosen, softmax(np.array([logits[i] for i in chosen])), strict=True))


def ktop1(logits, *, k):
    found = {}
    for number, part in enumerate(logits.reshape(k, -1)):
        shares = softmax(part)
        at = best(shares, 1)[0]
        found[number * len(part) + at] = shares[at]
    return found


def hierarchical(logits, *, k, groups):
    shares = softmax(logits).reshape(groups, -1)
    group = best(shares.sum(axis=1), 1)[0]
    chosen = best(shares[group], k)
    total = sum(shares[group][i] for i in chosen)
    return {group * shares.shape[1] + i: shares[group][i] / total for i in chosen}


def gshard(logits, *, noise):
    """A sequence, `[s, e]`, with noise of the second choice: `[{expert: weight}]` before limits."""
    found = []
    for row, drawn in zip(logits, noise, strict=True):
        shares = softmax(row)
        first = best(row, 1)[0]
        second = best([v if i != first else -np.inf for i, v in enumerate(row + drawn)], 1)[0]
        total = shares[first] + shares[second]
        found.append({first: shares[first] / total, second: shares[second] / total})
    return found


def limited(choices, most, *, order=None, firsts_first=False):
    """Drops what experts do not take of a sequence.

    Args:
        choices: Of each token `{expert: weight}`, in the order of its choices.
        most: Choices that an expert takes.
        order: Tokens, those that come first before others.
        firsts_first: All first choices before any second.
    """
    order = range(len(choices)) if order is None else order
    k = max(map(len, choices))
    pairs = [(token, place) for token in order for place in range(k)]
    if firsts_first:
        pairs = [(token, place) for place in range(k) for token in order]
    taken, kept, dropped = {}, [{} for _ in choices], 0
    for token, place in pairs:
        experts = list(choices[token])
        if place >= len(experts):
            continue
        expert = experts[place]
        if taken.get(expert, 0) < most:
            taken[expert] = taken.get(expert, 0) + 1
            kept[token][expert] = choices[token][expert]
        else:
            dropped += 1
    return kept, dropped


def dense_to_sparse(logits, *, threshold, temperature, noise):
    shares = softmax((logits + noise) / temperature)
    top = best(shares, 1)[0]
    return {i: share for i, share in enumerate(shares) if share > threshold or i == top}


def expert_choice(logits, *, k):
    """A sequence: `[{expert: weight}]`."""
    length, experts = logits.shape
    shares = softmax(logits)
    found = [{} for _ in range(length)]
    for expert in range(experts):
        for token in best(shares[:, expert], -(-k * length // experts)):
            found[token][expert] = shares[token, expert]
    return found


def best_assignment(logits):
    """Highest sum of scores of an even assignment, tried one by one."""
    length, experts = logits.shape
    seats = [e for e in range(experts) for _ in range(-(-length // experts))]
    return max(
        sum(logits[t, e] for t, e in enumerate(chosen))
        for chosen in set(itertools.permutations(seats, length))
    )
