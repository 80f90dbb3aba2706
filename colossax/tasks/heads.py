"""Losses of encoders, and of heads that tell something else than the next token."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from colossax.config import above
from colossax.errors import InputError
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.next_token import hidden_states, next_token_terms
from colossax.typing import Batch


def masked_token_loss(*, z_loss: float = 0.0) -> Loss:
    """Cross entropy of `targets` where `weights` are: of tokens that were masked.

    As `next_token_loss`, for models whose attention is not causal. The batch is masked already.

    Args:
        z_loss: See `next_token_loss`.
    """

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        return next_token_terms(model, *hidden_states(model, batch, row_keys), batch, z_loss=z_loss)

    return loss


def classification_loss() -> Loss:
    """Cross entropy of classes, of documents or of tokens as the model's head tells them.

    Where the head pools, a batch has `labels`, `[b]`, or `[b, k]` for the first k documents of each
    row; a negative label is none. Else `targets` and `weights` of its tokens, `[b, s]`.

    Cost: classes are few, and their logits are kept whole.
    """

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        told, wanted = _told(model, batch, row_keys)
        labels, weights = wanted
        log_probabilities = jax.nn.log_softmax(told)
        chosen = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]
        count, right = jnp.sum(weights), jnp.argmax(told, axis=-1) == labels
        terms: Terms = {"cross_entropy": (-jnp.sum(chosen * weights), count, 1.0)}
        return terms, {"accuracy": (jnp.sum(right * weights), count)}

    return loss


def value_loss() -> Loss:
    """Squared distance of a head's one number from `values`, of documents or of tokens.

    A batch has `values` `[b]`, `[b, k]` or, where the head does not pool, `[b, s]` with `weights`;
    what is not finite is none.
    """

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        told = _scalars(model, _answers(model, batch, _documents(batch["values"]), row_keys))
        values = batch["values"].reshape(told.shape).astype(jnp.float32)
        weights = jnp.isfinite(values).astype(jnp.float32)
        if model.config.head.pool is None and "weights" in batch:
            weights *= batch["weights"]
        squares = jnp.square(told - jnp.where(jnp.isfinite(values), values, 0.0))
        return {"squared_error": (jnp.sum(squares * weights), jnp.sum(weights), 1.0)}, {}

    return loss


def preference_loss() -> Loss:
    """`-log sigmoid(r_0 - r_1)` of rewards: a row's document 0 is preferred to its document 1.

    Source: Bradley and Terry 1952; Ouyang et al. 2022.
    """

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        rewards = _scalars(model, _answers(model, batch, 2, row_keys))
        there = jnp.any(batch["segments"] == 1, axis=-1) & jnp.any(batch["segments"] == 0, axis=-1)
        margin, weights = rewards[:, 0] - rewards[:, 1], there.astype(jnp.float32)
        count = jnp.sum(weights)
        terms: Terms = {"preference": (-jnp.sum(jax.nn.log_sigmoid(margin) * weights), count, 1.0)}
        return terms, {"accuracy": (jnp.sum((margin > 0) * weights), count)}

    return loss


def contrastive_loss(*, documents: int, temperature: float = 0.05) -> Loss:
    """Cross entropy of each document's partner among the other documents of its row.

    Documents 2i and 2i + 1 of a row are partners, scored by the products of their embeddings. As no
    row sees another, neither microbatches nor a mesh change it.

    Args:
        documents: Of each row, an even number of four or more.
        temperature: By which products are divided.

    Raises:
        InputError: A number is out of its range.
    """
    above(0).check(temperature, "temperature")
    if documents < 4 or documents % 2:
        raise InputError(
            f"contrastive_loss: documents is {documents}; give an even number of 4 or more, for"
            " partners and others"
        )

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        told = _answers(model, batch, documents, row_keys)
        there = jnp.any(batch["segments"][:, None] == jnp.arange(documents)[:, None], axis=-1)
        scores = jnp.einsum("bid,bjd->bij", told, told) / temperature
        seen = there[:, None, :] & ~jnp.eye(documents, dtype=bool)
        partner = jnp.arange(documents) ^ 1
        log_probabilities = jax.nn.log_softmax(jnp.where(seen, scores, -1e30))
        chosen = jnp.take_along_axis(log_probabilities, partner[None, :, None], axis=-1)[..., 0]
        both = there & there[:, partner]
        count = jnp.sum(both).astype(jnp.float32)
        total = -jnp.sum(jnp.where(both, chosen, 0.0))
        right = both & (jnp.argmax(jnp.where(seen, scores, -1e30), axis=-1) == partner)
        return {"contrastive": (total, count, 1.0)}, {"accuracy": (jnp.sum(right), count)}

    return loss


def _told(model: Any, batch: Batch, row_keys: Array | None) -> tuple[Array, tuple[Array, Array]]:
    """Logits of classes, and labels with weights of the same leading dims."""
    head = _head(model)
    if head.outputs is None:
        raise InputError("model.head.outputs: there are none to tell classes by; give their number")
    if head.pool is None:
        told = _answers(model, batch, 1, row_keys)
        return told, (batch["targets"], batch["weights"].astype(jnp.float32))
    if "labels" not in batch:
        raise InputError(
            "batch: it has no 'labels' for a head that pools; give a class for each row, [b], or"
            " for each document, [b, k], negative where there is none"
        )
    labels = batch["labels"]
    told = _answers(model, batch, _documents(labels), row_keys)
    labels = labels.reshape(told.shape[:2])
    return told, (jnp.maximum(labels, 0), (labels >= 0).astype(jnp.float32))


def _documents(labels: Array) -> int:
    return 1 if labels.ndim == 1 else labels.shape[1]


def _head(model: Any) -> Any:
    head = getattr(getattr(model, "config", None), "head", None)
    if head is None:
        raise InputError(
            "model.head: the model has none but that of its vocabulary; give head, as"
            " HeadConfig(outputs=2, pool='first')"
        )
    return head


def _answers(model: Any, batch: Batch, documents: int, row_keys: Array | None) -> Array:
    _head(model)
    hidden, _ = hidden_states(model, batch, row_keys)
    return model.told(hidden, segments=batch.get("segments"), documents=documents)


def _scalars(model: Any, told: Array) -> Array:
    if model.config.head.outputs != 1:
        raise InputError(
            f"model.head.outputs: found {model.config.head.outputs}, and a reward or value is one"
            " number; give 1"
        )
    return told[..., 0]
