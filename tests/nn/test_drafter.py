"""A drafter: what it sees of its target in training is what decoding lets it see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.errors import InputError
from colossax.nn import (
    Decoder,
    DecoderConfig,
    Drafter,
    DrafterConfig,
    FlatTokens,
    LatentConfig,
    RelativeConfig,
    RopeConfig,
    block_mask,
    target_pages,
)
from colossax.pallas.attention import Pages
from colossax.pallas.attention.mask import dense

pytestmark = pytest.mark.slow

BASE = DecoderConfig(
    vocab=32,
    embed=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=24,
    max_seq=32,
    init_std=0.4,
    rope=RopeConfig(),
)
TARGETS = {
    "grouped": {},
    "interleaved": {"rope": RopeConfig(interleaved=True, dims=4)},
    "learned": {"rope": None, "learned_positions": 32, "norm": "layer"},
    "penalties": {"rope": None, "alibi": True, "embed_norm": True},
    "kinds": {"window": 4, "full_layers": (2,)},
    "last-without-rope": {"full_layers": (2,), "full_rope": False},
    "narrow-tokens": {"token_width": 12},
}
CASES = [(name, pages) for name in TARGETS for pages in (False, True)]
QUICK = [("grouped", True), ("interleaved", False)]
BLOCK = 3
LENGTH = 11


def made(name, layers=2):
    config = dataclasses.replace(BASE, **TARGETS[name])
    target = Decoder(config, rngs=nnx.Rngs(0))
    drafter = Drafter(DrafterConfig(layers=layers, block=BLOCK), config, rngs=nnx.Rngs(1))
    tokens = jax.random.randint(jax.random.key(2), (1, LENGTH), 0, config.vocab)
    return target, drafter, tokens


def assert_close(found, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, want)


def trained(target, drafter, tokens, offsets):
    """Hidden states as training makes them, of each offset."""

    @jax.jit
    def run(offsets):
        _, keys = target.hidden_and_keys(tokens)
        rows = {name: jnp.repeat(x, len(offsets), 0) for name, x in keys.items()}
        return drafter.hidden(jnp.repeat(target.embedded(tokens), len(offsets), 0), rows, offsets)

    return run(jnp.asarray(offsets))


def addresses(start, count, width, pages):
    """Of tokens of seat 0, one group, filled up; of rows, or of pages in any order."""
    at = jnp.arange(width, dtype=jnp.int32)
    position = jnp.where(at < count, start + at, 0)
    table = jnp.asarray([[5, 0, 3, 1], [2, 4, 6, 7]], jnp.int32)
    groups = jnp.where(at < count, at, -1)[None]
    return FlatTokens(
        seat=jnp.where(at < count, 0, -1),
        position=position,
        slot=position,
        pages=Pages(table=table, groups=groups) if pages else None,
    )


def zeros(spec):
    if isinstance(spec, dict):
        return {kind: one.zeros("float32") for kind, one in spec.items()}
    return spec.zeros("float32")


def decoded(target, drafter, tokens, pages):
    """Of an offset, hidden states of tokens that come one by one, the target a block behind."""
    rows = {"seats": 8, "slots": 4} if pages else {"seats": 2, "slots": 16}
    padded = jnp.pad(tokens[0], (0, BLOCK))

    @jax.jit
    def verify(seen, start, count):
        ids = jax.lax.dynamic_slice(padded, (start,), (BLOCK,))
        return target.decode(ids, seen, addresses(start, count, BLOCK, pages))[1]

    @jax.jit
    def draft(own, seen, at, verified):
        read = target_pages(target, seen, verified[None])
        embedded = target.embedded(padded[at][None, None])[0]
        return drafter.decode(embedded, own, addresses(at, 1, 1, pages), read)

    def run(offset):
        seen, own = zeros(target.cache_spec(**rows)), zeros(drafter.cache_spec(**rows))
        found, verified = [], 0
        for at in range(LENGTH):
            if (at + offset) % BLOCK == 0 and at:
                seen, verified = verify(seen, verified, at - verified), at
            hidden, own = draft(own, seen, jnp.int32(at), jnp.int32(verified))
            found.append(hidden[0])
        return jnp.stack(found)

    return run


@pytest.mark.catches("drafter-sees-its-block")
@pytest.mark.parametrize(("name", "pages"), QUICK)
def test_training_is_decoding_from_states_of_whole_blocks(name, pages):
    check_decoded(name, pages)


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "pages"), [case for case in CASES if case not in QUICK])
def test_training_is_decoding_for_every_target(name, pages):
    check_decoded(name, pages)


def check_decoded(name, pages):
    target, drafter, tokens = made(name)
    offsets, run = (0, 2), decoded(target, drafter, tokens, pages)
    for offset, want in zip(offsets, trained(target, drafter, tokens, offsets), strict=True):
        np.testing.assert_allclose(run(offset), want, atol=1e-5)


@pytest.mark.catches("tap-of-another-layer")
@pytest.mark.parametrize("name", ["grouped", "kinds"])
def test_keys_that_are_tapped_are_those_of_the_cache(name):
    target, _, tokens = made(name)

    @jax.jit
    def both():
        seen = zeros(target.cache_spec(seats=2, slots=16))
        flat = addresses(0, LENGTH, LENGTH, pages=False)
        hidden, seen = target.decode(tokens[0], seen, flat)
        read = target_pages(target, seen, jnp.zeros(1, jnp.int32))
        held = {name: x[read.layer, 0, :LENGTH] for name, x in read.cache.items()}
        return (hidden, held), target.hidden_and_keys(tokens)

    want, found = both()
    assert_close(jax.tree.map(lambda x: x[0], found), want)


def test_the_mask_by_hand():
    segments = jnp.asarray([[0, 0, 0, 0, 0, 1, 1, 1, 1, -1]])
    for block, offset in ((1, 0), (3, 0), (3, 1), (4, 3), (16, 0)):
        mask = block_mask(10, block, jnp.asarray([offset]), segments)
        want = np.zeros((10, 10), bool)
        for i in range(10):
            begun = (i + offset) // block * block - offset
            for j in range(max(begun, 0)):
                want[i, j] = segments[0, i] == segments[0, j] >= 0
        np.testing.assert_array_equal(dense(mask, 10, 10)[0, 0], want)


def test_what_the_target_has_not_seen_changes_nothing():
    """Not by a bit, however large it is."""
    target, drafter, tokens = made("grouped", layers=1)
    _, keys = jax.jit(target.hidden_and_keys)(tokens)
    embedded = target.embedded(tokens)
    run = jax.jit(lambda keys: drafter.hidden(embedded, keys, jnp.asarray([0])))
    want = run(keys)
    past = {name: x.at[:, 9:].set(1e9) for name, x in keys.items()}
    np.testing.assert_array_equal(run(past), want)
    found = run({name: x.at[:, 8].set(1.0) for name, x in keys.items()})
    np.testing.assert_array_equal(found[:, :9], want[:, :9])
    assert jnp.all(jnp.any(found[:, 9:] != want[:, 9:], axis=-1))


@pytest.mark.catches("drafter-query-unturned")
def test_rotary_positions_matter_by_distance_alone():
    target, drafter, tokens = made("grouped", layers=1)

    @jax.jit
    def run(first):
        positions = first + jnp.arange(LENGTH, dtype=jnp.int32)[None]
        _, keys = target.hidden_and_keys(tokens, positions=positions)
        embedded, offsets = target.embedded(tokens), jnp.asarray([0])
        return drafter.hidden(embedded, keys, offsets, positions=positions)

    np.testing.assert_allclose(run(9), run(0), atol=1e-4)


REFUSED = {
    "latent": {
        "latent": LatentConfig(kv_rank=8, nope_dim=4, rope_dim=4, v_dim=8),
        "kv_heads": 4,
    },
    "window": {"window": 4},
    "chunk": {"chunk": 4},
    "relative": {"rope": None, "relative": RelativeConfig()},
    "longest_source": {"longest_source": 8},
    "causal off": {"causal": False},
}


@pytest.mark.parametrize("part", REFUSED)
def test_targets_whose_last_layer_cannot_be_read_are_refused(part):
    config = dataclasses.replace(BASE, **REFUSED[part])
    with pytest.raises(InputError, match=f"drafter.layers: the target has {part}, .*give a"):
        DrafterConfig(layers=1).decoder(config)


def test_heads_that_do_not_fit_the_targets_are_refused():
    with pytest.raises(InputError, match="drafter.heads: found 3, .*give a multiple of 2"):
        DrafterConfig(layers=1, heads=3).decoder(BASE)
    with pytest.raises(InputError, match="drafter.block"):
        DrafterConfig(layers=1, block=0)
    with pytest.raises(InputError, match="holds source_k, .*give a decoder that keeps them"):
        target_pages(made("grouped")[0], {"source_k": 0}, jnp.zeros(1, jnp.int32))
