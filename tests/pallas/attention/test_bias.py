"""Pair biases in blocks: every form, with everything else, against the slow truth; memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from colossax.pallas.attention import Mask, Operands, attention, xla

B, N, KV_HEADS, S, T, HEAD = 2, 4, 2, 41, 27, 8
FORMS = list(itertools.product((1, B), (1, N), (1, S), (1, T)))
PAIR = [(1, N, S, T), (B, 1, S, 1)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, the last one of queries and of keys not full."""
    monkeypatch.setattr(xla, "TILE", {"cpu": 16})


def drawn(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def arrays(kv_heads=KV_HEADS, dtype=jnp.float32):
    shapes = (B, S, N, HEAD), (B, T, kv_heads, HEAD), (B, T, kv_heads, HEAD)
    return tuple(drawn(i, *x, dtype=dtype) for i, x in enumerate(shapes))


def biases_of(forms, dtype=jnp.float32):
    return tuple(drawn(100 + i, *form, dtype=dtype) for i, form in enumerate(forms))


def segments(length):
    """Two documents and padding, another cut in every row."""
    at = np.arange(length)[None]
    cut = length * np.asarray([[3], [5]]) // 10
    return jnp.asarray(np.where(at >= length - 4, -1, at >= cut), jnp.int32)


MASKS = {
    "all": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(window=(6, 3)),
    "packed": Mask(causal=True, q_segments=segments(S), kv_segments=segments(T)),
    "holes": Mask(kv_valid=drawn(50, B, T) > -0.3),
}
FEATURES = {
    "all": {"soft_cap": 1.5},
    "causal": {"kv_heads": 1},
    "window": {"kv_heads": N, "soft_cap": 2.0},
    "packed": {"soft_cap": 2.0, "learned": ("alibi_slopes", "sinks")},
    "holes": {},
}


@functools.cache
def runner(implementation, soft_cap):
    @jax.jit
    def run(arrays, biases, learned, mask):
        def both(arrays, biases, learned):
            return attention(
                *arrays,
                mask=mask,
                biases=biases,
                soft_cap=soft_cap,
                return_lse=True,
                implementation=implementation,
                **learned,
            )

        (out, lse), pull = jax.vjp(both, arrays, biases, learned)
        dout, dlse = drawn(60, *out.shape), drawn(61, *lse.shape)
        return out, lse, *pull((dout.astype(out.dtype), dlse))

    return run


def both_ways(arrays, biases, mask, soft_cap=None, learned=()):
    """Output, lse, gradients of q, k, v, of biases, of slopes and sinks; blockwise and truth."""
    learned = {name: 0.3 * drawn(70 + i, N) for i, name in enumerate(learned)}
    return [runner(i, soft_cap)(arrays, biases, learned, mask) for i in ("xla", "reference")]


def close(found, expected, tolerance=1e-5):
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert f.shape == e.shape and f.dtype == e.dtype
        f, e = (np.asarray(x, np.float64) for x in (f, e))
        np.testing.assert_array_equal(np.isneginf(f), np.isneginf(e))
        f, e = (np.where(np.isneginf(x), 0, x) for x in (f, e))
        assert np.isfinite(f).all()
        assert np.abs(f - e).max() <= tolerance * max(1.0, np.abs(e).max()), f.shape


def test_every_form_of_bias():
    found, expected = both_ways(arrays(), biases_of(FORMS), Mask(causal=True))
    assert len(found[3]) == 16 and all(jnp.abs(d).max() > 0.1 for d in found[3])
    close(found, expected)


@pytest.mark.parametrize("mask", MASKS)
def test_two_biases_with_every_mask_and_feature(mask):
    features = dict(FEATURES[mask])
    operands = arrays(features.pop("kv_heads", KV_HEADS))
    close(*both_ways(operands, biases_of(PAIR), MASKS[mask], **features))


def test_sixteen_bits():
    """Values and gradients keep the dtype; no sum is made in it."""
    found, _ = both_ways(
        arrays(dtype=jnp.bfloat16), biases_of(FORMS, jnp.bfloat16), Mask(causal=True)
    )
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves((found[0], found[2:])))
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32),
        (arrays(dtype=jnp.bfloat16), biases_of(FORMS, jnp.bfloat16)),
    )
    _, expected = both_ways(*wide, Mask(causal=True))
    close(jax.tree.map(lambda x: x.astype(jnp.float32), found), expected, tolerance=2e-2)


@pytest.mark.parametrize("mask", ["all", "packed"])
def test_minus_infinity_hides(mask):
    """Keys here and there, some of them for a whole document, and all keys of two rows."""
    hidden = np.array(drawn(80, 1, N, S, T) < -0.8)
    hidden[0, :, [5, S - 1]] = True
    places = jnp.where(hidden, -jnp.inf, 0.0)
    columns = jnp.zeros((B, 1, 1, T)).at[1, 0, 0, 3:9].set(-jnp.inf)
    biases = (drawn(81, 1, N, S, T) + places, columns)
    found, expected = both_ways(arrays(), biases, MASKS[mask], soft_cap=2.0)
    close(found, expected)
    out, lse, (dq, _, _), dbiases, _ = found
    assert np.isneginf(lse[:, :, 5]).all() and not np.asarray(out)[:, [5, S - 1]].any()
    assert not np.asarray(dq)[:, [5, S - 1]].any()
    assert not np.asarray(dbiases[0])[hidden].any()
    assert not np.asarray(dbiases[1])[1, 0, 0, 3:9].any()


