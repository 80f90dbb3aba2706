"""What a cache is made of: arrays of their own shapes, laid out and typed by their roles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.config import Plan, Precision
from colossax.errors import InputError
from colossax.inference import Generator
from colossax.nn import (
    CacheArray,
    CacheSpec,
    Decoder,
    DecoderConfig,
    FlatTokens,
    Layers,
    decoder_layer,
    describe,
    initialise,
)
from colossax.sharding import CACHE_DIMS, attend_cache, use

CONFIG = DecoderConfig(
    vocab=16, embed=8, layers=1, heads=2, kv_heads=2, head_dim=4, mlp=8, max_seq=16, init_std=0.5
)
NARROW = 3


class Narrow(nnx.Module):
    """One layer of attention whose values are narrower than its keys, and a count of tokens."""

    def __init__(self, *, rngs):
        self.config = CONFIG
        self.inner = Decoder(CONFIG, rngs=rngs)

    def cache_spec(self, *, seats, slots, chunk=None):
        shape = (1, seats, slots, CONFIG.kv_heads)
        return CacheSpec(
            arrays={
                "k": CacheArray(shape=(*shape, CONFIG.head_dim), dims=CACHE_DIMS),
                "v": CacheArray(shape=(*shape, NARROW), dims=CACHE_DIMS),
                "count": CacheArray(shape=(seats,), dims=(None,), role="accumulation"),
            }
        )

    def decode(self, tokens, cache, flat):
        x = self.inner.embed(tokens[None])[0]
        q = x.reshape(len(x), CONFIG.heads, CONFIG.head_dim)
        where = {"seat": flat.seat, "position": flat.position, "slot": flat.slot}
        both = {name: cache[name] for name in "kv"}
        out, both = attend_cache(q, {"k": q, "v": q[..., :NARROW]}, both, 0, **where)
        count = cache["count"] + jnp.sum(flat.seat >= 0)
        wide = jnp.pad(out, ((0, 0), (0, 0), (0, CONFIG.head_dim - NARROW)))
        return x + wide.reshape(x.shape), {**both, "count": count}

    def logits(self, hidden):
        return self.inner.logits(hidden)


@pytest.mark.catches("cache-of-one-shape")
def test_a_model_of_ones_own_keeps_values_narrower_than_keys(devices):
    """Generated on two devices as on one, whose every token is that of the whole row at once."""
    plan = Plan(precision=Precision(cache="bfloat16"))
    tokens = []
    for mesh in ({"fsdp": 1}, {"tensor": 2}):
        bound = dataclasses.replace(plan, mesh=mesh).bind(devices[: sum(mesh.values())])
        with use(bound):
            spec = describe(lambda rngs: Narrow(rngs=rngs))
        params = initialise(spec, bound, jax.random.key(0))
        generator = Generator(spec, bound, params, slots=8, tokens_per_step=4)
        cache = generator.program.cache.empty()
        found = {name: (x.shape, x.dtype.name) for name, x in cache.items()}
        assert found == {
            "k": ((1, 1, 8, 2, 4), "bfloat16"),
            "v": ((1, 1, 8, 2, NARROW), "bfloat16"),
            "count": ((1,), "float32"),
        }
        tokens.append(generator.generate([3, 1, 2], max_tokens=4).tokens)
    assert tokens[0] == tokens[1] and len(set(tokens[0])) > 1


def test_kinds_dims_and_roles_that_there_are_not_are_refused():
    one = CacheArray(shape=(2, 3), dims=("layers", None), role="caches")
    with pytest.raises(
        InputError, match="no kind 'paged'; use one of contiguous, windowed, sequence"
    ):
        CacheSpec(arrays={"k": one}, kind="paged")
    with pytest.raises(InputError, match="2 dims and 1 names .*; give one name or None for each"):
        CacheArray(shape=(2, 3), dims=("layers",))
    with pytest.raises(InputError, match="no dtype under 'caches', the role of 'k'; use 'cache'"):
        CacheSpec(arrays={"k": one}).zeros(Precision())
    assert CacheSpec(arrays={"k": one}).zeros("bfloat16")["k"].dtype == jnp.bfloat16


@pytest.mark.catches("cache-window")
@pytest.mark.parametrize("window", [None, 3])
def test_decoding_sees_the_window_that_training_sees(window):
    """Hidden states of six tokens, one after another from the cache, are those of a whole row."""
    model = Decoder(dataclasses.replace(CONFIG, window=window), rngs=nnx.Rngs(0))
    tokens = jnp.asarray([3, 1, 4, 1, 5, 9])
    cache = model.cache_spec(seats=1, slots=8).zeros("float32")
    np.testing.assert_allclose(
        token_by_token(model, tokens, cache), model.hidden(tokens[None])[0][0], atol=1e-5
    )


@pytest.mark.catches("cache-of-kinds")
def test_kinds_of_layers_have_caches_of_their_own():
    """Local and global attention by turns, of other head sizes, generated as trained."""
    wide = dataclasses.replace(CONFIG, head_dim=2 * CONFIG.head_dim)
    kinds = {"local": dataclasses.replace(CONFIG, window=3), "global": wide}
    layers = Layers(
        make={k: lambda rngs, c=c: decoder_layer(c, rngs=rngs) for k, c in kinds.items()},
        order=["local", "local", "global"] * 2,
    )
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), layers=layers)
    specs = model.cache_spec(seats=1, slots=8)
    assert [specs[kind].arrays["k"].shape[0] for kind in kinds] == [4, 2]
    tokens = jnp.asarray([3, 1, 4, 1, 5, 9])
    cache = {kind: spec.zeros("float32") for kind, spec in specs.items()}
    want = model.hidden(tokens[None])[0][0]
    np.testing.assert_allclose(token_by_token(model, tokens, cache), want, atol=1e-5)


def token_by_token(model, tokens, cache):
    """Hidden states of tokens that come one after another."""
    rows = []
    for place, token in enumerate(tokens):
        at = jnp.asarray([place])
        flat = FlatTokens(seat=jnp.zeros(1, jnp.int32), position=at, slot=at)
        hidden, cache = model.decode(token[None], cache, flat)
        rows.append(hidden[0])
    return jnp.stack(rows)
