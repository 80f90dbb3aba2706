"""Where a model drops values, and that it is the same model without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.errors import InputError
from colossax.layerwise import LayerState
from colossax.models import BERTConfig, LlamaConfig, T5Config, config_from_json, config_to_json
from colossax.models import maker as maker_of
from colossax.nn import (
    Block,
    Decoder,
    DecoderConfig,
    DropoutConfig,
    LatentConfig,
    RopeConfig,
    Side,
    Wiring,
)
from colossax.nn.dropout import Noise
from colossax.planner.counting.traced_flops import traced_flops
from colossax.tasks import next_token_loss
from tests.nn.test_block import Adding, Doubling
from tests.pallas.test_dropout import hashed, spread

ROWS, LENGTH, EMBED, HEADS = 2, 7, 8, 2
RATES = {"embedding": 0.2, "residual": 0.3, "attention": 0.4}
BARE = DecoderConfig(
    vocab=16,
    embed=EMBED,
    layers=2,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=4,
    mlp=12,
    max_seq=LENGTH,
    gated=False,
    activation="relu",
    init_std=0.5,
    dropout=DropoutConfig(**RATES),
)
PLAIN = dataclasses.replace(BARE, dropout=DropoutConfig())
TOKENS = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, 16)
KEYS = jax.random.split(jax.random.key(2), ROWS)


def model(config=BARE):
    return Decoder(config, rngs=nnx.Rngs(0))


def factor(word, *places, rate):
    """What one value is multiplied by: each place is hashed with what came of those before it."""
    *outer, last = places
    for place in outer:
        word = hashed(word ^ spread(place))
    return 1 / (1 - rate) if hashed(word ^ spread(last)) >= rate * 2**32 else 0.0


def folded(word, *numbers):
    for number in numbers:
        word = hashed(word ^ spread(number))
    return word


def of_values(words, rate):
    """`[b, s, d]`, value by value."""
    places = [(token, feature) for token in range(LENGTH) for feature in range(EMBED)]
    found = [[factor(word, *place, rate=rate) for place in places] for word in words]
    return np.array(found).reshape(-1, LENGTH, EMBED)


def of_pairs(words, rate):
    """`[b, n, s, s]`."""
    found = [
        factor(word, head, q, k, rate=rate)
        for word in words
        for head in range(HEADS)
        for q in range(LENGTH)
        for k in range(LENGTH)
    ]
    return np.array(found).reshape(-1, HEADS, LENGTH, LENGTH)


def written_down(parameters, words):
    """Hidden states of the bare decoder in NumPy, and with them all that it drops."""
    embedding, residual, attention = range(3)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + BARE.norm_eps) * scale

    def softmax(x):
        x = np.exp(x - x.max(axis=-1, keepdims=True))
        return x / x.sum(axis=-1, keepdims=True)

    x = parameters["embed"]["table"][np.asarray(TOKENS)]
    x = x * of_values([folded(word, embedding) for word in words], RATES["embedding"])
    seen = np.tril(np.ones((LENGTH, LENGTH), bool))
    stack = parameters["layers"]["segments"][0]
    for layer in range(BARE.layers):
        p = jax.tree.map(lambda w, at=layer: w[at], stack)
        here = [[folded(word, layer, sublayer) for word in words] for sublayer in (0, 1)]
        kept = [
            of_values([folded(word, residual) for word in of], RATES["residual"]) for of in here
        ]
        h = norm(x, p["attn_norm"]["scale"])
        q, k, v = (np.einsum("bsd,dnh->bsnh", h, p["attn"][name]["w"]) for name in "qkv")
        scores = np.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(BARE.head_dim)
        weights = softmax(np.where(seen, scores, -np.inf))
        weights = weights * of_pairs([folded(w, attention) for w in here[0]], RATES["attention"])
        out = np.einsum("bnst,btnh->bsnh", weights, v)
        x = x + kept[0] * np.einsum("bsnh,nhd->bsd", out, p["attn"]["o"]["w"])
        h = np.maximum(norm(x, p["mlp_norm"]["scale"]) @ p["mlp"]["up"]["w"], 0)
        x = x + kept[1] * (h @ p["mlp"]["down"]["w"])
    return norm(x, parameters["norm"]["scale"])


def words_of(keys):
    """One for each row: all that its key says, hashed."""
    return [folded(0, *map(int, data)) for data in np.asarray(jax.random.key_data(keys))]


@pytest.mark.catches("dropout-not-of-embeddings")
@pytest.mark.catches("dropout-not-of-sublayers")
@pytest.mark.catches("dropout-not-of-probabilities")
@pytest.mark.catches("dropout-alike-in-all-layers")
@pytest.mark.catches("dropout-alike-in-sublayers")
@pytest.mark.catches("dropout-alike-in-all-steps")
def test_a_decoder_drops_what_is_written_down():
    made = model()
    parameters = nnx.to_pure_dict(nnx.split(made, nnx.Param, ...)[1])
    parameters = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
    found, _ = made.hidden(TOKENS, key=KEYS)
    want = written_down(parameters, words_of(KEYS))
    np.testing.assert_allclose(found, want, atol=1e-4)
    assert np.abs(want - model(PLAIN).hidden(TOKENS)[0]).max() > 0.1


@pytest.mark.catches("dropout-in-evaluation")
def test_without_keys_or_without_rates_it_is_the_same_program():
    """As of the model that knows no dropout: not an operation more."""

    def program(config, row_keys):
        batch = dict.fromkeys(("tokens", "targets"), TOKENS)
        batch["weights"] = jnp.ones(TOKENS.shape)
        made = model(config)
        return str(jax.make_jaxpr(lambda batch: next_token_loss()(made, batch, row_keys))(batch))

    plain = program(PLAIN, None)
    assert program(BARE, None) == plain
    assert program(PLAIN, KEYS) == plain
    assert "uint32" not in plain and "u32" not in plain
    assert program(BARE, KEYS) != plain


def test_it_costs_no_matmul():
    """What an inspection counts of a step's FLOPs is what it counts without."""

    def flops(config):
        made = model(config)
        traced = jax.jit(lambda tokens, keys: made.hidden(tokens, key=keys)[0]).trace(TOKENS, KEYS)
        return traced_flops(traced.jaxpr)

    assert flops(BARE) == flops(PLAIN)
    assert flops(PLAIN).flops > 0


