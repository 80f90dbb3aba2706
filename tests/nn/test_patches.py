"""Patches of images against a convolution written out, and what is refused of images."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.errors import InputError
from colossax.models import BERTConfig, ViTConfig, maker
from colossax.nn import (
    Decoder,
    DecoderConfig,
    HeadConfig,
    PatchConfig,
    TransformConfig,
    describe,
    pure,
)
from colossax.nn.decoder.head import pooled
from colossax.nn.decoder.patches import Patches
from colossax.planner.counting.traced_flops import traced_flops
from colossax.step.checks.given import known_numbers
from colossax.tasks import classification_loss

SIZES = {"embed": 12, "layers": 2, "heads": 3, "mlp": 16, "init_std": 0.3}
IMAGES = {"height": 6, "width": 20, "channels": 2, "patch_height": 2, "patch_width": 4}
CONFIG = ViTConfig(**SIZES, **IMAGES, head=HeadConfig(outputs=3, pool="first"))


def pixels(rows=3, **changes):
    sizes = {**IMAGES, **changes}
    shape = (rows, sizes["height"], sizes["width"], sizes["channels"])
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def convolved(images, kernel, bias):
    """A convolution whose stride is its kernel's size: each output a sum over a window."""
    height, width = kernel.shape[:2]
    rows, columns = images.shape[1] // height, images.shape[2] // width
    out = np.zeros((len(images), rows, columns, kernel.shape[-1]))
    for row, column in np.ndindex(rows, columns):
        for y, x in np.ndindex(height, width):
            seen = np.asarray(images)[:, row * height + y, column * width + x]
            out[:, row, column] += seen.astype(np.float64) @ kernel[y, x]
    return out.reshape(len(images), rows * columns, -1) + bias


def made(**changes):
    patches = dataclasses.replace(CONFIG.decoder().patches, **changes)
    sizes = {"max_seq": patches.tokens, "learned_positions": patches.tokens}
    config = dataclasses.replace(CONFIG.decoder(), patches=patches, **sizes)
    part = Patches(config, patches, rngs=nnx.Rngs(0))
    for leaf, key in ((part.map.b, 1), (part.class_token, 2)):
        if leaf is not None:
            leaf[...] = jax.random.normal(jax.random.key(key), leaf.shape)
    return part


@pytest.mark.catches("patches-by-column")
@pytest.mark.catches("class-token-last")
@pytest.mark.catches("class-token-with-bias")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("class_token", [True, False])
def test_patches_are_a_convolution(bias, class_token):
    part = made(bias=bias, class_token=class_token)
    images = pixels()
    added = np.asarray(part.map.b[...]) if bias else 0.0
    want = convolved(images, np.asarray(part.map.w[...]), added)
    if class_token:
        token = np.broadcast_to(np.asarray(part.class_token[...]), (len(images), 1, 12))
        want = np.concatenate([token, want], axis=1)
    np.testing.assert_allclose(part(images), want, rtol=0, atol=1e-5)


def test_gradients_are_those_of_a_convolution():
    part, images = made(), pixels()
    out = jax.random.normal(jax.random.key(3), (3, 16, 12))

    def ours(kernel, bias, token):
        given = {"map": {"w": kernel, "b": bias}, "class_token": token}
        return jnp.sum(nnx.merge(nnx.split(part)[0], given)(images) * out)

    def theirs(kernel, bias, token):
        found = jax.lax.conv_general_dilated(
            images, kernel, (2, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).reshape(3, 15, 12)
        token = jnp.broadcast_to(token, (3, 1, 12))
        return jnp.sum(jnp.concatenate([token, found + bias], axis=1) * out)

    given = (part.map.w[...], part.map.b[...], part.class_token[...])
    found, want = (jax.grad(f, argnums=(0, 1, 2))(*given) for f in (ours, theirs))
    for mine, their in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, their, rtol=0, atol=1e-4)


def test_the_class_token_sees_every_patch():
    model = Decoder(CONFIG.decoder(), rngs=nnx.Rngs(0))
    run, images = jax.jit(lambda images: model(pixels=images)), pixels(1)
    first = run(images)
    for row, column in np.ndindex(3, 5):
        other = images.at[0, 2 * row, 4 * column].add(1)
        assert np.abs(run(other) - first).max() > 1e-4


def test_whole_numbers_are_pixels_too():
    model = Decoder(CONFIG.decoder(), rngs=nnx.Rngs(0))
    images = jax.random.randint(jax.random.key(0), (2, 6, 20, 2), 0, 16).astype(jnp.uint8)
    want = model(pixels=images.astype(jnp.float32))
    np.testing.assert_array_equal(model(pixels=images), want)


