"""Frames of sound against convolutions written out, and what is refused of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.errors import InputError
from colossax.models import T5Config, WhisperConfig, maker
from colossax.nn import Decoder, EncoderDecoder, FramesConfig, describe
from colossax.nn.decoder.frames import Frames, sinusoids
from colossax.planner.counting.traced_flops import traced_flops

SIZES = {"vocab": 16, "embed": 12, "layers": 2, "decoder_layers": 1, "heads": 3, "mlp": 16}
CONFIG = WhisperConfig(
    **SIZES,
    decoder_heads=2,
    decoder_mlp=20,
    mels=5,
    max_source=8,
    max_seq=8,
    start=1,
    eos=2,
    init_std=0.3,
)
READ, WRITTEN = 16, 6
"""Frames, and tokens."""


def sound(rows=2, frames=READ):
    draw = np.random.default_rng(0)
    return jnp.asarray(draw.standard_normal((rows, frames, 5)), jnp.float32)


def tokens(rows=2):
    return jnp.asarray(np.random.default_rng(1).integers(0, 16, (rows, WRITTEN)), jnp.int32)


def made():
    encoder = CONFIG.encoder()
    part = Frames(encoder, encoder.frames, rngs=nnx.Rngs(0))
    for linear, key in ((part.first, 1), (part.second, 2)):
        linear.b[...] = jax.random.normal(jax.random.key(key), linear.b.shape)
    return part


def convolved(x, kernel, bias, stride):
    """Of kernels `[in, 3, out]`: each output the sum over a place and its neighbours."""
    out = np.zeros((len(x), x.shape[1] // stride, kernel.shape[2]))
    for place in range(out.shape[1]):
        for tap in range(3):
            at = stride * place + tap - 1
            if 0 <= at < x.shape[1]:
                out[:, place] += np.asarray(x[:, at], np.float64) @ kernel[:, tap]
    return out + bias


@pytest.mark.catches("frames-behind-unseen")
@pytest.mark.catches("second-of-a-pair-first")
def test_tokens_are_two_convolutions():
    part, x = made(), sound()
    for linear, stride in ((part.first, 1), (part.second, 2)):
        kernel, bias = (np.asarray(a[...], np.float64) for a in (linear.w, linear.b))
        x = jax.nn.gelu(convolved(x, kernel, bias, stride), approximate=False)
    found = part(sound())
    assert found.shape == (2, READ // 2, 12)
    np.testing.assert_allclose(found, x, rtol=0, atol=1e-5)


def test_gradients_are_those_of_convolutions():
    part, x = made(), sound()
    out = jax.random.normal(jax.random.key(3), (2, READ // 2, 12))
    given = [a[...] for linear in (part.first, part.second) for a in (linear.w, linear.b)]

    def ours(w1, b1, w2, b2):
        held = {"first": {"w": w1, "b": b1}, "second": {"w": w2, "b": b2}}
        return jnp.sum(nnx.merge(nnx.split(part)[0], held)(x) * out)

    def theirs(w1, b1, w2, b2):
        y = x
        for w, b, stride in ((w1, b1, 1), (w2, b2, 2)):
            y = jax.lax.conv_general_dilated(
                y, w, (stride,), [(1, 1)], dimension_numbers=("NWC", "IWO", "NWC")
            )
            y = jax.nn.gelu(y + b, approximate=False)
        return jnp.sum(y * out)

    found, want = (jax.grad(f, argnums=(0, 1, 2, 3))(*given) for f in (ours, theirs))
    for mine, their in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, their, rtol=0, atol=1e-4)


@pytest.mark.catches("cosines-first")
def test_positions_are_sines_and_cosines():
    """Of waves from a turn in 2 pi tokens to one in 10,000 times as many."""
    found = sinusoids(9, 8)
    for row in range(9):
        for i in range(4):
            angle = row / 10_000 ** (i / 3)
            np.testing.assert_allclose(found[row, i], np.sin(angle), atol=1e-6)
            np.testing.assert_allclose(found[row, 4 + i], np.cos(angle), atol=1e-6)
    with pytest.raises(InputError, match="model.sinusoids: 7 numbers of a position are"):
        sinusoids(2, 7)


@pytest.mark.catches("sines-that-learn")
def test_sines_do_not_learn_and_keys_have_no_bias():
    infos = describe(maker(CONFIG)).infos
    assert not infos["encoder"]["positions"]["table"].learns
    assert infos["decoder"]["positions"]["table"].learns
    for stack in ("encoder", "decoder"):
        (layer,) = infos[stack]["layers"]["segments"].values()
        for name in ("attn", "cross")[: 1 + (stack == "decoder")]:
            assert "b" in layer[name]["q"] and "b" in layer[name]["v"]
            assert "b" not in layer[name]["k"]


@pytest.mark.catches("flops-without-frames")
def test_flops_are_those_of_the_matmuls():
    """Convolutions, both stacks, cross-attention and the head; of causal pairs half are traced."""
    spec = describe(maker(CONFIG))
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), spec.infos)
    traced = jax.jit(lambda p, t, x: spec.merge(p)(t, frames=x)).trace(params, tokens(1), sound(1))
    decoder = CONFIG.decoder()
    unseen = 4 * decoder.layers * decoder.embed * WRITTEN * (WRITTEN - 1) / 2
    found = traced_flops(traced.jaxpr).flops
    assert CONFIG.train_flops(READ // 2, WRITTEN) / 3 == found - unseen
    convolutions = 2 * 3 * (READ * 5 * 12 + READ // 2 * 12 * 12)
    assert CONFIG.encoder().frames.weights(12) * READ == convolutions


def test_every_frame_is_heard():
    model = EncoderDecoder(CONFIG.encoder(), CONFIG.decoder(), rngs=nnx.Rngs(0))
    run, x, text = jax.jit(lambda t, x: model(t, frames=x)), sound(1), tokens(1)
    first = run(text, x)
    for frame in range(READ):
        assert np.abs(run(text, x.at[0, frame].add(1)) - first).max() > 1e-4


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 16, 4), r"batch 'frames': found shape \[2, 16, 4\], and a frame of the model's has 5"),
        ((2, 5, 16), r"batch 'frames': found shape \[2, 5, 16\]"),
        ((2, 15, 5), "batch 'frames': found 15 of them, and a token is made of two; give an even"),
        ((2, 18, 5), "sequence length 9 is above the model's 8"),
    ],
)
def test_sound_of_another_size_is_refused(shape, message):
    model = EncoderDecoder(CONFIG.encoder(), CONFIG.decoder(), rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=message):
        model(tokens(), frames=jnp.zeros(shape))


def test_sound_goes_to_models_that_read_it():
    model = EncoderDecoder(CONFIG.encoder(), CONFIG.decoder(), rngs=nnx.Rngs(0))
    words = maker(T5Config(**{**SIZES, "heads": 2}, head_dim=4))(nnx.Rngs(0))
    with pytest.raises(InputError, match="reads a source, and none is given; give frames"):
        model(tokens())
    with pytest.raises(InputError, match="reads a source, and source is given; give frames"):
        model(tokens(), source=tokens())
    with pytest.raises(InputError, match="reads a source, and frames is given; give source"):
        words(tokens(), frames=sound())


@pytest.mark.parametrize(
    ("stack", "fields", "message"),
    [
        ("encoder", {"vocab": 8}, "model.vocab: found 8 and frames of sound; give the tokens of a"),
        ("encoder", {"causal": True}, "model.frames: causal beside frames; sound is of no kinds"),
        ("encoder", {"token_types": 2}, "model.frames: token_types beside frames"),
        ("decoder", {"frames": FramesConfig(mels=5)}, "model.vocab: found 16 and frames of sound"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(stack, fields, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(getattr(CONFIG, stack)(), **fields)


def test_an_encoder_of_sound_is_one_of_a_pair():
    with pytest.raises(InputError, match="model.frames: it is the encoder of an encoder-decoder"):
        Decoder(CONFIG.encoder(), rngs=nnx.Rngs(0))