def test_rows_that_the_mask_empties_have_no_gradient():
    mask = MASKS["packed"]
    padding = np.asarray(mask.q_segments) < 0
    found, _ = both_ways(arrays(), biases_of([(B, N, S, T)]), mask)
    assert not np.asarray(found[3][0]).swapaxes(1, 2)[padding].any()
    assert np.asarray(found[3][0]).swapaxes(1, 2)[~padding].any()


def test_rows_that_fill_the_last_tile_overflow_nowhere():
    """Their log-partition is nobody's: with it, exp(bias) or exp(slope * distance) is infinite."""
    q, k, v = arrays()
    assert S % xla.tiles_of(Operands(q=q, k=k, v=v, mask=Mask())).q_tile
    close(*both_ways(arrays(), (200 + drawn(90, 1, 1, 1, T),), Mask()))

    def loss(slopes):
        out = attention(*arrays(), mask=Mask(), alibi_slopes=slopes, implementation="xla")
        return jnp.sum(jnp.sin(out))

    assert np.isfinite(jax.grad(loss)(-8 * jnp.ones(N))).all()


def test_under_vmap_and_checkpoint_of_a_scan():
    biases = biases_of(PAIR)

    def total(arrays, biases, implementation):
        q, k, v = arrays
        where = jnp.asarray([1.0, 0.5])

        @jax.checkpoint
        def layer(x, scale):
            scaled = [scale * bias for bias in biases]
            options = {"mask": MASKS["packed"], "implementation": implementation}
            return attention(x, k, v, biases=scaled, **options), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, where)[0]))

    gradient = jax.jit(jax.grad(total, (0, 1)), static_argnums=2)
    close(gradient(arrays(), biases, "xla"), gradient(arrays(), biases, "reference"))
    many = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), biases)
    found = jax.vmap(lambda b: gradient(arrays(), b, "xla"))(many)
    one_by_one = [gradient(arrays(), b, "xla") for b in (biases, tuple(0.5 * x for x in biases))]
    close(found, jax.tree.map(lambda *x: jnp.stack(x), *one_by_one))


def test_inside_shard_map(devices):
    """Rows and heads over devices: gradients of what devices share are summed over them."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads = PartitionSpec("data", None, "tensor")
    of_biases = (PartitionSpec(None, "tensor"), PartitionSpec("data"))

    def loss(through, arrays, biases):
        return jnp.sum(jnp.sin(through(arrays, biases)))

    def local(arrays, biases, **options):
        return attention(*arrays, mask=Mask(causal=True), biases=biases, **options)

    split = jax.shard_map(
        local, mesh=mesh, in_specs=((heads,) * 3, of_biases), out_specs=heads, check_vma=True
    )
    alone = functools.partial(local, implementation="reference")
    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, through), (0, 1)))(arrays(), biases_of(PAIR))
        for through in (split, alone)
    )
    close(found, expected)


# ---- memory --------------------------------------------------------------------------------------

LONG = 1024


def temporary_bytes(implementation, forms, asked, s=LONG):
    """Of gradients, those of the first `asked` biases among them."""
    q, kv = (jax.ShapeDtypeStruct((B, s, n, HEAD), jnp.float32) for n in (N, KV_HEADS))
    biases = [jax.ShapeDtypeStruct(form, jnp.float32) for form in forms]

    def total(q, k, v, *biases):
        mask = Mask(causal=True)
        out = attention(q, k, v, mask=mask, biases=biases, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    gradient = jax.jit(jax.grad(total, tuple(range(3 + asked))))
    return gradient.lower(q, kv, kv, *biases).compile().memory_analysis().temp_size_in_bytes


def test_a_bias_costs_its_own_size_and_a_constant_one_nothing(monkeypatch):
    monkeypatch.setattr(xla, "TILE", {"cpu": 64})
    size = 4 * N * LONG**2
    form = (1, N, LONG, LONG)
    without = temporary_bytes("xla", [], 0)
    # The gradient itself is output, made in place.
    assert temporary_bytes("xla", [form], 1) - without < size / 8
    assert temporary_bytes("xla", [form], 0) - without < size / 8
    assert temporary_bytes("xla", [(B, 1, 1, LONG), form], 1) - without < size / 8
    assert temporary_bytes("reference", [form], 1) > 8 * size


def test_lengths_that_tiles_do_not_divide_cost_a_copy(monkeypatch):
    """Of the bias and of its gradient, and no more."""
    monkeypatch.setattr(xla, "TILE", {"cpu": 64})
    s = LONG - 1
    without = temporary_bytes("xla", [], 0, s)
    assert temporary_bytes("xla", [(1, N, s, s)], 1, s) - without < 2.2 * 4 * N * LONG**2
