"""Which values are dropped, from nothing but their places: in plain integers, and as draws go."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.attention import Mask, PairDropout, attention, xla
from colossax.pallas.dropout import dropped, folded
from tests.oracle import assert_trees_close

RATE, BITS = 0.3, 2**32
B, S, N, KV, H = 3, 21, 4, 2, 8
WORDS = (5, 0xDEADBEEF, 77)


def words():
    return jnp.array(WORDS, jnp.uint32)


def hashed(x):
    """`lowbias32` of one integer, as its author wrote it."""
    x ^= x >> 16
    x = x * 0x7FEB352D % BITS
    x ^= x >> 15
    x = x * 0x846CA68B % BITS
    return x ^ x >> 16


def spread(number):
    return hashed((number + 0x9E3779B9) % BITS)


def factor(bits):
    return 1 / (1 - RATE) if bits >= RATE * BITS else 0.0


def of_values(tokens, features):
    """Of each row, token and feature, one after another."""
    return np.array(
        [
            [
                [factor(hashed(hashed(word ^ spread(token)) ^ spread(f))) for f in range(features)]
                for token in row
            ]
            for word, row in zip(WORDS, tokens.tolist(), strict=True)
        ]
    )


def of_pairs(q_places, kv_places):
    """Of each row, head, query and key likewise."""
    found = np.zeros((B, N, len(q_places), len(kv_places)))
    for row, head in itertools.product(range(B), range(N)):
        of_head = hashed(WORDS[row] ^ spread(head))
        for (i, q), (j, k) in itertools.product(enumerate(q_places), enumerate(kv_places)):
            found[row, head, i, j] = factor(hashed(hashed(of_head ^ spread(q)) ^ spread(k)))
    return found


@pytest.mark.catches("dropout-alike-in-all-rows")
@pytest.mark.catches("dropout-by-feature-alone")
def test_values_are_dropped_by_row_token_and_feature():
    tokens = np.stack([np.arange(9), np.arange(9)[::-1], np.arange(9) + 1000])
    x = jax.random.normal(jax.random.key(0), (B, 9, 16))
    found = jax.jit(dropped, static_argnums=3)(x, words(), jnp.asarray(tokens), RATE)
    want = of_values(tokens, 16)
    assert 0 < (want == 0).sum() < want.size
    np.testing.assert_allclose(found, x * want, rtol=1e-6)


@pytest.mark.catches("dropout-keeps-masks")
def test_the_gradient_is_dropped_alike_and_nothing_is_kept_for_it():
    tokens = jnp.broadcast_to(jnp.arange(9), (B, 9))
    x = jax.random.normal(jax.random.key(0), (B, 9, 16))
    out, pull = jax.vjp(lambda x: dropped(x, words(), tokens, RATE), x)
    want = of_values(np.asarray(tokens), 16)
    np.testing.assert_allclose(pull(jnp.ones_like(out))[0], want, rtol=1e-6)
    kept = [x.size for x in jax.tree.leaves(pull)]
    assert max(kept) <= tokens.size, "a mask of the values is kept"


def kept_of(word, shape, rate):
    """Whether values of one row are kept."""
    tokens = jnp.arange(shape[0])[None]
    x = jnp.ones((1, *shape))
    return np.asarray(dropped(x, jnp.array([word], jnp.uint32), tokens, rate))[0] > 0


@pytest.mark.catches("dropout-scale")
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_is_that_of_independent_draws_and_the_mean_stays(rate):
    shape = 512, 256
    x = jnp.ones((1, *shape))
    found = dropped(x, folded(jnp.zeros(1, jnp.uint32), 3), jnp.arange(512)[None], rate)[0]
    kept = np.asarray(found) > 0
    deviation = np.sqrt(rate * (1 - rate))
    for axis in (None, 0, 1):
        count = kept.size if axis is None else kept.shape[axis]
        away = np.abs(kept.mean(axis=axis) - (1 - rate)) * np.sqrt(count) / deviation
        # Of hundreds of means the farthest may be as far as one in a thousand sets of them.
        assert np.max(away) < (4 if axis is None else 5)
    np.testing.assert_allclose(found[kept], 1 / (1 - rate), rtol=1e-6)
    assert abs(float(found.mean()) - 1) < 4 * deviation / (1 - rate) / np.sqrt(kept.size)


def test_places_rows_and_folds_are_dropped_independently():
    """Any two of them agree as often as two coins, and so do neighbours."""
    base = folded(jnp.zeros((), jnp.uint32), 11)
    masks = [kept_of(int(folded(base, number)), (256, 64), 0.5) for number in range(8)]
    whole = masks[0]
    pairs = [*itertools.combinations(masks, 2), (whole[1:], whole[:-1])]
    pairs += [(whole[:, 1:], whole[:, :-1]), (whole, np.roll(whole, 64, axis=0))]
    for one, other in pairs:
        agree = (one == other).mean()
        assert abs(agree - 0.5) < 4.5 * 0.5 / np.sqrt(one.size)


def qkv(lead=(B,), s=S, dtype=jnp.float32):
    shapes = (*lead, s, N, H), (*lead, s, KV, H), (*lead, s, KV, H)
    keys = jax.random.split(jax.random.key(5), 3)
    return [jax.random.normal(key, x, dtype) for key, x in zip(keys, shapes, strict=True)]


def drop(rate=RATE, rows=None):
    return PairDropout.of(rate, words() if rows is None else rows, N)


def written_down(q, k, v, kept):
    """Causal attention in NumPy, its probabilities times `kept`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // KV, axis=2) for x in (k, v))
    logits = np.einsum("bsnh,btnh->bnst", q, k) / np.sqrt(H)
    logits = np.where(np.tril(np.ones((S, S), bool)), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = weights / weights.sum(axis=-1, keepdims=True)
    return np.einsum("bnst,btnh->bsnh", probabilities * kept, v)


@pytest.mark.catches("dropout-of-denominators")
@pytest.mark.catches("dropout-alike-in-all-heads")
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_probabilities_are_dropped_by_row_head_and_both_places(implementation, monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    call = {"mask": Mask(causal=True), "dropout": drop(), "implementation": implementation}
    found, lse = attention(*qkv(), return_lse=True, **call)
    np.testing.assert_allclose(found, written_down(*qkv(), of_pairs(range(S), range(S))), atol=2e-6)
    whole = attention(*qkv(), return_lse=True, **call | {"dropout": None})[1]
    np.testing.assert_allclose(lse, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.catches("dropout-backward")
def test_tiles_have_the_gradients_of_what_is_written_down(monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 8})
    places = jnp.stack([jnp.arange(S) * 2, jnp.arange(S) // 2, jnp.arange(S)])
    mask = Mask(causal=True, window=(15, 0), q_positions=places, kv_positions=places)
    sinks = jax.random.normal(jax.random.key(6), (N,))

    def gradients(implementation):
        def run(arrays, sinks):
            options = {"dropout": drop(), "return_lse": True, "implementation": implementation}
            out, lse = attention(*arrays, mask=mask, sinks=sinks, soft_cap=3.0, **options)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), out

        return jax.jit(jax.grad(run, (0, 1), has_aux=True))(qkv(), sinks)

    assert_trees_close(gradients("xla"), gradients("reference"), tolerance=2e-5)


def test_any_number_of_batch_dims_have_words():
    arrays = qkv((2, B))
    rows = jnp.arange(2 * B, dtype=jnp.uint32).reshape(2, B)
    found = attention(*arrays, mask=Mask(), dropout=drop(rows=rows))
    flat = [x.reshape(2 * B, *x.shape[2:]) for x in arrays]
    want = attention(*flat, mask=Mask(), dropout=drop(rows=rows.reshape(-1)))
    np.testing.assert_array_equal(found, want.reshape(found.shape))


def test_it_is_refused_where_it_does_not_fit_and_where_no_kernel_has_it():
    few = PairDropout.of(RATE, words()[:2], N)
    with pytest.raises(ValueError, match=r"words \(2,\) and heads \(4,\) are not \(3,\) and \(4,"):
        attention(*qkv(), mask=Mask(), dropout=few)
    with pytest.raises(ValueError, match=r"rate 1.0 is no share from 0 to below 1"):
        attention(*qkv(), mask=Mask(), dropout=drop(1.0))
    half = [jnp.zeros((B, 8, N, 64), jnp.bfloat16) for _ in range(3)]
    with pytest.raises(NotImplementedError, match="dropout is not available in the kernels"):
        attention(*half, mask=Mask(), dropout=drop(), implementation="interpret")
