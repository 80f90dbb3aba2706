"""Losses of encoders, and of heads that tell something else than the next token."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from colossax.config import above, at_least
from colossax.errors import InputError
from colossax.nn.config.head import POOLS
from colossax.step.loss import Loss, Sums, Terms, any_order
from colossax.tasks.next_token import (
    hidden_states,
    next_token_terms,
    real_tokens,
    with_counted,
)
from colossax.typing import PIXELS, TOKEN_VALUES, Batch


def masked_token_loss(*, z_loss: float = 0.0) -> Loss:
    """Cross entropy of `targets` where `weights` are: of tokens that were masked.

    As `next_token_loss`, for models whose attention is not causal. The batch is masked already, as
    `data.MaskedRows` does. A term `masked`, which adds nothing, says which share of the tokens it
    is, so that a step's `tokens` are those of its text.

    Args:
        z_loss: See `next_token_loss`.

    Raises:
        InputError: It is below 0 or not finite.

    Cost: as if every token were masked: their logits are made too, and weigh nothing.
    """
    at_least(0).check(z_loss, "z_loss")

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        if getattr(getattr(model, "config", None), "causal", False):
            raise InputError(
                "masked_token_loss: the model's attention is causal, so a masked token is told by"
                " those before it alone; use next_token_loss, with rows that are not masked"
            )
        hidden = hidden_states(model, batch, row_keys)
        masked = jnp.sum(batch["weights"].astype(jnp.float32))
        beside: Terms = {"masked": (masked, real_tokens(batch), 0.0)}
        return next_token_terms(model, *hidden, batch, z_loss=z_loss, beside=beside)

    return loss


def classification_loss() -> Loss:
    """Cross entropy of classes, of documents or of tokens as the model's head tells them.

    Where the head pools, a batch has `labels`, `[b]`, or `[b, k]` for the first k documents of each
    row; a negative label is none, and so is that of a document which is not there. Else `targets`
    and `weights` of its tokens, `[b, s]`. Each document, or token, counts alike.

    Cost: classes are few, and their logits are kept whole.
    """

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        told, labels, weights = _classes(model, batch, row_keys)
        log_probabilities = jax.nn.log_softmax(told)
        chosen = jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]
        count, right = jnp.sum(weights), jnp.argmax(told, axis=-1) == labels
        terms: Terms = {"cross_entropy": (-jnp.sum(chosen * weights), count, 1.0)}
        return terms, {"accuracy": (jnp.sum(right * weights), count)}

    return loss


def value_loss() -> Loss:
    """Squared distance of a head's one number from what is given, of documents or of tokens.

    Where the head pools, a batch has `values`, `[b]`, or `[b, k]` for the first k documents of each
    row; else `token_values`, `[b, s]`, and, where not all count, `weights`. What is not finite is
    none, and neither is what is given of padding or of a document that is not there.
    """

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        if _head(model).pool is None:
            values, there = batch[TOKEN_VALUES], jnp.ones((), bool)
            told, _ = values_of_tokens(model, batch, row_keys)
            if "segments" in batch:
                there = batch["segments"] >= 0
            weights = jnp.where(there, batch.get("weights", 1.0), 0.0)
        else:
            documents = _documents(batch["values"])
            told = _scalars(model, _answers(model, batch, documents, row_keys))
            values, weights = batch["values"].reshape(told.shape), _there(batch, documents)
        finite = jnp.isfinite(values)
        weights = jnp.broadcast_to(weights, told.shape).astype(jnp.float32) * finite
        squares = jnp.square(told - jnp.where(finite, values, 0.0).astype(jnp.float32))
        return {"squared_error": (jnp.sum(squares * weights), jnp.sum(weights), 1.0)}, {}

    return loss


def values_of_tokens(
    model: Any, batch: Batch, row_keys: Array | None = None
) -> tuple[Float[Array, "b s"], dict[str, Any]]:
    """One number of each token, by a head that does not pool; and what the layers counted.

    Raises:
        InputError: When traced: the model has no such head.
    """
    if _head(model).pool is not None:
        raise InputError(
            f"model.head.pool: found '{_head(model).pool}', and a value is told of each token;"
            " leave pool out"
        )
    hidden, sums = hidden_states(model, batch, row_keys)
    return _scalars(model, model.told(hidden, segments=batch.get("segments"), documents=1)), sums


def preference_loss(*, documents: int = 2, margin: float = 0.0) -> Loss:
    """`-log sigmoid(r_2i - r_2i+1 - margin)`: documents 2i of a row are preferred to 2i + 1.

    Pairs of which one is not there count for nothing, nor do those of which no token has a weight,
    where a batch has `weights`.

    Args:
        documents: Of each row, an even number.
        margin: By which the reward of what is preferred is to be ahead, 0 or more.

    Raises:
        InputError: A number is out of its range.

    Source: Bradley and Terry 1952; Ouyang et al. 2022; margins: Touvron et al. 2023, Llama 2.
    """
    at_least(0).check(margin, "preference_loss: margin")
    if documents < 2 or documents % 2:
        raise InputError(
            f"preference_loss: documents is {documents}; give an even number of 2 or more, for"
            " pairs"
        )

    @any_order
    def loss(model: Any, batch: Batch, row_keys: Array | None = None) -> tuple[Terms, Sums]:
        _check_pools(model)
        hidden, sums = hidden_states(model, batch, row_keys)
        told = model.told(hidden, segments=batch.get("segments"), documents=documents)
        rewards, there = _scalars(model, told), _weighed(batch, documents)
        chosen, rejected = rewards[:, ::2], rewards[:, 1::2]
        ahead = chosen - rejected
        weights = (there[:, ::2] & there[:, 1::2]).astype(jnp.float32)
        lost, count = -jax.nn.log_sigmoid(ahead - margin), jnp.sum(weights)
        terms: Terms = {"preference": (jnp.sum(lost * weights), count, 1.0)}
        metrics: Sums = {
            name: (jnp.sum(each * weights), count)
            for name, each in {
                "accuracy": ahead > 0,
                "margin": ahead,
                "chosen_reward": chosen,
                "rejected_reward": rejected,
            }.items()
        }
        return with_counted(model, batch, sums, terms, metrics)

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
        _check_pools(model)
        told, there = _answers(model, batch, documents, row_keys), _there(batch, documents)
        scores = jnp.einsum("bid,bjd->bij", told, told) / temperature
        seen = there[:, None, :] & ~jnp.eye(documents, dtype=bool)
        scores = jnp.where(seen, scores, -1e30)
        partner = jnp.arange(documents) ^ 1
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), partner[None, :, None], axis=-1)[
            ..., 0
        ]
        both = there & there[:, partner]
        count = jnp.sum(both).astype(jnp.float32)
        right = both & (jnp.argmax(scores, axis=-1) == partner)
        terms: Terms = {"contrastive": (-jnp.sum(jnp.where(both, chosen, 0.0)), count, 1.0)}
        return terms, {"accuracy": (jnp.sum(right), count)}

    return loss


def _classes(model: Any, batch: Batch, row_keys: Array | None) -> tuple[Array, Array, Array]:
    """Logits of classes; labels and weights of the same leading dims."""
    head = _head(model)
    if head.outputs is None:
        raise InputError("model.head.outputs: there are none to tell classes by; give their number")
    if head.pool is None:
        labels, weights = batch["targets"], batch["weights"].astype(jnp.float32)
        return _answers(model, batch, 1, row_keys), jnp.maximum(labels, 0), weights * (labels >= 0)
    if "labels" not in batch:
        raise InputError(
            "batch: it has no 'labels' for a head that pools; give a class for each row, [b], or"
            " for each document, [b, k], negative where there is none"
        )
    documents = _documents(batch["labels"])
    told, there = _answers(model, batch, documents, row_keys), _there(batch, documents)
    labels = batch["labels"].reshape(there.shape)
    return told, jnp.maximum(labels, 0), ((labels >= 0) & there).astype(jnp.float32)


def _documents(labels: Array) -> int:
    return 1 if labels.ndim == 1 else labels.shape[1]


def _there(batch: Batch, documents: int) -> Bool[Array, "b k"]:
    """Which of the first documents a row has; without segments it is one."""
    numbers, segments = jnp.arange(documents), batch.get("segments")
    if segments is None:
        rows = batch[PIXELS] if PIXELS in batch else batch["tokens"]
        return jnp.broadcast_to(numbers == 0, (rows.shape[0], documents))
    return jnp.any(segments[:, None] == numbers[:, None], axis=-1)


def _weighed(batch: Batch, documents: int) -> Bool[Array, "b k"]:
    """Which of those are there and have a token that counts."""
    there, weights = _there(batch, documents), batch.get("weights")
    if weights is None:
        return there
    segments = batch.get("segments", jnp.zeros(weights.shape, jnp.int32))
    own = segments[:, None] == jnp.arange(documents)[:, None]
    return there & jnp.any(own & (weights > 0)[:, None], axis=-1)


def _head(model: Any) -> Any:
    head = getattr(getattr(model, "config", None), "head", None)
    if head is None:
        raise InputError(
            "model.head: the model has none but that of its vocabulary; give head, as"
            " HeadConfig(outputs=2, pool='first')"
        )
    return head


def _check_pools(model: Any) -> None:
    if _head(model).pool is None:
        raise InputError(
            "model.head.pool: the head tells something of each token, and documents are compared;"
            f" give pool, one of {', '.join(POOLS)}"
        )


def _answers(model: Any, batch: Batch, documents: int, row_keys: Array | None) -> Array:
    hidden, _ = hidden_states(model, batch, row_keys)
    return model.told(hidden, segments=batch.get("segments"), documents=documents)


def _scalars(model: Any, told: Array) -> Array:
    if model.config.head.outputs != 1:
        raise InputError(
            f"model.head.outputs: found {model.config.head.outputs}, and a reward or value is one"
            " number; give 1"
        )
    return told[..., 0]
