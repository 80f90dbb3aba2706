"""Norms and their gradients against float64, and within everything that differentiates them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from colossax.errors import InputError
from colossax.pallas.norms import layer_norm, reference, rms_norm

NAMES = ("rms_norm", "layer_norm")
OURS = {"rms_norm": rms_norm, "layer_norm": layer_norm}
EPS = 1e-5


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def norm(name, module=None):
    return functools.partial(getattr(module, name) if module else OURS[name], eps=EPS)


def operands(name, shape, dtype="float32", seed=0):
    """x, vectors and dy, drawn anew."""
    draw = np.random.default_rng(seed)
    x, dy = (jnp.asarray(draw.normal(size=shape), dtype) for _ in range(2))
    count = 2 if name == "layer_norm" else 1
    vectors = tuple(jnp.asarray(draw.normal(size=shape[-1:]) + 1, "float32") for _ in range(count))
    return x, *vectors, dy


def truth(name, x, *others):
    """Output and gradients in float64, by the derivative of each row as a matrix."""
    x, *vectors, dy = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, *others))
    d = x.shape[-1]
    centre = np.eye(d) - (1 / d if name == "layer_norm" else 0)
    rows, drows = x.reshape(-1, d), dy.reshape(-1, d)
    out, dx = np.empty_like(rows), np.empty_like(rows)
    dscale = np.zeros(d)
    for i, (row, drow) in enumerate(zip(rows, drows, strict=True)):
        c = centre @ row
        std = np.sqrt(np.mean(c**2) + EPS)
        out[i] = c / std * vectors[0] + (vectors[1] if len(vectors) > 1 else 0)
        jacobian = (np.eye(d) - np.outer(c, c) / (d * std**2)) @ centre / std
        dx[i] = jacobian.T @ (drow * vectors[0])
        dscale += drow * c / std
    gradients = [dx.reshape(x.shape), dscale]
    if name == "layer_norm":
        gradients.append(drows.sum(0))
    return out.reshape(x.shape), gradients


def found(f, x, *others):
    *vectors, dy = others
    out, back = jax.vjp(f, x, *vectors)
    return out, back(dy)


def close(found, expected, rtol=1e-5, atol=1e-5):
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        f, e = (np.asarray(a, np.float64) for a in (f, e))
        assert f.shape == e.shape
        np.testing.assert_allclose(f, e, rtol=rtol, atol=atol * max(1, np.abs(e).max()))


SHAPES = [(7,), (1,), (5, 33), (1, 64), (2, 3, 17), (2, 3, 4, 9)]


@pytest.mark.catches("rms-norm-slope")
@pytest.mark.catches("layer-norm-mean")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(name, shape):
    args = operands(name, shape)
    out, gradients = jax.jit(functools.partial(found, norm(name)))(*args)
    expected = truth(name, *args)
    close((out, list(gradients)), expected, atol=1e-6)
    close((out, gradients), found(norm(name, reference), *args), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name):
    """Float32 inside: the only errors are the roundings of the results."""
    args = operands(name, (4, 6, 40), "bfloat16")
    out, gradients = found(norm(name), *args)
    assert out.dtype == gradients[0].dtype == jnp.bfloat16
    assert all(g.dtype == jnp.float32 for g in gradients[1:])
    expected, (dx, *sums) = truth(name, *args)
    half = 2**-8  # of bfloat16's eight bits
    close((out, gradients[0]), (expected, dx), rtol=half, atol=1e-6)
    close(gradients[1:], sums, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_have_the_dtypes_of_what_they_belong_to(name):
    x, *vectors, dy = operands(name, (3, 8))
    vectors = [v.astype(jnp.float16) for v in vectors]
    out, gradients = found(norm(name), x.astype(jnp.bfloat16), *vectors, dy.astype(jnp.bfloat16))
    assert out.dtype == gradients[0].dtype == jnp.bfloat16
    assert [g.dtype for g in gradients[1:]] == [jnp.float16] * len(vectors)


@pytest.mark.sentinel
@pytest.mark.catches("norm-variance")
def test_large_mean_costs_no_precision():
    """Mean 1000, deviation 1: a variance from mean squares would be wrong in its first digits."""
    x, *others = operands("layer_norm", (8, 256))
    args = (x + 1000.0, *others)
    expected = truth("layer_norm", *args)
    out, gradients = found(norm("layer_norm"), *args)
    # The mean itself is rounded to 1000 * 2**-24 of a deviation.
    close((out, list(gradients)), expected, atol=2e-4)
    close((out, gradients), found(norm("layer_norm", reference), *args), atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_tiny_and_zero_rows(name):
    """Where eps rules."""
    x, *others = operands(name, (3, 16))
    args = (x * jnp.asarray([[0.0], [1e-4], [1.0]]), *others)
    out, gradients = found(norm(name), *args)
    close((out, list(gradients)), truth(name, *args))


@pytest.mark.parametrize("name", NAMES)
def test_under_vmap(name):
    """Over rows, and over vectors of their own: every combination of what is batched."""
    x, *vectors, dy = operands(name, (3, 5, 8))
    many = [jnp.stack([v, v + 1, v * 2]) for v in vectors]
    run = functools.partial(found, norm(name))
    mapped = jax.vmap(run)(x, *many, dy)
    each = [run(x[i], *(v[i] for v in many), dy[i]) for i in range(3)]
    close(mapped, jax.tree.map(lambda *a: jnp.stack(a), *each))
    shared = jax.vmap(run, in_axes=(0, *(None,) * len(vectors), 0))(x, *vectors, dy)
    close(shared[1][0], run(x, *vectors, dy)[1][0])
    only = jax.vmap(run, in_axes=(None, *(0,) * len(vectors), None))(x[0], *many, dy[0])
    close(only[1][0][1], run(x[0], *(v[1] for v in many), dy[0])[1][0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)], ids=["all", "x", "vectors"])
def test_inside_checkpointed_layers_of_a_scan(name, wanted):
    x, *vectors, _ = operands(name, (6, 12))
    stacks = tuple(jnp.stack([v, v * 0.5, v - 1]) for v in vectors)

    def loss(f, x, stacks):
        @jax.checkpoint
        def layer(x, own):
            return x + jnp.sin(f(x, *own)), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, stacks)[0]))

    def gradient(f):
        return jax.jit(jax.value_and_grad(functools.partial(loss, f), wanted))(x, stacks)

    close(gradient(norm(name)), gradient(norm(name, reference)))


@pytest.mark.parametrize("name", NAMES)
def test_output_that_nothing_reads(name):
    x, *vectors, _ = operands(name, (2, 4))

    def loss(x, vectors):
        pair = jax.lax.cond(x[0, 0] > 0, lambda: (norm(name)(x, *vectors), x), lambda: (x, x))
        return jnp.sum(jnp.sin(pair[1]))

    gradients = jax.grad(loss, (0, 1))(x, tuple(vectors))
    close(gradients, (jnp.cos(x), tuple(jnp.zeros_like(v) for v in vectors)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["rows", "width"])
def test_sharded_by_the_compiler(devices, name, split):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    lead, last = (("data", "tensor"), None) if split == "rows" else ("data", "tensor")
    args = operands(name, (8, 6, 16))
    specs = [PartitionSpec(lead, None, last), *[PartitionSpec(last)] * (len(args) - 2)]
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(args, [*specs, specs[0]], strict=True)
    ]
    run = jax.jit(functools.partial(found, norm(name)))
    close(run(*placed), run(*args))


@pytest.mark.parametrize("name", NAMES)
def test_inside_shard_map(devices, name):
    """Vectors are equal on all devices: their gradients sum over rows of all of them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, *vectors, dy = operands(name, (8, 3, 10))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    split = jax.shard_map(
        norm(name), mesh=mesh, in_specs=(rows, *[whole] * len(vectors)), out_specs=rows
    )
    run = jax.jit(functools.partial(found, split))
    close(run(x, *vectors, dy), found(norm(name), x, *vectors, dy))


