"""Each token times its own adapter's pair, all in one product: truth by NumPy, costs counted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.errors import InputError
from colossax.nn.adapters.by_token import AdaptedByToken, Turns, seats_turns, turns
from colossax.sharding import Dense, linear
from tests.aot.executed import executed_flops

IN, OUT, RANK = 24, (4, 8), 3


def weight(adapters, rank=RANK, ins=IN, outs=OUT, seed=0):
    noise = np.random.default_rng(seed)

    def drawn(*shape):
        return jnp.asarray(noise.normal(size=shape), jnp.float32)

    dims = ("embed", *(("heads", "head_dim") if len(outs) == 2 else ("mlp",)))
    base = Dense(drawn(ins, *outs), dims)
    scales = tuple(float(x) for x in noise.uniform(0.5, 2, adapters))
    down, up = drawn(ins, adapters, rank), drawn(adapters, rank, *outs)
    return AdaptedByToken(base, down, up, 1, scales)


def by_numpy(one, x, numbers):
    """In float64, token by token."""
    base, down, up = (np.asarray(a, "d") for a in (one.base.w, one.down, one.up))
    found = np.einsum("td,dnh->tnh", x.astype("d"), base)
    for t, number in enumerate(numbers):
        if number:
            pair = np.tensordot(down[:, number - 1], up[number - 1], axes=1)
            found[t] += one.scales[number - 1] * np.einsum("d,dnh->nh", x[t].astype("d"), pair)
    return found


@pytest.mark.catches("ranks-not-apart")
@pytest.mark.catches("chosen-adapters-of-others")
@pytest.mark.catches("adapter-without-its-scale")
@pytest.mark.parametrize("of_seats", [(0, 3, 1, 5, 0), (2, 2, 0), (5, 4), (0,)])
def test_products_are_those_of_each_tokens_pair(of_seats):
    """Of all adapters, or where there are fewer seats of theirs alone."""
    one, noise = weight(5), np.random.default_rng(1)
    seats = noise.integers(0, len(of_seats), 7)
    valid = np.arange(7) != 4
    x = noise.normal(size=(7, IN)).astype(np.float32)

    @jax.jit
    def product(x, of_seats):
        mine = seats_turns(of_seats, 5).of_tokens(jnp.asarray(seats), jnp.asarray(valid))
        with turns(mine):
            return linear(x[None], one)[0]

    numbers = np.where(valid, np.asarray(of_seats)[seats], 0)
    found = product(x, jnp.asarray(of_seats, jnp.int32))
    np.testing.assert_allclose(found, by_numpy(one, x, numbers), rtol=1e-5, atol=1e-4)


def test_what_another_adapter_would_give_is_not_touched():
    """Though it is no number: the other's matrix is too large for this token."""
    one = weight(2)
    wide = dataclasses.replace(one, down=one.down.at[:, 1].set(3e38))
    x = np.ones((1, IN), np.float32)
    with turns(Turns(jnp.asarray([1], jnp.int32))):
        found = np.asarray(linear(jnp.asarray(x), wide))
    np.testing.assert_allclose(found, by_numpy(one, x, [1]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("tokens", "adapters"), [(16, 8), (16, 64), (256, 8), (256, 64)])
def test_flops_are_those_of_the_adapters_that_seats_can_have(tokens, adapters):
    """16 seats: of 64 adapters 16 are multiplied."""
    rank, ins, out, seats = 4, 64, 96, 16
    one = weight(adapters, rank, ins, (out,))

    def product(x, of_seats, own):
        mine = seats_turns(of_seats, adapters)
        with turns(mine.of_tokens(own, own >= 0)):
            return linear(x, one)

    given = (((tokens, ins), "float32"), ((seats,), "int32"), ((tokens,), "int32"))
    shapes = [jax.ShapeDtypeStruct(*shape) for shape in given]
    counted = executed_flops(jax.jit(product).lower(*shapes).compile().as_text())
    used = min(adapters, seats)
    assert counted == 2 * tokens * (ins * out + used * rank * (ins + out))


@pytest.mark.catches("tokens-of-nobody")
def test_what_is_not_multiplied_by_tokens_is_refused():
    one, x = weight(2), jnp.ones((3, IN))
    with pytest.raises(InputError, match="nobody said whose each token is; run the model by infer"):
        linear(x, one)
    with turns(Turns(jnp.zeros(2, jnp.int32))):
        with pytest.raises(InputError, match=r"reads rows \[3\], and the step has 2 tokens, whose"):
            linear(x, one)
    with pytest.raises(InputError, match="a map that is not only multiplied has several beside it"):
        one.gathered()
    with pytest.raises(InputError, match="rows are read of a matrix with adapters; it is none of"):
        one.rows(jnp.zeros((1, 1), jnp.int32))
