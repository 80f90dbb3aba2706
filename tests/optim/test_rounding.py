"""Rounding at random: between neighbours, right on average, the same bits however it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from colossax.optim import adamw, applied, rounding_key, stochastic_round, transforms
from colossax.optim.rounding import element_entropy, update_entropy
from colossax.typing import ParamInfo

STANDARD_ERRORS = 5.0


def bits32(*words):
    return jnp.asarray(np.array(words, np.uint32).view(np.float32))


def draws(seed, shape):
    return jax.random.bits(jax.random.key(seed), shape, jnp.uint32)


def neighbours(x):
    """The bfloat16 below and above in magnitude, as float64, and the share of the way between."""
    bits = np.asarray(x).view(np.uint32)
    low = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    high = ((bits & 0xFFFF0000) + 0x10000).view(np.float32).astype(np.float64)
    return low, high, (bits & 0xFFFF) / 2.0**16


def standard_score(found, x):
    """Sum of errors over its standard deviation, each error in units of its own last bit."""
    low, high, share = neighbours(x)
    ups = (np.asarray(found, np.float64) - low) / (high - low)
    return (ups - share).sum() / np.sqrt((share * (1 - share)).sum())


def wide_normals(seed, shape):
    keys = jax.random.split(jax.random.key(seed), 2)
    return jax.random.normal(keys[0], shape) * 2.0 ** jax.random.randint(keys[1], shape, -60, 60)


@pytest.mark.catches("rounding-never-up")
def test_it_is_one_of_the_two_neighbours_and_right_on_average():
    x = wide_normals(0, (1 << 16,))
    found = stochastic_round(x, draws(1, x.shape))
    assert found.dtype == jnp.bfloat16
    low, high, _ = neighbours(x)
    values = np.asarray(found, np.float64)
    assert np.all((values == low) | (values == high))
    assert abs(standard_score(found, x)) < STANDARD_ERRORS


def test_each_share_of_the_way_is_kept():
    """One number many times, so that no error of one place hides one of another."""
    for sixteenths in range(16):
        word = 0x3F800000 + sixteenths * 0x1000
        x = jnp.broadcast_to(bits32(word), (1 << 14,))
        found = np.asarray(stochastic_round(x, draws(sixteenths, x.shape)), np.float64)
        ups = (found > 1.0).mean()
        share = sixteenths / 16
        assert abs(ups - share) <= STANDARD_ERRORS * np.sqrt(share * (1 - share) / x.size)


@pytest.mark.catches("rounding-overflows")
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),
        (0x3FC00000, 0x3FC0),  # held exactly
        (0xBFC00000, 0xBFC0),
        (0x7F7F0000, 0x7F7F),  # the greatest of bfloat16
        (0x7F7FFFFF, 0x7F7F),  # the greatest of float32: no infinity
        (0xFF7FFFFF, 0xFF7F),
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_what_is_held_stays_and_nothing_overflows(word, expected):
    for entropy in (0, 1, 0x8000, 0xFFFF, 0xFFFFFFFF):
        found = stochastic_round(bits32(word), jnp.full((1,), entropy, jnp.uint32))
        assert int(np.asarray(found).view(np.uint16)[0]) == expected


@pytest.mark.parametrize("word", [0x7FC00000, 0x7F800001, 0x7F80FFFF, 0xFF800001])
def test_nan_stays_nan(word):
    for entropy in (0, 0xFFFF):
        assert jnp.isnan(stochastic_round(bits32(word), jnp.full((1,), entropy, jnp.uint32)))[0]


def moments(elements):
    """Second moments as stored, and gradients, each pair another."""
    old = stochastic_round(jnp.square(wide_normals(2, (elements,))), draws(3, (elements,)))
    grad = jax.random.normal(jax.random.key(4), (elements,)) * jnp.sqrt(old.astype(jnp.float32))
    return old, grad


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_a_moment_is_right_on_average_over_elements_and_steps(b2):
    """Over steps, the hash of one element behaves as independent draws: so do the sums of ups."""
    elements, steps = 4096, 256
    old, grad = moments(elements)
    new = b2 * old.astype(jnp.float32) + (1 - b2) * jnp.square(grad)

    @jax.jit
    def rounded(step):
        return stochastic_round(new, update_entropy(old, grad, step))

    found = np.stack([rounded(jnp.int32(step)) for step in range(1, 1 + steps)])
    assert abs(standard_score(found, np.broadcast_to(new, found.shape))) < STANDARD_ERRORS
    low, high, share = neighbours(new)
    sums = ((found.astype(np.float64) - low) / (high - low) - share).sum(0)
    # Numbers almost on a bfloat16 have sums that are far from normal.
    inner = (share > 0.1) & (share < 0.9)
    scores = sums[inner] / np.sqrt(steps * (share * (1 - share))[inner])
    spread = STANDARD_ERRORS * np.sqrt(2 / inner.sum())
    assert abs(np.mean(scores**2) - 1) < spread


@pytest.mark.catches("rounding-ignores-step")
def test_the_optimizer_rounds_each_step_by_other_bits():
    """With b2 = 1/2, v = 1 and g^2 = 1 + 2^-7 the new v lies midway between two bfloat16."""
    old = jnp.ones((), jnp.bfloat16)
    grad = jnp.sqrt(jnp.float32(1 + 2.0**-7))
    optimizer = transforms.scale_by_adam(0.9, 0.5, 1e-8, jnp.float32, jnp.bfloat16)
    start = optimizer.init(old)

    def rounded(count):
        return optimizer.update(grad, start._replace(count=count, nu=old))[1].nu

    ups = jax.vmap(rounded)(jnp.arange(256)) > 1
    assert abs(np.sum(2.0 * np.asarray(ups) - 1)) < STANDARD_ERRORS * np.sqrt(256)


def test_elements_are_rounded_independently_of_their_neighbours():
    """Ups of elements beside each other, in place or in value, are not correlated."""
    old = jnp.ones((1 << 14,), jnp.bfloat16)
    grad = bits32(*(0x30000000 + (i << 16) for i in range(len(old))))
    x = jnp.broadcast_to(bits32(0x3F808000), old.shape)
    for step in (1, 2, 1000):
        found = stochastic_round(x, update_entropy(old, grad, jnp.int32(step)))
        ups = np.asarray(found, np.float64) > 1.0
        signs = 2.0 * ups - 1
        assert abs(signs.sum()) < STANDARD_ERRORS * np.sqrt(len(signs))
        assert abs((signs[1:] * signs[:-1]).sum()) < STANDARD_ERRORS * np.sqrt(len(signs))


def test_a_gradient_added_in_another_order_is_rounded_alike():
    """Of gradients that differ in their last bits, as those of two meshes do, few are not."""
    old, grad = moments(1 << 14)
    other = grad * (1 + 2.0**-22)
    assert np.mean(np.asarray(grad != other)) > 0.9
    same = update_entropy(old, grad, jnp.int32(7)) == update_entropy(old, other, jnp.int32(7))
    assert np.mean(np.asarray(same)) > 0.99


WIDTH, HIDDEN, BATCH, STEPS, BLOCKS = 32, 64, 256, 800, 10
DIMS = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}


def train(b2, second_moment_dtype, seed):
    """Losses, mean of each tenth of the run, and the second moments at its end.

    Gradients fall by an order of magnitude on the way, which a second moment has to follow.
    """
    keys = jax.random.split(jax.random.key(9), 3)
    teacher = jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5
    params = {
        "up": jax.random.normal(keys[1], (WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(keys[2], (HIDDEN, WIDTH)),
    }
    make = adamw(3e-3, b2=b2, weight_decay=0.0, second_moment_dtype=second_moment_dtype)
    optimizer = make(DIMS)

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - x @ teacher))

    def step(carry, key):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, jax.random.normal(key, (BATCH, WIDTH)))
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    batches = jax.random.split(jax.random.key(seed), STEPS)
    start = (params, optimizer.init(params))
    (_, state), losses = jax.jit(lambda: jax.lax.scan(step, start, batches))()
    nu = np.concatenate([np.asarray(v, np.float64).ravel() for v in jax.tree.leaves(state[0].nu)])
    return np.asarray(losses).reshape(BLOCKS, -1).mean(1), nu


def deviation(losses, wanted):
    return np.abs(losses / wanted - 1).max()


@pytest.mark.parametrize("b2", [0.99, 0.999])
def test_training_tracks_a_float32_second_moment(b2, monkeypatch):
    """Closer than other batches of the same data do; rounded to the nearest, it does not.

    The yardstick is what nobody minds: the losses of the same run on another draw of batches.
    """
    losses, nu = train(b2, jnp.float32, 0)
    batches, _ = train(b2, jnp.float32, 1)
    allowed = deviation(batches, losses)
    found, found_nu = train(b2, jnp.bfloat16, 0)
    monkeypatch.setattr(transforms, "stochastic_round", lambda x, _: x.astype(jnp.bfloat16))
    nearest, nearest_nu = train(b2, jnp.bfloat16, 0)
    assert deviation(found, losses) < allowed / 2
    assert deviation(nearest, losses) > 2 * allowed
    ratios = found_nu / nu
    assert abs(ratios.mean() - 1) < STANDARD_ERRORS * ratios.std() / np.sqrt(ratios.size)
    assert (nearest_nu / nu).mean() > 1.1


def info(path="layers/w", layers=3, first=0, shape=(16, 24)):
    """Of a stack's parameter; of one layer where there are no layers."""
    lead = () if layers is None else ("layers",)
    shape = shape if layers is None else (layers, *shape)
    return ParamInfo(
        path=path,
        dims=(*lead, "embed", "mlp"),
        shape=shape,
        dtype=np.dtype("float32"),
        first_layer=first,
        total_layers=8,
    )