@pytest.mark.parametrize("place", RATES)
def test_each_place_alone(place):
    """What is dropped there changes what comes out, of rows by their own keys."""
    made = model(dataclasses.replace(BARE, dropout=DropoutConfig(**{place: 0.5})))
    plain = made.hidden(TOKENS)[0]
    found = made.hidden(TOKENS, key=KEYS)[0]
    assert jnp.abs(found - plain).max() > 0.01
    other = made.hidden(TOKENS, key=KEYS.at[1].set(KEYS[0]))[0]
    np.testing.assert_array_equal(found[0], other[0])
    assert jnp.abs(found[1] - other[1]).max() > 0.01


def test_it_stands_in_front_of_the_sum_whatever_is_normed():
    """`x + drop(norm(f(x)))`, and under post-norm `norm(x + drop(f(x)))`."""
    x = jnp.ones((1, 3, 64))
    words = jnp.array([3], jnp.uint32)
    config = DropoutConfig(residual=0.5)
    noise = Noise(words=words, tokens=jnp.arange(3)[None], config=config)
    for norms, told in (("norm_output", {1.0, 1 + 2 * 2.0}), ("norm_sum", {2.0, 2 * (1 + 2.0)})):
        wiring = Wiring(norm_input=False, **{norms: True})
        block = Block({"a": Adding(0.0, "a")}, Doubling, wiring)
        out, _, _ = block(x, Side(noise=noise), LayerState(index=0, row=0))
        assert {float(value) for value in out.ravel()} == told


