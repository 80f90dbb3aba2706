"""What loops and hand-written gradients start with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from colossax.pallas.varying import zeros_after


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_zeros_after_a_value_are_zeros_whatever_it_is(dtype):
    values = jnp.array([0.0, -0.0, 1.5, jnp.inf, -jnp.inf, jnp.nan], dtype)
    zeros = jax.jit(lambda x: zeros_after(x, (6, 2, 3)))(values)
    assert zeros.dtype == jnp.float32
    np.testing.assert_array_equal(zeros, np.zeros((6, 2, 3)))
