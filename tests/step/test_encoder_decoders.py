"""Encoder-decoders train on every mesh as on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax import Plan, boost
from colossax.config import OffloadConfig, PipelineConfig
from colossax.errors import InputError
from colossax.models import BARTConfig, T5Config, maker
from colossax.nn import EncoderDecoder, describe
from colossax.optim import adamw
from colossax.planner.counting.traced_flops import traced_flops
from colossax.tasks import next_token_loss
from tests.cases import quick_first
from tests.oracle import assert_losses_close
from tests.step.test_decoder_parts import PLANS as OF_ONE_STACK
from tests.step.test_decoder_parts import mesh

SIZES = {"vocab": 64, "embed": 32, "layers": 3, "decoder_layers": 2, "heads": 4, "init_std": 0.1}
MODELS = {
    "t5": T5Config(**SIZES, head_dim=8, mlp=64, max_seq=64, buckets=8, farthest=20),
    "t5 with a gate": T5Config(
        **SIZES, head_dim=12, mlp=64, max_seq=64, gated=True, activation="gelu_tanh", tied=False
    ),
    "bart": BARTConfig(**SIZES, decoder_heads=4, mlp=64, decoder_mlp=48, max_seq=64, scaled=True),
}
READ, WRITTEN = 24, 16
PLANS = {name: plan for name, plan in OF_ONE_STACK.items() if "stage" not in name} | {
    "cut stages": mesh(stage=2, fsdp=2, tensor=2).replace(pipeline=PipelineConfig(cuts=(2, 3))),
    "host memory": mesh(fsdp=4, tensor=2).replace(offload=OffloadConfig(parameters=1.0)),
}


def batch(read=READ, written=WRITTEN, rows=8):
    """Two pairs of texts in each row, the last sources shorter than the others."""
    draw = np.random.default_rng(0)
    segments = np.repeat([0, 1], [10, written - 10])
    source_segments = np.repeat([0, 1, -1], [9, read - 13, 4])
    ids = {
        name: draw.integers(0, 64, (rows, size)).astype(np.int32)
        for name, size in (("source", read), ("tokens", written), ("targets", written))
    }
    return ids | {
        "segments": np.broadcast_to(segments, (rows, written)).astype(np.int32),
        "source_segments": np.broadcast_to(source_segments, (rows, read)).astype(np.int32),
        "weights": (draw.random((rows, written)) < 0.9).astype(np.float32),
    }


def run(plan, model, devices=None, given=None):
    """Losses and gradient norms of three steps."""
    state, step = boost(
        maker(MODELS[model]),
        adamw(3e-3, eps=1e-3),
        next_token_loss(),
        plan,
        devices=jax.devices()[:devices],
    )
    found = []
    for _ in range(3):
        state, metrics = step(state, batch() if given is None else given)
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.asarray(found)


@functools.cache
def truth(model):
    return run(Plan(mesh={"data": 1}), model, 1)


CASES = [(name, model) for model in MODELS for name in PLANS]


@pytest.mark.parametrize(("plan", "model"), quick_first(CASES, [("fsdp, tensor", "t5")]))
def test_training_equals_one_device(plan, model):
    found = run(PLANS[plan], model)
    assert_losses_close(found[:, 0], truth(model)[:, 0])
    np.testing.assert_allclose(found[:, 1], truth(model)[:, 1], rtol=2e-5)


@pytest.mark.sweep
@pytest.mark.parametrize(("read", "written", "left_out"), [(23, 15, False), (15, 15, True)])
def test_rows_that_devices_do_not_divide_are_filled_up(read, written, left_out):
    """Both texts, each by itself, marked as padding, where nobody said their documents too."""
    given = batch(read=read, written=written)
    if left_out:
        del given["source_segments"]
        given["segments"] = np.zeros_like(given["segments"])
    one = run(Plan(mesh={"data": 1}), "t5", 1, given)
    found = run(mesh(data=2, ring=2, ulysses=2), "t5", given=given)
    assert_losses_close(found[:, 0], one[:, 0])


def hidden_of(model, rows):
    given = {name: jnp.asarray(x) for name, x in rows.items() if name not in ("targets", "weights")}
    return model.hidden(given.pop("tokens"), **given)[0]


@pytest.mark.catches("sources-of-all-seen")
@pytest.mark.parametrize("model", quick_first(["t5", "t5 with a gate"], ["t5"]))
def test_a_packed_row_is_each_pair_alone(model):
    """T5 knows distances alone, so a document's place in the row is no matter."""
    config = MODELS[model]
    built = EncoderDecoder(config.encoder(), config.decoder(), rngs=nnx.Rngs(0))
    rows = {name: x[:1] for name, x in batch().items()}
    together = hidden_of(built, rows)
    for number in (0, 1):
        at, read = rows["segments"][0] == number, rows["source_segments"][0] == number
        alone = {"tokens": rows["tokens"][:, at], "source": rows["source"][:, read]}
        np.testing.assert_allclose(
            np.asarray(together)[:, at], hidden_of(built, alone), rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("model", MODELS)
def test_flops_are_those_of_the_matmuls(model):
    """Both stacks, cross-attention and the head, forward; training is three times that.

    Causal attention is traced with all pairs, of which it counts half.
    """
    config = MODELS[model]
    spec = describe(maker(config))
    params = jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), spec.infos)
    ids = [jax.ShapeDtypeStruct((1, size), jnp.int32) for size in (WRITTEN, READ)]
    traced = jax.jit(lambda p, t, s: spec.merge(p)(t, source=s)).trace(params, *ids)
    decoder = config.decoder()
    pairs = WRITTEN * (WRITTEN - 1) / 2
    unseen = 4 * decoder.layers * decoder.heads * decoder.head_dim * pairs
    assert config.train_flops(READ, WRITTEN) / 3 == traced_flops(traced.jaxpr).flops - unseen


def test_what_does_not_fit_together_is_refused():
    config = MODELS["t5"]
    model = EncoderDecoder(config.encoder(), config.decoder(), rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(InputError, match="hidden: an encoder reads a source, and none is given"):
        model.hidden(tokens)
    with pytest.raises(InputError, match="sequence length 65 is above the model's 64"):
        model.hidden(tokens, source=jnp.zeros((1, 65), jnp.int32))
    with pytest.raises(InputError, match=r"model.embed: 32 in the encoder and 64 in the decoder"):
        EncoderDecoder(
            config.encoder(), dataclasses.replace(config.decoder(), embed=64), rngs=nnx.Rngs(0)
        )
    with pytest.raises(InputError, match="model.start: the decoder has none, and what it writes"):
        EncoderDecoder(
            config.encoder(), dataclasses.replace(config.decoder(), start=None), rngs=nnx.Rngs(0)
        )
    with pytest.raises(InputError, match="the encoder's attention is causal, or it reads a source"):
        EncoderDecoder(config.decoder(), config.decoder(), rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match="the decoder is not causal, or reads no source"):
        EncoderDecoder(config.encoder(), config.encoder(), rngs=nnx.Rngs(0))