def key_of(step=0, seed=0):
    return rounding_key(step, jax.random.key_data(jax.random.key(seed)))


def entropy(of, key=None, **rows):
    shape = of.shape
    return np.asarray(element_entropy(of, shape, key_of() if key is None else key, **rows))


@pytest.mark.catches("rounding-alike-in-all-layers")
@pytest.mark.catches("rounding-by-row-alone")
def test_random_bits_are_of_an_element_whatever_it_is_updated_with():
    whole = entropy(info(layers=6))
    np.testing.assert_array_equal(entropy(info(layers=2, first=3)), whole[3:5])
    one = info(layers=None, first=4)
    np.testing.assert_array_equal(entropy(one), whole[4])
    np.testing.assert_array_equal(entropy(info(layers=None, first=1), row=jnp.int32(3)), whole[4])
    # A layer of each of two stages, of which each has three.
    np.testing.assert_array_equal(entropy(info(layers=2), row=1, stride=3), whole[[1, 4]])
    others = [info(path="layers/v", layers=6), info(layers=6, first=1)]
    drawn = [whole, *map(entropy, others), entropy(info(layers=6), key_of(step=1))]
    drawn += [entropy(info(layers=6), key_of(seed=1)), np.roll(whole, 1, 0)]
    for at, one in enumerate(drawn):
        for other in drawn[:at]:
            assert np.mean((one & 0xFFFF) == (other & 0xFFFF)) < 0.01


