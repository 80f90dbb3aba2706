"""Biases by distance: the bucket of each distance, one by one, and that equal ones are shared."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from colossax.errors import InputError
from colossax.nn import RelativeConfig
from colossax.nn.decoder.relative import Buckets, RelativePositions


def bucket(distance, buckets, farthest, causal):
    """Of how far a key is before its query, as the paper says it."""
    first = 0
    if not causal:
        buckets //= 2
        first, distance = (buckets, -distance) if distance < 0 else (0, distance)
    distance, exact = max(distance, 0), buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(farthest / exact)
    return first + min(exact + int(np.float32(share * (buckets - exact))), buckets - 1)


@pytest.mark.catches("keys-behind-as-before")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (12, 30), (64, 1000)])
def test_every_distance_has_its_bucket(buckets, farthest, causal):
    config = RelativeConfig(buckets=buckets, farthest=farthest)
    distances = jnp.arange(-farthest - 5, farthest + 6)
    table = jnp.arange(buckets, dtype=jnp.float32)[None] * jnp.array([[1.0], [-2.0]])
    found = Buckets(config=config, causal=causal)(table, distances)
    want = np.array([bucket(one, buckets, farthest, causal) for one in distances.tolist()])
    assert (found == np.stack([want, -2 * want])).all()


def test_one_function_serves_all_of_a_configuration():
    """Else every call would be traced and compiled anew."""
    config = RelativeConfig(buckets=8, farthest=20)
    one, other = (
        RelativePositions(config, 2, causal=True, rngs=nnx.Rngs(0), std=1.0)() for _ in range(2)
    )
    assert one.fn == other.fn and hash(one.fn) == hash(other.fn)
    assert one.fn != Buckets(config=config, causal=False)


@pytest.mark.parametrize(("buckets", "farthest"), [(6, 20), (32, 8)])
def test_buckets_that_cannot_be_shared_out_are_refused(buckets, farthest):
    with pytest.raises(InputError, match=f"model.relative: {buckets} buckets for 2 sides and dist"):
        RelativeConfig(buckets=buckets, farthest=farthest).of_side(causal=False)
