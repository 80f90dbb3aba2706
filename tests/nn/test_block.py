"""A decoder is open: sublayers, norms and masks of one's own, without a switch for each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from colossax.config import Plan
from colossax.errors import InputError
from colossax.layerwise import LayerState, Maximum
from colossax.models import LlamaConfig
from colossax.nn import (
    Block,
    Decoder,
    LanguageModel,
    Layers,
    Linear,
    RMSNorm,
    Wiring,
    decoder_layer,
    describe,
    initialise,
)
from colossax.pallas.attention import Mask
from colossax.planner import build_step
from colossax.sharding import use
from colossax.tasks import next_token_loss
from tests.oracle import assert_trees_close

CONFIG = LlamaConfig(
    vocab=32, embed=8, layers=2, heads=2, kv_heads=1, mlp=12, max_seq=16, init_std=0.3
).decoder()
TOKENS = jax.random.randint(jax.random.key(1), (2, 8), 0, 32)
X = jax.random.normal(jax.random.key(2), (1, 2, 4))


class Doubling(nnx.Module):
    """A norm, so that one sees where it stands."""

    def __call__(self, x):
        return 2 * x


class Adding(nnx.Module):
    """A sublayer: adds a number, and counts how often it was called."""

    def __init__(self, number, name):
        self.number, self.name = number, name

    def mix(self, x, side, state):
        return x + self.number, state, {self.name: jnp.float32(1)}


def wired(wiring, names=("a", "b")):
    block = Block({n: Adding(i + 1.0, n) for i, n in enumerate(names)}, Doubling, wiring)
    return block(X, None, LayerState(index=0, row=0))


@pytest.mark.catches("norms-of-their-own")
@pytest.mark.catches("block-sandwich")
@pytest.mark.parametrize(
    ("wiring", "truth"),
    [
        (None, lambda x: 3 * (3 * x + 1) + 2),
        (Wiring(norm_output=True), lambda x: 5 * (5 * x + 2) + 4),
        (Wiring(norm_input=False, norm_output=True), lambda x: 3 * (3 * x + 2) + 4),
        (Wiring(norm_input=False, norm_sum=True), lambda x: 2 * (2 * (2 * (2 * x + 1)) + 2)),
        (Wiring(parallel=True), lambda x: x + 2 * x + 1 + 2 * x + 2),
        (Wiring(parallel=True, shared_norm=True), lambda x: x + 2 * x + 1 + 2 * x + 2),
        (Wiring(scale=0.5), lambda x: 2 * (2 * x + 0.5) + 1),
    ],
    ids=["pre", "sandwich", "output", "post", "parallel", "one norm", "scaled"],
)
def test_norms_stand_where_the_wiring_says(wiring, truth):
    x, _, sums = wired(wiring)
    np.testing.assert_allclose(x, truth(X), rtol=1e-6)
    assert sums == {"a": 1, "b": 1}


def test_refusals_of_a_block():
    with pytest.raises(InputError, match="norm once for each"):
        Wiring(parallel=True, norm_sum=True)
    with pytest.raises(InputError, match="shared_norm norms the input that parallel sublayers"):
        Wiring(shared_norm=True)
    block = Block({"a": Adding(1.0, "n"), "b": Adding(1.0, "n")}, Doubling)
    with pytest.raises(InputError, match=r"sublayer 'b' counts \['n'\]"):
        block(X, None, LayerState(index=0, row=0))


def encoder(plan, devices):
    """(hidden states under a mask, gradient by the embeddings) of a small decoder."""
    bound = plan.bind(devices)
    with use(bound):
        spec = describe(lambda rngs: Decoder(CONFIG, rngs=rngs))
    params = initialise(spec, bound, jax.random.key(0))

    @jax.jit
    def hidden(params, mask):
        with use(bound):
            return spec.merge(params).hidden(TOKENS, mask=mask)[0]

    return lambda mask: hidden(params, mask)


@pytest.mark.catches("mask-argument")
def test_an_encoder_is_a_decoder_with_another_mask():
    one = encoder(Plan(), jax.devices()[:1])
    split = encoder(Plan(mesh={"ring": 2, "tensor": 2}), jax.devices()[:4])
    causal, both = one(None), one(Mask())
    prefix = one(Mask(causal=True, prefix=jnp.full(2, 3)))
    assert_trees_close(one(Mask(causal=True)), causal)
    # The first token sees the others, or those of the prefix, and the last one sees all anyway.
    assert np.abs(both - causal).max(axis=(0, 2))[0] > 1e-2
    assert np.abs(prefix - causal).max(axis=(0, 2))[0] > 1e-2
    assert_trees_close(split(Mask()), both, tolerance=1e-4)
    segments = jnp.asarray([[0] * 4 + [1] * 4] * 2)
    packed = Mask(q_segments=segments, kv_segments=segments, ascending=True)
    assert np.abs(one(packed) - both).max() > 1e-2


@pytest.mark.catches("window-of-another")
@pytest.mark.parametrize(
    ("order", "seen"), [(["local"] * 2, 5), (["local", "global"], 8), (["global", "local"], 8)]
)
def test_local_and_global_attention_stand_in_one_stack(order, seen):
    """How far back the last token's hidden state depends on the others."""
    local = dataclasses.replace(CONFIG, window=3)
    configs = {"local": local, "global": CONFIG}
    used = {kind: configs[kind] for kind in dict.fromkeys(order)}
    layers = Layers(
        make={k: lambda rngs, c=c: decoder_layer(c, rngs=rngs) for k, c in used.items()},
        order=order,
    )
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), layers=layers)

    @jax.jit
    def last(embeddings):
        return jnp.sum(model.hidden(embeddings=embeddings)[0][0, -1] ** 3)

    gradient = jax.grad(last)(jax.random.normal(jax.random.key(3), (1, 8, 8)))
    assert int(jnp.sum(jnp.any(gradient != 0, axis=(0, 2)))) == seen