@pytest.mark.parametrize("spec", [(None, "a", "b"), ("a", None, "b"), ("b", "a", None)])
def test_random_bits_are_alike_on_every_mesh(spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    of = info(layers=4)
    where = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    make = jax.jit(lambda key: element_entropy(of, of.shape, key), out_shardings=where)
    compiled = make.lower(key_of()).compile()
    np.testing.assert_array_equal(np.asarray(compiled(key_of())), entropy(of))
    assert not any(word in compiled.as_text() for word in ("all-gather", "all-to-all", "permute"))


@pytest.mark.catches("rounding-alike-in-all-steps")
def test_updates_below_the_last_bit_add_up_on_average():
    """A hundred steps of 1/20 of the last bit: five bits, where the nearest stays where it was."""
    of = {"w": info(layers=None, shape=(64, 64))}
    start = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    steps = {"w": jnp.full((64, 64), 2.0**-7 / 20, jnp.float32)}

    def after(rounding):
        def body(at, params):
            return applied(of, params, steps, key_of(at) if rounding else None)

        return np.asarray(jax.lax.fori_loop(0, 100, body, start)["w"], np.float64)

    assert np.all(after(False) == 1.0)
    moved = (after(True) - 1) * 2.0**7
    error = np.sqrt(100 * (1 / 20) * (19 / 20) / moved.size)
    assert abs(moved.mean() - 5) < STANDARD_ERRORS * error
    np.testing.assert_allclose(moved.std(), np.sqrt(100 / 20 * 19 / 20), rtol=0.1)


def test_what_is_not_bfloat16_is_not_rounded_at_random():
    of = {"w": info(layers=None)}
    params, steps = {"w": jnp.ones((16, 24))}, {"w": jnp.full((16, 24), 1e-3)}
    found = applied(of, params, steps, key_of())
    np.testing.assert_array_equal(found["w"], optax.apply_updates(params, steps)["w"])
