"""The loss of images and texts against numpy, what is told by captions, and refusals."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.tasks import image_text_loss

ROWS, WIDTH = 6, 5


def unit(seed, rows=ROWS):
    x = np.random.default_rng(seed).standard_normal((rows, WIDTH))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


TEXTS, IMAGES = unit(0), unit(1)


def model(texts=TEXTS, images=IMAGES, scale=3.0, shift=0.0):
    """Whose embeddings are given."""
    scores = jnp.asarray(scale * images @ texts.T + shift, jnp.float32)
    return types.SimpleNamespace(
        embeddings=lambda tokens, **_: (texts, images), scores=lambda *_: scores
    )


def batch(**more):
    return {
        "tokens": jnp.zeros((ROWS, 2), jnp.int32),
        "pixels": jnp.zeros((ROWS, 1, 1, 1)),
        **{name: jnp.asarray(x) for name, x in more.items()},
    }


def told(loss, *given):
    terms, metrics = loss(*given)
    total, count, coefficient = terms["contrastive"]
    assert coefficient == 1.0
    return float(total), float(count), float(metrics["accuracy"][0] / metrics["accuracy"][1])


def log_softmax(x, axis):
    return x - np.log(np.exp(x).sum(axis=axis, keepdims=True))


@pytest.mark.catches("images-among-texts-alone")
@pytest.mark.catches("own-texts-alone")
def test_softmax_is_of_both_directions():
    scores = 3 * IMAGES @ TEXTS.T
    both = np.diag(log_softmax(scores, 1)), np.diag(log_softmax(scores, 0))
    total, count, right = told(image_text_loss(), model(), batch())
    np.testing.assert_allclose(total, -(both[0] + both[1]).sum() / 2, rtol=1e-6)
    assert count == ROWS
    assert right == pytest.approx((scores.argmax(1) == np.arange(ROWS)).mean())


@pytest.mark.catches("pairs-all-right")
def test_sigmoid_is_of_each_pair_by_itself():
    scores = 3 * IMAGES @ TEXTS.T - 1
    signs = 2 * np.eye(ROWS) - 1
    total, count, _ = told(image_text_loss(form="sigmoid"), model(shift=-1.0), batch())
    np.testing.assert_allclose(total, np.log1p(np.exp(-signs * scores)).sum(), rtol=1e-6)
    assert count == ROWS


@pytest.mark.catches("captions-of-padding")
@pytest.mark.catches("images-of-no-caption")
@pytest.mark.parametrize("form", ["softmax", "sigmoid"])
def test_classes_are_told_by_the_captions_that_are_there(form):
    """Three captions in rows of which the others are no text; two images have none of those."""
    matches = np.array([2, 0, -1, 1, 4, 0], np.int32)
    segments = np.where(np.arange(ROWS)[:, None] < 3, [0, -1], -1).astype(np.int32)
    counted = [0, 1, 3, 5]
    scores = (3 * IMAGES @ TEXTS.T)[:, :3]
    likely = log_softmax(scores, 1)[counted, matches[counted]]
    loss = image_text_loss(form=form)
    total, count, right = told(loss, model(), batch(matches=matches, segments=segments))
    np.testing.assert_allclose(total, -likely.sum(), rtol=1e-6)
    assert count == 4
    assert right == pytest.approx((scores.argmax(1)[counted] == matches[counted]).mean())


def test_without_segments_every_row_is_a_caption():
    matches = np.arange(ROWS, dtype=np.int32)[::-1]
    scores = 3 * IMAGES @ TEXTS.T
    likely = log_softmax(scores, 1)[np.arange(ROWS), matches]
    total, count, _ = told(image_text_loss(), model(), batch(matches=matches))
    np.testing.assert_allclose((total, count), (-likely.sum(), ROWS), rtol=1e-6)


def test_more_texts_than_images_are_no_pairs():
    with pytest.raises(InputError, match="6 images and 4 texts found; give a text for each image"):
        image_text_loss()(model(texts=unit(0, 4)), batch())


@pytest.mark.parametrize(
    ("found", "given", "message"),
    [
        (types.SimpleNamespace(), batch(), "a SimpleNamespace has no embeddings of texts and of"),
        (model(), {"tokens": jnp.zeros((2, 2))}, "batch: it has no 'pixels'; give texts as 'tok"),
        (model(), {"pixels": jnp.zeros((2, 2))}, "batch: it has no 'tokens'; give texts as 'tok"),
    ],
)
def test_what_is_missing_is_refused(found, given, message):
    with pytest.raises(InputError, match=message):
        image_text_loss()(found, given)


def test_an_unknown_form_is_refused():
    with pytest.raises(InputError, match="unknown form 'sigmod'; did you mean 'sigmoid'"):
        image_text_loss(form="sigmod")