@pytest.mark.catches("flops-without-patches")
def test_flops_are_those_of_its_matmuls():
    """Patches and the class token each cost a token; the head one row of each image."""
    config = CONFIG.decoder()
    layer = 4 * 12 * 12 + 2 * 12 * 16
    weights = 2 * layer + 2 * 4 * 2 * 12
    assert config.flops_per_token == 6 * weights
    assert config.train_flops_per_token(16) == 6 * weights + 12 * 12 * 2 * 16
    spec, images = describe(maker(CONFIG)), pixels()
    params = pure(maker(CONFIG)(nnx.Rngs(0)))
    traced = jax.jit(lambda p: spec.merge(p).hidden(pixels=images)[0]).trace(params)
    found = traced_flops(traced.jaxpr).flops
    assert 3 * found == config.train_flops_per_token(16) * 16 * len(images)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (3, 6, 20, 3),
            r"batch 'pixels': found shape \[3, 6, 20, 3\], and the model's images are 6 high and 20"
            r" wide with 2 channels; give \[batch, 6, 20, 2\], the channels last",
        ),
        ((3, 20, 6, 2), r"found shape \[3, 20, 6, 2\]"),
        ((3, 2, 6, 20), r"found shape \[3, 2, 6, 20\]"),
    ],
)
@pytest.mark.catches("pixels-unchecked")
def test_images_of_another_size_are_refused(shape, message):
    batch = {"pixels": jnp.zeros(shape), "labels": jnp.zeros(3, jnp.int32)}
    with pytest.raises(InputError, match=message):
        classification_loss()(Decoder(CONFIG.decoder(), rngs=nnx.Rngs(0)), batch)


def test_pixels_and_tokens_go_to_models_that_read_them():
    images = Decoder(CONFIG.decoder(), rngs=nnx.Rngs(0))
    words = maker(BERTConfig(vocab=8, embed=8, layers=1, heads=2, mlp=8))(nnx.Rngs(0))
    with pytest.raises(InputError, match="hidden: the model reads images, and tokens are given"):
        images(jnp.zeros((1, 16), jnp.int32))
    with pytest.raises(InputError, match="hidden: the model reads tokens, and pixels are given"):
        words(pixels=pixels())
    with pytest.raises(InputError, match="give either tokens or embeddings or pixels"):
        words(jnp.zeros((3, 8), jnp.int32), pixels=pixels())
    with pytest.raises(InputError, match="where logits of the vocabulary are asked for"):
        images.cache_spec(seats=1, slots=8)
    with pytest.raises(InputError, match="where logits of the vocabulary are asked for"):
        images.head_weight()


def test_labels_are_checked_and_there_are_no_tokens_to_check():
    infos = describe(maker(CONFIG)).infos
    assert known_numbers(infos) == {"labels": 3}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patches": None}, "model.vocab: found 0 and no patches; give the tokens of a"),
        ({"vocab": 8}, "model.vocab: found 8 and patches of images; give the tokens of a"),
        ({"head": None}, "model.head: a model of images has no vocabulary to tell; give head, as"),
        ({"causal": True}, "model.patches: causal or another max_seq beside patches"),
        ({"max_seq": 15}, "and max_seq is their 16 tokens"),
        ({"token_types": 2}, "model.patches: token_types beside patches"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG.decoder(), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"patch_height": 4},
            "model.patch_height: patches of 4 pixels do not divide the image's height of 6; give"
            " one that does, or resize the images to a height of 4",
        ),
        ({"patch_width": 3}, "model.patch_width: .* width of 20; .* to a width of 18"),
        ({"patch_width": 24}, "model.patch_width: .* to a width of 24"),
        ({"heads": 5}, "5 heads do not divide embed 12"),
        ({"channels": 0}, "model.channels: found 0; give 1 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(CONFIG, **fields)


def test_a_decoder_of_no_tokens_is_refused():
    sizes = {"embed": 8, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 4, "mlp": 8}
    with pytest.raises(InputError, match="model.vocab: found 0 and no patches"):
        DecoderConfig(vocab=0, max_seq=8, **sizes)


def test_grid_of_patches():
    patches = PatchConfig(height=6, width=20, patch_height=2, patch_width=4)
    assert (patches.grid, patches.patches, patches.tokens, patches.numbers) == ((3, 5), 15, 16, 24)


@pytest.mark.catches("mean-with-the-first")
def test_the_first_token_and_the_mean_of_the_others():
    """Of each document of a row; of one token alone the mean of no others is zeros."""
    hidden = jax.random.normal(jax.random.key(0), (2, 6, 4))
    segments = jnp.array([[0, 0, 0, 1, 1, -1], [0, 1, 1, 1, -1, -1]])
    found = pooled(hidden, "first_mean", segments, 2)
    x = np.asarray(hidden)
    want = [
        [[*x[0, 0], *x[0, 1:3].mean(0)], [*x[0, 3], *x[0, 4]]],
        [[*x[1, 0], *np.zeros(4)], [*x[1, 1], *x[1, 2:4].mean(0)]],
    ]
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-7)


def test_a_transform_is_as_wide_as_one_state():
    with pytest.raises(InputError, match="pool 'first_mean' gives two; leave one of them out"):
        HeadConfig(outputs=3, pool="first_mean", transform=TransformConfig())
