"""Losses of two encoders, of texts and of images, whose embeddings are compared."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from colossax.config import nearest
from colossax.errors import InputError
from colossax.step.loss import Loss, Sums, Terms, whole_batch
from colossax.typing import MATCHES, PIXELS, Batch

FORMS = ("softmax", "sigmoid")


def image_text_loss(*, form: str = "softmax") -> Loss:
    """How far each image of a global batch is from scoring best with its own text.

    A batch has `pixels` and `tokens`, an image and its text in each row, and `segments` where texts
    do not say themselves where they end. With scores s of images i and texts t,

        softmax (CLIP):   -(log softmax_t(s_i)[i] + log softmax_i(s_t)[t]) / 2, mean over pairs
        sigmoid (SigLIP): -sum_t log sigmoid(s_it if i is t's image, else -s_it), mean over images

    Every text of the global batch is another image's negative, on whatever device it is; so a plan
    with several microbatches is refused, see `step.whole_batch`.

    To evaluate, a batch may have `matches` too: of each image the row of its text, negative for
    none. Then some rows of tokens may be padding alone, which is no text, and the loss is the cross
    entropy of the images' texts: classes that are told by captions. `accuracy` is the share of
    images that score best with their text.

    Args:
        form: `softmax` or `sigmoid`.

    Raises:
        InputError: It is another.

    Cost: of b pairs with embeddings of w numbers 4 b^2 w FLOPs in forward; the texts' embeddings
    are gathered over the axes that split the batch, 4 b w bytes, and their gradients summed; a
    device keeps the scores of its images with all texts.
    """
    if form not in FORMS:
        raise InputError(f"image_text_loss: unknown form '{form}'{nearest(form, FORMS)}")

    @whole_batch
    def loss(model: Any, batch: Batch) -> tuple[Terms, Sums]:
        _check_batch(model, batch)
        given = {"pixels": batch[PIXELS], "segments": batch.get("segments")}
        scores = model.scores(*model.embeddings(batch["tokens"], **given))
        if MATCHES in batch:
            return _told_by_captions(scores, batch)
        if scores.shape[0] != scores.shape[1]:
            raise InputError(
                f"batch: {scores.shape[0]} images and {scores.shape[1]} texts found; give a text"
                f" for each image, or say by '{MATCHES}' which is whose"
            )
        count = jnp.float32(len(scores))
        own = jnp.arange(scores.shape[0])[:, None] == jnp.arange(scores.shape[1])
        found = (_softmax if form == "softmax" else _sigmoid)(scores, own)
        right = jnp.sum(jnp.argmax(scores, axis=1) == jnp.arange(len(scores)))
        terms: Terms = {"contrastive": (found, count, 1.0)}
        return terms, {"accuracy": (right, count)}

    return loss


def _softmax(scores: Float[Array, "i t"], own: Bool[Array, "i t"]) -> Array:
    """Of images among the texts and of texts among the images, summed over pairs."""
    kept = jnp.sum(jnp.where(own, scores, 0.0))
    images = jnp.sum(jax.nn.logsumexp(scores, axis=1))
    texts = jnp.sum(jax.nn.logsumexp(scores, axis=0))
    return (images + texts) / 2 - kept


def _sigmoid(scores: Float[Array, "i t"], own: Bool[Array, "i t"]) -> Array:
    """Of every pair by itself, summed."""
    return -jnp.sum(jax.nn.log_sigmoid(jnp.where(own, scores, -scores)))


def _told_by_captions(scores: Float[Array, "i t"], batch: Batch) -> tuple[Terms, Sums]:
    """Cross entropy of the text of each image among all that are there."""
    there = jnp.ones(scores.shape[1], bool)
    if "segments" in batch:
        there = jnp.any(batch["segments"] >= 0, axis=1)
    matches = batch[MATCHES]
    place = jnp.clip(matches, 0, len(there) - 1)
    weights = ((matches >= 0) & (matches < len(there)) & there[place]).astype(jnp.float32)
    scores = jnp.where(there, scores, -1e30)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), place[:, None], axis=1)[:, 0]
    count, right = jnp.sum(weights), jnp.argmax(scores, axis=1) == matches
    terms: Terms = {"contrastive": (-jnp.sum(jnp.where(weights > 0, chosen, 0.0)), count, 1.0)}
    return terms, {"accuracy": (jnp.sum(right * weights), count)}


def _check_batch(model: Any, batch: Batch) -> None:
    if not hasattr(model, "embeddings"):
        raise InputError(
            f"image_text_loss: a {type(model).__name__} has no embeddings of texts and of images;"
            " give a nn.DualEncoder, as CLIPConfig describes"
        )
    lacking = [name for name in ("tokens", PIXELS) if name not in batch]
    if lacking:
        raise InputError(
            f"batch: it has no '{lacking[0]}'; give texts as 'tokens', [batch, seq], and images as"
            f" '{PIXELS}', [batch, height, width, channels]"
        )