@pytest.mark.parametrize("name", NAMES)
def test_differentiated_inside_shard_map(devices, name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, *vectors, dy = operands(name, (8, 3, 10))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    split = jax.shard_map(
        functools.partial(found, norm(name)),
        mesh=mesh,
        in_specs=(rows, *[whole] * len(vectors), rows),
        out_specs=(rows, (rows, *[whole] * len(vectors))),
    )
    close(jax.jit(split)(x, *vectors, dy), found(norm(name), x, *vectors, dy))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_used_twice_with_the_input_given_away(name):
    x, *vectors, _ = operands(name, (4, 24))

    def step(x, vectors):
        def loss(x, v):
            return jnp.sum(jnp.sin(norm(name)(x, *v)) + norm(name)(x * 2, *v))

        dx, dv = jax.grad(loss, (0, 1))(x, vectors)
        return x - 0.1 * dx, dv

    donating = jax.jit(step, donate_argnums=0)
    expected = step(*step(x, tuple(vectors)))
    first, given = donating(x + 0, tuple(vectors))
    close(donating(first, given), expected)


@pytest.mark.parametrize("name", NAMES)
def test_what_backward_keeps(name):
    """x as it is, scale, and for LayerNorm 4 bytes per row; nothing wide in float32."""
    x, *vectors, _ = operands(name, (6, 5, 32), "bfloat16")
    _, back = jax.vjp(norm(name), x, *vectors)
    kept = sorted((a.shape, str(a.dtype)) for a in jax.tree.leaves(back) if a.size)
    mean = [((6, 5, 1), "float32")] if name == "layer_norm" else []
    assert kept == sorted([((6, 5, 32), "bfloat16"), ((32,), "float32"), *mean])


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,)], ids=["all", "x", "scale"])
def test_layer_norm_of_which_some_is_frozen(wanted):
    """Both forms of the backward pass: with column sums and without."""
    *args, dy = operands("layer_norm", (9, 21))

    def gradient(f):
        return jax.grad(lambda *a: jnp.sum(f(*a) * dy), wanted)(*args)

    close(gradient(norm("layer_norm")), gradient(norm("layer_norm", reference)))


def test_vectors_of_other_widths_are_refused():
    x = jnp.ones((2, 8))
    with pytest.raises(InputError, match=r"rms_norm: scale has shape \(4,\) beside x of \(2, 8\)"):
        rms_norm.__wrapped__(x, jnp.ones(4), eps=EPS)
    with pytest.raises(InputError, match=r"layer_norm: bias has shape \(1,\) beside .*; give"):
        layer_norm.__wrapped__(x, jnp.ones(8), jnp.ones(1), eps=EPS)
