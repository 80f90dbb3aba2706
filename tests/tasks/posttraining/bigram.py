"""A model of two matrices, rows of several answers, and what it says of them in NumPy's float64."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from colossax.nn import Models, param

VOCAB, WIDTH, SEQ, DOCUMENTS = 13, 6, 24, 4


class Table(nnx.Module):
    """What a loss of text asks of a model: a bigram one."""

    def __init__(self, into, out):
        self.into = param(jnp.asarray(into, jnp.float32), ("vocab", "embed"))
        self.out = param(jnp.asarray(out, jnp.float32), ("embed", "vocab"))

    def hidden(self, tokens, *, positions=None, segments=None):
        return self.into[...][tokens], {}

    def head_weight(self):
        return self.out[...]


def models_of(**tables):
    """Models by name, that are there."""
    return Models(
        {name: lambda rngs, one=one: one for name, one in tables.items()}, rngs=nnx.Rngs(0)
    )


def weights_of(seed):
    """Two matrices that float32 holds exactly."""
    rng = np.random.default_rng(seed)
    shapes = ((VOCAB, WIDTH), (WIDTH, VOCAB))
    return [rng.normal(0, 0.7, shape).astype(np.float32).astype(np.float64) for shape in shapes]


def rows_of(lengths, seed=0):
    """A batch: of each row the lengths of prompts and answers, document by document."""
    rng = np.random.default_rng(seed)
    names = ("tokens", "targets", "positions")
    batch = {name: np.zeros((len(lengths), SEQ), np.int32) for name in names}
    batch["segments"] = np.full((len(lengths), SEQ), -1, np.int32)
    batch["weights"] = np.zeros((len(lengths), SEQ), np.float32)
    for row, documents in enumerate(lengths):
        at = 0
        for number, (prompt, answer) in enumerate(documents):
            text = rng.integers(0, VOCAB, prompt + answer)
            span = slice(at, at + len(text))
            batch["tokens"][row, span] = text
            batch["targets"][row, span] = np.append(text[1:], text[-1])
            batch["positions"][row, span] = np.arange(len(text))
            batch["segments"][row, span] = number
            batch["weights"][row, at + prompt - 1 : at + prompt + answer - 1] = 1
            at = span.stop
    return batch


UNEVEN = [
    [(2, 3), (2, 5), (3, 1), (3, 2)],
    [(4, 6), (4, 2)],
    [(1, 1), (1, 9), (2, 4), (2, 3)],
    [(3, 7), (3, 7)],
]
"""Pairs of several lengths, one or two to a row."""


def said(weights, batch):
    """Log-probability of each target, in float64."""
    into, out = weights
    logits = into[batch["tokens"]] @ out
    top = logits.max(-1, keepdims=True)
    logits = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]


def answers(weights, batch):
    """Of each document of the batch, row by row: sum over its answer, and its length."""
    logps, found = said(weights, batch), []
    for row in range(len(logps)):
        for number in range(batch["segments"][row].max() + 1):
            told = (batch["segments"][row] == number) & (batch["weights"][row] > 0)
            found.append((logps[row][told].sum(), told.sum()))
    return np.array(found)


def slope(function, weights, seed=5):
    """Of a function of float64 matrices along a direction, which is given too."""
    rng = np.random.default_rng(seed)
    along = [rng.normal(size=one.shape) for one in weights]
    ends = [
        function([w + sign * 1e-5 * d for w, d in zip(weights, along, strict=True)])
        for sign in (1, -1)
    ]
    return (ends[0] - ends[1]) / 2e-5, along


def loss_of(loss, models, batch):
    """What a step makes of a loss's terms, in one microbatch."""
    terms, metrics = loss(models, {name: jnp.asarray(x) for name, x in batch.items()})
    total = sum(factor * value / count for value, count, factor in terms.values())
    return total, {name: value / count for name, (value, count) in metrics.items()}


def check(loss, truth, batch, models, policy):
    """Value and gradient of a loss of models against a function of the policy's matrices.

    Args:
        loss: `(models, batch) -> terms, metrics`.
        truth: `weights -> number`, in float64.
        batch: Prepared.
        models: `policy -> models`.
        policy: The policy's matrices.
    """

    def of(into, out):
        return loss_of(loss, models(Table(into, out)), batch)[0]

    arrays = [jnp.asarray(one, jnp.float32) for one in policy]
    value, grads = jax.jit(jax.value_and_grad(of, argnums=(0, 1)))(*arrays)
    np.testing.assert_allclose(value, truth(policy), rtol=1e-6, atol=1e-6)
    wanted, along = slope(truth, policy)
    found = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(grads, along, strict=True))
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)