@pytest.mark.catches("dropout-alike-in-both-stacks")
def test_an_encoder_drops_others_than_the_decoder_behind_it():
    """Their layers have the same numbers."""
    sizes = {"vocab": 16, "embed": 8, "layers": 1, "decoder_layers": 1, "heads": 2, "mlp": 12}
    config = T5Config(**sizes, head_dim=4, dropout=DropoutConfig(embedding=0.5))
    made = maker_of(config)(nnx.Rngs(0))
    seen = []

    def entered(keys):
        given = Noise.of(config.dropout, jax.random.key_data(keys), jnp.ones((ROWS, LENGTH, 8)))
        return np.asarray(given.entering(jnp.ones((ROWS, LENGTH, 8))))

    original = Noise.entering

    def spy(self, x):
        seen.append(np.asarray(original(self, jnp.ones_like(x))))
        return original(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Noise, "entering", spy)
        made.hidden(TOKENS, source=TOKENS, key=KEYS)
    of_encoder, of_decoder = seen
    np.testing.assert_array_equal(of_decoder, entered(KEYS))
    assert not np.array_equal(of_encoder, of_decoder)
    plain = maker_of(dataclasses.replace(config, dropout=DropoutConfig()))(nnx.Rngs(0))
    assert made.draws and not plain.draws


def without(made, sublayer):
    """The model, where what this sublayer adds is nothing."""
    graph, parameters = nnx.split(made)
    plain = nnx.to_pure_dict(parameters)

    def silenced(path, x):
        names = [getattr(key, "key", None) for key in path]
        return 0 * x if sublayer in names and "o" in names else x

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(silenced, plain))


@pytest.mark.catches("dropout-not-of-sources")
def test_attention_to_a_source_drops_too():
    """Seen where no other attention adds anything."""
    sizes = {"vocab": 16, "embed": 8, "layers": 1, "decoder_layers": 1, "heads": 2, "mlp": 12}
    rates = DropoutConfig(attention=0.5)
    made = maker_of(T5Config(**sizes, head_dim=4, init_std=0.5, dropout=rates))(nnx.Rngs(0))
    made = without(made, "attn")
    found, plain = (made.hidden(TOKENS, source=TOKENS, key=key)[0] for key in (KEYS, None))
    assert jnp.abs(found - plain).max() > 0.01
    made = without(made, "cross")
    found, plain = (made.hidden(TOKENS, source=TOKENS, key=key)[0] for key in (KEYS, None))
    np.testing.assert_array_equal(found, plain)


@pytest.mark.catches("dropout-not-of-latents")
def test_latent_attention_drops_too():
    latent = LatentConfig(kv_rank=4, nope_dim=4, rope_dim=2, v_dim=4)
    rates = DropoutConfig(attention=0.5)
    parts = {"latent": latent, "head_dim": 6, "rope": RopeConfig(), "dropout": rates}
    made = model(dataclasses.replace(BARE, **parts))
    assert jnp.abs(made.hidden(TOKENS, key=KEYS)[0] - made.hidden(TOKENS)[0]).max() > 0.01


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"residual": 1.0}, "model.dropout.residual: found 1.0; give 0 or more, below 1"),
        ({"attention": -0.1}, "model.dropout.attention: found -0.1; give 0 or more, below 1"),
        ({"embedding": float("nan")}, "model.dropout.embedding: found nan, which is not finite"),
    ],
)
def test_what_is_no_share_is_refused(rates, message):
    with pytest.raises(InputError, match=message):
        DropoutConfig(**rates)


@pytest.mark.catches("dropout-in-old-runs")
def test_runs_from_before_are_what_they_were():
    """A configuration without dropout says nothing of it, and one with it comes back."""
    plain = LlamaConfig(vocab=16, embed=8, layers=1, heads=2, kv_heads=1, mlp=12)
    assert "dropout" not in config_to_json(plain)
    dropping = dataclasses.replace(plain, dropout=DropoutConfig(residual=0.1))
    told = config_to_json(dropping)
    assert told["dropout"] == {"embedding": 0.0, "residual": 0.1, "attention": 0.0}
    assert config_from_json(told) == dropping
    assert dropping.decoder().dropout == dropping.dropout
    encoder = BERTConfig(vocab=16, embed=8, layers=1, heads=2, mlp=12, dropout=dropping.dropout)
    assert encoder.decoder().dropout == dropping.dropout
