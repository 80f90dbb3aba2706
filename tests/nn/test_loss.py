"""The vocabulary loss against its plain formula, in chunks, on a mesh, and what compiles."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from colossax.nn import cross_entropy
from tests.cases import quick_first

B, S, D, V = 4, 14, 8, 24


def inputs(dtype=jnp.float32, v=V):
    keys = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(keys[0], (B, S, D), dtype)
    head = jax.random.normal(keys[1], (D, v), dtype)
    bias = jax.random.normal(keys[2], (v,), dtype)
    targets = jax.random.randint(keys[3], (B, S), 0, v)
    weights = (jax.random.uniform(keys[4], (B, S)) < 0.7).astype(jnp.float32)
    # What stands at padding is nobody's business.
    targets = jnp.where(weights > 0, targets, -100)
    return hidden, head, bias, targets, weights * 1.5


def plain(hidden, head, bias, targets, weights, soft_cap=None):
    """The formula."""
    logits = hidden.astype(jnp.float32) @ head.astype(jnp.float32)
    logits = logits if bias is None else logits + bias.astype(jnp.float32)
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    label = jnp.clip(targets, 0)
    picked = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    right = jnp.argmax(logits, axis=-1) == label
    terms = (weights * (lse - picked), weights * lse**2, weights, weights * right)
    return tuple(jnp.sum(x) for x in terms)


def combined(f, z):
    """A loss with both terms, and all four sums beside it."""

    def g(hidden, head, bias, targets, weights):
        sums = f(hidden, head, bias, targets, weights)
        return sums[0] / sums[2] + z * sums[1] / sums[2], sums

    return jax.jit(jax.value_and_grad(g, (0, 1, 2), has_aux=True))


def ours(hidden, head, bias, targets, weights, **options):
    return cross_entropy(hidden, head, targets, weights, bias=bias, **options)


def close(found, expected, tolerance=1e-6):
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        f, e = (np.asarray(x, np.float64) for x in (f, e))
        assert np.abs(f - e).max() <= tolerance * max(1.0, np.abs(e).max())


@functools.cache
def expected(z, soft_cap=None, bias=True):
    arrays = inputs()
    arrays = arrays if bias else (*arrays[:2], None, *arrays[3:])
    return combined(functools.partial(plain, soft_cap=soft_cap), z)(*arrays)


@pytest.mark.catches("loss-z-slope")
@pytest.mark.parametrize("chunks", quick_first([1, 2, 3, 7], [1, 3]))
@pytest.mark.parametrize(
    "z, z_loss", [(0.0, False), (0.01, True), (0.01, False)], ids=["no_z", "z", "unannounced_z"]
)
def test_chunks_change_nothing(chunks, z, z_loss):
    found = combined(functools.partial(ours, chunks=chunks, z_loss=z_loss), z)(*inputs())
    close(found, expected(z))


@pytest.mark.catches("loss-cap-slope")
@pytest.mark.parametrize(
    "options",
    [
        {"vocab_sharded": True, "chunks": 3},
        {"batch_shards": 2, "chunks": 3},
        {"batch_shards": 4, "z_loss": True},
        {"soft_cap": 2.0, "chunks": 2},
        {"soft_cap": 2.0, "z_loss": True},
        {"chunks": 14},
    ],
)
def test_options_keep_the_formula(options):
    found = combined(functools.partial(ours, **options), 0.01)(*inputs())
    close(found, expected(0.01, options.get("soft_cap")))


@pytest.mark.catches("loss-of-wrong-guess")
def test_a_guess_is_right_where_no_token_is_likelier():
    """The likeliest of many, though unlikely, is; one that another just beats is not."""
    logits = np.zeros((1, 3, 24), np.float32)
    logits[0, 0, 5] = 0.01
    logits[0, 1, [5, 6]] = 9.0, 9.01
    logits[0, 2, [5, 6]] = 9.0  # alike
    found = cross_entropy(
        jnp.asarray(logits), jnp.eye(24), jnp.full((1, 3), 5), jnp.asarray([[1.0, 2.0, 4.0]])
    )
    assert float(found[3]) == 5.0


def test_without_a_bias():
    hidden, head, _, targets, weights = inputs()
    found = combined(functools.partial(ours, chunks=2), 0.0)(hidden, head, None, targets, weights)
    close(found, expected(0.0, bias=False))


def test_sums_without_differentiation():
    close(jax.jit(functools.partial(ours, chunks=3))(*inputs()), expected(0.01)[0][1])


@pytest.mark.catches("loss-padding-has-gradient")
@pytest.mark.parametrize("z_loss", [False, True])
def test_padding_has_exactly_no_gradient(z_loss):
    arrays = inputs()
    z = 0.01 if z_loss else 0.0
    _, (dhidden, _, _) = combined(functools.partial(ours, chunks=2, z_loss=z_loss), z)(*arrays)
    padding = np.asarray(arrays[-1]) == 0
    assert padding.any()
    assert not np.asarray(dhidden)[padding].any()
    assert np.asarray(dhidden)[~padding].any(axis=-1).all()


def test_weights_are_constants():
    hidden, head, _, targets, weights = inputs()
    gradient = jax.grad(lambda w: cross_entropy(hidden, head, targets, w)[0])(weights)
    assert not gradient.any()


def test_sixteen_bits_accumulate_in_float32():
    """In 14 chunks: a head gradient summed in bfloat16 would lose more than one rounding."""
    wide = inputs()
    narrow = tuple(x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in wide[:3])
    rounded = tuple(x.astype(jnp.float32) for x in narrow)
    (loss, _), gradients = combined(functools.partial(ours, chunks=14), 0.0)(*narrow, *wide[3:])
    (expected_loss, _), expected_gradients = combined(plain, 0.0)(*rounded, *wide[3:])
    assert loss.dtype == jnp.float32
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 3
    close(loss, expected_loss, 1e-5)
    close(gradients, expected_gradients, 5e-3)


def test_bad_numbers_are_refused():
    hidden, head, _, targets, weights = inputs()
    with pytest.raises(ValueError, match="15 chunks of 14 tokens; choose 1 to 14"):
        cross_entropy(hidden, head, targets, weights, chunks=15)
    with pytest.raises(ValueError, match="batch 4 is no multiple of batch_shards 3"):
        cross_entropy(hidden, head, targets, weights, batch_shards=3)


def on_a_mesh(options, arrays, z=0.01):
    """The jitted loss, and inputs laid out: batch over data and fsdp, vocabulary over tensor."""
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=kinds)
    rows = ("data", "fsdp")
    specs = P(rows), P(None, "tensor"), P("tensor"), P(rows), P(rows)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]
    return combined(functools.partial(ours, vocab_sharded=True, **options), z), placed


@pytest.mark.parametrize("options", [{"chunks": 3, "batch_shards": 4}, {"z_loss": True}])
def test_vocabulary_and_batch_split_over_eight_devices(options, devices):
    f, placed = on_a_mesh(options, inputs())
    close(f(*placed), expected(0.01))


def inside_loops(text):
    """Lines of all computations that run inside a loop, from compiled HLO text."""
    blocks = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) .*?\{\n(.*?)^\}", text, re.M | re.S))
    called = {
        name: set(re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.-]+)", body))
        for name, body in blocks.items()
    }
    reached = set(re.findall(r"body=%?([\w.-]+)", text))
    assert reached, "no loop in the program"
    while more := {c for name in reached for c in called.get(name, ())} - reached:
        reached |= more
    return [line for name in reached for line in blocks.get(name, "").splitlines()]


@pytest.mark.parametrize("z_loss", [False, True])
def test_the_loop_moves_neither_head_nor_logits(z_loss, devices):
    """No all-gather in the loop, and only per-token values are reduced in it."""
    wide = 512
    options = {"chunks": 7, "batch_shards": 4, "z_loss": z_loss}
    f, placed = on_a_mesh(options, inputs(v=wide), z=0.01 if z_loss else 0.0)
    lines = inside_loops(f.lower(*placed).compile().as_text())
    assert any(" dot(" in line or "fusion(" in line for line in lines)
    collective = r"= \(?(\w+)\[([\d,]*)\].* (all-gather|all-reduce|reduce-scatter|all-to-all)\("
    found = [m.groups() for line in lines if (m := re.search(collective, line))]
    sizes = {kind: 0 for *_, kind in found}
    for _, shape, kind in found:
        sizes[kind] = max(sizes[kind], int(np.prod([int(n) for n in shape.split(",") if n])))
    # A chunk has B S / 7 / 4 = 2 tokens a device, of D values; the head D * 512 / 2.
    assert set(sizes) == {"all-reduce"}
    assert sizes["all-reduce"] <= 2 * D


def test_inside_shard_map(devices):
    """Manual over the batch: the shared head's gradient is summed over devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(*arrays):
        return tuple(jax.lax.psum(x, "data") for x in ours(*arrays, chunks=3))

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data"), P(), P(), P("data"), P("data")),
        out_specs=P(),
    )
    close(combined(split, 0.01)(*inputs()), expected(0.01))


def test_logits_are_never_whole():
    """Temporary memory falls with the number of chunks; the logits alone would take 64 MiB."""
    b, s, d, v = 2, 2048, 16, 4096
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((b, s, d), jnp.float32),
            ((d, v), jnp.float32),
            ((b, s), jnp.int32),
            ((b, s), jnp.float32),
        )
    ]

    def temporary(**options):
        def total(hidden, head, targets, weights):
            return cross_entropy(hidden, head, targets, weights, **options)[0]

        compiled = jax.jit(jax.grad(total, (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = b * s * v * 4
    assert temporary() >= logits
    for z_loss in (False, True):
        assert temporary(chunks=16, z_loss=z_loss) < 3 * logits / 16