class Gated(nnx.Module):
    """A mixer that is no attention: a running mean of the tokens, gated; it counts what it sees."""

    def __init__(self, *, rngs):
        self.gate = Linear((8, 8), ("embed", "mlp"), rngs=rngs, std=0.3)

    def mix(self, x, side, state):
        mean = jnp.cumsum(x, axis=1) / (1 + jnp.arange(x.shape[1]))[:, None]
        y = jax.nn.sigmoid(self.gate(x)) * mean
        return y, state, {"mass": jnp.sum(jnp.abs(y)), "top": Maximum(jnp.max(y))}


def mixed(rngs):
    """Attention and another mixer by turns, a norm before and after."""

    def attention(rngs):
        return decoder_layer(CONFIG, rngs=rngs)

    def gated(rngs):
        sublayers = {"mixer": Gated(rngs=rngs)}
        return Block(sublayers, lambda: RMSNorm(8), Wiring(norm_output=True))

    kinds = {"attention": attention, "gated": gated}
    config = dataclasses.replace(CONFIG, layers=4)
    return Decoder(config, rngs=rngs, layers=Layers(make=kinds, order=["gated", "attention"] * 2))


@pytest.mark.catches("sums-dropped")
def test_layers_of_ones_own_train_and_are_counted_per_layer():
    assert isinstance(Decoder(CONFIG, rngs=nnx.Rngs(0)), LanguageModel)
    found = {}
    for devices, plan in ((1, Plan()), (4, Plan(mesh={"fsdp": 2, "tensor": 2}))):
        step = build_step(
            mixed, optax.sgd(0.1), next_token_loss(), plan, devices=jax.devices()[:devices]
        )
        batch = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, axis=1)}
        batch["weights"] = jnp.ones(TOKENS.shape, jnp.float32)
        state, metrics = step(step.init(0), batch)
        assert set(state["params"]["layers"]["segments"][0]) == {"attention", "gated"}
        mass, top = np.asarray(metrics["mass"]), np.asarray(metrics["top"])
        assert mass.shape == top.shape == (4,)
        assert (mass > 0).tolist() == (top != 0).tolist() == [True, False, True, False]
        found[devices] = metrics
    assert_trees_close(found[4], found[1], tolerance=1e-4)
